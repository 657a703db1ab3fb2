//! `touch`: the path that gets the server's time with each change, and the reasons to refuse one.

use std::sync::Arc;

use crate::{
    config::{Mistake, OnMissing},
    plan::rule::Rule,
};
use denormd_model::field_path::FieldPath;

/// The mistakes of one rule: the key that each belongs to, a message and a hint.
#[must_use]
pub fn refusals(rule: &Rule) -> Vec<(&'static str, String, &'static str)> {
    let mut out = Vec::new();
    if let Some(each) = nested(rule).filter(|_| rule.compares_first()) {
        let message =
            format!("`{each}` is an array inside another array, whose elements cannot be compared before each write");
        let (key, hint) = match &rule.touch {
            Some(_) => ("touch", "leave `touch` out"),
            None => ("set", "make two rules, one for the elements and one for the paths beside the array"),
        };
        out.push((key, message, hint));
    }
    let Some(path) = &rule.touch else { return out };
    if rule.tree.is_some() {
        let message = "the documents of a tree are written without being compared, in the order of their levels";
        out.push(("touch", message.to_owned(), "leave `touch` out"));
    }
    if rule.creates.is_some() {
        let message = "the rule inserts and deletes its documents, and `touch` sets the time of those that exist";
        out.push(("touch", message.to_owned(), "leave `touch` out"));
    }
    if path.has_each() {
        let message = format!("`{path}` lies in the elements of an array, and `touch` is one time for the target");
        out.push(("touch", message, "name a path beside the array: touch: updatedAt"));
    }
    if path.root() == "_id" {
        out.push(("touch", "`_id` cannot be written".to_owned(), "choose another field"));
    }
    let removal = match rule.on_missing {
        OnMissing::Remove => {
            Some("`remove` depends on the reference alone, and `touch` on the differences in a target")
        }
        OnMissing::Delete => Some("`delete` leaves no target whose time could be set"),
        OnMissing::Unset | OnMissing::Null | OnMissing::Keep => None,
    };
    if let Some(message) = removal {
        out.push(("on_missing", message.to_owned(), "use unset, null or keep, or leave `touch` out"));
    }
    out
}

/// The array inside another array whose elements a rule writes, if it compares them first.
#[must_use]
pub fn nested(rule: &Rule) -> Option<&FieldPath> {
    let inside = rule.owned().iter().any(|path| path.has_each());
    let each = rule.reference.target_each.as_ref().filter(|_| inside)?;
    (each.to_string().matches("$[]").count() > 1).then_some(each)
}

/// The mistakes of rules together: a time that is set with each change would never agree with an owner, and a rule that
/// reads it would have a reason for a change in each change.
#[must_use]
pub fn conflicts(rules: &[Arc<Rule>]) -> Vec<Mistake> {
    let mut out = Vec::new();
    for rule in rules {
        let Some(path) = &rule.touch else { continue };
        let at = || rule.at().key("touch");
        let here = &rule.target.namespace;
        for other in rules {
            let owns =
                other.target.namespace == *here && other.owned().iter().any(|owned| owned.overlaps_loosely(path));
            let reads = (other.source.namespace == *here && other.source_reads.overlap(path))
                || (other.target.namespace == *here && other.target_reads.overlap(path));
            let whose = if other.id == rule.id { "this rule".to_owned() } else { format!("rule `{}`", other.name) };
            if other.creates.is_some() && other.target.namespace == *here && other.id != rule.id {
                let message =
                    format!("rule `{}` deletes documents of `{here}` that hold nothing of others", other.name);
                out.push(Mistake::new(at(), message).hint("with this path they would stay: leave `touch` out"));
                continue;
            }
            let differs = other.touch.as_ref().filter(|touch| *touch != path && touch.overlaps_loosely(path));
            if let Some(touch) = differs.filter(|_| other.target.namespace == *here) {
                let message =
                    format!("`{path}` and `{touch}`, which rule `{}` sets, cannot both hold a time", other.name);
                out.push(Mistake::new(at(), message).hint("name one path in both rules, or paths side by side"));
                continue;
            }
            let (does, hint) = match (owns, reads) {
                (true, _) => ("written", "a path that `touch` sets has no owner: choose another field"),
                (false, true) => (
                    "read",
                    "no rule may read a path that changes with each write: choose another field, or name the fields that the rule reads",
                ),
                (false, false) => continue,
            };
            let message = format!("`{path}` of `{here}` is {does} by {whose}");
            out.push(Mistake::new(at(), message).hint(hint));
        }
    }
    out
}
