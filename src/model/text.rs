//! Counts, durations and values as people read them.

use std::time::Duration;

use bson::Bson;

/// A count with its noun: `1 rule`, `2 rules`.
#[must_use]
pub fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", plural(number))
}

/// The ending of the noun of a count.
#[must_use]
pub fn plural(number: u64) -> &'static str {
    if number == 1 { "" } else { "s" }
}

/// A duration in two units: `4.2 s`, `3 min 20 s`, `5 h 3 min`, `2 d 4 h`.
#[must_use]
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0);
    if seconds < 10.0 {
        return format!("{seconds:.1} s");
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and no age of the universe")]
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

/// A time span of the config, in its largest whole unit: `7 days`, `90 minutes`.
#[must_use]
pub fn span(span: Duration) -> String {
    match span.as_secs() {
        s if s % 86_400 == 0 => counted(s / 86_400, "day"),
        s if s % 3600 == 0 => counted(s / 3600, "hour"),
        s if s % 60 == 0 => counted(s / 60, "minute"),
        s => counted(s, "second"),
    }
}

/// A value as one types it: relaxed Extended JSON on one line.
#[must_use]
pub fn shown(value: &Bson) -> String {
    value.clone().into_relaxed_extjson().to_string()
}

/// Like [`shown`]; `nothing` if there is no value.
#[must_use]
pub fn shown_or_nothing(value: Option<&Bson>) -> String {
    value.map_or_else(|| "nothing".to_owned(), shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_has_the_plural_of_its_noun() {
        assert_eq!(counted(0, "rule"), "0 rules");
        assert_eq!(counted(1, "rule"), "1 rule");
    }

    #[test]
    fn durations_have_two_units() {
        let cases = [
            (0.0, "0.0 s"),
            (4.25, "4.2 s"),
            (59.0, "59 s"),
            (200.0, "3 min 20 s"),
            (18_180.0, "5 h 3 min"),
            (187_200.0, "2 d 4 h"),
        ];
        for (seconds, text) in cases {
            assert_eq!(duration(seconds), text);
        }
    }
}
