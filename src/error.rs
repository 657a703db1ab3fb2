//! The one error type of everything that runs: a kind, what was being done, and what to do about it.

use std::fmt;

/// What an error means for the work that met it. Every reaction (retry, dead letter, degrade, stop) is decided from this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The server or the way to it is gone for the moment. Whether the command took effect is unknown.
    Connection,
    /// The server said no for the moment (stepdown, election, shutdown, write conflict). The command took no effect.
    Unavailable,
    /// The command was stopped by its own time limit; a part of it may have taken effect.
    TimedOut,
    /// A read was stopped by its own time limit.
    ReadTimedOut,
    /// The write took effect, and has not reached a majority yet.
    NotReplicated,
    /// The place in the oplog that a stream should resume at is gone, or its token does not fit.
    HistoryLost,
    /// A user or a role lacks what the command needs.
    Privilege,
    /// The server refuses this document or this value, and will again until one of them changes.
    Refused,
    /// More than a batch may hold in memory: fewer keys of it are done at once.
    TooLarge,
    /// What the user wrote cannot work on this cluster; nothing was written.
    Config,
    /// The cluster is of a form that is not supported; nothing was written.
    Topology,
    /// The state of a rule does not allow a command: it is blocked, paused or unavailable, or has never run. Nothing was written.
    State,
    /// The machine refuses a file or a port.
    Machine,
    /// An answer of the server that should not exist, or a defect of ours.
    Internal,
}

/// An error with its kind, what was being done, and a hint for the person who reads it.
///
/// The text never holds a document's values: the server's own message does, so only its code and code name are kept.
#[derive(Debug)]
pub struct Error {
    /// What it means.
    pub kind: Kind,
    /// What was being done, and the server's code where there is one.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// The server's error code, for dead letters.
    pub code: Option<i32>,
}

/// A result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None, code: None }
    }

    /// An error that should not exist.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Kind::Internal, message)
    }

    /// The same error with a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same error, saying what was being done.
    #[must_use]
    pub fn context(mut self, doing: &str) -> Self {
        self.message = format!("{doing}: {}", self.message);
        self
    }

    /// Whether trying the same again may help, without anybody doing anything about it.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self.kind {
            Kind::Connection | Kind::Unavailable | Kind::TimedOut | Kind::ReadTimedOut | Kind::NotReplicated => true,
            Kind::HistoryLost
            | Kind::Privilege
            | Kind::Refused
            | Kind::TooLarge
            | Kind::Config
            | Kind::Topology
            | Kind::State
            | Kind::Machine
            | Kind::Internal => false,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

impl From<bson::error::Error> for Error {
    fn from(error: bson::error::Error) -> Self {
        // The message may quote a value; its kind does not.
        Self::internal(format!("a document of an unexpected shape ({})", short(&format!("{:?}", error.kind))))
    }
}

fn short(text: &str) -> &str {
    text.split([' ', '(', '{']).next().unwrap_or_default()
}
