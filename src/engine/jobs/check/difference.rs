//! Describes the difference between a stored and an expected value, without showing either. Pure.

use bson::{Bson, RawBson};
use serde::Serialize;

use crate::reconcile::compare::Difference;
use denormd_model::{key::Key, shape::type_name_of};
use denormd_mongo::error::Result;

/// The kinds of difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// No value is stored where one is expected.
    Missing,
    /// A value is stored where none is expected.
    Surplus,
    /// The right value in another BSON type: 1 instead of 1.0.
    Type,
    /// An array of the wrong length.
    Length,
    /// An array of the right elements in another order.
    Order,
    /// Another value.
    Value,
    /// The reference is dangling, and `on_missing` should have removed the element or deleted the target.
    Dangling,
}

impl Kind {
    /// The name used in output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Surplus => "surplus",
            Self::Type => "type",
            Self::Length => "length",
            Self::Order => "order",
            Self::Value => "value",
            Self::Dangling => "dangling",
        }
    }
}

/// One path that differs.
#[derive(Debug, Clone, PartialEq)]
pub struct Differing {
    /// The path, with `$[]` for the element.
    pub path: String,
    /// Index of the element in the order of the target's references.
    pub element: Option<usize>,
    /// The kind of difference, for programs.
    pub kind: Kind,
    /// The difference in words, with types and lengths but without values.
    pub words: String,
    /// Expected and stored values, if requested. An inner None means that there is no value.
    pub values: Option<(Option<Bson>, Option<Bson>)>,
}

impl Differing {
    /// Describes a difference; keeps the values if `values` is true.
    pub fn of(difference: &Difference, values: bool) -> Result<Self> {
        let Difference { path, element, expected, stored, .. } = difference;
        let (kind, words) = describe(expected.as_ref(), stored.as_ref())?;
        let value = |field: &Option<RawBson>| match field {
            None | Some(RawBson::Undefined) => Ok(None),
            Some(value) => Bson::try_from(value.as_raw_bson_ref()).map(Some),
        };
        let values = if values { Some((value(expected)?, value(stored)?)) } else { None };
        Ok(Self { path: path.clone(), element: *element, kind, words, values })
    }
}

fn describe(expected: Option<&RawBson>, stored: Option<&RawBson>) -> Result<(Kind, String)> {
    Ok(match (expected, stored) {
        (Some(RawBson::Undefined), _) => (Kind::Dangling, "no source answers, and the rule removes it".to_owned()),
        (Some(expected), None) => (Kind::Missing, format!("nothing is stored, {} is expected", type_of(expected))),
        (None, Some(stored)) => (Kind::Surplus, format!("{} is stored, nothing is expected", type_of(stored))),
        (None, None) => (Kind::Value, "equal".to_owned()),
        (Some(expected), Some(stored)) => both(expected, stored)?,
    })
}

fn both(expected: &RawBson, stored: &RawBson) -> Result<(Kind, String)> {
    let (left, right) = (type_of(expected), type_of(stored));
    let expected_key = Key::one(Bson::try_from(expected.as_raw_bson_ref())?);
    let stored_key = Key::one(Bson::try_from(stored.as_raw_bson_ref())?);
    if expected_key == stored_key {
        let words = if left == right {
            format!("the right {left}, with parts of other types")
        } else {
            format!("the right value as {right}, {left} is expected")
        };
        return Ok((Kind::Type, words));
    }
    if let (RawBson::Array(expected), RawBson::Array(stored)) = (expected, stored) {
        let keys = |array: &bson::RawArray| {
            let keys: Result<Vec<Key>> = array.into_iter().map(|item| Ok(Key::one(Bson::try_from(item?)?))).collect();
            keys
        };
        let (mut expected, mut stored) = (keys(expected)?, keys(stored)?);
        if expected.len() != stored.len() {
            return Ok((
                Kind::Length,
                format!("{} elements are stored, {} are expected", stored.len(), expected.len()),
            ));
        }
        let differing = expected.iter().zip(&stored).filter(|(expected, stored)| expected != stored).count();
        expected.sort_unstable();
        stored.sort_unstable();
        return Ok(if expected == stored {
            (Kind::Order, format!("the right {} elements, in another order", stored.len()))
        } else {
            (Kind::Value, format!("{differing} of {} elements differ", stored.len()))
        });
    }
    let words =
        if left == right { format!("another {left}") } else { format!("{right} is stored, {left} is expected") };
    Ok((Kind::Value, words))
}

fn type_of(value: &RawBson) -> &'static str {
    type_name_of(value.element_type())
}

#[cfg(test)]
mod tests {
    use bson::bson;

    use super::*;

    fn described(expected: Option<Bson>, stored: Option<Bson>) -> (Kind, String) {
        let raw = |value: Option<Bson>| value.map(|value| RawBson::try_from(value).unwrap());
        describe(raw(expected).as_ref(), raw(stored).as_ref()).unwrap()
    }

    #[test]
    fn every_kind_has_its_words_and_no_value_is_among_them() {
        for (expected, stored, kind, words) in [
            (Some(bson!("secret")), None, Kind::Missing, "nothing is stored, string is expected"),
            (None, Some(bson!(null)), Kind::Surplus, "null is stored, nothing is expected"),
            (Some(bson!(1)), Some(bson!(1.0)), Kind::Type, "the right value as double, int is expected"),
            (Some(bson!({"a": 1})), Some(bson!({"a": 1.0})), Kind::Type, "the right object, with parts of other types"),
            (Some(bson!("secret")), Some(bson!("other")), Kind::Value, "another string"),
            (Some(bson!("5")), Some(bson!(5)), Kind::Value, "int is stored, string is expected"),
            (Some(bson!([1, 2])), Some(bson!([1])), Kind::Length, "1 elements are stored, 2 are expected"),
            (Some(bson!([1, 2, 3])), Some(bson!([1, 3, 2])), Kind::Order, "the right 3 elements, in another order"),
            (Some(bson!([1, 2, 3])), Some(bson!([1, 2, 4])), Kind::Value, "1 of 3 elements differ"),
            (Some(Bson::Undefined), Some(bson!(1)), Kind::Dangling, "no source answers, and the rule removes it"),
        ] {
            assert_eq!(
                described(expected.clone(), stored.clone()),
                (kind, words.to_owned()),
                "{expected:?} {stored:?}"
            );
        }
    }
}
