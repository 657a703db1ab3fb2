//! Dates in UTC. Time zones, and the calendars of weeks, are the server's.

use bson::Bson;

use super::{Args, Result, Value, is_nullish, needs_server, refused};

const DAY: i64 = 86_400_000;
/// Distance from 1970, in milliseconds, from which on dates are left to the server: three million years.
const FAR: u64 = 100_000_000_000_000_000;
/// Largest `binSize`; larger ones are left to the server.
const LARGE: i64 = 1_000_000;

/// A moment, taken apart.
struct Parts {
    year: i64,
    month: i64,
    day: i64,
    day_of_year: i64,
    day_of_week: i64,
    millis: i64,
}

/// Days since 1970 to year, month and day, in the proleptic Gregorian calendar
/// (<https://howardhinnant.github.io/date_algorithms.html#civil_from_days>).
fn parts(millis: i64) -> Parts {
    let days = millis.div_euclid(DAY);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_from_march + 2) / 153;
    let day = day_from_march - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    // January and February come after the days from March on, the other months before.
    let day_of_year = if month <= 2 { day_from_march - 305 } else { day_from_march + 60 + i64::from(leap) };
    Parts { year, month, day, day_of_year, day_of_week: (days + 4).rem_euclid(7) + 1, millis: millis.rem_euclid(DAY) }
}

/// The moment that a value stands for.
fn moment(args: &Args<'_>, value: Option<&Bson>) -> Result<i64> {
    match value {
        Some(Bson::DateTime(time)) if time.timestamp_millis().unsigned_abs() > FAR => {
            needs_server("a date millions of years away")
        }
        Some(Bson::DateTime(time)) => Ok(time.timestamp_millis()),
        Some(Bson::Timestamp(time)) => Ok(i64::from(time.time) * 1000),
        // MongoDB 6.0 reads the seconds as a signed number.
        Some(Bson::ObjectId(id)) if id.bytes()[0] < 0x80 => Ok(id.timestamp().timestamp_millis()),
        Some(Bson::ObjectId(_)) => needs_server("the date of an ObjectId after 2038"),
        value => args.wrong("a date", value),
    }
}

pub(super) fn part(args: &Args<'_>) -> Result<Value> {
    let value = match args.argument {
        Bson::Document(doc) if doc.keys().next().is_some_and(|name| !name.starts_with('$')) => {
            args.of(args.named(&["date"])?, "date")?
        }
        _ => args.get(0)?,
    };
    if is_nullish(value.as_ref()) {
        return Ok(Some(Bson::Null));
    }
    let Parts { year, month, day, day_of_year, day_of_week, millis } = parts(moment(args, value.as_ref())?);
    let part = match args.name.as_str() {
        "$year" => year,
        "$month" => month,
        "$dayOfMonth" => day,
        "$dayOfYear" => day_of_year,
        "$dayOfWeek" => day_of_week,
        "$hour" => millis / 3_600_000,
        "$minute" => millis / 60_000 % 60,
        "$second" => millis / 1000 % 60,
        _ => millis % 1000,
    };
    Ok(Some(i32::try_from(part).map_or(Bson::Int64(part), Bson::Int32)))
}

/// `2018-03-27T16:58:51.538Z`
pub(super) fn iso(millis: i64) -> Result<String> {
    format(millis, "%Y-%m-%dT%H:%M:%S.%LZ")
}

fn format(millis: i64, format: &str) -> Result<String> {
    let parts = parts(millis);
    if !(0..=9999).contains(&parts.year) {
        return needs_server("a date before the year 0 or after 9999 as text");
    }
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let millis = parts.millis;
        let (value, width) = match rest.next() {
            Some('Y') => (parts.year, 4),
            Some('m') => (parts.month, 2),
            Some('d') => (parts.day, 2),
            Some('j') => (parts.day_of_year, 3),
            Some('H') => (millis / 3_600_000, 2),
            Some('M') => (millis / 60_000 % 60, 2),
            Some('S') => (millis / 1000 % 60, 2),
            Some('L') => (millis % 1000, 3),
            Some('%') => {
                out.push('%');
                continue;
            }
            Some(other) => return needs_server(format!("`%{other}` in a date's format")),
            None => return refused("a date's format ends with `%`"),
        };
        out.push_str(&format!("{value:0width$}"));
    }
    Ok(out)
}

pub(super) fn to_string(args: &Args<'_>) -> Result<Value> {
    let doc = args.named(&["date", "format", "onNull"])?;
    args.required(doc, "date")?;
    let pattern = match doc.get("format") {
        None => "%Y-%m-%dT%H:%M:%S.%LZ".to_owned(),
        Some(_) => match args.of(doc, "format")? {
            value if is_nullish(value.as_ref()) => return Ok(Some(Bson::Null)),
            Some(Bson::String(pattern)) => pattern,
            value => return args.wrong("a string as `format`", value.as_ref()),
        },
    };
    match args.of(doc, "date")? {
        value if is_nullish(value.as_ref()) => match doc.get("onNull") {
            Some(otherwise) => args.scope.evaluate(otherwise),
            None => Ok(Some(Bson::Null)),
        },
        value => Ok(Some(Bson::String(format(moment(args, value.as_ref())?, &pattern)?))),
    }
}

/// The days since 1970 of a month's first day; months are counted from January of the year 0.
fn days_of_month(months: i64) -> i64 {
    let (year, month) = (months.div_euclid(12), months.rem_euclid(12) + 1);
    // As in `parts`, years begin in March.
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// A unit of time: so many milliseconds, or so many months.
enum Unit {
    Millis(i64),
    Months(i64),
}

/// The unit of an operator's arguments; its time zone is UTC, or the server's matter.
fn unit(args: &Args<'_>, doc: &bson::Document) -> Result<Option<Unit>> {
    match args.of(doc, "timezone")? {
        None => {}
        Some(Bson::String(zone)) if ["UTC", "GMT"].contains(&zone.as_str()) => {}
        Some(_) => return needs_server(format!("`{}` in a time zone", args.name)),
    }
    let unit = match args.of(doc, "unit")? {
        value if is_nullish(value.as_ref()) => return Ok(None),
        Some(Bson::String(unit)) => unit,
        value => return args.wrong("a string as `unit`", value.as_ref()),
    };
    Ok(Some(match unit.as_str() {
        "millisecond" => Unit::Millis(1),
        "second" => Unit::Millis(1000),
        "minute" => Unit::Millis(60_000),
        "hour" => Unit::Millis(3_600_000),
        "day" => Unit::Millis(DAY),
        "week" => Unit::Millis(7 * DAY),
        "month" => Unit::Months(1),
        "quarter" => Unit::Months(3),
        "year" => Unit::Months(12),
        _ => return refused(format!("`{}` does not know this unit", args.name)),
    }))
}

/// A whole number among an operator's arguments.
fn whole(args: &Args<'_>, value: Option<&Bson>, name: &str) -> Result<i64> {
    let number = value.filter(|value| !matches!(value, Bson::Boolean(_))).and_then(denormd_model::key::whole_number);
    match number {
        Some(number) => Ok(number),
        None => args.wrong(&format!("an integer as `{name}`"), value),
    }
}

pub(super) fn truncate(args: &Args<'_>) -> Result<Value> {
    const DAYS: [&str; 7] = ["thu", "fri", "sat", "sun", "mon", "tue", "wed"];
    let doc = args.named(&["date", "unit", "binSize", "timezone", "startOfWeek"])?;
    args.required(doc, "date")?;
    args.required(doc, "unit")?;
    let (date, size) = (args.of(doc, "date")?, args.of(doc, "binSize")?);
    let unit = unit(args, doc)?;
    let missing_size = doc.contains_key("binSize") && is_nullish(size.as_ref());
    let Some(unit) = unit.filter(|_| !is_nullish(date.as_ref()) && !missing_size) else {
        return Ok(Some(Bson::Null));
    };
    let size = if size.is_none() { 1 } else { whole(args, size.as_ref(), "binSize")? };
    if size < 1 {
        return refused("`$dateTrunc` needs a `binSize` of at least 1");
    }
    if size > LARGE {
        return needs_server("`$dateTrunc` with a large `binSize`");
    }
    let millis = moment(args, date.as_ref())?;
    // Intervals are counted from the year 2000.
    let (epoch, months) = (days_of_month(24_000) * DAY, 24_000);
    let start = match unit {
        Unit::Millis(length) if length == 7 * DAY => {
            let first = match args.of(doc, "startOfWeek")? {
                None => "sun".to_owned(),
                Some(Bson::String(day)) => day.to_lowercase().chars().take(3).collect(),
                value => return args.wrong("a string as `startOfWeek`", value.as_ref()),
            };
            if size > 1 {
                return needs_server("`$dateTrunc` of several weeks");
            }
            let Some(first) = DAYS.iter().position(|day| **day == *first) else {
                return refused("`$dateTrunc` does not know this day");
            };
            let first = i64::try_from(first).unwrap_or_default() * DAY;
            millis - (millis - first).rem_euclid(7 * DAY)
        }
        Unit::Millis(length) => millis - (millis - epoch).rem_euclid(length * size),
        Unit::Months(length) => {
            let Parts { year, month, .. } = parts(millis);
            let month = year * 12 + month - 1;
            days_of_month(month - (month - months).rem_euclid(length * size)) * DAY
        }
    };
    Ok(Some(Bson::DateTime(bson::DateTime::from_millis(start))))
}

pub(super) fn add(args: &Args<'_>) -> Result<Value> {
    let doc = args.named(&["startDate", "unit", "amount", "timezone"])?;
    for name in ["startDate", "unit", "amount"] {
        args.required(doc, name)?;
    }
    let (date, amount) = (args.of(doc, "startDate")?, args.of(doc, "amount")?);
    let unit = unit(args, doc)?;
    let Some(unit) = unit.filter(|_| !is_nullish(date.as_ref()) && !is_nullish(amount.as_ref())) else {
        return Ok(Some(Bson::Null));
    };
    let (millis, amount) = (moment(args, date.as_ref())?, whole(args, amount.as_ref(), "amount")?);
    // MongoDB 6.0.5 loses a second: 1895-10-21T14:05:46.196Z and 33 hours are 1895-10-22T23:05:45.196Z.
    if millis < 0 && millis % 1000 != 0 {
        return needs_server("`$dateAdd` to a fraction of a second before 1970");
    }
    let sum = match unit {
        Unit::Millis(length) => amount.checked_mul(length).and_then(|length| millis.checked_add(length)),
        Unit::Months(length) => amount.checked_mul(length).filter(|months| months.abs() < 1_000_000).map(|months| {
            let Parts { year, month, day, millis, .. } = parts(millis);
            let month = year * 12 + month - 1 + months;
            let (first, next) = (days_of_month(month), days_of_month(month + 1));
            // The last day of a shorter month.
            (first + day - 1).min(next - 1) * DAY + millis
        }),
    };
    match sum {
        Some(sum) => Ok(Some(Bson::DateTime(bson::DateTime::from_millis(sum)))),
        None => refused("`$dateAdd` exceeds the range of dates"),
    }
}

pub(super) fn to_date(args: &Args<'_>) -> Result<Value> {
    let value = args.get(0)?;
    Ok(Some(match &value {
        value if is_nullish(value.as_ref()) => Bson::Null,
        Some(Bson::Int64(millis)) => Bson::DateTime(bson::DateTime::from_millis(*millis)),
        Some(Bson::DateTime(_) | Bson::Timestamp(_) | Bson::ObjectId(_)) => {
            Bson::DateTime(bson::DateTime::from_millis(moment(args, value.as_ref())?))
        }
        Some(Bson::Int32(_) | Bson::Boolean(_) | Bson::Document(_) | Bson::Array(_) | Bson::Binary(_)) => {
            return refused(format!("`$toDate` cannot convert {}", super::type_name(value.as_ref())));
        }
        _ => return needs_server(format!("`$toDate` of {}", super::type_name(value.as_ref()))),
    }))
}

#[cfg(test)]
mod tests {
    use bson::{Bson, DateTime, doc};

    use crate::EvalError;

    #[test]
    fn dates_at_the_end_of_time_are_left_to_the_server() {
        for millis in [i64::MIN, i64::MAX, 100_000_000_000_000_001] {
            for unit in ["millisecond", "week", "month", "year"] {
                let date = DateTime::from_millis(millis);
                for expression in [
                    doc! {"$dateTrunc": {"date": "$at", "unit": unit}},
                    doc! {"$dateAdd": {"startDate": "$at", "unit": unit, "amount": -1}},
                    doc! {"$year": "$at"},
                ] {
                    let value = crate::expression(&Bson::from(expression), &doc! {"at": date});
                    assert!(matches!(value, Err(EvalError::NeedsServer(_))), "{value:?}");
                }
            }
        }
        let far = doc! {"at": DateTime::from_millis(-100_000_000_000_000_000)};
        for unit in ["millisecond", "second", "day", "week", "month", "quarter", "year"] {
            for size in [1, 1_000_000] {
                let expression = doc! {"$dateTrunc": {"date": "$at", "unit": unit, "binSize": size}};
                let value = crate::expression(&Bson::from(expression), &far);
                assert!(value.is_ok() || unit == "week", "{unit}: {value:?}");
            }
        }
    }
}
