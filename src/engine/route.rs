//! Turns a change event into reconcile requests. Pure: depends on the event and the plan only.

use std::collections::HashMap;

use bson::Document;

use crate::{
    change::{Change, ChangeEvent},
    request::{Request, Scope, Task},
};
use denormd_model::{key::Key, namespace::Namespace};
use denormd_rules::{
    config::Guard,
    plan::{Keyed, Plan, Rule, RuleId, reference::Role},
};

/// The work that an event leads to.
#[derive(Debug, Default, PartialEq)]
pub struct Routed {
    /// Keys to check again.
    pub requests: Vec<Request>,
    /// Rules whose targets must all be checked again, because the event does not tell which ones are affected.
    pub backfills: Vec<RuleId>,
    /// Rules whose source collection was replaced as a whole.
    pub renewed: Vec<RuleId>,
    /// Rules whose source collection is gone.
    pub sources_gone: Vec<RuleId>,
}

/// A plan, indexed by collection.
#[derive(Debug)]
pub struct Router {
    plan: Plan,
    by_source: HashMap<Namespace, Vec<RuleId>>,
    by_target: HashMap<Namespace, Vec<RuleId>>,
}

impl Router {
    /// Indexes a plan.
    #[must_use]
    pub fn new(plan: Plan) -> Self {
        let (mut by_source, mut by_target) = (HashMap::<_, Vec<_>>::new(), HashMap::<_, Vec<_>>::new());
        for rule in &plan.rules {
            by_source.entry(rule.source.namespace.clone()).or_default().push(rule.id);
            by_target.entry(rule.target.namespace.clone()).or_default().push(rule.id);
        }
        Self { plan, by_source, by_target }
    }

    /// The rule with this id.
    #[must_use]
    pub fn rule(&self, id: RuleId) -> &Rule {
        self.plan.rule(id)
    }

    /// The rules that write to a collection.
    pub fn writers(&self, at: &Namespace) -> impl Iterator<Item = RuleId> {
        self.rules(&self.by_target, at).map(|rule| rule.id)
    }

    /// Adds the work for `event` to `out`.
    pub fn route(&self, event: &ChangeEvent, out: &mut Routed) {
        match &event.change {
            Change::Insert(_) | Change::Replace(_) | Change::Update(_) | Change::Delete => {
                self.rules(&self.by_source, &event.namespace).for_each(|rule| source_changed(rule, event, out));
                self.rules(&self.by_target, &event.namespace).for_each(|rule| target_changed(rule, event, out));
            }
            Change::Drop => {
                out.sources_gone.extend(self.rules(&self.by_source, &event.namespace).map(|rule| rule.id));
                self.documents_gone(&event.namespace, out);
            }
            Change::Rename(to) => {
                self.documents_gone(&event.namespace, out);
                out.sources_gone.extend(self.rules(&self.by_source, &event.namespace).map(|rule| rule.id));
                out.renewed.extend(self.rules(&self.by_source, to).map(|rule| rule.id));
                out.backfills.extend(self.rules(&self.by_target, to).map(|rule| rule.id));
            }
            Change::DropDatabase => {
                let gone = |rule: &&std::sync::Arc<Rule>| rule.source.namespace.database == event.namespace.database;
                out.sources_gone.extend(self.plan.rules.iter().filter(gone).map(|rule| rule.id));
                for rule in
                    self.plan.rules.iter().filter(|rule| rule.target.namespace.database == event.namespace.database)
                {
                    out.backfills.extend(rule.creates.as_ref().map(|_| rule.id));
                }
            }
            Change::Other => {}
        }
    }

    /// The rules that create the documents of a collection that is gone create them again.
    fn documents_gone(&self, target: &Namespace, out: &mut Routed) {
        let creates = self.rules(&self.by_target, target).filter(|rule| rule.creates.is_some());
        out.backfills.extend(creates.map(|rule| rule.id));
    }

    fn rules<'a>(
        &'a self,
        index: &'a HashMap<Namespace, Vec<RuleId>>,
        at: &Namespace,
    ) -> impl Iterator<Item = &'a Rule> {
        index.get(at).into_iter().flatten().map(|id| self.plan.rule(*id).as_ref())
    }
}

fn source_changed(rule: &Rule, event: &ChangeEvent, out: &mut Routed) {
    if let Change::Update(changed) = &event.change
        && !rule.source_reads.touched_by(changed)
    {
        return;
    }
    if rule.reference.keyed_by_source_id() {
        let key = Key::one(event.id.clone());
        if rule.reference.can_resolve(&key) {
            out.requests.push(value_request(rule, key));
        }
        return;
    }
    let look = |task| Request { rule: rule.id, task, key: Key::one(event.id.clone()), scope: Scope::All };
    let locate = || look(Task::LocateSource);
    // A value that no key can have becomes a dead letter of the source, and one that is gone ends it.
    let is_unusable = |doc: &Document| rule.reference.has_unusable_value(doc);
    let now = match &event.change {
        Change::Insert(now) | Change::Replace(now) => Some(now),
        _ => None,
    };
    if now.into_iter().chain(&event.before).any(is_unusable) {
        out.requests.push(locate());
    }
    let mut keys = |doc: &Document| {
        let found = rule.reference.keys(Role::Source, doc).into_iter().flatten();
        out.requests.extend(found.map(|key| source_request(rule, key)));
    };
    match (&event.change, &event.before) {
        (Change::Insert(now), _) => keys(now),
        (Change::Replace(now), Some(before)) => {
            keys(now);
            keys(before);
        }
        (Change::Delete, Some(before)) => keys(before),
        (Change::Update(changed), before) => {
            let moved = changed.iter().any(|changed| rule.reference.touched_by(Role::Source, changed));
            match before {
                Some(before) => {
                    keys(before);
                    if moved {
                        out.requests.push(locate());
                    }
                }
                // The keys have not changed, so the current document has them.
                None if !moved => out.requests.push(locate()),
                None if rule.child().is_some() => out.requests.extend([locate(), look(Task::Parents)]),
                None => out.backfills.push(rule.id),
            }
        }
        (Change::Replace(_) | Change::Delete, None) if rule.child().is_some() => {
            out.requests.extend([locate(), look(Task::Parents)]);
        }
        _ => out.backfills.push(rule.id),
    }
}

/// The request for every target of the values of a source: those of its key, or of the interval that contains its date.
#[must_use]
pub fn source_request(rule: &Rule, key: Key) -> Request {
    if rule.reference.has_buckets() {
        return Request { rule: rule.id, task: Task::Bucket, key, scope: Scope::All };
    }
    value_request(rule, key)
}

/// The request for every target of a source's value.
#[must_use]
pub fn value_request(rule: &Rule, key: Key) -> Request {
    let task = match rule.keyed {
        Keyed::Value => Task::Value,
        Keyed::Target => Task::Holders,
    };
    Request { rule: rule.id, task, key, scope: Scope::All }
}

fn target_changed(rule: &Rule, event: &ChangeEvent, out: &mut Routed) {
    let id = || Key::one(event.id.clone());
    let owned =
        |changed: &[String]| changed.iter().any(|changed| rule.owned().iter().any(|path| path.touched_by(changed)));
    match &event.change {
        // A document that the rule creates is written again after a delete as after an insert.
        Change::Insert(_) | Change::Replace(_) | Change::Delete if rule.creates.is_some() => {
            out.requests.extend(document_request(rule, &event.id));
        }
        Change::Insert(now) | Change::Replace(now) => out.requests.extend(target_requests(rule, &id(), now)),
        Change::Update(changed) if rule.target_reads.touched_by(changed) => {
            out.requests.push(target_request(rule, id()));
        }
        Change::Update(changed) if rule.guard == Guard::Watch && !rule.shadow && owned(changed) => {
            out.requests.push(Request { rule: rule.id, task: Task::Guard, key: id(), scope: Scope::All });
        }
        // Fields of others decide if a document without sources stays.
        Change::Update(changed) if rule.creates.as_ref().is_some_and(|creates| creates.may_free(changed)) => {
            out.requests.extend(document_request(rule, &event.id));
        }
        _ => {}
    }
}

/// The request for a document that the rule creates; None if the `_id` has another form.
fn document_request(rule: &Rule, id: &bson::Bson) -> Option<Request> {
    Some(value_request(rule, rule.reference.key_of_id(id)?))
}

/// The request that brings one target up to date, whatever it refers to.
#[must_use]
pub fn target_request(rule: &Rule, id: Key) -> Request {
    // The document may not exist yet.
    if let Some(request) =
        id.values().first().filter(|_| rule.creates.is_some()).and_then(|id| document_request(rule, id))
    {
        return request;
    }
    let task = match rule.keyed {
        Keyed::Value => Task::LocateTarget,
        Keyed::Target => Task::Target,
    };
    Request { rule: rule.id, task, key: id, scope: Scope::All }
}

/// The requests that bring one target up to date, given its reference fields.
#[must_use]
pub fn target_requests(rule: &Rule, id: &Key, doc: &Document) -> Vec<Request> {
    reference_requests(rule, id, rule.reference.keys(Role::Target, doc))
}

/// The requests that bring one target up to date, given its references.
#[must_use]
pub fn reference_requests(rule: &Rule, id: &Key, references: Vec<Option<Key>>) -> Vec<Request> {
    match rule.keyed {
        Keyed::Target => vec![Request { rule: rule.id, task: Task::Target, key: id.clone(), scope: Scope::All }],
        Keyed::Value if rule.creates.is_some() => {
            references.into_iter().flatten().map(|key| value_request(rule, key)).collect()
        }
        Keyed::Value => references
            .into_iter()
            .map(|key| key.unwrap_or_else(|| Key::new(Vec::new())))
            .map(|key| Request { rule: rule.id, task: Task::Value, key, scope: Scope::one(id.clone()) })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use bson::{Bson, doc};

    use super::*;
    use denormd_model::position::ClusterTime;
    use denormd_rules::{
        config::{Format, load_str},
        plan::compile,
    };

    fn router(rule: &str) -> Router {
        let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {rule}\n");
        let loaded = load_str(&text, Format::Yaml).unwrap();
        Router::new(compile(&loaded.config, None).unwrap())
    }

    fn event(collection: &str, change: Change, before: Option<Document>) -> ChangeEvent {
        ChangeEvent {
            namespace: Namespace { database: "d".to_owned(), collection: collection.to_owned() },
            change,
            id: Bson::Int32(7),
            before,
            cluster_time: ClusterTime::default(),
            wall_time: None,
        }
    }

    /// The requests of an event in short form: `Value [1] all`, `Value [] 7`.
    fn asked(router: &Router, collection: &str, change: Change, before: Option<Document>) -> Vec<String> {
        let mut routed = Routed::default();
        router.route(&event(collection, change, before), &mut routed);
        let requests = routed.requests.iter().map(|request| {
            let scope = match &request.scope {
                Scope::All => "all".to_owned(),
                Scope::Named(ids) => ids.iter().map(|id| id.values()[0].to_string()).collect::<Vec<_>>().join(","),
            };
            let key: Vec<String> = request.key.values().iter().map(ToString::to_string).collect();
            format!("{:?} [{}] {scope}", request.task, key.join(","))
        });
        let backfills = routed.backfills.iter().chain(&routed.renewed).map(|_| "backfill".to_owned());
        requests.chain(backfills).chain(routed.sources_gone.iter().map(|_| "source gone".to_owned())).collect()
    }

    fn update(paths: &[&str]) -> Change {
        Change::Update(paths.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_source_found_by_its_id_names_its_key() {
        let router = router(
            "{ name: r, copy: { source: { collection: s, where: { on: true } }, target: t, match: { ref: _id }, set: { n: $a.b } } }",
        );
        for (change, expected) in [
            (Change::Insert(doc! {}), vec!["Value [7] all"]),
            (Change::Delete, vec!["Value [7] all"]),
            (update(&["a.b"]), vec!["Value [7] all"]),
            (update(&["a"]), vec!["Value [7] all"]),
            (update(&["on"]), vec!["Value [7] all"]),
            (update(&["a.c", "other"]), vec![]),
            (Change::Drop, vec!["source gone"]),
        ] {
            assert_eq!(asked(&router, "s", change.clone(), None), expected, "{change:?}");
        }
    }

    #[test]
    fn a_target_asks_for_itself_alone() {
        let router = router(
            "{ name: r, copy: { source: s, target: t, match: { \"p.$[].id\": _id }, set: { \"p.$[].n\": $n } } }",
        );
        for (change, expected) in [
            (Change::Insert(doc! {"p": [{"id": 1}, {}]}), vec!["Value [1] 7", "Value [] 7"]),
            (Change::Replace(doc! {"p": 5}), vec![]),
            (update(&["p.0.id"]), vec!["LocateTarget [7] all"]),
            (update(&["p"]), vec!["LocateTarget [7] all"]),
            (update(&["p.0.n"]), vec![]),
            (Change::Delete, vec![]),
        ] {
            assert_eq!(asked(&router, "t", change.clone(), None), expected, "{change:?}");
        }
    }

    #[test]
    fn a_source_that_moves_asks_for_where_it_was_and_where_it_is() {
        let router = router(
            "{ name: r, aggregate: { source: s, target: t, match: { _id: parent }, set: { n: { $sum: $v } } } }",
        );
        let was = || Some(doc! {"parent": 1});
        for (change, before, expected) in [
            (update(&["parent"]), was(), vec!["Value [1] all", "LocateSource [7] all"]),
            (update(&["v"]), was(), vec!["Value [1] all"]),
            (update(&["v"]), None, vec!["LocateSource [7] all"]),
            (update(&["parent"]), None, vec!["backfill"]),
            (Change::Replace(doc! {"parent": 2}), was(), vec!["Value [2] all", "Value [1] all"]),
            (Change::Replace(doc! {"parent": 2}), None, vec!["backfill"]),
            (Change::Delete, was(), vec!["Value [1] all"]),
            (Change::Delete, None, vec!["backfill"]),
            (Change::Insert(doc! {"parent": 2}), None, vec!["Value [2] all"]),
        ] {
            assert_eq!(asked(&router, "s", change.clone(), before), expected, "{change:?}");
        }
    }

    #[test]
    fn an_element_that_holds_the_id_tells_the_old_parent_without_a_pre_image() {
        let router = router(
            "{ name: r, collect: { source: s, target: t, match: { _id: parent }, into: c, element: { id: $_id, v: $v } } }",
        );
        for (change, expected) in [
            (update(&["parent"]), vec!["LocateSource [7] all", "Parents [7] all"]),
            (update(&["v"]), vec!["LocateSource [7] all"]),
            (Change::Delete, vec!["LocateSource [7] all", "Parents [7] all"]),
        ] {
            assert_eq!(asked(&router, "s", change.clone(), None), expected, "{change:?}");
        }
    }

    #[test]
    fn references_of_one_target_belong_together() {
        let router = router(
            "{ name: r, copy: { source: s, target: t, match: { \"ids.$[]\": _id }, into: copies, element: $n } }",
        );
        assert_eq!(asked(&router, "s", update(&["n"]), None), ["Holders [7] all"]);
        assert_eq!(asked(&router, "t", update(&["ids.3"]), None), ["Target [7] all"]);
    }

    #[test]
    fn only_a_watched_guard_looks_at_owned_fields() {
        let rule = |guard: &str| {
            router(&format!(
                "{{ name: r, {guard} copy: {{ source: s, target: t, match: {{ ref: _id }}, set: {{ n: $n }} }} }}"
            ))
        };
        assert_eq!(asked(&rule("guard: watch,"), "t", update(&["n"]), None), ["Guard [7] all"]);
        assert_eq!(asked(&rule(""), "t", update(&["n"]), None), Vec::<String>::new());
    }

    #[test]
    fn a_rename_onto_a_collection_sweeps_its_rules() {
        let router = router("{ name: r, copy: { source: s, target: t, match: { ref: _id }, set: { n: $n } } }");
        let onto = |name: &str| Change::Rename(Namespace { database: "d".to_owned(), collection: name.to_owned() });
        assert_eq!(asked(&router, "tmp", onto("s"), None), ["backfill"]);
        assert_eq!(asked(&router, "tmp", onto("t"), None), ["backfill"]);
        assert_eq!(asked(&router, "s", onto("old"), None), ["source gone"]);
    }
}
