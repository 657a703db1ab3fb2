//! The table of rules: the columns that fit the terminal, and the rows that fit below each other. Pure.

use ratatui::text::Line;

use super::{
    model::Model,
    order::Concern,
    text::{cell, width},
    theme::Theme,
};
use crate::{
    commands::status::{pace, percentile, share, short_lag, since},
    status::{Rule, Status},
};

/// Columns between two cells.
const GAP: usize = 2;
/// Width of the mark of the selected rule.
const MARK: usize = 2;
/// The width that columns leave for the names of rules.
const NAME: usize = 16;

/// A column after the rule's name.
struct Column {
    head: &'static str,
    to_the_right: bool,
    /// Columns are shown in the order of their ranks, as long as they fit.
    rank: u8,
    /// The width that is kept for it, so that the table does not jump with each value.
    least: usize,
    text: fn(&Model, &Status, &Rule) -> String,
}

impl Column {
    const fn new(head: &'static str, rank: u8, least: usize, text: fn(&Model, &Status, &Rule) -> String) -> Self {
        Self { head, to_the_right: false, rank, least, text }
    }

    /// Numbers.
    const fn number(head: &'static str, rank: u8, least: usize, text: fn(&Model, &Status, &Rule) -> String) -> Self {
        Self { to_the_right: true, ..Self::new(head, rank, least, text) }
    }
}

const COLUMNS: [Column; 10] = [
    Column::new("STATE", 0, 11, state),
    Column::number("LAG", 1, 10, lag),
    Column::number("BEHIND SINCE", 7, 12, behind),
    Column::number("WRITES/S", 4, 8, rate),
    Column::number("P50", 8, 8, |_, _, rule| percentile(rule.propagation.p50)),
    Column::number("P99", 6, 8, |_, _, rule| percentile(rule.propagation.p99)),
    Column::new("BACKFILL", 2, 8, |_, _, rule| share(&rule.backfill)),
    // The details have the reason for any delay.
    Column::new("", 5, 0, |_, _, rule| pace(&rule.backfill).unwrap_or_default()),
    Column::number("DEAD", 3, 4, |_, status, rule| status.dead_letters_text(rule.dead_letters)),
    Column::new("COPIES", 9, 6, |_, _, rule| format!("{} -> {}", rule.source, rule.target)),
];

fn state(model: &Model, _: &Status, rule: &Rule) -> String {
    let state = rule.state.replace('_', " ");
    if model.unknown().is_some() { format!("was {state}") } else { state }
}

fn lag(model: &Model, _: &Status, rule: &Rule) -> String {
    match rule.lag_seconds {
        _ if model.unknown().is_some() => "?".to_owned(),
        None => "-".to_owned(),
        Some(lag) => short_lag(lag),
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

/// The columns that fit, with their texts and widths.
struct Layout {
    /// Places in [`COLUMNS`], and widths.
    shown: Vec<(usize, usize)>,
    /// The texts of each rule, in all columns.
    texts: Vec<Vec<String>>,
    /// Width of the rules' names.
    name: usize,
}

impl Layout {
    fn new(model: &Model, status: &Status, rules: &[&Rule], columns: usize) -> Self {
        let cells = |rule: &&Rule| COLUMNS.iter().map(|column| (column.text)(model, status, rule)).collect();
        let texts: Vec<Vec<String>> = rules.iter().map(cells).collect();
        // The widths are those of all rules, so that they stay while the user scrolls.
        let widest = |at: usize| texts.iter().filter_map(|row| row.get(at)).map(|text| width(text)).max();
        let longest = rules.iter().map(|rule| width(&rule.name)).max().unwrap_or_default().max(4);
        let mut ranked: Vec<(usize, &Column)> = COLUMNS.iter().enumerate().collect();
        ranked.sort_by_key(|(_, column)| column.rank);
        let (mut shown, mut free) = (Vec::new(), columns.saturating_sub(MARK + longest.min(NAME)));
        for (at, column) in ranked {
            let broad = widest(at).unwrap_or_default().max(width(column.head)).max(column.least);
            if broad > 0 && broad + GAP <= free {
                shown.push((at, broad));
                free -= broad + GAP;
            }
        }
        shown.sort_unstable();
        Self { shown, texts, name: longest.min(longest.min(NAME) + free) }
    }

    fn line(&self, mark: &str, first: &str, texts: impl Fn(usize) -> String, columns: usize) -> String {
        let mut line = format!("{mark}{}", cell(first, self.name, false));
        for (at, width) in &self.shown {
            line.push_str(&" ".repeat(GAP));
            line.push_str(&cell(&texts(*at), *width, COLUMNS[*at].to_the_right));
        }
        cell(&line, columns, false)
    }
}

/// The table in at most `height` lines: its head, and the rows around the selected rule.
pub(super) fn table(model: &Model, status: &Status, columns: usize, height: usize) -> Vec<Line<'static>> {
    let rules = model.rules();
    if rules.is_empty() || height < 2 {
        return Vec::new();
    }
    let layout = Layout::new(model, status, &rules, columns);
    let head = layout.line("  ", "RULE", |at| COLUMNS[at].head.to_owned(), columns);
    let mut out = vec![Line::styled(head, Theme::heading())];
    let (selected, room) = (model.selected(), height - 1);
    let first = selected.saturating_sub(room / 2).min(rules.len().saturating_sub(room));
    for (at, rule) in rules.iter().enumerate().skip(first).take(room) {
        let mark = if at == selected { "> " } else { "  " };
        let style = if model.unknown().is_some() { Theme::soft() } else { model.theme.row(Concern::of(rule)) };
        let style = if at == selected { style.patch(Theme::selected()) } else { style };
        let row = layout.line(mark, &rule.name, |column| layout.texts[at][column].clone(), columns);
        out.push(Line::styled(row, style));
    }
    let below = rules.len().saturating_sub(first + room);
    if let Some(last) = out.last_mut().filter(|_| room > 2 && below > 0) {
        let text = format!("  … and {} more of {} rules (arrows, PageDown)", below + 1, rules.len());
        *last = Line::styled(text, Theme::soft());
    }
    out
}
