//! The recorded rules of a deployment that a config lacks. They stop when the config runs, and may belong to another
//! application whose config has the same name.

use std::collections::BTreeSet;

use bson::Document;
use futures_util::TryStreamExt;

use crate::checkpoint::rule_record::{RULES, read};
use denormd_model::{partition::of_deployment, rule_state::RuleState, text::counted};
use denormd_mongo::{
    Server, bounded,
    error::{Kind, Result},
};
use denormd_rules::{
    config::{ConfigPath, Mistake},
    plan::Plan,
};

/// Number of rules that the warning names.
const NAMED: usize = 5;

/// A warning about the deployment's rules that the plan lacks. None also without the privilege to read the records.
pub async fn rules_that_stop(server: &Server, database: &str, plan: &Plan) -> Result<Option<Mistake>> {
    let filter = of_deployment("_id.deployment", &plan.name);
    let records = bounded(async {
        let found = server.collection(database, RULES).find(filter).await?;
        found.try_collect::<Vec<Document>>().await
    });
    let records = match records.await {
        Err(error) if error.kind == Kind::Privilege => return Ok(None),
        records => records?,
    };
    let mut recorded = BTreeSet::new();
    for document in &records {
        let (id, record) = read(document)?;
        if record.state != RuleState::Removed {
            recorded.insert(id.rule);
        }
    }
    let own: Vec<&str> = plan.rules.iter().map(|rule| rule.name.as_str()).collect();
    Ok(warning((&plan.name, database), &own, &recorded))
}

/// The warning about recorded rules that are not among the config's own.
fn warning((name, database): (&str, &str), own: &[&str], recorded: &BTreeSet<String>) -> Option<Mistake> {
    let others: Vec<&str> = recorded.iter().map(String::as_str).filter(|rule| !own.contains(rule)).collect();
    let (they, belong, stop) = match others.len() {
        0 => return None,
        1 => ("it", "belongs", "stops"),
        _ => ("they", "belong", "stop"),
    };
    let mut list = others.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
    if others.len() > NAMED {
        list.push_str(&format!(" and {} more", others.len() - NAMED));
    }
    let message = format!(
        "the deployment `{name}` (state database `{database}`) has {} that this config does not have: {list}",
        counted(others.len() as u64, "rule")
    );
    let hint = if others.len() == recorded.len() && !own.is_empty() {
        format!(
            "none of this config's rules is there yet, so {they} probably {belong} to another application. When this config \
             runs, {they} {stop}: give this config a `name:` of its own"
        )
    } else {
        format!(
            "{they} {stop} when this config runs. If {they} {belong} to another application, give this config a `name:` of \
             its own"
        )
    };
    Some(Mistake::new(ConfigPath::default().key("name"), message).hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(own: &[&str], recorded: &[&str]) -> Option<String> {
        let recorded = recorded.iter().map(|name| (*name).to_owned()).collect();
        let Mistake { message, hint, .. } = warning(("default", "denormd"), own, &recorded)?;
        Some(format!("{message}\n{}", hint.unwrap_or_default()))
    }

    #[test]
    fn the_rules_that_a_config_lacks_are_named() {
        assert_eq!(told(&["a", "b"], &["a"]), None);
        assert_eq!(told(&["a"], &[]), None);
        let one = told(&["a"], &["a", "b"]).unwrap();
        assert!(one.starts_with("the deployment `default` (state database `denormd`) has 1 rule that this"), "{one}");
        assert!(one.contains(": b\nit stops when this config runs. If it belongs to another application"), "{one}");
        let other = told(&["x"], &["a", "b", "c", "d", "e", "f", "g"]).unwrap();
        assert!(
            other.contains("has 7 rules that this config does not have: a, b, c, d, e and 2 more\nnone of"),
            "{other}"
        );
        assert!(
            other.contains("they probably belong to another application. When this config runs, they stop"),
            "{other}"
        );
        let none_left = told(&[], &["a", "b"]).unwrap();
        assert!(none_left.contains("has 2 rules that this config does not have: a, b\nthey stop"), "{none_left}");
    }
}
