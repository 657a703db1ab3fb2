//! The effect of a rule on existing values: counted before its first write, and shown by `plan`.
//!
//! The count only reads. It is bounded in time and in documents, so that it can run while an application uses the
//! cluster.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    time::Duration,
};

use bson::{Bson, Document, RawBson, RawDocumentBuf, doc};
use serde::Serialize;
use tokio::time::Instant;

use crate::checkpoint::earlier;
use crate::jobs::check::Differing;
use crate::reconcile::{
    Context,
    compare::{Compared, Difference, compare_at_once, projection},
    read,
    value::size_of,
};
use denormd_model::{
    field_path::FieldPath, key::Key, namespace::Namespace, position::ClusterTime, rule_state::Adoption, text::counted,
};
use denormd_mongo::{
    command::decoded,
    error::{Error, Kind, Result},
};
use denormd_rules::{
    config::{Mistake, OnMissing},
    plan::{Assignment, Rule, Values, is_once, narrowed, owned_paths, reference::Role, tree::Tree},
};

use super::in_tree;
use super::sample::{answered, count, keys, sampled, source_holds};

/// Largest collection that is compared as a whole, in documents.
const WHOLE: u64 = 10_000;
/// Targets with a value that are compared in a larger collection.
const HOLDING: i64 = 5000;
/// Targets drawn at random that are compared in addition.
const DRAWN: i64 = 1000;
/// Most documents to draw where few of them are targets with a value.
const MOST_DRAWN: u64 = 50_000;
/// Largest share of the documents to draw, as one in this many: to draw more than a twentieth, the server reads the whole
/// collection.
const SHARE: u64 = 25;
/// Targets in one comparison.
const PAGE: i32 = 200;
/// Targets in the one comparison that reads the sources without an index.
const AT_ONCE: i32 = 1000;
/// Time limit of all comparisons of one rule together.
const BUDGET: Duration = Duration::from_secs(10);
/// Time limit of one read on the server, in milliseconds.
const READ: i64 = 5000;
/// References to look up.
const REFERENCES: i64 = 500;
/// Fewer references than this are not conclusive.
const ENOUGH: u64 = 200;
/// Approximate size of a kept value in addition to the value itself, in bytes.
const KEPT: u64 = 400;
/// Examples of each kind of change.
const EXAMPLES: usize = 3;

/// The effect of a rule on existing data, counted over the compared targets.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Targets in the collection, before its filter.
    pub targets: u64,
    /// Targets that were compared.
    pub compared: u64,
    /// The part of all targets that was compared.
    pub basis: Basis,
    /// Values that would be written where there is none.
    pub adds: u64,
    /// Values that would be replaced by another one.
    pub overwrites: u64,
    /// Values that would be removed.
    pub removes: u64,
    /// Documents that would be deleted, and elements that would be pulled.
    pub deletes: u64,
    /// True if the rule may delete what its last definition did not delete, because not all targets were compared.
    #[serde(skip)]
    pub deletes_unknown: bool,
    /// Documents that would be inserted; None for a rule that inserts none, and where they cannot be counted in time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inserts: Option<u64>,
    /// Values that exist now.
    pub values: u64,
    /// Values on paths that the rule did not own before, and the effect on them.
    pub foreign: Foreign,
    /// Targets that hold a value.
    pub holding: u64,
    /// Of these, targets that would lose a value.
    pub losing: u64,
    /// The targets of a large collection that were drawn at random: the others are those that a scan finds first, the
    /// oldest ones, and a rule may have another effect on the newest.
    #[serde(skip)]
    pub drawn: Drawn,
    /// True if the source collection exists.
    pub source_exists: bool,
    /// References that were looked up.
    pub references: u64,
    /// Of these, references that resolve.
    pub resolved: u64,
}

/// The effect on values that may have been written by others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Foreign {
    /// Values that exist now.
    pub values: u64,
    /// Values that would be replaced.
    pub overwrites: u64,
    /// Values that would be removed.
    pub removes: u64,
    /// Documents and elements that would be deleted.
    pub deletes: u64,
    /// Values that would be kept for `denormd undo`: those replaced or removed, but nothing of what is deleted.
    pub kept: u64,
    /// Approximate size of these values in the state database, in bytes.
    pub kept_bytes: u64,
}

/// Figures of targets that were drawn at random.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Drawn {
    /// The effect on values that may have been written by others.
    pub foreign: Foreign,
    /// Targets that hold a value.
    pub holding: u64,
    /// Of these, targets that would lose a value.
    pub losing: u64,
}

/// The part of the targets that was compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// All targets.
    All,
    /// All targets that have a value, and some of the others.
    AllWithValues,
    /// Some targets.
    #[default]
    Some,
}

/// One change that the rule would make.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The kind of change.
    pub kind: ChangeKind,
    /// The target's `_id`.
    pub target: Bson,
    /// The path of the value.
    pub path: String,
    /// The existing value.
    pub stored: Option<Bson>,
    /// The value that the rule would write.
    pub expected: Option<Bson>,
}

/// The kinds of change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// A value is written where there is none.
    Add,
    /// A value is replaced by another one.
    Overwrite,
    /// A value is removed.
    Remove,
    /// The target or its element is deleted.
    Delete,
}

/// The count of one rule.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Count {
    /// The figures.
    #[serde(flatten)]
    pub figures: Figures,
    /// A few changes of each kind. They contain values, which are shown on request only.
    #[serde(skip)]
    pub examples: Vec<Change>,
}

/// The relation of a rule to earlier definitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It owned none of its paths before.
    New,
    /// Another definition of it has run.
    Changed,
}

/// The writes of an earlier definition of a rule to the same targets.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EarlierWrites {
    /// The paths that it wrote.
    pub paths: BTreeSet<String>,
    /// The scalar constants in the rule's `otherwise`, by path; empty if the earlier definition had a different `otherwise`. A
    /// value that such a constant replaces counts as lost.
    pub constants: Vec<(String, Bson)>,
    /// True if it deleted the same documents or elements as the rule does now. Documents that a rule creates are an exception: it
    /// kept those with a value on a path that it did not own.
    pub deletes: bool,
}

impl EarlierWrites {
    /// The writes of this definition; none without one.
    #[must_use]
    pub fn of(rule: &Rule, earlier: Option<&Document>) -> Self {
        let decides = |definition: &Document| {
            let parts = definition.clone().into_iter();
            parts.filter(|(name, _)| !matches!(name.as_str(), "values" | "sort" | "shadow")).collect::<Document>()
        };
        // A shadow rule wrote nothing, and a rule with other targets wrote nothing that counts here. The values of a rule that was
        // `once` may be the application's. So may those that `on_missing: keep` has kept, unless the same references dangle now.
        let kept_missing =
            |earlier: &Document| earlier.get_str("on_missing").is_ok_and(|policy| policy == OnMissing::Keep.stored());
        let counts = |earlier: &&Document| {
            earlier.get("target") == rule.definition.get("target")
                && !earlier.get_bool("shadow").unwrap_or_default()
                && (!is_once(earlier) || is_once(&rule.definition))
                && (!kept_missing(earlier) || decides(earlier) == decides(&rule.definition))
        };
        let earlier = earlier.map(|earlier| narrowed(earlier, &rule.definition));
        let Some(earlier) = earlier.as_ref().filter(counts) else { return Self::default() };
        let otherwise = |definition: &Document| definition.get_document("values").ok()?.get("otherwise").cloned();
        // Without a source, the earlier definition kept the document.
        let values = earlier.get_document("values").ok();
        let kept = values.is_some_and(|values| values.get_str("on_empty").is_ok_and(|on_empty| on_empty == "keep"));
        let gave_others = otherwise(earlier).is_some_and(|before| Some(before) != otherwise(&rule.definition));
        Self {
            paths: owned_paths(earlier).iter().map(ToString::to_string).collect(),
            constants: if gave_others { Vec::new() } else { constants(rule) },
            // A rule may delete the documents that it has created.
            deletes: !kept
                && (rule.creates.is_some() && earlier.get_bool("create").unwrap_or_default()
                    || decides(earlier) == decides(&rule.definition)),
        }
    }

    /// True if the expected value equals a constant of `otherwise`, as for a target without a source.
    fn loses_source(&self, Difference { path, expected, .. }: &Difference) -> bool {
        let is_expected = |constant: &Bson| {
            let expected = expected.clone().map(Bson::try_from);
            expected.is_some_and(|expected| expected.is_ok_and(|expected| expected == *constant))
        };
        self.constants.iter().any(|(known, constant)| known == path && is_expected(constant))
    }
}

/// The constants in `otherwise`, by path.
fn constants(rule: &Rule) -> Vec<(String, Bson)> {
    let Values::Set { assignments, otherwise: Some(values), .. } = &rule.values else { return Vec::new() };
    let constant = |expression: &Bson| match expression {
        Bson::String(text) if text.starts_with('$') => None,
        Bson::Document(expression) => expression.get("$literal").cloned(),
        Bson::Array(_) => None,
        value => Some(value.clone()),
    };
    let of_path = |(one, value): (&Assignment, &Option<Bson>)| Some((one.path.to_string(), constant(value.as_ref()?)?));
    assignments.iter().zip(values).filter_map(of_path).collect()
}

impl Figures {
    /// The reasons why a person must agree before the rule writes, each in a few words; none where nothing is at stake.
    #[must_use]
    pub fn objections(&self, standing: Standing) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.compared == 0 && self.basis == Basis::Some {
            reasons.push("what it would do to existing values could not be counted in time".to_owned());
        }
        let Foreign { values, overwrites, removes, deletes, .. } = self.foreign;
        if removes > 0 {
            reasons.push(format!("it would remove {}", some(removes, values, "existing value")));
        }
        if deletes > 0 {
            let what = if deletes == 1 { "document or element" } else { "documents or elements" };
            let of = if self.basis == Basis::All { String::new() } else { format!(" ({})", self.stated_basis()) };
            reasons.push(format!("it would delete {deletes} {what}{of}"));
        }
        let drawn = self.drawn.foreign;
        let (overwrites, most) = larger((overwrites, values), (drawn.overwrites, drawn.values));
        if overwrites * 100 > most {
            reasons.push(format!("it would overwrite {}", some(overwrites, most, "existing value")));
        }
        if self.deletes_unknown && self.compared > 0 {
            reasons.push(format!("it may delete targets or elements that were not compared ({})", self.stated_basis()));
        }
        let (losing, holding) = self.losses();
        if standing == Standing::Changed && losing * 100 > holding {
            reasons.push(format!("{} would lose their value", some(losing, holding, "target")));
        }
        // Data without values needs no agreement.
        if values > 0 {
            if !self.source_exists {
                reasons.push("its source collection does not exist".to_owned());
            } else if self.references >= ENOUGH && self.resolved * 100 < self.references {
                reasons.push(format!("only {} of {} sampled references resolve", self.resolved, self.references));
            }
        }
        reasons
    }

    /// The record of this effect, with the reasons why a person must agree to it.
    #[must_use]
    pub fn adoption(&self, causes: Vec<String>) -> Adoption {
        Adoption {
            adds: self.adds,
            overwrites: self.overwrites,
            removes: self.removes + self.deletes,
            total: self.compared,
            sampled: self.basis != Basis::All,
            causes,
        }
    }

    /// True if the rule would write nothing, as far as the compared targets tell. False if too little is known.
    #[must_use]
    pub fn writes_nothing(&self, rule: &Rule) -> bool {
        let Self { adds, overwrites, removes, deletes, .. } = *self;
        let enough = self.basis != Basis::Some || self.compared >= DRAWN.unsigned_abs();
        let inserts_none = rule.creates.is_none() || self.inserts == Some(0);
        enough && inserts_none && !self.deletes_unknown && adds + overwrites + removes + deletes == 0
    }

    /// The existing values or documents that are not the rule's own and that it may change; None if there are none.
    #[must_use]
    pub fn at_stake(&self, rule: &Rule, before: &EarlierWrites) -> Option<String> {
        let deletes = rule.may_delete() && !before.deletes && self.targets > 0;
        match self.foreign.values {
            0 => deletes.then(|| counted(self.targets, "existing document")),
            values => Some(counted(values, "existing value")),
        }
    }

    /// The reason why a person must agree to a rule that reads fields which another one, `feeder`, has not written yet.
    #[must_use]
    pub fn unknown_before(feeder: &str, at_stake: &str) -> String {
        format!(
            "it reads fields that `{feeder}` has not written yet, so its effect on {at_stake} is unknown: wait until `{feeder}` is \
             live, then run `denormd plan`"
        )
    }

    /// The targets that would lose a value, and those that hold one: of all compared targets, or of those drawn at random,
    /// whichever lose more.
    fn losses(&self) -> (u64, u64) {
        larger((self.losing, self.holding), (self.drawn.losing, self.drawn.holding))
    }

    /// True if more than one percent of the existing values would be replaced.
    #[must_use]
    pub fn replaces_many(&self) -> bool {
        self.overwrites * 100 > self.values
    }

    /// The reason why a person must agree to a rule that replaces its own values and looks like a mistake.
    #[must_use]
    pub fn suspected(&self, mistake: &Mistake) -> String {
        let overwritten = some(self.overwrites, self.values, "existing value");
        let hint = mistake.hint.as_deref().unwrap_or_default();
        format!("it would overwrite {overwritten}, and it looks like a mistake: {} ({hint})", mistake.message)
    }

    /// The values that would be kept for `denormd undo`, and their size in bytes, of all targets.
    #[must_use]
    pub fn kept(&self) -> (u64, u64) {
        let Foreign { kept, kept_bytes, .. } = self.foreign;
        if self.basis != Basis::Some {
            return (kept, kept_bytes);
        }
        let whole = |part: u64| part.saturating_mul(self.targets.max(self.compared)) / self.compared.max(1);
        (whole(kept), whole(kept_bytes))
    }

    /// A description of the compared targets.
    #[must_use]
    pub fn stated_basis(&self) -> String {
        match self.basis {
            Basis::Some if self.compared == 0 => "not counted: that took too long".to_owned(),
            Basis::All if self.inserts.is_some() => {
                format!("all {} compared, and the keys of all sources counted", counted(self.compared, "target"))
            }
            Basis::All => format!("all {} compared", counted(self.compared, "target")),
            Basis::AllWithValues => format!(
                "{} of about {} compared, among them all that hold a value",
                counted(self.compared, "target"),
                self.targets
            ),
            Basis::Some => format!("sample: {} of about {} compared", counted(self.compared, "target"), self.targets),
        }
    }
}

/// The larger of two ratios, each a part and its whole.
fn larger(one: (u64, u64), other: (u64, u64)) -> (u64, u64) {
    if other.0.saturating_mul(one.1) > one.0.saturating_mul(other.1) { other } else { one }
}

fn some(part: u64, whole: u64, noun: &str) -> String {
    format!("{part} of {}", counted(whole, noun))
}

/// The use of a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// To decide whether the rule may write: what it adds does not matter.
    Decision,
    /// To be shown. With `at_once`, sources are read in one pass, for rules without an index yet.
    Show {
        /// True if the rule has no index yet.
        at_once: bool,
    },
}

/// Counts the changes that `rule` would make. `before` says what its last definition did.
pub async fn figures(context: &Context, rule: &Rule, before: &EarlierWrites, of: Use) -> Result<Count> {
    let at_once = of == Use::Show { at_once: true };
    let target = &rule.target.namespace;
    let source = &rule.source.namespace;
    let after = context.server.operation_time().await?;
    let begun = Instant::now();
    let mut counting =
        Counting { context, rule, before, at_once, after, begun, seen: BTreeSet::new(), out: Count::default() };
    counting.out.figures.source_exists = context.server.has_collection(&source.database, &source.collection).await?;
    let total = count(context, rule, Role::Target).await?;
    counting.out.figures.targets = total;
    // Most new rules own new fields, and have nothing to overwrite or to remove.
    if !rule.may_delete() && !may_hold_values(context, rule, &rule.owned(), after).await? {
        counting.out.figures.basis = Basis::AllWithValues;
        if of == Use::Decision {
            return Ok(counting.out);
        }
    }
    let page = counting.page();
    let find = |filter: Document, limit: i64| {
        let mut command = doc! {
            "find": &target.collection, "filter": filter, "projection": projection(rule), "batchSize": page,
            "maxTimeMS": READ, "collation": read::simple_collation(),
        };
        if limit > 0 {
            command.insert("limit", limit);
        }
        command
    };
    let mine = rule.target.filter.clone().unwrap_or_default();
    if let Some(tree) = rule.tree {
        counting.tree(tree).await?;
    } else if total <= WHOLE {
        if counting.take(find(mine, 0), u64::MAX).await? {
            counting.out.figures.basis = Basis::All;
        }
    } else {
        let holding = doc! {"$and": [mine.clone(), exists(&rule.owned())]};
        let draw = |size: i64, filter: Document| {
            doc! {
                "aggregate": &target.collection, "cursor": {"batchSize": page}, "maxTimeMS": READ, "allowDiskUse": true,
                "pipeline": [
                    {"$sample": {"size": size}}, {"$match": filter}, {"$limit": DRAWN}, {"$project": projection(rule)},
                ],
                "collation": read::simple_collation(),
            }
        };
        let drawn = counting.take(draw(DRAWN, mine), u64::MAX).await?;
        let more = i64::try_from((total / SHARE).min(MOST_DRAWN)).unwrap_or(DRAWN);
        if counting.out.figures.holding < ENOUGH && more > DRAWN {
            counting.take(draw(more, holding.clone()), u64::MAX).await?;
        }
        let Figures { foreign, holding: holds, losing, .. } = counting.out.figures;
        counting.out.figures.drawn = Drawn { foreign, holding: holds, losing };
        let all = counting.take(find(holding, HOLDING), HOLDING.unsigned_abs()).await?;
        // A target without a value can be deleted as well: only a comparison of all targets would tell.
        if all && drawn && counting.out.figures.deletes == 0 && !rule.may_delete() {
            counting.out.figures.basis = Basis::AllWithValues;
        }
    }
    // Without an index yet, fewer targets are compared than the daemon will compare.
    let is_partial = rule.may_delete() && !at_once && counting.out.figures.basis != Basis::All;
    // A comparison takes the values in such documents for the application's, which keep a document.
    let may_own_more = rule.creates.as_ref().is_some_and(|creates| !creates.keeps && !creates.owned_where.is_empty());
    let is_unknown = is_partial && (!before.deletes || counting.may_have_foreign_values().await?)
        || may_own_more && !before.deletes && counting.out.figures.holding > 0;
    counting.out.figures.deletes_unknown = is_unknown;
    counting.references().await?;
    counting.out.figures.inserts = super::created::inserts(context, rule).await?;
    Ok(counting.out)
}

/// The name of a rule that this one reads from, directly or through other rules, and that has not finished writing.
pub async fn unsettled_feeder(context: &Context, rule: &Rule) -> Result<Option<String>> {
    let feeders = context.plan.feeders(rule.id);
    if feeders.is_empty() {
        return Ok(None);
    }
    let database = &context.dead_letters.database;
    let settled = earlier::settled(&context.server, database, &context.plan).await?;
    let earlier = earlier::definitions(&context.server, database, &context.plan).await?;
    for feeder in feeders.into_iter().filter(|feeder| !settled.contains(feeder)) {
        let feeder = context.plan.rule(feeder);
        let own = EarlierWrites::of(feeder, earlier.get(&feeder.name));
        // As `plan` counts it: a decision compares nothing where no target holds a value.
        match Box::pin(figures(context, feeder, &own, Use::Show { at_once: false })).await {
            Ok(counted) if counted.figures.writes_nothing(feeder) => {}
            Err(error) if error.is_transient() => return Err(error),
            _ => return Ok(Some(feeder.name.clone())),
        }
    }
    Ok(None)
}

/// The current effect of a rule that waits for an agreement to it, or the reason why it cannot be counted. Fails while the rule reads
/// fields that another rule has not written yet: nobody can know what they would agree to.
pub async fn recounted(context: &Context, rule: &Rule) -> Result<std::result::Result<Figures, String>> {
    let earlier = earlier::definitions(&context.server, &context.dead_letters.database, &context.plan).await?;
    let own = EarlierWrites::of(rule, earlier.get(&rule.name));
    let figures = match Box::pin(figures(context, rule, &own, Use::Decision)).await {
        Ok(counted) => counted.figures,
        Err(error) if error.is_transient() => return Err(error),
        Err(error) => return Ok(Err(error.message)),
    };
    if let Some(at_stake) = figures.at_stake(rule, &own)
        && let Some(feeder) = unsettled_feeder(context, rule).await?
    {
        let message = format!("rule `{}`: {}", rule.name, Figures::unknown_before(&feeder, &at_stake));
        return Err(Error::new(Kind::State, message).hint("`adopt: true` in the rule agrees to any effect"));
    }
    Ok(Ok(figures))
}

/// The values that a backfill of a rule would remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Losses {
    /// Compared targets that hold a value.
    pub holding: u64,
    /// Those that would lose it.
    pub losing: u64,
    /// False if no target could be compared in time.
    pub counted: bool,
}

impl Losses {
    /// True if a rule whose source was dropped or replaced may go on by itself: at most a tenth of its values would go.
    #[must_use]
    pub fn are_small(&self) -> bool {
        self.counted && self.losing * 10 <= self.holding
    }
}

impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.counted {
            write!(f, "{} would lose their value", some(self.losing, self.holding, "target"))
        } else {
            f.write_str("the values that it would remove could not be counted in time")
        }
    }
}

/// Counts the values that a backfill of a rule would remove.
pub async fn losses(context: &Context, rule: &Rule) -> Result<Losses> {
    if rule.shadow {
        return Ok(Losses { holding: 0, losing: 0, counted: true });
    }
    let own = EarlierWrites::of(rule, Some(&rule.definition));
    let figures = Box::pin(figures(context, rule, &own, Use::Decision)).await?.figures;
    let ((losing, holding), Figures { compared, basis, .. }) = (figures.losses(), figures);
    Ok(Losses { holding, losing, counted: compared > 0 || basis != Basis::Some })
}

/// Number of leading rows, one at least, that together have at most this number of bytes.
fn within(rows: &[RawDocumentBuf], bytes: usize) -> usize {
    let mut sum = 0;
    let fit = rows.iter().take_while(|row| {
        sum += row.as_bytes().len();
        sum <= bytes
    });
    fit.count().max(1).min(rows.len())
}

/// Condition that a target has anything on one of these paths.
fn exists(paths: &[&FieldPath]) -> Document {
    doc! {"$or": paths.iter().map(|path| doc! {path.query(): {"$exists": true}}).collect::<Vec<_>>()}
}

/// True if a target of the rule has anything on one of these paths, null included, or if the read takes too long to tell.
async fn may_hold_values(context: &Context, rule: &Rule, paths: &[&FieldPath], after: ClusterTime) -> Result<bool> {
    let Namespace { database, collection } = &rule.target.namespace;
    let mine = rule.target.filter.clone().unwrap_or_default();
    let find = doc! {
        "find": collection, "filter": {"$and": [mine, exists(paths)]}, "projection": {"_id": 1}, "limit": 1, "maxTimeMS": READ,
        "collation": read::simple_collation(),
    };
    match context.server.read(database, find, after).await {
        Ok(found) => Ok(!found.is_empty()),
        Err(error) if error.kind == Kind::ReadTimedOut => Ok(true),
        Err(error) => Err(error),
    }
}

struct Counting<'a> {
    context: &'a Context,
    rule: &'a Rule,
    before: &'a EarlierWrites,
    at_once: bool,
    after: ClusterTime,
    begun: Instant,
    /// The targets that were compared.
    seen: BTreeSet<Key>,
    out: Count,
}

impl Counting<'_> {
    fn page(&self) -> i32 {
        if self.at_once { AT_ONCE } else { PAGE }
    }

    /// Compares the targets that a command finds, page by page. True if it found fewer than `most`, and all of them
    /// were compared.
    async fn take(&mut self, command: Document, most: u64) -> Result<bool> {
        let database = &self.rule.target.namespace.database;
        let mut found = 0;
        let result: Result<bool> = async {
            let mut pages = self.context.server.pages(database, command, self.after).await?;
            while let Some(page) = pages.next().await? {
                found += page.len() as u64;
                let mut rows = page.as_slice();
                while !rows.is_empty() {
                    if self.begun.elapsed() > BUDGET || (self.at_once && self.out.figures.compared > 0) {
                        return Ok(false);
                    }
                    let (part, rest) = rows.split_at(within(rows, self.context.limits.batch_bytes));
                    if !self.compare(decoded(part)?).await? {
                        return Ok(false);
                    }
                    rows = rest;
                }
            }
            Ok(true)
        }
        .await;
        match result {
            Ok(whole) => Ok(whole && found < most),
            Err(error) if error.kind == Kind::ReadTimedOut => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// True if a document of a rule that creates its targets may have a value on a path that the rule did not own before.
    async fn may_have_foreign_values(&self) -> Result<bool> {
        let is_new = |path: &&FieldPath| !self.before.paths.contains(&path.to_string());
        let paths: Vec<&FieldPath> = self.rule.owned().into_iter().filter(is_new).collect();
        if self.rule.creates.is_none() || paths.is_empty() {
            return Ok(false);
        }
        may_hold_values(self.context, self.rule, &paths, self.after).await
    }

    /// Compares a whole tree, unless it is too large.
    async fn tree(&mut self, tree: Tree) -> Result<()> {
        let (context, rule) = (self.context, self.rule);
        let compared = if self.at_once || self.out.figures.targets > in_tree::MOST {
            None
        } else {
            in_tree::compare(context, rule, tree, self.after, self.begun + BUDGET).await?
        };
        let Some(in_tree::Compare { compared, failing }) = compared else { return Ok(()) };
        self.out.figures.compared += failing;
        self.out.figures.basis = Basis::All;
        compared.iter().try_for_each(|compared| self.add(compared))
    }

    /// Compares one page of targets. False when it took too long.
    async fn compare(&mut self, targets: Vec<Document>) -> Result<bool> {
        let is_new = |target: &Document| self.seen.insert(Key::of_document(target));
        let fresh: Vec<Document> = targets.into_iter().filter(is_new).collect();
        let (rule, at_once) = (self.rule, self.at_once);
        let sources = |keys: &[&Key]| {
            let mut command = if at_once { read::sources_at_once(rule, keys) } else { read::sources(rule, keys) };
            command.insert("maxTimeMS", READ);
            command
        };
        let (context, after) = (self.context, self.after);
        let of_id: HashMap<Key, &Document> = fresh.iter().map(|target| (Key::of_document(target), target)).collect();
        let is_refused = |compared: &Compared| {
            let target = of_id.get(&Key::one(compared.target.clone()));
            target.is_some_and(|target| compared.in_the_way(rule, target).is_some())
        };
        let mut stack: Vec<&[Document]> = fresh.chunks(self.page().unsigned_abs() as usize).collect();
        while let Some(part) = stack.pop() {
            let mut take = |compared: Result<Compared>| {
                match compared {
                    // It becomes a dead letter, and keeps its values.
                    Ok(compared) if is_refused(&compared) => self.out.figures.compared += 1,
                    Ok(compared) => self.add(&compared)?,
                    Err(error) if error.kind == Kind::Refused => self.out.figures.compared += 1,
                    Err(error) => return Err(error),
                }
                Ok(())
            };
            match compare_at_once(context, rule, part, after, (context.limits.read_timeout, Some(&sources)), &mut take)
                .await
            {
                Ok(()) => {}
                // The expressions fail on a document, or the sources are too large together.
                Err(error)
                    if matches!(error.kind, Kind::Refused | Kind::TooLarge)
                        && part.len() > 1
                        && self.begun.elapsed() <= BUDGET =>
                {
                    let (front, back) = part.split_at(part.len() / 2);
                    stack.extend([back, front]);
                }
                // It becomes a dead letter, and keeps its values.
                Err(error) if error.kind == Kind::Refused && part.len() == 1 => self.out.figures.compared += 1,
                Err(error) if matches!(error.kind, Kind::Refused | Kind::ReadTimedOut | Kind::TooLarge) => {
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn add(&mut self, compared: &Compared) -> Result<()> {
        let figures = &mut self.out.figures;
        figures.compared += 1;
        let (mut holds, mut loses) = (false, false);
        let mut gone: BTreeSet<Option<usize>> = BTreeSet::new();
        // The earlier definition left a document alone that has a value on a path which it did not own.
        let is_foreign = |field: &Difference| !self.before.paths.contains(&field.path) && field.stored.is_some();
        let kept_before = self.rule.creates.is_some() && compared.fields.iter().any(is_foreign);
        for field in &compared.fields {
            let own = self.before.paths.contains(&field.path);
            let value = !says_nothing(field.stored.as_ref());
            holds |= value;
            figures.values += u64::from(value);
            figures.foreign.values += u64::from(value && !own);
            let Some(kind) = kind(field) else { continue };
            loses |= value && (loses_value(field) || self.before.loses_source(field));
            if let (Some(stored), ChangeKind::Overwrite | ChangeKind::Remove, false) = (&field.stored, kind, own) {
                figures.foreign.kept += 1;
                figures.foreign.kept_bytes += KEPT + size_of(&[Some(stored.clone())]) as u64;
            }
            match kind {
                ChangeKind::Add => figures.adds += 1,
                ChangeKind::Overwrite => {
                    figures.overwrites += 1;
                    figures.foreign.overwrites += u64::from(!own);
                }
                ChangeKind::Remove => {
                    figures.removes += 1;
                    figures.foreign.removes += u64::from(!own);
                }
                ChangeKind::Delete => {
                    // Every owned path of the element reports it.
                    if !gone.insert(field.element) {
                        continue;
                    }
                    figures.deletes += 1;
                    figures.foreign.deletes += u64::from(!self.before.deletes || kept_before);
                    (holds, loses) = (true, true);
                }
            }
            if self.out.examples.iter().filter(|example| example.kind == kind).count() < EXAMPLES {
                self.out.examples.push(example(kind, field)?);
            }
        }
        figures.holding += u64::from(holds);
        figures.losing += u64::from(loses);
        Ok(())
    }

    /// Counts the references that resolve, in a sample of the side that holds them.
    async fn references(&mut self) -> Result<()> {
        let (role, other) =
            if source_holds(self.rule) { (Role::Source, Role::Target) } else { (Role::Target, Role::Source) };
        // A reference that does not resolve gets its document.
        if self.rule.creates.is_some() || self.at_once || self.begun.elapsed() > BUDGET {
            return Ok(());
        }
        let fields = vec![doc! {"$project": self.rule.reference.projection(role)}];
        let held: Result<_> = async {
            let documents = sampled(self.context, self.rule, role, REFERENCES, fields).await?;
            let held: Vec<Vec<Key>> =
                documents.iter().map(|document| keys(self.rule, role, document).collect()).collect();
            let there = answered(self.context, self.rule, &held, other).await?;
            Ok((held, there))
        }
        .await;
        let (held, there) = match held {
            Ok(found) => found,
            Err(error) if error.leaves_unknown() => return Ok(()),
            Err(error) => return Err(error),
        };
        let resolves = |key: &&Key| there.binary_search(key).is_ok();
        self.out.figures.references = held.iter().flatten().count() as u64;
        self.out.figures.resolved = held.iter().flatten().filter(resolves).count() as u64;
        Ok(())
    }
}

/// The change at one path; None if it stays as it is.
fn kind(field: &Difference) -> Option<ChangeKind> {
    if !field.differs() {
        return None;
    }
    let value = !says_nothing(field.stored.as_ref());
    match &field.expected {
        Some(RawBson::Undefined) => Some(ChangeKind::Delete),
        expected if says_nothing(expected.as_ref()) => value.then_some(ChangeKind::Remove),
        _ if value => Some(ChangeKind::Overwrite),
        _ => Some(ChangeKind::Add),
    }
}

/// True if there is nothing, or a value that stands for nothing: null, or an empty array.
fn says_nothing(value: Option<&RawBson>) -> bool {
    match value {
        None | Some(RawBson::Null | RawBson::Undefined) => true,
        Some(RawBson::Array(array)) => array.is_empty(),
        Some(_) => false,
    }
}

/// True if a value is lost. A sum over no sources is 0, which loses the value as well.
fn loses_value(field: &Difference) -> bool {
    let zero = |value: Option<&RawBson>| match value {
        Some(RawBson::Int32(0) | RawBson::Int64(0)) => true,
        Some(RawBson::Double(number)) => *number == 0.0,
        _ => false,
    };
    let (expected, stored) = (field.expected.as_ref(), field.stored.as_ref());
    says_nothing(expected) || (zero(expected) && !zero(stored))
}

fn example(kind: ChangeKind, field: &Difference) -> Result<Change> {
    let (expected, stored) = Differing::of(field, true)?.values.unwrap_or_default();
    Ok(Change { kind, target: field.target.clone(), path: field.path.clone(), stored, expected })
}
