//! Formats text for a terminal: wrapped lines and a few coloured words. Output to a file or a pipe is unchanged.

use std::{env, io::IsTerminal};

/// Maximum width of a line, unless the terminal is narrower.
const WIDTH: usize = 80;
/// Minimum width for wrapping.
const NARROW: usize = 40;

/// True if a stream may contain colours: a terminal, unless NO_COLOR is set (<https://no-color.org>) or it is a dumb
/// one.
#[must_use]
pub fn has_colour(stream: &impl IsTerminal) -> bool {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    stream.is_terminal() && set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb")
}

/// Formats text for standard output, depending on whether that is a terminal.
#[must_use]
pub fn fitted(text: &str) -> String {
    let out = std::io::stdout();
    if !out.is_terminal() {
        return text.to_owned();
    }
    let columns = env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).unwrap_or(WIDTH);
    let text = wrapped(text, columns.clamp(NARROW, WIDTH));
    if has_colour(&out) { coloured(&text) } else { text }
}

/// Wraps long lines, aligned with the start of their text. Commands and excerpts stay whole, because users copy them.
pub(super) fn wrapped(text: &str, width: usize) -> String {
    let mut out = String::new();
    for line in text.split_inclusive('\n') {
        let (line, end) = line.strip_suffix('\n').map_or((line, ""), |line| (line, "\n"));
        let begins = line.trim_start();
        let copied = begins.starts_with("db.") || begins.contains(" | ") || !begins.contains(' ');
        if copied || line.chars().count() <= width {
            out.push_str(line);
        } else {
            wrap(line, width, &mut out);
        }
        out.push_str(end);
    }
    out
}

fn wrap(line: &str, width: usize, out: &mut String) {
    let indent = " ".repeat(text_begins(line).min(width / 2));
    let mut length = 0;
    for (nth, word) in line.split(' ').enumerate() {
        let word_length = word.chars().count();
        if nth > 0 && length > indent.len() && length + 1 + word_length > width {
            out.push('\n');
            out.push_str(&indent);
            length = indent.len();
        } else if nth > 0 {
            out.push(' ');
            length += 1;
        }
        out.push_str(word);
        length += word_length;
    }
}

/// The column where the text of a line starts: after its labels, which end with two or more spaces (in a table, in the
/// last column), or after its number.
fn text_begins(line: &str) -> usize {
    let begins = line.len() - line.trim_start().len();
    let rest = &line[begins..];
    let after_label = rest.rfind("  ").map(|at| at + 2);
    let after_number = rest.find(". ").filter(|at| rest[..*at].bytes().all(|b| b.is_ascii_digit())).map(|at| at + 2);
    begins + after_label.or(after_number).unwrap_or(2)
}

fn coloured(text: &str) -> String {
    let colour = |line: &str| {
        let numbered = line.split_once(". ").is_some_and(|(number, _)| number.bytes().all(|b| b.is_ascii_digit()));
        if line == "ready" {
            Some("32")
        } else if line.starts_with("!! ") || line.ends_with("<- differs") || line.ends_with(", NOT repaired") {
            Some("31")
        } else if line.starts_with("warning:")
            || line.starts_with("the rules can run, but")
            || line.starts_with(" * ")
            || line.starts_with("  ! ")
        {
            Some("33")
        } else if numbered && line.starts_with(|c: char| c.is_ascii_digit()) {
            Some("31")
        } else {
            None
        }
    };
    let mut out = String::new();
    for line in text.split_inclusive('\n') {
        let (line, end) = line.strip_suffix('\n').map_or((line, ""), |line| (line, "\n"));
        match colour(line) {
            Some(code) => out.push_str(&format!("\u{1b}[{code}m{line}\u{1b}[0m{end}")),
            None => out.push_str(&format!("{line}{end}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_go_on_where_their_text_begins() {
        let text = "rule: a -> b\n  references  of type int: 90 of 95 resolve (94%), from sampled targets of the collection\n\
                    1. rule host: `shop.logs` has no index on host: each change would read the whole collection\n\
                    db.getSiblingDB(\"shop\").getCollection(\"logs\").createIndex({ \"host\": 1 }, { collation: { locale: \"simple\" } })\n";
        let expected = "rule: a -> b\n  references  of type int: 90 of 95 resolve (94%), from sampled targets of the\n              \
                        collection\n\
                        1. rule host: `shop.logs` has no index on host: each change would read the whole\n   collection\n\
                        db.getSiblingDB(\"shop\").getCollection(\"logs\").createIndex({ \"host\": 1 }, { collation: { locale: \"simple\" } })\n";
        assert_eq!(wrapped(text, 80), expected);
        assert!(wrapped(text, 80).lines().filter(|line| !line.starts_with("db.")).all(|line| line.len() <= 80));
    }

    #[test]
    fn tables_go_on_in_their_last_column() {
        let row = format!("  1.2 s ago  160 times  airline, set aside  {}\n", "word ".repeat(12).trim_end());
        let expected = format!(
            "  1.2 s ago  160 times  airline, set aside  {}\n{}{}\n",
            "word ".repeat(7).trim_end(),
            " ".repeat(40),
            "word ".repeat(5).trim_end()
        );
        assert_eq!(wrapped(&row, 80), expected);
    }

    #[test]
    fn a_few_lines_have_a_colour() {
        for (line, code) in [
            ("!! no_primary, for 7 s: x", "31"),
            (" * paused, for 7 s: x", "33"),
            ("      stored   1   <- differs", "31"),
            ("names 1 name: value: x, NOT repaired", "31"),
            ("  ! the rule: it is paused", "33"),
        ] {
            assert_eq!(coloured(line), format!("\u{1b}[{code}m{line}\u{1b}[0m"));
        }
        assert_eq!(coloured("ready\n"), "\u{1b}[32mready\u{1b}[0m\n");
        assert_eq!(coloured("1. rule x\n   hint\n"), "\u{1b}[31m1. rule x\u{1b}[0m\n   hint\n");
    }
}
