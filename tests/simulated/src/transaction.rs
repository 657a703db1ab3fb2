//! Transactions on a snapshot: the first one to commit wins.

use bson::{Bson, Document, doc};
use denormd_mql::{Collections, compare};

use crate::{
    oplog::{Change, Entry},
    read::is_set,
    replies::{Failure, Result},
    state::{Progress, State},
};

/// An open transaction: its view of the data, and what it has changed.
#[derive(Debug)]
pub struct Transaction {
    number: i64,
    data: Collections,
    entries: Vec<Entry>,
    /// The length of the oplog when it began.
    begun: usize,
}

fn session(command: &Document) -> Option<Vec<u8>> {
    match command.get_document("lsid").ok()?.get("id")? {
        Bson::Binary(id) => Some(id.bytes.clone()),
        _ => None,
    }
}

impl State {
    /// Runs a command inside the transaction that it belongs to, if any.
    pub fn in_session(&mut self, command: &Document, waited: bool) -> Result<Progress> {
        let (Some(session), Ok(false)) = (session(command), command.get_bool("autocommit")) else {
            return self.dispatch(command, waited);
        };
        let number = command.get_i64("txnNumber").unwrap_or_default();
        if is_set(command, "startTransaction") {
            let begun = Transaction { number, data: self.data.clone(), entries: Vec::new(), begun: self.oplog.len() };
            self.transactions.insert(session.clone(), begun);
        }
        let commits = command.keys().next().is_some_and(|name| name == "commitTransaction");
        if commits && self.committed.get(&session) == Some(&number) {
            return Ok(Progress::Done(doc! {}));
        }
        let known = self.transactions.remove(&session).filter(|known| known.number == number);
        let Some(mut transaction) = known else {
            let lost = Failure::new(251, "the transaction has been aborted or is unknown");
            return Err(lost.with("errorLabels", vec!["TransientTransactionError"]));
        };
        match command.keys().next().map(String::as_str) {
            Some("commitTransaction") => {
                self.commit(transaction)?;
                self.committed.insert(session, number);
                return Ok(Progress::Done(doc! {}));
            }
            Some("abortTransaction") => return Ok(Progress::Done(doc! {})),
            _ => {}
        }
        std::mem::swap(&mut self.data, &mut transaction.data);
        self.buffered = Some(std::mem::take(&mut transaction.entries));
        let result = self.dispatch(command, waited);
        transaction.entries = self.buffered.take().unwrap_or_default();
        std::mem::swap(&mut self.data, &mut transaction.data);
        // An error ends a transaction, that of a single statement as well.
        let is_refused = matches!(&result, Ok(Progress::Done(reply)) if reply.contains_key("writeErrors"));
        if result.is_ok() && !is_refused {
            self.transactions.insert(session, transaction);
        }
        result
    }

    fn commit(&mut self, transaction: Transaction) -> Result<()> {
        for entry in &transaction.entries {
            let same = |other: &&Entry| {
                other.database == entry.database
                    && other.collection == entry.collection
                    && (other.id().is_none() || compare(other.id(), entry.id()).is_eq())
            };
            if self.oplog[transaction.begun..].iter().any(|other| same(&other)) {
                let conflict = Failure::new(112, "another write has changed the document");
                return Err(conflict.with("errorLabels", vec!["TransientTransactionError"]));
            }
        }
        for entry in &transaction.entries {
            if matches!(entry.change, Change::Create) {
                continue;
            }
            let namespace = format!("{}.{}", entry.database, entry.collection);
            let with_id = |document: &Document| compare(document.get("_id"), entry.id()).is_eq();
            let after = transaction.data.get(&namespace).and_then(|rows| rows.iter().find(|row| with_id(row)));
            let rows = self.data.entry(namespace).or_default();
            match (rows.iter().position(with_id), after) {
                (Some(at), Some(after)) => rows[at] = after.clone(),
                (Some(at), None) => drop(rows.remove(at)),
                (None, Some(after)) => rows.push(after.clone()),
                (None, None) => {}
            }
        }
        if !transaction.entries.is_empty() {
            let number = Some(transaction.number);
            let entries = transaction.entries.into_iter().map(|entry| Entry { transaction: number, ..entry });
            self.append(entries.collect());
        }
        Ok(())
    }
}
