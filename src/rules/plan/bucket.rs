//! Intervals of time as keys: the start of the interval that a date of the source falls into, by the server's
//! `$dateTrunc`.
//!
//! The sources of an interval are found by a range of dates, which an index serves. The range may be wider than the
//! interval, and the key of each source decides. It has to be wider in a time zone whose clock goes back around
//! midnight: then one day surrounds an hour of the other, and `$dateTrunc` names the second of two midnights
//! (America/Havana, Canada/Newfoundland, Antarctica/Casey; found by trying all zones on MongoDB 6.0.5).

use bson::{Bson, DateTime, Document, doc};

/// An hour in milliseconds.
const HOUR: i64 = 3_600_000;
/// The most by which a clock was set back around a midnight since 1965, in milliseconds.
const SET_BACK: i64 = 3 * HOUR;
/// The most by which `$dateTrunc` can name a later moment than the date, in milliseconds.
const AHEAD: i64 = 25 * HOUR;

/// An interval of time, by the arguments of `$dateTrunc` without `date`.
#[derive(Debug, Clone, PartialEq)]
pub struct Bucket {
    /// `unit`, and possibly `binSize`, `timezone` and `startOfWeek`.
    pub arguments: Document,
}

impl Bucket {
    /// The expression of the start of the interval that contains a date.
    #[must_use]
    pub fn start_of(&self, date: impl Into<Bson>) -> Document {
        let mut arguments = doc! {"date": date.into()};
        arguments.extend(self.arguments.clone());
        doc! {"$dateTrunc": arguments}
    }

    /// The same for a field that may have a value of any type: null for a value that is no date.
    #[must_use]
    pub fn key_of(&self, field: &str) -> Document {
        doc! {"$cond": [{"$eq": [{"$type": field}, "date"]}, self.start_of(field), null]}
    }

    /// Conditions for the dates at `path` that may be in the interval with this start.
    #[must_use]
    pub fn range(&self, path: &str, start: &Bson) -> Vec<Document> {
        let Bson::DateTime(date) = start else { return vec![doc! {path: {"$in": []}}] };
        let earliest = DateTime::from_millis(date.timestamp_millis().saturating_sub(AHEAD + SET_BACK));
        let margin = if self.moves() { SET_BACK } else { 0 };
        let before = |millis: i64| doc! {"$subtract": [start.clone(), millis]};
        let mut end = doc! {
            "startDate": start.clone(), "unit": self.arguments.get("unit").cloned().unwrap_or(Bson::Null),
            "amount": self.arguments.get("binSize").cloned().unwrap_or(Bson::Int32(1)),
        };
        end.extend(self.arguments.get("timezone").map(|zone| ("timezone".to_owned(), zone.clone())));
        let (mut from, mut end) = (start.clone(), Bson::from(doc! {"$dateAdd": end}));
        if margin > 0 {
            // The moment before the start belongs to the same interval only where the clock is set back.
            let is_ahead = doc! {"$eq": [self.start_of(before(1)), start.clone()]};
            from = doc! {"$cond": [is_ahead, before(AHEAD), before(margin)]}.into();
            end = doc! {"$add": [end, margin]}.into();
        }
        let field = format!("${path}");
        // The first condition is for an index that holds arrays: the server looks up no expression there.
        vec![
            doc! {path: {"$gte": earliest}},
            doc! {"$expr": {"$gte": [&field, from]}},
            doc! {"$expr": {"$lt": [&field, end]}},
        ]
    }

    /// True if the clock of its time zone may be set back, and an interval depends on that: it is a day or longer.
    fn moves(&self) -> bool {
        let text = |name: &str| self.arguments.get_str(name).unwrap_or_default();
        let is_long = ["day", "week", "month", "quarter", "year"].contains(&text("unit"));
        let zone = text("timezone");
        is_long && !["", "UTC", "GMT", "Z", "Etc/UTC"].contains(&zone) && !zone.starts_with(['+', '-'])
    }
}
