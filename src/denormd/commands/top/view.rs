//! The frame: the model in, the cells of the terminal out. Pure.

use ratatui::{
    Frame,
    layout::Rect,
    style::Style,
    text::{Line, Span},
    widgets::Paragraph,
};

use super::{
    model::{Model, Page, Unknown, is_old},
    rule::{cause, problem},
    table::table,
    text::{cell, cut, lines, width},
    theme::Theme,
};
use crate::{
    commands::status::{as_of, lasted, led, percentile, role, short_lag, since, unknown},
    status::{InstanceReport, Status},
};
use denormd_model::text::duration;

/// Width of a figure with its label.
const FIGURE: usize = 26;
/// The same for figures that were, while nothing is known.
const PAST_FIGURE: usize = 30;
/// Lines that causes leave for the table.
const TABLE: usize = 6;

/// The keys, for the help.
const KEYS: [(&str, &str); 8] = [
    ("q, Esc, Ctrl-C", "quit; Esc leaves the details and this page first"),
    ("up, down, k, j", "select a rule"),
    ("PageUp, PageDown", "select a rule further away; scroll the details"),
    ("Home, End, g, G", "select the first or the last rule"),
    ("Enter, d", "show or leave the details of the rule: causes, what to do, errors"),
    ("s", "change the order: problems first, largest lag first, by name, as in the config"),
    ("?", "show or leave this page"),
    ("was …, ?", "last known, and not known: the daemon does not answer now"),
];

/// Draws the model.
pub fn draw(frame: &mut Frame<'_>, model: &Model) {
    let area = frame.area();
    let (columns, height) = (usize::from(area.width), usize::from(area.height));
    let mut out = head(model, columns);
    let room = height.saturating_sub(out.len() + 1);
    out.extend(match (model.page, model.status()) {
        (Page::Help, _) => help(columns),
        (_, None) => Vec::new(),
        (Page::Rules, Some(status)) => rules(model, status, columns, room),
        (Page::Details(from), Some(status)) => selected(model, status, columns, (from, room)),
    });
    out.truncate(height.saturating_sub(1));
    frame.render_widget(Paragraph::new(out), area);
    let last = Rect { y: area.bottom().saturating_sub(1), height: area.height.min(1), ..area };
    frame.render_widget(Paragraph::new(footer(model, columns)), last);
}

fn styled(text: Vec<String>, style: Style) -> impl Iterator<Item = Line<'static>> {
    text.into_iter().map(move |line| Line::styled(line, style))
}

/// Title, headline and figures.
fn head(model: &Model, columns: usize) -> Vec<Line<'static>> {
    let mut out = vec![title(model, columns)];
    let gone = model.unknown();
    if let Some(Unknown { since, reason, .. }) = &gone {
        let lasts = lasted(*since, model.now);
        let text = format!("Unknown since {}, for {lasts}: {reason}. Trying again.", clock(*since));
        out.extend(
            lines(&text, columns)
                .into_iter()
                .map(|line| Line::styled(cell(&line, columns, false), model.theme.unknown())),
        );
    }
    let Some(status) = model.status() else {
        let hint = gone.and_then(|gone| gone.hint).map(|hint| lines(&hint, columns)).unwrap_or_default();
        out.extend(styled(hint, Style::new()));
        return out;
    };
    let soft = Theme::soft();
    let summary = match gone {
        None => (status.summary.clone(), model.theme.headline(status.level)),
        Some(_) => (format!("Last known: {}", status.summary), soft),
    };
    out.extend(styled(lines(&summary.0, columns), summary.1));
    if matches!(model.page, Page::Details(_)) {
        return out;
    }
    let mut said = Vec::new();
    if !status.rules.is_empty() {
        let risk = if gone.is_some() { "Not known now. Last known: " } else { "" };
        said.push(format!("Will data be lost? {risk}{}", status.risk));
    }
    said.extend(match &status.current {
        Some(current) => Some(as_of(current)),
        None => unknown(status).map(str::to_owned),
    });
    said.extend(status.insecure.iter().map(|option| {
        format!("!! INSECURE: {option} is set: the server's certificate is not verified; give tlsCAFile instead")
    }));
    let style = if gone.is_some() { soft } else { Style::new() };
    out.extend(styled(said.iter().flat_map(|text| lines(text, columns)).collect(), style));
    out.push(Line::default());
    out.extend(grid(model, &figures(model, status), columns));
    out.push(Line::raw(cut(&instances(model, status), columns)));
    out
}

/// `denormd shop, leader, up 3 h 4 min`, and the time.
fn title(model: &Model, columns: usize) -> Line<'static> {
    let name = match model.status() {
        None => format!("denormd at {}", model.address),
        Some(status) => {
            let was = if model.unknown().is_some() { "was " } else { "" };
            let led = status.partitions.as_ref().map(led).unwrap_or_default();
            let up = since(status, status.started);
            format!("denormd {}: {was}{}{led}, {}, up {up}", status.name, role(&status.leadership), status.version)
        }
    };
    let time = clock(model.now);
    let name = cell(&name, columns.saturating_sub(width(&time) + 2), false);
    Line::styled(cut(&format!("{name}  {time}"), columns), Theme::heading())
}

/// The figures of the deployment with their labels.
fn figures(model: &Model, status: &Status) -> Vec<(&'static str, String)> {
    let old = is_old(status);
    let rate = |rate: f64| if old { "not known".to_owned() } else { format!("{rate:.1}") };
    let lag = status.lag_seconds.map_or_else(|| "not known".to_owned(), short_lag);
    let figures = vec![
        ("Lag", lag),
        ("Events/s", rate(status.events_per_second)),
        ("Writes/s", rate(status.targets_per_second)),
        ("Queue", format!("{} of {}", status.queue_depth, status.queue_capacity)),
        ("Dead letters", status.dead_letters_text(status.dead_letters)),
        ("Restart replays", duration(status.checkpoint_age_seconds)),
        ("P50", percentile(status.propagation.p50)),
        ("P99", percentile(status.propagation.p99)),
    ];
    let was = |(label, value)| (label, format!("was {value}"));
    if model.unknown().is_some() { figures.into_iter().map(was).collect() } else { figures }
}

/// Figures beside and below each other.
fn grid(model: &Model, figures: &[(&'static str, String)], columns: usize) -> Vec<Line<'static>> {
    let least = if model.unknown().is_some() { PAST_FIGURE } else { FIGURE };
    let beside = (columns / least).clamp(1, figures.len().max(1));
    let broad = (columns / beside).max(least);
    let style = if model.unknown().is_some() { Theme::soft() } else { Theme::heading() };
    let row = |figures: &[(&'static str, String)]| {
        let spans = figures.iter().flat_map(|(label, value)| {
            let value = format!("{}  ", cell(value, broad.saturating_sub(label.len() + 3), false));
            [Span::styled(format!("{label} "), Theme::soft()), Span::styled(value, style)]
        });
        Line::from(spans.collect::<Vec<_>>())
    };
    figures.chunks(beside).map(row).collect()
}

fn instances(model: &Model, status: &Status) -> String {
    let were = if model.unknown().is_some() { " were" } else { "" };
    let instance = |instance: &InstanceReport| {
        let this = if instance.this { " (this one)" } else { "" };
        let other = if instance.other_rules { " with other rules" } else { "" };
        format!("{} {}{other}{this}", instance.name, instance.role)
    };
    match status.instances.as_slice() {
        [] => "Instances: none are known yet".to_owned(),
        all => format!("Instances{were}: {}", all.iter().map(instance).collect::<Vec<_>>().join(", ")),
    }
}

/// The causes, the table, and recent errors where there is room.
fn rules(model: &Model, status: &Status, columns: usize, room: usize) -> Vec<Line<'static>> {
    let mut out = vec![Line::default()];
    let budget = room.saturating_sub(TABLE.min(status.rules.len() + 2));
    for (nth, found) in status.causes.iter().enumerate() {
        let rest = &status.causes[nth..];
        let text = cause(status, found, None, columns);
        // Where they do not fit, each has one line, and the last line has the names of all that are left.
        let text = if out.len() + text.len() + rest.len() - 1 <= budget {
            text
        } else if out.len() + rest.len() <= budget || rest.len() == 1 {
            first(text, columns)
        } else {
            let names: Vec<&str> = rest.iter().map(|cause| cause.cause.as_str()).collect();
            let mark = if found.severe { "!!" } else { " *" };
            out.push(Line::styled(
                cut(&format!("{mark} {}", names.join(", ")), columns),
                model.theme.cause(found.severe),
            ));
            break;
        };
        out.extend(cause_lines(model, text, found.severe));
    }
    if out.len() > 1 {
        out.push(Line::default());
    }
    out.extend(table(model, status, columns, room.saturating_sub(out.len())));
    let free = room.saturating_sub(out.len());
    if free > 2 && !status.errors.is_empty() {
        out.extend([Line::default(), Line::styled("recent errors", Theme::heading())]);
        let errors = status.errors.iter().take(free - 2).map(|error| cut(&problem(status, error), columns));
        out.extend(styled(errors.collect(), Style::new()));
    }
    out
}

/// The first of these lines. `…` shows that more follow.
fn first(text: Vec<String>, columns: usize) -> Vec<String> {
    let more = if text.len() > 1 { "…" } else { "" };
    text.into_iter().take(1).map(|line| cut(&format!("{line}{more}"), columns)).collect()
}

/// A cause: its first line has the colour.
fn cause_lines(model: &Model, text: Vec<String>, is_severe: bool) -> Vec<Line<'static>> {
    let mut out: Vec<Line<'static>> = text.into_iter().map(Line::raw).collect();
    if let Some(first) = out.first_mut() {
        *first = std::mem::take(first).style(model.theme.cause(is_severe));
    }
    out
}

/// The details of the selected rule, from a line on.
fn selected(model: &Model, status: &Status, columns: usize, (from, room): (usize, usize)) -> Vec<Line<'static>> {
    let rules = model.rules();
    let Some(rule) = rules.get(model.selected()) else { return Vec::new() };
    let known = if model.unknown().is_some() { " (last known)" } else { "" };
    let heading = format!("rule {}{known}, {} of {}", rule.name, model.selected() + 1, rules.len());
    let mut out = vec![Line::default(), Line::styled(cut(&heading, columns), Theme::heading())];
    let text = model.details(status, rule, columns);
    let room = room.saturating_sub(out.len());
    let from = from.min(text.len().saturating_sub(room));
    let below = text.len().saturating_sub(from + room);
    out.extend(text.into_iter().skip(from).take(room).map(Line::raw));
    if let Some(last) = out.last_mut().filter(|_| below > 0) {
        *last = Line::styled(format!("   … {} more lines (PageDown)", below + 1), Theme::soft());
    }
    out
}

fn help(columns: usize) -> Vec<Line<'static>> {
    let mut out = vec![Line::default(), Line::styled("keys", Theme::heading())];
    let rows = KEYS.iter().flat_map(|(keys, does)| lines(&format!("   {keys:<16}  {does}"), columns));
    out.extend(rows.map(Line::raw));
    out
}

fn footer(model: &Model, columns: usize) -> Line<'static> {
    let text = match model.page {
        Page::Rules => format!("q quit  ? keys  arrows select  Enter details  s order: {}", model.sort.name()),
        Page::Details(_) => "q quit  ? keys  Esc back  arrows next rule  PageDown scroll".to_owned(),
        Page::Help => "q quit  Esc back".to_owned(),
    };
    Line::styled(cell(&text, columns, false), Theme::selected())
}

/// A time of day: `12:04:31 UTC`.
fn clock(millis: i64) -> String {
    let text = bson::DateTime::from_millis(millis).try_to_rfc3339_string().unwrap_or_default();
    format!("{} UTC", text.get(11..19).unwrap_or("an unknown time"))
}
