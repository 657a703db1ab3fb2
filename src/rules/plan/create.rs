//! Rules that insert and delete their targets (`create: true`): the `_id` of a key's document.
//!
//! The entries of `match` are the whole `_id`, in their order: one entry `_id`, or fields of it. So a key stands for one
//! document, and a document for one key.

use std::sync::Arc;

use bson::{Bson, Document};

use crate::{
    config::{ConfigPath, Mistake, OnEmpty, OnMissing},
    plan::{
        Values,
        reference::{Pair, Reference},
        rule::{Creates, Groups, Rule},
    },
};
use denormd_model::{
    field_path::{FieldPath, Segment, value_at},
    key::Key,
};

impl Pair {
    /// The name of the target's field in its `_id`; None for the `_id` itself.
    #[must_use]
    pub fn name_in_id(&self) -> Option<&str> {
        match self.target.segments() {
            [_, Segment::Name(name)] => Some(name),
            _ => None,
        }
    }
}

impl Reference {
    /// The `_id` of the document of a key, for rules that create documents.
    #[must_use]
    pub fn id_of(&self, key: &Key) -> Bson {
        let values = self.pairs.iter().zip(key.values());
        let fields: Document =
            values.filter_map(|(pair, value)| Some((pair.name_in_id()?.to_owned(), value.clone()))).collect();
        if fields.is_empty() { key.values().first().cloned().unwrap_or(Bson::Null) } else { Bson::Document(fields) }
    }

    /// The key of the document with this `_id`; None for an `_id` of another form.
    #[must_use]
    pub fn key_of_id(&self, id: &Bson) -> Option<Key> {
        let values: Vec<&Bson> = match (self.pairs.as_slice(), id) {
            ([pair], id) if pair.name_in_id().is_none() => vec![id],
            (pairs, Bson::Document(id))
                if id.keys().map(String::as_str).eq(pairs.iter().filter_map(Pair::name_in_id)) =>
            {
                id.values().collect()
            }
            _ => return None,
        };
        let key = Key::new(values.into_iter().cloned().collect());
        self.can_resolve(&key).then_some(key)
    }

    /// True if a key has the start of an interval.
    #[must_use]
    pub fn has_buckets(&self) -> bool {
        self.pairs.iter().any(|pair| pair.bucket.is_some())
    }
}

/// The first mistake in the `match` of a rule that creates documents: the entry, the message and a hint.
pub(super) fn mistake_in_match(pairs: &[Pair]) -> Option<(String, String, &'static str)> {
    let mut names: Vec<Option<&str>> = Vec::new();
    for pair in pairs {
        let target = pair.target.to_string();
        let is_id = pair.target.root() == "_id"
            && match pair.target.segments() {
                [_] => pairs.len() == 1,
                [_, Segment::Name(name)] => !name.starts_with('$'),
                _ => false,
            };
        if !is_id {
            let message =
                format!("with `create`, `match` is the whole `_id` of a document, and `{target}` is no part of it");
            return Some((
                target,
                message,
                "write one entry `_id: item`, or the fields of it: _id.item: item, _id.day: …",
            ));
        }
        if names.contains(&pair.name_in_id()) {
            return Some((target.clone(), format!("`{target}` is there twice"), "keep one of them"));
        }
        names.push(pair.name_in_id());
        if pair.source.to_string().ends_with("$id") {
            let message = "with `create`, a DBRef cannot be a part of the `_id`".to_owned();
            return Some((target, message, "store the id itself in a field of the source"));
        }
        if pair.bucket.is_some() && pair.source.has_each() {
            let message = format!("`{}` lies in an array, and an interval needs one date of the source", pair.source);
            return Some((target, message, "use a date beside the array"));
        }
    }
    None
}

/// Completes the rules that create documents: the paths and the rules that share their collections. Returns mistakes.
pub(super) fn complete(rules: &mut [Arc<Rule>]) -> Vec<Mistake> {
    let mut mistakes = Vec::new();
    for nth in 0..rules.len() {
        let rule = rules[nth].clone();
        let Some(mut creates) = rule.creates.clone() else { continue };
        let here: Vec<&Arc<Rule>> =
            rules.iter().filter(|other| other.target.namespace == rule.target.namespace && !other.shadow).collect();
        let sharing = || here.iter().filter(|other| other.creates.is_some() && other.id != rule.id);
        for other in sharing().filter(|other| other.id < rule.id) {
            mistakes.extend(conflict(&rule, other));
        }
        for other in here.iter().filter(|other| other.on_missing == OnMissing::Delete) {
            let message = format!("rule `{}` creates the documents that this rule deletes", rule.name);
            let at = ConfigPath::rule(other.id.0).key("copy").key("on_missing");
            mistakes.push(Mistake::new(at, message).hint("use unset, null or keep"));
        }
        creates.others = sharing().map(|other| other.id).collect();
        creates.owned = here.iter().flat_map(|other| other.owned()).chain(rule.owned()).cloned().collect();
        creates.owned.sort_by_key(ToString::to_string);
        creates.owned.dedup();
        let filters = |path: &FieldPath| {
            let owners = here.iter().filter(|other| other.owned().contains(&path));
            owners.map(|other| other.target.filter.clone()).collect::<Option<Vec<_>>>()
        };
        let own = rule.owned();
        let others = creates.owned.iter().filter(|path| !own.contains(path));
        creates.owned_where = others.filter_map(|path| Some((path.clone(), filters(path)?))).collect();
        Arc::make_mut(&mut rules[nth]).creates = Some(creates);
    }
    mistakes
}

/// The reason why two rules cannot create documents in one collection.
fn conflict(rule: &Rule, other: &Rule) -> Option<Mistake> {
    let shape = |rule: &Rule| {
        let pairs = rule.reference.pairs.iter();
        pairs.map(|pair| (pair.target.clone(), pair.bucket.clone())).collect::<Vec<_>>()
    };
    let keeps = |rule: &Rule| rule.creates.as_ref().is_some_and(|creates| creates.keeps);
    let collection = &rule.target.namespace;
    let at = ConfigPath::rule(rule.id.0).key("aggregate");
    if shape(rule) != shape(other) {
        let message = format!("rule `{}` creates documents with another `_id` in `{collection}`", other.name);
        let hint = "give both the same entries in `match`, in the same order, or a collection each";
        return Some(Mistake::new(at.key("match"), message).hint(hint));
    }
    if keeps(rule) != keeps(other) {
        let message = format!("rule `{}` creates documents in `{collection}` as well", other.name);
        let hint = "write `on_empty: keep` in both, or in neither: the rules share the documents";
        return Some(Mistake::new(at.key("on_empty"), message).hint(hint));
    }
    None
}

impl Values {
    /// True for values of `on_empty: keep`.
    pub(super) fn keeps_when_empty(&self) -> bool {
        match self {
            Self::Aggregate { on_empty, .. } | Self::Groups(Groups { on_empty, .. }) => *on_empty == OnEmpty::Keep,
            _ => false,
        }
    }
}

impl Creates {
    /// True if an update of these paths may remove the last field of others from a document.
    #[must_use]
    pub fn may_free(&self, changed: &[String]) -> bool {
        let is_anywhere = |path: &&FieldPath| self.owned_where.iter().all(|(owned, _)| owned != *path);
        let is_owned =
            |changed: &String| {
                self.owned.iter().filter(is_anywhere).map(FieldPath::query).any(|path| {
                    changed.strip_prefix(&path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
                })
            };
        !self.keeps && !changed.iter().all(is_owned)
    }

    /// True if a document has no path but its `_id` and those that rules own in every document.
    #[must_use]
    pub fn has_nothing_else(&self, document: &Document) -> bool {
        let is_absent = |(path, _): &(FieldPath, Vec<Document>)| value_at(document, path.segments()).is_none();
        has_only(document, &self.plain(), &["_id"]) && self.owned_where.iter().all(is_absent)
    }

    /// The owned paths that are not inside an array: an array belongs to others.
    #[must_use]
    pub fn plain(&self) -> Vec<Vec<&str>> {
        self.owned.iter().filter(|path| !path.has_each()).map(|path| path.names().collect()).collect()
    }
}

/// True if a document has only these paths, and the fields `others`.
fn has_only(document: &Document, paths: &[Vec<&str>], others: &[&str]) -> bool {
    document.iter().all(|(name, value)| {
        // Fields that a read adds are not the document's.
        if name.starts_with("__denormd_")
            || others.contains(&name.as_str())
            || paths.iter().any(|path| path.as_slice() == [name.as_str()])
        {
            return true;
        }
        let below = below(paths, name);
        match value {
            Bson::Document(inside) => !below.is_empty() && has_only(inside, &below, &[]),
            _ => false,
        }
    })
}

/// The rest of the paths that begin with this name.
#[must_use]
pub fn below<'a>(paths: &[Vec<&'a str>], name: &str) -> Vec<Vec<&'a str>> {
    let inside = paths.iter().filter(|path| path.len() > 1 && path[0] == name);
    inside.map(|path| path[1..].to_vec()).collect()
}
