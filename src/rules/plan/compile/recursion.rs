//! The conditions on recursive rules.

use crate::{
    config::OnMissing,
    plan::{
        expression::Reads,
        reference::{Role, dbref_parent},
        rule::{Rule, Values},
        tree::Tree,
    },
};
use denormd_model::field_path::FieldPath;

/// A reason why a rule cannot be recursive.
pub(super) struct Objection {
    /// The key of the rule that it concerns.
    pub key: &'static str,
    /// The reason.
    pub message: String,
    /// A way out.
    pub hint: &'static str,
}

/// The reasons why a rule cannot be recursive. `shadow` rules write nothing that the next level could read.
pub(super) fn objections(rule: &Rule, tree: Tree) -> Vec<Objection> {
    let mut out = Vec::new();
    let mut object = |key, message: &str, hint| out.push(Objection { key, message: message.to_owned(), hint });
    if rule.source.namespace != rule.target.namespace {
        let hint = "name one collection twice; a rule over two collections needs no `recursive`";
        object("recursive", "a tree is in one collection, and `source` and `target` are two", hint);
    }
    let shape = match (tree.parent, rule.reference.pairs.as_slice()) {
        (Role::Target, [pair]) => (pair.source.to_string() == "_id").then_some(&pair.target),
        (Role::Source, [pair]) => (pair.target.to_string() == "_id").then_some(&pair.source),
        _ => None,
    };
    let is_plain = |path: &&FieldPath| {
        !path.has_each() && dbref_parent(path).is_none() && path.root() != "_id" && rule.reference.key_type.is_none()
    };
    if shape.as_ref().is_none_or(|x| !is_plain(x)) {
        let hint = match tree.parent {
            Role::Target => "match: { parent: _id }",
            Role::Source => "match: { _id: parent }",
        };
        object("match", "in a tree, one plain field of a document holds the `_id` of its parent as it is", hint);
    }
    match &rule.values {
        Values::Set { once: true, .. } => {
            object("once", "`once` keeps a value that the documents below have to follow", "leave `once` out");
        }
        Values::Set { .. } | Values::Aggregate { .. } => {}
        Values::Into { .. } | Values::Collect { .. } | Values::Groups(_) => {
            object(
                "into",
                "a tree has values of single documents, and no array of groups or of references",
                "use `set`",
            );
        }
    }
    if rule.on_missing != OnMissing::Unset {
        object("on_missing", "a document without a parent is a root", "write its values in `otherwise`");
    }
    if rule.source.filter != rule.target.filter || rule.row_filter.is_some() || rule.pair_filter.is_some() {
        let hint = "write the same `where` in `source` and in `target`, without `$$target`";
        object("target", "the documents of a tree are its sources and its targets alike", hint);
    }
    if rule.creates.is_some() {
        let hint = "leave `create` out, and insert the documents with their parents";
        object(
            "target",
            "`create` inserts documents for their sources, and the documents of a tree name their parents",
            hint,
        );
    }
    if rule.shadow {
        let hint = "compare it with `denormd test`, or in a copy of the database";
        object("recursive", "a rule in shadow mode writes nothing that the next level could read", hint);
    }
    if matches!(rule.source_reads, Reads::Everything) {
        object("set", "a tree reads named paths, and `$$ROOT` would nest one document in the next", "name the fields");
    } else if !rule.owned().into_iter().any(|path| rule.source_reads.overlap(path)) {
        let hint = "leave `recursive` out: without it the rule does the same";
        object("recursive", "the rule reads none of the paths that it writes", hint);
    }
    out
}
