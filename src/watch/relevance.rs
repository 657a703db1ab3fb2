//! Which updates a stream delivers: those that change a path some rule reads. Pure.
//!
//! Without this, every write of ours to a target comes back as an event. The server passes over an event for a third of what
//! sending it costs (tried on MongoDB 6.0.5), and the daemon does not decode it.

use std::collections::BTreeSet;

use bson::{Bson, Document, doc};

use crate::{
    change::Namespace,
    config::Guard,
    field_path::{FieldPath, Segment},
    plan::{Plan, expression::Reads},
};

/// With more collections, one pattern serves all: the server tries clauses one after the other.
const APART: usize = 8;
/// Longer patterns cost the server more than they save, and at 32 KiB it refuses them.
const LONGEST: usize = 4096;

/// The stage that follows the projection of `changed`; None where it would hold nothing back.
pub(super) fn filter(plan: &Plan, namespaces: &[Namespace]) -> Option<Document> {
    let mut clauses = vec![doc! {"operationType": {"$ne": "update"}}];
    let mut whole = Vec::new();
    let mut apart = Vec::new();
    for namespace in namespaces {
        match read_of(plan, namespace) {
            Reads::Everything => whole.push(namespace.collection.clone()),
            Reads::Paths(paths) => apart.push((namespace.collection.clone(), paths)),
            Reads::Nothing => {}
        }
    }
    if whole.len() == namespaces.len() {
        return None;
    }
    if !whole.is_empty() {
        clauses.push(doc! {"ns.coll": {"$in": whole}});
    }
    if apart.len() <= APART {
        for (collection, paths) in apart {
            clauses.push(doc! {"ns.coll": collection, "changed": one_of(&paths.iter().collect())?});
        }
    } else {
        let paths: BTreeSet<&FieldPath> = apart.iter().flat_map(|(_, paths)| paths).collect();
        clauses.push(doc! {"changed": one_of(&paths)?});
    }
    Some(doc! {"$match": {"$or": clauses}})
}

/// What an update of a collection must change to matter, as [`crate::route`] looks at it.
fn read_of(plan: &Plan, namespace: &Namespace) -> Reads {
    let mut reads = Reads::default();
    for rule in &plan.rules {
        if rule.source.namespace == *namespace {
            reads.extend(rule.source_reads.clone());
        }
        if rule.target.namespace == *namespace {
            reads.extend(rule.target_reads.clone());
            if rule.guard == Guard::Watch {
                rule.owned().into_iter().for_each(|path| reads.add(path.clone()));
            }
        }
    }
    reads
}

fn one_of(paths: &BTreeSet<&FieldPath>) -> Option<Document> {
    let any: Vec<String> = paths.iter().map(|path| touched(path.segments())).collect();
    let pattern = anchored(&any.join("|"));
    (pattern.len() <= LONGEST).then(|| doc! {"$regex": pattern, "$options": "s"})
}

/// A regular expression (PCRE, with the option `s`) for the dotted paths that [`FieldPath::touched_by`] says yes to.
#[must_use]
pub fn pattern(path: &FieldPath) -> Bson {
    Bson::String(anchored(&touched(path.segments())))
}

fn anchored(pattern: &str) -> String {
    format!(r"\A(?:{pattern})\z")
}

fn touched(path: &[Segment]) -> String {
    let Some((segment, rest)) = path.split_first() else { return ".*".to_owned() };
    let below = touched(rest);
    match segment {
        Segment::Each => format!(r"\d*(?:\.{below})?"),
        Segment::Name(name) => format!(r"(?:\d*\.)*(?:\d*|{}(?:\.{below})?)", escaped(name)),
    }
}

fn escaped(name: &str) -> String {
    let mut out = String::new();
    for character in name.chars() {
        if character.is_ascii() && !character.is_ascii_alphanumeric() {
            out.push('\\');
        }
        out.push(character);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Format, load_str},
        plan::compile,
    };

    fn stage(rules: &str) -> Option<String> {
        let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n{rules}");
        let plan = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap();
        let namespaces: Vec<Namespace> = plan.namespaces().into_iter().collect();
        filter(&plan, &namespaces).map(|stage| stage.to_string())
    }

    #[test]
    fn what_we_write_ourselves_is_held_back() {
        let rule = "  - name: r\n    copy: { source: s, target: t, match: { part: _id }, set: { name: $name } }\n";
        let stage = stage(rule).unwrap();
        assert!(stage.contains("part") && stage.contains("name"), "{stage}");
        assert_eq!(stage.matches("name").count(), 1, "the source's, not the target's: {stage}");
    }

    #[test]
    fn a_rule_that_reads_everything_gets_everything() {
        let whole = "  - name: r\n    copy: { source: s, target: s2, match: { part: _id }, set: { all: $$ROOT } }\n";
        assert!(stage(whole).unwrap().contains("\"$in\": [\"s\"]"), "{:?}", stage(whole));
    }

    #[test]
    fn guarded_fields_are_sent() {
        let rule = "  - name: r\n    guard: watch\n    copy: { source: s, target: t, match: { part: _id }, set: { copied: $name } }\n";
        assert!(stage(rule).unwrap().contains("copied"));
    }
}
