//! Positions in the oplog: cluster times and resume tokens.

use std::fmt;

use bson::{Document, Timestamp};

/// A cluster time: seconds since the epoch, then a counter within the second. Ordered as the oplog is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ClusterTime {
    /// Seconds since 1970.
    pub seconds: u32,
    /// Counts the oplog entries within the second, from 1.
    pub increment: u32,
}

impl From<Timestamp> for ClusterTime {
    fn from(t: Timestamp) -> Self {
        Self { seconds: t.time, increment: t.increment }
    }
}

impl From<ClusterTime> for Timestamp {
    fn from(t: ClusterTime) -> Self {
        Self { time: t.seconds, increment: t.increment }
    }
}

impl fmt::Display for ClusterTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.seconds, self.increment)
    }
}

impl ClusterTime {
    /// The time just before this one.
    #[must_use]
    pub fn before(self) -> Self {
        match self {
            Self { seconds, increment: 0 } => Self { seconds: seconds.saturating_sub(1), increment: u32::MAX },
            Self { seconds, increment } => Self { seconds, increment: increment - 1 },
        }
    }
}

/// A place in a change stream: everything up to `time` has been delivered, and `token` resumes after it.
#[derive(Debug, Clone, PartialEq)]
pub struct Position {
    /// The cluster time of the last event delivered, or of the point that an idle stream has reached. Where more events of
    /// the same time may follow, it is the time before.
    pub time: ClusterTime,
    /// The stream's resume token. None before the first batch: the stream is then opened at `time`.
    pub token: Option<Document>,
}

/// The cluster time inside a resume token: its `_data` is hexadecimal, the byte 0x82, then seconds and increment as
/// big-endian u32. That layout is the server's own (`src/mongo/db/pipeline/resume_token.h`) and not documented, so None is
/// an answer that callers must live with.
#[must_use]
pub fn token_time(token: &Document) -> Option<ClusterTime> {
    let data = token.get_str("_data").ok()?;
    let number = |range| u32::from_str_radix(data.get(range)?, 16).ok();
    if !data.get(0..2)?.eq_ignore_ascii_case("82") {
        return None;
    }
    Some(ClusterTime { seconds: number(2..10)?, increment: number(10..18)? })
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn a_token_tells_its_time() {
        let token = doc! {"_data": "8264E1A5B3000000052B0229296E04"};
        assert_eq!(token_time(&token), Some(ClusterTime { seconds: 0x64E1_A5B3, increment: 5 }));
        assert_eq!(token_time(&doc! {"_data": "64E1"}), None);
        assert_eq!(token_time(&doc! {"_data": 5}), None);
    }
}
