//! The report as text and as JSON. Pure.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{
    advice::{Advice, RULES_OF_THUMB, bytes, count, counted, distribution, figure},
    draft::collection as name,
    facts::{Form, Relationship},
    inventory::Collection,
    report::Report,
    updates::{self, moment},
};
use denormd_model::{
    distribution::{How, Unknown},
    text::duration,
};

/// Columns of text.
const WIDTH: usize = 118;

/// For people.
#[must_use]
pub fn text(report: &Report) -> String {
    let mut out = String::new();
    head(&mut out, report);
    for (facts, advice) in &report.relationships {
        relationship(&mut out, facts, advice, report.default.as_deref());
    }
    for (namespace, advice) in report.collections.iter().filter(|(_, advice)| !advice.is_empty()) {
        writeln!(out, "\n{}", name(namespace, report.default.as_deref())).ok();
        sentences(&mut out, advice);
    }
    if !report.cluster.is_empty() {
        out.push_str("\nall collections\n");
        sentences(&mut out, &report.cluster);
    }
    tail(&mut out, report);
    out
}

fn head(out: &mut String, report: &Report) {
    let collections = &report.inspection.collections;
    let documents: u64 = collections.iter().map(|collection| collection.count).sum();
    let size: u64 = collections.iter().map(|collection| collection.bytes).sum();
    let number = counted(collections.len() as u64, "collection");
    writeln!(out, "{number}, {}, {}", counted(documents, "document"), bytes(size)).ok();
    wrapped(out, "", &changes(report));
    wrapped(out, "", &reads(report));
    let busy: u64 = report.reads.collections.values().map(|used| used.micros).sum();
    for collection in collections {
        wrapped(out, "  ", &of_collection(report, collection, busy));
    }
}

/// The extent of the changes that were read.
fn changes(report: &Report) -> String {
    let history = match &report.history {
        Ok(history) => history,
        Err(Unknown(why)) => return format!("changes: not known: {why}"),
    };
    let part = if history.is_complete() {
        "all of it"
    } else {
        "not to its end: advise.history_events, advise.history_seconds"
    };
    format!(
        "changes: the oplog from {} to {} ({}), {}; {part}",
        moment(history.from),
        moment(history.to),
        duration(history.seconds().into()),
        counted(history.events, "change")
    )
}

/// The extent of the reads that were counted.
fn reads(report: &Report) -> String {
    let reads: u64 = report.reads.collections.values().map(|used| used.reads).sum();
    let cache = report.reads.cache.map(|cache| format!("; the cache has {}", bytes(cache.size))).unwrap_or_default();
    let log = if report.reads.log_read {
        format!("; {} in the log", counted(report.reads.slow.len() as u64, "slow read"))
    } else {
        String::new()
    };
    format!("reads: {} {}{log}{cache}", count(reads), report.reads.basis())
}

/// The line of a collection; `busy` is the time spent in all collections, in microseconds.
fn of_collection(report: &Report, collection: &Collection, busy: u64) -> String {
    let used = report.reads.of(&collection.namespace);
    let share = used.map(|used| denormd_model::distribution::ratio(used.micros * 100, busy)).filter(|_| busy > 0);
    let share = share.map(|share| format!(", {}% of the time spent in all", figure(share.round()))).unwrap_or_default();
    let used = used
        .map(|used| format!(", {}, {}", counted(used.reads, "read"), counted(used.writes, "write")))
        .unwrap_or_default();
    format!(
        "{}: {}, {}, {}{used}{share}",
        name(&collection.namespace, report.default.as_deref()),
        counted(collection.count, "document"),
        collection.size.map_or_else(String::new, |size| format!(
            "{} each",
            bytes(denormd_model::distribution::whole(size.mean()))
        )),
        if collection.indexes.len() == 1 {
            "1 index".to_owned()
        } else {
            format!("{} indexes", collection.indexes.len())
        }
    )
}

fn relationship(out: &mut String, facts: &Relationship, advice: &[Advice], default: Option<&str>) {
    let (holder, held) = (&facts.link.holder, &facts.link.held);
    let words = facts.link.found.words();
    writeln!(
        out,
        "\n{}.{} -> {}.{}   ({words})",
        name(&holder.namespace, default),
        holder.path,
        name(&held.namespace, default),
        held.path
    )
    .ok();
    wrapped(out, "  ", &figures(facts));
    sentences(out, advice);
}

fn figures(facts: &Relationship) -> String {
    let (holder, held) = (&facts.holder.namespace.collection, &facts.held.namespace.collection);
    let fan_out = &facts.fan_out;
    let mut parts = Vec::new();
    if let (Some(lengths), true) = (&facts.lengths, facts.form != Form::One) {
        parts.push(format!("in one of `{holder}`: {}", distribution(lengths)));
    }
    parts.push(match &fan_out.distribution {
        Ok(found) => format!("to one of `{held}`: {}, mean {}", distribution(found), figure(fan_out.mean)),
        Err(Unknown(why)) => format!("to one of `{held}`: not known: {why}; mean {}", figure(fan_out.mean)),
    });
    let resolved: u64 = fan_out.types.iter().map(|of| of.resolved).sum();
    let seen: u64 = fan_out.types.iter().map(|of| of.references).sum();
    let sampled = if fan_out.how == How::Exact { "" } else { " sampled" };
    parts.push(match seen - resolved {
        0 => format!("all {}{sampled} resolve", counted(seen, "reference")),
        _ => format!("{} of {}{sampled} resolve", count(resolved), counted(seen, "reference")),
    });
    if let Some(alone) = fan_out.alone.filter(|alone| *alone > 0) {
        parts.push(format!("nothing refers to {} of `{held}`", count(alone)));
    }
    if let Some(rate) = facts.holder.made_per_day {
        parts.push(format!("`{holder}` grows by {} a day", figure(rate)));
    }
    parts.join("; ")
}

fn sentences(out: &mut String, advice: &[Advice]) {
    for advice in advice {
        let rule = advice.rule.map(|rule| format!(" [rule {rule}]")).unwrap_or_default();
        // A sentence that begins with its kind has it once.
        let kind = advice.kind.name();
        let says = match advice.says.strip_prefix(kind) {
            Some(rest) => format!("{}{rest}", kind.to_uppercase()),
            None => format!("{}: {}", kind.to_uppercase(), advice.says),
        };
        let text = format!("{says}{rule}");
        item(out, &text);
        if let Some(command) = &advice.command {
            indented(out, command);
        }
        if let Some(draft) = &advice.draft {
            if let Some(warning) = draft.warning() {
                indented(out, &format!("# {warning}\n"));
            }
            indented(out, &draft.yaml());
        }
    }
}

fn tail(out: &mut String, report: &Report) {
    let unknown: Vec<&String> = report.notes.iter().chain(&report.reads.unknown).collect();
    if !unknown.is_empty() {
        out.push_str("\nnot known\n");
        for text in unknown {
            item(out, text);
        }
    }
    let used: std::collections::BTreeSet<u8> = report
        .relationships
        .iter()
        .flat_map(|(_, advice)| advice)
        .chain(report.collections.iter().flat_map(|(_, advice)| advice))
        .chain(&report.cluster)
        .filter_map(|advice| advice.rule)
        .collect();
    out.push_str("\nthe rules of thumb (MongoDB, \"6 Rules of Thumb for MongoDB Schema Design\")\n");
    for rule in used {
        if let Some(text) = RULES_OF_THUMB.get(usize::from(rule) - 1) {
            wrapped_with(out, &format!("  {rule} "), "    ", text);
        }
    }
    out.push_str("`denormd init` writes the rules above into a file of their own.\n");
}

fn item(out: &mut String, text: &str) {
    wrapped_with(out, "  - ", "    ", text);
}

fn indented(out: &mut String, text: &str) {
    for line in text.trim_end().lines() {
        writeln!(out, "        {line}").ok();
    }
}

fn wrapped(out: &mut String, indent: &str, text: &str) {
    wrapped_with(out, indent, &format!("{indent}  "), text);
}

fn wrapped_with(out: &mut String, first: &str, rest: &str, text: &str) {
    let mut line = first.to_owned();
    let mut empty = true;
    for word in text.split(' ') {
        if !empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            writeln!(out, "{line}").ok();
            rest.clone_into(&mut line);
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    writeln!(out, "{line}").ok();
}

/// For programs.
#[must_use]
pub fn json(report: &Report) -> Value {
    let advice = |advice: &[Advice]| advice.iter().map(Advice::json).collect::<Vec<_>>();
    let relationships = report.relationships.iter().map(|(facts, said)| {
        let types = facts.fan_out.types.iter().map(|of| {
            json!({"type": of.name, "references": of.references, "resolved": of.resolved, "converted": of.converted})
        });
        json!({
            "holder": {"collection": facts.link.holder.namespace.to_string(), "path": facts.link.holder.path.to_string()},
            "held": {"collection": facts.link.held.namespace.to_string(), "path": facts.link.held.path.to_string()},
            "found": facts.link.found.words(),
            "references": facts.fan_out.references,
            "mean": facts.fan_out.mean,
            "fan_out": facts.fan_out.distribution.as_ref().ok().map(denormd_model::distribution::Distribution::json),
            "lengths": facts.lengths.map(|lengths| lengths.json()),
            "types": types.collect::<Vec<_>>(),
            "duplicate_keys": facts.duplicates.as_ref().ok(),
            "advice": advice(said),
        })
    });
    let collections = report.inspection.collections.iter().map(|collection| {
        let used = report.reads.of(&collection.namespace);
        let said = report.collections.iter().find(|(namespace, _)| *namespace == collection.namespace);
        json!({
            "collection": collection.namespace.to_string(),
            "documents": collection.count,
            "bytes": collection.bytes,
            "size": collection.size.map(|size| size.json()),
            "indexes": collection.indexes.len(),
            "capped": collection.capped,
            "reads": used.map(|used| used.reads),
            "writes": used.map(|used| used.writes),
            "busy_seconds": used.map(|used| denormd_model::distribution::ratio(used.micros, 1_000_000)),
            "advice": said.map(|(_, said)| advice(said)),
        })
    });
    json!({
        "collections": collections.collect::<Vec<_>>(),
        "relationships": relationships.collect::<Vec<_>>(),
        "advice": advice(&report.cluster),
        "changes": report.history.as_ref().map_or_else(|Unknown(why)| json!({"not_known": why}), updates::json),
        "observed_seconds": report.reads.seconds,
        "not_known": report.notes.iter().chain(&report.reads.unknown).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_sentences_are_wrapped() {
        let mut out = String::new();
        wrapped(&mut out, "  ", &"word ".repeat(50));
        assert!(out.lines().all(|line| line.chars().count() <= WIDTH), "{out}");
        assert!(out.lines().skip(1).all(|line| line.starts_with("    ")), "{out}");
    }
}
