//! The server's aggregation and query language, evaluated without a server: for `denormd test` only. The daemon has the
//! server compute every value that it writes.
//!
//! Covers what rules commonly use, as MongoDB 6.0 defines it. Anything else is refused by name, never guessed:
//! `tests/meaning/evaluate.rs` generates expressions, filters, accumulators and documents, and compares every operator with a
//! server.

mod accumulator;
mod expression;
mod group;
mod known;
mod number;
mod order;
mod path;
mod pipeline;
mod query;

use bson::Bson;

pub use accumulator::ACCUMULATORS;
pub use expression::{ZERO_STEP, expression};
pub use known::{beyond_accumulator, beyond_expression, beyond_filter, operators};
pub use order::compare;
pub use pipeline::{Collections, aggregate, bind_expression, bind_query, bind_stage, stage};
pub use query::matches;

/// A value, or none if the field is missing: missing is not null.
pub type Value = Option<Bson>;

/// Reason why there is no value. Its text names operators and types, never a value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EvalError {
    /// Not supported without a server.
    #[error("{0} needs a server")]
    NeedsServer(String),
    /// The server would refuse it too.
    #[error("{0}")]
    Refused(String),
}

/// A result with [`EvalError`].
pub type Result<T, E = EvalError> = std::result::Result<T, E>;

fn needs_server<T>(what: impl Into<String>) -> Result<T> {
    Err(EvalError::NeedsServer(what.into()))
}

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(EvalError::Refused(why.into()))
}

/// Null, undefined or missing: most operators return null for it.
fn is_nullish(value: Option<&Bson>) -> bool {
    matches!(value, None | Some(Bson::Null | Bson::Undefined))
}

/// True for values that the server treats as true.
fn is_true(value: Option<&Bson>) -> bool {
    match value {
        None | Some(Bson::Null | Bson::Undefined | Bson::Boolean(false)) => false,
        // NaN is not zero.
        Some(number @ (Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_) | Bson::Decimal128(_))) => {
            denormd_model::key::whole_number(number) != Some(0)
        }
        Some(_) => true,
    }
}

/// The name of a value's type, as `$type` returns it.
fn type_name(value: Option<&Bson>) -> &'static str {
    value.map_or("missing", denormd_model::shape::type_name)
}
