//! A user's operations on single documents, and their effect on a server.

use bson::{Bson, Document, doc};

use crate::{
    World,
    path::{Place, Step, at, set, unset},
    query::matches,
    value::{equal, is_number},
};

/// One operation, in the server's language. Filters are `{ _id: … }`.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// `insertOne`
    Insert {
        /// The collection.
        coll: String,
        /// The document.
        doc: Document,
    },
    /// `updateOne` with update operators.
    Update {
        /// The collection.
        coll: String,
        /// The filter that selects the document.
        filter: Document,
        /// `$set`, `$unset`, `$push`, `$pull`, `$inc`.
        update: Document,
    },
    /// `replaceOne`, without upsert.
    Replace {
        /// The collection.
        coll: String,
        /// The filter that selects the document.
        filter: Document,
        /// The new document, without `_id`.
        doc: Document,
    },
    /// `deleteOne`
    Delete {
        /// The collection.
        coll: String,
        /// The filter that selects the document.
        filter: Document,
    },
    /// `drop`
    Drop {
        /// The collection.
        coll: String,
    },
    /// `mongorestore --drop`: the collection is dropped, created with its original options, and filled.
    Restore {
        /// The collection.
        coll: String,
        /// The documents in the backup.
        docs: Vec<Document>,
    },
    /// `renameCollection`, with `dropTarget`
    Rename {
        /// Its name before.
        from: String,
        /// Its name after.
        coll: String,
    },
    /// `collMod` of `changeStreamPreAndPostImages`
    PreImages {
        /// The collection.
        coll: String,
        /// True if they are to be recorded.
        on: bool,
    },
}

impl Op {
    /// The collection that the operation is for.
    #[must_use]
    pub fn coll(&self) -> &str {
        match self {
            Self::Insert { coll, .. }
            | Self::Update { coll, .. }
            | Self::Replace { coll, .. }
            | Self::Delete { coll, .. }
            | Self::Drop { coll }
            | Self::Restore { coll, .. }
            | Self::Rename { coll, .. }
            | Self::PreImages { coll, .. } => coll,
        }
    }

    /// Applies it to a world in memory. An error means that the server would refuse it; then nothing has changed.
    pub fn apply(&self, world: &mut World) -> Result<(), String> {
        match self {
            Self::Drop { coll } => {
                world.remove(coll).ok_or("no such collection")?;
                return Ok(());
            }
            Self::Restore { coll, docs } => {
                world.insert(coll.clone(), docs.clone());
                return Ok(());
            }
            Self::Rename { from, coll } => {
                let documents = world.remove(from).ok_or("no such collection")?;
                world.insert(coll.clone(), documents);
                return Ok(());
            }
            Self::PreImages { .. } => return Ok(()),
            Self::Insert { .. } => {}
            // These do not create a collection.
            _ if !world.contains_key(self.coll()) => return Ok(()),
            _ => {}
        }
        let documents = world.entry(self.coll().to_owned()).or_default();
        let position = |filter: &Document| {
            let id = filter.get("_id").unwrap_or(&Bson::Null);
            documents.iter().position(|document| document.get("_id").is_some_and(|known| equal(known, id)))
        };
        match self {
            Self::Insert { doc, .. } => {
                if position(doc).is_some() {
                    return Err("duplicate key".to_owned());
                }
                documents.push(doc.clone());
            }
            Self::Update { filter, update, .. } => {
                if let Some(position) = position(filter) {
                    documents[position] = updated(&documents[position], update)?;
                }
            }
            Self::Replace { filter, doc, .. } => {
                if let Some(position) = position(filter) {
                    let id = documents[position].get("_id").cloned().unwrap_or(Bson::Null);
                    documents[position] = doc! {"_id": id}.into_iter().chain(doc.clone()).collect();
                }
            }
            Self::Delete { filter, .. } => {
                if let Some(position) = position(filter) {
                    documents.remove(position);
                }
            }
            Self::Drop { .. } | Self::Restore { .. } | Self::Rename { .. } | Self::PreImages { .. } => {}
        }
        Ok(())
    }
}

fn updated(document: &Document, update: &Document) -> Result<Document, String> {
    let mut root = Bson::Document(document.clone());
    for (operator, fields) in update {
        for (path, operand) in fields.as_document().ok_or("an operator takes a document")? {
            let place = place(&root, path);
            let stored = at(&root, &place).cloned();
            match operator.as_str() {
                "$set" => set(&mut root, &place, operand.clone())?,
                "$unset" => unset(&mut root, &place),
                "$inc" => match (&stored, operand) {
                    (None, _) => set(&mut root, &place, operand.clone())?,
                    (Some(Bson::Int32(number)), Bson::Int32(by)) => {
                        set(&mut root, &place, Bson::Int32(number.wrapping_add(*by)))?;
                    }
                    (Some(number), _) if is_number(number) => {}
                    _ => return Err("$inc of no number".to_owned()),
                },
                "$push" => {
                    let mut elements = match stored {
                        None => Vec::new(),
                        Some(Bson::Array(elements)) => elements,
                        Some(_) => return Err("$push to no array".to_owned()),
                    };
                    let (each, position) = pushed(operand, elements.len());
                    elements.splice(position..position, each);
                    set(&mut root, &place, Bson::Array(elements))?;
                }
                "$pull" => match stored {
                    None => {}
                    Some(Bson::Array(elements)) => {
                        let mut kept = Vec::new();
                        for element in elements {
                            if !pulled(&element, operand)? {
                                kept.push(element);
                            }
                        }
                        set(&mut root, &place, Bson::Array(kept))?;
                    }
                    Some(_) => return Err("$pull from no array".to_owned()),
                },
                other => return Err(format!("update operator {other}")),
            }
        }
    }
    match root {
        Bson::Document(document) => Ok(document),
        _ => Err("no document".to_owned()),
    }
}

/// The elements that `$push` adds, and their position: `$each` with `$position` from the front, or one element at the
/// end.
fn pushed(operand: &Bson, len: usize) -> (Vec<Bson>, usize) {
    let modifiers = operand.as_document().filter(|operand| operand.contains_key("$each"));
    let Some(modifiers) = modifiers else { return (vec![operand.clone()], len) };
    let position = modifiers.get_i32("$position").ok().and_then(|position| usize::try_from(position).ok());
    (modifiers.get_array("$each").cloned().unwrap_or_default(), position.unwrap_or(len).min(len))
}

fn pulled(element: &Bson, condition: &Bson) -> Result<bool, String> {
    match (element, condition) {
        (Bson::Document(element), Bson::Document(query)) if !query.keys().any(|key| key.starts_with('$')) => {
            matches(element, query)
        }
        (element, condition) => matches(&doc! {"v": element.clone()}, &doc! {"v": condition.clone()}),
    }
}

/// A dotted path resolved in this document: a number is a position where there is an array.
fn place(root: &Bson, path: &str) -> Place {
    let mut place = Place::new();
    for name in path.split('.') {
        let step = match (at(root, &place), name.parse()) {
            (Some(Bson::Array(_)), Ok(index)) => Step::Index(index),
            _ => Step::Field(name.to_owned()),
        };
        place.push(step);
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators() {
        let document = doc! {"_id": 1, "p": [{"id": 1}, {"id": 2}], "n": 1};
        let of = |update: Document| updated(&document, &update);
        assert_eq!(
            of(doc! {"$set": {"p.1.id": 9}}).unwrap().get_array("p").unwrap()[1],
            Bson::Document(doc! {"id": 9})
        );
        assert_eq!(of(doc! {"$pull": {"p": {"id": {"$in": [1.0]}}}}).unwrap().get_array("p").unwrap().len(), 1);
        assert_eq!(of(doc! {"$inc": {"n": 2}}).unwrap().get_i32("n").unwrap(), 3);
        let pushed = of(doc! {"$push": {"p": {"$each": [1, 2], "$position": 0}}}).unwrap();
        assert_eq!(pushed.get_array("p").unwrap()[..2], [Bson::Int32(1), Bson::Int32(2)]);
        assert!(of(doc! {"$push": {"n": 2}}).is_err());
        assert!(of(doc! {"$set": {"n.a": 2}}).is_err());
    }
}
