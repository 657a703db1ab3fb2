//! Advice on the fields to copy: rule of thumb 5.

use serde_json::{Map, Value, json};

use crate::{
    advice::{Advice, Kind, count, counted, figure},
    draft::{self, Draft},
    facts::{Candidate, Form, Place, Rate, Relationship},
};
use denormd_model::{distribution::ratio, field_path::FieldPath, text::duration};
use denormd_rules::config::Advise;

/// Maximum number of fields that a draft copies. Names and titles come first.
const FEW: usize = 5;

/// Minimum number of reads to judge by: a person or a monitor may cause fewer.
const LEAST: u64 = 100;
/// Minimum number of seconds of the oplog to derive an update rate from.
const SHORT: f64 = 10.0;

/// The conclusion from the reads and updates of a field.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verdict {
    /// Copy: the reads per copied write, infinite for a field that is not updated.
    Copy(f64),
    /// Do not copy: the reads per copied write.
    DoNot(f64),
    /// Undecided, between the two thresholds: the reads per copied write.
    Between(f64),
    /// Not updated; no reads were observed.
    Quiet,
    /// Too little is known.
    Unknown,
}

/// Compares the ratio of reads to copied writes with the thresholds.
#[must_use]
pub fn verdict(reads: Option<Rate>, updates: Option<Rate>, fan_out: f64, thresholds: &Advise) -> Verdict {
    let seen = reads.filter(|reads| reads.times >= LEAST);
    let Some(updates) = updates else { return Verdict::Unknown };
    if updates.seconds < SHORT {
        return if updates.times == 0 { Verdict::Quiet } else { Verdict::Unknown };
    }
    let writes = updates.per_day() * fan_out;
    match seen {
        Some(_) if updates.times == 0 => Verdict::Copy(f64::INFINITY),
        None if updates.times == 0 => Verdict::Quiet,
        None => Verdict::Unknown,
        // No document refers to it, so nothing would be written.
        Some(_) if writes <= 0.0 => Verdict::Copy(f64::INFINITY),
        Some(reads) => {
            let ratio_found = reads.per_day() / writes;
            if ratio_found >= ratio(thresholds.copy_ratio, 1) {
                Verdict::Copy(ratio_found)
            } else if ratio_found <= ratio(thresholds.no_copy_ratio, 1) {
                Verdict::DoNot(ratio_found)
            } else {
                Verdict::Between(ratio_found)
            }
        }
    }
}

/// Describes the numbers behind a verdict.
#[must_use]
pub fn figures(reads: Option<Rate>, updates: Option<Rate>, reader: &str, what: &str, fan_out: Option<f64>) -> String {
    let reads = match reads {
        Some(reads) => format!("{} of `{reader}` in {}", counted(reads.times, "read"), duration(reads.seconds)),
        None => format!("reads of `{reader}` are not known"),
    };
    let updates = match updates {
        Some(updates) => {
            let times = match updates.times {
                0 => "none".to_owned(),
                times => count(times),
            };
            format!("{what}: {times} in {}", duration(updates.seconds))
        }
        None => format!("{what}: not known"),
    };
    let times =
        fan_out.map(|fan_out| format!(", each {} copied writes on average", figure(fan_out))).unwrap_or_default();
    format!("{reads}; {updates}{times}")
}

/// Gives the advice on the fields to copy from the referenced into the referring documents, and on those not to copy.
#[must_use]
pub fn decide(facts: &Relationship, thresholds: &Advise, default: Option<&str>) -> Vec<Advice> {
    let reader = &facts.holder.namespace.collection;
    let (mut good, mut quiet, mut advice) = (Vec::new(), Vec::new(), Vec::new());
    let (mut bad, mut between, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
    for field in &facts.fields {
        match verdict(facts.holder.reads, field.updates, facts.fan_out.mean, thresholds) {
            Verdict::Copy(found) => good.push((field, found)),
            Verdict::Quiet => quiet.push(field),
            Verdict::DoNot(found) => bad.push((field, found)),
            Verdict::Between(found) => between.push((field, found)),
            Verdict::Unknown if field.updates.is_none() => quiet.push(field),
            Verdict::Unknown => unknown.push(field),
        }
    }
    if !good.is_empty() {
        let said: Vec<String> = good.iter().map(|(field, found)| rated(field, *found)).collect();
        let fields: Vec<&Candidate> = good.iter().map(|(field, _)| *field).collect();
        let says = format!("copy {} into `{reader}`: {}", said.join(", "), behind(facts, &fields));
        advice.push(Advice::new(Kind::Copy, 5, says).draft(draft_of(facts, &fields, default)));
    } else if !quiet.is_empty() {
        let says = format!(
            "{} may be copied into `{reader}`: {}; look again while the application reads",
            named(&quiet),
            behind(facts, &quiet)
        );
        advice.push(Advice::new(Kind::Measure, 5, says).draft(draft_of(facts, &quiet, default)));
    }
    for (kind, list, verb) in
        [(Kind::DoNotCopy, &bad, "do not copy"), (Kind::Measure, &between, "measure before you copy")]
    {
        for (field, found) in list {
            let numbers = behind(facts, &[*field]);
            advice.push(Advice::new(kind, 5, format!("{verb} {} into `{reader}`: {numbers}", rated(field, *found))));
        }
    }
    for field in unknown {
        let says = format!("measure before you copy `{}` into `{reader}`: {}", field.path, behind(facts, &[field]));
        advice.push(Advice::new(Kind::Measure, 5, says));
    }
    advice.extend(stale(facts));
    advice
}

fn rated(field: &Candidate, found: f64) -> String {
    if found.is_finite() {
        format!("`{}` (ratio {})", field.path, figure(found))
    } else {
        format!("`{}` (no update seen)", field.path)
    }
}

fn named(fields: &[&Candidate]) -> String {
    fields.iter().map(|field| format!("`{}`", field.path)).collect::<Vec<_>>().join(", ")
}

/// Describes the reads, and the updates of the most frequently updated of these fields.
fn behind(facts: &Relationship, fields: &[&Candidate]) -> String {
    let most =
        fields.iter().filter_map(|field| Some((field.updates?, &field.path))).max_by_key(|(updates, _)| updates.times);
    let (updates, what) = match most {
        Some((updates, path)) if updates.times > 0 => (Some(updates), format!("updates of `{path}`")),
        Some((updates, _)) => (Some(updates), "updates".to_owned()),
        None => (None, "updates".to_owned()),
    };
    let reader = &facts.holder.namespace.collection;
    figures(facts.holder.reads, updates, reader, &what, Some(facts.fan_out.mean))
}

/// Reports copies that the application maintains itself and that are out of date.
fn stale(facts: &Relationship) -> Option<Advice> {
    let stale: Vec<String> = facts
        .fields
        .iter()
        .filter_map(|field| match field.held {
            Place::Copy { compared, stale } if stale > 0 => {
                Some(format!("{} (of `{}`): {} of {}", field.place, field.path, count(stale), count(compared)))
            }
            _ => None,
        })
        .collect();
    let collection = &facts.holder.namespace.collection;
    let mut says =
        format!("copies in `{collection}` that differ from their source, of those compared: {}", stale.join(", "));
    let records: Vec<String> =
        facts.fields.iter().filter(|field| is_record(field)).map(|field| format!("`{}`", field.place)).collect();
    if !records.is_empty() {
        says += &format!(
            ". No rule is drafted for {}: does it record the value of its time, as the price in an order does? Then leave it, or fill it with `once: true`",
            records.join(", ")
        );
    }
    (!stale.is_empty()).then(|| Advice::new(Kind::StaleCopies, 5, says))
}

/// A rule that copies these fields, except those whose place holds another value.
fn draft_of(facts: &Relationship, fields: &[&Candidate], default: Option<&str>) -> Option<Draft> {
    let free = fields.iter().filter(|field| field.held != Place::Taken && !is_record(field));
    let mut chosen: Vec<&&Candidate> = free.collect();
    chosen.sort_by_key(|field| (matches!(field.held, Place::Free), !telling(&field.path)));
    chosen.truncate(FEW);
    if chosen.is_empty() {
        return None;
    }
    let (holder, held) = (&facts.link.holder, &facts.link.held);
    let source = draft::collection(&held.namespace, default);
    let target = draft::collection(&holder.namespace, default);
    let name = format!("{}-in-{}-by-{}", held.namespace.collection, holder.namespace.collection, holder.path.query());
    let draft = Draft::new(&name, "copy", source, target)
        .with("match", json!({holder.path.to_string(): held.path.to_string()}));
    let draft = match facts.fan_out.types.iter().map(|of| (of.converted, of.resolved, of.name)).max() {
        Some((converted, resolved, "string")) if converted > resolved => draft.with("key_type", json!("objectId")),
        Some((converted, resolved, _)) if converted > resolved => draft.with("key_type", json!("string")),
        _ => draft,
    };
    if facts.form == Form::Ids {
        // An array of ids has no room for copies, so a second array holds them.
        let array = holder.path.array_prefix().map(|path| path.query()).unwrap_or_default();
        let mut element = Map::from_iter([("id".to_owned(), json!(format!("${}", held.path)))]);
        element.extend(chosen.iter().map(|field| (field.path.root().to_owned(), json!(format!("${}", field.path)))));
        return Some(draft.with("into", json!(format!("{array}_info"))).with("element", Value::Object(element)));
    }
    let set: Map<String, Value> =
        chosen.iter().map(|field| (field.place.to_string(), json!(format!("${}", field.path)))).collect();
    let mut draft = draft.with("set", Value::Object(set));
    if chosen.iter().any(|field| matches!(field.held, Place::Copy { .. })) {
        draft.comment.push_str("takes over copies that are there already");
    }
    Some(draft)
}

/// True if an existing copy may be meant to differ from its source: a price in an order stays as it was.
fn is_record(field: &Candidate) -> bool {
    let name = field.path.to_string().to_lowercase();
    let words = ["price", "cost", "amount", "fee", "tax", "rate", "discount", "total", "salary", "charge"];
    matches!(field.held, Place::Copy { stale, .. } if stale > 0) && words.iter().any(|word| name.contains(word))
}

/// True if the field's name suggests that people identify the document by it.
fn telling(path: &FieldPath) -> bool {
    let name = path.root().to_lowercase();
    ["name", "title", "label", "caption", "subject"].iter().any(|word| name.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(times: u64) -> Rate {
        Rate { times, seconds: 60.0 }
    }

    #[test]
    fn reads_over_copied_writes() {
        let thresholds = Advise::default();
        for (reads, updates, fan_out, expected) in [
            (Some(rate(1000)), Some(rate(0)), 3.0, Verdict::Copy(f64::INFINITY)),
            (Some(rate(300)), Some(rate(10)), 3.0, Verdict::Copy(10.0)),
            (Some(rate(299)), Some(rate(10)), 3.0, Verdict::Between(299.0 / 30.0)),
            (Some(rate(120)), Some(rate(40)), 3.0, Verdict::DoNot(1.0)),
            (Some(rate(99)), Some(rate(40)), 3.0, Verdict::Unknown),
            (Some(rate(0)), Some(rate(10)), 3.0, Verdict::Unknown),
            (None, Some(rate(10)), 3.0, Verdict::Unknown),
            (None, Some(rate(0)), 3.0, Verdict::Quiet),
            (Some(rate(100)), None, 3.0, Verdict::Unknown),
            (Some(rate(100)), Some(rate(1)), 0.0, Verdict::Copy(f64::INFINITY)),
            (Some(rate(100)), Some(Rate { times: 0, seconds: 5.0 }), 3.0, Verdict::Quiet),
        ] {
            let found = verdict(reads, updates, fan_out, &thresholds);
            let same = match (found, expected) {
                (Verdict::Copy(a), Verdict::Copy(b))
                | (Verdict::DoNot(a), Verdict::DoNot(b))
                | (Verdict::Between(a), Verdict::Between(b)) => a.total_cmp(&b).is_eq() || (a - b).abs() < 1e-9,
                (a, b) => a == b,
            };
            assert!(same, "{reads:?} {updates:?}: {found:?}");
        }
    }

    #[test]
    fn times_of_different_length_are_compared_by_the_day() {
        let updates = Some(Rate { times: 60, seconds: 3600.0 });
        // Six hundred reads and one update per minute.
        assert!(
            matches!(verdict(Some(rate(600)), updates, 1.0, &Advise::default()), Verdict::Copy(found) if (found - 600.0).abs() < 1e-9)
        );
    }

    /// `advise` once drafted a rule that replaced the prices in old orders.
    #[test]
    fn a_price_that_differs_is_a_record_and_a_name_is_stale() {
        let candidate = |path: &str, stale: u64| Candidate {
            path: FieldPath::parse(path).unwrap(),
            updates: None,
            place: FieldPath::parse("lines.$[].x").unwrap(),
            held: Place::Copy { compared: 100, stale },
        };
        for (path, stale, expected) in
            [("price", 20, true), ("unitPrice.amount", 1, true), ("price", 0, false), ("name", 20, false)]
        {
            assert_eq!(is_record(&candidate(path, stale)), expected, "{path} {stale}");
        }
    }
}
