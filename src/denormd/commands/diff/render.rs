//! The difference as text and as Markdown: the same lines, with other marks before them.

use denormd_rules::config::ChangedSetting;

use super::{Backfill, Change, Difference, Fate, Gain, KeyChange, Loss, Need, RuleChange};
use denormd_model::text::counted;

/// A line, or several that belong together.
enum Line {
    Headline(String),
    Heading(&'static str),
    /// An entry of a list, with its depth.
    Entry(usize, String),
    /// Commands for mongosh, or a part of one.
    Commands(Vec<String>),
    Note(&'static str),
}

/// The difference as text, or as Markdown.
pub(super) fn text(difference: &Difference, markdown: bool) -> String {
    let mut out = String::new();
    for line in lines(difference) {
        out.push_str(&if markdown { in_markdown(&line) } else { in_text(&line) });
    }
    out
}

fn in_text(line: &Line) -> String {
    match line {
        Line::Headline(text) => format!("{text}\n"),
        Line::Heading(text) | Line::Note(text) => format!("\n{text}\n"),
        Line::Entry(depth, text) => format!("{}{text}\n", "  ".repeat(depth + 1)),
        Line::Commands(commands) => format!("  {}\n", commands.join("\n  ")),
    }
}

fn in_markdown(line: &Line) -> String {
    match line {
        Line::Headline(text) => format!("### denormd: {text}\n"),
        Line::Heading(text) => format!("\n**{text}**\n\n"),
        Line::Entry(depth, text) => format!("{}- {text}\n", "  ".repeat(*depth)),
        Line::Commands(commands) => format!("```js\n{}\n```\n", commands.join("\n")),
        Line::Note(text) => format!("\n{text}\n"),
    }
}

/// Text of the config between backquotes, in which Markdown sees nothing but text.
pub(super) fn code(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or_default();
    let fence = "`".repeat(longest + 1);
    let space = if text.starts_with('`') || text.ends_with('`') { " " } else { "" };
    format!("{fence}{space}{text}{space}{fence}")
}

fn lines(difference: &Difference) -> Vec<Line> {
    let mut out = vec![Line::Headline(headline(difference))];
    let mut section = |heading: &'static str, lines: Vec<Line>| {
        if !lines.is_empty() {
            out.push(Line::Heading(heading));
            out.extend(lines);
        }
    };
    section("rules", difference.rules.iter().flat_map(rule).collect());
    section("backfills", difference.backfills.iter().map(backfill).collect());
    section(
        "needed first, unless it is there: `denormd plan --apply` runs these commands",
        commands(&difference.needs),
    );
    section(
        "no longer needed by these rules; denormd removes no index, and others may use it",
        commands(&difference.no_longer_needed),
    );
    let privileges = Some(difference.privileges.clone()).filter(|privileges| !privileges.is_empty());
    section(
        "further privileges: `denormd role` prints the whole role",
        privileges.map(Line::Commands).into_iter().collect(),
    );
    section(
        "settings",
        difference.settings.iter().map(|setting| Line::Entry(0, setting_change(setting, difference))).collect(),
    );
    out.extend(notes(difference).map(Line::Note));
    out
}

fn headline(difference: &Difference) -> String {
    let Difference { changed, rules, backfills, needs, settings, .. } = difference;
    if !changed {
        return "both configs mean the same".to_owned();
    }
    let kinds = [
        (Change::Added, "added"),
        (Change::Changed, "changed"),
        (Change::Renamed, "renamed"),
        (Change::Retired, "retired"),
    ];
    let kinds = kinds.map(|(kind, word)| (rules.iter().filter(|rule| rule.change == kind).count(), word));
    let kinds = kinds.into_iter().filter(|(number, _)| *number > 0);
    let kinds: Vec<String> =
        kinds
            .enumerate()
            .map(|(nth, (number, word))| {
                if nth == 0 { format!("{} {word}", counted(number as u64, "rule")) } else { format!("{number} {word}") }
            })
            .collect();
    let mut parts = vec![if kinds.is_empty() { "no rule changes".to_owned() } else { kinds.join(", ") }];
    for (number, noun) in
        [(backfills.len(), "backfill"), (needs.len(), "new command"), (settings.len(), "changed setting")]
    {
        if number > 0 {
            parts.push(counted(number as u64, noun));
        }
    }
    parts.join("; ")
}

fn rule(change: &RuleChange) -> Vec<Line> {
    let RuleChange { rule, source, target, shadow, .. } = change;
    let word = match change.change {
        Change::Added => "added",
        Change::Changed => "changed",
        Change::Renamed => "renamed",
        Change::Retired => "retired",
    };
    let name = change.was.as_ref().map_or_else(|| code(rule), |was| format!("{} to {}", code(was), code(rule)));
    let shadow = if *shadow { " (in shadow: writes nothing)" } else { "" };
    let mut out = vec![Line::Entry(0, format!("{word} {name}: {} to {}{shadow}", code(source), code(target)))];
    let keys = change.keys.iter().map(key_change);
    let owns = change.owns.iter().map(|Gain { path, from }| match from {
        Some(from) => format!("owns {}, which {} owned", code(path), code(from)),
        None => format!("owns {}", code(path)),
    });
    let retired = change.was.as_ref().unwrap_or(rule);
    let leaves = change.leaves.iter().map(|loss| leaves(loss, retired));
    out.extend(keys.chain(owns).chain(leaves).map(|text| Line::Entry(1, text)));
    out
}

fn key_change(KeyChange { key, old, new }: &KeyChange) -> String {
    match (old, new) {
        (None, None) => key.clone(),
        (Some(old), Some(new)) => format!("{}: {} becomes {}", code(key), code(old), code(new)),
        (None, Some(new)) => format!("{}: now {}", code(key), code(new)),
        (Some(old), None) => format!("{}: no longer {}", code(key), code(old)),
    }
}

fn leaves(Loss { collection, path, values }: &Loss, rule: &str) -> String {
    let path = format!("no longer owns {} of {}", code(path), code(collection));
    match values {
        Fate::Stay => format!("{path}: its values stay until {}", code(&format!("denormd prune {rule}"))),
        Fate::TakenOver { by } => format!("{path}: {} owns it, so {} leaves it alone", code(by), code("denormd prune")),
        Fate::LeftToTheApplication => {
            format!("{path}: its values stay, because a {} rule leaves them to the application", code("once"))
        }
        Fate::NotWritten => format!("{path}: it wrote nothing there"),
    }
}

fn backfill(Backfill { rule, automatic, writes, reason }: &Backfill) -> Line {
    let when = if *automatic {
        String::new()
    } else {
        format!(", and waits for {}", code(&format!("denormd backfill --rule {rule}")))
    };
    let shadow = if *writes { "" } else { ", and only compares" };
    Line::Entry(0, format!("{}: {reason}{when}{shadow}", code(rule)))
}

fn commands(needs: &[Need]) -> Vec<Line> {
    if needs.is_empty() {
        return Vec::new();
    }
    vec![Line::Commands(needs.iter().map(|need| need.command.clone()).collect())]
}

fn setting_change(changed: &ChangedSetting, difference: &Difference) -> String {
    let ChangedSetting { setting, old, new } = changed;
    let at_start = if difference.read_at_start.contains(setting) { ", from the next start of the daemon" } else { "" };
    // A password or a token differs.
    if old == new {
        return format!("{}: another value, which is hidden{at_start}", code(setting));
    }
    let change = KeyChange { key: setting.clone(), old: old.clone(), new: new.clone() };
    format!("{}{at_start}", key_change(&change))
}

fn notes(difference: &Difference) -> impl Iterator<Item = &'static str> {
    let renamed = difference.rules.iter().any(|rule| rule.change == Change::Renamed);
    let connection = difference.settings.iter().any(|setting| setting.setting == "mongodb.uri");
    let writes = difference.backfills.iter().any(|backfill| backfill.writes);
    [
        (
            difference.new_deployment,
            "The state is kept under `name` in `state.database`. Under another one the daemon knows none of these rules, and retired \
             fields have to be pruned with the old config.",
        ),
        (
            difference.restart,
            "A running daemon refuses this config until it is restarted: `name`, `state` and `lease` cannot change while it runs.",
        ),
        (connection, "If `mongodb.uri` leads to another cluster, every rule is new there."),
        (renamed, "A renamed rule is a new rule: the pause of the old name ends, and its dead letters are deleted."),
        (
            writes,
            "Before the first write of each of these rules, the daemon compares it with existing data. It blocks a rule that would \
             remove a value that denormd did not write, begin to delete documents or array elements, overwrite more than 1% of such \
             values, or remove a value from more than 1% of the targets that hold one. `denormd plan` with a server says what the rules would do.",
        ),
    ]
    .into_iter()
    .filter_map(|(holds, note)| holds.then_some(note))
}
