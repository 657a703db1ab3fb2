//! The stage `$group`.

use bson::{Bson, Document, doc};

use super::{
    Result, Value,
    accumulator::Accumulator,
    expression::Scope,
    needs_server,
    number::position,
    order::{by_keys, directions},
    path::{sort_keys, through_array},
    refused,
};

/// The result of an accumulator of `$group` for these documents; a missing value becomes null.
pub(super) fn accumulate(accumulator: &Bson, documents: &[Document]) -> Result<Bson> {
    let Some((name, argument)) = accumulator.as_document().and_then(|doc| doc.iter().next()) else {
        return refused("an accumulator is written { $sum: 1 }");
    };
    let value = match name.as_str() {
        "$top" | "$bottom" | "$topN" | "$bottomN" | "$firstN" | "$lastN" => some(name, argument, documents)?,
        _ => {
            let mut accumulator = Accumulator::new(name)?;
            // `$first` is not evaluated for the documents after the first one.
            for document in documents.iter().take(if name == "$first" { 1 } else { usize::MAX }) {
                // `$count` takes an empty document.
                let value = if name == "$count" { None } else { Scope::new(document).evaluate(argument)? };
                accumulator.take(value)?;
            }
            accumulator.value()?
        }
    };
    Ok(value.unwrap_or(Bson::Null))
}

/// The first or the last of the documents, in their order or in the order of `sortBy`.
fn some(name: &str, argument: &Bson, documents: &[Document]) -> Result<Value> {
    let Bson::Document(argument) = argument else { return refused(format!("`{name}` takes a document of arguments")) };
    let many = name.ends_with('N');
    let count = match argument.get("n") {
        None if !many => 1,
        Some(n @ (Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_))) => match position(Some(n))? {
            Some(count @ 1..) => usize::try_from(count).unwrap_or(usize::MAX),
            _ => return refused(format!("`n` of `{name}` is a whole number from 1")),
        },
        _ => return needs_server(format!("a computed `n` of `{name}`")),
    };
    let output = argument.get(if matches!(name, "$firstN" | "$lastN") { "input" } else { "output" });
    let Some(output) = output else { return refused(format!("`{name}` has no output")) };
    let by = argument.get_document("sortBy").cloned().unwrap_or_default();
    let ways = directions(&by)?;
    let mut rows = Vec::new();
    let looked_at = if name == "$firstN" { count } else { usize::MAX };
    for document in documents.iter().take(looked_at) {
        if by.keys().any(|path| through_array(document, path)) {
            return needs_server(format!("`{name}` sorted by an array"));
        }
        let value = Scope::new(document).evaluate(output)?.unwrap_or(Bson::Null);
        rows.push((sort_keys(document, &by)?, value));
    }
    rows.sort_by(|(a, _), (b, _)| by_keys(&ways, a, b));
    let values = rows.into_iter().map(|(_, value)| value);
    let kept: Vec<Bson> = if matches!(name, "$bottom" | "$bottomN" | "$lastN") {
        let more = values.len().saturating_sub(count);
        values.skip(more).collect()
    } else {
        values.take(count).collect()
    };
    Ok(if many { Some(Bson::Array(kept)) } else { kept.into_iter().next() })
}

/// One `{ _id, … }` document for each group, in the order of first occurrence.
pub(super) fn group(stage: &Document, documents: Vec<Document>) -> Result<Vec<Document>> {
    let id = stage.get("_id").cloned().unwrap_or(Bson::Null);
    let mut groups: Vec<(denormd_model::key::Key, Bson, Vec<Document>)> = Vec::new();
    for document in documents {
        let value = Scope::new(&document).evaluate(&id)?.unwrap_or(Bson::Null);
        let key = denormd_model::key::Key::one(value.clone());
        match groups.iter_mut().find(|(known, ..)| *known == key) {
            Some((.., members)) => members.push(document),
            None => groups.push((key, value, vec![document])),
        }
    }
    let rows = groups.into_iter().map(|(_, id, members)| {
        let mut row = doc! {"_id": id};
        for (name, accumulator) in stage.iter().filter(|(name, _)| *name != "_id") {
            row.insert(name.clone(), accumulate(accumulator, &members)?);
        }
        Ok(row)
    });
    rows.collect()
}
