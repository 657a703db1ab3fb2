//! `denormd support-bundle`: diagnostics for support in one file, with nothing from documents.

use std::{
    collections::hash_map::RandomState,
    fs,
    hash::BuildHasher,
    path::{Path, PathBuf},
    time::Duration,
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use serde_json::{Value as Json, json};

use crate::{
    commands::{Failure, compile, context, notice, plan::finding_json, print},
    server::client,
};
use denormd_engine::{
    checkpoint::{fan_out, format, progress, requests, rule_record, store},
    dead_letter,
    deployment::{instances, lease},
    events::Journal,
    metrics::Metrics,
    preflight,
};
use denormd_model::{
    clock::{millis, wall_millis},
    namespace::Namespace,
    partition::of_deployment,
};
use denormd_mongo::{
    Server,
    error::{Error, Kind, Result},
    primary::no_oplog,
};
use denormd_rules::{
    config::{ConfigError, Loaded},
    plan::Plan,
};

/// Time limit for the daemon's answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Age of the oldest timeline event to include.
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
/// Maximum number of events, and of state documents in each collection.
const MOST: i64 = 5000;

/// Gathers all available information. Whatever is unavailable is listed with the reason, because bundles are needed
/// most when a cluster does not answer. Without a readable config, but with an address, the bundle contains only the
/// daemon's answers.
pub async fn support_bundle(
    loaded: Result<Loaded, ConfigError>,
    daemon: client::Daemon,
    to: Option<&Path>,
    addressed: bool,
) -> Result<(), Failure> {
    let loaded = match loaded {
        Err(error) if !addressed => return Err(error.into()),
        loaded => loaded,
    };
    let now = wall_millis();
    let mut bundle = json!({
        "bundle": 1,
        "created": bson::DateTime::from_millis(now).try_to_rfc3339_string().unwrap_or_default(),
        "denormd": {
            "version": env!("DENORMD_VERSION"), "os": std::env::consts::OS, "arch": std::env::consts::ARCH,
        },
        "daemon": said(&daemon).await,
    });
    match &loaded {
        Ok(loaded) => look(loaded, &mut bundle).await,
        Err(error) => bundle["config_error"] = json!(error.to_string()),
    }
    let text = format!("{bundle:#}\n");
    match to {
        Some(path) if path == Path::new("-") => print(&text),
        path => {
            let named = || PathBuf::from(format!("denormd-support-{}.json", now / 1000));
            let path = path.map_or_else(named, Path::to_owned);
            let unwritable = |error: std::io::Error| {
                Error::new(Kind::Machine, format!("cannot write {}: {}", path.display(), error.kind()))
            };
            fs::write(&path, &text).map_err(unwritable)?;
            notice(&format!("{} has {} KB; read it before you send it", path.display(), text.len() / 1024 + 1));
        }
    }
    Ok(())
}

/// Adds the config, and the information that depends on it.
async fn look(loaded: &Loaded, bundle: &mut Json) {
    // Without passwords and tokens.
    bundle["config"] = json!(loaded.effective());
    match compile(loaded).await {
        Ok(plan) => {
            bundle["rules"] = rules(&plan);
            let gathered = Box::pin(gather(loaded, plan, bundle));
            if let Err(failure) = gathered.await {
                bundle["cluster_error"] = json!(failure.to_string());
            }
        }
        Err(failure) => bundle["config_error"] = json!(failure.to_string()),
    }
}

fn rules(plan: &Plan) -> Json {
    let rules = plan.rules.iter();
    rules.map(|rule| json!({"name": rule.name, "definition": extended(rule.definition.clone().into())})).collect()
}

/// The running daemon's own reports.
async fn said(daemon: &client::Daemon) -> Json {
    let mut out = json!({"address": daemon.address.to_string()});
    for (name, path) in [
        ("status", "/v1/status"),
        ("readyz", "/readyz"),
        ("history", "/v1/history"),
        ("events", "/v1/events"),
        ("metrics", "/metrics"),
    ] {
        out[name] = match client::get(daemon.clone(), path, TIMEOUT).await {
            Ok(answer) => answer.json().unwrap_or_else(|_| json!(String::from_utf8_lossy(&answer.body))),
            Err(error) => {
                out["error"] = json!(error.message);
                break;
            }
        };
    }
    out
}

async fn gather(loaded: &Loaded, plan: Plan, bundle: &mut Json) -> Result<(), Failure> {
    let config = &loaded.config;
    let context = context(loaded, plan, Metrics::new()?).await?;
    let (server, plan) = (&context.server, &context.plan);
    bundle["server"] = about_server(server).await;
    let findings = preflight::all(server, plan, &config.state.database).await;
    bundle["plan"] = or_reason(findings.map(|all| all.iter().map(finding_json).collect()));
    let mut collections = Vec::new();
    for namespace in plan.namespaces() {
        collections.push(collection(server, &namespace).await);
    }
    bundle["collections"] = collections.into();
    let journal = Journal::new(server.unfenced(), &config.state.database, &config.name);
    let since = wall_millis() - millis(WEEK);
    bundle["events"] = or_reason(journal.read(since, MOST).await.map(|events| json!(events)));
    let hidden = Hidden(RandomState::new());
    for name in [
        store::POSITIONS,
        rule_record::RULES,
        lease::COLLECTION,
        instances::COLLECTION,
        fan_out::COLLECTION,
        progress::CHECKS,
        requests::REQUESTS,
        format::COLLECTION,
    ] {
        let found = documents(server, (&config.state.database, name), &config.name).await;
        bundle["state"][name] = or_reason(found.map(|all| all.into_iter().map(|doc| hidden.document(doc)).collect()));
    }
    bundle["dead_letters"] = or_reason(dead_letters(server, &config.state.database, &config.name).await);
    Ok(())
}

fn or_reason(result: Result<Json>) -> Json {
    result.unwrap_or_else(|error| json!({"not_known": error.message}))
}

/// Runs a command; an error if the user lacks the privilege for it.
async fn asked(server: &Server, command: Document) -> Result<Document> {
    Ok(server.database("admin").run_command(command).await?)
}

async fn about_server(server: &Server) -> Json {
    let build = asked(server, doc! {"buildInfo": 1}).await;
    let hello = asked(server, doc! {"hello": 1}).await;
    let status = asked(server, doc! {"replSetGetStatus": 1}).await;
    let picked = |doc: &Document, names: &[&str]| -> Json {
        let one = |name: &&str| Some(((*name).to_owned(), extended(doc.get(*name)?.clone())));
        names.iter().filter_map(one).collect::<serde_json::Map<String, Json>>().into()
    };
    let members = |status: &Document| -> Json {
        let all = status.get_array("members").into_iter().flatten().filter_map(Bson::as_document);
        let names = ["_id", "name", "health", "stateStr", "uptime", "optimeDate", "syncSourceHost", "lastHeartbeat"];
        all.map(|member| picked(member, &names)).collect()
    };
    json!({
        "build": or_reason(build.map(|doc| picked(&doc, &["version", "modules", "storageEngines"]))),
        "hello": or_reason(hello.map(|doc| picked(&doc, &["msg", "setName", "hosts", "arbiters", "passives", "primary", "me", "maxWireVersion", "localTime"]))),
        "members": or_reason(status.map(|doc| members(&doc))),
        "oplog": or_reason(oplog(server).await),
    })
}

/// The times of the first and the last entry of the oplog.
async fn oplog(server: &Server) -> Result<Json> {
    if server.is_router().await? {
        return Err(no_oplog());
    }
    let oplog = server.collection("local", "oplog.rs");
    let mut ends = Vec::new();
    for way in [1, -1] {
        let entry = oplog.find_one(doc! {}).sort(doc! {"$natural": way}).projection(doc! {"ts": 1}).await?;
        ends.push(entry.and_then(|entry| entry.get_timestamp("ts").ok()).map(|ts| ts.time));
    }
    let hours = match ends.as_slice() {
        [Some(first), Some(last)] => Some(f64::from(last.saturating_sub(*first)) / 3600.0),
        _ => None,
    };
    Ok(json!({"first_seconds": ends.first(), "last_seconds": ends.last(), "hours": hours}))
}

/// The keys and options of the indexes. The filter of a partial index contains values, and is left out.
async fn collection(server: &Server, namespace: &Namespace) -> Json {
    let Namespace { database, collection } = namespace;
    let result: Result<Json> = async {
        let collection = server.collection(database, collection);
        let count = collection.estimated_document_count().await?;
        let indexes: Vec<_> = collection.list_indexes().await?.try_collect().await?;
        let indexes = indexes.into_iter().map(|index| {
            let options = index.options.unwrap_or_default();
            json!({
                "key": extended(index.keys.into()), "unique": options.unique, "sparse": options.sparse,
                "partial": options.partial_filter_expression.is_some(), "hidden": options.hidden,
                "collation": options.collation.map(|collation| collation.locale),
            })
        });
        Ok(json!({"documents": count, "indexes": indexes.collect::<Vec<_>>()}))
    }
    .await;
    let mut out = or_reason(result);
    out["collection"] = json!(namespace.to_string());
    out
}

/// The documents of a deployment. The bundle must not contain the rules of others in the same state database.
async fn documents(server: &Server, (database, collection): (&str, &str), deployment: &str) -> Result<Vec<Document>> {
    let mine = ["_id.deployment", "deployment", "_id"].map(|field| of_deployment(field, deployment));
    let mine = doc! {"$or": mine.to_vec()};
    Ok(server.collection(database, collection).find(mine).limit(MOST).await?.try_collect().await?)
}

/// Counts the dead letters of a deployment by rule, reason and path.
async fn dead_letters(server: &Server, database: &str, deployment: &str) -> Result<Json> {
    let stages = [
        doc! {"$match": of_deployment("_id.deployment", deployment)},
        doc! {"$group": {
            "_id": {"deployment": "$_id.deployment", "rule": "$_id.rule", "reason": "$reason", "code": "$code", "path": "$path"},
            "count": {"$sum": 1}, "attempts": {"$max": "$attempts"}, "first": {"$min": "$first"}, "last": {"$max": "$last"},
        }},
    ];
    let rows: Vec<Document> =
        server.collection(database, dead_letter::COLLECTION).aggregate(stages).await?.try_collect().await?;
    Ok(rows.into_iter().map(|row| extended(row.into())).collect())
}

fn extended(value: Bson) -> Json {
    value.into_relaxed_extjson()
}

/// Names of state fields whose values come from denormd, the config or the clock, and never from a document. All other
/// fields are hidden, so that unknown fields cannot leak.
const KEPT: &[&str] = &[
    "_id",
    "applied",
    "asked",
    "at",
    "attempts",
    "backfill",
    "collection",
    "committed",
    "compared",
    "database",
    "definition",
    "deployment",
    "detached",
    "differing",
    "done",
    "first",
    "generation",
    "held",
    "host",
    "instance",
    "last",
    "noticed",
    "owner",
    "paused",
    "plan",
    "progress",
    "reason",
    "refused",
    "retired",
    "rule",
    "rules",
    "saved",
    "scanned",
    "since",
    "source_seen",
    "started",
    "state",
    "task",
    "term",
    "time",
    "total",
    "undecided",
    "until",
    "version",
];

/// Hides values. Equal values look alike within a bundle, and the hash key is not kept.
struct Hidden(RandomState);

impl Hidden {
    fn document(&self, document: Document) -> Json {
        let fields = document.into_iter().map(|(name, value)| {
            let shown = match value {
                // The definition of a rule is part of the config.
                value if matches!(name.as_str(), "definition" | "retired") => extended(value),
                Bson::Document(inside) if KEPT.contains(&name.as_str()) => self.document(inside),
                // The `_id` of a state document is either one of these types or a document.
                Bson::String(_) | Bson::ObjectId(_) if name == "_id" => extended(value),
                value if name == "_id" => self.hide(&value),
                value if KEPT.contains(&name.as_str()) && !matches!(value, Bson::Array(_)) => extended(value),
                value => self.hide(&value),
            };
            (name, shown)
        });
        Json::Object(fields.collect())
    }

    fn hide(&self, value: &Bson) -> Json {
        match value {
            Bson::Null => Json::Null,
            Bson::Boolean(flag) => (*flag).into(),
            value => {
                let bytes = RawDocumentBuf::try_from(&doc! {"v": value}).map(RawDocumentBuf::into_bytes);
                json!(format!("hidden:{:016x}", self.0.hash_one(bytes.unwrap_or_default())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_to_be_ours_is_hidden() {
        let hidden = Hidden(RandomState::new());
        let state = doc! {
            "_id": {"deployment": "default", "rule": "names", "key": ["secret"]}, "after": {"id": "secret", "rule": "secret"},
            "generation": 3_i64, "backfill": "pending", "target": "secret", "wish": 5, "definition": {"where": {"a": "config"}},
        };
        let shown = hidden.document(state);
        assert!(!shown.to_string().contains("secret"), "{shown}");
        assert_eq!(shown["_id"]["rule"], "names");
        assert_eq!(shown["generation"], 3);
        assert_eq!(shown["definition"]["where"]["a"], "config");
        assert_eq!(hidden.hide(&"x".into()), hidden.hide(&"x".into()));
        assert_ne!(hidden.hide(&"x".into()), Hidden(RandomState::new()).hide(&"x".into()));
    }
}
