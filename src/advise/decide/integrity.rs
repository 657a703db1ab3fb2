//! Advice on dangling references, key types, duplicate keys and missing indexes.

use crate::{
    advice::{Advice, Kind, bytes, count, counted},
    facts::{Form, Relationship},
    fan_out::expression,
};
use denormd_model::distribution::{How, Unknown};

/// Gives the advice on the references themselves.
#[must_use]
pub fn decide(facts: &Relationship) -> Vec<Advice> {
    let mut advice = Vec::new();
    advice.extend(plain_ids(facts));
    advice.extend(key_type(facts));
    advice.extend(dangling(facts));
    advice.extend(duplicates(facts));
    advice.extend(indexes(facts));
    advice.extend(projection(facts));
    advice
}

fn plain_ids(facts: &Relationship) -> Option<Advice> {
    let waste = facts.db_ref?;
    let holder = &facts.holder.namespace;
    let parent = facts.link.holder.path.to_string();
    let parent = parent.strip_suffix(".$id").unwrap_or(&parent);
    let says = format!(
        "`{}`.{parent} are DBRefs that all name `{}`: plain ids say the same in {} less each, {} in all, and can be joined by $lookup",
        holder.collection,
        facts.held.namespace.collection,
        counted(waste, "byte"),
        bytes(waste.saturating_mul(facts.fan_out.references))
    );
    let advice = Advice::new(Kind::PlainIds, 6, says);
    Some(if facts.form == Form::One {
        let id = bson::Bson::into_relaxed_extjson(expression(&facts.link.holder.path));
        advice.command(format!(
            "db.getSiblingDB({:?}).getCollection({:?}).updateMany({{ {:?}: {{ $exists: true }} }}, [{{ $set: {{ {parent:?}: {id} }} }}])",
            holder.database,
            holder.collection,
            format!("{parent}.$id")
        ))
    } else {
        advice
    })
}

fn key_type(facts: &Relationship) -> Option<Advice> {
    let (holder, held) = (&facts.link.holder, &facts.link.held);
    let of = facts.fan_out.types.iter().filter(|of| of.converted > 0).max_by_key(|of| of.converted)?;
    let (wanted, operator) = match of.name {
        "string" => ("objectId", "$toObjectId"),
        _ => ("string", "$toString"),
    };
    let says = format!(
        "{} of {} in `{}`.{} ({}) lead to `{}`.{} only once they are converted: a rule needs `key_type: {wanted}`, a $lookup finds nothing",
        count(of.converted),
        counted(of.references, "reference"),
        holder.namespace.collection,
        holder.path,
        of.name,
        held.namespace.collection,
        held.path
    );
    let advice = Advice::new(Kind::KeyType, 6, says);
    Some(if facts.form == Form::One && facts.db_ref.is_none() && wanted == "objectId" {
        let path = holder.path.query();
        advice.command(format!(
            "db.getSiblingDB({:?}).getCollection({:?}).updateMany({{ {path:?}: {{ $type: \"string\", $regex: \"^[0-9a-fA-F]{{24}}$\" }} }}, [{{ $set: {{ {path:?}: {{ {operator}: {:?} }} }} }}])",
            holder.namespace.database,
            holder.namespace.collection,
            format!("${path}")
        ))
    } else {
        advice
    })
}

fn dangling(facts: &Relationship) -> Option<Advice> {
    let dangling = facts.fan_out.dangling();
    let (holder, held) = (&facts.link.holder, &facts.link.held);
    let types: Vec<String> = facts
        .fan_out
        .types
        .iter()
        .filter_map(|of| {
            let lost = of.references - of.resolved - of.converted;
            (lost > 0).then(|| format!("{} of {} {}", count(lost), count(of.references), of.name))
        })
        .collect();
    let sampled = match facts.fan_out.how {
        How::Exact => String::new(),
        How::Sample(of) => format!(", in a sample of {}", counted(of, "document")),
    };
    let says = format!(
        "{} in `{}`.{} lead to no `{}`.{}: {}{sampled}",
        counted(dangling, "reference"),
        holder.namespace.collection,
        holder.path,
        held.namespace.collection,
        held.path,
        types.join(", ")
    );
    (dangling > 0).then(|| Advice::new(Kind::Dangling, None, says))
}

fn duplicates(facts: &Relationship) -> Option<Advice> {
    let held = &facts.link.held;
    match &facts.duplicates {
        Ok(0) => None,
        Ok(shared) => {
            let says = format!(
                "{} of `{}`.{} are held by several documents: a rule's `sort` picks one of them, a unique index would refuse them",
                counted(*shared, "value"),
                held.namespace.collection,
                held.path
            );
            Some(Advice::new(Kind::DuplicateKeys, None, says))
        }
        Err(Unknown(why)) => {
            let says = format!("whether `{}`.{} is unique is not known: {why}", held.namespace.collection, held.path);
            Some(Advice::new(Kind::Measure, None, says))
        }
    }
}

fn indexes(facts: &Relationship) -> Vec<Advice> {
    let sides = [
        (&facts.holder, &facts.link.holder.path, "everything that refers to one"),
        (&facts.held, &facts.link.held.path, "what is referred to"),
    ];
    let missing = sides.into_iter().filter(|(side, ..)| !side.indexed);
    missing
        .map(|(side, path, what)| {
            let (namespace, path) = (&side.namespace, path.query());
            let says = format!(
                "`{}` has no index on {path}: finding {what} reads all {}",
                namespace.collection,
                counted(side.count, "document")
            );
            Advice::new(Kind::IndexMissing, 4, says).command(format!(
                "db.getSiblingDB({:?}).getCollection({:?}).createIndex({{ {path:?}: 1 }})",
                namespace.database, namespace.collection
            ))
        })
        .collect()
}

fn projection(facts: &Relationship) -> Option<Advice> {
    let (joins, whole) = facts.joins;
    let held = &facts.held;
    let size = held.size?;
    let says = format!(
        "{} of {} to `{}` in the log of slow queries fetch whole documents, {} each on average: name the fields that are wanted",
        count(whole),
        counted(joins, "join"),
        held.namespace.collection,
        bytes(denormd_model::distribution::whole(size.mean()))
    );
    (whole > 0).then(|| Advice::new(Kind::Projection, 4, says))
}
