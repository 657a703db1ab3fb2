//! Strings that are not valid UTF-8. The server stores any bytes, and clients in Go, C or PHP send them; Rust's strings
//! cannot contain them.
//!
//! Inside the daemon, each invalid byte of such a string is represented by one character: 0xFF is U+10FFFF. Python does
//! the same (`surrogateescape`, PEP 383). The conversion happens where documents are read, and is reversed where
//! commands are sent. So all code in between handles these strings like any other: they match, are compared and are
//! copied byte for byte. If a document's string itself contains one of these private-use characters, its bytes are
//! represented in the same way, so the original is always restored.
//!
//! The state database contains strings as they are inside the daemon, because the driver writes and reads it without a
//! conversion. Where one of our own commands concerns such documents, the command is escaped beforehand and its rows are
//! unescaped.
//!
//! A binary value of the old subtype contains its length twice, and the server does not check the second one. The driver
//! refuses such a value if that length is wrong. Inside the daemon, a value of the subtype [`RAW_BINARY`] represents it.

use std::borrow::Cow;

use bson::{RawDocument, RawDocumentBuf};

/// The character of the byte 0x80 is U+10FF80, that of 0xFF is U+10FFFF. A byte below 0x80 is always valid.
const BASE: u32 = 0x0010_FF00;
/// The first byte of these characters in UTF-8. A document without this byte has nothing to convert back.
const FIRST_BYTE: u8 = 0xF4;
/// The subtype of binary values that represent others: their first byte is the original subtype, and the rest is the
/// original value. It equals [`FIRST_BYTE`], so that one search finds both.
const RAW_BINARY: u8 = FIRST_BYTE;
/// The old subtype (<https://bsonspec.org/spec.html>).
const OLD_BINARY: u8 = 0x02;

/// Converts a document for use inside the daemon: every string becomes valid UTF-8.
#[must_use]
pub fn escaped(document: &RawDocument) -> Cow<'_, RawDocument> {
    converted(document, &Escape)
}

/// Converts a document back for the server: every string gets its original bytes.
#[must_use]
pub fn unescaped(document: RawDocumentBuf) -> RawDocumentBuf {
    if !document.as_bytes().contains(&FIRST_BYTE) {
        return document;
    }
    match converted(&document, &Unescape) {
        Cow::Owned(converted) => converted,
        Cow::Borrowed(_) => document,
    }
}

/// Converts the texts of a document. A document that is not valid BSON is left unchanged: decoding it will fail.
fn converted<'a>(document: &'a RawDocument, way: &impl Convert) -> Cow<'a, RawDocument> {
    if !has_text(document.as_bytes(), way).unwrap_or(false) {
        return Cow::Borrowed(document);
    }
    let mut out = Vec::new();
    let converted = rewrite(document.as_bytes(), way, &mut out);
    let converted = converted.and_then(|()| RawDocumentBuf::from_bytes(out).ok());
    converted.map_or(Cow::Borrowed(document), Cow::Owned)
}

/// Conversion of the text of strings and field names, and of binary values.
trait Convert {
    /// True if the conversion changes this text.
    fn concerns(&self, text: &[u8]) -> bool;
    fn convert(&self, text: &[u8], out: &mut Vec<u8>);
    /// The subtype and the bytes that replace those of a binary value, if the conversion changes it.
    fn binary(&self, subtype: u8, bytes: &[u8]) -> Option<(u8, Vec<u8>)>;
}

struct Escape;

impl Convert for Escape {
    fn concerns(&self, text: &[u8]) -> bool {
        !text.is_ascii() && std::str::from_utf8(text).map_or(true, |text| text.chars().any(is_escape))
    }

    fn convert(&self, text: &[u8], out: &mut Vec<u8>) {
        let mut buffer = [0; 4];
        let mut escape = |bytes: &[u8], out: &mut Vec<u8>| {
            for byte in bytes {
                let escape = char::from_u32(BASE + u32::from(*byte)).unwrap_or(char::REPLACEMENT_CHARACTER);
                out.extend_from_slice(escape.encode_utf8(&mut buffer).as_bytes());
            }
        };
        for chunk in text.utf8_chunks() {
            for character in chunk.valid().chars() {
                let mut bytes = [0; 4];
                let bytes = character.encode_utf8(&mut bytes).as_bytes();
                if is_escape(character) { escape(bytes, out) } else { out.extend_from_slice(bytes) }
            }
            escape(chunk.invalid(), out);
        }
    }

    fn binary(&self, subtype: u8, bytes: &[u8]) -> Option<(u8, Vec<u8>)> {
        let inner = || Some(i32::from_le_bytes(*bytes.first_chunk()?)).and_then(|size| usize::try_from(size).ok());
        let is_readable = match subtype {
            OLD_BINARY => inner().and_then(|size| size.checked_add(4)) == Some(bytes.len()),
            subtype => subtype != RAW_BINARY,
        };
        (!is_readable).then(|| (RAW_BINARY, [&[subtype], bytes].concat()))
    }
}

struct Unescape;

impl Convert for Unescape {
    fn concerns(&self, text: &[u8]) -> bool {
        !text.is_ascii() && std::str::from_utf8(text).is_ok_and(|text| text.chars().any(is_escape))
    }

    fn convert(&self, text: &[u8], out: &mut Vec<u8>) {
        for chunk in text.utf8_chunks() {
            for character in chunk.valid().chars() {
                match u8::try_from(u32::from(character).wrapping_sub(BASE)) {
                    Ok(byte) if is_escape(character) => out.push(byte),
                    _ => out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
                }
            }
            out.extend_from_slice(chunk.invalid());
        }
    }

    fn binary(&self, subtype: u8, bytes: &[u8]) -> Option<(u8, Vec<u8>)> {
        let (original, bytes) = bytes.split_first().filter(|_| subtype == RAW_BINARY)?;
        Some((*original, bytes.to_vec()))
    }
}

fn is_escape(character: char) -> bool {
    u32::from(character) >= BASE + 0x80
}

/// One element of a document: type, name, value, and the remaining bytes.
type Element<'a> = (u8, &'a [u8], &'a [u8], &'a [u8]);

/// The elements of a document's bytes, without the leading length and the trailing zero.
fn elements(document: &[u8]) -> Option<&[u8]> {
    document.get(4..document.len().checked_sub(1)?)
}

/// Splits off the first element (<https://bsonspec.org/spec.html>). None if the bytes are not valid BSON.
fn split(bytes: &[u8]) -> Option<Element<'_>> {
    let (kind, rest) = bytes.split_first()?;
    let (name, rest) = cstring(rest)?;
    let size = || usize::try_from(i32::from_le_bytes(*rest.first_chunk()?)).ok();
    let length = match kind {
        0x06 | 0x0A | 0x7F | 0xFF => 0,
        0x08 => 1,
        0x10 => 4,
        0x01 | 0x09 | 0x11 | 0x12 => 8,
        0x07 => 12,
        0x13 => 16,
        0x02 | 0x0D | 0x0E => size()?.checked_add(4)?,
        0x05 => size()?.checked_add(5)?,
        0x0C => size()?.checked_add(16)?,
        0x03 | 0x04 | 0x0F => size()?,
        0x0B => {
            let (pattern, options) = cstring(rest)?;
            pattern.len() + cstring(options)?.0.len() + 2
        }
        _ => return None,
    };
    let (value, rest) = rest.split_at_checked(length)?;
    Some((*kind, name, value, rest))
}

fn cstring(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.iter().position(|byte| *byte == 0)?;
    Some((&bytes[..end], &bytes[end + 1..]))
}

/// Splits off a string with its leading length and its trailing zero.
fn string(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let size = usize::try_from(i32::from_le_bytes(*bytes.first_chunk()?)).ok()?;
    let (text, rest) = bytes.get(4..)?.split_at_checked(size)?;
    Some((text.split_last()?.1, rest))
}

/// Splits a binary value into its subtype and its bytes.
fn binary(value: &[u8]) -> Option<(u8, &[u8])> {
    let (subtype, bytes) = value.get(4..)?.split_first()?;
    Some((*subtype, bytes))
}

/// True if a document has text or a binary value that needs conversion.
fn has_text(document: &[u8], way: &impl Convert) -> Option<bool> {
    let mut rest = elements(document)?;
    while !rest.is_empty() {
        let (kind, name, value, next) = split(rest)?;
        rest = next;
        let inside = match kind {
            0x02 | 0x0C | 0x0D | 0x0E => way.concerns(string(value)?.0),
            0x03 | 0x04 => has_text(value, way)?,
            0x05 => binary(value).is_some_and(|(subtype, bytes)| way.binary(subtype, bytes).is_some()),
            0x0B => way.concerns(value),
            0x0F => {
                let (code, scope) = string(value.get(4..)?)?;
                way.concerns(code) || has_text(scope, way)?
            }
            _ => false,
        };
        if inside || way.concerns(name) {
            return Some(true);
        }
    }
    Some(false)
}

fn rewrite(document: &[u8], way: &impl Convert, out: &mut Vec<u8>) -> Option<()> {
    sized(out, |out| {
        let mut rest = elements(document)?;
        while !rest.is_empty() {
            let (kind, name, value, next) = split(rest)?;
            rest = next;
            out.push(kind);
            way.convert(name, out);
            out.push(0);
            rewrite_value(kind, value, way, out)?;
        }
        out.push(0);
        Some(())
    })
}

fn rewrite_value(kind: u8, value: &[u8], way: &impl Convert, out: &mut Vec<u8>) -> Option<()> {
    match kind {
        0x02 | 0x0C | 0x0D | 0x0E => {
            let (text, rest) = string(value)?;
            rewrite_string(text, way, out)?;
            out.extend_from_slice(rest);
        }
        0x03 | 0x04 => rewrite(value, way, out)?,
        0x05 => {
            let (subtype, bytes) = binary(value)?;
            match way.binary(subtype, bytes) {
                Some((subtype, bytes)) => {
                    out.extend_from_slice(&i32::try_from(bytes.len()).ok()?.to_le_bytes());
                    out.push(subtype);
                    out.extend(bytes);
                }
                None => out.extend_from_slice(value),
            }
        }
        // Two texts, each with its trailing zero.
        0x0B => way.convert(value, out),
        0x0F => sized(out, |out| {
            let (code, scope) = string(value.get(4..)?)?;
            rewrite_string(code, way, out)?;
            rewrite(scope, way, out)
        })?,
        _ => out.extend_from_slice(value),
    }
    Some(())
}

fn rewrite_string(text: &[u8], way: &impl Convert, out: &mut Vec<u8>) -> Option<()> {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    way.convert(text, out);
    out.push(0);
    // A string's length does not count itself.
    let size = out.len() - start - 4;
    put_size(out, start, size)
}

/// Writes a value that begins with its own length.
fn sized(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> Option<()>) -> Option<()> {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    write(out)?;
    let size = out.len() - start;
    put_size(out, start, size)
}

fn put_size(out: &mut [u8], at: usize, size: usize) -> Option<()> {
    let size = i32::try_from(size).ok()?.to_le_bytes();
    out.get_mut(at..at + 4)?.copy_from_slice(&size);
    Some(())
}

#[cfg(test)]
mod tests {
    use bson::{
        Binary, Bson, DateTime, Decimal128, Document, JavaScriptCodeWithScope, Regex, Timestamp, doc, oid::ObjectId,
        spec::BinarySubtype,
    };
    use proptest::prelude::*;

    use super::*;

    /// A document with values of every type, with `text` as every text.
    fn all_types(text: &str) -> Document {
        let regex = Regex { pattern: text.try_into().unwrap(), options: "i".try_into().unwrap() };
        doc! {
            "string": text, text: 1, "symbol": Bson::Symbol(text.to_owned()), "code": Bson::JavaScriptCode(text.to_owned()),
            "scoped": JavaScriptCodeWithScope { code: text.to_owned(), scope: doc! {text: [text]} }, "regex": regex,
            "inside": {"a": [{"b": text}, text, 5]}, "double": 1.5, "int": 7, "long": 7_i64, "yes": true, "null": null,
            "date": DateTime::from_millis(7), "id": ObjectId::from_bytes([7; 12]), "min": Bson::MinKey, "max": Bson::MaxKey,
            "stamp": Timestamp { time: 1, increment: 2 }, "decimal": Decimal128::from_bytes([1; 16]), "none": Bson::Undefined,
            "binary": Binary { subtype: BinarySubtype::Generic, bytes: text.as_bytes().to_vec() }, "last": text,
        }
    }

    /// The same document with the placeholder replaced by two other bytes.
    fn with(bytes: [u8; 2]) -> RawDocumentBuf {
        let raw = RawDocumentBuf::try_from(&all_types("a\u{bf}b")).unwrap();
        let mut all = raw.into_bytes();
        for at in 1..all.len() {
            if all[at - 1..=at] == [0xC2, 0xBF] {
                all[at - 1..=at].copy_from_slice(&bytes);
            }
        }
        RawDocumentBuf::from_bytes(all).unwrap()
    }

    #[test]
    fn every_string_of_every_type_is_decoded_and_comes_back() {
        let raw = with([0xFF, 0xC3]);
        assert!(Document::try_from(raw.as_ref()).is_err());
        let decoded = Document::try_from(escaped(&raw).as_ref()).unwrap();
        let mut expected = all_types("a\u{10FFFF}\u{10FFC3}b");
        expected.insert("binary", Binary { subtype: BinarySubtype::Generic, bytes: b"a\xFF\xC3b".to_vec() });
        assert_eq!(decoded, expected);
        let back = unescaped(RawDocumentBuf::try_from(&decoded).unwrap());
        assert_eq!(back, raw);
    }

    #[test]
    fn valid_text_is_left_alone() {
        for text in ["plain", "ünïcödé \u{1F600}", "\u{10FF7F}"] {
            let raw = RawDocumentBuf::try_from(&all_types(text)).unwrap();
            assert!(matches!(escaped(&raw), Cow::Borrowed(_)), "{text}");
            assert_eq!(unescaped(raw.clone()), raw, "{text}");
        }
    }

    #[test]
    fn what_stands_for_bytes_comes_back_too_where_a_document_holds_it() {
        let raw = RawDocumentBuf::try_from(&all_types("a\u{10FFFF}b")).unwrap();
        let inside = escaped(&raw).into_owned();
        assert_ne!(inside, raw);
        assert_eq!(unescaped(inside), raw);
    }

    #[test]
    fn binary_values_that_cannot_be_read_are_represented_by_others() {
        let document = |subtype: u8, bytes: &[u8]| {
            let mut raw = vec![0x05, b'b', 0];
            raw.extend(i32::try_from(bytes.len()).unwrap().to_le_bytes());
            raw.push(subtype);
            raw.extend(bytes);
            RawDocumentBuf::from_bytes(
                [&(i32::try_from(raw.len()).unwrap() + 5).to_le_bytes()[..], &raw, &[0]].concat(),
            )
        };
        let inside = |raw: &RawDocumentBuf| Document::try_from(escaped(raw).as_ref()).unwrap();
        for (subtype, bytes) in
            [(2, &b"abc"[..]), (2, b""), (2, b"\x09\0\0\0abc"), (2, b"\xFF\xFF\xFF\xFFabc"), (0xF4, b"abc")]
        {
            let raw = document(subtype, bytes).unwrap();
            let stands_for_it = Binary { subtype: 0xF4.into(), bytes: [&[subtype], bytes].concat() };
            assert_eq!(inside(&raw), doc! {"b": stands_for_it});
            assert_eq!(unescaped(escaped(&raw).into_owned()), raw);
        }
        for (subtype, bytes) in [(2, &b"\x03\0\0\0abc"[..]), (2, b"\0\0\0\0"), (0, b"abc"), (4, b"abc")] {
            let raw = document(subtype, bytes).unwrap();
            assert!(matches!(escaped(&raw), Cow::Borrowed(_)));
            assert_eq!(unescaped(RawDocumentBuf::try_from(&inside(&raw)).unwrap()), raw);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_come_back(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let (mut inside, mut back) = (Vec::new(), Vec::new());
            Escape.convert(&bytes, &mut inside);
            prop_assert!(std::str::from_utf8(&inside).is_ok());
            Unescape.convert(&inside, &mut back);
            prop_assert_eq!(back, bytes);
        }

        #[test]
        fn bytes_that_are_no_bson_are_left_alone(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let mut document = 5_i32.to_le_bytes().to_vec();
            document.extend(bytes);
            document.push(0);
            let size = i32::try_from(document.len()).unwrap().to_le_bytes();
            document[..4].copy_from_slice(&size);
            if let Ok(raw) = RawDocumentBuf::from_bytes(document) {
                drop(unescaped(escaped(&raw).into_owned()));
            }
        }
    }
}
