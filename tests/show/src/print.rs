//! Output for people: headings, numbers, documents side by side.

use std::{fmt::Write as _, io::IsTerminal, time::Duration};

use bson::{Bson, Document};

/// Width of one document when two are shown side by side.
const COLUMN: usize = 56;

fn paint(code: &str, text: &str) -> String {
    if std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

/// Emphasizes text.
pub fn bold(text: &str) -> String {
    paint("1", text)
}

/// De-emphasizes text.
pub fn dim(text: &str) -> String {
    paint("2", text)
}

/// Marks a good result.
pub fn green(text: &str) -> String {
    paint("32", text)
}

/// Marks a bad result.
pub fn red(text: &str) -> String {
    paint("1;31", text)
}

/// A heading, with a line before it.
pub fn heading(text: &str) {
    println!("\n{}", bold(text));
}

/// `336,776`
pub fn count(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1 flight`, `336,776 flights`
pub fn counted(number: usize, noun: &str) -> String {
    format!("{} {noun}{}", count(number), if number == 1 { "" } else { "s" })
}

/// `3.2 ms`, `340 ms`, `1.53 s`, `41.2 s`
pub fn time(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        ..0.01 => format!("{:.1} ms", seconds * 1e3),
        ..1.0 => format!("{:.0} ms", seconds * 1e3),
        ..10.0 => format!("{seconds:.2} s"),
        _ => format!("{seconds:.1} s"),
    }
}

/// `33,000/s`
pub fn rate(number: usize, duration: Duration) -> String {
    let milliseconds = usize::try_from(duration.as_millis()).unwrap_or(usize::MAX).max(1);
    let exact = number.saturating_mul(1000) / milliseconds;
    format!("{}/s", count(if exact > 1000 { exact / 100 * 100 } else { exact }))
}

/// A document as lines: one per field, and one per element of an array of subdocuments.
fn lines(document: &Document) -> Vec<String> {
    let mut out = Vec::new();
    for (name, value) in document {
        match value {
            Bson::Array(elements) if elements.iter().any(|element| matches!(element, Bson::Document(_))) => {
                out.push(format!("{name}: ["));
                out.extend(elements.iter().map(|element| format!("  {},", inline(element))));
                out.push("]".to_owned());
            }
            value => out.push(format!("{name}: {}", inline(value))),
        }
    }
    out
}

/// A value on one line, as in the shell.
fn inline(value: &Bson) -> String {
    match value {
        Bson::Document(document) => {
            let fields: Vec<String> =
                document.iter().map(|(name, value)| format!("{name}: {}", inline(value))).collect();
            format!("{{ {} }}", fields.join(", "))
        }
        Bson::Array(elements) => format!("[{}]", elements.iter().map(inline).collect::<Vec<_>>().join(", ")),
        Bson::Int32(number) => number.to_string(),
        Bson::Int64(number) => number.to_string(),
        Bson::Double(number) => number.to_string(),
        other => other.to_string(),
    }
}

/// Two states of a document side by side; lines that differ are marked and coloured.
pub fn side_by_side(left: &str, before: &Document, right: &str, after: &Document) {
    let (before, after) = (lines(before), lines(after));
    let mut out = dim(&format!("  {}   {right}", pad(left)));
    out.push('\n');
    for place in 0..before.len().max(after.len()) {
        let (old, new) = (before.get(place).map_or("", String::as_str), after.get(place).map_or("", String::as_str));
        let (old, new) = (pad(&shorten(old)), shorten(new));
        // Marked like `diff -y`, for output without colours.
        let (old, mark, new) = if old.trim_end() == new { (old, " ", new) } else { (red(&old), "|", green(&new)) };
        writeln!(out, "  {old} {mark} {new}").expect("a string takes text");
    }
    print!("{out}");
}

fn pad(text: &str) -> String {
    format!("{text:COLUMN$}")
}

fn shorten(text: &str) -> String {
    if text.chars().count() <= COLUMN {
        return text.to_owned();
    }
    text.chars().take(COLUMN - 1).chain(['…']).collect()
}
