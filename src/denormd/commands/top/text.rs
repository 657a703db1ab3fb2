//! Text that fits into cells and lines. Pure.

use ratatui::text::Span;

use crate::commands::terminal::wrapped;

/// The columns that a text takes.
pub(super) fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// The text, cut with `…` if it is wider than `columns`.
pub(super) fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let mut out = text.to_owned();
    while !out.is_empty() && width(&out) + 1 > columns {
        out.pop();
    }
    if columns > 0 {
        out.push('…');
    }
    out
}

/// The text in exactly `columns`: cut, or filled with spaces.
pub(super) fn cell(text: &str, columns: usize, to_the_right: bool) -> String {
    let text = cut(text, columns);
    let space = " ".repeat(columns.saturating_sub(width(&text)));
    if to_the_right { format!("{space}{text}") } else { format!("{text}{space}") }
}

/// The lines of a text, wrapped to `columns`; lines that cannot be wrapped are cut.
pub(super) fn lines(text: &str, columns: usize) -> Vec<String> {
    let text = wrapped(text, columns.max(20));
    text.lines().map(|line| cut(line, columns)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_have_their_width_whatever_is_in_them() {
        assert_eq!(cell("abc", 5, false), "abc  ");
        assert_eq!(cell("abc", 5, true), "  abc");
        assert_eq!(cell("abcdef", 5, false), "abcd…");
        assert_eq!(cell("名前の規則", 5, false), "名前…", "wide characters take two columns");
        assert_eq!(cell("名前の規則", 4, false), "名… ");
        assert_eq!(cell("abc", 0, false), "");
    }
}
