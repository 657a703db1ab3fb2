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

/// A reason why a rule cannot be recursive.
pub(super) struct Objection {
    /// The key of the rule that it concerns.
    pub key: &'static str,
    /// The reason.
    pub message: &'static str,
    /// A way out.
    pub hint: &'static str,
}

/// The reasons why a rule cannot be recursive. `shadow` rules write nothing that the next level could read.
pub(super) fn objections(rule: &Rule, tree: Tree) -> Vec<Objection> {
    let mut out = Vec::new();
    let mut object = |key, message, hint| out.push(Objection { key, message, hint });
    if rule.source.namespace != rule.target.namespace {
        let hint = "name one collection twice; a rule over two collections needs no `recursive`";
        object("recursive", "a tree is in one collection, and `source` and `target` are two", hint);
    }
    if !has_plain_parent(rule, tree) {
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

/// True if one plain field of a document holds the `_id` of its parent as it is.
fn has_plain_parent(rule: &Rule, tree: Tree) -> bool {
    let [pair] = rule.reference.pairs.as_slice() else { return false };
    let (id, parent) = match tree.parent {
        Role::Target => (&pair.source, &pair.target),
        Role::Source => (&pair.target, &pair.source),
    };
    let is_plain = !parent.has_each() && dbref_parent(parent).is_none() && parent.root() != "_id";
    id.to_string() == "_id" && is_plain && rule.reference.key_type.is_none()
}
