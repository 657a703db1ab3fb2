//! Dependencies between rules: conflicting ownership, cycles, and the order of backfills.

use std::sync::Arc;

use crate::{
    config::{ConfigPath, Mistake},
    field_path::FieldPath,
    plan::rule::{Rule, RuleId},
};

/// The rules, each after all rules that it reads from; and for each rule the rules that read its target fields.
pub type Order = (Vec<RuleId>, Vec<Vec<RuleId>>);

/// Checks the rules against each other and orders them.
pub fn order(rules: &[Arc<Rule>]) -> Result<Order, Vec<Mistake>> {
    let mut mistakes = collisions(rules);
    let feeds: Vec<Vec<usize>> = rules
        .iter()
        .map(|from| (0..rules.len()).filter(|to| fed_path(from, &rules[*to]).is_some()).collect())
        .collect();
    let mut walk =
        Walk { feeds: &feeds, state: vec![State::New; rules.len()], stack: Vec::new(), done: Vec::new(), cycle: None };
    for index in 0..rules.len() {
        walk.visit(index);
    }
    if let Some(cycle) = walk.cycle {
        mistakes.push(cycle_mistake(rules, &cycle));
    }
    if mistakes.is_empty() {
        let ids = |indexes: Vec<usize>| indexes.into_iter().map(|index| rules[index].id).collect::<Vec<_>>();
        let done = ids(walk.done.into_iter().rev().collect());
        Ok((done, feeds.into_iter().map(ids).collect()))
    } else {
        Err(mistakes)
    }
}

/// The path through which `from` feeds `to`: owned by the first and read by the second.
fn fed_path<'a>(from: &'a Rule, to: &Rule) -> Option<&'a FieldPath> {
    from.owned().into_iter().find(|owned| {
        (from.target.namespace == to.source.namespace && to.source_reads.overlap(owned))
            || (from.target.namespace == to.target.namespace && to.target_reads.overlap(owned))
    })
}

fn collisions(rules: &[Arc<Rule>]) -> Vec<Mistake> {
    let mut out = Vec::new();
    for (nth, rule) in rules.iter().enumerate() {
        for other in rules[..nth].iter().filter(|other| other.target.namespace == rule.target.namespace) {
            for path in rule.owned() {
                if let Some(theirs) = other.owned().into_iter().find(|theirs| theirs.overlaps_loosely(path)) {
                    let both = if theirs == path { String::new() } else { format!(" (as `{theirs}`)") };
                    let message = format!(
                        "`{path}` of `{}` is already owned by rule `{}`{both}",
                        rule.target.namespace, other.name
                    );
                    out.push(
                        Mistake::new(ConfigPath::rule(rule.id.0), message)
                            .hint("one path has one owner: choose another field"),
                    );
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
        text.push_str(&format!("{} writes {}:{path}, read by ", from.name, from.target.namespace));
    }
    let first = cycle.first().map(|index| rules[*index].name.as_str()).unwrap_or_default();
    let at = ConfigPath::rule(cycle.iter().copied().max().unwrap_or_default());
    Mistake::new(at, format!("these rules feed each other in a circle: {text}{first}"))
        .hint("break the circle: one of them must read a field that no rule writes")
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    New,
    Open,
    Done,
}

struct Walk<'a> {
    feeds: &'a [Vec<usize>],
    state: Vec<State>,
    stack: Vec<usize>,
    done: Vec<usize>,
    cycle: Option<Vec<usize>>,
}

impl Walk<'_> {
    fn visit(&mut self, index: usize) {
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
        for &next in &self.feeds[index] {
            self.visit(next);
        }
        self.stack.pop();
        self.state[index] = State::Done;
        self.done.push(index);
    }
}
