//! The whole analysis: inspects the cluster, finds relationships, measures each and derives the advice.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::Duration,
};

use bson::Bson;
use secrecy::SecretString;

use denormd_model::{
    field_path::{FieldPath, Segment},
    key::Key,
    namespace::Namespace,
};
use denormd_mongo::{
    Server,
    error::{self, Error, Result},
};
use denormd_rules::{
    config::Advise,
    plan::{Plan, Rule, Values},
};

use super::{
    advice::{Advice, Kind},
    ask::Ask,
    copies,
    decide::{
        self,
        collection::{Array, Usage},
    },
    facts::{Candidate, Form, Place, Rate, Relationship, Shown, Side},
    fan_out,
    inventory::{self, Collection, Inventory},
    names,
    reads::{self, Reads},
    relationships::{self, End, Evidence, HeldKey, Link, Sampled},
    updates::{self, History},
};
use denormd_model::distribution::{Distribution, Known};

/// Maximum number of relationships to measure.
const MEASURED: usize = 200;
/// Maximum average size, in bytes, of a field that is suggested for copying.
const SMALL: u64 = 200;

/// The options of the command.
#[derive(Debug, Clone)]
pub struct Options {
    /// The databases to inspect.
    pub databases: BTreeSet<String>,
    /// The database of collection names without a database.
    pub default: Option<String>,
    /// denormd's own database.
    pub state: String,
    /// Observation time of the counters; zero uses the totals since the members started.
    pub observe: Duration,
    /// Relationships given by the user: `products.parts.id=parts._id`.
    pub told: Vec<(String, String)>,
    /// Thresholds and bounds.
    pub thresholds: Advise,
}

/// The results of the analysis.
#[derive(Debug, Clone)]
pub struct Report {
    /// The database of collection names without a database.
    pub default: Option<String>,
    /// The inspected collections.
    pub inspection: Inventory,
    /// The changes, read from the oplog.
    pub history: Known<History>,
    /// The reads, from the members' counters.
    pub reads: Reads,
    /// The relationships, with their advice.
    pub relationships: Vec<(Relationship, Vec<Advice>)>,
    /// The collections, with their advice.
    pub collections: Vec<(Namespace, Vec<Advice>)>,
    /// Advice on the cluster as a whole.
    pub cluster: Vec<Advice>,
    /// Remarks on omissions.
    pub notes: Vec<String>,
}

/// Inspects, measures and decides. Reads only.
pub async fn report(
    server: &Server,
    uri: &SecretString,
    plan: &Plan,
    options: &Options,
    say: &dyn Fn(&str),
) -> Result<Report> {
    let ask = Ask::new(server.client());
    let bounds = &options.thresholds;
    let listing = inventory::list(&ask, &options.databases, &options.state).await?;
    let namespaces = listing.namespaces();
    // The counters come first, so that they do not include our own reads.
    say(&format!("counting reads for {} s (--observe), then reading the oplog", options.observe.as_secs()));
    let observation = reads::begin(&ask, uri, &namespaces).await?;
    let reads = observation.end(options.observe, &namespaces).await?;
    // The oplog comes last, so that it covers the observation time of the counters.
    let history = updates::history(&ask, &namespaces, bounds).await?;
    say(&format!("sampling {} collections", namespaces.len()));
    let inspection = inventory::inventory(&ask, listing, bounds).await?;
    let mut notes = inspection.left_out.clone();
    let mut links = find(&ask, &inspection, &reads, plan, options, &mut notes).await?;
    if links.len() > MEASURED {
        notes.push(format!(
            "{} of {} relationships were not measured: name them with --match",
            links.len() - MEASURED,
            links.len()
        ));
        links.truncate(MEASURED);
    }
    let inspected =
        Inspected { ask: &ask, inspection: &inspection, history: &history, reads: &reads, plan, links: &links, bounds };
    let mut measured = Vec::new();
    for link in &links {
        say(&format!("measuring {}.{}", link.holder.namespace.collection, link.holder.path));
        measured.extend(inspected.measure(link).await?);
    }
    let relationships = advised(measured, options);
    let mut collections = Vec::new();
    for collection in &inspection.collections {
        let arrays = inspected.arrays(collection).await?;
        let advice = decide::collection::decide(collection, &arrays, &inspected.usage(collection), bounds);
        collections.push((collection.namespace.clone(), advice));
    }
    let cluster = decide::cluster::decide(&inspection, &reads, bounds);
    let default = options.default.clone();
    Ok(Report { default, inspection, history, reads, relationships, collections, cluster, notes })
}

/// The advice for each relationship, once all are measured.
fn advised(measured: Vec<Relationship>, options: &Options) -> Vec<(Relationship, Vec<Advice>)> {
    let few = |facts: &&Relationship| {
        let few = |fan_out: &Distribution| fan_out.p99 < options.thresholds.embed_elements;
        facts.form == Form::One && facts.fan_out.distribution.as_ref().is_ok_and(few)
    };
    let parents: Vec<(Namespace, Namespace)> = measured
        .iter()
        .filter(few)
        .map(|facts| (facts.link.holder.namespace.clone(), facts.link.held.namespace.clone()))
        .collect();
    let mut said = HashSet::new();
    let decide = |mut facts: Relationship| {
        let others = parents
            .iter()
            .filter(|(holder, held)| *holder == facts.link.holder.namespace && *held != facts.link.held.namespace);
        facts.parents = others.map(|(_, held)| held.collection.clone()).collect();
        let mut advice = decide::relationship::decide(&facts, &options.thresholds, options.default.as_deref());
        // One index serves several relationships, and advice on joins to one collection is given once.
        advice.retain(|advice| match advice.kind {
            Kind::IndexMissing | Kind::Projection => said.insert(advice.command.clone().unwrap_or(advice.says.clone())),
            _ => true,
        });
        (facts, advice)
    };
    measured.into_iter().map(decide).collect()
}

/// Finds the relationships among the inspected collections.
async fn find(
    ask: &Ask,
    inspection: &Inventory,
    reads: &Reads,
    plan: &Plan,
    options: &Options,
    notes: &mut Vec<String>,
) -> Result<Vec<Link>> {
    let sampled: Vec<Sampled<'_>> = inspection
        .collections
        .iter()
        .map(|collection| Sampled {
            namespace: &collection.namespace,
            shape: &collection.shape,
            count: collection.count,
        })
        .collect();
    let mut told = Vec::new();
    for (holder, held) in &options.told {
        let (holder, held) = (end(inspection, options, holder)?, end(inspection, options, held)?);
        told.push(Link { holder, held, found: Evidence::Told, copies: Vec::new() });
    }
    told.extend(of_rules(plan, notes));
    told.extend(joined_by_lookups(inspection, reads));
    let holders = relationships::holders(&sampled, |namespace, path| is_owned(plan, namespace, path));
    let keys = relationships::keys(&sampled);
    let mut present = Vec::new();
    for key in &keys {
        present.push(wanted(ask, inspection, key, &relationships::wanted(key, &holders), &options.thresholds).await?);
    }
    let found = relationships::links(&holders, &keys, &present);
    let known = |link: &Link| {
        inspection.collection(&link.holder.namespace).is_some() && inspection.collection(&link.held.namespace).is_some()
    };
    let mut links = relationships::joined(told, relationships::db_refs(&sampled), found);
    links.retain(known);
    Ok(links)
}

/// Finds the wanted values that a key's collection has. Skips a large collection without an index on the key.
async fn wanted(
    ask: &Ask,
    inspection: &Inventory,
    key: &HeldKey,
    values: &[Bson],
    bounds: &Advise,
) -> Result<HashSet<Key>> {
    let Some(held) = inspection.collection(&key.end.namespace) else { return Ok(HashSet::new()) };
    let whole = held.shape.field(&key.end.path).is_some_and(|field| field.all_values)
        && held.how == denormd_model::distribution::How::Exact;
    if !whole && !held.is_indexed(&key.end.path.query()) && held.count > bounds.scan_documents / 10 {
        return Ok(HashSet::new());
    }
    fan_out::present(ask, held, &key.end.path, values).await
}

fn is_owned(plan: &Plan, namespace: &Namespace, path: &FieldPath) -> bool {
    plan.rules.iter().any(|rule| {
        rule.target.namespace == *namespace && rule.owned().iter().any(|owned| owned.overlaps_loosely(path))
    })
}

/// The relationships in the `match` pairs of the config's rules.
fn of_rules(plan: &Plan, notes: &mut Vec<String>) -> Vec<Link> {
    let mut links: Vec<Link> = Vec::new();
    for rule in &plan.rules {
        let [pair] = rule.reference.pairs.as_slice() else {
            notes.push(format!("rule {}: several pairs in `match` are not measured", rule.name));
            continue;
        };
        let source = End { namespace: rule.source.namespace.clone(), path: pair.source.clone() };
        let target = End { namespace: rule.target.namespace.clone(), path: pair.target.clone() };
        // The referring side is the one that is not matched by its `_id`, or else the one with an array.
        let source_refers = target.path.to_string() == "_id" || (source.path.has_each() && !target.path.has_each());
        let (holder, held) = if source_refers { (source, target) } else { (target, source) };
        links.push(Link { holder, held, found: Evidence::Told, copies: Vec::new() });
    }
    links
}

fn joined_by_lookups(inspection: &Inventory, reads: &Reads) -> Vec<Link> {
    let path = |namespace: &Namespace, query: &str| {
        inspection.collection(namespace)?.shape.query_field(query).map(|field| field.path.clone())
    };
    let mut links: Vec<Link> = Vec::new();
    for query in &reads.slow {
        for lookup in &query.lookups {
            let from = Namespace { database: query.namespace.database.clone(), collection: lookup.from.clone() };
            let (Some(local), Some(foreign)) = (path(&query.namespace, &lookup.local), path(&from, &lookup.foreign))
            else {
                continue;
            };
            let local = End { namespace: query.namespace.clone(), path: local };
            let foreign = End { namespace: from, path: foreign };
            let backwards = local.path.to_string() == "_id" || (foreign.path.has_each() && !local.path.has_each());
            let (holder, held) = if backwards { (foreign, local) } else { (local, foreign) };
            links.push(Link { holder, held, found: Evidence::Joined, copies: Vec::new() });
        }
    }
    links
}

/// Parses `products.parts.id` as a collection and a path. The sample shows which names are arrays.
fn end(inspection: &Inventory, options: &Options, text: &str) -> Result<End> {
    let names = inspection.collections.iter().flat_map(|collection| {
        let bare = (options.default.as_ref() == Some(&collection.namespace.database))
            .then(|| collection.namespace.collection.clone());
        [Some(collection.namespace.to_string()), bare].into_iter().flatten().map(move |name| (name, collection))
    });
    let found = names
        .filter_map(|(name, collection)| Some((name.len(), collection, text.strip_prefix(&name)?.strip_prefix('.')?)))
        .max_by_key(|(length, ..)| *length);
    let wrong = |why: String| Error::new(error::Kind::Config, why).hint("write --match products.parts.id=parts._id");
    let Some((_, collection, path)) = found else {
        return Err(wrong(format!("--match: no collection that was looked at begins `{text}`")));
    };
    let parsed = FieldPath::parse(path).map_err(|error| wrong(format!("--match: `{path}`: {error}")))?;
    let known = if parsed.has_each() {
        Some(parsed)
    } else {
        collection.shape.query_field(path).map(|field| field.path.clone())
    };
    let path = known.ok_or_else(|| {
        wrong(format!("--match: no document of the sample of `{}` has a key at {path}", collection.namespace))
    })?;
    Ok(End { namespace: collection.namespace.clone(), path })
}

/// The data that every measurement uses.
struct Inspected<'a> {
    ask: &'a Ask,
    inspection: &'a Inventory,
    history: &'a Known<History>,
    reads: &'a Reads,
    plan: &'a Plan,
    links: &'a [Link],
    bounds: &'a Advise,
}

impl Inspected<'_> {
    async fn measure(&self, link: &Link) -> Result<Option<Relationship>> {
        let (Some(holder), Some(held)) =
            (self.inspection.collection(&link.holder.namespace), self.inspection.collection(&link.held.namespace))
        else {
            return Ok(None);
        };
        let form = form(&link.holder.path);
        let array = link.holder.path.array_prefix().and_then(|each| parent(&each));
        let lengths = match &array {
            Some(array) => fan_out::lengths(self.ask, holder, array, self.bounds).await?,
            None => None,
        };
        let mut fields = self.copyable(held, &link.held.path);
        let copied: HashSet<String> =
            self.rules(&link.held, &link.holder).flat_map(|rule| read_by(&rule.values)).collect();
        fields.retain(|field| !copied.contains(&format!("${field}")));
        let copied = copies::find(self.ask, link, form, holder, held, &fields).await?;
        Ok(Some(Relationship {
            form,
            db_ref: db_ref(holder, &link.holder.path),
            fan_out: fan_out::count(self.ask, link, holder, held, self.bounds).await?,
            lengths,
            duplicates: match link.held.path.to_string().as_str() {
                "_id" => Ok(0),
                _ => fan_out::duplicates(self.ask, held, &link.held.path, self.bounds).await?,
            },
            holder: self.side(holder, &link.holder.path),
            held: self.side(held, &link.held.path),
            back: self.back(link, form),
            others: self.links.iter().filter(|other| refers_to_holder(other, link)).count(),
            collected: self.rules(&link.holder, &link.held).next().is_some(),
            parents: Vec::new(),
            shown: self.shown(link),
            joins: self.joins(link),
            fields: fields.into_iter().map(|field| self.candidate(link, form, holder, field, &copied)).collect(),
            link: link.clone(),
        }))
    }

    /// The config's rules from one end of a relationship to the other.
    fn rules<'a>(&'a self, from: &'a End, to: &'a End) -> impl Iterator<Item = &'a std::sync::Arc<Rule>> {
        self.plan.rules.iter().filter(move |rule| {
            let pair = rule.reference.pairs.as_slice();
            rule.source.namespace == from.namespace
                && rule.target.namespace == to.namespace
                && matches!(pair, [pair] if pair.source == from.path && pair.target == to.path)
        })
    }

    /// Small top-level fields that are neither keys nor references.
    fn copyable(&self, held: &Collection, key: &FieldPath) -> Vec<FieldPath> {
        const COPYABLE: [&str; 8] = ["string", "int", "long", "double", "decimal", "date", "bool", "objectId"];
        let refers = |path: &FieldPath| {
            self.links
                .iter()
                .any(|link| link.holder.namespace == held.namespace && link.holder.path.root() == path.root())
        };
        let fields = held.shape.children(None).filter(|field| {
            let name = field.path.to_string();
            let scalar = COPYABLE.iter().filter_map(|kind| field.types.get(kind)).sum::<u64>() * 2 > field.met;
            name != "_id" && field.path != *key && scalar && field.average_bytes() <= SMALL && !refers(&field.path)
        });
        fields.map(|field| field.path.clone()).filter(|path| !is_owned(self.plan, &held.namespace, path)).collect()
    }

    fn candidate(
        &self,
        link: &Link,
        form: Form,
        holder: &Collection,
        field: FieldPath,
        copied: &[copies::Copied],
    ) -> Candidate {
        let found = copied.iter().find(|copied| copied.field == field);
        let each = link.holder.path.array_prefix();
        let place = match (form, &each) {
            (Form::Subdocuments, Some(each)) => format!("{each}.{field}"),
            (Form::Ids, Some(each)) => format!("{}_info.$[].{field}", each.query()),
            _ => format!("{}_{field}", names::about(&link.holder.path)),
        };
        let place = FieldPath::parse(&place).unwrap_or_else(|_| field.clone());
        let taken = holder.shape.field(&place).is_some();
        let (place, held) = match found {
            Some(found) => (found.place.clone(), found.held),
            None => (place, if taken { Place::Taken } else { Place::Free }),
        };
        let updates = self.times(&link.held.namespace, |changes| changes.of_field(&field));
        Candidate { path: field, updates, place, held }
    }

    /// The rate of a kind of change, over the period that the history covers.
    fn times(&self, namespace: &Namespace, of: impl Fn(&updates::Changes) -> u64) -> Option<Rate> {
        let history = self.history.as_ref().ok()?;
        Some(Rate { times: of(&history.of(namespace)), seconds: f64::from(history.seconds()) })
    }

    fn side(&self, collection: &Collection, path: &FieldPath) -> Side {
        let namespace = &collection.namespace;
        let seconds = self.reads.seconds;
        let index = collection.index(&path.query());
        let time =
            collection.shape.children(None).find(|field| field.has_type("date")).map(|field| field.path.to_string());
        Side {
            namespace: namespace.clone(),
            count: collection.count,
            size: collection.size,
            reads: self.reads.of(namespace).map(|used| Rate { times: used.reads, seconds }).filter(|_| seconds > 0.0),
            by_reference: index.and_then(|index| self.reads.index(namespace, &index.name)),
            changes: self.times(namespace, updates::Changes::all),
            made_per_day: collection.shape.made_per_day(collection.count),
            indexed: index.is_some(),
            names: collection.shape.children(None).map(|field| field.path.to_string()).collect(),
            time,
        }
    }

    /// The field of the referenced side that refers back.
    fn back(&self, link: &Link, form: Form) -> Option<FieldPath> {
        let mirrors = |other: &&Link| {
            other.holder.namespace == link.held.namespace
                && other.held.namespace == link.holder.namespace
                && (other.holder.path.has_each()) == (form == Form::One)
                && self::form(&other.holder.path) != Form::Subdocuments
        };
        self.links.iter().find(mirrors).map(|other| other.holder.path.clone())
    }

    /// The most frequent limit with which the application reads the documents that refer to one document.
    fn shown(&self, link: &Link) -> Option<Shown> {
        let path = link.holder.path.query();
        let mut seen: BTreeMap<(u64, Vec<(String, i64)>), u64> = BTreeMap::new();
        for query in self.reads.slow.iter().filter(|query| query.namespace == link.holder.namespace) {
            if let Some(limit) = query.limit.filter(|limit| (2..=1000).contains(limit))
                && query.filter.contains(&path)
            {
                *seen.entry((limit, query.sort.clone())).or_default() += 1;
            }
        }
        let ((limit, sort), _) = seen.into_iter().max_by_key(|(_, times)| *times)?;
        Some(Shown { limit, sort })
    }

    /// Counts the joins to the referenced collection, and those that fetch whole documents.
    fn joins(&self, link: &Link) -> (u64, u64) {
        let held = &link.held;
        let key = held.path.query();
        let mut joins = (0, 0);
        for query in &self.reads.slow {
            let lookups = query.lookups.iter().filter(|lookup| {
                query.namespace.database == held.namespace.database
                    && lookup.from == held.namespace.collection
                    && lookup.foreign == key
            });
            let listed = query.namespace == held.namespace && query.lists.contains(&key);
            for projected in lookups.map(|lookup| lookup.projected).chain(listed.then_some(query.projected)) {
                joins = (joins.0 + 1, joins.1 + u64::from(!projected));
            }
        }
        joins
    }

    async fn arrays(&self, collection: &Collection) -> Result<Vec<Array>> {
        let refers = |path: &FieldPath| {
            let into = |link: &Link| {
                let array = link.holder.path.array_prefix().and_then(|each| parent(&each));
                link.holder.namespace == collection.namespace && array.as_ref() == Some(path)
            };
            self.links.iter().any(into) || is_owned(self.plan, &collection.namespace, path)
        };
        let mut arrays = decide::collection::arrays(collection, refers);
        for array in arrays.iter_mut().filter(|array| !array.refers) {
            if let Some(lengths) = fan_out::lengths(self.ask, collection, &array.path, self.bounds).await? {
                array.lengths = lengths;
            }
            let query = array.path.query();
            let slices = self.reads.slow.iter().filter(|seen| seen.namespace == collection.namespace);
            array.shown =
                slices.flat_map(|seen| &seen.slices).find(|(path, _)| *path == query).map(|(_, shown)| *shown);
        }
        Ok(arrays)
    }

    fn usage(&self, collection: &Collection) -> Vec<Usage> {
        let usage = |index: &inventory::Index| {
            let used = self.reads.indexes.get(&(collection.namespace.clone(), index.name.clone()));
            Usage { name: index.name.clone(), works: index.works, used: used.map(|used| (used.ever, used.seconds)) }
        };
        collection.indexes.iter().map(usage).collect()
    }
}

/// The fields that a rule's expressions read, with a dollar sign: `$name`.
fn read_by(values: &Values) -> Vec<String> {
    fn strings(value: &Bson, out: &mut Vec<String>) {
        match value {
            Bson::String(text) => out.push(text.clone()),
            Bson::Array(items) => items.iter().for_each(|item| strings(item, out)),
            Bson::Document(document) => document.values().for_each(|value| strings(value, out)),
            _ => {}
        }
    }
    let mut out = Vec::new();
    match values {
        Values::Set { assignments, .. } | Values::Aggregate { assignments, .. } => {
            for assignment in assignments {
                strings(&assignment.expression, &mut out);
            }
        }
        Values::Into { element, .. } | Values::Collect { element, .. } => strings(element, &mut out),
        Values::Groups(groups) => {
            groups.by.iter().for_each(|(_, value)| strings(value, &mut out));
            groups.fields.iter().for_each(|field| strings(&field.expression, &mut out));
        }
    }
    out
}

/// True if another collection refers to the referring documents of `link`.
fn refers_to_holder(other: &Link, link: &Link) -> bool {
    other.held.namespace == link.holder.namespace
        && other.held.path.to_string() == "_id"
        && other.holder.namespace != link.held.namespace
}

fn form(path: &FieldPath) -> Form {
    match path.segments().last() {
        Some(Segment::Each) => Form::Ids,
        _ if path.has_each() => Form::Subdocuments,
        _ => Form::One,
    }
}

/// The array whose elements are at `each`.
fn parent(each: &FieldPath) -> Option<FieldPath> {
    FieldPath::parse(each.to_string().strip_suffix(".$[]")?).ok()
}

/// The bytes that a DBRef needs in addition to its id: the names and values of `$ref` and `$db`, and the enclosing
/// document.
fn db_ref(holder: &Collection, path: &FieldPath) -> Option<u64> {
    let text = path.to_string();
    let parent = text.strip_suffix(".$id")?;
    let field =
        |name: &str| FieldPath::parse(&format!("{parent}.{name}")).ok().and_then(|path| holder.shape.field(&path));
    let spent = |name: &str| field(name).map_or(0, |field| field.average_bytes() + 2 + name.len() as u64);
    // The document's length and terminator, and the name `$id`.
    Some(5 + 5 + spent("$ref") + spent("$db")).filter(|_| {
        let refs = field("$ref").map_or(0, |field| field.values.len());
        refs == 1
    })
}
