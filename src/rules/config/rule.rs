//! Reads one entry of `rules`.

use bson::{Bson, Document};

use super::{
    diagnose::{ConfigPath, Mistake},
    keys,
    literal::{malformed, to_bson, to_document},
    reader::{Field, Fields, Reader, list},
    sections::{
        Aggregate, BackfillMode, Collect, Copy, GroupForm, Guard, KeyType, OnDrift, OnEmpty, OnMissing, Pattern,
        Relation, Rule, Side,
    },
    tree::{Node, Value},
};

const KINDS: [&str; 3] = ["copy", "collect", "aggregate"];

pub(super) const MATCH_HINT: &str =
    "`match` says which key of the target equals which key of the source: match: { part_id: _id }";

const SET_HINT: &str = "write set: { name: $name }";

/// A hint with the correct place of a misplaced key of a rule.
fn belongs(key: &str) -> Option<String> {
    if keys::has(keys::RULE, key) {
        return Some(format!("`{key}` belongs to the rule itself, beside `name`"));
    }
    let homes: Vec<_> = [("copy", keys::COPY), ("collect", keys::COLLECT), ("aggregate", keys::AGGREGATE)]
        .iter()
        .filter(|(_, keys)| keys::has(keys, key))
        .map(|(kind, _)| *kind)
        .collect();
    if homes.is_empty() && keys::has(keys::SIDE, key) {
        return Some(format!(
            "`{key}` belongs to a source or a target: source: {{ collection: parts, where: {{ … }} }}"
        ));
    }
    (!homes.is_empty()).then(|| format!("`{key}` belongs to {}", list(&homes)))
}

impl Reader {
    /// Reads a rule; None if a mistake prevents that.
    pub fn rule(&mut self, node: &Node, at: ConfigPath) -> Option<Rule> {
        let fields = self.fields(&Field { at, node }, &keys::names(keys::RULE), belongs)?;
        let name = self.required(&fields, "name", "each rule needs a name of its own").and_then(|f| self.name(&f));
        let pattern = self.pattern(&fields);
        let backfill = fields
            .get("backfill")
            .and_then(|field| self.choice(&field, &[("auto", BackfillMode::Auto), ("manual", BackfillMode::Manual)]));
        let guard = fields.get("guard").and_then(|field| self.guard(&field));
        let on_drift = fields
            .get("on_drift")
            .and_then(|field| self.choice(&field, &[("repair", OnDrift::Repair), ("report", OnDrift::Report)]));
        let allow_scan = fields.get("allow_scan").and_then(|field| self.flag(&field));
        let max_lag = fields.get("max_lag").and_then(|field| self.span(&field));
        let shadow = fields.get("shadow").and_then(|field| self.flag(&field));
        let adopt = fields.get("adopt").and_then(|field| self.flag(&field));
        let (relation, pattern) = pattern?;
        Some(Rule {
            name: name?,
            relation,
            pattern,
            backfill: backfill.unwrap_or_default(),
            guard: guard.unwrap_or_default(),
            on_drift: on_drift.unwrap_or_default(),
            allow_scan: allow_scan.unwrap_or_default(),
            max_lag: max_lag.unwrap_or(Rule::DEFAULT_MAX_LAG),
            shadow: shadow.unwrap_or_default(),
            adopt: adopt.unwrap_or_default(),
        })
    }

    fn guard(&mut self, field: &Field<'_>) -> Option<Guard> {
        // YAML 1.1, and editors that use it, read `off` as a boolean.
        if field.node.value == Value::Bool(false) {
            return Some(Guard::Off);
        }
        self.choice(field, &[("watch", Guard::Watch), ("audit", Guard::Audit), ("off", Guard::Off)])
    }

    fn pattern(&mut self, rule: &Fields<'_>) -> Option<(Relation, Pattern)> {
        let given: Vec<_> = KINDS.into_iter().filter(|kind| rule.raw(kind).is_some()).collect();
        match given.as_slice() {
            [] => {
                let message = format!("the rule does nothing: it needs one of {}", list(&KINDS));
                self.mistake(Mistake::new(rule.at.clone(), message));
            }
            [_] => {}
            [.., last] => {
                let message = format!("a rule is one of {}, this one has {}", list(&KINDS), list(&given));
                let hint = "make a rule of each, with a name of its own";
                self.mistake(Mistake::new(rule.at.key(last), message).on_key().hint(hint));
            }
        }
        let mut patterns = Vec::new();
        for kind in &given {
            let Some(field) = self.required(rule, kind, "it holds `source`, `target` and `match`") else { continue };
            let keys = match *kind {
                "copy" => keys::COPY,
                "collect" => keys::COLLECT,
                _ => keys::AGGREGATE,
            };
            let Some(fields) = self.fields(&field, &keys::names(keys), belongs) else { continue };
            let relation = self.relation(&fields, *kind == "aggregate");
            let pattern = match *kind {
                "copy" => Some(Pattern::Copy(self.copy(&fields))),
                "collect" => self.collect(&fields).map(Pattern::Collect),
                _ => self.aggregate(&fields).map(Pattern::Aggregate),
            };
            patterns.push(relation.zip(pattern));
        }
        patterns.into_iter().next()?
    }

    fn relation(&mut self, fields: &Fields<'_>, has_buckets: bool) -> Option<Relation> {
        let source = self.side(fields, "source");
        let target = self.side(fields, "target");
        let keyed = if has_buckets {
            self.matches_with_buckets(fields)
        } else {
            self.matches(fields).map(|on| (on, Vec::new()))
        };
        let sort = self.sort(fields);
        let key_type = self.key_type(fields);
        let tree = self.tree(fields);
        let touch = fields.get("touch").and_then(|field| self.text(&field));
        let (on, buckets) = keyed?;
        Some(Relation { source: source?, target: target?, on, buckets, sort, key_type, tree, touch })
    }

    fn copy(&mut self, fields: &Fields<'_>) -> Copy {
        self.set_or_into(fields);
        let set = fields.get("set").and_then(|field| self.assignments(&field, SET_HINT));
        let into = fields.get("into").and_then(|field| self.text(&field));
        let element = fields.get("element").map(|field| self.value(&field));
        let on_missing = fields.raw("on_missing").and_then(|field| self.on_missing(&field));
        let otherwise = fields.get("otherwise").and_then(|field| self.assignments(&field, SET_HINT));
        for other in ["once", "on_missing", "into"] {
            if fields.get("otherwise").is_some() && fields.raw(other).is_some() {
                let message = format!("a copy has either `otherwise` or `{other}`, this one has both");
                let hint = "`otherwise` has the values of a target without a source";
                self.mistake(Mistake::new(fields.at.key(other), message).on_key().hint(hint));
            }
        }
        let once = fields.get("once").and_then(|field| self.flag(&field));
        if fields.get("into").is_some() && once == Some(true) {
            let hint = "leave `once` out: the array of `into` follows the references";
            let message = "`once` fills the paths of `set`, and this copy has `into`";
            self.mistake(Mistake::new(fields.at.key("once"), message).on_key().hint(hint));
        }
        if once == Some(true) && fields.raw("on_missing").is_some() {
            let hint = "leave `on_missing` out: a value that is filled in once stays, whatever becomes of its source";
            let message = "`on_missing` follows the source, and this copy has `once`";
            self.mistake(Mistake::new(fields.at.key("on_missing"), message).on_key().hint(hint));
        }
        Copy {
            set: set.unwrap_or_default(),
            into,
            element,
            on_missing: on_missing.unwrap_or_default(),
            otherwise: otherwise.unwrap_or_default(),
            once: once.unwrap_or_default(),
        }
    }

    /// Checks that a copy writes either named paths (`set`) or an array of its own (`into`, with an `element` for each
    /// reference).
    fn set_or_into(&mut self, fields: &Fields<'_>) {
        let has = |key| fields.get(key).is_some();
        let at = &fields.at;
        match (has("set"), has("into"), has("element")) {
            (true, false, false) | (false, true, true) => {}
            (true, true, _) => {
                let mistake = Mistake::new(at.key("into"), "a copy has either `set` or `into`, this one has both");
                self.mistake(mistake.on_key().hint("make a rule of each, with a name of its own"));
            }
            (false, false, false) => {
                let hint = "`set` writes paths of the target, `into` with `element` fills an array of its own";
                self.mistake(Mistake::new(at.clone(), "the copy needs `set` or `into`").hint(hint));
            }
            (false, true, false) => {
                let hint = "`element` is what is put into the array for each reference: element: { id: $_id }";
                self.mistake(Mistake::new(at.key("into"), "`into` needs `element`").on_key().hint(hint));
            }
            (_, false, true) => {
                let hint = "`into` names the target's array";
                self.mistake(Mistake::new(at.key("element"), "`element` needs `into`").on_key().hint(hint));
            }
        }
    }

    fn collect(&mut self, fields: &Fields<'_>) -> Option<Collect> {
        let into = self.required(fields, "into", "`into` names the target's array").and_then(|f| self.text(&f));
        let element = self
            .required(fields, "element", "`element` is what is put into the array: element: $_id")
            .map(|field| self.value(&field));
        let slice = fields.get("slice").and_then(|field| self.slice(&field));
        let on_empty = self.on_empty(fields);
        let max_elements = fields.get("max_elements").and_then(|field| self.count(&field));
        let max_bytes = fields.get("max_bytes").and_then(|field| self.count(&field));
        Some(Collect { into: into?, element: element?, slice, on_empty, max_elements, max_bytes })
    }

    fn aggregate(&mut self, fields: &Fields<'_>) -> Option<Aggregate> {
        let hint = "write let: { voters: { $addToSet: $user } }";
        let variables = fields.get("let").and_then(|field| self.assignments(&field, hint)).unwrap_or_default();
        let hint = "write by: { emoji: $emoji }";
        let by = fields.get("by").and_then(|field| self.assignments(&field, hint)).unwrap_or_default();
        self.groups(fields);
        let into = fields.get("into").and_then(|field| self.text(&field));
        let forms = [("array", GroupForm::Array), ("object", GroupForm::Object)];
        let form = fields.get("as").and_then(|field| self.choice(&field, &forms));
        let set = self
            .required(fields, "set", "`set` names the target's paths: set: { count: { $sum: 1 } }")
            .and_then(|field| self.assignments(&field, SET_HINT));
        let slice = fields.get("slice").and_then(|field| self.slice(&field));
        let on_empty = self.on_empty(fields);
        Some(Aggregate { variables, by, into, form: form.unwrap_or_default(), set: set?, slice, on_empty })
    }

    /// Reads `recursive` and `max_depth`: the greatest number of ancestors, if the rule is recursive.
    fn tree(&mut self, fields: &Fields<'_>) -> Option<usize> {
        let recursive = fields.get("recursive").and_then(|field| self.flag(&field)).unwrap_or_default();
        let depth = fields.get("max_depth");
        if let Some(field) = depth.as_ref().filter(|_| !recursive) {
            let hint = "`max_depth` bounds the trees of a rule that reads its own output: recursive: true";
            self.mistake(Mistake::new(field.at.clone(), "`max_depth` needs `recursive: true`").on_key().hint(hint));
        }
        let given = depth.and_then(|field| Some((self.count(&field)?, field)));
        if let Some((depth, field)) = &given
            && *depth > Rule::DEEPEST as u64
        {
            let message = format!("expected at most {}, found {depth}", Rule::DEEPEST);
            let hint = "each change reads the ancestors of a document one after the other";
            self.mistake(Mistake::new(field.at.clone(), message).hint(hint));
        }
        let depth = given.and_then(|(depth, _)| usize::try_from(depth).ok()).unwrap_or(Rule::DEFAULT_MAX_DEPTH);
        recursive.then_some(depth)
    }

    /// Checks that an aggregate has `by` and `into` together, and no other key of groups without them.
    fn groups(&mut self, fields: &Fields<'_>) {
        if fields.get("by").is_some() {
            if fields.get("into").is_none() {
                let hint = "`into` names the target's array of groups: into: reactions";
                self.mistake(Mistake::new(fields.at.key("by"), "`by` needs `into`").on_key().hint(hint));
            }
            return;
        }
        for key in ["into", "as", "slice"] {
            if fields.get(key).is_some() {
                let hint = "`by` splits the sources into groups: by: { emoji: $emoji }";
                self.mistake(Mistake::new(fields.at.key(key), format!("`{key}` needs `by`")).on_key().hint(hint));
            }
        }
    }

    fn side(&mut self, fields: &Fields<'_>, key: &str) -> Option<Side> {
        let field = self.required(fields, key, "write the collection's name, or { collection, where }")?;
        if let Value::String(_) = field.node.value {
            return Some(Side { collection: self.text(&field)?, filter: None, create: false });
        }
        let Value::Mapping(_) = field.node.value else {
            let message =
                format!("expected a collection's name or a mapping with `collection`, found {}", field.node.kind());
            self.mistake(Mistake::new(field.at, message));
            return None;
        };
        let fields = self.fields(&field, &keys::names(keys::SIDE), |_| None)?;
        let collection =
            self.required(&fields, "collection", "write { collection: …, where: … }").and_then(|f| self.text(&f));
        let filter = fields.get("where").and_then(|field| self.filter(&field));
        let create = fields.get("create").and_then(|field| self.flag(&field));
        Some(Side { collection: collection?, filter, create: create.unwrap_or_default() })
    }

    fn filter(&mut self, field: &Field<'_>) -> Option<Document> {
        self.entries(field)?;
        self.dates(field);
        self.literals(field);
        Some(to_document(field.node))
    }

    /// Reads `match`: target path to source path.
    fn matches(&mut self, fields: &Fields<'_>) -> Option<Vec<(String, String)>> {
        let field = self.required(fields, "match", MATCH_HINT)?;
        let entries = self.filled(&field, MATCH_HINT)?;
        Some(entries.into_iter().filter_map(|(key, entry)| Some((key, self.source_path(&entry)?))).collect())
    }

    pub(super) fn source_path(&mut self, field: &Field<'_>) -> Option<String> {
        if let Value::String(_) = field.node.value {
            return self.text(field);
        }
        let message = format!("expected a path of the source, a string, found {}", field.node.kind());
        self.mistake(dotted_hint(field, Mistake::new(field.at.clone(), message)));
        None
    }

    fn sort(&mut self, fields: &Fields<'_>) -> Vec<(String, i32)> {
        let entries = fields
            .get("sort")
            .and_then(|field| self.filled(&field, "write sort: { due_date: 1 }, or leave it out"))
            .unwrap_or_default();
        entries.into_iter().filter_map(|(key, entry)| Some((key, self.direction(&entry)?))).collect()
    }

    fn direction(&mut self, field: &Field<'_>) -> Option<i32> {
        let found = match field.node.value {
            Value::Int(1) => return Some(1),
            Value::Int(-1) => return Some(-1),
            Value::Int(other) => other.to_string(),
            _ => field.node.kind().to_owned(),
        };
        let message = format!("expected 1 (ascending) or -1 (descending), found {found}");
        self.mistake(dotted_hint(field, Mistake::new(field.at.clone(), message)));
        None
    }

    /// Reads `set`, `let` or `by`: path or name to value.
    fn assignments(&mut self, field: &Field<'_>, hint: &str) -> Option<Vec<(String, Bson)>> {
        let entries = self.filled(field, hint)?;
        Some(entries.into_iter().map(|(key, entry)| (key, self.value(&entry))).collect())
    }

    /// Reads the entries of a mapping that must not be empty.
    pub(super) fn filled<'a>(&mut self, field: &Field<'a>, hint: &str) -> Option<Vec<(String, Field<'a>)>> {
        let entries = match &field.node.value {
            Value::Mapping(entries) if !entries.is_empty() => entries,
            other => {
                let message = match other {
                    Value::Mapping(_) => "the mapping is empty".to_owned(),
                    _ => format!("expected a mapping, found {}", field.node.kind()),
                };
                self.mistake(Mistake::new(field.at.clone(), message).hint(hint));
                return None;
            }
        };
        let fields =
            entries.iter().map(|entry| (entry.key.clone(), Field { at: field.at.key(&entry.key), node: &entry.node }));
        Some(fields.collect())
    }

    fn value(&mut self, field: &Field<'_>) -> Bson {
        self.dates(field);
        to_bson(field.node)
    }

    /// Checks dates in TOML. They become BSON dates, which are instants, so a local date is a mistake.
    pub(super) fn dates(&mut self, field: &Field<'_>) {
        if let Value::Date(text) = &field.node.value
            && bson::DateTime::parse_rfc3339_str(text).is_err()
        {
            let hint = "write it in full, as 2024-01-31T00:00:00Z, or as a string in quotes";
            self.mistake(Mistake::new(field.at.clone(), format!("`{text}` is not an instant")).hint(hint));
        }
        field.parts().for_each(|part| self.dates(&part));
    }

    /// Checks the literals of Extended JSON where no expression can be meant.
    pub(super) fn literals(&mut self, field: &Field<'_>) {
        if let Some(key) = malformed(field.node) {
            let hint = match key {
                "$date" => "a date is written { $date: \"2024-01-31T00:00:00Z\" }",
                "$oid" => "an ObjectId is written { $oid: \"5f5c0d1e2a3b4c5d6e7f8091\" }, with 24 hexadecimal digits",
                "$numberInt" | "$numberLong" | "$numberDouble" | "$numberDecimal" => {
                    "write the number as a string, as the only entry: { $numberLong: \"1\" }"
                }
                _ => "see the canonical form of MongoDB's Extended JSON (v2)",
            };
            let message = format!("the value of `{key}` is malformed");
            self.mistake(Mistake::new(field.at.key(key), message).hint(hint));
            return;
        }
        field.parts().for_each(|part| self.literals(&part));
    }

    fn on_missing(&mut self, field: &Field<'_>) -> Option<OnMissing> {
        // `on_missing: null` without quotes is clear enough.
        if field.node.value == Value::Null {
            return Some(OnMissing::Null);
        }
        self.choice(
            field,
            &[
                ("unset", OnMissing::Unset),
                ("null", OnMissing::Null),
                ("keep", OnMissing::Keep),
                ("remove", OnMissing::Remove),
                ("delete", OnMissing::Delete),
            ],
        )
    }

    fn on_empty(&mut self, fields: &Fields<'_>) -> OnEmpty {
        let words = [("value", OnEmpty::Value), ("unset", OnEmpty::Unset), ("keep", OnEmpty::Keep)];
        fields.get("on_empty").and_then(|field| self.choice(&field, &words)).unwrap_or_default()
    }

    fn key_type(&mut self, fields: &Fields<'_>) -> Option<KeyType> {
        let field = fields.get("key_type")?;
        self.choice(&field, &[("objectId", KeyType::ObjectId), ("string", KeyType::String)])
    }

    fn slice(&mut self, field: &Field<'_>) -> Option<i64> {
        let slice = self.integer(field)?;
        if slice == 0 {
            let hint = "10 keeps the first ten, -10 the last ten";
            self.mistake(Mistake::new(field.at.clone(), "a slice of 0 keeps nothing").hint(hint));
            return None;
        }
        Some(slice)
    }
}

/// Adds a hint for TOML, where `a.b = "c"` is a nested table and only `"a.b" = "c"` is a path.
fn dotted_hint(field: &Field<'_>, mistake: Mistake) -> Mistake {
    match field.node.value {
        Value::Mapping(_) => mistake.hint("a path with dots is one key: put it in quotes (\"a.b\")"),
        _ => mistake,
    }
}
