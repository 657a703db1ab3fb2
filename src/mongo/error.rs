//! The error type of the whole program: a kind, the action that failed, and what to do about it.

use std::fmt;

use crate::code;

/// Meaning of an error for the work that it interrupted. The reaction to it follows from [`Kind::policy`].
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
    /// The command line or the config is wrong, or does not suit this cluster; nothing was written.
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

/// The reaction to an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// Retry after a pause: nothing is wrong with the work.
    Retry,
    /// Retry with fewer keys or targets, until one that takes too long is alone.
    Divide,
    /// Retry with fewer keys. One that takes too long takes turns with others, each time with a longer limit.
    TakeTurns,
    /// Retry with fewer keys or targets, until the offending one is alone. It becomes a dead letter.
    Isolate,
    /// Follow changes from now on, and backfill every rule whose changes may be lost.
    Backfill,
    /// Go on without the rule: it is unavailable until the privilege is granted.
    GoWithout,
    /// Stop: somebody has to change the config, the cluster or the machine.
    Stop,
}

/// The consequences of an error.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Name of the kind in labels and in the status.
    pub name: &'static str,
    /// The reaction of a running pipeline.
    pub reaction: Reaction,
    /// The exit status of a command that fails with it.
    pub status: i32,
}

impl Kind {
    /// The one error policy: every retry, dead letter, unavailable rule and exit status follows from it.
    #[must_use]
    pub const fn policy(self) -> Policy {
        let (name, reaction, status) = match self {
            Self::Connection => ("connection", Reaction::Retry, 1),
            Self::Unavailable => ("unavailable", Reaction::Retry, 1),
            Self::TimedOut => ("timed_out", Reaction::Divide, 1),
            Self::ReadTimedOut => ("read_timed_out", Reaction::TakeTurns, 1),
            Self::NotReplicated => ("not_replicated", Reaction::Retry, 1),
            Self::HistoryLost => ("history_lost", Reaction::Backfill, 1),
            Self::Privilege => ("privilege", Reaction::GoWithout, 4),
            Self::Refused => ("refused", Reaction::Isolate, 1),
            Self::TooLarge => ("too_large", Reaction::Isolate, 1),
            Self::Config => ("config", Reaction::Stop, 2),
            Self::Topology => ("topology", Reaction::Stop, 4),
            Self::State => ("state", Reaction::Stop, 4),
            Self::Machine => ("machine", Reaction::Stop, 1),
            Self::Internal => ("internal", Reaction::Isolate, 1),
        };
        Policy { name, reaction, status }
    }

    /// True if the server gave no answer to work with: it cannot be reached, is not available, or took too long.
    #[must_use]
    pub const fn means_no_answer(self) -> bool {
        matches!(self, Self::Connection | Self::Unavailable | Self::TimedOut | Self::ReadTimedOut)
    }
}

/// An error with its kind, the action that failed, and a hint for the reader.
///
/// The text never contains values of documents. The server's own message may, so only its code and code name are kept.
#[derive(Debug, Clone)]
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

    /// The reaction to this error.
    #[must_use]
    pub fn reaction(&self) -> Reaction {
        self.kind.policy().reaction
    }

    /// True if a retry may succeed without anybody's intervention.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self.reaction(), Reaction::Retry | Reaction::Divide | Reaction::TakeTurns)
    }

    /// True if a write took effect, and its time limit passed before a majority had it.
    #[must_use]
    pub fn is_majority_behind(&self) -> bool {
        self.kind == Kind::NotReplicated && self.code == Some(code::OUT_OF_TIME)
    }

    /// True if the server refused the command or a time limit passed: the figure stays unknown, and repeating the command now
    /// would not help.
    #[must_use]
    pub fn leaves_unknown(&self) -> bool {
        matches!(self.kind, Kind::Refused | Kind::TimedOut | Kind::ReadTimedOut)
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
        Self::internal(format!("a document of an unexpected shape ({})", variant(&error.kind)))
    }
}

/// The name of an enum's variant, without its content, which may quote a document.
pub(crate) fn variant(value: &impl fmt::Debug) -> String {
    format!("{value:?}").split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A refused document must not be retried for ever, nor does a document become a dead letter because of the cluster.
    #[test]
    fn only_what_a_document_causes_is_isolated() {
        for kind in [Kind::Connection, Kind::Unavailable, Kind::NotReplicated] {
            assert_eq!(Error::new(kind, "").reaction(), Reaction::Retry, "{kind:?}");
            assert!(Error::new(kind, "").is_transient());
        }
        for kind in [Kind::Refused, Kind::TooLarge, Kind::Internal] {
            assert_eq!(Error::new(kind, "").reaction(), Reaction::Isolate, "{kind:?}");
            assert!(!Error::new(kind, "").is_transient());
        }
        for (kind, status) in [(Kind::Config, 2), (Kind::Topology, 4), (Kind::Privilege, 4), (Kind::Refused, 1)] {
            assert_eq!(kind.policy().status, status, "{kind:?}");
        }
    }
}
