//! The error type of the whole program: a kind, the action that failed, and what to do about it.

use std::fmt;

/// Meaning of an error for the work that it interrupted. Every reaction (retry, dead letter, degrade, stop) follows
/// from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The server cannot be reached for the moment. The outcome of the command is unknown.
    Connection,
    /// The server refused for the moment (stepdown, election, shutdown, write conflict). The command took no effect.
    Unavailable,
    /// The command was stopped by its own time limit; a part of it may have taken effect.
    TimedOut,
    /// A read was stopped by its own time limit.
    ReadTimedOut,
    /// The write took effect, but is not majority-committed yet.
    NotReplicated,
    /// The oplog no longer contains the resume position, or the resume token is invalid.
    HistoryLost,
    /// A user or a role lacks a privilege that the command needs.
    Privilege,
    /// The server refuses this document or this value, and will refuse it again until one of them changes.
    Refused,
    /// A batch exceeds its memory limit: it is retried with fewer keys.
    TooLarge,
    /// The config cannot work on this cluster; nothing was written.
    Config,
    /// The topology of the cluster is not supported; nothing was written.
    Topology,
    /// The state of a rule does not allow a command: it is blocked, paused or unavailable, or has never run. Nothing was written.
    State,
    /// The operating system refuses a file or a port.
    Machine,
    /// An unexpected answer of the server, or a bug in denormd.
    Internal,
}

/// An error with its kind, the action that failed, and a hint for the reader.
///
/// The text never contains values of documents. The server's own message may, so only its code and code name are kept.
#[derive(Debug)]
pub struct Error {
    /// Kind of error, which decides the reaction.
    pub kind: Kind,
    /// The action that failed, and the server's code if there is one.
    pub message: String,
    /// Suggested remedy.
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

    /// An unexpected state, such as a bug.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Kind::Internal, message)
    }

    /// The same error with a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same error, prefixed with the action that failed.
    #[must_use]
    pub fn context(mut self, doing: &str) -> Self {
        self.message = format!("{doing}: {}", self.message);
        self
    }

    /// True if a retry may succeed without anybody's intervention.
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
