//! Classifies every error of the driver and the server. No other place does.

use mongodb::error::{ErrorKind, WriteFailure};

use crate::error::{Error, Kind};

/// Codes with a meaning of their own, besides the one of their kind.
pub mod code {
    /// Unauthorized: the user lacks a privilege, while the connection is good.
    pub const UNAUTHORIZED: i32 = 13;
    /// NamespaceExists: the collection is there already.
    pub const NAMESPACE_EXISTS: i32 = 48;
    /// CappedPositionLost: the oplog was truncated up to and past the entry that was to be read next.
    pub const CAPPED_POSITION_LOST: i32 = 136;
    /// DuplicateKey: another instance has written the document at the same moment, or an upsert has not matched it.
    pub const DUPLICATE_KEY: i32 = 11000;
    /// `$range` with a step of zero, which [`crate`] computes after a deadline.
    pub const TOO_LATE: i32 = 34449;
    /// BSONObjectTooLarge, and the code for an even larger change event: it does not fit into a reply.
    pub const TOO_LARGE: [i32; 2] = [10334, 13548];
    /// ShardRemovedError, and the code of versions before it: history was lost together with a shard. The remaining
    /// shards still have the time of the position, but the removed one's changes after it are lost.
    pub const SHARD_REMOVED: [i32; 2] = [464, 50811];
}

/// The value, or None if the operation failed with this code.
pub fn unless<T, E: Into<Error>>(code: i32, result: Result<T, E>) -> Result<Option<T>, Error> {
    match result.map_err(Into::into) {
        Err(error) if error.code == Some(code) => Ok(None),
        result => result.map(Some),
    }
}

/// The kind of a server's error code. Codes: `src/mongo/base/error_codes.yml` of the server.
#[must_use]
pub fn kind_of_code(code: i32) -> Kind {
    match code {
        // HostUnreachable, HostNotFound, NetworkTimeout, SocketException, ExceededTimeLimit, a cursor lost with its
        // server (CursorNotFound, CursorKilled), and a router's own errors on its way to a shard (CallbackCanceled,
        // NetworkInterfaceExceededTimeLimit, ConnectionError).
        6 | 7 | 89 | 9001 | 262 | 43 | 237 | 90 | 202 | 384 => Kind::Connection,
        // Every "not the primary any more", "shutting down" and "interrupted" code, WriteConflict, LockTimeout,
        // SnapshotUnavailable, NoSuchTransaction, ReadConcernMajorityNotAvailableYet, NotYetInitialized, TemporarilyUnavailable.
        91 | 189 | 11600 | 11602 | 10107 | 13435 | 13436 | 10058 | 112 | 24 | 246 | 251 | 134 | 94 | 365 | 11601
        | 133 | 136 | 222
        // A router whose view of the shards is out of date, or that cannot tell: StaleShardVersion, StaleConfig,
        // StaleEpoch, StaleDbVersion, StaleChunkHistory, ShardNotFound, RetryChangeStream, MigrationConflict,
        // MovePrimaryInProgress, MigrationBlockingOperationCoordinatorCleaningUp,
        // PooledConnectionAcquisitionExceededTimeLimit, InterruptedDueToReshardingCriticalSection,
        // RetriableRemoteCommandFailure.
        | 63 | 13388 | 150 | 249 | 250 | 70 | 234 | 272 | 319 | 406 | 407 | 453 | 91331
        // An operator blocks writes (UserWritesBlocked), or the server is overloaded: ResourceExhausted,
        // AdmissionQueueOverflow, RateLimitExceeded, IngressRequestRateLimitExceeded,
        // PooledConnectionAcquisitionRejected. Or its disk is full (OutOfDiskSpace).
        | 371 | 402 | 433 | 449 | 462 | 450 | 14031 => Kind::Unavailable,
        // MaxTimeMSExpired
        50 => Kind::TimedOut,
        // WriteConcernFailed, UnsatisfiableWriteConcern
        64 | 100 => Kind::NotReplicated,
        // ChangeStreamHistoryLost, ChangeStreamFatalError, InvalidResumeToken, OplogOperationUnsupported
        286 | 280 | 260 | 62 => Kind::HistoryLost,
        code if code::SHARD_REMOVED.contains(&code) => Kind::HistoryLost,
        // Unauthorized, AuthenticationFailed, UserNotFound
        13 | 18 | 11 => Kind::Privilege,
        _ => Kind::Refused,
    }
}

impl From<mongodb::error::Error> for Error {
    fn from(error: mongodb::error::Error) -> Self {
        let retryable =
            error.contains_label("RetryableWriteError") || error.contains_label("TransientTransactionError");
        match error.kind.as_ref() {
            ErrorKind::Command(command) => {
                let kind = match kind_of_code(command.code) {
                    Kind::Refused if retryable => Kind::Unavailable,
                    kind => kind,
                };
                Error { code: Some(command.code), ..Error::new(kind, named(command.code, &command.code_name)) }
            }
            ErrorKind::Write(WriteFailure::WriteError(write)) => {
                let name = write.code_name.as_deref().unwrap_or_default();
                Error { code: Some(write.code), ..Error::new(kind_of_code(write.code), named(write.code, name)) }
            }
            ErrorKind::Write(WriteFailure::WriteConcernError(concern)) => Error {
                code: Some(concern.code),
                ..Error::new(Kind::NotReplicated, named(concern.code, &concern.code_name))
            },
            ErrorKind::InsertMany(insert) => match insert.write_errors.as_deref() {
                Some([write, ..]) => {
                    let name = write.code_name.as_deref().unwrap_or_default();
                    Error { code: Some(write.code), ..Error::new(kind_of_code(write.code), named(write.code, name)) }
                }
                _ => Error::new(Kind::NotReplicated, "inserted documents are not majority-committed yet"),
            },
            ErrorKind::Io(io) => super::reach::lost(&format!("connection lost ({})", io.kind())),
            ErrorKind::ConnectionPoolCleared { .. } => super::reach::lost("connections were closed after a failure"),
            // The message contains the text of other errors; `reach` composes a better one.
            ErrorKind::ServerSelection { .. } => super::reach::unreachable(),
            ErrorKind::Authentication { .. } => {
                Error::new(Kind::Privilege, "the server refuses the user name or the password")
            }
            ErrorKind::DnsResolve { .. } => Error::new(Kind::Connection, "the host name in the URI does not resolve"),
            ErrorKind::InvalidTlsConfig { .. } => Error::new(Kind::Config, "the TLS settings in the URI do not work"),
            // The message may quote a part of the connection string.
            ErrorKind::InvalidArgument { .. } => Error::new(Kind::Config, "the driver refuses what it was asked for"),
            ErrorKind::IncompatibleServer { message, .. } => Error::new(Kind::Topology, message.clone()),
            other => Error::internal(format!("the driver failed ({})", other_name(other))),
        }
    }
}

/// The server's own text of a refused command. It may quote documents, so it may only be shown for a command that reads
/// none.
#[must_use]
pub fn server_text(error: &mongodb::error::Error) -> Option<&str> {
    match error.kind.as_ref() {
        ErrorKind::Command(command) => Some(&command.message),
        _ => None,
    }
}

/// The server's name of an error code. For an error within a bulk write the server sends only the code; these are the
/// ones that refuse a document.
#[must_use]
pub fn named(code: i32, name: &str) -> String {
    let name = match (name, code) {
        ("", 2) => "BadValue",
        ("", 9) => "FailedToParse",
        ("", 14) => "TypeMismatch",
        ("", 28) => "PathNotViable",
        ("", 66) => "ImmutableField",
        ("", 121) => "DocumentValidationFailure",
        ("", 11000) => "DuplicateKey",
        ("", 10334 | 17280 | 17419 | 17420) => "BSONObjectTooLarge",
        ("", 16755 | 16804) => "GeoIndexRefusesValue",
        (name, _) => name,
    };
    if name.is_empty() { format!("server error {code}") } else { format!("server error {code} ({name})") }
}

fn other_name(kind: &ErrorKind) -> String {
    // Only the variant's name: its content may quote a document.
    format!("{kind:?}").split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A refused write becomes a dead letter: what a router reports of its way to a shard is tried again instead.
    #[test]
    fn codes_of_a_sharded_cluster_are_told_apart() {
        for code in code::SHARD_REMOVED {
            assert_eq!(kind_of_code(code), Kind::HistoryLost, "{code}");
        }
        for code in [6, 90, 202, 384] {
            assert_eq!(kind_of_code(code), Kind::Connection, "{code}");
        }
        for code in [63, 70, 133, 150, 234, 249, 250, 272, 319, 406, 407, 453, 13388, 91331] {
            assert_eq!(kind_of_code(code), Kind::Unavailable, "{code}");
        }
        // Of a server that is overloaded, blocked by an operator, or without room.
        for code in [371, 402, 433, 449, 450, 462, 14031] {
            assert_eq!(kind_of_code(code), Kind::Unavailable, "{code}");
        }
        // ShardKeyNotFound and ImmutableField are of the document.
        for code in [61, 66] {
            assert_eq!(kind_of_code(code), Kind::Refused, "{code}");
        }
    }
}
