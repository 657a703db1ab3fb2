//! Values that a rule's first backfill overwrites or removes, kept for `denormd undo`.
//!
//! A value is kept before the rule writes to its place, and the first one counts: a page that is written again after a
//! crash finds denormd's own value there. Beside the old value there are fingerprints of it and of the value that
//! denormd wrote. So `undo` recognises both, even when the rule is no longer in the config.

use std::time::Duration;

use bson::{
    Binary, Bson, DateTime, Document, RawArrayBuf, RawBson, RawDocumentBuf, cstr, doc, rawdoc, spec::BinarySubtype,
};
use denormd_model::{clock, distribution::number, position::ClusterTime};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::unreadable;
use denormd_mongo::{
    Server, bounded,
    command::decoded,
    error::{Error, Result},
};

/// The collection of kept values: one document for each.
pub const COLLECTION: &str = "kept";
/// Bytes of kept values in one page.
const PAGE_BYTES: usize = 4 << 20;
/// Most kept values in one page.
const PAGE: i32 = 1000;

/// The kept values of one deployment.
#[derive(Debug, Clone, Copy)]
pub struct Kept<'a> {
    /// The cluster that holds the state database.
    pub server: &'a Server,
    /// The name of the state database.
    pub database: &'a str,
    /// The name of the deployment, without a partition.
    pub deployment: &'a str,
}

/// The paths of a rule whose values are kept before it overwrites them. Stored in the rule's record.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Keeping {
    /// The owned paths that the rule did not own before.
    #[serde(rename = "paths")]
    pub paths: Vec<String>,
    /// The `_id` up to which the backfill has come, in an array because any BSON value may be one: the values of these
    /// targets are denormd's own.
    #[serde(rename = "passed", default)]
    pub passed: Vec<Bson>,
}

impl Keeping {
    /// Merges what several partitions of a rule keep: values at the paths of any of them, and in all targets, unless all
    /// have passed the same one.
    #[must_use]
    pub fn joined<'a>(partitions: impl IntoIterator<Item = Option<&'a Self>>) -> Option<Self> {
        let mut partitions = partitions.into_iter();
        let first = partitions.next()?;
        partitions.fold(first.cloned(), |joined, next| {
            let (mut joined, next) = match (joined, next) {
                (Some(joined), Some(next)) => (joined, next),
                (Some(one), None) => return Some(Self { passed: Vec::new(), ..one }),
                (None, next) => return next.map(|next| Self { passed: Vec::new(), ..next.clone() }),
            };
            if joined.passed != next.passed {
                joined.passed.clear();
            }
            let more: Vec<String> = next.paths.iter().filter(|path| !joined.paths.contains(path)).cloned().collect();
            joined.paths.extend(more);
            Some(joined)
        })
    }
}

/// A place in a target.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    /// The full name of the collection, with its database.
    pub collection: String,
    /// The target's `_id`.
    pub target: Bson,
    /// The owned path, with `$[]` for an element.
    pub path: String,
    /// The element, for a path with `$[]`.
    pub element: Option<Element>,
}

/// An element of an array, as it was when its value was kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Element {
    /// Its place, with indexes: `lines.3`.
    pub at: String,
    /// The paths in it that hold its reference, with their values.
    pub by: Vec<(String, Option<Bson>)>,
    /// Fingerprint of its other fields, if another element of the target has the same reference.
    pub rest: Fingerprint,
    /// The rule's own paths in the element, which are not among those fields.
    pub own: Vec<String>,
}

/// The SHA-256 of a value, its type included; none for a missing value.
pub type Fingerprint = Option<Vec<u8>>;

/// A kept value.
#[derive(Debug, Clone, PartialEq)]
pub struct KeptValue {
    /// The `_id` of its document.
    pub id: Document,
    /// Its place.
    pub place: Place,
    /// The value; none if it was too large to be kept.
    pub old: Option<RawBson>,
    /// Its fingerprint.
    pub was: Fingerprint,
    /// The fingerprint of the value that denormd wrote.
    pub new: Fingerprint,
}

/// The fingerprint of a value.
#[must_use]
pub fn fingerprint(value: Option<&RawBson>) -> Fingerprint {
    let mut doc = RawDocumentBuf::new();
    doc.append(cstr!("v"), value?.clone());
    Some(Sha256::digest(doc.as_bytes()).to_vec())
}

fn binary(fingerprint: &Fingerprint) -> Bson {
    let binary = |bytes: &Vec<u8>| Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes: bytes.clone() });
    fingerprint.as_ref().map_or(Bson::Null, binary)
}

impl Kept<'_> {
    fn of_rule(&self, rule: &str) -> Document {
        doc! {"deployment": self.deployment, "rule": rule}
    }

    /// Condition on the `_id`s of a rule's kept values, from `after` on.
    fn range(&self, rule: &str, after: Option<&Document>) -> Document {
        let mut end = self.of_rule(rule);
        end.insert("collection", Bson::MaxKey);
        doc! {"_id": {"$gt": after.cloned().unwrap_or_else(|| self.of_rule(rule)), "$lt": end}}
    }

    /// The `_id` of a kept value. The target's `_id` is in it as a fingerprint: the server's answer to an insertion repeats
    /// the `_id`, and the driver cannot read one with a string that is not UTF-8.
    fn id(&self, rule: &str, place: &Place) -> Document {
        let mut id = self.of_rule(rule);
        let target = binary(&fingerprint(RawBson::try_from(place.target.clone()).ok().as_ref()));
        id.extend(doc! {"collection": &place.collection, "target": target, "path": place.path.as_str()});
        if let Some(element) = &place.element {
            let by: Vec<Bson> =
                element.by.iter().map(|(_, value)| Bson::from(value.clone().into_iter().collect::<Vec<_>>())).collect();
            let by = RawBson::try_from(Bson::from(by)).ok();
            id.extend(doc! {"at": element.at.as_str(), "by": binary(&fingerprint(by.as_ref()))});
        }
        id
    }

    /// The statements that keep a value before another one is written. A value that is kept already stays, unless it is marked
    /// ([`Kept::leave`], [`Kept::leave_earlier`]); if the stored value is the one that denormd wrote, its successor is written down. `at`
    /// is the time from which its age counts.
    pub fn statements(
        &self,
        rule: &str,
        place: &Place,
        old: Option<&RawBson>,
        (was, new): (&Fingerprint, &Fingerprint),
        at: DateTime,
    ) -> Result<[RawDocumentBuf; 3]> {
        let raw = |doc: &Document| RawDocumentBuf::try_from(doc).map_err(Error::from);
        let id = self.id(rule, place);
        let target = [place.target.clone()];
        let mut fields = raw(&doc! {"target": target, "was": binary(was), "new": binary(new), "at": at})?;
        if let Some(Element { by, rest, own, .. }) = &place.element {
            let mut pairs = RawArrayBuf::new();
            for (path, value) in by {
                let mut pair = doc! {"path": path.as_str()};
                pair.extend(value.clone().map(|value| ("value".to_owned(), value)));
                pairs.push(raw(&pair)?);
            }
            fields.append(cstr!("by"), pairs);
            if rest.is_some() {
                fields.append(cstr!("rest"), RawBson::try_from(binary(rest))?);
                fields.append(cstr!("own"), RawBson::try_from(Bson::from(own.clone()))?);
            }
        }
        if let Some(old) = old {
            fields.append(cstr!("old"), old.clone());
        }
        let mut unset = doc! {"left": ""};
        for name in ["by", "rest", "own", "old"] {
            if fields.get(name)?.is_none() {
                unset.insert(name, "");
            }
        }
        // Otherwise the stored value is denormd's own, and the one that is kept is still the application's last.
        let is_newer = doc! {"_id": id.clone(), "left": true, "new": {"$ne": binary(was)}};
        let is_ours = doc! {
            "_id": id.clone(), "new": {"$ne": binary(new)}, "$or": [{"new": binary(was)}, {"was": binary(was)}],
        };
        Ok([
            rawdoc! {"q": raw(&doc! {"_id": id.clone()})?, "u": {"$setOnInsert": fields.clone()}, "upsert": true},
            rawdoc! {"q": raw(&is_newer)?, "u": {"$set": fields, "$unset": raw(&unset)?}},
            rawdoc! {"q": raw(&is_ours)?, "u": raw(&doc! {"$set": {"new": binary(new)}, "$unset": {"left": ""}})?},
        ])
    }

    /// Bytes of all kept values of the deployment.
    pub async fn bytes(&self) -> Result<u64> {
        let command = doc! {
            "aggregate": COLLECTION, "cursor": {},
            "pipeline": [
                {"$match": {"_id.deployment": self.deployment}},
                {"$group": {"_id": null, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}},
            ],
        };
        let rows = self.server.read(self.database, command, ClusterTime::default()).await?;
        Ok(decoded(&rows)?.first().and_then(|row| row.get("bytes")).map_or(0, number))
    }

    /// Number of these places of a rule that have a kept value.
    pub async fn count(&self, rule: &str, places: &[&Place]) -> Result<usize> {
        let ids: Vec<Document> = places.iter().map(|place| self.id(rule, place)).collect();
        let command = doc! {"find": COLLECTION, "filter": {"_id": {"$in": ids}}, "projection": {"at": 1}};
        Ok(self.server.read(self.database, command, ClusterTime::default()).await?.len())
    }

    /// A page of a rule's kept values in the order of their `_id`s, those after `after`.
    pub async fn page(&self, rule: &str, after: Option<&Document>) -> Result<Vec<KeptValue>> {
        let command = doc! {
            "find": COLLECTION, "filter": self.range(rule, after), "sort": {"_id": 1}, "limit": PAGE, "batchSize": 100,
        };
        let mut pages = self.server.pages(self.database, command, ClusterTime::default()).await?;
        let (rows, _) = pages.up_to(PAGE_BYTES).await?;
        rows.iter().map(read).collect()
    }

    /// The places of a rule's kept values: collections with paths.
    pub async fn paths(&self, rule: &str) -> Result<Vec<(String, String)>> {
        let command = doc! {
            "aggregate": COLLECTION, "cursor": {},
            "pipeline": [
                {"$match": self.range(rule, None)},
                {"$group": {"_id": {"collection": "$_id.collection", "path": "$_id.path"}}}, {"$sort": {"_id": 1}},
            ],
        };
        let rows = self.server.read(self.database, command, ClusterTime::default()).await?;
        // A place that is left out would not be put back.
        let one = |row: &RawDocumentBuf| {
            let row = Document::try_from(row.as_ref())?;
            let text = |name| row.get_document("_id").and_then(|id| id.get_str(name)).map(ToOwned::to_owned);
            let place = text("collection").and_then(|collection| Ok((collection, text("path")?)));
            place.map_err(|error| unreadable(COLLECTION, &row, &error))
        };
        rows.iter().map(one).collect()
    }

    /// Adds to the number of values of a rule that were not kept, because `undo.max_bytes` was reached.
    pub async fn not_kept(&self, rule: &str, values: u64) -> Result<()> {
        let values = i64::try_from(values).unwrap_or(i64::MAX);
        let update = doc! {"$inc": {"not_kept": values}, "$set": {"at": clock::now()}};
        let kept = self.server.collection(self.database, COLLECTION);
        bounded(kept.update_one(doc! {"_id": self.of_rule(rule)}, update).upsert(true)).await?;
        Ok(())
    }

    /// About how many values of a rule were not kept. A batch that is retried counts again.
    pub async fn count_not_kept(&self, rule: &str) -> Result<u64> {
        let kept = self.server.collection(self.database, COLLECTION);
        let found = bounded(kept.find_one(doc! {"_id": self.of_rule(rule)})).await?;
        let Some(found) = found else { return Ok(0) };
        let values = found.get_i64("not_kept").ok().and_then(|values| u64::try_from(values).ok());
        values.ok_or_else(|| unreadable(COLLECTION, &found, "`not_kept` is no number"))
    }

    /// Forgets that values of a rule were not kept: its next backfill keeps values again.
    pub async fn forget_not_kept(&self, rule: &str) -> Result<()> {
        let kept = self.server.collection(self.database, COLLECTION);
        bounded(kept.delete_one(doc! {"_id": self.of_rule(rule)})).await?;
        Ok(())
    }

    /// Marks the values of a rule that `undo` has left as they are: a later first backfill replaces them.
    pub async fn leave(&self, rule: &str) -> Result<()> {
        let kept = self.server.collection(self.database, COLLECTION);
        bounded(kept.update_many(self.range(rule, None), doc! {"$set": {"left": true}})).await?;
        Ok(())
    }

    /// Marks the values that a rule kept at these paths before this time. The application has owned the paths since, so the next first
    /// backfill keeps its newer values instead. Times are whole seconds; values of the same second are not marked.
    pub async fn leave_earlier(
        &self,
        rule: &str,
        collection: &str,
        paths: &[String],
        before: ClusterTime,
    ) -> Result<()> {
        let mut earlier = self.range(rule, None);
        let before = DateTime::from_millis(i64::from(before.seconds) * 1000);
        earlier.extend(doc! {"_id.collection": collection, "_id.path": {"$in": paths}, "at": {"$lt": before}, "left": {"$ne": true}});
        let kept = self.server.collection(self.database, COLLECTION);
        bounded(kept.update_many(earlier, doc! {"$set": {"left": true}})).await?;
        Ok(())
    }

    /// Deletes the values that are older than `age` by the server's clock. By the clock of a machine that is ahead, all of
    /// them would expire at once. Returns their number.
    pub async fn expire(&self, age: Duration) -> Result<u64> {
        let is_old = doc! {"$lt": ["$at", {"$subtract": ["$$NOW", clock::millis(age)]}]};
        let expired = doc! {"_id.deployment": self.deployment, "at": {"$type": "date"}, "$expr": is_old};
        Ok(bounded(self.server.collection(self.database, COLLECTION).delete_many(expired)).await?.deleted_count)
    }
}

/// Not by serde: a value may be a document with names such as `$oid`, which serde reads as another type. The `_id` has a
/// fingerprint of the target, and an error may name it.
fn read(row: &RawDocumentBuf) -> Result<KeptValue> {
    let mut head = Document::new();
    for field in row {
        let (name, value) = field?;
        if name.as_str() != "old" {
            head.insert(name.as_str(), Bson::try_from(value)?);
        }
    }
    let read = read_head(&head).ok_or_else(|| unreadable(COLLECTION, &head, "a field is missing, or of another type"));
    let (id, place, [was, new]) = read?;
    Ok(KeptValue { id, place, old: row.get("old")?.map(RawBson::from), was, new })
}

fn read_head(head: &Document) -> Option<(Document, Place, [Fingerprint; 2])> {
    let text = |doc: &Document, name: &str| doc.get_str(name).ok().map(ToOwned::to_owned);
    // A value that was missing has the fingerprint null, and `undo` removes it.
    let fingerprint = |name: &str| match head.get(name)? {
        Bson::Null => Some(None),
        Bson::Binary(binary) => Some(Some(binary.bytes.clone())),
        _ => None,
    };
    let id = head.get_document("_id").ok()?;
    let element = match head.get("by") {
        Some(by) => {
            let pair = |pair: &Bson| {
                let pair = pair.as_document()?;
                Some((text(pair, "path")?, pair.get("value").cloned()))
            };
            let by = by.as_array()?.iter().map(pair).collect::<Option<_>>()?;
            let (mut rest, mut own) = (None, Vec::new());
            if head.contains_key("rest") {
                let paths = head.get_array("own").ok()?.iter().map(|path| path.as_str().map(ToOwned::to_owned));
                (rest, own) = (fingerprint("rest")?, paths.collect::<Option<_>>()?);
            }
            Some(Element { at: text(id, "at")?, by, rest, own })
        }
        None => None,
    };
    let target = head.get_array("target").ok()?.first()?.clone();
    let place = Place { collection: text(id, "collection")?, target, path: text(id, "path")?, element };
    Some((id.clone(), place, [fingerprint("was")?, fingerprint("new")?]))
}

impl Element {
    /// The fingerprint of an element without the rule's own paths.
    pub fn rest_of(element: &Bson, own: &[String]) -> Result<Fingerprint> {
        let mut element = element.clone();
        for path in own {
            without(&mut element, path);
        }
        Ok(fingerprint(Some(&RawBson::try_from(element)?)))
    }
}

/// Removes a path. Does not look into arrays.
fn without(value: &mut Bson, path: &str) {
    let Bson::Document(doc) = value else { return };
    match path.split_once('.') {
        None => drop(doc.remove(path)),
        Some((name, below)) => {
            if let Some(inside) = doc.get_mut(name) {
                without(inside, below);
            }
        }
    }
}
