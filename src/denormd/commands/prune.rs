//! `denormd prune`

use crate::{
    cli::Output,
    commands::{Failure, compile, context, leader::with_a_leader, print},
};
use denormd_engine::{
    checkpoint::{
        requests::{Retired, Work},
        store::Store,
    },
    jobs::prune::{count, retired},
    metrics::Metrics,
};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::Loaded;

/// Has the leader take away what `rule` wrote and no rule owns any more; takes the lease where nobody leads.
pub async fn prune(loaded: &Loaded, output: Output, rule: &str, dry_run: bool) -> Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    let config = &loaded.config;
    let store = Store::open(&context.server, &config.state.database, &config.name).await?;
    let known = store.rules(&context.server).await?;
    let Some((_, state)) = known.iter().find(|(name, _)| name == rule) else {
        let names: Vec<&str> = known.iter().map(|(name, _)| name.as_str()).collect();
        let in_config = context.plan.rules.iter().any(|planned| planned.name == rule);
        let error = Error::new(
            if in_config { Kind::State } else { Kind::Config },
            format!("the deployment `{}` knows no rule `{rule}`: it has never run, or is pruned", config.name),
        );
        return Err(error.hint(format!("known are: {}", names.join(", "))).into());
    };
    let active = context.plan.rules.iter().any(|active| active.name == rule);
    let retired = retired(&context.plan, state, active);
    if retired.is_empty() {
        match output {
            Output::Text => {
                print(&format!("`{rule}` has left no field that no rule owns: nothing to prune\n"));
            }
            Output::Json => print(&format!("{:#}\n", told(rule, dry_run, &[]))),
        }
        return Ok(());
    }
    let mut done = Vec::new();
    for retired in &retired {
        done.push((retired, count(&context, retired).await?));
    }
    if !dry_run {
        let work = async {
            let request = store.request(&context.server, rule, &Work::Prune(retired.clone())).await?;
            store.until_done(&context.server, request).await
        };
        with_a_leader(loaded, &context, work).await?;
        store.forget(&context.server, rule, state, !active).await?;
    }
    match output {
        Output::Text => {
            for (Retired { collection, path }, documents) in done {
                let verb = if dry_run { "would be taken from" } else { "was taken from" };
                let documents = if documents == 1 { "1 document".to_owned() } else { format!("{documents} documents") };
                print(&format!("{path} {verb} {documents} of {collection}\n"));
            }
        }
        Output::Json => print(&format!("{:#}\n", told(rule, dry_run, &done))),
    }
    Ok(())
}

fn told(rule: &str, dry_run: bool, done: &[(&Retired, u64)]) -> serde_json::Value {
    let paths = done.iter().map(|(Retired { collection, path }, documents)| {
        serde_json::json!({"collection": collection, "path": path.to_string(), "documents": documents})
    });
    serde_json::json!({"rule": rule, "dry_run": dry_run, "paths": paths.collect::<Vec<_>>()})
}
