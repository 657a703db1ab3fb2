//! A compiled rule and the plan that holds them.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use bson::{Binary, Bson, Document, RawDocumentBuf, doc, spec::BinarySubtype};
use sha2::{Digest, Sha256};

use crate::{
    config::{self, BackfillMode, ConfigPath, GroupForm, Guard, Mistake, OnDrift, OnEmpty, OnMissing},
    plan::{
        expression::{OfTarget, Reads},
        reference::{Reference, Role},
        tree::Tree,
    },
};
use denormd_model::{field_path::FieldPath, namespace::Namespace};

/// Index of a rule in its plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(pub usize);

/// The properties of a rule that inserts and deletes its targets.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Creates {
    /// True if a document stays when its last source is gone.
    pub keeps: bool,
    /// The paths that rules own in the target collection. A document with any other path is not deleted.
    pub owned: Vec<FieldPath>,
    /// The paths among them that rules own only in documents matching one of these filters; elsewhere they are the application's.
    pub owned_where: Vec<(FieldPath, Vec<Document>)>,
    /// The other rules that create documents in the same collection.
    pub others: Vec<RuleId>,
}

/// All compiled rules of one config.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The deployment's name.
    pub name: String,
    /// The rules, in the config's order.
    pub rules: Vec<Arc<Rule>>,
    /// The rules, each after all rules that feed it.
    pub order: Vec<RuleId>,
    /// For each rule, the rules that it feeds: they read its target fields, or what it removes.
    pub feeds: Vec<Vec<RuleId>>,
    /// True if removals may cause further removals, in as many steps as the documents allow.
    pub cascades: bool,
}

impl Plan {
    /// The rule with this id.
    #[must_use]
    pub fn rule(&self, id: RuleId) -> &Arc<Rule> {
        &self.rules[id.0]
    }

    /// The rule of this name.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Arc<Rule>> {
        self.rules.iter().find(|rule| rule.name == name)
    }

    /// A plan with one rule, to check the requirements of that rule. Its id is still that of the whole plan.
    #[must_use]
    pub fn only(&self, id: RuleId) -> Self {
        let (order, feeds) = (Vec::new(), Vec::new());
        Self { name: self.name.clone(), rules: vec![self.rule(id).clone()], order, feeds, cascades: false }
    }

    /// Number of steps in the longest chain of rules: a change needs that many to reach the end. A recursive rule takes
    /// a step for each level of its tree, and a cascade of removals counts as deep as a tree may be by default.
    #[must_use]
    pub fn longest_chain(&self) -> usize {
        let mut length = vec![1; self.rules.len()];
        for rule in self.order.iter().rev() {
            let beyond = self.feeds[rule.0].iter().map(|fed| length[fed.0]).max();
            let levels = self.rules.get(rule.0).and_then(|rule| rule.tree).map_or(0, |tree| tree.max_depth);
            length[rule.0] = 1 + levels + beyond.unwrap_or_default();
        }
        length.into_iter().max().unwrap_or_default() + if self.cascades { config::Rule::DEFAULT_MAX_DEPTH } else { 0 }
    }

    /// The rules of these names, and all that they feed, directly or through other rules.
    #[must_use]
    pub fn with_fed(&self, names: BTreeSet<String>) -> BTreeSet<String> {
        let mut all = names;
        // In this order, each rule comes before those that it feeds.
        for rule in &self.order {
            if all.contains(&self.rule(*rule).name) {
                all.extend(self.feeds[rule.0].iter().map(|fed| self.rule(*fed).name.clone()));
            }
        }
        all
    }

    /// The rules that this one reads from, directly or through other rules.
    #[must_use]
    pub fn feeders(&self, id: RuleId) -> BTreeSet<RuleId> {
        let mut all = BTreeSet::from([id]);
        for rule in self.order.iter().rev() {
            if self.feeds[rule.0].iter().any(|fed| all.contains(fed)) {
                all.insert(*rule);
            }
        }
        all.remove(&id);
        all
    }

    /// Condition for records of work by the fingerprint of their rule, if it is of none of these definitions. Records of earlier
    /// versions have no fingerprint and do not match.
    #[must_use]
    pub fn other_definitions(&self) -> Document {
        let fingerprints: Vec<Bson> = self.rules.iter().map(|rule| rule.fingerprint()).collect();
        doc! {"definition": {"$type": "binData", "$nin": fingerprints}}
    }

    /// True if this plan has the rule, by this definition.
    #[must_use]
    pub fn runs(&self, rule: &Rule) -> bool {
        self.rules.iter().any(|own| own.name == rule.name && own.has_definition(&rule.definition))
    }

    /// Every database with a watched collection.
    #[must_use]
    pub fn databases(&self) -> BTreeSet<String> {
        self.namespaces().into_iter().map(|ns| ns.database).collect()
    }

    /// Every watched collection.
    #[must_use]
    pub fn namespaces(&self) -> BTreeSet<Namespace> {
        self.rules.iter().flat_map(|rule| [rule.source.namespace.clone(), rule.target.namespace.clone()]).collect()
    }

    /// The source collections that must keep pre-images, with the first rule that needs them.
    #[must_use]
    pub fn pre_images(&self) -> Vec<(&Namespace, &Arc<Rule>)> {
        let mut seen = BTreeSet::new();
        self.rules
            .iter()
            .filter(|rule| rule.needs_pre_images())
            .map(|rule| (&rule.source.namespace, rule))
            .filter(|(ns, _)| seen.insert((*ns).clone()))
            .collect()
    }
}

/// True if two definitions are the same in every bit. `==` does not suffice: it ignores the order of fields, which copied
/// documents keep, and a document with NaN does not equal itself.
#[must_use]
pub fn is_same_definition(one: &Document, other: &Document) -> bool {
    let bytes = |definition: &Document| RawDocumentBuf::try_from(definition).map(RawDocumentBuf::into_bytes).ok();
    bytes(one) == bytes(other)
}

/// One side of a rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    /// The collection.
    pub namespace: Namespace,
    /// Filter for the documents that take part.
    pub filter: Option<Document>,
}

/// Kind of key that identifies one reconcile of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keyed {
    /// The value that source and targets share: everything written follows from the sources with that value.
    Value,
    /// The target's `_id`: the written values follow from several references of one target.
    Target,
}

/// A `set` entry.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    /// The target's path.
    pub path: FieldPath,
    /// An aggregation expression over the source document.
    pub expression: Bson,
}

impl Assignment {
    /// The variables of an accumulated value, each with its accumulator, and the expression over them; None if the
    /// value is an accumulator itself.
    #[must_use]
    pub fn variables(&self) -> Option<(&Document, &Bson)> {
        let bound = self.expression.as_document()?.get_document("$let").ok()?;
        Some((bound.get_document("vars").ok()?, bound.get("in")?))
    }

    /// The accumulators of an accumulated value.
    pub fn accumulators(&self) -> impl Iterator<Item = &Bson> {
        let variables = self.variables().map(|(variables, _)| variables);
        let alone = variables.is_none().then_some(&self.expression);
        variables.into_iter().flat_map(Document::values).chain(alone)
    }
}

/// Values computed from the sources of a key.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// Fields of one source.
    Set {
        /// Target paths with their expressions.
        assignments: Vec<Assignment>,
        /// Only fill fields without a value, and never change them again.
        once: bool,
        /// For a target, or an element, without a source: an expression for each assignment that has one. None if
        /// `on_missing` decides.
        otherwise: Option<Vec<Option<Bson>>>,
    },
    /// An array with one element for each reference of the target, in their order.
    Into {
        /// Path of the array.
        path: FieldPath,
        /// The expression of one element.
        element: Bson,
    },
    /// An array with one element for each source.
    Collect {
        /// Path of the array.
        path: FieldPath,
        /// The expression of one element.
        element: Bson,
        /// Path of the sources' `_id`s in the target, if the elements contain them.
        child: Option<FieldPath>,
        /// Maximum number of elements, as in `$slice` of `$push`: from the end if negative.
        slice: Option<i64>,
        /// Reaction to a key without sources.
        on_empty: OnEmpty,
        /// Maximum number of elements; more are an error.
        max_elements: Option<u64>,
        /// Maximum size in bytes; more is an error.
        max_bytes: Option<u64>,
    },
    /// Accumulated values of all sources.
    Aggregate {
        /// Target paths; their expressions are `{ $accumulator: expression }`, or `{ $let: { vars, in } }` with an
        /// accumulator for each variable.
        assignments: Vec<Assignment>,
        /// Reaction to a key without sources.
        on_empty: OnEmpty,
    },
    /// One element, or one field, for each group of sources.
    Groups(Groups),
}

impl Values {
    /// The target's paths that the rule writes.
    #[must_use]
    pub fn paths(&self) -> Vec<&FieldPath> {
        match self {
            Self::Set { assignments, .. } | Self::Aggregate { assignments, .. } => {
                assignments.iter().map(|assignment| &assignment.path).collect()
            }
            Self::Into { path, .. } | Self::Collect { path, .. } | Self::Groups(Groups { path, .. }) => vec![path],
        }
    }

    /// True if a value is computed from all the sources of a key.
    #[must_use]
    pub fn gathers(&self) -> bool {
        match self {
            Self::Collect { .. } | Self::Aggregate { .. } | Self::Groups(_) => true,
            Self::Set { .. } | Self::Into { .. } => false,
        }
    }

    /// The key of the config under which a rule with these values is written.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Set { .. } | Self::Into { .. } => "copy",
            Self::Collect { .. } => "collect",
            Self::Aggregate { .. } | Self::Groups(_) => "aggregate",
        }
    }

    /// The place of a written path in the config, below that of the rule's kind, for a message about it.
    #[must_use]
    pub fn written_at(&self, at: &ConfigPath, path: &FieldPath) -> Mistake {
        match self {
            Self::Set { .. } | Self::Aggregate { .. } => {
                Mistake::new(at.key("set").key(&path.to_string()), "").on_key()
            }
            Self::Into { .. } | Self::Collect { .. } | Self::Groups(_) => Mistake::new(at.key("into"), ""),
        }
    }
}

/// The groups of an `aggregate` with `by`.
#[derive(Debug, Clone, PartialEq)]
pub struct Groups {
    /// The target's path that receives them.
    pub path: FieldPath,
    /// Names with expressions over a source: sources with equal values form a group.
    pub by: Vec<(String, Bson)>,
    /// The accumulated fields of a group. Each path is one name.
    pub fields: Vec<Assignment>,
    /// Fields of a group with sort directions; those of `by` break ties.
    pub sort: Vec<(String, i32)>,
    /// Maximum number of groups, as in `$slice` of `$push`: from the end if negative.
    pub slice: Option<i64>,
    /// An array of groups, or an object of groups.
    pub form: GroupForm,
    /// Reaction to a key without sources.
    pub on_empty: OnEmpty,
}

/// A rule as the daemon runs it.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct Rule {
    /// Index in the plan.
    pub id: RuleId,
    /// The rule's name, unique in the config.
    pub name: String,
    /// Collection and filter of the source.
    pub source: Side,
    /// Collection and filter of the target.
    pub target: Side,
    /// Matching between a target and its sources.
    pub reference: Reference,
    /// Kind of key of a reconcile.
    pub keyed: Keyed,
    /// True if each value follows from the sources of one key alone: that of the target, or of the element that has it.
    pub by_key: bool,
    /// Values to compute.
    pub values: Values,
    /// Source paths with sort directions; `_id` ascending breaks ties.
    pub sort: Vec<(String, i32)>,
    /// A condition on `$$element`, which an element of the source's array must fulfil to count.
    pub row_filter: Option<Bson>,
    /// A condition on a source and its target (`$$target`), which a source must fulfil to count for that target.
    pub pair_filter: Option<Bson>,
    /// The target's paths that values are computed from. None if values do not depend on the target; otherwise each
    /// target has values of its own.
    pub of_target: Option<OfTarget>,
    /// The tree of a recursive rule, which reads its own output.
    pub tree: Option<Tree>,
    /// Reaction to a reference without a source.
    pub on_missing: OnMissing,
    /// For a rule that inserts and deletes its targets.
    pub creates: Option<Creates>,
    /// Path of the target that gets the server's time with each change by this rule. It is not owned.
    pub touch: Option<FieldPath>,
    /// Source paths that affect the written values.
    pub source_reads: Reads,
    /// Target paths that affect the written values.
    pub target_reads: Reads,
    /// Automatic or manual backfill.
    pub backfill: BackfillMode,
    /// Method of detecting drift.
    pub guard: Guard,
    /// Reaction to drift.
    pub on_drift: OnDrift,
    /// True if lookups without an index are accepted.
    pub allow_scan: bool,
    /// Lag objective of the rule.
    pub max_lag: Duration,
    /// True if the rule computes, compares and counts, but writes nothing.
    pub shadow: bool,
    /// True if the config accepts in advance that the rule removes and overwrites existing values. Not part of the
    /// definition: the written values are the same.
    pub adopt: bool,
    /// The properties above that affect the written values, as one document: rules with equal definitions write the
    /// same.
    pub definition: Document,
}

impl Rule {
    /// The same rule for every document of the target collection that refers to a source.
    #[must_use]
    pub fn without_target_filter(&self) -> Self {
        Self { target: Side { filter: None, ..self.target.clone() }, ..self.clone() }
    }

    /// The SHA-256 of the rule's name and definition, stored with its dead letters and fan-out jobs. Under another definition the same
    /// key means something else, and the backfill of the new definition covers it.
    #[must_use]
    pub fn fingerprint(&self) -> Bson {
        let mut hash = Sha256::new_with_prefix(self.name.as_bytes());
        // A definition is written to the state, so it can be written here.
        hash.update(RawDocumentBuf::try_from(&self.definition).map(RawDocumentBuf::into_bytes).unwrap_or_default());
        Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes: hash.finalize().to_vec() })
    }

    /// True if a rule with this recorded definition writes the same. Otherwise the daemon backfills the rule again.
    #[must_use]
    pub fn has_definition(&self, definition: &Document) -> bool {
        is_same_definition(&self.definition, definition)
    }

    /// True if a rule with this recorded definition reads the same collection.
    #[must_use]
    pub fn has_source(&self, definition: &Document) -> bool {
        let source = |definition: &Document| definition.get_document("source").ok()?.get("collection").cloned();
        source(&self.definition) == source(definition)
    }

    /// The place in the config of what the rule does.
    #[must_use]
    pub fn at(&self) -> ConfigPath {
        ConfigPath::rule(self.id.0).key(self.values.kind())
    }

    /// The rule's side with this role.
    #[must_use]
    pub fn side(&self, role: Role) -> &Side {
        match role {
            Role::Source => &self.source,
            Role::Target => &self.target,
        }
    }

    /// The place in the config of one of its collections.
    #[must_use]
    pub fn side_at(&self, role: Role) -> ConfigPath {
        self.at().key(if role == Role::Source { "source" } else { "target" })
    }

    /// The place of a written path in the config, for a message about it.
    #[must_use]
    pub fn written_at(&self, path: &FieldPath) -> Mistake {
        self.values.written_at(&self.at(), path)
    }

    /// The values over a source, each with its place; true marks an accumulator.
    #[must_use]
    pub fn values_at(&self) -> Vec<(ConfigPath, &Bson, bool)> {
        let at = self.at();
        let place = |assignment: &Assignment| at.key("set").key(&assignment.path.to_string());
        match &self.values {
            Values::Set { assignments, .. } => {
                assignments.iter().map(|one| (place(one), &one.expression, false)).collect()
            }
            Values::Aggregate { assignments, .. } => self.accumulators(assignments),
            Values::Groups(groups) => {
                let by = groups.by.iter().map(|(name, value)| (at.key("by").key(name), value, false));
                by.chain(self.accumulators(&groups.fields)).collect()
            }
            Values::Into { element, .. } | Values::Collect { element, .. } => {
                vec![(at.key("element"), element, false)]
            }
        }
    }

    fn accumulators<'a>(&self, assignments: &'a [Assignment]) -> Vec<(ConfigPath, &'a Bson, bool)> {
        let (at, mut out) = (self.at(), Vec::new());
        for one in assignments {
            match one.variables() {
                None => out.push((at.key("set").key(&one.path.to_string()), &one.expression, true)),
                Some((variables, _)) => {
                    let place = |name: &String| at.key("let").key(name);
                    out.extend(variables.iter().map(|(name, accumulator)| (place(name), accumulator, true)));
                }
            }
        }
        out
    }

    /// The target's paths that the rule writes.
    #[must_use]
    pub fn owned(&self) -> Vec<&FieldPath> {
        self.values.paths()
    }

    /// True if a value is computed from all the sources of a key.
    #[must_use]
    pub fn gathers(&self) -> bool {
        self.values.gathers()
    }

    /// True if the rule deletes documents or elements that have no source.
    #[must_use]
    pub fn may_delete(&self) -> bool {
        matches!(self.on_missing, OnMissing::Remove | OnMissing::Delete)
            || self.creates.as_ref().is_some_and(|creates| !creates.keeps)
    }

    /// True if a target has a value for each of its references, computed from the target as well.
    #[must_use]
    pub fn by_reference(&self) -> bool {
        let inside = || self.owned().iter().any(|path| path.has_each());
        self.of_target.is_some() && (matches!(self.values, Values::Into { .. }) || inside())
    }

    /// True if the rule writes into elements that have values of their own, computed from the target as well.
    #[must_use]
    pub fn by_element(&self) -> bool {
        self.by_reference() && !matches!(self.values, Values::Into { .. })
    }

    /// True if the rule writes into the matched element and beside its array.
    #[must_use]
    pub fn is_inside_and_beside(&self) -> bool {
        let inside = |path: &&FieldPath| path.has_each();
        self.owned().iter().any(inside) && !self.owned().iter().all(inside)
    }

    /// True if a target is compared before it is written, and only what differs is written.
    #[must_use]
    pub fn compares_first(&self) -> bool {
        self.touch.is_some() || self.is_inside_and_beside()
    }

    /// True if a write names elements by their indexes, and demands that each element still has its reference.
    #[must_use]
    pub fn writes_by_index(&self) -> bool {
        let inside = || self.owned().iter().any(|path| path.has_each());
        self.by_reference() || (self.compares_first() && inside())
    }

    /// Path in the target of the `_id`s of its sources, which identifies the parent that a child has left.
    #[must_use]
    pub fn child(&self) -> Option<&FieldPath> {
        match &self.values {
            Values::Collect { child, .. } => child.as_ref(),
            Values::Set { .. } | Values::Into { .. } | Values::Aggregate { .. } | Values::Groups(_) => None,
        }
    }

    /// True if a source's key can change without the old key being in the event.
    #[must_use]
    pub fn needs_pre_images(&self) -> bool {
        !self.reference.keyed_by_source_id() && self.child().is_none()
    }
}
