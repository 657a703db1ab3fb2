//! Compiles the config into a plan.

use std::sync::Arc;

use bson::{Bson, Document, doc};

use crate::{
    config::{self, Config, ConfigPath, GroupForm, KeyType, Mistake, OnEmpty, OnMissing, Pattern},
    plan::{
        bucket::Bucket,
        create,
        expression::{self, Dependencies, OfTarget, Reads, Refusal, Variables},
        graph,
        reference::{self, Pair, Reference, Role},
        rule::{Assignment, Creates, Groups, Keyed, Plan, Rule, RuleId, Side, Values},
        touch,
        tree::Tree,
    },
};
use denormd_model::{
    field_path::{FieldPath, Segment},
    namespace::Namespace,
};

mod recursion;

/// Compiles every rule and checks them against each other.
///
/// `default_database` is the database of bare collection names if the config does not set one (`mongodb.database`): the
/// database of the connection string.
pub fn compile(config: &Config, default_database: Option<&str>) -> Result<Plan, Vec<Mistake>> {
    let database = config.mongodb.database.as_deref().or(default_database);
    let mut mistakes = Vec::new();
    let mut rules = Vec::new();
    for (index, rule) in config.rules.iter().enumerate() {
        let at = ConfigPath::rule(index);
        let (state, of_target) = (config.state.database.as_str(), OfTarget::default());
        let mut compiler = Compiler { at: at.clone(), database, state, mistakes: Vec::new(), of_target };
        match compiler.rule(RuleId(index), rule) {
            Some(rule) if compiler.mistakes.is_empty() => rules.push(Arc::new(rule)),
            _ => mistakes.append(&mut compiler.mistakes),
        }
    }
    if !mistakes.is_empty() {
        return Err(mistakes);
    }
    let mistakes = create::complete(&mut rules);
    if !mistakes.is_empty() {
        return Err(mistakes);
    }
    let (order, feeds, cascades) = graph::order(&mut rules)?;
    Ok(Plan { name: config.name.clone(), rules, order, feeds, cascades })
}

struct Compiler<'a> {
    at: ConfigPath,
    database: Option<&'a str>,
    state: &'a str,
    mistakes: Vec<Mistake>,
    /// The paths of the target that the rule's expressions read.
    of_target: OfTarget,
}

/// Adds the paths of both sides that a rule's reference reads.
fn reference_reads(reference: &Reference, tree: Option<Tree>, source_reads: &mut Reads, target_reads: &mut Reads) {
    for pair in &reference.pairs {
        source_reads.add(pair.source.clone());
        target_reads.add(pair.target.clone());
        for (path, reads) in [(&pair.source, &mut *source_reads), (&pair.target, &mut *target_reads)] {
            if let Some(parent) = path.to_string().strip_suffix("$id") {
                reads.add_text(&format!("{parent}$ref"));
                reads.add_text(&format!("{parent}$db"));
            }
        }
        // A document of a tree whose parent changes has other ancestors.
        if tree.is_some_and(|tree| tree.parent == Role::Source) {
            target_reads.add(pair.source.clone());
        }
    }
}

/// The unit by which a rule is reconciled.
struct Keying {
    keyed: Keyed,
    by_key: bool,
    of_target: Option<OfTarget>,
    touch: Option<FieldPath>,
}

/// The order of a rule's sources. With `by`, `sort` orders the groups, and accumulators read in the order of `_id`.
fn sort_of(rule: &config::Rule) -> &[(String, i32)] {
    match &rule.pattern {
        Pattern::Aggregate(aggregate) if !aggregate.by.is_empty() => &[],
        _ => rule.relation.sort.as_slice(),
    }
}

impl Compiler<'_> {
    fn rule(&mut self, id: RuleId, rule: &config::Rule) -> Option<Rule> {
        let relation = &rule.relation;
        let at = self.at.key(rule.pattern.key());
        let mut source = self.side(&at.key("source"), &relation.source);
        let target = self.side(&at.key("target"), &relation.target);
        self.created(&at, rule, source.as_ref(), target.as_ref());
        let reference = self.reference(&at, relation, source.as_ref(), target.as_ref());
        let sort = sort_of(rule);
        let parent = if matches!(rule.pattern, Pattern::Copy(_)) { Role::Target } else { Role::Source };
        let tree = relation.tree.map(|max_depth| Tree { parent, max_depth });
        let variables = reference.as_ref().map(Reference::variables).unwrap_or_default();
        let (mut source_reads, mut target_reads) = (Reads::default(), Reads::default());
        let here = at.key("source").key("where");
        let filter = source.as_mut().and_then(|side| side.filter.as_mut());
        let [row_filter, pair_filter] =
            filter.map(|filter| self.conditions(&here, filter, variables, &mut source_reads)).unwrap_or_default();
        self.filter_paths(&here, source.as_ref(), &mut source_reads);
        self.filter_paths(&at.key("target").key("where"), target.as_ref(), &mut target_reads);
        self.sort_paths(&at, sort, &mut source_reads);
        let reference = reference?;
        let values = self.values(&at, rule, &reference, &mut source_reads)?;
        let Keying { keyed, by_key, of_target, touch } = self.keying(&at, relation, (&reference, &values), tree)?;
        if let Some(of_target) = &of_target {
            of_target.all().for_each(|path| target_reads.add(path.clone()));
        }
        reference_reads(&reference, tree, &mut source_reads, &mut target_reads);
        let creates = Creates { keeps: values.keeps_when_empty(), ..Creates::default() };
        let mut compiled = Rule {
            id,
            name: rule.name.clone(),
            source: source?,
            target: target?,
            reference,
            keyed,
            by_key,
            values,
            sort: sort.to_vec(),
            row_filter,
            pair_filter,
            of_target,
            tree,
            on_missing: rule.pattern.on_missing(),
            creates: relation.target.create.then_some(creates),
            touch,
            source_reads,
            target_reads,
            backfill: rule.backfill,
            guard: rule.guard,
            on_drift: rule.on_drift,
            allow_scan: rule.allow_scan,
            max_lag: rule.max_lag,
            shadow: rule.shadow,
            adopt: rule.adopt,
            definition: Document::new(),
        };
        compiled.definition = definition(&compiled);
        self.check(&at, &compiled);
        Some(compiled)
    }

    fn keying(
        &mut self,
        at: &ConfigPath,
        relation: &config::Relation,
        (reference, values): (&Reference, &Values),
        tree: Option<Tree>,
    ) -> Option<Keying> {
        let keyed = keyed(at, reference, values).map_err(|mistake| self.mistakes.push(mistake)).ok()?;
        let of_target = std::mem::take(&mut self.of_target);
        // The documents of a tree are reconciled one by one, and several keys of one target are looked up together.
        let together = tree.is_some() || (keyed == Keyed::Target && values.gathers());
        let of_target = Some(of_target).filter(|of_target| !of_target.is_empty() || together);
        let touch = relation.touch.as_ref().and_then(|path| self.path(&at.key("touch"), path));
        if let Some(of_target) = &of_target {
            self.of_target(at, reference, values, of_target);
        }
        let by_key = keyed == Keyed::Value && of_target.is_none();
        let keyed = if touch.is_some() || of_target.is_some() { Keyed::Target } else { keyed };
        Some(Keying { keyed, by_key, of_target, touch })
    }

    /// Refuses combinations without a meaning in a compiled rule.
    fn check(&mut self, at: &ConfigPath, rule: &Rule) {
        self.owned(at, rule);
        for objection in rule.tree.map(|tree| recursion::objections(rule, tree)).unwrap_or_default() {
            self.mistake(at.key(objection.key), objection.message, objection.hint);
        }
        for (key, message, hint) in touch::refusals(rule) {
            self.mistake(at.key(key), message, hint);
        }
    }

    /// Adds the paths that the filter of a side reads.
    fn filter_paths(&mut self, at: &ConfigPath, side: Option<&Side>, reads: &mut Reads) {
        if let Some(filter) = side.and_then(|side| side.filter.as_ref()) {
            let read = expression::filter(filter).map(|source| Dependencies { source, ..Dependencies::default() });
            self.take(at, read, reads);
        }
    }

    /// Adds the paths that a rule sorts its sources by.
    fn sort_paths(&mut self, at: &ConfigPath, sort: &[(String, i32)], source_reads: &mut Reads) {
        for (path, _) in sort {
            match self.path_of_key(&at.key("sort"), path) {
                Some(parsed) if parsed.has_each() => {
                    let message = format!("`{path}`: a sort path cannot run through `$[]`");
                    let here = Mistake::new(at.key("sort").key(path), message).on_key();
                    self.mistakes.push(here.hint("sort by a field of the source document"));
                }
                Some(_) => source_reads.add_text(path),
                None => {}
            }
        }
    }

    fn mistake(&mut self, at: ConfigPath, message: impl Into<String>, hint: impl Into<String>) {
        let hint: String = hint.into();
        let mistake = Mistake::new(at, message);
        self.mistakes.push(if hint.is_empty() { mistake } else { mistake.hint(hint) });
    }

    /// Refuses combinations of `create` and of intervals without a meaning.
    fn created(&mut self, at: &ConfigPath, rule: &config::Rule, source: Option<&Side>, target: Option<&Side>) {
        let config::Rule { relation, pattern, .. } = rule;
        let is_aggregate = matches!(pattern, Pattern::Aggregate(_));
        let here = at.key("target").key("create");
        let is_same = source.zip(target).is_some_and(|(source, target)| source.namespace == target.namespace);
        if relation.target.create && is_aggregate && is_same {
            let message = "the rule would create documents in its own source collection";
            self.mistake(here.clone(), message, "create them in another collection");
        }
        if relation.source.create {
            let message = "a rule creates its targets, never its sources";
            self.mistake(at.key("source").key("create"), message, "write `create: true` in `target`");
        }
        let on_empty = at.key("on_empty");
        if !relation.target.create {
            if let Some((path, _)) = relation.buckets.first() {
                let hint = "write target: { collection: …, create: true }";
                let message = "an interval of time needs `create: true`: it is a part of the `_id` of a document";
                self.mistake(at.key("match").key(path), message, hint);
            }
            let keeps = match pattern {
                Pattern::Copy(_) => false,
                Pattern::Collect(collect) => collect.on_empty == OnEmpty::Keep,
                Pattern::Aggregate(aggregate) => aggregate.on_empty == OnEmpty::Keep,
            };
            if keeps {
                let message = "`on_empty: keep` needs `create: true`: no other rule deletes a target";
                self.mistake(on_empty, message, "use value or unset");
            }
            return;
        }
        if !is_aggregate {
            let hint = "an aggregate has one document for each key: aggregate: { …, set: { n: { $sum: 1 } } }";
            self.mistake(here, format!("`create` belongs to `aggregate`, not to `{}`", pattern.key()), hint);
            return;
        }
        if relation.target.filter.is_some() {
            let message = "`where` cannot choose among documents that the rule creates";
            self.mistake(at.key("target").key("where"), message, "filter the sources: source: { collection, where }");
        }
        if relation.key_type.is_some() {
            let message = "`key_type` converts the target's values, and here they come from the source";
            self.mistake(at.key("key_type"), message, "leave it out: the `_id` has the type of the source's value");
        }
    }

    fn side(&mut self, at: &ConfigPath, side: &config::Side) -> Option<Side> {
        let (database, collection) = match side.collection.split_once('.') {
            Some((database, collection)) => (database, collection),
            None => match self.database {
                Some(database) => (database, side.collection.as_str()),
                None => {
                    self.mistake(
                        at.clone(),
                        format!("no database is known for the collection `{}`", side.collection),
                        "set mongodb.database, or write database.collection",
                    );
                    return None;
                }
            },
        };
        if matches!(database, "admin" | "local" | "config")
            || database == self.state
            || collection.starts_with("system.")
        {
            self.mistake(at.clone(), format!("`{database}.{collection}` is not a collection that rules can use"), "");
            return None;
        }
        if database.is_empty() || collection.is_empty() || collection.contains('$') {
            self.mistake(
                at.clone(),
                format!("`{}` is not a collection's name", side.collection),
                "write parts, or shop.parts",
            );
            return None;
        }
        let namespace = Namespace { database: database.to_owned(), collection: collection.to_owned() };
        Some(Side { namespace, filter: side.filter.clone() })
    }

    fn path(&mut self, at: &ConfigPath, text: &str) -> Option<FieldPath> {
        self.path_at(Mistake::new(at.clone(), ""), text)
    }

    /// The path that a key of a mapping is.
    fn path_of_key(&mut self, mapping: &ConfigPath, text: &str) -> Option<FieldPath> {
        self.path_at(Mistake::new(mapping.key(text), "").on_key(), text)
    }

    fn path_at(&mut self, at: Mistake, text: &str) -> Option<FieldPath> {
        let error = match FieldPath::parse_written(text) {
            Ok(path) => return Some(path),
            Err(error) => error,
        };
        let hint = if text.starts_with('$') {
            Some(format!("a path has no leading `$`: {}", text.trim_start_matches('$')))
        } else {
            FieldPath::probably_meant(text).map(|meant| format!("did you mean `{meant}`?"))
        };
        let message = format!("`{text}` is not a path: {error}");
        self.mistakes.push(Mistake { message, hint, ..at });
        None
    }

    fn take(&mut self, at: &ConfigPath, result: Result<Dependencies, Refusal>, reads: &mut Reads) {
        match result {
            Ok(found) => {
                reads.extend(found.source);
                self.of_target.extend(found.target);
            }
            Err(refusal) => self.mistake(at.clone(), refusal.message, refusal.hint.unwrap_or_default()),
        }
    }

    fn reference(
        &mut self,
        at: &ConfigPath,
        relation: &config::Relation,
        source: Option<&Side>,
        target: Option<&Side>,
    ) -> Option<Reference> {
        let at = at.key("match");
        let mut pairs = Vec::new();
        for (target, source) in &relation.on {
            let here = at.key(target);
            let target = self.path_of_key(&at, target);
            let source = self.path(&here, source);
            if let (Some(target), Some(source)) = (target, source) {
                let text = target.to_string();
                let arguments = relation.buckets.iter().find(|(path, _)| *path == text).map(|(_, arguments)| arguments);
                let bucket = arguments.map(|arguments| Bucket { arguments: arguments.clone() });
                pairs.push(Pair { target, source, bucket });
            }
        }
        if pairs.len() < relation.on.len() || pairs.is_empty() {
            return None;
        }
        if relation.target.create
            && let Some((entry, message, hint)) = create::mistake_in_match(&pairs)
        {
            self.mistake(at.key(&entry), message, hint);
            return None;
        }
        let target_each = self.each(&at, pairs.iter().map(|p| &p.target))?;
        let source_each = self.each(&at, pairs.iter().map(|p| &p.source))?;
        let name = |side: &Side| (side.namespace.collection.clone(), side.namespace.database.clone());
        Some(Reference {
            pairs,
            target_each,
            source_each,
            key_type: relation.key_type,
            source_name: name(source?),
            target_name: name(target?),
            creates: relation.target.create,
        })
    }

    /// The array that the paths of one side run through: one or none.
    #[expect(clippy::option_option, reason = "outer: is it right; inner: is there one")]
    fn each<'p>(&mut self, at: &ConfigPath, paths: impl Iterator<Item = &'p FieldPath>) -> Option<Option<FieldPath>> {
        let mut found: Option<FieldPath> = None;
        for prefix in paths.filter_map(FieldPath::array_prefix) {
            match &found {
                Some(other) if *other != prefix => {
                    let message = format!("`{other}` and `{prefix}` are different arrays, and `match` can bind one");
                    self.mistake(at.clone(), message, "make two rules");
                    return None;
                }
                _ => found = Some(prefix),
            }
        }
        Some(found)
    }

    fn values(
        &mut self,
        at: &ConfigPath,
        rule: &config::Rule,
        reference: &Reference,
        reads: &mut Reads,
    ) -> Option<Values> {
        let each = reference.variables();
        match &rule.pattern {
            Pattern::Copy(copy) => match (&copy.into, &copy.element) {
                (Some(into), Some(element)) => {
                    self.take(&at.key("element"), expression::expression(element, each), reads);
                    Some(Values::Into { path: self.plain(&at.key("into"), into)?, element: element.clone() })
                }
                _ => Some(Values::Set {
                    assignments: self.assignments(at, &copy.set, |value| expression::expression(value, each), reads)?,
                    once: copy.once,
                    otherwise: self.otherwise(at, copy, each)?,
                }),
            },
            Pattern::Collect(collect) => {
                self.take(&at.key("element"), expression::expression(&collect.element, each), reads);
                let path = self.path(&at.key("into"), &collect.into)?;
                Some(Values::Collect {
                    child: child(&path, &collect.element),
                    path,
                    element: collect.element.clone(),
                    slice: collect.slice,
                    on_empty: collect.on_empty,
                    max_elements: collect.max_elements,
                    max_bytes: collect.max_bytes,
                })
            }
            Pattern::Aggregate(aggregate) if !aggregate.by.is_empty() => {
                self.groups(at, aggregate, &rule.relation.sort, each, reads).map(Values::Groups)
            }
            Pattern::Aggregate(aggregate) => Some(Values::Aggregate {
                assignments: self.accumulated(at, aggregate, each, reads)?,
                on_empty: aggregate.on_empty,
            }),
        }
    }

    /// The expressions of `otherwise` in the order of `set`.
    #[expect(clippy::option_option, reason = "outer: is it right; inner: is there one")]
    fn otherwise(
        &mut self,
        at: &ConfigPath,
        copy: &config::Copy,
        variables: Variables<'_>,
    ) -> Option<Option<Vec<Option<Bson>>>> {
        let mistakes = self.mistakes.len();
        for (path, value) in &copy.otherwise {
            let here = at.key("otherwise").key(path);
            if !copy.set.iter().any(|(known, _)| known == path) {
                let message = format!("`{path}` is not a path of `set`");
                let hint = "`otherwise` has other values for the paths of `set`";
                self.mistakes.push(Mistake::new(here.clone(), message).on_key().hint(hint));
            }
            // There is no source, so no element of one.
            let message = match expression::expression(value, Variables { element: None, ..variables }) {
                Ok(found) if found.source == Reads::Nothing => {
                    self.of_target.extend(found.target);
                    continue;
                }
                Ok(_) => "`otherwise` has no source to read from".to_owned(),
                Err(refusal) => refusal.message,
            };
            let hint = "write a constant, otherwise: { name: unknown }, or read the target: $$target.name";
            self.mistake(here, message, hint);
        }
        if self.mistakes.len() > mistakes {
            return None;
        }
        let value =
            |path: &String| copy.otherwise.iter().find(|(known, _)| known == path).map(|(_, value)| value.clone());
        Some((!copy.otherwise.is_empty()).then(|| copy.set.iter().map(|(path, _)| value(path)).collect()))
    }

    /// Compiles the groups of an `aggregate` with `by`.
    fn groups(
        &mut self,
        at: &ConfigPath,
        aggregate: &config::Aggregate,
        sort: &[(String, i32)],
        each: Variables<'_>,
        reads: &mut Reads,
    ) -> Option<Groups> {
        let fields = self.accumulated(at, aggregate, each, reads)?;
        for (name, value) in &aggregate.by {
            self.take(&at.key("by").key(name), expression::expression(value, each), reads);
        }
        let names = |key: &'static str, entries: &[(String, Bson)]| {
            entries.iter().map(|(name, _)| (at.key(key).key(name), name.clone())).collect::<Vec<_>>()
        };
        let mut known: Vec<String> = Vec::new();
        for (here, name) in names("by", &aggregate.by).into_iter().chain(names("set", &aggregate.set)) {
            if name.is_empty() || name.contains(['.', '$']) {
                let hint = "a group's field has a plain name: count";
                self.mistake(here, format!("`{name}` cannot be a group's field"), hint);
            } else if known.contains(&name) {
                self.mistake(here, format!("`{name}` is a field of `by` and of `set`"), "choose another name");
            } else {
                known.push(name);
            }
        }
        for (path, _) in sort {
            let root = path.split('.').next().unwrap_or_default();
            if !known.iter().any(|name| name == root) {
                let hint = format!("the groups have {}", known.join(", "));
                self.mistake(at.key("sort").key(path), format!("the groups have no field `{path}` to sort by"), hint);
            }
        }
        let object = aggregate.form == GroupForm::Object;
        if object && aggregate.by.len() > 1 {
            let hint = "keep one field of `by`, or leave `as` out";
            self.mistake(at.key("as"), "an object of groups needs one name for each group", hint);
        }
        let path = self.path(&at.key("into"), aggregate.into.as_deref().unwrap_or_default())?;
        Some(Groups {
            path,
            by: aggregate.by.clone(),
            fields,
            sort: sort.to_vec(),
            slice: aggregate.slice,
            form: aggregate.form,
            on_empty: aggregate.on_empty,
        })
    }

    /// Binds the variables of `let` in each expression that uses them.
    fn accumulated(
        &mut self,
        at: &ConfigPath,
        aggregate: &config::Aggregate,
        each: Variables<'_>,
        reads: &mut Reads,
    ) -> Option<Vec<Assignment>> {
        let variables = &aggregate.variables;
        let names: Vec<&str> = variables.iter().map(|(name, _)| name.as_str()).collect();
        for (name, accumulator) in variables {
            let here = at.key("let").key(name);
            if !is_variable(name) {
                let hint = "a lower-case letter, then letters, digits and `_`: voters, total_2; not element, target";
                self.mistake(here.clone(), format!("`{name}` cannot be a variable's name"), hint);
            }
            self.take(&here, expression::accumulator(accumulator, each), reads);
            if !aggregate.set.iter().any(|(_, value)| expression::mentions(value, name)) {
                let hint = format!("use `$${name}` in an expression of `set`, or remove it");
                self.mistake(here, format!("the variable `{name}` is not used"), hint);
            }
        }
        let is_expression = |value: &Bson| names.iter().any(|name| expression::mentions(value, name));
        let read = |value: &Bson| expression::accumulated(value, &names, each);
        let mut assignments = self.assignments(at, &aggregate.set, read, reads)?;
        for assignment in assignments.iter_mut().filter(|assignment| is_expression(&assignment.expression)) {
            let value = assignment.expression.clone();
            let used = variables.iter().filter(|(name, _)| expression::mentions(&value, name));
            let bound: Document = used.cloned().collect();
            assignment.expression = doc! {"$let": {"vars": bound, "in": value}}.into();
        }
        Some(assignments)
    }

    fn plain(&mut self, at: &ConfigPath, text: &str) -> Option<FieldPath> {
        let path = self.path(at, text)?;
        if path.has_each() {
            self.mistake(
                at.clone(),
                format!("`{text}`: the array that `into` fills cannot lie inside another array"),
                "",
            );
            return None;
        }
        Some(path)
    }

    fn assignments(
        &mut self,
        at: &ConfigPath,
        set: &[(String, Bson)],
        read: impl Fn(&Bson) -> Result<Dependencies, Refusal>,
        reads: &mut Reads,
    ) -> Option<Vec<Assignment>> {
        let mut out = Vec::new();
        for (path, value) in set {
            let here = at.key("set").key(path);
            self.take(&here, read(value), reads);
            if let Some(path) = self.path_of_key(&at.key("set"), path) {
                out.push(Assignment { path, expression: value.clone() });
            }
        }
        (out.len() == set.len()).then_some(out)
    }

    /// Takes the conditions on `$$element` and on `$$target` out of the source's `where`: the first applies to
    /// elements, the second to a source and a target, and neither to a source alone.
    fn conditions(
        &mut self,
        at: &ConfigPath,
        filter: &mut Document,
        variables: Variables<'_>,
        reads: &mut Reads,
    ) -> [Option<Bson>; 2] {
        let Some(condition) = filter.get("$expr").cloned() else { return [None, None] };
        let read = expression::expression(&condition, variables);
        let of_element = match &read {
            Ok(found) => found.element,
            Err(_) => expression::mentions(&condition, "element"),
        };
        // A mistake in another condition is found with the rest of the filter.
        let of_target = match &read {
            Ok(found) => !found.target.is_empty(),
            Err(_) => ["target", "targetElement"].iter().any(|name| expression::mentions(&condition, name)),
        };
        if !of_element && !of_target {
            return [None, None];
        }
        filter.remove("$expr");
        self.take(at, read, reads);
        if of_element { [Some(condition), None] } else { [None, Some(condition)] }
    }

    /// Refuses combinations of `$$target` without a meaning.
    fn of_target(&mut self, at: &ConfigPath, reference: &Reference, values: &Values, of_target: &OfTarget) {
        // The values of a tree depend on the target too, without these variables; `recursive` has objections of its own.
        let reads = !of_target.is_empty();
        if reads && reference.creates {
            let message = "the rule creates its targets, and their values cannot be computed from them";
            self.mistake(at.clone(), message, "leave `$$target` out, or leave `create` out");
        }
        if reads && matches!(values, Values::Set { once: true, .. }) {
            let hint = "leave `once` out: the value follows the paths of the target that it reads";
            self.mistake(
                at.key("once"),
                "`once` fills a value and keeps it, and `$$target` asks for another one",
                hint,
            );
        }
        let Some(each) = &reference.target_each else { return };
        let owned = values.paths();
        let inside = owned.iter().any(|path| path.has_each());
        if inside && !owned.iter().all(|path| path.has_each()) {
            let message = format!(
                "`$$target` gives each element of `{each}` a value of its own, and some paths lie beside the array"
            );
            self.mistake(at.key("set"), message, "make two rules, one for the elements and one for the other paths");
        }
        if !of_target.elements.is_empty() && !inside && !matches!(values, Values::Into { .. }) {
            let message = format!(
                "`$$targetElement` is one element of `{each}`, and a path beside the array has a value for all of them"
            );
            self.mistake(at.key("set"), message, "set a path of the element, or read the array: $$target.lines");
        }
        if (inside || !of_target.elements.is_empty()) && each.to_string().matches("$[]").count() > 1 {
            let message =
                format!("`{each}` is an array inside another array, whose elements cannot have values of their own");
            self.mistake(at.clone(), message, "leave `$$target` and `$$targetElement` out");
        }
    }

    /// Refuses paths that no rule may own.
    fn owned(&mut self, at: &ConfigPath, rule: &Rule) {
        let owned: Vec<FieldPath> = rule.owned().into_iter().cloned().collect();
        for (nth, path) in owned.iter().enumerate() {
            let mut refuse = |message: String, hint| {
                self.mistakes.push(Mistake { message, ..rule.values.written_at(at, path) }.hint(hint));
            };
            if path.root() == "_id" {
                refuse("`_id` cannot be written".to_owned(), "choose another field");
            }
            if owned[..nth].iter().any(|other| other.overlaps_loosely(path)) {
                refuse(
                    format!("`{path}` is owned twice"),
                    "two owned paths cannot be equal, and neither may contain the other",
                );
            }
            let computed_from = rule.of_target.iter().flat_map(OfTarget::all).any(|read| read.overlaps_loosely(path));
            if computed_from {
                let message = format!("the rule writes `{path}` and reads it with `$$target`");
                refuse(message, "a rule reads any path of its target but those that it writes");
            } else if rule.target_reads.overlap(path) {
                let message = format!("the rule writes `{path}` and reads it to find its source");
                refuse(message, "a rule's result cannot decide what it refers to");
            }
        }
        let nested =
            rule.reference.target_each.as_ref().is_some_and(|each| each.to_string().matches("$[]").count() > 1);
        let dbref = rule.reference.pairs.iter().any(|pair| reference::dbref_parent(&pair.target).is_some());
        if rule.on_missing == OnMissing::Remove && nested && dbref {
            let message = "`remove` cannot take DBRefs out of an array inside another array";
            self.mistake(at.key("on_missing"), message, "use unset, null or keep");
        }
        let policy = match rule.on_missing {
            OnMissing::Remove if !rule.by_key || rule.reference.target_each.is_none() => "remove",
            OnMissing::Delete if !rule.by_key || rule.reference.target_each.is_some() => "delete",
            _ => return,
        };
        if rule.of_target.is_some() {
            let message =
                format!("`{policy}` depends on the reference alone, and this rule's values depend on `$$target`");
            self.mistake(at.key("on_missing"), message, "use unset, null or keep, or values in `otherwise`");
            return;
        }
        let hint = if policy == "remove" {
            "it pulls the array element that holds the reference"
        } else {
            "it deletes a target whose one reference dangles"
        };
        self.mistake(at.key("on_missing"), format!("`{policy}` has no meaning for this form of reference"), hint);
    }
}

/// The kind of key of a reconcile. The error is a combination without a meaning.
fn keyed(at: &ConfigPath, reference: &Reference, values: &Values) -> Result<Keyed, Mistake> {
    let paths = values.paths();
    let inside = paths.iter().filter(|path| path.has_each()).count();
    let Some(each) = &reference.target_each else {
        if matches!(values, Values::Into { .. }) {
            let message = "`into` makes one element for each reference, and `match` names no array of the target";
            let hint = "write match: { \"parts.$[]\": _id }; to gather documents that refer to the target, use collect";
            return Err(Mistake::new(at.key("into"), message).hint(hint));
        }
        if let Some(path) = paths.iter().find(|path| path.has_each()) {
            let message = format!("`{path}` runs through an array that `match` does not bind");
            let mistake = Mistake { message, ..values.written_at(at, path) };
            return Err(mistake.hint("`$[]` in a set path needs the same prefix in `match`"));
        }
        return Ok(Keyed::Value);
    };
    if matches!(values, Values::Into { .. }) {
        return Ok(Keyed::Target);
    }
    let is_elsewhere =
        |path: &FieldPath| path.has_each() && path.below(each).is_none_or(|rest| rest.contains(&Segment::Each));
    if let Some(path) = paths.iter().find(|path| is_elsewhere(path)) {
        let message = format!("`{path}` does not lie in `{each}`, the array that `match` binds");
        return Err(Mistake { message, ..values.written_at(at, path) });
    }
    if inside > 0 && reference.pairs.iter().any(|pair| pair.target == *each) {
        let hint = "the elements are the ids themselves: use `into` and `element`, or make them subdocuments";
        return Err(Mistake::new(at.key("match"), format!("the elements of `{each}` have no fields to set")).hint(hint));
    }
    if inside == paths.len() {
        return Ok(Keyed::Value);
    }
    beside_the_array(at, reference, values, each, inside > 0)
}

/// The kind of key of a rule with paths beside the array that holds its references. `has_inside` is true if other paths
/// lie in the array.
fn beside_the_array(
    at: &ConfigPath,
    reference: &Reference,
    values: &Values,
    each: &FieldPath,
    has_inside: bool,
) -> Result<Keyed, Mistake> {
    match values {
        Values::Aggregate { .. } if has_inside => {
            let message =
                "some paths lie in the matched element, and those beside the array would belong to all its elements";
            Err(Mistake::new(at.key("set"), message).hint("make two rules"))
        }
        Values::Set { once: false, .. } => Ok(Keyed::Target),
        Values::Set { .. } => {
            let message = "`once` needs paths in the matched element, or a reference that is no array";
            Err(Mistake::new(at.key("once"), message).hint("leave `once` out, or set paths of the element"))
        }
        // The target's array is a set of keys, and the rows are the elements of the source's.
        _ if reference.source_each.is_some() => Ok(Keyed::Target),
        _ => {
            let message = format!("`{each}` holds several references, and the result would belong to all of them");
            Err(Mistake::new(at.key("match"), message).hint("match on one field of the target"))
        }
    }
}

/// True if an expression can bind a variable of this name, and the daemon binds none of that name itself
/// (<https://www.mongodb.com/docs/v6.0/reference/aggregation-variables/#user-variables>).
fn is_variable(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && !["element", "target", "targetElement"].contains(&name)
}

/// Path of the source's `_id` in the target: the element itself, or one of its fields.
fn child(into: &FieldPath, element: &Bson) -> Option<FieldPath> {
    let id = Bson::from("$_id");
    if *element == id {
        return Some(into.clone());
    }
    let (name, _) = element.as_document()?.iter().find(|(name, value)| **value == id && !name.starts_with('$'))?;
    FieldPath::parse(&format!("{into}.{name}")).ok()
}

impl Rule {
    /// Demands of one side that a path, and each path above it, is no array.
    pub(super) fn demand_no_array(&mut self, role: Role, path: &str) {
        // The documents of a tree are its sources and its targets alike.
        if self.tree.is_some() && role == Role::Source {
            self.demand_no_array(Role::Target, path);
            self.source.filter.clone_from(&self.target.filter);
            return;
        }
        let side = if role == Role::Source { &mut self.source } else { &mut self.target };
        let mut clauses: Vec<Document> = side.filter.take().into_iter().collect();
        clauses.extend(graph::outer_paths(path).map(|path| doc! {path: graph::no_array()}));
        side.filter = Some(doc! {"$and": clauses});
        if self.tree.is_some() {
            self.source.filter.clone_from(&self.target.filter);
        }
        self.definition = definition(self);
    }
}

/// An earlier definition of a rule with the sources and targets of the present one, if these are the same but for arrays that
/// [`Rule::demand_no_array`] has excluded since: what was written to the others counts as before.
#[must_use]
pub fn narrowed(earlier: &Document, now: &Document) -> Document {
    let mut narrowed = earlier.clone();
    for name in ["source", "target"] {
        let (Ok(before), Ok(side)) = (earlier.get_document(name), now.get_document(name)) else { continue };
        let (mut demanded, mut demands) = (Vec::new(), Vec::new());
        let [before, side_now] = [undemanded(before, &mut demanded), undemanded(side, &mut demands)];
        if before == side_now && demanded.iter().all(|path| demands.contains(path)) {
            narrowed.insert(name, side.clone());
        }
    }
    narrowed
}

/// One side of a definition without the conditions that a path is no array. Their paths are added to `demanded`.
fn undemanded(side: &Document, demanded: &mut Vec<String>) -> Document {
    fn without(filter: &Document, demanded: &mut Vec<String>) -> Option<Document> {
        let clauses = match (filter.len(), filter.get_array("$and")) {
            (1, Ok(clauses)) => clauses,
            (1, _) => {
                let (path, condition) = filter.iter().next()?;
                if condition.as_document() == Some(&graph::no_array()) {
                    demanded.push(path.clone());
                    return None;
                }
                return Some(filter.clone());
            }
            _ => return Some(filter.clone()),
        };
        let mut rest: Vec<Document> =
            clauses.iter().filter_map(Bson::as_document).filter_map(|clause| without(clause, demanded)).collect();
        if rest.len() < 2 { rest.pop() } else { Some(doc! {"$and": rest}) }
    }
    let filter = side.get_document("where").ok().and_then(|filter| without(filter, demanded));
    doc! {"collection": side.get("collection").cloned(), "where": filter}
}

/// All properties of a rule that affect the written values, as one document.
fn definition(rule: &Rule) -> Document {
    let side = |side: &Side| doc! {"collection": side.namespace.to_string(), "where": side.filter.clone()};
    let entry = |pair: &Pair| {
        let mut entry = doc! {"target": pair.target.to_string(), "source": pair.source.to_string()};
        entry.extend(pair.bucket.iter().map(|bucket| ("bucket".to_owned(), bucket.arguments.clone().into())));
        entry
    };
    let mut definition = doc! {
        "source": side(&rule.source),
        "target": side(&rule.target),
        "match": rule.reference.pairs.iter().map(entry).collect::<Vec<_>>(),
        "key_type": rule.reference.key_type.map(KeyType::stored),
        "sort": sorted(&rule.sort),
        "on_missing": rule.on_missing.stored(),
        "values": definition_of_values(&rule.values),
    };
    if rule.creates.is_some() {
        definition.insert("create", true);
    }
    // Rules of 0.1 counted a source once that lists one key several times.
    if rule.gathers() && rule.reference.source_each.is_some() {
        definition.insert("rows", "elements");
    }
    if let Some(filter) = &rule.row_filter {
        definition.insert("row_filter", filter.clone());
    }
    if let Some(filter) = &rule.pair_filter {
        definition.insert("pair_filter", filter.clone());
    }
    if let Some(tree) = rule.tree {
        definition.insert("max_depth", i64::try_from(tree.max_depth).unwrap_or(i64::MAX));
    }
    // The daemon writes such a rule's targets one by one, so unfinished work of another definition is no use.
    if let Some(path) = &rule.touch {
        definition.insert("touch", path.to_string());
    }
    // A rule that leaves shadow mode has a new definition, so it is backfilled.
    if rule.shadow {
        definition.insert("shadow", true);
    }
    definition
}

/// The part of the definition that says what a rule writes.
fn definition_of_values(values: &Values) -> Document {
    let set = |assignments: &[Assignment]| {
        literal(assignments.iter().map(|a| (a.path.to_string(), a.expression.clone())).collect())
    };
    let empty = |on_empty: OnEmpty| match on_empty {
        OnEmpty::Value => "value",
        OnEmpty::Unset => "unset",
        OnEmpty::Keep => "keep",
    };
    match values {
        Values::Set { assignments, once, otherwise } => {
            let mut values = doc! {"set": set(assignments), "once": *once};
            // A path without a value is null here, so an explicit null is written as a `$literal`.
            let value = |value: &Option<Bson>| match value {
                Some(Bson::Null) => doc! {"$literal": Bson::Null}.into(),
                value => Bson::from(value.clone()),
            };
            let otherwise = otherwise.as_ref().map(|values| values.iter().map(value).collect::<Vec<Bson>>());
            values.extend(otherwise.map(|values| ("otherwise".to_owned(), values.into())));
            values
        }
        Values::Into { path, element } => doc! {"into": path.to_string(), "element": element.clone()},
        Values::Collect { path, element, slice, on_empty, .. } => doc! {
            "collect": path.to_string(), "element": element.clone(), "slice": *slice, "on_empty": empty(*on_empty),
        },
        Values::Aggregate { assignments, on_empty } => {
            doc! {"aggregate": set(assignments), "on_empty": empty(*on_empty)}
        }
        Values::Groups(groups) => doc! {
            "groups": groups.path.to_string(),
            "by": literal(groups.by.iter().cloned().collect()),
            "set": set(&groups.fields),
            "sort": sorted(&groups.sort),
            "slice": groups.slice,
            "as": if groups.form == GroupForm::Object { "object" } else { "array" },
            "on_empty": empty(groups.on_empty),
        },
    }
}

fn sorted(sort: &[(String, i32)]) -> Vec<Document> {
    sort.iter().map(|(path, direction)| doc! {"path": path, "direction": *direction}).collect()
}

/// The owned paths of a definition, which may have been recorded by another version.
#[must_use]
pub fn owned_paths(definition: &Document) -> Vec<FieldPath> {
    let Ok(values) = definition.get_document("values") else { return Vec::new() };
    let single: Vec<&str> =
        ["into", "collect", "groups"].into_iter().filter_map(|name| values.get_str(name).ok()).collect();
    // Beside `groups`, `set` names fields of a group.
    let lists = if single.is_empty() { ["set", "aggregate"].as_slice() } else { &[] };
    let several = lists.iter().filter_map(|name| values.get_array(name).ok()).flatten();
    let several = several.filter_map(|entry| entry.as_document()?.get_str("path").ok());
    single.into_iter().chain(several).filter_map(|path| FieldPath::parse(path).ok()).collect()
}

/// True for the definition of a `once` rule. Its values are history: no definition computes them again, and nothing distinguishes
/// them from the application's.
#[must_use]
pub fn is_once(definition: &Document) -> bool {
    definition.get_document("values").is_ok_and(|values| values.get_bool("once").unwrap_or_default())
}

/// A mapping as a list of pairs: its keys hold dots and `$`, and its order is part of the definition.
fn literal(set: Document) -> Vec<Document> {
    set.into_iter().map(|(path, expression)| doc! {"path": path, "expression": expression}).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rule for other documents with the same path once made all values of this one count as another's.
    #[test]
    fn a_side_without_some_arrays_counts_as_narrowed() {
        let definition =
            |filter: Option<Document>| doc! {"target": {"collection": "d.c", "where": filter}, "match": []};
        let plain = doc! {"kind": "post"};
        let demand = |path: &str| doc! {path: graph::no_array()};
        let without = |paths: &[&str]| {
            doc! {"$and": std::iter::once(plain.clone()).chain(paths.iter().map(|path| demand(path))).collect::<Vec<_>>()}
        };
        let [all, some, fewer] =
            [plain.clone(), without(&["kind"]), without(&["kind", "a"])].map(|one| definition(Some(one)));
        assert_eq!(narrowed(&all, &some), some);
        assert_eq!(narrowed(&some, &fewer), fewer);
        assert_eq!(narrowed(&some, &all), some, "the arrays may hold what others wrote");
        let other = definition(Some(doc! {"$and": [{"kind": "page"}, demand("kind")]}));
        assert_eq!(narrowed(&all, &other), all);
        let nothing = definition(None);
        let demanded = definition(Some(doc! {"$and": [demand("kind")]}));
        assert_eq!(narrowed(&nothing, &demanded), demanded);
    }
}
