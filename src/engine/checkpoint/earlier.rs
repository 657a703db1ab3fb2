//! The records of rules that have run, read without opening the state: for commands that write nothing, and before a leader
//! knows the number of partitions.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bson::{Bson, Document, doc};

use denormd_model::{partition::of_deployment, rule_state::RuleState};
use denormd_mongo::{
    Server, all,
    error::{Kind, Result},
};
use denormd_rules::plan::{Plan, Rule, RuleId};

use super::{
    adoption::Decisions,
    rule_record::{RULES, RuleRecord, is_in_config, read},
};

/// The definition by which each rule last wrote, by the rule's name. Two kinds of rules have none, because the application may have
/// written their values since: those that have left the config, and changed ones in whose fields `denormd undo` has put back values.
/// None can be read without the privilege to.
pub async fn definitions(server: &Server, database: &str, plan: &Plan) -> Result<BTreeMap<String, Document>> {
    let deployment = plan.name.as_str();
    let records = match records(server, database, deployment, Document::new()).await {
        Err(error) if error.kind == Kind::Privilege => return Ok(BTreeMap::new()),
        records => records?,
    };
    let records: Vec<_> = records.into_iter().filter(|(_, record)| record.state != RuleState::Removed).collect();
    let runs = |name: &str, record: &RuleRecord| plan.named(name).is_some_and(|rule| record.runs(rule));
    let (mut written, mut unfinished) = (BTreeMap::new(), BTreeMap::new());
    for (rule, record) in &records {
        // One that is blocked for its effect on existing data has written nothing, and one with an open agreement has not written every
        // target yet. The daemon compares with the definition before it.
        let is_unfinished = record.state.awaits_agreement() || record.has_open_agreement() && !runs(rule, record);
        if is_unfinished { &mut unfinished } else { &mut written }.insert(rule.clone(), record.definition.clone());
    }
    let decisions = Decisions { server, database, deployment };
    for (rule, definition) in unfinished {
        match decisions.of(&rule).await?.and_then(|last| last.earlier_than(&definition)) {
            Some(earlier) => written.insert(rule, earlier),
            None => written.remove(&rule),
        };
    }
    for (rule, record) in &records {
        let has_given_back = written.get(rule).is_some_and(|definition| record.has_given_back(definition));
        // Of a blocked rule, it is the definition before the one that waits.
        if has_given_back && (record.state.awaits_agreement() || !runs(rule, record)) {
            written.remove(rule);
        }
    }
    Ok(written)
}

/// The rules whose first backfill has ended in all partitions, and those in shadow. Without the privilege to read the records, only
/// the latter.
pub(crate) async fn settled(server: &Server, database: &str, plan: &Plan) -> Result<BTreeSet<RuleId>> {
    let records = match records(server, database, &plan.name, is_in_config()).await {
        Err(error) if error.kind == Kind::Privilege => Vec::new(),
        records => records?,
    };
    let is_settled = |rule: &&Arc<Rule>| {
        let mut own = records.iter().filter(|(name, _)| *name == rule.name).map(|(_, record)| record).peekable();
        let has_ended =
            |record: &RuleRecord| record.runs(rule) && record.state == RuleState::Live && record.keeping.is_none();
        rule.shadow || own.peek().is_some() && own.all(has_ended)
    };
    Ok(plan.rules.iter().filter(is_settled).map(|rule| rule.id).collect())
}

/// The rules of the plan that have already run with their current definition.
pub async fn have_run(server: &Server, database: &str, deployment: &str, plan: &Plan) -> Result<BTreeSet<RuleId>> {
    let records = records(server, database, deployment, is_in_config()).await?;
    let same = |(name, record): &(String, RuleRecord)| {
        plan.rules.iter().find(|rule| rule.name == *name && rule.has_definition(&record.definition))
    };
    Ok(records.iter().filter_map(same).map(|rule| rule.id).collect())
}

/// True if one of these rules awaits an agreement to its effect on existing data, in the partition, or in one partition of the
/// deployment at least. False without the privilege to read this.
pub(crate) async fn is_agreement_awaited(
    server: &Server,
    database: &str,
    deployment: &str,
    rules: &[&str],
) -> Result<bool> {
    match records(server, database, deployment, doc! {"_id.rule": {"$in": rules}, "block.kind": "adoption"}).await {
        Err(error) if error.kind == Kind::Privilege => Ok(false),
        records => Ok(records?.iter().any(|(_, record)| record.state.awaits_agreement())),
    }
}

/// The UUIDs of the source collections that the partitions have seen for a rule; None where the first version did not record
/// it. Empty if nobody has seen one, or without the privilege to read this.
pub(crate) async fn sources_seen(
    server: &Server,
    database: &str,
    deployment: &str,
    rule: &str,
) -> Result<Vec<Option<Bson>>> {
    match records(server, database, deployment, doc! {"_id.rule": rule, "source_seen": true}).await {
        Err(error) if error.kind == Kind::Privilege => Ok(Vec::new()),
        records => Ok(records?.into_iter().map(|(_, record)| record.source_uuid).collect()),
    }
}

/// The records of the rules that are in the config of another deployment in the same state database: the id of the deployment or
/// partition, and the rule's name. Those that cannot be read are left out.
pub(crate) async fn of_other_deployments(
    server: &Server,
    database: &str,
    deployment: &str,
) -> Result<Vec<(String, String, RuleRecord)>> {
    let others = doc! {"$nor": [of_deployment("_id.deployment", deployment)]};
    let found = all(server.collection(database, RULES).find(doc! {"$and": [others, is_in_config()]})).await?;
    let records = found.iter().filter_map(|document| read(document).ok());
    Ok(records.map(|(id, record)| (id.deployment, id.rule, record)).collect())
}

/// The records of these rules, of each partition.
async fn records(
    server: &Server,
    database: &str,
    deployment: &str,
    which: Document,
) -> Result<Vec<(String, RuleRecord)>> {
    let filter = doc! {"$and": [of_deployment("_id.deployment", deployment), which]};
    let found = all(server.collection(database, RULES).find(filter)).await?;
    found.iter().map(|document| read(document).map(|(id, record)| (id.rule, record))).collect()
}
