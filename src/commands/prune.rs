//! `denormd prune`

use std::collections::BTreeSet;

use bson::{Bson, Document, doc};

use crate::{
    checkpoint::store::{RuleState, Store},
    cli::Output,
    commands::{Failure, compile, context, print},
    config::Loaded,
    error::{Error, Kind, Result},
    field_path::FieldPath,
    metrics::Metrics,
    mongo::Reads,
    plan::Plan,
    reconcile::{
        Context,
        statement::{self, Statement},
    },
};

/// Targets in one write.
const PAGE: usize = 1000;

/// Takes away what `rule` wrote and no rule owns any more.
pub async fn prune(loaded: &Loaded, output: Output, rule: &str, dry_run: bool) -> std::result::Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    let config = &loaded.config;
    let store = Store::open(&context.server, &config.state.database, &config.name).await?;
    let known = store.rules(&context.server).await?;
    let Some((_, state)) = known.iter().find(|(name, _)| name == rule) else {
        let names: Vec<&str> = known.iter().map(|(name, _)| name.as_str()).collect();
        let error = Error::new(
            Kind::Config,
            format!("no rule named `{rule}` has ever run in the deployment `{}`", config.name),
        );
        return Err(error.hint(format!("known are: {}", names.join(", "))).into());
    };
    let active = context.plan.rules.iter().any(|active| active.name == rule);
    let retired = retired_paths(&context.plan, state, active);
    if retired.is_empty() {
        print(&format!("every field of `{rule}` is owned by a rule of the config: nothing to prune\n"));
        return Ok(());
    }
    let mut done = Vec::new();
    for (collection, path) in &retired {
        let documents = one(&context, collection, path, dry_run).await?;
        done.push((collection, path, documents));
    }
    if !dry_run {
        store.forget(&context.server, rule, state, !active).await?;
    }
    match output {
        Output::Text => {
            for (collection, path, documents) in done {
                let verb = if dry_run { "would be taken from" } else { "was taken from" };
                print(&format!("{path} {verb} {documents} documents of {collection}\n"));
            }
        }
        Output::Json => {
            let paths = done.iter().map(|(collection, path, documents)| {
                serde_json::json!({"collection": collection, "path": path.to_string(), "documents": documents})
            });
            print(&format!(
                "{:#}\n",
                serde_json::json!({"rule": rule, "dry_run": dry_run, "paths": paths.collect::<Vec<_>>()})
            ));
        }
    }
    Ok(())
}

/// Collection and path of what the rule once owned and nobody owns now.
fn retired_paths(plan: &Plan, state: &RuleState, active: bool) -> Vec<(String, FieldPath)> {
    let current = (!active).then_some(&state.definition);
    let mut found = BTreeSet::new();
    for definition in state.retired.iter().chain(current) {
        let Ok(collection) = definition.get_document("target").and_then(|target| target.get_str("collection")) else {
            continue;
        };
        for path in owned(definition) {
            let taken = plan.rules.iter().any(|rule| {
                rule.target.namespace.to_string() == collection
                    && rule.owned().into_iter().any(|owned| owned.overlaps_loosely(&path))
            });
            if !taken {
                found.insert((collection.to_owned(), path));
            }
        }
    }
    found.into_iter().collect()
}

/// The owned paths of a stored definition (see `plan::compile`).
fn owned(definition: &Document) -> Vec<FieldPath> {
    let Ok(values) = definition.get_document("values") else { return Vec::new() };
    let single = ["into", "collect"].into_iter().filter_map(|name| values.get_str(name).ok());
    let several = ["set", "aggregate"].into_iter().filter_map(|name| values.get_array(name).ok()).flatten();
    let several = several.filter_map(|entry| entry.as_document()?.get_str("path").ok());
    single.chain(several).filter_map(|path| FieldPath::parse(path).ok()).collect()
}

/// Takes one path away, a page of documents at a time; returns how many had it.
async fn one(context: &Context, namespace: &str, path: &FieldPath, dry_run: bool) -> Result<u64> {
    let (database, collection) = namespace.split_once('.').unwrap_or_default();
    let command = doc! {
        "find": collection, "filter": {path.query(): {"$exists": true}}, "projection": {"_id": 1}, "batchSize": i64::try_from(PAGE).unwrap_or(1000),
    };
    let mut pages = context.server.pages(database, command, Reads::default()).await?;
    let mut documents = 0;
    while let Some(page) = pages.next().await? {
        let ids = page.iter().map(|row| Ok(row.get("_id")?.map(Bson::try_from).transpose()?.unwrap_or(Bson::Null)));
        let ids = ids.collect::<Result<Vec<Bson>>>()?;
        documents += ids.len() as u64;
        if !dry_run && !ids.is_empty() {
            let Statement::Update(statement) = statement::unset(path, ids)? else { continue };
            let written =
                context.server.update(database, collection, &[statement], context.limits.write_timeout).await?;
            if let Some((_, error)) = written.refused.into_iter().next() {
                return Err(error);
            }
        }
    }
    Ok(documents)
}
