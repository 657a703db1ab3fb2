//! Error codes of the server with a meaning of their own, besides the one of their kind.

/// Unauthorized: the user lacks a privilege, while the connection is good.
pub const UNAUTHORIZED: i32 = 13;
/// TypeMismatch: an update adds to a value that is no number.
pub const TYPE_MISMATCH: i32 = 14;
/// NamespaceExists: the collection is there already.
pub const NAMESPACE_EXISTS: i32 = 48;
/// MaxTimeMSExpired: the command has run out of time.
pub const OUT_OF_TIME: i32 = 50;
/// CappedPositionLost: the oplog was truncated up to and past the entry that was to be read next.
pub const CAPPED_POSITION_LOST: i32 = 136;
/// DuplicateKey: another instance has written the document at the same moment, or an upsert has not matched it.
pub const DUPLICATE_KEY: i32 = 11000;
/// SnapshotUnavailable: the collection was created a moment ago, and no majority has confirmed that yet.
pub const SNAPSHOT_UNAVAILABLE: i32 = 246;
/// `$range` with a step of zero, which [`crate`] computes after a deadline.
pub const TOO_LATE: i32 = 34449;
/// BSONObjectTooLarge, and the code for an even larger change event: it does not fit into a reply.
pub const TOO_LARGE: [i32; 2] = [10334, 13548];
/// ShardRemovedError, and the code of versions before it: history was lost together with a shard. The remaining
/// shards still have the time of the position, but the removed one's changes after it are lost.
pub const SHARD_REMOVED: [i32; 2] = [464, 50811];

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
