//! Records of the writes of chosen programs, with each document before and after.

use bson::Document;

use crate::state::{Model, State};

/// A change of one document.
#[derive(Debug, Clone, PartialEq)]
pub struct Write {
    /// The collection's name without the database.
    pub collection: String,
    /// The document before the change; None for an insert.
    pub before: Option<Document>,
    /// The document after the change; None for a delete.
    pub after: Option<Document>,
}

/// The writes of some programs to one database.
#[derive(Debug)]
pub struct Record {
    /// The prefix of the programs' names.
    program: String,
    database: String,
    writes: Vec<Write>,
}

impl Model {
    /// From now on, records the writes to this database by programs whose names begin with `program`. Both versions of each document
    /// stay in memory until [`Model::take_writes`].
    pub fn record_writes(&self, program: &str, database: &str) {
        let (program, database) = (program.to_owned(), database.to_owned());
        self.state().record = Some(Record { program, database, writes: Vec::new() });
    }

    /// The writes since the last call, those that were rolled back included.
    #[must_use]
    pub fn take_writes(&self) -> Vec<Write> {
        self.state().record.as_mut().map(|record| std::mem::take(&mut record.writes)).unwrap_or_default()
    }
}

impl State {
    /// Records a change of one document, if it is a write of a chosen program.
    pub fn record(&mut self, namespace: &str, before: Option<&Document>, after: Option<&Document>) {
        let (Some(record), Some((database, collection))) = (&mut self.record, namespace.split_once('.')) else {
            return;
        };
        if record.database == database && self.program.starts_with(&record.program) {
            let collection = collection.to_owned();
            record.writes.push(Write { collection, before: before.cloned(), after: after.cloned() });
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails panics")]
mod tests {
    use bson::doc;

    use super::*;

    #[tokio::test]
    async fn the_writes_of_a_program_are_recorded() {
        let model = Model::new(1);
        model.record_writes("denormd", "d");
        let mut connection = model.connection(None);
        "denormd-1".clone_into(&mut connection.program);
        let insert = doc! {"insert": "c", "documents": [{"_id": 1}]};
        let update = doc! {"update": "c", "updates": [{"q": {"_id": 1}, "u": {"$set": {"n": 1}}}]};
        let delete = doc! {"delete": "c", "deletes": [{"q": {"_id": 1}, "limit": 1}]};
        for command in [insert, update, delete] {
            for database in ["d", "d_state"] {
                let mut command = command.clone();
                command.insert("$db", database);
                model.answer(&connection, &command).await.unwrap();
            }
        }
        model.run(doc! {"insert": "c", "documents": [{"_id": 2}], "$db": "d"}).await;
        let states = [None, Some(doc! {"_id": 1}), Some(doc! {"_id": 1, "n": 1}), None];
        let write = |pair: &[Option<Document>]| Write {
            collection: "c".to_owned(),
            before: pair[0].clone(),
            after: pair[1].clone(),
        };
        assert_eq!(model.take_writes(), states.windows(2).map(write).collect::<Vec<_>>());
        assert!(model.take_writes().is_empty());
    }
}
