//! Classifies every error of the driver and the server. No other place does.

use mongodb::error::{ErrorKind, WriteFailure};

use crate::{
    code::{self, named},
    error::{Error, Kind, variant},
    reach,
};

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
        91 | 189 | 11600 | 11602 | 10107 | 13435 | 13436 | 10058 | 112 | 24 | code::SNAPSHOT_UNAVAILABLE | 251 | 134 | 94 | 365 | 11601
        | 133 | 136 | 222
        // Somebody dropped or renamed an index, a collection or a database under the command (QueryPlanKilled, DatabaseDropPending),
        // or the keys that sign the cluster time are not known yet (KeyNotFound).
        | 175 | 215 | 211
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
        code::OUT_OF_TIME => Kind::TimedOut,
        // WriteConcernFailed, UnsatisfiableWriteConcern
        64 | 100 => Kind::NotReplicated,
        // ChangeStreamHistoryLost, ChangeStreamFatalError, InvalidResumeToken, OplogOperationUnsupported
        286 | 280 | 260 | 62 => Kind::HistoryLost,
        code if code::SHARD_REMOVED.contains(&code) => Kind::HistoryLost,
        // Unauthorized, AuthenticationFailed, UserNotFound
        code::UNAUTHORIZED | 18 | 11 => Kind::Privilege,
        _ => Kind::Refused,
    }
}

impl From<mongodb::error::Error> for Error {
    fn from(error: mongodb::error::Error) -> Self {
        let retryable =
            error.contains_label("RetryableWriteError") || error.contains_label("TransientTransactionError");
        match error.kind.as_ref() {
            ErrorKind::Command(command) if command.code == code::UNAUTHORIZED => {
                unauthorized(&command.message, &named(command.code, &command.code_name))
            }
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
            ErrorKind::Io(io) => reach::lost(&format!("connection lost ({})", io.kind())),
            ErrorKind::ConnectionPoolCleared { .. } => reach::lost("connections were closed after a failure"),
            // The message contains the text of other errors; `reach` composes a better one.
            ErrorKind::ServerSelection { .. } => reach::unreachable(),
            ErrorKind::Authentication { .. } => {
                Error::new(Kind::Privilege, "the server refuses the user name or the password")
            }
            ErrorKind::DnsResolve { .. } => Error::new(Kind::Connection, "the host name in the URI does not resolve"),
            ErrorKind::InvalidTlsConfig { .. } => Error::new(Kind::Config, "the TLS settings in the URI do not work"),
            // The message may quote a part of the connection string.
            ErrorKind::InvalidArgument { .. } => Error::new(Kind::Config, "the driver refuses what it was asked for"),
            ErrorKind::IncompatibleServer { message, .. } => Error::new(Kind::Topology, message.clone()),
            other => Error::internal(format!("the driver failed ({})", variant(other))),
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

/// The error of a command that the server does not allow. Of the server's message only the names of the command and its
/// namespace are kept: it quotes the whole command, with its values.
fn unauthorized(message: &str, named: &str) -> Error {
    let (message, hint) = if message.to_lowercase().contains("requires authentication") {
        (
            format!("{named}: the server demands a user, and the connection has none"),
            "name one in the connection string: mongodb://USER:PASSWORD@HOST (percent-encoded), in mongodb.uri or \
             DENORMD__MONGODB__URI",
        )
    } else {
        let what = forbidden(message).map(|what| format!(": the user may not run {what}")).unwrap_or_default();
        (
            format!("{named}{what}"),
            "`denormd role` prints the least role that the rules of a config need, `--update` the command for a role that exists",
        )
    };
    Error { code: Some(code::UNAUTHORIZED), ..Error::new(Kind::Privilege, message).hint(hint) }
}

/// `createIndexes on `shop.orders``, from `not authorized on shop to execute command { createIndexes: "orders", … }`.
fn forbidden(message: &str) -> Option<String> {
    // Their first value is the name of a collection.
    const ON_COLLECTIONS: [&str; 15] = [
        "aggregate",
        "collMod",
        "collStats",
        "count",
        "create",
        "createIndexes",
        "delete",
        "distinct",
        "drop",
        "explain",
        "find",
        "findAndModify",
        "insert",
        "listIndexes",
        "update",
    ];
    let (database, command) = message.split_once("not authorized on ")?.1.split_once(" to execute command { ")?;
    let (name, value) = command.split_once(':')?;
    let is_name = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "_-.$".contains(c));
    if !is_name(database) || !is_name(name) {
        return None;
    }
    let collection = value.trim_start().strip_prefix('"').and_then(|value| value.split_once('"')).map(|(text, _)| text);
    let collection = collection.filter(|text| ON_COLLECTIONS.contains(&name) && is_name(text));
    Some(match collection {
        Some(collection) => format!("{name} on `{database}.{collection}`"),
        None => format!("{name} on the database `{database}`"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_is_not_allowed_is_named_without_its_values() {
        let told = |message: &str| {
            let error = unauthorized(message, &named(13, "Unauthorized"));
            assert_eq!((error.kind, error.code), (Kind::Privilege, Some(13)));
            error.to_string()
        };
        for none in ["command find requires authentication", "Command listCollections requires authentication"] {
            let told = told(none);
            assert!(told.starts_with("server error 13 (Unauthorized): the server demands a user"), "{told}");
            assert!(told.contains("hint: name one in the connection string: mongodb://USER:PASSWORD@"), "{told}");
        }
        for (command, expected) in [
            ("find: \"orders\", filter: { name: \"canary\" }, $db: \"shop\"", "find on `shop.orders`"),
            ("createIndexes: \"o.x-1\", indexes: [ { key: { canary: 1 } } ]", "createIndexes on `shop.o.x-1`"),
            ("aggregate: 1, pipeline: [ { $match: { v: \"canary\" } } ]", "aggregate on the database `shop`"),
            ("getMore: 123, collection: \"canary\"", "getMore on the database `shop`"),
            ("createUser: \"canary\", pwd: \"xxx\"", "createUser on the database `shop`"),
            ("find: \"can \\\"ary\", filter: {}", "find on the database `shop`"),
        ] {
            let told = told(&format!("not authorized on shop to execute command {{ {command} }}"));
            let (first, hint) = told.split_once('\n').unwrap();
            assert_eq!(first, format!("server error 13 (Unauthorized): the user may not run {expected}"));
            assert!(!told.contains("canary") && hint.contains("`denormd role`"), "{told}");
        }
        let other = told("not authorized for canary");
        assert!(other.starts_with("server error 13 (Unauthorized)\n") && !other.contains("canary"), "{other}");
    }

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
        // The same command succeeds without what was dropped under it.
        for code in [175, 211, 215] {
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
