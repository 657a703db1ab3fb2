//! Runs the same cases in a real pipeline, in databases that are created for each case and dropped after it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bson::{Bson, Document, doc};
use secrecy::SecretString;

use super::{Problem, databases};
use denormd_engine::{
    checkpoint::store::Store,
    dead_letter::{Chosen, DeadLetters},
    deployment::{identity::Identity, lease::Lease},
    metrics::Metrics,
    pipeline,
    reconcile::{Context, applied::put},
};
use denormd_model::{clock::wall_millis, field_path::value_at, partition::Partition, position::ClusterTime};
use denormd_mongo::{
    Server, connect,
    error::{Error, Kind, Result},
};
use denormd_mql::Collections;
use denormd_rules::{
    config::{BackfillMode, Limits, Loaded},
    plan::Plan,
};

/// Time limit of a case.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A server with databases for the cases.
pub(super) struct Scratch {
    server: Server,
    limits: Limits,
    ttl: Duration,
    deployment: String,
    /// The prefix of the databases' names, unique to this run.
    prefix: String,
    cases: usize,
}

impl Scratch {
    pub async fn connect(loaded: &Loaded, uri: &SecretString) -> Result<Self> {
        let server = Server::new(connect::connect(uri).await?);
        let config = &loaded.config;
        // The cases run without a removal limit.
        let limits =
            Limits { destroy_grace: Duration::ZERO, destroy_per_hour: Some(usize::MAX), ..config.limits.clone() };
        Ok(Self {
            server,
            limits,
            ttl: config.lease.ttl,
            deployment: config.name.clone(),
            prefix: format!("denormd_test_{:x}_{:x}", wall_millis(), std::process::id()),
            cases: 0,
        })
    }

    /// Runs the rules on the documents. Returns the resulting documents, and the problems.
    pub async fn run(&mut self, plan: &Plan, given: &Collections) -> Result<(Collections, Vec<Problem>)> {
        self.cases += 1;
        let state = format!("{}_{}_state", self.prefix, self.cases);
        let names: BTreeMap<String, String> = databases(plan)
            .into_keys()
            .enumerate()
            .map(|(nth, database)| (database, format!("{}_{}_{nth}", self.prefix, self.cases)))
            .collect();
        let result = self.attempt(plan, given, &names, &state).await;
        for name in names.values().chain([&state]) {
            self.server.database(name).drop().await?;
        }
        result
    }

    async fn attempt(
        &self,
        plan: &Plan,
        given: &Collections,
        names: &BTreeMap<String, String>,
        state: &str,
    ) -> Result<(Collections, Vec<Problem>)> {
        for (database, collections) in databases(plan) {
            let scratch = self.server.database(&names[&database]);
            for collection in collections {
                let create = doc! {"create": &collection, "changeStreamPreAndPostImages": {"enabled": true}};
                scratch.run_command(create).await?;
                let documents = given.get(&format!("{database}.{collection}")).cloned().unwrap_or_default();
                if !documents.is_empty() {
                    scratch.collection::<Document>(&collection).insert_many(documents).await?;
                }
            }
        }
        let moved = moved(plan, names);
        let dead_letters = DeadLetters {
            database: state.to_owned(),
            deployment: self.deployment.clone(),
            partition: Partition::WHOLE,
        };
        let metrics = Metrics::new()?;
        let context = Context::new(self.server.unfenced(), moved, self.limits.clone(), dead_letters, metrics);
        let instance = Identity::of_this_process();
        let lease = Lease::new(self.server.unfenced(), state, &self.deployment, &instance, self.ttl);
        let held = lease.stand_by().await;
        let context = Arc::new(context.under(held.fence()));
        let store = Store::open_partition(&context.server, state, &self.deployment, Partition::WHOLE).await?;
        let handle = pipeline::start(context.clone(), store).await?;
        let settled = tokio::time::timeout(TIMEOUT, handle.settled()).await;
        handle.stop().await;
        held.release().await;
        settled.map_err(|_| Error::new(Kind::TimedOut, "the rules did not come to an end within a minute"))??;
        let mut after = Collections::new();
        for (database, collections) in databases(plan) {
            for collection in collections {
                let rows =
                    self.server.read(&names[&database], doc! {"find": &collection}, ClusterTime::default()).await?;
                let rows = rows.iter().map(|row| Document::try_from(row.as_ref()).map_err(Error::from));
                after.insert(format!("{database}.{collection}"), rows.collect::<Result<_>>()?);
            }
        }
        untouch(plan, given, &mut after);
        let dead_letters = context.dead_letters.find(&self.server, &Chosen::default(), 1000).await?;
        let dead_letters = dead_letters.into_iter().map(|entry| entry.map_err(|unreadable| unreadable.error()));
        let problems = dead_letters.collect::<Result<Vec<_>>>()?.into_iter().map(|dead_letter| Problem::Obstacle {
            target: dead_letter.target.as_ref().and_then(|key| key.values().first()).cloned(),
            why: match &dead_letter.path {
                Some(path) => format!("it became a dead letter: {} (`{path}`)", dead_letter.reason),
                None => format!("it became a dead letter: {}", dead_letter.reason),
            },
            rule: dead_letter.rule,
            hint: None,
        });
        Ok((after, problems.collect()))
    }
}

/// The same plan for the scratch databases. A DBRef in the documents contains the database name that the rules use.
fn moved(plan: &Plan, names: &BTreeMap<String, String>) -> Plan {
    let mut moved = plan.clone();
    for rule in &mut moved.rules {
        let rule = Arc::make_mut(rule);
        for side in [&mut rule.source, &mut rule.target] {
            if let Some(name) = names.get(&side.namespace.database) {
                side.namespace.database.clone_from(name);
            }
        }
        // The case tests what the rule would write.
        (rule.allow_scan, rule.shadow, rule.backfill) = (true, false, BackfillMode::Auto);
        // The documents belong to the test.
        rule.adopt = true;
    }
    moved
}

/// Gives the paths of `touch` the values that the case has given: a time is not a function of the documents, and without
/// a server none is set.
fn untouch(plan: &Plan, given: &Collections, after: &mut Collections) {
    for rule in &plan.rules {
        let Some(path) = &rule.touch else { continue };
        let name = rule.target.namespace.to_string();
        let before = given.get(&name).map(Vec::as_slice).unwrap_or_default();
        for target in after.get_mut(&name).into_iter().flatten() {
            let given = before.iter().find(|document| document.get("_id") == target.get("_id"));
            let value = given.and_then(|given| value_at(given, path.segments())).cloned();
            let mut whole = Bson::Document(std::mem::take(target));
            put(path.segments(), &mut whole, value);
            if let Bson::Document(whole) = whole {
                *target = whole;
            }
            let is_new = given.is_none_or(|given| !given.contains_key(path.root()));
            if is_new && target.get_document(path.root()).is_ok_and(Document::is_empty) {
                target.remove(path.root());
            }
        }
    }
}
