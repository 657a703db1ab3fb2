//! Compares documents that a rule inserts and deletes.

use std::collections::HashSet;

use bson::{Bson, Document, RawBson, doc};

use super::{Difference, push};
use crate::reconcile::value::{Desired, Rows};
use denormd_model::{
    field_path::value_at,
    key::{Key, id_of},
};
use denormd_mongo::error::Result;
use denormd_rules::plan::Rule;

/// Marks a stand-in for a document that does not exist. No document has a field of this name.
pub const ABSENT: &str = "__denormd_absent";

/// Compares a document, or a stand-in for one, with what the rows of its key demand.
pub(super) fn compare(
    rule: &Rule,
    rows: &Rows,
    target: &Document,
    key: Option<&Key>,
    out: &mut Vec<Difference>,
) -> Result<()> {
    // A document of another form is none of the rule's.
    let (Some(key), Some(creates)) = (key, &rule.creates) else { return Ok(()) };
    let id = id_of(target);
    let mut desired = rows.desired(rule, key)?;
    if target.contains_key(ABSENT) {
        if matches!(desired, Desired::Fields(_)) {
            let expected = Some(RawBson::try_from(id.clone())?);
            out.push(Difference { target: id, path: "_id".to_owned(), element: None, expected, stored: None });
        }
        return Ok(());
    }
    if let Desired::Emptied { deletes, .. } = &mut desired {
        *deletes &= creates.has_nothing_else(target);
    }
    push(rule, (&id, None), &desired, &|path| value_at(target, path.segments()).cloned(), out)
}

/// Stand-ins for those of these `_id`s that no document has.
pub fn stand_ins(documents: &[Document], ids: &[Bson]) -> Vec<Document> {
    let id_of = |document: &Document| document.get("_id").cloned().map(Key::one);
    let mut known: HashSet<Key> = documents.iter().filter_map(id_of).collect();
    ids.iter().filter(|id| known.insert(Key::one((*id).clone()))).map(stand_in).collect()
}

/// A stand-in for the document with this `_id`.
fn stand_in(id: &Bson) -> Document {
    doc! {"_id": id.clone(), ABSENT: true}
}
