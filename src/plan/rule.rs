//! A compiled rule and the plan that holds them.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use bson::{Bson, Document};

use crate::{
    change::Namespace,
    config::{BackfillMode, Guard, OnDrift, OnEmpty, OnMissing},
    field_path::FieldPath,
    plan::{expression::Reads, reference::Reference},
};

/// A rule's place in its plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(pub usize);

/// Everything that the rules of one config mean.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The deployment's name.
    pub name: String,
    /// The rules, in the config's order.
    pub rules: Vec<Arc<Rule>>,
    /// Rules in an order in which none comes before one that it reads from.
    pub order: Vec<RuleId>,
    /// For each rule, those that read what it writes.
    pub feeds: Vec<Vec<RuleId>>,
}

impl Plan {
    /// The rule with this id.
    #[must_use]
    pub fn rule(&self, id: RuleId) -> &Arc<Rule> {
        &self.rules[id.0]
    }

    /// One rule alone, for what the cluster must offer it. Its id is still that of the whole plan.
    #[must_use]
    pub fn only(&self, id: RuleId) -> Self {
        Self { name: self.name.clone(), rules: vec![self.rule(id).clone()], order: Vec::new(), feeds: Vec::new() }
    }

    /// How many rules the longest chain has: a change needs that many steps to reach its end.
    #[must_use]
    pub fn longest_chain(&self) -> usize {
        let mut length = vec![1; self.rules.len()];
        for rule in self.order.iter().rev() {
            let beyond = self.feeds[rule.0].iter().map(|fed| length[fed.0]).max();
            length[rule.0] = 1 + beyond.unwrap_or_default();
        }
        length.into_iter().max().unwrap_or_default()
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

/// One side of a rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    /// The collection.
    pub namespace: Namespace,
    /// What a document must match to take part.
    pub filter: Option<Document>,
}

/// What one reconcile of a rule is keyed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keyed {
    /// By the value that source and targets share: all that is written follows from the sources with that value.
    Value,
    /// By the target's `_id`: what is written follows from several references of one target.
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

/// What is computed from the sources of a key.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// Fields of one source.
    Set {
        /// The fields.
        assignments: Vec<Assignment>,
        /// Fill what has no value yet, and never change it again.
        once: bool,
    },
    /// An array with one element for each reference of the target, in their order.
    Into {
        /// The array.
        path: FieldPath,
        /// The expression of one element.
        element: Bson,
    },
    /// An array with one element for each source.
    Collect {
        /// The array.
        path: FieldPath,
        /// The expression of one element.
        element: Bson,
        /// Where in the target the sources' `_id`s are, if the element holds them.
        child: Option<FieldPath>,
        /// As in `$push`.
        slice: Option<i64>,
        /// What no source gives.
        on_empty: OnEmpty,
        /// The most elements.
        max_elements: Option<u64>,
        /// The most bytes.
        max_bytes: Option<u64>,
    },
    /// Accumulated values of all sources.
    Aggregate {
        /// The fields; their expressions are `{ $accumulator: expression }`.
        assignments: Vec<Assignment>,
        /// What no source gives.
        on_empty: OnEmpty,
    },
}

/// A rule as the daemon runs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// Its place in the plan.
    pub id: RuleId,
    /// Its name.
    pub name: String,
    /// Where values come from.
    pub source: Side,
    /// Where they go.
    pub target: Side,
    /// How a target and its sources find each other.
    pub reference: Reference,
    /// What a reconcile is keyed by.
    pub keyed: Keyed,
    /// What is computed.
    pub values: Values,
    /// Source paths and directions; `_id` ascending decides ties.
    pub sort: Vec<(String, i32)>,
    /// What a reference does that no source answers.
    pub on_missing: OnMissing,
    /// Source paths whose change can change what is written.
    pub source_reads: Reads,
    /// Target paths whose change can change what is written.
    pub target_reads: Reads,
    /// Whether it backfills itself.
    pub backfill: BackfillMode,
    /// How drift is noticed.
    pub guard: Guard,
    /// What is done about drift.
    pub on_drift: OnDrift,
    /// Whether lookups without an index are accepted.
    pub allow_scan: bool,
    /// The lag that it should not have for long.
    pub max_lag: Duration,
    /// Whether it computes, compares and counts, and writes nothing.
    pub shadow: bool,
    /// Whether a person has agreed beforehand that it removes and overwrites values that are already there. Not a part of the
    /// definition: what is written is the same.
    pub adopt: bool,
    /// All of the above that decides what is written, as one document: two rules with the same one write the same.
    pub definition: Document,
}

impl Rule {
    /// The target's paths that the rule writes.
    #[must_use]
    pub fn owned(&self) -> Vec<&FieldPath> {
        match &self.values {
            Values::Set { assignments, .. } | Values::Aggregate { assignments, .. } => {
                assignments.iter().map(|a| &a.path).collect()
            }
            Values::Into { path, .. } | Values::Collect { path, .. } => vec![path],
        }
    }

    /// Whether a value is computed from all the sources of a key.
    #[must_use]
    pub fn gathers(&self) -> bool {
        match self.values {
            Values::Collect { .. } | Values::Aggregate { .. } => true,
            Values::Set { .. } | Values::Into { .. } => false,
        }
    }

    /// Where in the target the `_id`s of the sources that went into it are: what tells the parent that a child has left.
    #[must_use]
    pub fn child(&self) -> Option<&FieldPath> {
        match &self.values {
            Values::Collect { child, .. } => child.as_ref(),
            Values::Set { .. } | Values::Into { .. } | Values::Aggregate { .. } => None,
        }
    }

    /// Whether a source's key can change without the event saying what it was.
    #[must_use]
    pub fn needs_pre_images(&self) -> bool {
        !self.reference.keyed_by_source_id() && self.child().is_none()
    }
}
