//! Errors, as the server reports them.

use bson::{Bson, Document, doc};
use denormd_mql::{EvalError, ZERO_STEP};

/// The code of everything that the model does not know. No server has it.
pub const UNKNOWN: i32 = 9_999_999;
/// The code of a failure in whose place the connection is closed. No server has it.
pub const CLOSES: i32 = 9_999_998;
/// MaxTimeMSExpired.
pub const TOO_LONG: i32 = 50;

/// The error of a command or of one of its statements.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// The server's code.
    pub code: i32,
    name: &'static str,
    message: String,
    /// Further fields, such as the `keyPattern` of a duplicate key.
    more: Box<Document>,
}

pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    pub(crate) fn new(code: i32, message: impl Into<String>) -> Self {
        let name = match code {
            2 => "BadValue",
            9 => "FailedToParse",
            14 => "TypeMismatch",
            26 => "NamespaceNotFound",
            28 => "PathNotViable",
            40 => "ConflictingUpdateOperators",
            43 => "CursorNotFound",
            48 => "NamespaceExists",
            TOO_LONG => "MaxTimeMSExpired",
            66 => "ImmutableField",
            112 => "WriteConflict",
            251 => "NoSuchTransaction",
            286 => "ChangeStreamHistoryLost",
            10107 => "NotWritablePrimary",
            10334 => "BSONObjectTooLarge",
            11000 => "DuplicateKey",
            UNKNOWN => "Simulated",
            _ => "Location",
        };
        Self { code, name, message: message.into(), more: Box::default() }
    }

    /// A command, an option, a stage or an operator that the model does not have.
    pub(crate) fn unknown(what: impl std::fmt::Display) -> Self {
        Self::new(UNKNOWN, format!("the simulated server does not know {what}"))
    }

    /// The command has exceeded its time limit.
    pub(crate) fn too_long() -> Self {
        Self::new(TOO_LONG, "operation exceeded time limit")
    }

    pub(crate) fn duplicate(namespace: &str, index: &Document, values: &Document) -> Self {
        let key = index.get_document("key").cloned().unwrap_or_default();
        let message = format!("E11000 duplicate key error collection: {namespace} dup key: {values}");
        let more = Box::new(doc! {"keyPattern": key, "keyValue": values.clone()});
        Self { more, ..Self::new(11000, message) }
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<Bson>) -> Self {
        self.more.insert(name, value);
        self
    }

    /// The reply of a command that failed.
    pub(crate) fn reply(&self) -> Document {
        let mut reply = doc! {"ok": 0.0, "errmsg": &self.message, "code": self.code, "codeName": self.name};
        reply.extend(Document::clone(&self.more));
        reply
    }

    /// The entry of a statement in `writeErrors`.
    pub(crate) fn of_statement(&self, index: usize) -> Document {
        let mut error = doc! {"index": i32::try_from(index).unwrap_or(i32::MAX), "code": self.code};
        error.extend(Document::clone(&self.more));
        error.insert("errmsg", &self.message);
        error
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

impl From<EvalError> for Failure {
    fn from(error: EvalError) -> Self {
        match error {
            EvalError::NeedsServer(what) => Self::unknown(what),
            EvalError::Refused(why) if why == ZERO_STEP => Self::new(34449, why),
            EvalError::Refused(why) => Self::new(2, why),
        }
    }
}
