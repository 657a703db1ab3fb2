//! The table of rules: the columns that fit the terminal, and the rows that fit below each other. Pure.

use ratatui::text::{Line, Span};

use super::{
    model::Model,
    rule::Concern,
    text::{cell, width},
};
use crate::{
    commands::status::{pace, share, short, since},
    status::{Rule, Status},
};

/// Columns between two cells.
const GAP: usize = 2;
/// Smallest width of a rule's name.
const NAME: usize = 10;

/// A column after the rule's name.
struct Column {
    head: &'static str,
    to_the_right: bool,
    /// The width of the terminal from which it is shown.
    from: usize,
    text: fn(&Model, &Status, &Rule) -> String,
}

const COLUMNS: [Column; 10] = [
    Column { head: "STATE", to_the_right: false, from: 0, text: state },
    Column { head: "LAG", to_the_right: true, from: 0, text: lag },
    Column { head: "BEHIND SINCE", to_the_right: true, from: 110, text: behind },
    Column { head: "WRITES/S", to_the_right: true, from: 72, text: rate },
    Column { head: "P50", to_the_right: true, from: 120, text: |_, _, rule| percentile(rule.propagation.p50) },
    Column { head: "P99", to_the_right: true, from: 90, text: |_, _, rule| percentile(rule.propagation.p99) },
    Column { head: "BACKFILL", to_the_right: false, from: 0, text: |_, _, rule| share(&rule.backfill) },
    Column { head: "", to_the_right: false, from: 100, text: |_, _, rule| pace(&rule.backfill).unwrap_or_default() },
    Column { head: "DEAD", to_the_right: true, from: 0, text: |_, _, rule| rule.dead_letters.to_string() },
    Column {
        head: "COPIES",
        to_the_right: false,
        from: 130,
        text: |_, _, rule| format!("{} -> {}", rule.source, rule.target),
    },
];

fn state(model: &Model, _: &Status, rule: &Rule) -> String {
    let state = rule.state.replace('_', " ");
    if model.unknown().is_some() { format!("was {state}") } else { state }
}

fn lag(model: &Model, _: &Status, rule: &Rule) -> String {
    match rule.lag_seconds {
        _ if model.unknown().is_some() => "?".to_owned(),
        None => "-".to_owned(),
        Some(lag) if lag > 0.0 => short(lag),
        Some(_) => "0".to_owned(),
    }
}

fn behind(_: &Model, status: &Status, rule: &Rule) -> String {
    rule.behind_since.map_or_else(|| "-".to_owned(), |from| format!("{} ago", since(status, from)))
}

fn rate(model: &Model, _: &Status, rule: &Rule) -> String {
    match model.rate(&rule.name) {
        Some(rate) => format!("{rate:.1}"),
        None if model.unknown().is_some() => "?".to_owned(),
        None => "-".to_owned(),
    }
}

fn percentile(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "-".to_owned(), short)
}

/// The table in at most `height` lines: its head, and the rows around the selected rule.
pub(super) fn table(model: &Model, status: &Status, columns: usize, height: usize) -> Vec<Line<'static>> {
    let rules = model.rules();
    if rules.is_empty() || height < 2 {
        return Vec::new();
    }
    let shown: Vec<&Column> = COLUMNS.iter().filter(|column| columns >= column.from).collect();
    let cells = |rule: &Rule| shown.iter().map(|column| (column.text)(model, status, rule)).collect::<Vec<_>>();
    let texts: Vec<Vec<String>> = rules.iter().map(|rule| cells(rule)).collect();
    // The widths are those of all rules, so that they stay while the user scrolls.
    let widest =
        |at: usize| texts.iter().filter_map(|row| row.get(at)).map(|text| width(text)).max().unwrap_or_default();
    let widths: Vec<usize> = shown.iter().enumerate().map(|(at, column)| widest(at).max(width(column.head))).collect();
    let others: usize = widths.iter().filter(|width| **width > 0).map(|width| width + GAP).sum();
    let longest = rules.iter().map(|rule| width(&rule.name)).max().unwrap_or_default().max(4);
    let name = longest.min(columns.saturating_sub(others + 2)).max(NAME.min(longest));
    let row = |mark: &str, first: &str, texts: &[String]| {
        let mut line = format!("{mark}{}", cell(first, name, false));
        for ((text, column), width) in texts.iter().zip(&shown).zip(&widths).filter(|(_, width)| **width > 0) {
            line.push_str(&" ".repeat(GAP));
            line.push_str(&cell(text, *width, column.to_the_right));
        }
        cell(&line, columns, false)
    };
    let heads: Vec<String> = shown.iter().map(|column| column.head.to_owned()).collect();
    let mut out = vec![Line::styled(row("  ", "RULE", &heads), model.theme.heading())];
    let (selected, room) = (model.selected(), height - 1);
    let first = selected.saturating_sub(room / 2).min(rules.len().saturating_sub(room));
    for (at, rule) in rules.iter().enumerate().skip(first).take(room) {
        let mark = if at == selected { "> " } else { "  " };
        let style = if model.unknown().is_some() { model.theme.soft() } else { model.theme.row(Concern::of(rule)) };
        let style = if at == selected { style.patch(model.theme.selected()) } else { style };
        out.push(Line::from(Span::styled(row(mark, &rule.name, &texts[at]), style)));
    }
    if let Some(last) = out.last_mut().filter(|_| room > 2 && first + room < rules.len()) {
        *last = Line::styled(
            format!("  … and {} more of {} rules (arrows, PageDown)", rules.len() - (first + room - 1), rules.len()),
            model.theme.soft(),
        );
    }
    out
}
