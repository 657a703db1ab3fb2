//! Reads all targets of a rule in the order of their `_id`s, a page at a time.

use std::{iter, time::Duration};

use tokio::time::Instant;

use bson::{Bson, Document, RawDocumentBuf, doc};

use crate::reconcile::{context::Context, read::simple_collation};
use denormd_model::{namespace::Namespace, position::ClusterTime};
use denormd_mongo::{
    command::{decoded, limited},
    error::{Kind, Result},
};
use denormd_rules::plan::{Rule, Side, reference::Role};

/// A page ends early with this many bytes.
const BYTES: usize = 8 << 20;
/// Documents are decoded in parts of this many bytes. Decoded, a document takes up to ten times the memory.
const DECODED: usize = 1 << 20;
/// Most documents that a page covers if few of them match the filter and reading a full page takes too long. Each
/// further timeout reduces it to an eighth.
const WINDOW: i64 = 20_000;
/// The most documents that a page may cover after that: their index entries are skipped to find the end of the page.
const WIDEST: i64 = 2_000_000;
/// Divisor of `limits.read_timeout` for one page: progress is saved between pages.
const PART: u32 = 8;

/// A page of targets, in the order of `_id`.
#[derive(Debug, Default)]
pub struct Page {
    /// The targets. There may be none although others follow.
    pub targets: Vec<RawDocumentBuf>,
    /// The `_id` that the next page follows; None after the last target.
    pub last: Option<Bson>,
}

impl Page {
    /// The `_id` up to which it has read: for the last page, that of its last target, if it has one.
    pub fn reached(&self) -> Result<Option<Bson>> {
        if self.last.is_some() { Ok(self.last.clone()) } else { last_id(&self.targets) }
    }
}

/// Reads up to `limit` targets that follow `after`, with the fields of `projection`.
///
/// `min` with a hint compares across BSON types, where `$gt` stays within one; it includes its bound, and leaves out a
/// target whose `_id` is MaxKey, which is read by itself at the end. The index gives the order, but each shard's answers
/// are in an order of their own: a router is told to sort. A replica set is not, because under another collation than the
/// index's it would sort the whole rest of the collection for each page.
pub async fn page(
    context: &Context,
    rule: &Rule,
    projection: &Document,
    after: Option<&Bson>,
    limit: usize,
    time: ClusterTime,
) -> Result<Page> {
    let filter = rule.target.filter.clone().unwrap_or_default();
    page_of(context, rule, Wanted { filter: &filter, projection, limit }, after, time).await
}

/// A selection of documents of a collection.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Condition on the documents.
    pub filter: &'a Document,
    /// Fields to read.
    pub projection: &'a Document,
    /// Most documents to read.
    pub limit: usize,
}

/// The same for documents of the target collection that match another filter. A page takes a fraction of the read
/// timeout, however few documents match: it covers as many documents as can be scanned in that time.
pub async fn page_of(
    context: &Context,
    rule: &Rule,
    wanted: Wanted<'_>,
    after: Option<&Bson>,
    time: ClusterTime,
) -> Result<Page> {
    page_of_side(context, (rule, Role::Target), wanted, after, time).await
}

/// The same for documents of the source or the target collection.
pub async fn page_of_side(
    context: &Context,
    (rule, role): (&Rule, Role),
    wanted: Wanted<'_>,
    after: Option<&Bson>,
    time: ClusterTime,
) -> Result<Page> {
    let traits = &context.memory.traits;
    let side = if role == Role::Source { &rule.source } else { &rule.target };
    let mut window = traits.of(rule.id, |traits| traits.windows.get(&role).copied()).flatten();
    let page = page_of_collection(context, &side.namespace, wanted, after, time, &mut window).await;
    if let Some(window) = window {
        traits.learn(rule.id, |traits| _ = traits.windows.insert(role, window));
    }
    page
}

/// The same for documents of any collection. `window` is the number of documents that the page covers, or
/// None for all; it is adapted for the next page.
pub async fn page_of_collection(
    context: &Context,
    namespace: &Namespace,
    wanted: Wanted<'_>,
    after: Option<&Bson>,
    time: ClusterTime,
    window: &mut Option<i64>,
) -> Result<Page> {
    if after == Some(&Bson::MaxKey) {
        return Ok(Page::default());
    }
    let limit = i64::try_from(wanted.limit).unwrap_or(i64::MAX - 1);
    let (timeout, sorted) = (context.limits.read_timeout, context.server.is_router().await?);
    loop {
        // A single document gets the whole timeout.
        let time_limit = if *window == Some(1) { timeout } else { timeout / PART };
        let scan = Scan { context, namespace, wanted, after, time, time_limit, sorted };
        let begun = Instant::now();
        match scan.covering(*window, limit).await {
            // Too many documents for the time, or one on which the filter cannot be evaluated.
            Err(error) if matches!(error.kind, Kind::ReadTimedOut | Kind::Refused) && *window != Some(1) => {
                *window = Some(window.map_or(WINDOW, |window| window / 8).max(1));
            }
            Err(error) if error.kind == Kind::Refused => {
                let page = scan.one_by_one(limit).await?;
                *window = Some(next_window(1, true, false));
                return Ok(page);
            }
            page => {
                let page = page?;
                let is_full = page.targets.len() >= wanted.limit;
                let quick = begun.elapsed() < time_limit / 4;
                *window = window.map(|window| next_window(window, quick, is_full));
                return Ok(page);
            }
        }
    }
}

/// Number of documents that the next page covers. Where pages are full, it stays small.
fn next_window(window: i64, quick: bool, is_full: bool) -> i64 {
    match (quick, is_full) {
        (_, true) => window.min(WINDOW),
        (true, false) => window.saturating_mul(2).min(WIDEST),
        (false, false) => window,
    }
}

#[derive(Clone, Copy)]
struct Scan<'a> {
    context: &'a Context,
    namespace: &'a Namespace,
    wanted: Wanted<'a>,
    after: Option<&'a Bson>,
    time: ClusterTime,
    /// Time limit of a read.
    time_limit: Duration,
    /// Sort explicitly.
    sorted: bool,
}

impl Scan<'_> {
    fn filter(&self) -> Document {
        self.wanted.filter.clone()
    }

    /// The next targets among this number of documents, or among all.
    async fn covering(&self, window: Option<i64>, limit: i64) -> Result<Page> {
        let bound = match window {
            Some(window) => self.document_after(window).await?,
            None => None,
        };
        let mut page = match self.matching(bound.as_ref(), limit).await {
            Err(error) if error.kind == Kind::Refused && (is_text(self.after) || is_text(bound.as_ref())) => {
                self.in_its_own_order(limit.min(window.unwrap_or(limit))).await?
            }
            page => self.with_bound(page?, bound).await?,
        };
        if page.last.is_none() {
            self.add_max_key(&mut page).await?;
        }
        Ok(page)
    }

    /// The next targets up to `bound`, under the simple collation.
    async fn matching(&self, bound: Option<&Bson>, limit: i64) -> Result<Page> {
        let mut command = doc! {
            "find": &self.namespace.collection, "filter": self.filter(), "projection": self.wanted.projection.clone(),
            "collation": simple_collation(),
        };
        command.extend(bound.map(|bound| ("max".to_owned(), doc! {"_id": bound.clone()}.into())));
        self.some(command, limit).await
    }

    /// The `_id` of the document after this number of others; None if there are fewer.
    async fn document_after(&self, window: i64) -> Result<Option<Bson>> {
        let mut command = self.ordered(doc! {
            "find": &self.namespace.collection, "projection": {"_id": 1}, "skip": window, "limit": 1,
        });
        command.insert("singleBatch", true);
        last_id(&self.read(command).await?)
    }

    /// The page that ends at this bound, or before it if it is full. The bound itself was excluded, and the next page
    /// excludes the document that it follows.
    async fn with_bound(&self, mut page: Page, bound: Option<Bson>) -> Result<Page> {
        if let (None, Some(bound)) = (&page.last, bound) {
            let command = doc! {
                "find": &self.namespace.collection, "filter": {"$and": [{"_id": {"$eq": &bound}}, self.filter()]},
                "projection": self.wanted.projection.clone(), "collation": simple_collation(), "limit": 1,
            };
            page.targets.extend(self.read(command).await?);
            page.last = Some(bound);
        }
        Ok(page)
    }

    /// The next documents, each filtered by itself. One on which the filter cannot be evaluated counts as chosen: commands about it
    /// fail alone, and it becomes a dead letter.
    async fn one_by_one(self, limit: i64) -> Result<Page> {
        let everything = Document::new();
        let all =
            Scan { wanted: Wanted { filter: &everything, ..self.wanted }, ..self }.covering(Some(1), limit).await?;
        let mut page = Page { targets: Vec::new(), last: all.last };
        for target in all.targets {
            let command = doc! {
                "find": &self.namespace.collection, "projection": {"_id": 1}, "limit": 1, "collation": simple_collation(),
                "filter": {"$and": [{"_id": {"$eq": id(&target)?}}, self.filter()]},
            };
            match self.read(command).await {
                Ok(found) if found.is_empty() => {}
                Err(error) if error.kind != Kind::Refused => return Err(error),
                Ok(_) | Err(_) => page.targets.push(target),
            }
        }
        Ok(page)
    }

    /// The next targets in the order of a collection's own collation. `min` requires that collation, the rule's filter
    /// the simple one: the documents are sent back to the server, which filters them in a separate command.
    async fn in_its_own_order(&self, limit: i64) -> Result<Page> {
        let read = self.some(doc! {"find": &self.namespace.collection}, limit).await?;
        let mut page = Page { targets: Vec::new(), last: read.last };
        // A command document may hardly be larger than the largest document.
        let bytes = size(&read.targets);
        let at_once = if bytes > BYTES { 1 } else { read.targets.len().max(1) };
        for targets in read.targets.chunks(at_once) {
            let literals = decoded(targets)?.into_iter().map(|target| doc! {"d": {"$literal": target}});
            let stages = vec![
                doc! {"$documents": literals.collect::<Vec<_>>()},
                doc! {"$replaceWith": "$d"},
                doc! {"$match": self.filter()},
                doc! {"$project": self.wanted.projection.clone()},
            ];
            let command = doc! {"aggregate": 1, "pipeline": stages, "cursor": {}, "collation": simple_collation()};
            page.targets.extend(self.read(command).await?);
        }
        Ok(page)
    }

    /// Documents that follow `after`, in the order of `_id`.
    async fn some(&self, command: Document, limit: i64) -> Result<Page> {
        // The document at the lower bound is read as well.
        let limit = limit.saturating_add(i64::from(self.after.is_some()));
        let mut command = limited(self.ordered(command), self.time_limit);
        command.extend(doc! {"limit": limit, "batchSize": limit});
        let database = &self.namespace.database;
        let mut pages = self.context.server.pages(database, command, self.time).await?;
        let (mut targets, mut bytes, mut end) = (Vec::new(), 0, true);
        while let Some(batch) = pages.next().await? {
            bytes += size(&batch);
            targets.extend(batch);
            if bytes > BYTES && targets.len() > 1 {
                end = false;
                break;
            }
        }
        end &= i64::try_from(targets.len()).is_ok_and(|read| read < limit);
        let first = targets.first().map(id).transpose()?.flatten();
        if self.after.is_some() && first.as_ref() == self.after {
            targets.remove(0);
        }
        let last = if end { None } else { last_id(&targets)? };
        Ok(Page { targets, last })
    }

    fn ordered(&self, command: Document) -> Document {
        by_id(command, self.after, self.sorted)
    }

    /// Adds the target whose `_id` is MaxKey to the last page.
    async fn add_max_key(&self, page: &mut Page) -> Result<()> {
        if self.after.is_none() {
            return Ok(());
        }
        let command = doc! {
            "find": &self.namespace.collection,
            "filter": {"$and": [{"_id": {"$eq": Bson::MaxKey}}, self.filter()]},
            "projection": self.wanted.projection.clone(), "collation": simple_collation(), "limit": 1,
        };
        page.targets.extend(self.read(command).await?);
        Ok(())
    }

    async fn read(&self, command: Document) -> Result<Vec<RawDocumentBuf>> {
        let command = limited(command, self.time_limit);
        self.context.server.read(&self.namespace.database, command, self.time).await
    }
}

/// The same read in the order of `_id`, from `after` on.
fn by_id(mut command: Document, after: Option<&Bson>, sorted: bool) -> Document {
    command.insert("hint", doc! {"_id": 1});
    command.extend(after.map(|after| ("min".to_owned(), doc! {"_id": after.clone()}.into())));
    if sorted {
        command.insert("sort", doc! {"_id": 1});
    }
    command
}

/// True for a bound that the `_id` index of a collection with its own collation cannot find under the simple collation.
fn is_text(bound: Option<&Bson>) -> bool {
    matches!(bound, Some(Bson::String(_) | Bson::Symbol(_) | Bson::Document(_) | Bson::Array(_)))
}

/// The documents, a part at a time: each part is small unless a single document is not.
pub fn decoded_in_parts(mut rows: &[RawDocumentBuf]) -> impl Iterator<Item = Result<Vec<Document>>> {
    iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |row: &&RawDocumentBuf| {
            bytes += row.as_bytes().len();
            bytes <= DECODED
        };
        let count = rows.iter().take_while(fits).count().max(1);
        let (part, rest) = rows.split_at_checked(count)?;
        rows = rest;
        Some(decoded(part))
    })
}

/// The size of documents in bytes.
fn size(rows: &[RawDocumentBuf]) -> usize {
    rows.iter().map(|row| row.as_bytes().len()).sum()
}

fn id(row: &RawDocumentBuf) -> Result<Option<Bson>> {
    Ok(row.get("_id")?.map(Bson::try_from).transpose()?)
}

/// The `_id` of the last document.
fn last_id(rows: &[RawDocumentBuf]) -> Result<Option<Bson>> {
    Ok(rows.last().map(id).transpose()?.flatten())
}

/// Approximate number of targets that follow `after`, and of the sources of a rule that creates its targets; with
/// `in_sources`, of the sources that follow it. For progress only; None when counting takes too long.
pub async fn count(context: &Context, rule: &Rule, after: Option<&Bson>, in_sources: bool) -> Option<u64> {
    if in_sources {
        return count_side(context, &rule.source, after).await;
    }
    let targets = count_side(context, &rule.target, after).await?;
    let sources = if rule.creates.is_some() { count_side(context, &rule.source, None).await? } else { 0 };
    Some(targets + sources)
}

/// The same for one side of a rule. `$gt` counts only ids of the same BSON type.
pub async fn count_side(context: &Context, side: &Side, after: Option<&Bson>) -> Option<u64> {
    let mut filter = side.filter.clone().unwrap_or_default();
    if let Some(after) = after {
        filter = doc! {"$and": [{"_id": {"$gt": after.clone()}}, filter]};
    }
    context.server.count(&side.namespace, filter).await.ok()
}

#[cfg(test)]
mod tests {
    use bson::rawdoc;

    use super::*;

    /// Without a sort, a router passes on a shard's documents as they come: a page ended at a large `_id` of one shard,
    /// and the smaller ones of the others were never read.
    #[test]
    fn a_router_is_told_to_sort() {
        let page = |sorted| by_id(doc! {"find": "log"}, Some(&Bson::Int32(7)), sorted);
        assert_eq!(page(false), doc! {"find": "log", "hint": {"_id": 1}, "min": {"_id": 7}});
        assert_eq!(page(true), doc! {"find": "log", "hint": {"_id": 1}, "min": {"_id": 7}, "sort": {"_id": 1}});
    }

    #[test]
    fn documents_are_decoded_in_small_parts() {
        let row = |id: i32, bytes: usize| rawdoc! {"_id": id, "text": "x".repeat(bytes)};
        let rows = [row(0, 100), row(1, DECODED / 2), row(2, DECODED / 2), row(3, 2 * DECODED), row(4, 100)];
        let ids = |part: Result<Vec<Document>>| part.unwrap().iter().map(|row| row.get_i32("_id").unwrap()).collect();
        let parts: Vec<Vec<i32>> = decoded_in_parts(&rows).map(ids).collect();
        assert_eq!(parts, [vec![0, 1], vec![2], vec![3], vec![4]]);
        assert_eq!(decoded_in_parts(&[]).count(), 0);
    }

    #[test]
    fn a_page_covers_more_while_it_is_quick_and_finds_few() {
        assert_eq!(next_window(100, true, false), 200);
        assert_eq!(next_window(100, false, false), 100);
        assert_eq!(next_window(WIDEST, true, false), WIDEST);
        assert_eq!(next_window(WIDEST, true, true), WINDOW);
        assert_eq!(next_window(100, true, true), 100);
    }
}
