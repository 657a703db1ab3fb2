//! The table of constructs that combine, compared with the rules that the program accepts.

use bson::{Bson, Document, doc};
use denormd_rules::{
    config::{
        Format, load_str,
        matrix::{CONSTRUCTS, KINDS, REFUSED, refused},
    },
    plan::compile,
};

/// The constructs of one example.
struct Example<'a> {
    kind: usize,
    with: &'a [&'static str],
}

impl Example<'_> {
    fn has(&self, name: &str) -> bool {
        assert!(CONSTRUCTS.iter().any(|construct| construct.name == name), "{name}");
        self.with.contains(&name)
    }

    fn both_arrays(&self) -> bool {
        self.has("arrays on both sides of `match`")
    }

    fn is_inside_and_beside(&self) -> bool {
        self.has("paths in the elements and beside")
    }

    /// True if the paths are those of elements. An element that is removed has to be one.
    fn is_inside(&self) -> bool {
        let removes = self.has("`on_missing: remove`") && !self.is_inside_and_beside() && !self.both_arrays();
        let has = self.has("paths in the target's elements") && !self.is_inside_and_beside();
        has || (removes && self.kind == 0)
    }

    fn source_array(&self) -> bool {
        self.has("an array in the source's path") || self.both_arrays()
    }

    fn on(&self) -> Document {
        let target = match self.kind {
            0 if self.has("`recursive`")
                && !self.is_inside()
                && !self.is_inside_and_beside()
                && !self.both_arrays() =>
            {
                "parent"
            }
            _ if self.is_inside() || self.is_inside_and_beside() => "e.$[].ref",
            1 => "ids.$[]",
            _ if self.both_arrays() => "ids.$[]",
            0 => "ref",
            _ => "_id",
        };
        let source = match self.kind {
            _ if self.source_array() => "l.$[].k",
            0 | 1 => "_id",
            _ if self.has("`recursive`") => "parent",
            _ => "t",
        };
        doc! {target: source}
    }

    /// An expression over the source, and over the target.
    fn value(&self, operator: &str) -> Bson {
        // A tree reads what it writes.
        let own = if self.kind == 3 { "$n" } else { "$name" };
        let source = match () {
            () if self.source_array() => "$$element.v",
            () if self.has("`recursive`") => own,
            () => "$v",
        };
        if self.has("`$$target`") { doc! {operator: [source, "$$target.v"]}.into() } else { source.into() }
    }

    fn paths(&self, name: &str) -> Vec<String> {
        match () {
            () if self.is_inside() => vec![format!("e.$[].{name}")],
            () if self.is_inside_and_beside() && self.kind != 2 => vec![format!("e.$[].{name}"), name.to_owned()],
            () => vec![name.to_owned()],
        }
    }

    fn body(&self) -> Document {
        let mut body = doc! {"source": "s", "target": "t", "match": self.on()};
        if self.has("`create`") {
            body.insert("target", doc! {"collection": "t", "create": true});
        }
        if self.has("`recursive`") {
            body.extend(doc! {"source": "t", "recursive": true});
        }
        let each = |name: &str, value: &Bson| -> Document {
            self.paths(name).into_iter().map(|path| (path, value.clone())).collect()
        };
        let accumulator = Bson::from(doc! {"$sum": self.value("$multiply")});
        let accumulated: Bson = if self.has("`let`") { "$$sum".into() } else { accumulator.clone() };
        match self.kind {
            0 => drop(body.insert("set", each("name", &self.value("$concat")))),
            1 | 2 => body.extend(doc! {"into": self.paths("all").remove(0), "element": self.value("$concat")}),
            _ if self.has("`by`, `into`") => {
                body.extend(doc! {"by": {"g": "$g"}, "into": self.paths("all").remove(0), "set": {"n": accumulated}});
            }
            _ => drop(body.insert("set", each("n", &accumulated))),
        }
        if self.has("`let`") {
            body.insert("let", doc! {"sum": accumulator});
        }
        if self.has("`by`, `into`") && self.kind != 3 {
            body.insert("by", doc! {"g": "$g"});
        }
        if self.has("`otherwise`") {
            body.insert("otherwise", each("name", &"none".into()));
        }
        for policy in ["null", "remove", "delete"] {
            if self.with.iter().any(|name| name.starts_with(&format!("`on_missing: {policy}"))) {
                body.insert("on_missing", policy);
            }
        }
        if self.has("`once`") {
            body.insert("once", true);
        }
        if self.has("`touch`") {
            body.insert("touch", "at");
        }
        body
    }

    /// Ok if the program accepts the example; otherwise its messages.
    fn accepted(&self) -> Result<(), String> {
        let kind = ["copy", "copy", "collect", "aggregate"][self.kind];
        let rule = doc! {"name": "r", kind: self.body(), "shadow": self.has("`shadow`")};
        let config = doc! {"mongodb": {"uri": "mongodb://localhost", "database": "d"}, "rules": [rule]};
        let text = Bson::Document(config).into_relaxed_extjson().to_string();
        let loaded = load_str(&text, Format::Json).map_err(|error| format!("{text}\n{error}"))?;
        compile(&loaded.config, None).map(drop).map_err(|mistakes| format!("{text}\n{mistakes:?}"))
    }
}

fn wrong(example: &Example<'_>, is_refused: bool) -> Option<String> {
    let names = format!("{} with {}", KINDS[example.kind], example.with.join(" and "));
    match (example.accepted(), is_refused) {
        (Ok(()), true) => Some(format!("{names} is accepted: {}", example.body())),
        (Err(why), false) => Some(format!("{names} is refused: {why}")),
        _ => None,
    }
}

#[test]
fn the_table_says_which_constructs_a_kind_of_rule_may_use() {
    let mut found = Vec::new();
    for kind in 0..KINDS.len() {
        found.extend(wrong(&Example { kind, with: &[] }, false));
        for construct in CONSTRUCTS {
            let example = Example { kind, with: &[construct.name] };
            found.extend(wrong(&example, !construct.kinds[kind].is_empty()));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_table_says_which_constructs_are_refused_together() {
    let mut found = Vec::new();
    for (nth, one) in CONSTRUCTS.iter().enumerate() {
        for other in &CONSTRUCTS[..nth] {
            // A rule has one policy.
            if one.name.starts_with("`on_missing") && other.name.starts_with("`on_missing") {
                assert!(refused(one.name, other.name).is_some());
                continue;
            }
            for kind in (0..KINDS.len()).filter(|kind| one.kinds[*kind].is_empty() && other.kinds[*kind].is_empty()) {
                let example = Example { kind, with: &[one.name, other.name] };
                found.extend(wrong(&example, refused(one.name, other.name).is_some()));
            }
        }
    }
    assert!(found.is_empty(), "{} wrong\n{}", found.len(), found.join("\n"));
}

#[test]
fn each_refusal_is_of_two_constructs_that_one_kind_may_use() {
    for (one, other, why) in REFUSED {
        let find = |name: &str| CONSTRUCTS.iter().find(|known| known.name == name).unwrap_or_else(|| panic!("{name}"));
        assert!(denormd_rules::config::matrix::share_a_kind(find(one), find(other)), "{one} and {other}");
        assert!(!why.is_empty());
    }
}
