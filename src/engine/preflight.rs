//! Checks that a cluster meets the requirements of the rules, before anything is written, with advice for each problem.

use std::collections::{BTreeMap, BTreeSet};

use bson::{Bson, Document, doc};
use futures_util::TryStreamExt;

use crate::reconcile::{
    by_target::{self, Referrer},
    read,
};
use denormd_model::{field_path::FieldPath, namespace::Namespace};
use denormd_mongo::{
    Server,
    classify::server_text,
    error::{Error, Kind, Result},
};
use denormd_rules::{
    config::ConfigPath,
    plan::{
        Plan, Rule, RuleId, Values,
        privileges::{self, Privilege},
        reference::Role,
    },
};

/// A requirement that the cluster does not meet.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// The rule with this requirement; empty if all rules have it.
    pub rule: String,
    /// Description of the problem.
    pub message: String,
    /// A missing privilege, or another demand on the cluster.
    pub kind: Kind,
    /// Command that fixes it, if there is one.
    pub fix: Option<Fix>,
    /// Further advice.
    pub hint: Option<String>,
    /// The place in the config of what is wrong, if it is a part of the rule: a misspelt collection, an expression that the
    /// server refuses.
    pub at: Option<ConfigPath>,
}

/// A command that fixes a finding.
#[derive(Debug, Clone, PartialEq)]
pub struct Fix {
    /// Database in which the command runs.
    pub database: String,
    /// The command.
    pub command: Document,
    /// The command in the syntax of mongosh.
    pub shell: String,
}

impl Finding {
    fn new(rule: &Rule, message: impl Into<String>) -> Self {
        Self { rule: rule.name.clone(), message: message.into(), kind: Kind::Config, fix: None, hint: None, at: None }
    }
}

/// Checks all requirements of the plan. Reads only.
pub async fn check(server: &Server, plan: &Plan) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut collections = Vec::new();
    let namespaces = plan.namespaces();
    let mut infos = collection_infos(server, &namespaces).await?;
    for namespace in namespaces {
        let info = infos.remove(&namespace);
        let indexes = if info.is_some() { indexes(server, &namespace).await? } else { Vec::new() };
        collections.push((namespace, info, indexes));
    }
    let find = |namespace: &Namespace| collections.iter().find(|(ns, ..)| ns == namespace);
    let mut seen = BTreeSet::new();
    for rule in &plan.rules {
        for (role, side) in [(Role::Source, &rule.source), (Role::Target, &rule.target)] {
            let Some((namespace, info, indexes)) = find(&side.namespace) else { continue };
            let misspelt = if info.is_some() { None } else { misspelt(server, namespace).await? };
            let near = misspelt.as_ref().map(|misspelt| misspelt.meant.as_str());
            if let Some(Misspelt { database: true, meant }) = &misspelt {
                // No collection is created in a database whose name may be a mistake.
                findings.push(no_database(rule, role, namespace, meant));
                continue;
            }
            findings.extend(kind_of_collection(rule, namespace, info.as_ref()));
            if rule.creates.is_some() && role == Role::Target && has_collation(info.as_ref()) {
                findings.push(own_collation(rule, namespace));
            }
            if role == Role::Source
                && rule.needs_pre_images()
                && !keeps_pre_images(info.as_ref())
                && seen.insert(namespace.clone())
            {
                findings.push(unless_misspelt(pre_images(rule, namespace, info.is_some()), near));
            }
            let paths = looked_up(rule, role);
            if info.is_none() {
                let absent = absent(rule, namespace, &paths, &mut seen);
                findings.extend(absent.map(|finding| unless_misspelt(finding, near)));
                continue;
            }
            let collection = (namespace, has_collation(info.as_ref()), indexes.as_slice());
            findings.extend(missing_indexes(rule, role, collection, &mut seen));
        }
        findings.extend(try_read(server, rule).await?);
    }
    let mut findings = without_prefixes(findings);
    // Creating an index creates its collection, and an existing collection cannot be created: collections first.
    findings.sort_by_key(|finding| !finding.fix.as_ref().is_some_and(|fix| fix.command.contains_key("create")));
    Ok(findings)
}

/// The indexes and pre-images that `after` needs and `before` does not, with the commands that create them. Asks no
/// server, so they may exist.
#[must_use]
pub fn additional(before: &Plan, after: &Plan) -> Vec<Finding> {
    let mut seen = BTreeSet::new();
    let mut needs = |plan: &Plan| {
        let mut findings = Vec::new();
        for rule in &plan.rules {
            for (role, side) in [(Role::Source, &rule.source), (Role::Target, &rule.target)] {
                let namespace = &side.namespace;
                if role == Role::Source && rule.needs_pre_images() && seen.insert(namespace.clone()) {
                    findings.push(pre_images(rule, namespace, true));
                }
                findings.extend(missing_indexes(rule, role, (namespace, false, &[]), &mut seen));
            }
        }
        findings
    };
    let (known, mut new) = (needs(before), needs(after));
    let kept = without_prefixes(known.into_iter().chain(new.iter().cloned()).collect());
    new.retain(|finding| kept.contains(finding));
    new
}

/// The findings for one rule, regardless of the other rules.
pub async fn of_rule(server: &Server, plan: &Plan, state: &str, rule: RuleId) -> Result<Vec<Finding>> {
    let plan = plan.only(rule);
    match all(server, &plan, state).await {
        Err(Error { kind: kind @ Kind::Privilege, message, .. }) => {
            Ok(vec![Finding { kind, ..Finding::new(plan.rules[0].as_ref(), message) }])
        }
        findings => findings,
    }
}

/// All checks. Without the privileges, the others would fail.
pub async fn all(server: &Server, plan: &Plan, state: &str) -> Result<Vec<Finding>> {
    let findings = privileges(server, plan, state).await?;
    if findings.is_empty() { check(server, plan).await } else { Ok(findings) }
}

/// Checks the privileges of the connected user. No findings if the server does not require authentication.
pub async fn privileges(server: &Server, plan: &Plan, state: &str) -> Result<Vec<Finding>> {
    let status = server.database("admin").run_command(doc! {"connectionStatus": 1, "showPrivileges": true}).await?;
    let list = |name: &str| {
        let info = status.get_document("authInfo").ok();
        info.and_then(|info| info.get_array(name).ok()).map(Vec::as_slice).unwrap_or_default()
    };
    if list("authenticatedUsers").is_empty() {
        return Ok(Vec::new());
    }
    let has: Vec<Document> =
        list("authenticatedUserPrivileges").iter().filter_map(Bson::as_document).cloned().collect();
    let missing = privileges::missing(&privileges::needed(plan, state), &has);
    let finding = |privilege: &Privilege| {
        let actions: Vec<&str> = privilege.actions.iter().copied().collect();
        let Namespace { database, collection } = &privilege.resource;
        let place = match (database.as_str(), collection.as_str()) {
            (database, "") => format!("the database `{database}`"),
            (database, collection) => format!("`{database}.{collection}`"),
        };
        // Without it, only the oplog window is unknown.
        let optional = database == "local";
        (!optional).then(|| Finding {
            at: None,
            rule: String::new(),
            message: format!("the user lacks {} on {place}", actions.join(", ")),
            kind: Kind::Privilege,
            fix: None,
            hint: Some(format!(
                "db.getSiblingDB(\"admin\").grantPrivilegesToRole(ROLE, [{}]); `denormd role` prints the whole role",
                privilege.shell()
            )),
        })
    };
    Ok(missing.iter().filter_map(finding).collect())
}

/// Carries out the fix of a finding.
pub async fn apply(server: &Server, fix: &Fix) -> Result<()> {
    server.database(&fix.database).run_command(fix.command.clone()).await?;
    Ok(())
}

/// The entries of `listCollections` for these collections. A collection that does not exist has none.
async fn collection_infos<'a>(
    server: &Server,
    namespaces: impl IntoIterator<Item = &'a Namespace>,
) -> Result<BTreeMap<Namespace, Document>> {
    let mut infos = BTreeMap::new();
    for (database, names) in Namespace::by_database(namespaces) {
        for info in server.listed(database, doc! {"filter": {"name": {"$in": names}}}).await? {
            // A collection that is left out would count as missing.
            let name = info.get_str("name").map_err(|_| Error::internal("an entry of listCollections has no name"))?;
            infos.insert(Namespace { database: database.to_owned(), collection: name.to_owned() }, info);
        }
    }
    Ok(infos)
}

async fn indexes(server: &Server, namespace: &Namespace) -> Result<Vec<Document>> {
    let collection = server.collection(&namespace.database, &namespace.collection);
    match collection.list_indexes().await {
        Ok(cursor) => {
            let models: Vec<_> = cursor.try_collect().await?;
            Ok(models
                .into_iter()
                .filter(|m| {
                    // Keys are compared under the simple collation, which an index with another collation does not
                    // support.
                    m.options.as_ref().is_none_or(|o| {
                        o.partial_filter_expression.is_none()
                            && o.hidden != Some(true)
                            && o.collation.as_ref().is_none_or(|collation| collation.locale == "simple")
                    })
                })
                .map(|m| m.keys)
                .collect())
        }
        // A view has no indexes.
        Err(error) => match Error::from(error) {
            error if error.kind == Kind::Refused => Ok(Vec::new()),
            error => Err(error),
        },
    }
}

fn kind_of_collection(rule: &Rule, namespace: &Namespace, info: Option<&Document>) -> Option<Finding> {
    let info = info?;
    let options = info.get_document("options").ok();
    let has = |name: &str| options.is_some_and(|options| options.contains_key(name));
    let what = match info.get_str("type").unwrap_or_default() {
        "view" => "a view, which has no change stream",
        "timeseries" => "a time-series collection, which has no change stream",
        _ if has("capped") && namespace == &rule.target.namespace => "a capped collection, whose documents cannot grow",
        _ => return None,
    };
    let mut finding = Finding::new(rule, format!("`{namespace}` is {what}"));
    finding.hint = Some("name the collection that the documents are in".to_owned());
    Some(finding)
}

/// True if the collection's default collation does not compare strings byte by byte.
fn has_collation(info: Option<&Document>) -> bool {
    let collation = |info: &Document| {
        let options = info.get_document("options").ok()?;
        options.get_document("collation").ok()?.get_str("locale").ok().map(|locale| locale != "simple")
    };
    info.and_then(collation) == Some(true)
}

/// A rule that creates documents needs `_id`s that are compared byte by byte, as keys are.
fn own_collation(rule: &Rule, namespace: &Namespace) -> Finding {
    let message = format!("`{namespace}` has a collation, so two different keys of the rule could have the same `_id`");
    Finding {
        hint: Some("create the documents in a collection without a collation".to_owned()),
        ..Finding::new(rule, message)
    }
}

fn keeps_pre_images(info: Option<&Document>) -> bool {
    let enabled = |info: &Document| {
        info.get_document("options").ok()?.get_document("changeStreamPreAndPostImages").ok()?.get_bool("enabled").ok()
    };
    info.and_then(enabled) == Some(true)
}

/// True if the collection keeps pre-images; None if it does not exist.
pub async fn has_pre_images(server: &Server, namespace: &Namespace) -> Result<Option<bool>> {
    let info = collection_infos(server, [namespace]).await?.remove(namespace);
    Ok(info.map(|info| keeps_pre_images(Some(&info))))
}

/// The command that enables pre-images for a collection, or creates the collection with them.
#[must_use]
pub fn enable_pre_images(namespace: &Namespace, exists: bool) -> Fix {
    let Namespace { database, collection } = namespace;
    let (verb, call) = if exists {
        (
            "collMod",
            format!("runCommand({{ collMod: {collection:?}, changeStreamPreAndPostImages: {{ enabled: true }} }})"),
        )
    } else {
        ("create", format!("createCollection({collection:?}, {{ changeStreamPreAndPostImages: {{ enabled: true }} }})"))
    };
    Fix {
        database: database.clone(),
        command: doc! {verb: collection, "changeStreamPreAndPostImages": {"enabled": true}},
        shell: format!("db.getSiblingDB({database:?}).{call}"),
    }
}

fn pre_images(rule: &Rule, namespace: &Namespace, exists: bool) -> Finding {
    let why =
        "without them, the event of a key change or a delete does not show which targets referred to the document";
    Finding {
        fix: Some(enable_pre_images(namespace, exists)),
        ..Finding::new(rule, format!("`{namespace}` keeps no pre-images: {why}"))
    }
}

/// Removes each index whose keys are a prefix of another one: that one serves both.
fn without_prefixes(findings: Vec<Finding>) -> Vec<Finding> {
    let wanted: Vec<Option<(String, Document)>> = findings.iter().map(index_of).collect();
    let keys = |keys: &Document| keys.iter().map(|(path, way)| format!("{path} {way}")).collect::<Vec<_>>();
    let covered = |nth: usize| {
        let (collection, mine) = wanted.get(nth)?.as_ref()?;
        let other = wanted.iter().enumerate().find(|(other, wanted)| {
            *other != nth
                && wanted.as_ref().is_some_and(|(theirs, other)| {
                    theirs == collection && other.len() > mine.len() && keys(other).starts_with(&keys(mine))
                })
        });
        other.map(|(other, _)| other)
    };
    let covered: Vec<bool> = (0..findings.len()).map(|nth| covered(nth).is_some()).collect();
    findings.into_iter().zip(covered).filter(|(_, covered)| !covered).map(|(finding, _)| finding).collect()
}

/// The index that a finding requires: the collection with the index's collation, and the keys.
fn index_of(finding: &Finding) -> Option<(String, Document)> {
    let fix = finding.fix.as_ref()?;
    let (collection, keys) = index_keys(&fix.command)?;
    let is_collated = fix.command.get_array("indexes").ok()?.first()?.as_document()?.contains_key("collation");
    Some((format!("{}.{collection} {is_collated}", fix.database), keys.clone()))
}

/// The collection and the keys of the index that a command creates.
pub(crate) fn index_keys(command: &Document) -> Option<(&str, &Document)> {
    let index = command.get_array("indexes").ok()?.first()?.as_document()?;
    Some((command.get_str("createIndexes").ok()?, index.get_document("key").ok()?))
}

/// Index keys after the match paths. The sort order if only the first N of many are needed, so that only N are read; or
/// the path that is compared with the target, so that only the sources that count are read.
fn beyond(rule: &Rule, role: Role) -> Document {
    match rule.values {
        _ if role == Role::Target => Document::new(),
        Values::Collect { slice: Some(_), .. } => read::order(rule),
        // The elements of an array are compared after they were read.
        _ if rule.reference.source_each.is_some() => Document::new(),
        _ => rule.pair_filter.as_ref().and_then(compared).map(|path| doc! {path: 1}).unwrap_or_default(),
    }
}

/// The path of the source that a condition compares with a path of the target, where an index serves the comparison.
fn compared(condition: &Bson) -> Option<&str> {
    let (operator, operands) = condition.as_document()?.iter().next()?;
    match (operator.as_str(), operands.as_array()?.as_slice()) {
        ("$and", conditions) => conditions.iter().find_map(compared),
        ("$eq" | "$gt" | "$gte" | "$lt" | "$lte", [Bson::String(one), Bson::String(other)]) => {
            let is_of_target = |text: &str| text.starts_with("$$target.") || text.starts_with("$$targetElement.");
            let [source, target] = if is_of_target(one) { [other, one] } else { [one, other] };
            source.strip_prefix('$').filter(|path| is_of_target(target) && !path.starts_with('$'))
        }
        _ => None,
    }
}

/// A name that does not exist but resembles one that does.
#[derive(Debug, PartialEq, Eq)]
struct Misspelt {
    /// True if the database is misspelt, false for the collection.
    database: bool,
    /// The name that is probably meant.
    meant: String,
}

/// Checks if the name of a collection that does not exist, or of its database, is probably misspelt.
async fn misspelt(server: &Server, namespace: &Namespace) -> Result<Option<Misspelt>> {
    let names = server.collections(&namespace.database).await?;
    let database = names.is_empty();
    let meant = if database {
        nearest(&namespace.database, &server.databases().await)
    } else {
        nearest(&namespace.collection, &names)
    };
    Ok(meant.map(|meant| Misspelt { database, meant }))
}

/// The known name that a word probably stands for. Names that differ only in their digits (`tenant_1`, `tenant_2`) are
/// intended.
pub(crate) fn nearest(word: &str, known: &[String]) -> Option<String> {
    let without_digits = |name: &str| name.chars().filter(|c| !c.is_ascii_digit()).collect::<String>();
    let others = known.iter().filter(|name| without_digits(name) != without_digits(word));
    let distance = |name: &&String| strsim::damerau_levenshtein(name, word);
    // Any two short names are similar.
    others.min_by_key(distance).filter(|name| distance(name) * 3 <= name.len()).cloned()
}

fn no_database(rule: &Rule, role: Role, namespace: &Namespace, meant: &str) -> Finding {
    let message = format!("the database `{}` of `{namespace}` does not exist", namespace.database);
    Finding {
        hint: Some(format!("did you mean `{meant}`? If the name is right, create the collection first")),
        at: Some(rule.side_at(role)),
        ..Finding::new(rule, message)
    }
}

/// Offers to create the collection only if its name does not resemble that of another one.
fn unless_misspelt(finding: Finding, near: Option<&str>) -> Finding {
    match near {
        Some(near) => Finding { fix: None, hint: Some(format!("did you mean `{near}`?")), ..finding },
        None => finding,
    }
}

/// The paths of a rule's lookups in one of its collections.
fn looked_up(rule: &Rule, role: Role) -> Vec<String> {
    if rule.creates.is_some() && role == Role::Target {
        return vec!["_id".to_owned()];
    }
    rule.reference.paths(role).map(FieldPath::query).collect()
}

/// The paths of the indexes that a rule needs in one of its collections.
pub(crate) fn index_paths(rule: &Rule, role: Role) -> impl Iterator<Item = FieldPath> {
    let texts: Vec<String> = lookups(rule, role)
        .into_iter()
        .flat_map(|(paths, beyond)| paths.into_iter().chain(beyond.into_iter().map(|(path, _)| path)))
        .collect();
    texts.into_iter().filter_map(|text| FieldPath::parse(&text).ok())
}

/// The lookups of a rule in one of its collections: the paths, one of which an index must begin with, and the keys that follow
/// it.
fn lookups(rule: &Rule, role: Role) -> Vec<(Vec<String>, Document)> {
    let mut lookups = vec![(looked_up(rule, role), beyond(rule, role))];
    // Without pre-images, the ids stored in the parent identify the parent that a child has left.
    if let Some(child) = rule.child().filter(|_| role == Role::Target && !rule.reference.keyed_by_source_id()) {
        lookups.push((vec![child.query()], Document::new()));
    }
    lookups
}

/// A lookup in a collection that does not exist: it needs an index as soon as it does.
fn absent(rule: &Rule, namespace: &Namespace, paths: &[String], seen: &mut BTreeSet<Namespace>) -> Option<Finding> {
    let answered = rule.allow_scan || paths.iter().any(|path| path == "_id");
    if answered || !seen.insert(namespace.clone()) {
        return None;
    }
    let Namespace { database, collection } = namespace;
    let fix = Fix {
        database: database.clone(),
        command: doc! {"create": collection},
        shell: format!("db.getSiblingDB({database:?}).createCollection({collection:?})"),
    };
    Some(Finding {
        fix: Some(fix),
        hint: Some("check the name first: this creates the collection".to_owned()),
        ..Finding::new(rule, format!("`{namespace}` does not exist, and needs an index on {}", paths.join(", ")))
    })
}

/// Requires the indexes of a rule's lookups in one of its collections.
fn missing_indexes(
    rule: &Rule,
    role: Role,
    collection: (&Namespace, bool, &[Document]),
    seen: &mut BTreeSet<Namespace>,
) -> Vec<Finding> {
    let lookups = lookups(rule, role);
    lookups.iter().filter_map(|(paths, beyond)| missing_index(rule, paths, beyond, collection, seen)).collect()
}

/// Requires an index that begins with one of the lookup's paths.
fn missing_index(
    rule: &Rule,
    paths: &[String],
    beyond: &Document,
    (namespace, collated, indexes): (&Namespace, bool, &[Document]),
    seen: &mut BTreeSet<Namespace>,
) -> Option<Finding> {
    let answered = indexes.iter().any(|keys| {
        keys.iter().next().is_some_and(|(first, kind)| paths.contains(first) && kind.as_str() != Some("text"))
    });
    // A collection that does not exist yet will have its index on `_id`.
    let answered = answered || (paths.iter().any(|path| path == "_id") && !collated);
    if rule.allow_scan || answered {
        return None;
    }
    let mut keys: Document = paths.iter().map(|path| (path.clone(), Bson::Int32(1))).collect();
    if paths == ["_id"] {
        // The server accepts a second index on `_id` only if it is hashed.
        keys = doc! {"_id": "hashed"};
    }
    keys.extend(beyond.iter().filter(|(path, _)| !paths.contains(path)).map(|(path, way)| (path.clone(), way.clone())));
    let name = keys
        .iter()
        .map(|(path, way)| format!("{path}_{}", way.as_str().map_or_else(|| way.to_string(), ToOwned::to_owned)))
        .collect::<Vec<_>>()
        .join("_");
    let Namespace { database, collection } = namespace;
    // Each index is reported only once.
    if !seen.insert(Namespace { database: format!("{database}.{collection}"), collection: name.clone() }) {
        return None;
    }
    let fields: Vec<String> = keys.iter().map(|(path, way)| format!("{path:?}: {way}")).collect();
    let options = if collated { ", { collation: { locale: \"simple\" } }" } else { "" };
    let shell = format!(
        "db.getSiblingDB({database:?}).getCollection({collection:?}).createIndex({{ {} }}{options})",
        fields.join(", ")
    );
    let mut index = doc! {"key": keys, "name": name};
    if collated {
        index.insert("collation", read::simple_collation());
    }
    let command = doc! {"createIndexes": collection, "indexes": [index]};
    let why = if collated { " under the simple collation, by which keys are compared" } else { "" };
    Some(Finding {
        fix: Some(Fix { database: database.clone(), command, shell }),
        hint: Some("or set `allow_scan: true` on the rule, if the collection is small and stays so".to_owned()),
        ..Finding::new(
            rule,
            format!(
                "`{namespace}` has no index on {}{why}: each change would read the whole collection",
                paths.join(", ")
            ),
        )
    })
}

/// The same command with a pipeline that no document enters. A key that should not exist would not be safe: a document
/// with that key would be computed.
fn over_no_documents(mut command: Document) -> Document {
    if let Ok(stages) = command.get_array_mut("pipeline") {
        // `$documents` must come first.
        let at = usize::from(stages.first().and_then(Bson::as_document).is_some_and(|s| s.contains_key("$documents")));
        stages.insert(at, doc! {"$match": {"$expr": false}}.into());
    }
    command
}

/// Lets the server parse the rule's expressions and filters, over no documents.
async fn try_read(server: &Server, rule: &Rule) -> Result<Option<Finding>> {
    let any = denormd_model::key::Key::new(vec![Bson::MinKey; rule.reference.pairs.len()]);
    let sources = match rule.of_target {
        Some(_) => by_target::sources(rule, &[Referrer { target: &doc! {"_id": 0}, references: &[] }], None),
        None => read::sources(rule, &[&any]),
    };
    let sources = (&rule.source.namespace.database, over_no_documents(sources));
    let filter = rule.target.filter.clone().unwrap_or_default();
    let never = doc! {"$expr": false};
    let targets = (
        &rule.target.namespace.database,
        doc! {
            "find": &rule.target.namespace.collection, "filter": {"$and": [never, filter]},
            "collation": read::simple_collation(),
        },
    );
    let without_source =
        read::no_input(rule).map(|command| (&rule.source.namespace.database, over_no_documents(command)));
    for (database, command) in [sources, targets].into_iter().chain(without_source) {
        let Err(refused) = server.database(database).run_command(command).await else { continue };
        // No document is read, so the text only quotes the rule.
        let text = server_text(&refused).map(|text| format!(": {text}")).unwrap_or_default();
        match Error::from(refused) {
            error if error.kind == Kind::Refused => {
                let mut finding = Finding::new(
                    rule,
                    format!("the server refuses the rule's expressions or filters: {}{text}", error.message),
                );
                finding.at = refused_value(server, rule).await?;
                finding.hint =
                    Some("try the expressions in mongosh with db.collection.aggregate([{ $project: … }])".to_owned());
                return Ok(Some(finding));
            }
            error => return Err(error),
        }
    }
    Ok(None)
}

/// The place of the first value of the rule that the server refuses to parse on its own.
async fn refused_value(server: &Server, rule: &Rule) -> Result<Option<ConfigPath>> {
    let otherwise: Vec<_> = match &rule.values {
        Values::Set { assignments, otherwise: Some(values), .. } => {
            let at = rule.at().key("otherwise");
            let pairs = assignments.iter().zip(values);
            pairs.filter_map(|(one, value)| Some((at.key(&one.path.to_string()), value.as_ref()?, false))).collect()
        }
        _ => Vec::new(),
    };
    for (place, value, is_accumulator) in rule.values_at().into_iter().chain(otherwise) {
        let stage = if is_accumulator {
            doc! {"$group": {"_id": null, "v": value.clone()}}
        } else {
            doc! {"$replaceWith": {"v": value.clone()}}
        };
        let mut command = read::command(1, vec![doc! {"$documents": [{}]}, stage]);
        command.insert("let", doc! {"element": {}, "target": {}, "targetElement": {}});
        let asked = server.database(&rule.source.namespace.database).run_command(over_no_documents(command)).await;
        match asked.map_err(Error::from) {
            Ok(_) => {}
            Err(error) if error.kind == Kind::Refused => return Ok(Some(place)),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(collection: &str, keys: Document) -> Finding {
        let command = doc! {"createIndexes": collection, "indexes": [{"key": keys}]};
        let fix = Fix { database: "d".to_owned(), command, shell: String::new() };
        Finding {
            rule: "r".to_owned(),
            message: String::new(),
            kind: Kind::Config,
            fix: Some(fix),
            hint: None,
            at: None,
        }
    }

    /// Both `{ tailnum: 1 }` for one rule, and `{ tailnum: 1, time_hour: -1, _id: 1 }` for another, were created.
    #[test]
    fn an_index_that_another_one_begins_with_is_not_asked_for() {
        let long = || index("flights", doc! {"tailnum": 1, "time_hour": -1, "_id": 1});
        let kept = without_prefixes(vec![
            index("flights", doc! {"tailnum": 1}),
            long(),
            index("planes", doc! {"tailnum": 1}),
            index("flights", doc! {"time_hour": -1}),
            index("flights", doc! {"tailnum": -1}),
        ]);
        let expected = [
            long(),
            index("planes", doc! {"tailnum": 1}),
            index("flights", doc! {"time_hour": -1}),
            index("flights", doc! {"tailnum": -1}),
        ];
        assert_eq!(kept, expected);
    }
}
