//! Which form a relationship should have: rules of thumb 1, 2, 3 and 6.

use serde_json::{Map, Value, json};

use crate::{
    advise::{
        advice::{Advice, Kind, bytes, count, counted, figure, spread},
        decide::{copy, integrity},
        draft::{self, Draft},
        facts::{Form, Relationship},
        names,
        spread::{Spread, Unknown, ratio, whole},
    },
    config::Advise,
};

/// Fields of what is embedded.
const ALL: usize = 60;
/// Fields of what is shown in a list.
const FEW: usize = 6;

/// All advice for one relationship.
#[must_use]
pub fn decide(facts: &Relationship, thresholds: &Advise, default: Option<&str>) -> Vec<Advice> {
    let mut advice = match facts.form {
        Form::One => one(facts, thresholds, default),
        Form::Ids | Form::Subdocuments => array(facts, thresholds, default),
    };
    // What is embedded has nothing to copy from.
    if !advice.iter().any(|advice| advice.kind == Kind::Embed) {
        advice.extend(copy::decide(facts, thresholds, default));
    }
    advice.extend(integrity::decide(facts, default));
    advice
}

/// The many hold the id of the one.
fn one(facts: &Relationship, thresholds: &Advise, default: Option<&str>) -> Vec<Advice> {
    let (many, parent) = (&facts.holder.namespace.collection, &facts.held.namespace.collection);
    let fan_out = match &facts.fan_out.spread {
        Ok(fan_out) => fan_out,
        Err(Unknown(why)) => {
            let says = format!("how many `{many}` there are for one of `{parent}` is not known: {why}");
            return vec![Advice::new(Kind::Measure, 3, says)];
        }
    };
    let figures = format!("`{many}` for one of `{parent}`: {}", spread(fan_out));
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
fn compelling(facts: &Relationship, fan_out: &Spread, thresholds: &Advise) -> Vec<(u8, String)> {
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

/// What a parent would have with its children in it.
fn embedded_size(facts: &Relationship, fan_out: &Spread) -> u64 {
    let p99 = facts.held.size.map_or(0, |size| size.p99);
    p99 + whole(facts.holder.size.map_or(0.0, |size| size.mean())) * fan_out.p99
}

/// Children that a parent gets in a year, where that is too many for one document.
fn grows(facts: &Relationship, thresholds: &Advise) -> Option<f64> {
    let parents = ratio(facts.held.count - facts.fan_out.alone.unwrap_or_default().min(facts.held.count), 1);
    let a_year = facts.holder.made_per_day? * 365.0 / parents.max(1.0);
    (a_year >= ratio(thresholds.embed_elements, 1)).then_some(a_year)
}

fn embed(facts: &Relationship, fan_out: &Spread, thresholds: &Advise, default: Option<&str>) -> Advice {
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
        spread(fan_out),
        count(thresholds.embed_elements),
        bytes(embedded_size(facts, fan_out))
    );
    let mut draft = collected(facts, default, many, ALL);
    draft.comment = format!("keeps the embedded `{many}` true while the collection is still written to");
    Advice::new(Kind::Embed, 1, says).draft(Some(draft))
}

/// A rule that collects the many into an array of the one. The reference itself would say what is known.
fn collected(facts: &Relationship, default: Option<&str>, into: &str, most: usize) -> Draft {
    let (holder, held) = (&facts.holder, &facts.held);
    let last = into.rsplit('.').next().unwrap_or(into);
    let into = if held.names.iter().any(|name| name == last) { format!("{last}_embedded") } else { last.to_owned() };
    let reference = facts.link.holder.path.root();
    let plain = |name: &&String| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let fields = holder.names.iter().filter(|name| *name != reference).filter(plain).take(most);
    let mut element: Map<String, Value> = fields.map(|name| (name.clone(), json!(format!("${name}")))).collect();
    // With it the old parent of a document that moves is known.
    element.insert("_id".to_owned(), json!("$_id"));
    let name = format!("{}-in-{}", holder.namespace.collection, held.namespace.collection);
    let source = draft::collection(&holder.namespace, default);
    let target = draft::collection(&held.namespace, default);
    Draft::new(&name, "collect", source, target)
        .with("match", json!({facts.link.held.path.to_string(): facts.link.holder.path.to_string()}))
        .with("into", json!(into))
        .with("element", Value::Object(element))
}

/// Whether the one should know the ids of the many too.
fn two_way(facts: &Relationship, fan_out: &Spread, thresholds: &Advise, default: Option<&str>) -> Option<Advice> {
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
    if !both || fan_out.p99 >= thresholds.references_warn {
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

/// The first few of the many in the one.
fn subset(facts: &Relationship, fan_out: &Spread, thresholds: &Advise, default: Option<&str>) -> Option<Advice> {
    let (many, parent) = (&facts.holder.namespace.collection, &facts.held.namespace.collection);
    let (limit, seen) = match &facts.shown {
        Some(shown) => (shown.limit, format!("the application asks for {} of them", count(shown.limit))),
        None => {
            (thresholds.subset, format!("no limit of the application was seen, so {} is assumed", thresholds.subset))
        }
    };
    if fan_out.p99 <= limit {
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
        // Nobody has asked for a few of them, so nothing speaks for it.
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

/// The one holds the ids of the many.
fn array(facts: &Relationship, thresholds: &Advise, default: Option<&str>) -> Vec<Advice> {
    let (one, many) = (&facts.holder.namespace.collection, &facts.held.namespace.collection);
    let Some(lengths) = &facts.lengths else { return Vec::new() };
    let array = facts.link.holder.path.array_prefix().map(|path| path.query()).unwrap_or_default();
    let figures = format!("`{one}`.{array} has {}", spread(lengths));
    let shared = match &facts.fan_out.spread {
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
        advice.push(Advice::new(Kind::ParentReference, 3, says).command(turn_round(facts)));
    } else {
        let (kept, from) = if lengths.p99 >= thresholds.references_warn {
            ("the array of references is getting long", thresholds.references_warn)
        } else {
            ("an array of references is right", thresholds.references_warn)
        };
        let says = format!("{kept}: {figures}; it is warned about from {}{shared}", count(from));
        let rule = if facts.fan_out.spread.as_ref().is_ok_and(|fan_out| fan_out.max > 1) { 2 } else { 3 };
        advice.push(Advice::new(Kind::ArrayOfReferences, rule, says));
    }
    if facts.back.is_some()
        && let Ok(fan_out) = &facts.fan_out.spread
    {
        advice.extend(two_way(facts, fan_out, thresholds, default).map(|mut advice| {
            // The other direction has the rule.
            advice.draft = None;
            advice
        }));
    }
    advice
}

/// The pipeline that writes the id of the one into each of the many.
fn turn_round(facts: &Relationship) -> String {
    let (one, many) = (&facts.holder.namespace, &facts.held.namespace);
    let path = &facts.link.holder.path;
    let array = path.array_prefix().map(|path| path.query()).unwrap_or_default();
    let field = format!("{}_id", names::about(&facts.link.holder.path));
    let field = if field == "copied_id" { "parent_id".to_owned() } else { format!("{}_{field}", one.collection) };
    format!(
        "db.getSiblingDB({:?}).getCollection({:?}).aggregate([\n  {{ $unwind: \"${array}\" }},\n  \
         {{ $project: {{ _id: \"${}\", {field}: \"$_id\" }} }},\n  \
         {{ $merge: {{ into: {{ db: {:?}, coll: {:?} }}, whenMatched: \"merge\", whenNotMatched: \"discard\" }} }}\n])",
        one.database,
        one.collection,
        path.query(),
        many.database,
        many.collection
    )
}
