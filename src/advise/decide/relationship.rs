//! Advice on the form of a relationship: rules of thumb 1, 2, 3 and 6.

use serde_json::{Map, Value, json};

use crate::{
    advice::{Advice, Kind, bytes, count, counted, distribution, figure},
    decide::{copy, integrity},
    draft::{self, Draft},
    facts::{Form, Relationship},
    names,
};
use denormd_model::distribution::{Distribution, Unknown, ratio, whole};
use denormd_rules::config::Advise;

/// Maximum number of fields of an embedded document.
const ALL: usize = 60;
/// Maximum number of fields of an element in a subset.
const FEW: usize = 6;

/// Gives all advice on one relationship.
#[must_use]
pub fn decide(facts: &Relationship, thresholds: &Advise, default: Option<&str>) -> Vec<Advice> {
    let mut advice = match facts.form {
        Form::One => one(facts, thresholds, default),
        Form::Ids | Form::Subdocuments => array(facts, thresholds),
    };
    // Embedded documents need no copies.
    if !advice.iter().any(|advice| advice.kind == Kind::Embed) {
        advice.extend(copy::decide(facts, thresholds, default));
    }
    advice.extend(integrity::decide(facts));
    advice
}

/// Advice where each document on the "many" side holds the parent's id.
fn one(facts: &Relationship, thresholds: &Advise, default: Option<&str>) -> Vec<Advice> {
    let (many, parent) = (&facts.holder.namespace.collection, &facts.held.namespace.collection);
    let fan_out = match &facts.fan_out.distribution {
        Ok(fan_out) => fan_out,
        Err(Unknown(why)) => {
            let says = format!("how many `{many}` there are for one of `{parent}` is not known: {why}");
            return vec![Advice::new(Kind::Measure, 3, says)];
        }
    };
    let figures = format!("`{many}` for one of `{parent}`: {}", distribution(fan_out));
    let compelling = compelling(facts, fan_out, thresholds);
    let mut advice = Vec::new();
    if fan_out.p99 < thresholds.embed_elements {
        match compelling.first() {
            None => return vec![embed(facts, fan_out, thresholds, default)],
            Some((rule, _)) => {
                let reasons: Vec<&str> = compelling.iter().map(|(_, reason)| reason.as_str()).collect();
                let says =
                    format!("keep the reference in `{many}`, few as they are: {}; {figures}", reasons.join("; "));
                advice.push(Advice::new(Kind::ParentReference, *rule, says));
            }
        }
    } else {
        let says = if fan_out.p99 >= thresholds.references_stop {
            format!(
                "keep the reference in each of `{many}`, and no array in `{parent}`: {figures}; from {} on even an array of ids is too long",
                count(thresholds.references_stop)
            )
        } else {
            let long =
                if fan_out.p99 >= thresholds.references_warn { "would be long already" } else { "would still do" };
            format!(
                "keep the reference in each of `{many}`: {figures}; too many to embed (from {}), an array of ids in `{parent}` {long} ({} to {})",
                count(thresholds.embed_elements),
                count(thresholds.references_warn),
                count(thresholds.references_stop)
            )
        };
        advice.push(Advice::new(Kind::ParentReference, 3, says));
    }
    advice.extend(two_way(facts, fan_out, thresholds, default));
    advice.extend(subset(facts, fan_out, thresholds, default));
    advice
}

/// The compelling reasons not to embed, each with its rule of thumb.
fn compelling(facts: &Relationship, fan_out: &Distribution, thresholds: &Advise) -> Vec<(u8, String)> {
    let (many, parent) = (&facts.holder.namespace.collection, &facts.held.namespace.collection);
    let mut reasons = Vec::new();
    if let Some((alone, reads)) = facts.holder_read_alone()
        && alone * 20 > reads
    {
        reasons.push((
            2,
            format!("{} of {} of `{many}` did not come through the reference", count(alone), counted(reads, "read")),
        ));
    }
    let (homeless, of) = facts.homeless();
    if homeless * 100 > of {
        let says =
            format!("{} of {} of `{many}` refer to no `{parent}` and would be nowhere", count(homeless), count(of));
        reasons.push((2, says));
    }
    if let [other, ..] = facts.parents.as_slice() {
        reasons.push((2, format!("`{many}` belong to `{other}` as much as to `{parent}`")));
    }
    if let Some(back) = &facts.back {
        reasons.push((2, format!("`{parent}`.{back} lists them by their own ids")));
    }
    if facts.others > 0 {
        reasons.push((2, format!("{} to `{many}` by its own id", refer(facts.others))));
    }
    let size = embedded_size(facts, fan_out);
    if size > thresholds.document_warn {
        reasons.push((3, format!("a document of `{parent}` would have {}", bytes(size))));
    }
    if let Some(years) = grows(facts, thresholds) {
        reasons.push((3, format!("one of `{parent}` gets {} of `{many}` more a year", figure(years))));
    }
    reasons
}

fn refer(fields: usize) -> String {
    if fields == 1 { "one other field refers".to_owned() } else { format!("{fields} other fields refer") }
}

/// The size of a parent, in bytes, with its children embedded.
fn embedded_size(facts: &Relationship, fan_out: &Distribution) -> u64 {
    let p99 = facts.held.size.map_or(0, |size| size.p99);
    p99 + whole(facts.holder.size.map_or(0.0, |size| size.mean())) * fan_out.p99
}

/// Children added to a parent per year, if they are too many for one document.
fn grows(facts: &Relationship, thresholds: &Advise) -> Option<f64> {
    let parents = ratio(facts.held.count - facts.fan_out.alone.unwrap_or_default().min(facts.held.count), 1);
    let a_year = facts.holder.made_per_day? * 365.0 / parents.max(1.0);
    (a_year >= ratio(thresholds.embed_elements, 1)).then_some(a_year)
}

fn embed(facts: &Relationship, fan_out: &Distribution, thresholds: &Advise, default: Option<&str>) -> Advice {
    let (many, parent) = (&facts.holder.namespace.collection, &facts.held.namespace.collection);
    let reads = match facts.holder_read_alone() {
        Some((_, 0)) => format!("no read of `{many}` was seen, so make sure that none is wanted alone"),
        Some((alone, reads)) => {
            format!("{} of {} of `{many}` came without its `{parent}`", count(alone), counted(reads, "read"))
        }
        None => format!("whether `{many}` is read alone is not known"),
    };
    let says = format!(
        "embed `{many}` in `{parent}`: {}, below {}; a document of `{parent}` would have {}; {reads}",
        distribution(fan_out),
        count(thresholds.embed_elements),
        bytes(embedded_size(facts, fan_out))
    );
    let mut draft = collected(facts, default, many, ALL);
    draft.comment = format!("keeps the embedded `{many}` true while the collection is still written to");
    Advice::new(Kind::Embed, 1, says).draft((!facts.collected).then_some(draft))
}

/// A rule that collects the "many" side into an array of the parent. The reference field is left out as redundant.
fn collected(facts: &Relationship, default: Option<&str>, into: &str, most: usize) -> Draft {
    let (holder, held) = (&facts.holder, &facts.held);
    let last = into.rsplit('.').next().unwrap_or(into);
    let into = if held.names.iter().any(|name| name == last) { format!("{last}_embedded") } else { last.to_owned() };
    let reference = facts.link.holder.path.root();
    let plain = |name: &&String| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let fields = holder.names.iter().filter(|name| *name != reference).filter(plain).take(most);
    let mut element: Map<String, Value> = fields.map(|name| (name.clone(), json!(format!("${name}")))).collect();
    // The `_id` identifies the previous parent of a document that moves.
    element.insert("_id".to_owned(), json!("$_id"));
    let name = format!("{}-in-{}", holder.namespace.collection, held.namespace.collection);
    let source = draft::collection(&holder.namespace, default);
    let target = draft::collection(&held.namespace, default);
    Draft::new(&name, "collect", source, target)
        .with("match", json!({facts.link.held.path.to_string(): facts.link.holder.path.to_string()}))
        .with("into", json!(into))
        .with("element", Value::Object(element))
}

/// Advises on an array of ids in the parent in addition to the reference.
fn two_way(facts: &Relationship, fan_out: &Distribution, thresholds: &Advise, default: Option<&str>) -> Option<Advice> {
    let (many, parent) = (&facts.holder.namespace.collection, &facts.held.namespace.collection);
    let (down, up) = (facts.holder.by_reference, facts.held.by_reference);
    let directions = match (down, up) {
        (Some(down), Some(up)) => format!(
            "`{many}` of a `{parent}` were looked up {} times, the `{parent}` of {many} {} times",
            count(down),
            count(up)
        ),
        _ => "whether both directions are read is not known".to_owned(),
    };
    if let Some(back) = &facts.back {
        let verdict = match (down, up) {
            (Some(0), Some(_)) | (Some(_), Some(0)) => {
                "one of the two is not read: give it up, and nothing has to be kept equal"
            }
            _ => "let one be the truth and have denormd keep the other",
        };
        let says = format!(
            "`{parent}`.{back} and `{many}`.{} say the same twice: {directions}; {verdict}",
            facts.link.holder.path
        );
        return Some(Advice::new(Kind::TwoWay, 6, says).draft(Some(mirrored(facts, default, &back.query()))));
    }
    let both = down.zip(up).is_some_and(|(down, up)| down >= 100 && up >= 100);
    if facts.collected || !both || fan_out.p99 >= thresholds.references_warn {
        return None;
    }
    let says = format!(
        "both directions are read: {directions}; an array of ids in `{parent}` saves the lookup, {} at the 99th percentile",
        counted(fan_out.p99, "id")
    );
    let draft = mirrored(facts, default, &format!("{many}_ids"));
    Some(Advice::new(Kind::TwoWay, 6, says).draft(Some(draft)))
}

fn mirrored(facts: &Relationship, default: Option<&str>, into: &str) -> Draft {
    let (holder, held) = (&facts.holder.namespace, &facts.held.namespace);
    let name = format!("{}-ids-in-{}", holder.collection, held.collection);
    Draft::new(&name, "collect", draft::collection(holder, default), draft::collection(held, default))
        .with("match", json!({facts.link.held.path.to_string(): facts.link.holder.path.to_string()}))
        .with("into", json!(into))
        .with("element", json!("$_id"))
}

/// Advises on keeping the first few documents of the "many" side in the parent.
fn subset(facts: &Relationship, fan_out: &Distribution, thresholds: &Advise, default: Option<&str>) -> Option<Advice> {
    let (many, parent) = (&facts.holder.namespace.collection, &facts.held.namespace.collection);
    let (limit, seen) = match &facts.shown {
        Some(shown) => (shown.limit, format!("the application asks for {} of them", count(shown.limit))),
        None => {
            (thresholds.subset, format!("no limit of the application was seen, so {} is assumed", thresholds.subset))
        }
    };
    if fan_out.p99 <= limit || facts.collected {
        return None;
    }
    let verdict = copy::verdict(facts.held.reads, facts.holder.changes, 1.0, thresholds);
    let figures = copy::figures(facts.held.reads, facts.holder.changes, parent, &format!("changes of `{many}`"), None);
    let (kind, says) = match verdict {
        copy::Verdict::Copy(_) => {
            (Kind::Subset, format!("keep the first {limit} of `{many}` in `{parent}`: {figures}; {seen}"))
        }
        copy::Verdict::DoNot(_) => (
            Kind::DoNotCopy,
            format!("keep no `{many}` in `{parent}`: {figures}; they change too often for what is read"),
        ),
        // No query asks for only a few of them, so there is no reason to keep a subset.
        _ if facts.shown.is_none() && fan_out.p99 >= thresholds.references_stop => return None,
        _ => (Kind::Measure, format!("the first {limit} of `{many}` might be kept in `{parent}`: {figures}; {seen}")),
    };
    let rule = Advice::new(kind, 5, says);
    if kind == Kind::DoNotCopy {
        return Some(rule);
    }
    let mut draft = collected(facts, default, many, FEW);
    if draft.body.get("into").and_then(Value::as_str) == Some(many) && draft.name.ends_with(parent.as_str()) {
        draft.name = format!("latest-{}", draft.name);
    }
    let order = match (&facts.shown, &facts.holder.time) {
        (Some(shown), _) if !shown.sort.is_empty() => {
            shown.sort.iter().map(|(path, way)| (path.clone(), json!(way))).collect::<Map<_, _>>()
        }
        (_, Some(time)) => Map::from_iter([(time.clone(), json!(-1))]),
        _ => Map::from_iter([("_id".to_owned(), json!(-1))]),
    };
    Some(rule.draft(Some(draft.with("sort", Value::Object(order)).with("slice", json!(limit)))))
}

/// Advice where the parent holds an array of the ids.
fn array(facts: &Relationship, thresholds: &Advise) -> Vec<Advice> {
    let (one, many) = (&facts.holder.namespace.collection, &facts.held.namespace.collection);
    let Some(lengths) = &facts.lengths else { return Vec::new() };
    let array = facts.link.holder.path.array_prefix().map(|path| path.query()).unwrap_or_default();
    let figures = format!("`{one}`.{array} has {}", distribution(lengths));
    let shared = match &facts.fan_out.distribution {
        Ok(fan_out) if fan_out.max > 1 => {
            format!(
                "; one of `{many}` is in {} of them on average, so embedding it would store it as often",
                figure(facts.fan_out.mean)
            )
        }
        Ok(_) => format!("; each of `{many}` is in one of them alone"),
        Err(_) => String::new(),
    };
    let mut advice = Vec::new();
    if lengths.p99 >= thresholds.references_stop {
        let says = format!(
            "turn it round, the id of `{one}` in each of `{many}`: {figures}; from {} on an array of ids is too long{shared}",
            count(thresholds.references_stop)
        );
        let turned = Advice::new(Kind::ParentReference, 3, says);
        // Only for children with one parent: with several parents, the result would be an array again.
        let alone = facts.fan_out.distribution.as_ref().is_ok_and(|fan_out| fan_out.max == 1);
        advice.push(if alone { turned.command(turn_round(facts)) } else { turned });
    } else {
        let (kept, from) = if lengths.p99 >= thresholds.references_warn {
            ("the array of references is getting long", thresholds.references_warn)
        } else {
            ("an array of references is right", thresholds.references_warn)
        };
        let says = format!("{kept}: {figures}; it is warned about from {}{shared}", count(from));
        let rule = if facts.fan_out.distribution.as_ref().is_ok_and(|fan_out| fan_out.max > 1) { 2 } else { 3 };
        advice.push(Advice::new(Kind::ArrayOfReferences, rule, says));
    }
    advice
}

/// The pipeline that writes the parent's id into each document on the "many" side.
fn turn_round(facts: &Relationship) -> String {
    let (one, many) = (&facts.holder.namespace, &facts.held.namespace);
    let path = &facts.link.holder.path;
    let array = path.array_prefix().map(|path| path.query()).unwrap_or_default();
    let field = format!("{}_id", names::about(&facts.link.holder.path));
    let field = if field == "copied_id" { "parent_id".to_owned() } else { format!("{}_{field}", one.collection) };
    format!(
        "db.getSiblingDB({:?}).getCollection({:?}).aggregate([\n  {{ $unwind: {:?} }},\n  \
         {{ $project: {{ _id: {:?}, {field:?}: \"$_id\" }} }},\n  \
         {{ $merge: {{ into: {{ db: {:?}, coll: {:?} }}, whenMatched: \"merge\", whenNotMatched: \"discard\" }} }}\n])",
        one.database,
        one.collection,
        format!("${array}"),
        format!("${}", path.query()),
        many.database,
        many.collection
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        facts::{Rate, Shown, Side},
        fan_out::{ByType, FanOut},
        relationships::{End, Evidence, Link},
    };
    use denormd_model::{distribution::How, field_path::FieldPath, namespace::Namespace};

    fn distribution_of(p99: u64, max: u64) -> Distribution {
        Distribution { count: 100, sum: p99 * 100, median: p99, p99, max, how: How::Exact }
    }

    fn side(collection: &str, bytes: u64) -> Side {
        Side {
            namespace: Namespace { database: "d".to_owned(), collection: collection.to_owned() },
            count: 100,
            size: Some(distribution_of(bytes, bytes)),
            reads: None,
            by_reference: None,
            changes: None,
            made_per_day: None,
            indexed: true,
            names: vec!["_id".to_owned(), "text".to_owned()],
            time: None,
        }
    }

    /// A hundred parents, with `p99` children each.
    fn facts(path: &str, p99: u64) -> Relationship {
        let (holder, held) = (side("many", 100), side("one", 200));
        let end =
            |side: &Side, path: &str| End { namespace: side.namespace.clone(), path: FieldPath::parse(path).unwrap() };
        let references = p99 * 100;
        Relationship {
            link: Link {
                holder: end(&holder, path),
                held: end(&held, "_id"),
                found: Evidence::Told,
                copies: Vec::new(),
            },
            form: if path.ends_with("$[]") { Form::Ids } else { Form::One },
            db_ref: None,
            fan_out: FanOut {
                references,
                distribution: Ok(distribution_of(p99, p99)),
                mean: ratio(p99, 1),
                alone: Some(0),
                types: vec![ByType { name: "int", references, resolved: references, converted: 0 }],
                how: How::Exact,
            },
            lengths: None,
            duplicates: Ok(0),
            holder: Side { count: references, ..holder },
            held,
            back: None,
            collected: false,
            others: 0,
            parents: Vec::new(),
            shown: None,
            joins: (0, 0),
            fields: Vec::new(),
        }
    }

    fn kinds(facts: &Relationship) -> Vec<Kind> {
        decide(facts, &Advise::default(), Some("d")).iter().map(|advice| advice.kind).collect()
    }

    #[test]
    fn the_number_of_children_decides() {
        for (p99, kind, says) in [
            (1, Kind::Embed, "below 250"),
            (249, Kind::Embed, "below 250"),
            (250, Kind::ParentReference, "would still do"),
            (1999, Kind::ParentReference, "would still do"),
            (2000, Kind::ParentReference, "would be long already"),
            (5000, Kind::ParentReference, "even an array of ids is too long"),
        ] {
            let advice = decide(&facts("one_id", p99), &Advise::default(), None);
            assert_eq!(advice[0].kind, kind, "{p99}");
            assert!(advice[0].says.contains(says), "{p99}: {}", advice[0].says);
        }
        let mut unknown = facts("one_id", 3);
        unknown.fan_out.distribution = Err(Unknown("it has no index".to_owned()));
        assert_eq!(kinds(&unknown), [Kind::Measure]);
    }

    #[test]
    fn a_compelling_reason_keeps_the_few_apart() {
        let reason = |change: &dyn Fn(&mut Relationship)| {
            let mut facts = facts("one_id", 3);
            change(&mut facts);
            let advice = decide(&facts, &Advise::default(), None).remove(0);
            (advice.kind, advice.rule)
        };
        let reads = |alone: u64| {
            move |facts: &mut Relationship| {
                facts.holder.reads = Some(Rate { times: 1000, seconds: 60.0 });
                facts.holder.by_reference = Some(1000 - alone);
            }
        };
        assert_eq!(reason(&reads(50)), (Kind::Embed, Some(1)), "one in twenty may be a report");
        assert_eq!(reason(&reads(51)), (Kind::ParentReference, Some(2)));
        assert_eq!(reason(&|facts| facts.others = 1), (Kind::ParentReference, Some(2)));
        assert_eq!(reason(&|facts| facts.parents = vec!["user".to_owned()]), (Kind::ParentReference, Some(2)));
        assert_eq!(reason(&|facts| facts.holder.count = 310), (Kind::ParentReference, Some(2)), "ten are homeless");
        assert_eq!(reason(&|facts| facts.holder.count = 303), (Kind::Embed, Some(1)));
        assert_eq!(
            reason(&|facts| facts.holder.size = Some(distribution_of(400_000, 400_000))),
            (Kind::ParentReference, Some(3))
        );
        assert_eq!(
            reason(&|facts| facts.holder.made_per_day = Some(100.0)),
            (Kind::ParentReference, Some(3)),
            "365 a year"
        );
    }

    #[test]
    fn arrays_of_ids_by_their_length() {
        for (length, kind, says) in [
            (12, Kind::ArrayOfReferences, "is right"),
            (2000, Kind::ArrayOfReferences, "is getting long"),
            (5000, Kind::ParentReference, "turn it round"),
        ] {
            let mut facts = facts("ids.$[]", 1);
            facts.lengths = Some(distribution_of(length, length));
            let advice = decide(&facts, &Advise::default(), None);
            assert_eq!(advice[0].kind, kind, "{length}");
            assert!(advice[0].says.contains(says), "{length}: {}", advice[0].says);
            assert_eq!(advice[0].command.is_some(), kind == Kind::ParentReference);
        }
    }

    #[test]
    fn a_subset_by_reads_of_the_parent_and_changes_of_the_children() {
        let rate = |times| Some(Rate { times, seconds: 3600.0 });
        for (reads, changes, expected) in [
            (rate(10_000), rate(1000), vec![Kind::ParentReference, Kind::Subset]),
            (rate(1000), rate(1000), vec![Kind::ParentReference, Kind::DoNotCopy]),
            (rate(5000), rate(1000), vec![Kind::ParentReference, Kind::Measure]),
        ] {
            let mut facts = facts("one_id", 300);
            (facts.held.reads, facts.holder.changes) = (reads, changes);
            assert_eq!(kinds(&facts), expected, "{reads:?} {changes:?}");
        }
        let mut shown = facts("one_id", 300);
        shown.held.reads = rate(10_000);
        shown.holder.changes = rate(10);
        shown.shown = Some(Shown { limit: 20, sort: vec![("at".to_owned(), -1)] });
        let advice = decide(&shown, &Advise::default(), Some("d"));
        let draft = advice.iter().find_map(|advice| advice.draft.as_ref()).unwrap();
        assert_eq!((&draft.body["slice"], &draft.body["sort"]), (&json!(20), &json!({"at": -1})));
    }

    #[test]
    fn two_way_references_and_whether_both_are_read() {
        let mut both = facts("one_id", 300);
        both.back = FieldPath::parse("many.$[]").ok();
        (both.holder.by_reference, both.held.by_reference) = (Some(0), Some(500));
        let advice = decide(&both, &Advise::default(), Some("d"));
        let two_way = advice.iter().find(|advice| advice.kind == Kind::TwoWay).unwrap();
        assert!(two_way.says.contains("one of the two is not read"), "{}", two_way.says);
        assert_eq!(two_way.draft.as_ref().unwrap().body["into"], "many");

        let mut wanted = facts("one_id", 300);
        (wanted.holder.by_reference, wanted.held.by_reference) = (Some(100), Some(100));
        assert!(kinds(&wanted).contains(&Kind::TwoWay));
        wanted.held.by_reference = Some(99);
        assert!(!kinds(&wanted).contains(&Kind::TwoWay));
    }
}
