//! String operators.

use bson::{Bson, oid::ObjectId};

use super::{Args, Result, Value, date, is_nullish, needs_server, refused};
use crate::number::position;

/// Text of a value, for operators that convert any type to text.
fn coerced(args: &Args<'_>, nth: usize) -> Result<String> {
    Ok(match args.get(nth)? {
        value if is_nullish(value.as_ref()) => String::new(),
        Some(Bson::String(text) | Bson::Symbol(text)) => text,
        Some(Bson::Int32(number)) => number.to_string(),
        Some(Bson::Int64(number)) => number.to_string(),
        Some(Bson::DateTime(time)) => date::iso(time.timestamp_millis())?,
        Some(Bson::Double(_) | Bson::Decimal128(_) | Bson::Timestamp(_) | Bson::JavaScriptCode(_)) => {
            return needs_server(format!("`{}` of this type", args.name));
        }
        value => return args.wrong("text", value.as_ref()),
    })
}

pub(super) fn concat(args: &Args<'_>) -> Result<Value> {
    let mut out = String::new();
    for nth in 0..args.len() {
        match args.get(nth)? {
            value if is_nullish(value.as_ref()) => return Ok(Some(Bson::Null)),
            Some(Bson::String(text)) => out.push_str(&text),
            value => return args.wrong("strings", value.as_ref()),
        }
    }
    Ok(Some(Bson::String(out)))
}

/// `$toUpper` and `$toLower` only change ASCII letters.
pub(super) fn case(args: &Args<'_>) -> Result<Value> {
    let text = coerced(args, 0)?;
    let text = if args.name == "$toUpper" { text.to_ascii_uppercase() } else { text.to_ascii_lowercase() };
    Ok(Some(Bson::String(text)))
}

pub(super) fn compare_case(args: &Args<'_>) -> Result<Value> {
    let (left, right) = (coerced(args, 0)?, coerced(args, 1)?);
    let order = left.to_ascii_uppercase().cmp(&right.to_ascii_uppercase());
    Ok(Some(Bson::Int32(order as i32)))
}

pub(super) fn length(args: &Args<'_>) -> Result<Value> {
    match args.get(0)? {
        Some(Bson::String(text)) => {
            let length = if args.name == "$strLenCP" { text.chars().count() } else { text.len() };
            Ok(Some(Bson::Int32(i32::try_from(length).unwrap_or(i32::MAX))))
        }
        value => args.wrong("a string", value.as_ref()),
    }
}

pub(super) fn substring(args: &Args<'_>) -> Result<Value> {
    let text = coerced(args, 0)?;
    let place = |nth: usize| {
        let value = args.get(nth)?;
        match position(value.as_ref())?.and_then(|at| usize::try_from(at).ok()) {
            Some(at) => Ok(at),
            None => args.wrong("a place and a length from 0", value.as_ref()),
        }
    };
    let (start, length) = (place(1)?, place(2)?);
    Ok(Some(Bson::String(text.chars().skip(start).take(length).collect())))
}

pub(super) fn split(args: &Args<'_>) -> Result<Value> {
    match (args.get(0)?, args.get(1)?) {
        (text, by) if is_nullish(text.as_ref()) || is_nullish(by.as_ref()) => Ok(Some(Bson::Null)),
        (Some(Bson::String(_)), Some(Bson::String(by))) if by.is_empty() => refused("`$split` by an empty string"),
        (Some(Bson::String(text)), Some(Bson::String(by))) => {
            Ok(Some(Bson::Array(text.split(&by).map(|part| Bson::String(part.to_owned())).collect())))
        }
        (Some(Bson::String(_)), by) => args.wrong("strings", by.as_ref()),
        (text, _) => args.wrong("strings", text.as_ref()),
    }
}

/// Characters that `$trim` removes by default.
fn is_blank(c: char) -> bool {
    matches!(c, '\0' | '\t'..='\r' | ' ' | '\u{a0}' | '\u{1680}' | '\u{2000}'..='\u{200a}')
}

pub(super) fn trim(args: &Args<'_>) -> Result<Value> {
    let doc = args.named(&["input", "chars"])?;
    args.required(doc, "input")?;
    let text = match args.of(doc, "input")? {
        value if is_nullish(value.as_ref()) => return Ok(Some(Bson::Null)),
        Some(Bson::String(text)) => text,
        value => return args.wrong("a string", value.as_ref()),
    };
    let chars = match args.of(doc, "chars")? {
        None if !doc.contains_key("chars") => None,
        value if is_nullish(value.as_ref()) => return Ok(Some(Bson::Null)),
        Some(Bson::String(chars)) => Some(chars),
        value => return args.wrong("a string", value.as_ref()),
    };
    let goes = |c: char| chars.as_ref().map_or_else(|| is_blank(c), |chars| chars.contains(c));
    let trimmed = match args.name.as_str() {
        "$ltrim" => text.trim_start_matches(goes),
        "$rtrim" => text.trim_end_matches(goes),
        _ => text.trim_matches(goes),
    };
    Ok(Some(Bson::String(trimmed.to_owned())))
}

pub(super) fn replace(args: &Args<'_>) -> Result<Value> {
    let doc = args.named(&["input", "find", "replacement"])?;
    let mut texts = Vec::new();
    let mut null = false;
    for name in ["input", "find", "replacement"] {
        args.required(doc, name)?;
        match args.of(doc, name)? {
            value if is_nullish(value.as_ref()) => null = true,
            Some(Bson::String(text)) => texts.push(text),
            value => return args.wrong("strings", value.as_ref()),
        }
    }
    let [input, find, replacement] = texts.as_slice() else { return Ok(Some(Bson::Null)) };
    let most = if args.name == "$replaceOne" { 1 } else { usize::MAX };
    if null || find.is_empty() {
        return if null { Ok(Some(Bson::Null)) } else { needs_server(format!("`{}` of an empty string", args.name)) };
    }
    Ok(Some(Bson::String(input.replacen(find.as_str(), replacement, most))))
}

pub(super) fn to_string(args: &Args<'_>) -> Result<Value> {
    let value = args.get(0)?;
    Ok(Some(Bson::String(match &value {
        value if is_nullish(value.as_ref()) => return Ok(Some(Bson::Null)),
        Some(Bson::String(text)) => text.clone(),
        Some(Bson::Boolean(flag)) => flag.to_string(),
        Some(Bson::Int32(number)) => number.to_string(),
        Some(Bson::Int64(number)) => number.to_string(),
        Some(Bson::ObjectId(id)) => id.to_hex(),
        Some(Bson::DateTime(time)) => date::iso(time.timestamp_millis())?,
        Some(Bson::Double(_) | Bson::Decimal128(_)) => {
            return needs_server(format!("`$toString` of a {}", super::type_name(value.as_ref())));
        }
        _ => return args.wrong("what converts to a string", value.as_ref()),
    })))
}

pub(super) fn to_object_id(args: &Args<'_>) -> Result<Value> {
    match args.get(0)? {
        value if is_nullish(value.as_ref()) => Ok(Some(Bson::Null)),
        Some(Bson::ObjectId(id)) => Ok(Some(Bson::ObjectId(id))),
        Some(Bson::String(text)) => match ObjectId::parse_str(&text) {
            Ok(id) => Ok(Some(Bson::ObjectId(id))),
            Err(_) => refused("`$toObjectId` takes 24 hexadecimal digits"),
        },
        value => args.wrong("a string", value.as_ref()),
    }
}
