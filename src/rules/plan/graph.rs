//! Dependencies between rules: conflicting ownership, cycles, and the order of backfills.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bson::{Bson, Document, doc};

use crate::{
    config::{ConfigPath, Mistake},
    plan::{
        reference::Role,
        rule::{Rule, RuleId, Side, Values},
        touch,
    },
};
use denormd_model::{field_path::FieldPath, key::Key};

/// The rules, each after all rules that feed it; for each rule the rules that it feeds; and [`Plan::cascades`](super::Plan::cascades).
pub type Order = (Vec<RuleId>, Vec<Vec<RuleId>>, bool);

/// Checks the rules against each other and orders them.
///
/// A rule feeds another one if it writes a path that the other reads. That is no circle as long as their filters exclude each
/// other: then no document is both. Rules whose filters are needed for that demand in addition that the deciding path is no
/// array, which could fulfil both. Outside of circles this is not demanded: a filter such as `{ tags: news }` may match arrays.
pub fn order(rules: &mut [Arc<Rule>]) -> Result<Order, Vec<Mistake>> {
    let mut exclusive = Vec::new();
    let mut mistakes = collisions(rules, &mut exclusive);
    mistakes.extend(touch::conflicts(rules));
    let mut feeds = feeding(rules, |_, _| true);
    let mut walk = Walk::through(&feeds);
    if walk.cycle.is_some() {
        let (mut excluded, all) = (Vec::new(), feeds);
        feeds = feeding(rules, |from, to| {
            if !reaches(&all, to, from) {
                return true;
            }
            let exclusions = exclusions(rules, from, to);
            let remains = exclusions.is_none();
            excluded.extend(exclusions.into_iter().flatten());
            remains
        });
        walk = Walk::through(&feeds);
        exclusive.extend(excluded);
    }
    if let Some(cycle) = &walk.cycle {
        mistakes.push(cycle_mistake(rules, cycle));
    }
    if !mistakes.is_empty() {
        return Err(mistakes);
    }
    for (nth, exclusion) in exclusive.iter().enumerate() {
        if !exclusive[..nth].contains(exclusion) {
            Arc::make_mut(&mut rules[exclusion.rule]).demand_no_array(exclusion.role, &exclusion.path);
        }
    }
    let cascades = add_removals(rules, &mut feeds);
    let walk = Walk::through(&feeds);
    let ids = |indexes: Vec<usize>| indexes.into_iter().map(|index| rules[index].id).collect::<Vec<_>>();
    let done = ids(walk.done.into_iter().rev().collect());
    Ok((done, feeds.into_iter().map(ids).collect(), cascades))
}

/// For each rule the rules that it feeds, of those that `counts` accepts.
fn feeding(rules: &[Arc<Rule>], mut counts: impl FnMut(usize, usize) -> bool) -> Vec<Vec<usize>> {
    let all = 0..rules.len();
    let fed = all.clone().map(|from| {
        // A recursive rule goes from level to level of its tree.
        let reads =
            |to: &usize| (from != *to || rules[from].tree.is_none()) && fed_path(&rules[from], &rules[*to]).is_some();
        all.clone().filter(reads).filter(|to| counts(from, *to)).collect()
    });
    fed.collect()
}

/// Makes each rule that removes documents or array elements feed the rules that read them. Filters that exclude each other are not
/// considered: an edge too many costs a wait one more step. Returns true if it has left out an edge that would close a circle: such
/// removals cause each other, and end when nothing is left to remove.
fn add_removals(rules: &[Arc<Rule>], feeds: &mut [Vec<usize>]) -> bool {
    let mut cascades = false;
    for (from, rule) in rules.iter().enumerate().filter(|(_, rule)| rule.may_delete()) {
        for (to, _) in rules.iter().enumerate().filter(|(_, reader)| reads_removed(rule, reader)) {
            if reaches(feeds, to, from) {
                cascades |= rule.tree.is_none();
            } else if !feeds[from].contains(&to) {
                feeds[from].push(to);
            }
        }
    }
    cascades
}

/// True if `to` reads the collection in which `from` deletes documents, or the array from which `from` removes elements.
fn reads_removed(from: &Rule, to: &Rule) -> bool {
    match &from.reference.target_each {
        // A rule finds its own elements in any case.
        Some(array) => {
            feeds(from, to, Role::Source, array) || (from.id != to.id && feeds(from, to, Role::Target, array))
        }
        None => from.target.namespace == to.source.namespace,
    }
}

/// True if `from` is `to`, or feeds it directly or through other rules.
fn reaches(feeds: &[Vec<usize>], from: usize, to: usize) -> bool {
    let (mut seen, mut next) = (BTreeSet::from([from]), vec![from]);
    while let Some(rule) = next.pop() {
        if rule == to {
            return true;
        }
        next.extend(feeds[rule].iter().copied().filter(|fed| seen.insert(*fed)));
    }
    false
}

/// The path through which `from` feeds `to`: owned by the first and read by the second.
fn fed_path<'a>(from: &'a Rule, to: &Rule) -> Option<&'a FieldPath> {
    written(from, to)
        .into_iter()
        .find(|owned| [Role::Source, Role::Target].into_iter().any(|role| feeds(from, to, role, owned)))
}

/// The paths that a rule writes; that of a document's `_id` if it creates documents for a rule that does not.
fn written<'a>(from: &'a Rule, to: &Rule) -> Vec<&'a FieldPath> {
    let mut paths = from.owned();
    if from.creates.is_some() && to.creates.as_ref().is_none_or(|_| to.target.namespace != from.target.namespace) {
        paths.extend(from.reference.paths(Role::Target));
    }
    paths
}

/// True if `to` reads the path on this side, in the collection that `from` writes.
fn feeds(from: &Rule, to: &Rule, role: Role, owned: &FieldPath) -> bool {
    match role {
        Role::Source => from.target.namespace == to.source.namespace && to.source_reads.overlap(owned),
        Role::Target => from.target.namespace == to.target.namespace && to.target_reads.overlap(owned),
    }
}

/// A rule whose filter on one side needs this path to be no array.
#[derive(PartialEq)]
struct Exclusion {
    rule: usize,
    role: Role,
    path: String,
}

/// The filters that keep every document that `from` writes from being read by `to`; None if one may be both.
fn exclusions(rules: &[Arc<Rule>], from: usize, to: usize) -> Option<Vec<Exclusion>> {
    let (writer, reader) = (&rules[from], &rules[to]);
    let mut out = Vec::new();
    for role in [Role::Source, Role::Target] {
        if !written(writer, reader).into_iter().any(|owned| feeds(writer, reader, role, owned)) {
            continue;
        }
        // A rule reads and writes the same targets.
        if from == to && role == Role::Target {
            return None;
        }
        let path = exclusive_path(rules, [writer, reader], &writer.target, reader.side(role))?;
        out.push(Exclusion { rule: from, role: Role::Target, path: path.clone() });
        out.push(Exclusion { rule: to, role, path });
    }
    Some(out)
}

/// A path on which the filters of two sides of a `pair` of rules demand different values, and which no rule writes. No path in
/// an array of that collection whose elements one of the two reads or writes: there is no array on an exclusive path.
fn exclusive_path(rules: &[Arc<Rule>], pair: [&Rule; 2], one: &Side, other: &Side) -> Option<String> {
    let excluding = excluding_paths(one.filter.as_ref()?, other.filter.as_ref()?);
    let is_owned = |path: &FieldPath| {
        let here = rules.iter().filter(|rule| rule.target.namespace == one.namespace);
        here.flat_map(|rule| rule.owned()).any(|owned| owned.overlaps_loosely(path))
    };
    let paths = pair.into_iter().flat_map(|rule| {
        let is_here = |role: &Role| rule.side(*role).namespace == one.namespace;
        let keys = [Role::Source, Role::Target].into_iter().filter(is_here).flat_map(|role| rule.reference.paths(role));
        let owned = if is_here(&Role::Target) { rule.owned() } else { Vec::new() };
        keys.chain(owned)
    });
    // The outermost array, which contains the others.
    let array = |path: &FieldPath| FieldPath::parse(path.to_string().split_once(".$[]")?.0).ok();
    let arrays: Vec<FieldPath> = paths.filter_map(array).collect();
    let is_inside = |path: &FieldPath| arrays.iter().any(|array| array.overlaps_loosely(path));
    excluding.into_iter().find(|path| FieldPath::parse(path).is_ok_and(|path| !is_inside(&path) && !is_owned(&path)))
}

/// True if it is certain that no document matches both filters.
#[must_use]
pub fn exclude_each_other(one: Option<&Document>, other: Option<&Document>) -> bool {
    // An array could fulfil both.
    let no_array = |path: &String| [one, other].into_iter().flatten().any(|filter| Demands::of(filter).no_array(path));
    one.zip(other).is_some_and(|(one, other)| excluding_paths(one, other).iter().any(no_array))
}

/// The paths of which one filter demands a value that the other one does not let pass.
fn excluding_paths(one: &Document, other: &Document) -> Vec<String> {
    let (one, other) = (Demands::of(one), Demands::of(other));
    let paths = one.one_of.keys().chain(other.one_of.keys());
    paths.filter(|path| one.exclude(&other, path) || other.exclude(&one, path)).cloned().collect()
}

/// The values that a filter demands and rules out, by path.
#[derive(Default)]
struct Demands {
    /// From equalities, and `$in` lists.
    one_of: BTreeMap<String, Vec<Key>>,
    /// From `$ne`, and `$nin` lists.
    none_of: BTreeMap<String, Vec<Key>>,
    /// The paths that must not be arrays.
    no_arrays: BTreeSet<String>,
}

impl Demands {
    fn of(filter: &Document) -> Self {
        let mut out = Self::default();
        for (path, condition) in filter {
            if let ("$and", Bson::Array(clauses)) = (path.as_str(), condition) {
                for clause in clauses.iter().filter_map(Bson::as_document).map(Self::of) {
                    out.one_of.extend(clause.one_of);
                    out.none_of.extend(clause.none_of);
                    out.no_arrays.extend(clause.no_arrays);
                }
            }
            if path.starts_with('$') {
                continue;
            }
            match condition {
                Bson::Document(condition) if *condition == no_array() => out.no_arrays.extend([path.clone()]),
                Bson::Document(condition) if condition.keys().any(|name| name.starts_with('$')) => {
                    add(&mut out.one_of, path, listed(condition, "$in", "$eq"));
                    add(&mut out.none_of, path, listed(condition, "$nin", "$ne"));
                }
                value => add(&mut out.one_of, path, vec![value.clone()]),
            }
        }
        out
    }

    /// True if the path leads neither to an array nor through one.
    fn no_array(&self, path: &str) -> bool {
        outer_paths(path).all(|outer| self.no_arrays.contains(outer))
    }

    /// True if no value that this filter demands of the path is one that the other filter lets pass.
    fn exclude(&self, other: &Self, path: &str) -> bool {
        let Some(values) = self.one_of.get(path) else { return false };
        let differ = |theirs: &Vec<Key>| !values.iter().any(|value| theirs.contains(value));
        let ruled_out = |theirs: &Vec<Key>| values.iter().all(|value| theirs.contains(value));
        other.one_of.get(path).is_some_and(differ) || other.none_of.get(path).is_some_and(ruled_out)
    }
}

/// The condition that a value is no array.
pub(super) fn no_array() -> Document {
    doc! {"$not": {"$type": "array"}}
}

/// `a`, `a.b` and `a.b.c` for the path `a.b.c`.
pub(super) fn outer_paths(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('.').map(|(end, _)| end).chain([path.len()]).map(|end| &path[..end])
}

/// The values of the operator with a list, or else the value of the one without.
fn listed(condition: &Document, several: &str, single: &str) -> Vec<Bson> {
    let list = condition.get_array(several).ok().cloned();
    list.or_else(|| condition.get(single).map(|value| vec![value.clone()])).unwrap_or_default()
}

/// Adds values that can be compared. A regular expression is a pattern, and an array is equal to one that holds it.
fn add(to: &mut BTreeMap<String, Vec<Key>>, path: &str, values: Vec<Bson>) {
    let is_plain = |value: &Bson| !matches!(value, Bson::RegularExpression(_) | Bson::Array(_));
    if !values.is_empty() && values.iter().all(is_plain) {
        to.insert(path.to_owned(), values.into_iter().map(Key::one).collect());
    }
}

/// Paths with two owners. Rules whose targets exclude each other may own one path.
fn collisions(rules: &[Arc<Rule>], exclusive: &mut Vec<Exclusion>) -> Vec<Mistake> {
    let mut out = Vec::new();
    for (nth, rule) in rules.iter().enumerate() {
        let others = rules[..nth].iter().enumerate();
        for (index, other) in others.filter(|(_, other)| other.target.namespace == rule.target.namespace) {
            for path in rule.owned() {
                if let Some(theirs) = other.owned().into_iter().find(|theirs| theirs.overlaps_loosely(path)) {
                    if theirs == path
                        && let Some(path) = exclusive_path(rules, [rule, other], &rule.target, &other.target)
                    {
                        let role = Role::Target;
                        exclusive.push(Exclusion { rule: nth, role, path: path.clone() });
                        exclusive.push(Exclusion { rule: index, role, path });
                        continue;
                    }
                    let both = if theirs == path { String::new() } else { format!(" (as `{theirs}`)") };
                    let message = format!(
                        "`{path}` of `{}` is already owned by rule `{}`{both}",
                        rule.target.namespace, other.name
                    );
                    let hint = "one path has one owner: choose another field, or let `where` tell the targets apart: { kind: post }, { kind: page }";
                    let first = other.written_at(theirs).at;
                    let mistake = Mistake { message, ..rule.written_at(path) };
                    out.push(mistake.hint(hint).related(first, "its owner is here"));
                }
            }
        }
    }
    out
}

fn cycle_mistake(rules: &[Arc<Rule>], cycle: &[usize]) -> Mistake {
    let mut text = String::new();
    for (nth, index) in cycle.iter().enumerate() {
        let (from, to) = (&rules[*index], &rules[cycle[(nth + 1) % cycle.len()]]);
        let path = fed_path(from, to).map(ToString::to_string).unwrap_or_default();
        let reader = if from.id == to.id { "it" } else { to.name.as_str() };
        let collection = &from.target.namespace.collection;
        text.push_str(&format!("\n   {} writes {collection}.{path}, which {reader} reads", from.name));
    }
    let at = ConfigPath::rule(cycle.iter().copied().max().unwrap_or_default());
    if let [alone] = cycle
        && matches!(rules[*alone].values, Values::Set { .. } | Values::Aggregate { .. })
        && rules[*alone].source.namespace == rules[*alone].target.namespace
    {
        return Mistake::new(at, format!("this rule feeds itself:{text}")).hint(
            "in a tree of documents, say `recursive: true`; otherwise read a field that the rule does not write",
        );
    }
    Mistake::new(at, format!("these rules feed each other in a circle:{text}"))
        .hint("break the circle: one of them must read a field that no rule writes, or filters must tell the documents apart: { kind: template }, { kind: instance }")
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    New,
    Open,
    Done,
}

struct Walk {
    state: Vec<State>,
    stack: Vec<usize>,
    done: Vec<usize>,
    cycle: Option<Vec<usize>>,
}

impl Walk {
    fn through(feeds: &[Vec<usize>]) -> Self {
        let state = vec![State::New; feeds.len()];
        let mut walk = Self { state, stack: Vec::new(), done: Vec::new(), cycle: None };
        for index in 0..feeds.len() {
            walk.visit(feeds, index);
        }
        walk
    }

    fn visit(&mut self, feeds: &[Vec<usize>], index: usize) {
        match self.state[index] {
            State::Done => return,
            State::Open => {
                let start = self.stack.iter().position(|open| *open == index).unwrap_or_default();
                self.cycle.get_or_insert_with(|| self.stack[start..].to_vec());
                return;
            }
            State::New => {}
        }
        self.state[index] = State::Open;
        self.stack.push(index);
        for &next in &feeds[index] {
            self.visit(feeds, next);
        }
        self.stack.pop();
        self.state[index] = State::Done;
        self.done.push(index);
    }
}
