//! Compares the documents of a tree with the values that a backfill would give them.
//!
//! A recursive rule computes a document from its parent or from its children, as these are stored, and a backfill
//! writes them first. So here each document is computed from what a backfill would have written before, level by level:
//! a new value at the root replaces those of all documents below it. Reads only.

use std::{cmp::Reverse, collections::HashMap, time::Duration};

use bson::{Bson, Document, RawDocumentBuf, doc};
use tokio::time::Instant;

use crate::reconcile::{
    Context,
    applied::applied,
    by_target::{self, Referrer},
    compare::{Compared, one, projection},
    places::reason,
    read::simple_collation,
    value::Rows,
};
use denormd_model::{
    field_path::FieldPath,
    key::{Key, id_of},
    position::ClusterTime,
};
use denormd_mongo::{
    command::{decoded, limited},
    error::{Error, Kind, Result},
};
use denormd_rules::plan::{
    Rule,
    reference::Role,
    tree::{Place, Tree},
};

/// Largest tree that is compared, in documents: the value of each may follow from any other.
pub(super) const MOST: u64 = 50_000;
/// Documents in one read.
const PAGE: usize = 200;
/// Size of the values that one command may contain, in bytes.
const BYTES: usize = 4 << 20;
/// Time limit of one read.
const READ: Duration = Duration::from_secs(5);

/// The comparison of a whole tree.
#[derive(Debug, Default)]
pub(super) struct Compare {
    /// The documents with the values that they would get.
    pub compared: Vec<Compared>,
    /// Documents that would become dead letters because their values cannot be computed or written.
    pub failing: u64,
}

/// Compares all documents of the tree. None if that takes too long.
pub(super) async fn compare(
    context: &Context,
    rule: &Rule,
    tree: Tree,
    after: ClusterTime,
    deadline: Instant,
) -> Result<Option<Compare>> {
    let documents = match documents(context, rule, tree, after).await {
        Ok(documents) => documents,
        Err(error) if error.kind == Kind::ReadTimedOut => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut levels = Levels::of(rule, tree, documents);
    let mut out = Compare::default();
    out.compared.append(&mut levels.kept);
    for level in std::mem::take(&mut levels.keys) {
        let mut stack: Vec<&[Key]> = level.chunks(PAGE).collect();
        while let Some(page) = stack.pop() {
            if Instant::now() > deadline {
                return Ok(None);
            }
            match levels.page(context, rule, page, after).await {
                Ok(compared) => {
                    for compared in compared {
                        levels.settle(rule, compared, &mut out)?;
                    }
                }
                Err(error) if error.kind == Kind::ReadTimedOut => return Ok(None),
                Err(error) if matches!(error.kind, Kind::Refused | Kind::TooLarge) && page.len() > 1 => {
                    let (front, back) = page.split_at(page.len() / 2);
                    stack.extend([back, front]);
                }
                // It becomes a dead letter, and keeps its values.
                Err(error) if matches!(error.kind, Kind::Refused | Kind::TooLarge) => out.failing += 1,
                Err(error) => return Err(error),
            }
        }
    }
    Ok(Some(out))
}

async fn documents(context: &Context, rule: &Rule, tree: Tree, after: ClusterTime) -> Result<Vec<Document>> {
    let target = &rule.target.namespace;
    let mut fields = projection(rule);
    fields.extend(rule.reference.paths(tree.parent).map(|path| (path.root().to_owned(), Bson::Int32(1))));
    let command = doc! {
        "find": &target.collection, "filter": rule.target.filter.clone().unwrap_or_default(), "projection": fields,
        "batchSize": 10_000, "collation": simple_collation(),
    };
    decoded(&context.server.read(&target.database, limited(command, READ), after).await?)
}

/// The documents of a tree, each level after those that it reads.
struct Levels {
    /// The documents as a backfill leaves them, as far as it has come.
    documents: HashMap<Key, Document>,
    /// The documents that each document reads.
    sources: HashMap<Key, Vec<Key>>,
    /// The keys of each level.
    keys: Vec<Vec<Key>>,
    /// Documents that keep their values: those of a circle, and those that are too deep.
    kept: Vec<Compared>,
}

impl Levels {
    fn of(rule: &Rule, tree: Tree, documents: Vec<Document>) -> Self {
        let documents: HashMap<Key, Document> =
            documents.into_iter().map(|document| (Key::of_document(&document), document)).collect();
        let parent = |document: &Document| rule.reference.keys(tree.parent, document).pop().flatten();
        let parents: HashMap<Key, Option<Key>> =
            documents.iter().map(|(key, document)| (key.clone(), parent(document))).collect();
        let mut sources: HashMap<Key, Vec<Key>> = HashMap::new();
        for (key, parent) in &parents {
            let Some(parent) = parent.clone().filter(|parent| parents.contains_key(parent)) else { continue };
            match tree.parent {
                Role::Target => sources.entry(key.clone()).or_default().push(parent),
                Role::Source => sources.entry(parent).or_default().push(key.clone()),
            }
        }
        let mut kept = Vec::new();
        let mut by_depth: Vec<(usize, Key)> = Vec::new();
        for (key, document) in &documents {
            let place = tree.place(key, &parents);
            match &place {
                Place::Node(ancestors) if reason(tree, &place).is_none() => {
                    by_depth.push((ancestors.len(), key.clone()));
                }
                _ => kept.push(Compared { target: id_of(document), fields: Vec::new(), references: Vec::new() }),
            }
        }
        match tree.parent {
            Role::Target => by_depth.sort_unstable(),
            Role::Source => {
                by_depth.sort_unstable_by(|one, other| (Reverse(one.0), &one.1).cmp(&(Reverse(other.0), &other.1)));
            }
        }
        let levels = by_depth.chunk_by(|one, other| one.0 == other.0);
        let keys = levels.map(|level| level.iter().map(|(_, key)| key.clone()).collect()).collect();
        Self { documents, sources, keys, kept }
    }

    /// Compares documents of one level.
    async fn page(&self, context: &Context, rule: &Rule, page: &[Key], after: ClusterTime) -> Result<Vec<Compared>> {
        let targets: Vec<&Document> = page.iter().filter_map(|key| self.documents.get(key)).collect();
        let references: Vec<Vec<Option<Key>>> =
            targets.iter().map(|target| rule.reference.keys(Role::Target, target)).collect();
        let asked: Vec<Referrer> =
            targets.iter().zip(&references).map(|(target, references)| Referrer { target, references }).collect();
        let settled = |target: &Bson| self.settled(rule, target);
        let mut rows = Rows::within(usize::MAX);
        if by_target::share_sources(rule, &asked) {
            let command = by_target::sources_at_once(rule, &asked, Some(&settled));
            Self::read(context, rule, command, after, &mut rows).await?;
        }
        let rest = by_target::without_rows(&asked, &rows);
        if !rest.is_empty() {
            Self::read(context, rule, by_target::sources(rule, &rest, Some(&settled)), after, &mut rows).await?;
        }
        targets
            .iter()
            .zip(references)
            .map(|(target, references)| one(rule, &rows, target, references, &|_| true))
            .collect()
    }

    async fn read(
        context: &Context,
        rule: &Rule,
        command: Document,
        after: ClusterTime,
        rows: &mut Rows,
    ) -> Result<()> {
        if RawDocumentBuf::try_from(&command)?.as_bytes().len() > BYTES {
            return Err(Error::new(Kind::TooLarge, "these documents have more sources than a command may contain"));
        }
        let database = &rule.source.namespace.database;
        let found = context.server.read(database, limited(command, READ), after).await?;
        found.iter().try_for_each(|row| rows.take(row))
    }

    /// The documents that a target reads, as `{ k: _id, v: the fields that the rule writes }`.
    fn settled(&self, rule: &Rule, target: &Bson) -> Vec<Document> {
        let sources = self.sources.get(&Key::one(target.clone())).into_iter().flatten();
        let written = |document: &Document| -> Document {
            let roots = rule.owned().into_iter().map(FieldPath::root);
            roots.filter_map(|root| Some((root.to_owned(), document.get(root)?.clone()))).collect()
        };
        sources
            .filter_map(|source| self.documents.get(source))
            .map(|document| doc! {"k": id_of(document), "v": written(document)})
            .collect()
    }

    /// Takes the values of a document.
    fn settle(&mut self, rule: &Rule, compared: Compared, out: &mut Compare) -> Result<()> {
        let key = Key::one(compared.target.clone());
        let Some(document) = self.documents.get_mut(&key) else { return Ok(()) };
        if compared.in_the_way(rule, document).is_some() {
            out.failing += 1;
            return Ok(());
        }
        if let Some(written) = applied(rule, document.clone(), &compared)? {
            *document = written;
        }
        out.compared.push(compared);
        Ok(())
    }
}
