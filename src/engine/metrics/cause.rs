//! Reasons for copies that are not up to date: one enumeration for metrics, status, page and alerts.

/// A problem that delays copies, or soon will.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// No server answers as the primary.
    NoPrimary,
    /// A user or a role lacks a privilege.
    Privilege,
    /// Writes take effect but are not majority-committed.
    NoMajority,
    /// A change stream does not answer, while the primary does.
    StreamInterrupted,
    /// History was lost: copies may be wrong until the backfill ends.
    Degraded,
    /// The source collection was dropped; the copied fields stay.
    SourceGone,
    /// The number of a rule's targets that lose their values reached the removal limit.
    RemovalLimit,
    /// The first backfill of a rule would change existing data, or its effect is not known, and nobody has agreed to that.
    Adoption,
    /// Reads or writes of a rule that is behind fail and are retried.
    Retrying,
    /// Reads or writes take long or get no answer.
    ServerSlow,
    /// A single key takes long: a fan-out to very many targets.
    HotKey,
    /// The queue is full, so the streams have to wait.
    Throttled,
    /// A stream is read faster than real time, but is still behind.
    CatchingUp,
    /// A rule's backfill is open.
    Backfilling,
    /// The existing targets of a rule wait for `denormd backfill`.
    AwaitingBackfill,
    /// Dead letters exist.
    DeadLetters,
    /// Targets differ from their definition and are not repaired (`on_drift: report`).
    DriftUnrepaired,
    /// The checkpoint will soon fall off the oplog.
    OplogShort,
    /// The checkpoint cannot be saved.
    CheckpointUnsaved,
    /// The oplog's first entry cannot be read.
    OplogUnreadable,
    /// The pipeline's loop makes no progress.
    Stalled,
    /// An operator has paused the rule.
    Paused,
    /// The cluster lacks something that a rule needs.
    Unavailable,
    /// A canary write does not come through the oplog and the pipeline, though no rule seems behind.
    CanaryLate,
    /// The config was changed, and the new one is refused.
    ConfigRefused,
    /// The lease cannot be read, taken or renewed, though a primary answers.
    LeaseUnreadable,
}

impl Cause {
    /// All causes, the most urgent first.
    pub const ALL: [Self; 26] = [
        Self::NoPrimary,
        Self::LeaseUnreadable,
        Self::Privilege,
        Self::Stalled,
        Self::StreamInterrupted,
        Self::NoMajority,
        Self::CanaryLate,
        Self::Degraded,
        Self::OplogShort,
        Self::CheckpointUnsaved,
        Self::SourceGone,
        Self::RemovalLimit,
        Self::Adoption,
        Self::Unavailable,
        Self::Retrying,
        Self::ServerSlow,
        Self::HotKey,
        Self::Throttled,
        Self::CatchingUp,
        Self::Paused,
        Self::ConfigRefused,
        Self::Backfilling,
        Self::AwaitingBackfill,
        Self::DeadLetters,
        Self::DriftUnrepaired,
        Self::OplogUnreadable,
    ];

    /// The name of the cause in metrics, status and alerts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NoPrimary => "no_primary",
            Self::Privilege => "privilege",
            Self::NoMajority => "no_majority",
            Self::StreamInterrupted => "stream_interrupted",
            Self::Degraded => "degraded",
            Self::SourceGone => "source_gone",
            Self::RemovalLimit => "removal_limit",
            Self::Adoption => "adoption",
            Self::Retrying => "retrying",
            Self::ServerSlow => "server_slow",
            Self::HotKey => "hot_key",
            Self::Throttled => "throttled",
            Self::CatchingUp => "catching_up",
            Self::Backfilling => "backfilling",
            Self::AwaitingBackfill => "awaiting_backfill",
            Self::DeadLetters => "dead_letters",
            Self::DriftUnrepaired => "drift_unrepaired",
            Self::OplogShort => "oplog_short",
            Self::CheckpointUnsaved => "checkpoint_unsaved",
            Self::OplogUnreadable => "oplog_unreadable",
            Self::Stalled => "stalled",
            Self::Paused => "paused",
            Self::Unavailable => "unavailable",
            Self::CanaryLate => "canary_late",
            Self::ConfigRefused => "config_refused",
            Self::LeaseUnreadable => "lease_unreadable",
        }
    }

    /// The name in the metrics of 0.1, which alerts may still ask for. Deprecated since 0.2.
    #[must_use]
    pub fn former_name(self) -> Option<&'static str> {
        match self {
            Self::RemovalLimit => Some("braked"),
            Self::Unavailable => Some("suspended"),
            _ => None,
        }
    }

    /// Explanation of the cause in one sentence.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::NoPrimary => "no primary of the replica set answers",
            Self::LeaseUnreadable => {
                "the lease cannot be read, taken or renewed, so no instance leads, or it is not known which one does"
            }
            Self::Privilege => "the user of `mongodb.uri` lacks a privilege",
            Self::NoMajority => "writes take effect, but a majority does not acknowledge them",
            Self::StreamInterrupted => "a change stream does not answer, though the primary does",
            Self::Degraded => "changes were lost with the oplog; copies may be wrong until the backfill ends",
            Self::SourceGone => {
                "a source collection was dropped, renamed or replaced; the fields copied from it stay as they are"
            }
            Self::RemovalLimit => {
                "more targets would have lost their values than the removal limit allows: the rule is blocked"
            }
            Self::Adoption => {
                "the first backfill of a rule would change existing data, or its effect is not known: the rule is blocked until an operator agrees"
            }
            Self::Retrying => "reads or writes fail for the moment and are tried again",
            Self::ServerSlow => "the server is slow to answer reads or to acknowledge writes",
            Self::HotKey => "one value with very many targets is being written",
            Self::Throttled => {
                "the queue is full (`limits.pending`): the change streams are not read until there is room"
            }
            Self::CatchingUp => "older changes are still being read",
            Self::Backfilling => "existing data is being brought up to date",
            Self::AwaitingBackfill => {
                "changes are applied, but existing data waits for a backfill (`backfill: manual`)"
            }
            Self::DeadLetters => "documents that could not be read or written became dead letters",
            Self::DriftUnrepaired => "targets differ from their definition and are not repaired (`on_drift: report`)",
            Self::OplogShort => "the checkpoint will soon fall off the oplog",
            Self::CheckpointUnsaved => {
                "the checkpoint cannot be saved: a restart would read all changes since the last one again"
            }
            Self::OplogUnreadable => "the remaining oplog window cannot be read",
            Self::Stalled => "the daemon's event loop is blocked",
            Self::Unavailable => "the cluster lacks something that a rule needs: that rule is stopped, the others run",
            Self::Paused => "paused by an operator: the copied fields stay as they are",
            Self::CanaryLate => {
                "a write of denormd's own has not come through for a minute, though no rule seems behind"
            }
            Self::ConfigRefused => "the config was changed and the new one is refused; the old rules stay in force",
        }
    }

    /// Recommended action.
    #[must_use]
    pub fn advice(self) -> &'static str {
        match self {
            Self::NoPrimary => "look at rs.status(); denormd resumes by itself as soon as there is a primary",
            Self::LeaseUnreadable => {
                "see the errors below: the state database must be readable and writable, with a majority of the members up"
            }
            Self::Privilege => "grant the privileges named in the errors below; denormd retries by itself",
            Self::NoMajority => "look at rs.status(): a majority of data-bearing members must be up and not far behind",
            Self::StreamInterrupted => "see the errors below; denormd reopens the stream by itself",
            Self::Degraded => "none: the backfill is running. Enlarge the oplog to prevent a recurrence",
            Self::SourceGone => {
                "restore the collection: the rule resumes by itself if its backfill would remove at most a tenth of its values; `denormd unblock RULE` accepts the loss at once, without asking"
            }
            Self::RemovalLimit => {
                "find out what deleted so many sources, and restore them first if it was a mistake; then run `denormd unblock RULE`, which lets the rule run and accepts the remaining loss"
            }
            Self::Adoption => {
                "`denormd plan` says what it would change; `denormd unblock RULE` agrees, or correct the rule in the config"
            }
            Self::Retrying => {
                "see the errors below; no change is lost meanwhile, and the rule catches up by itself when the errors end"
            }
            Self::ServerSlow => "look at the server's load and replication lag (rs.printSecondaryReplicationInfo())",
            Self::HotKey => "wait; if this happens often, copy a field that changes less often",
            Self::Throttled => {
                "look at the causes beside this one; while a backfill runs, set or lower `limits.backfill_per_second`"
            }
            Self::CatchingUp => "wait: the lag falls. If it does not, look at the server's load",
            Self::Backfilling => "wait, see its progress",
            Self::AwaitingBackfill => "`denormd backfill --rule RULE` when ready",
            Self::DeadLetters => "`denormd dead-letters list` shows which and why; they are retried automatically",
            Self::DriftUnrepaired => {
                "find out which program writes them; `denormd check --rule RULE` lists them, `denormd backfill --rule RULE` repairs them"
            }
            Self::OplogShort => {
                "remove the cause of the lag, or enlarge the oplog on every member: db.adminCommand({replSetResizeOplog: 1, size: Double(MB)})"
            }
            Self::CheckpointUnsaved => {
                "see the errors below: the state database must be writable. Once the oplog no longer reaches back to the checkpoint, a restart backfills every rule"
            }
            Self::OplogUnreadable => {
                "grant `find` on local.oplog.rs, or watch the remaining oplog window by other means; if the read takes too long, the server is overloaded; a router has no oplog, so watch each shard's"
            }
            Self::Stalled => {
                "run `denormd support-bundle --to bundle.json`, then restart the daemon, and report the file and the daemon's log"
            }
            Self::Unavailable => {
                "`denormd plan` says what is missing, see also the errors below; the rule resumes by itself, with a backfill"
            }
            Self::Paused => "`denormd resume RULE` when ready; this backfills the rule",
            Self::CanaryLate => {
                "see the errors below and rs.status(); if neither gives the reason, restart the daemon and report its log"
            }
            Self::ConfigRefused => "`denormd plan` shows what is wrong; denormd retries by itself",
        }
    }

    /// True for causes that any instance detects by itself; only the leader knows the others.
    #[must_use]
    pub fn is_of_the_instance(self) -> bool {
        matches!(self, Self::NoPrimary | Self::LeaseUnreadable | Self::Privilege | Self::ConfigRefused)
    }

    /// True if data is at risk or nothing progresses. The other causes need no action at night.
    #[must_use]
    pub fn is_severe(self) -> bool {
        match self {
            Self::NoPrimary
            | Self::LeaseUnreadable
            | Self::Privilege
            | Self::NoMajority
            | Self::StreamInterrupted
            | Self::Degraded
            | Self::SourceGone
            | Self::RemovalLimit
            | Self::Adoption
            | Self::Unavailable
            | Self::OplogShort
            | Self::Stalled
            | Self::CanaryLate => true,
            Self::Retrying
            | Self::ServerSlow
            | Self::HotKey
            | Self::Throttled
            | Self::CatchingUp
            | Self::Backfilling
            | Self::AwaitingBackfill
            | Self::DeadLetters
            | Self::DriftUnrepaired
            | Self::OplogUnreadable
            | Self::CheckpointUnsaved
            | Self::ConfigRefused
            | Self::Paused => false,
        }
    }
}
