//! Values that documents are matched by, compared as the server compares them.
//!
//! `1`, `1.0`, `NumberLong(1)` and `NumberDecimal("1")` are one key, nested too, under the simple collation
//! (<https://www.mongodb.com/docs/manual/reference/bson-type-comparison-order/>). A [`Key`] therefore carries the values
//! as they were found, for queries, and a canonical encoding of them, for equality and hashing.

use std::{
    fmt,
    hash::{Hash, Hasher},
    slice,
    sync::Arc,
};

use bson::{Bson, Decimal128, Document};
use smallvec::SmallVec;

/// One or several values that a source and its targets share. Equal when the server calls them equal, whatever their types.
/// A clone shares them: a key that waits is in the queue several times.
#[derive(Clone)]
pub struct Key(Arc<Inner>);

/// One allocation, unless there are several values or a long one: up to hundreds of thousands of keys wait.
struct Inner {
    values: Values,
    canonical: SmallVec<[u8; SHORT]>,
}

/// Smaller than a `SmallVec`, which keeps the length of one value.
enum Values {
    One(Bson),
    Several(Box<[Bson]>),
}

/// Length of the longest encoding of a number, an ObjectId or a date.
const SHORT: usize = 24;

impl Key {
    /// A key of `values`, in the order of the rule's `match`.
    #[must_use]
    pub fn new(values: Vec<Bson>) -> Self {
        let mut out = Vec::with_capacity(16 * values.len());
        for value in &values {
            encode(value, &mut out);
        }
        let values = <[Bson; 1]>::try_from(values);
        let values = values.map_or_else(|several| Values::Several(several.into()), |[one]| Values::One(one));
        Self(Arc::new(Inner { values, canonical: SmallVec::from_slice(&out) }))
    }

    /// A key of one value: a document's `_id`, most often.
    #[must_use]
    pub fn one(value: Bson) -> Self {
        Self::new(vec![value])
    }

    /// The key of a document's `_id`.
    #[must_use]
    pub fn of_document(document: &Document) -> Self {
        Self::one(id_of(document))
    }

    /// The values, as they were found.
    #[must_use]
    pub fn values(&self) -> &[Bson] {
        match &self.0.values {
            Values::One(value) => slice::from_ref(value),
            Values::Several(values) => values,
        }
    }

    /// An encoding that equal keys share, the same in every build.
    #[must_use]
    pub fn canonical(&self) -> &[u8] {
        &self.0.canonical
    }

    /// About how many bytes of memory the key holds.
    #[must_use]
    pub fn weight(&self) -> usize {
        64 + 2 * self.0.canonical.len()
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.0.canonical == other.0.canonical
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.canonical.hash(state);
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    /// Any total order that agrees with equality; not the server's sort order.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.canonical.cmp(&other.0.canonical)
    }
}

/// A key is a user's data: logs and messages show that there is one, never what it is.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({} values)", self.values().len())
    }
}

fn text(tag: u8, text: &str, out: &mut Vec<u8>) {
    bytes(tag, text.as_bytes(), out);
}

fn bytes(tag: u8, content: &[u8], out: &mut Vec<u8>) {
    out.push(tag);
    out.extend_from_slice(&(content.len() as u64).to_be_bytes());
    out.extend_from_slice(content);
}

/// One tag a comparison class, then a self-delimiting body. Numbers share one class.
fn encode(value: &Bson, out: &mut Vec<u8>) {
    match value {
        Bson::Double(v) => encode_number(Number::from_double(*v), out),
        Bson::Int32(v) => encode_number(Number::from_integer(i64::from(*v)), out),
        Bson::Int64(v) => encode_number(Number::from_integer(*v), out),
        Bson::Decimal128(v) => encode_number(Number::from_decimal(*v), out),
        // A symbol compares equal to the string of the same text.
        Bson::String(v) | Bson::Symbol(v) => text(2, v, out),
        Bson::Document(doc) => {
            out.push(3);
            for (name, value) in doc {
                text(1, name, out);
                encode(value, out);
            }
            out.push(0);
        }
        Bson::Array(items) => {
            out.push(4);
            for item in items {
                encode(item, out);
            }
            out.push(0);
        }
        Bson::Binary(v) => {
            out.push(5);
            bytes(u8::from(v.subtype), &v.bytes, out);
        }
        Bson::Undefined => out.push(6),
        Bson::ObjectId(v) => bytes(7, &v.bytes(), out),
        Bson::Boolean(v) => out.extend_from_slice(&[8, u8::from(*v)]),
        Bson::DateTime(v) => bytes(9, &v.timestamp_millis().to_be_bytes(), out),
        Bson::Null => out.push(10),
        Bson::RegularExpression(v) => {
            out.push(11);
            text(1, v.pattern.as_str(), out);
            text(1, v.options.as_str(), out);
        }
        Bson::DbPointer(v) => text(12, &format!("{v:?}"), out),
        Bson::JavaScriptCode(v) => text(13, v, out),
        Bson::JavaScriptCodeWithScope(v) => {
            text(14, &v.code, out);
            encode(&Bson::Document(v.scope.clone()), out);
        }
        Bson::Timestamp(v) => {
            out.push(15);
            out.extend_from_slice(&v.time.to_be_bytes());
            out.extend_from_slice(&v.increment.to_be_bytes());
        }
        Bson::MinKey => out.push(16),
        Bson::MaxKey => out.push(17),
    }
}

/// The `_id` of a document; null if it has none.
#[must_use]
pub fn id_of(document: &Document) -> Bson {
    document.get("_id").cloned().unwrap_or(Bson::Null)
}

/// The whole number that a number of any BSON type equals, if it does and 64 bits hold it.
#[must_use]
pub fn whole_number(value: &Bson) -> Option<i64> {
    let number = match value {
        Bson::Int32(v) => return Some(i64::from(*v)),
        Bson::Int64(v) => return Some(*v),
        Bson::Double(v) => Number::from_double(*v),
        Bson::Decimal128(v) => Number::from_decimal(*v),
        _ => return None,
    };
    match number {
        Number::Zero => Some(0),
        Number::Binary { negative, odd, power } => {
            let factor = 1_i128.checked_shl(u32::try_from(power).ok()?).filter(|_| power < 64)?;
            let magnitude = i128::try_from(odd).ok()?.checked_mul(factor)?;
            i64::try_from(if negative { -magnitude } else { magnitude }).ok()
        }
        Number::NaN | Number::Infinite { .. } | Number::Decimal { .. } => None,
    }
}

/// A number of any BSON type in a form that equal numbers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    NaN,
    Infinite {
        negative: bool,
    },
    Zero,
    /// `odd * 2^power`: every integer and double, and the decimals that have such a form.
    Binary {
        negative: bool,
        odd: u128,
        power: i32,
    },
    /// `digits * 10^power` with no trailing zero in `digits`: a decimal that no binary fraction equals, or whose odd part
    /// passes 128 bits (no double and no integer has one over 64).
    Decimal {
        negative: bool,
        digits: u128,
        power: i32,
    },
}

impl Number {
    fn from_integer(value: i64) -> Self {
        Self::binary(value < 0, u128::from(value.unsigned_abs()), 0)
    }

    fn from_double(value: f64) -> Self {
        if value.is_nan() {
            return Self::NaN;
        }
        let negative = value.is_sign_negative();
        if value.is_infinite() {
            return Self::Infinite { negative };
        }
        let bits = value.to_bits();
        let fraction = u128::from(bits & ((1 << 52) - 1));
        // IEEE 754: 11 bits of exponent, biased by 1023, and 52 of fraction; exponent 0 marks a subnormal.
        match i32::try_from((bits >> 52) & 0x7ff).unwrap_or_default() {
            0 => Self::binary(negative, fraction, -1074),
            exponent => Self::binary(negative, fraction | (1 << 52), exponent - 1075),
        }
    }

    fn binary(negative: bool, magnitude: u128, power: i32) -> Self {
        if magnitude == 0 {
            return Self::Zero;
        }
        let twos = magnitude.trailing_zeros();
        Self::Binary { negative, odd: magnitude >> twos, power: power + twos.cast_signed() }
    }

    /// Takes a Decimal128 apart (IEEE 754-2008, binary integer decimal encoding).
    fn from_decimal(value: Decimal128) -> Self {
        let bits = u128::from_le_bytes(value.bytes());
        let negative = bits >> 127 == 1;
        let combination = (bits >> 122) & 0b1_1111;
        if combination == 0b1_1111 {
            return Self::NaN;
        }
        if combination == 0b1_1110 {
            return Self::Infinite { negative };
        }
        let (exponent, digits) = if combination >> 3 == 0b11 {
            // The large form: its coefficient would pass 34 digits, which the standard reads as zero.
            ((bits >> 111) & 0x3fff, 0)
        } else {
            ((bits >> 113) & 0x3fff, bits & ((1 << 113) - 1))
        };
        Self::decimal(negative, digits, i32::try_from(exponent).unwrap_or_default() - 6176)
    }

    fn decimal(negative: bool, mut digits: u128, mut power: i32) -> Self {
        if digits == 0 {
            return Self::Zero;
        }
        while digits.is_multiple_of(10) {
            digits /= 10;
            power += 1;
        }
        let twos = digits.trailing_zeros();
        let mut odd = digits >> twos;
        let fives = 5_u128.checked_pow(power.unsigned_abs());
        let exact = match fives {
            Some(fives) if power >= 0 => odd.checked_mul(fives).map(|product| odd = product).is_some(),
            Some(fives) if odd.is_multiple_of(fives) => {
                odd /= fives;
                true
            }
            _ => false,
        };
        if exact {
            Self::Binary { negative, odd, power: power + twos.cast_signed() }
        } else {
            Self::Decimal { negative, digits, power }
        }
    }
}

fn encode_number(number: Number, out: &mut Vec<u8>) {
    out.push(1);
    let mut body = |tag: u8, negative: bool, magnitude: u128, power: i32| {
        out.extend_from_slice(&[tag, u8::from(negative)]);
        out.extend_from_slice(&magnitude.to_be_bytes());
        out.extend_from_slice(&power.to_be_bytes());
    };
    match number {
        Number::Binary { negative, odd, power } => body(1, negative, odd, power),
        Number::Decimal { negative, digits, power } => body(2, negative, digits, power),
        Number::NaN => out.push(3),
        Number::Infinite { negative } => out.extend_from_slice(&[4, u8::from(negative)]),
        Number::Zero => out.push(5),
    }
}

#[cfg(test)]
mod tests {
    use bson::{bson, doc};

    use super::*;

    /// With the two counts of the `Arc`, 160 bytes are a size of the allocator; the next one is 192.
    #[test]
    fn a_key_is_small() {
        assert!(size_of::<Inner>() <= 144, "{} bytes", size_of::<Inner>());
    }

    fn decimal(text: &str) -> Bson {
        Bson::Decimal128(text.parse().unwrap())
    }

    #[test]
    fn numbers_are_equal_whatever_their_type() {
        let long = |v: i64| Bson::Int64(v);
        for (a, b) in [
            (bson!(1), bson!(1.0)),
            (bson!(1), long(1)),
            (bson!(1), decimal("1")),
            (bson!(1), decimal("1.000")),
            (bson!(100), decimal("1E+2")),
            (bson!(0.5), decimal("0.5")),
            (bson!(-0.0), bson!(0)),
            (decimal("-0"), bson!(0)),
            (bson!(f64::NAN), decimal("NaN")),
            (bson!(f64::INFINITY), decimal("Infinity")),
            (long(1 << 62), bson!(4_611_686_018_427_387_904.0)),
            (bson!(1e22), decimal("1E+22")),
            (bson!({"a": [1, {"b": 2}]}), bson!({"a": [1.0, {"b": 2.0}]})),
        ] {
            assert_eq!(Key::one(a.clone()), Key::one(b.clone()), "{a} {b}");
        }
    }

    #[test]
    fn whole_numbers_of_every_type() {
        for value in [bson!(5), bson!(5.0), Bson::Int64(5), decimal("5.00"), decimal("0.5E1")] {
            assert_eq!(whole_number(&value), Some(5), "{value}");
        }
        assert_eq!(whole_number(&bson!(-1e18)), Some(-1_000_000_000_000_000_000));
        for value in [bson!(0.5), bson!(1e19), bson!(f64::NAN), decimal("1E+40"), bson!("5")] {
            assert_eq!(whole_number(&value), None, "{value}");
        }
    }

    #[test]
    fn different_values_are_different_keys() {
        let values = [
            bson!(1),
            bson!(2),
            bson!(-1),
            bson!(0.1),
            decimal("0.1"),
            decimal("1E+6000"),
            decimal("1E-6000"),
            bson!("1"),
            bson!(""),
            bson!(null),
            bson!(true),
            bson!([1]),
            bson!([[1]]),
            bson!({"a": 1}),
            bson!({"a": 1, "b": 2}),
            bson!({"b": 2, "a": 1}),
            Bson::MinKey,
            Bson::MaxKey,
            Bson::Int64(i64::MAX),
            bson!(9_223_372_036_854_775_807.0),
            Bson::RegularExpression(bson::Regex { pattern: "a".try_into().unwrap(), options: "i".try_into().unwrap() }),
        ];
        for (i, a) in values.iter().enumerate() {
            for b in &values[i + 1..] {
                assert_ne!(Key::one(a.clone()), Key::one(b.clone()), "{a} {b}");
            }
        }
        assert_ne!(Key::new(vec![bson!("a"), bson!("b")]), Key::new(vec![bson!("ab"), bson!("")]));
        assert_ne!(Key::one(doc! {"a": {"b": 1}, "c": 1}.into()), Key::one(doc! {"a": {"b": 1, "c": 1}}.into()));
    }
}
