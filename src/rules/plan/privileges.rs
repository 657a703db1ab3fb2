//! The privileges that denormd's user needs, and no more. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use bson::{Bson, Document, doc};

use crate::{config::OnMissing, plan::Plan};
use denormd_model::namespace::Namespace;

/// Actions that must be allowed on a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Privilege {
    /// The database and the collection; an empty name means all of its collections.
    pub resource: Namespace,
    /// Privilege actions as MongoDB names them.
    pub actions: BTreeSet<&'static str>,
    /// Short descriptions of their use.
    pub purposes: BTreeSet<String>,
}

/// The collection that shows the remaining oplog window. Without read access to it, only the window is unknown.
pub const OPLOG: (&str, &str) = ("local", "oplog.rs");

/// The privileges that the daemon and the commands need for these rules, with their state in `state`.
#[must_use]
pub fn needed(plan: &Plan, state: &str) -> Vec<Privilege> {
    let mut all: BTreeMap<Namespace, (BTreeSet<&'static str>, BTreeSet<String>)> = BTreeMap::new();
    let mut need = |database: &str, collection: &str, actions: &[&'static str], purpose: String| {
        let resource = Namespace { database: database.to_owned(), collection: collection.to_owned() };
        let (all_actions, purposes) = all.entry(resource).or_default();
        all_actions.extend(actions);
        purposes.insert(purpose);
    };
    for rule in &plan.rules {
        let Namespace { database, collection } = &rule.source.namespace;
        need(database, collection, &["find", "listIndexes"], format!("source of {}", rule.name));
        let Namespace { database, collection } = &rule.target.namespace;
        let purpose = || format!("target of {}", rule.name);
        need(database, collection, &["find", "listIndexes"], purpose());
        if !rule.shadow {
            need(database, collection, &["update"], purpose());
            if rule.on_missing == OnMissing::Delete || rule.creates.as_ref().is_some_and(|creates| !creates.keeps) {
                need(database, collection, &["remove"], purpose());
            }
            if rule.creates.is_some() {
                need(database, collection, &["insert"], purpose());
            }
        }
    }
    for database in plan.databases() {
        // One stream for the database, whatever the number of its collections. It requires `find` on all of them.
        need(&database, "", &["changeStream", "find", "listCollections"], "the database's change stream".to_owned());
    }
    // The events are in a capped collection, which requires two privileges to create.
    let own = ["convertToCapped", "createCollection", "find", "insert", "listCollections", "remove", "update"];
    need(state, "", &own, "denormd's own state".to_owned());
    let (database, collection) = OPLOG;
    need(database, collection, &["collStats", "find"], "the remaining oplog window; can be left out".to_owned());
    let privilege = |(resource, (actions, purposes))| Privilege { resource, actions, purposes };
    all.into_iter().map(privilege).collect()
}

/// The additional privileges for `plan --apply`.
#[must_use]
pub fn needed_to_apply(plan: &Plan) -> Vec<Privilege> {
    let actions = |resource: Namespace| Privilege {
        actions: ["collMod", "createCollection", "createIndex"].into(),
        resource,
        purposes: BTreeSet::from(["plan --apply".to_owned()]),
    };
    plan.namespaces().into_iter().map(actions).collect()
}

/// The needed privileges that a user's privileges (`connectionStatus` with `showPrivileges`) do not include.
#[must_use]
pub fn missing(needed: &[Privilege], has: &[Document]) -> Vec<Privilege> {
    let lacks = |need: &Privilege| {
        let lacking: BTreeSet<&'static str> = need
            .actions
            .iter()
            .filter(|action| !has.iter().any(|has| gives(has, &need.resource, action)))
            .copied()
            .collect();
        (!lacking.is_empty()).then(|| Privilege { actions: lacking, ..need.clone() })
    };
    needed.iter().filter_map(lacks).collect()
}

fn gives(has: &Document, resource: &Namespace, action: &str) -> bool {
    let actions = has.get_array("actions").map(Vec::as_slice).unwrap_or_default();
    if !actions.iter().any(|has| matches!(has.as_str(), Some(has) if has == action || has == "anyAction")) {
        return false;
    }
    let Ok(on) = has.get_document("resource") else { return false };
    if on.get_bool("anyResource").unwrap_or_default() {
        return true;
    }
    let (Ok(database), Ok(collection)) = (on.get_str("db"), on.get_str("collection")) else { return false };
    // An empty name covers all databases except those of the system, `local` and `config`.
    let databases = database == resource.database || (database.is_empty() && !is_system(&resource.database));
    databases && (collection == resource.collection || collection.is_empty())
}

fn is_system(database: &str) -> bool {
    ["local", "config"].contains(&database)
}

impl Privilege {
    /// The privilege as a document for `createRole` and `grantPrivilegesToRole`.
    #[must_use]
    pub fn document(&self) -> Document {
        let actions: Vec<Bson> = self.actions.iter().map(|action| Bson::from(*action)).collect();
        doc! {
            "resource": {"db": &self.resource.database, "collection": &self.resource.collection},
            "actions": actions,
        }
    }

    /// The privilege in the syntax of mongosh.
    #[must_use]
    pub fn shell(&self) -> String {
        let Namespace { database, collection } = &self.resource;
        let actions: Vec<String> = self.actions.iter().map(|action| format!("{action:?}")).collect();
        format!("{{ resource: {{ db: {database:?}, collection: {collection:?} }}, actions: [{}] }}", actions.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Format, load_str},
        plan::compile,
    };

    fn plan(rule: &str) -> Plan {
        let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {rule}\n");
        compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap()
    }

    fn texts(privileges: &[Privilege]) -> Vec<String> {
        privileges
            .iter()
            .map(|p| {
                let actions: Vec<&str> = p.actions.iter().copied().collect();
                format!("{}.{} {}", p.resource.database, p.resource.collection, actions.join(" "))
            })
            .collect()
    }

    #[test]
    fn targets_are_updated_and_removed_only_where_the_rule_does_so() {
        let rule = |more: &str| {
            texts(&needed(
                &plan(&format!(
                    "{{ name: r, {more} copy: {{ source: s, target: e.t, match: {{ ref: _id }}, set: {{ n: $n }} }} }}"
                )),
                "denormd",
            ))
        };
        assert_eq!(
            rule(""),
            [
                "d. changeStream find listCollections",
                "d.s find listIndexes",
                "denormd. convertToCapped createCollection find insert listCollections remove update",
                "e. changeStream find listCollections",
                "e.t find listIndexes update",
                "local.oplog.rs collStats find",
            ]
        );
        assert!(rule("shadow: true,").contains(&"e.t find listIndexes".to_owned()));
        let deletes =
            "{ name: r, copy: { source: s, target: t, match: { ref: _id }, set: { n: $n }, on_missing: delete } }";
        assert!(texts(&needed(&plan(deletes), "x")).contains(&"d.t find listIndexes remove update".to_owned()));
    }

    #[test]
    fn what_is_given_on_more_covers_what_is_needed_on_less() {
        let need = |database: &str, collection: &str| Privilege {
            resource: Namespace { database: database.to_owned(), collection: collection.to_owned() },
            actions: ["find", "update"].into(),
            purposes: BTreeSet::new(),
        };
        let on = |resource: Document, actions: &[&str]| doc! {"resource": resource, "actions": actions.to_vec()};
        let exact = doc! {"db": "d", "collection": "c"};
        for (has, lacking) in [
            (vec![], vec!["d.c find update"]),
            (vec![on(exact.clone(), &["find"])], vec!["d.c update"]),
            (vec![on(exact.clone(), &["find"]), on(exact, &["update"])], vec![]),
            (vec![on(doc! {"db": "d", "collection": ""}, &["find", "update"])], vec![]),
            (vec![on(doc! {"db": "", "collection": "c"}, &["find", "update"])], vec![]),
            (vec![on(doc! {"db": "d", "collection": "other"}, &["find", "update"])], vec!["d.c find update"]),
            (vec![on(doc! {"anyResource": true}, &["anyAction"])], vec![]),
        ] {
            assert_eq!(texts(&missing(&[need("d", "c")], &has)), lacking, "{has:?}");
        }
        let everywhere = [on(doc! {"db": "", "collection": ""}, &["find", "update"])];
        assert_eq!(missing(&[need("local", "oplog.rs")], &everywhere).len(), 1, "local is not everywhere");
    }
}
