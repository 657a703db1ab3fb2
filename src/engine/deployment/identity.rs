//! The identity of an instance in announcements, leases and reports.

use std::{fmt, sync::LazyLock};

use bson::oid::ObjectId;

/// An instance of denormd: host and process for people to read, and an id to compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Host name of the machine or container.
    pub host: String,
    /// Process id.
    pub process: i64,
    /// Unique id. Host and process are not unique: a container that restarts keeps its host name, two containers may be given the
    /// same one, and their processes have the process id 1.
    pub id: String,
}

impl Identity {
    /// A new instance.
    #[must_use]
    pub fn new(host: String, process: i64) -> Self {
        Self { host, process, id: ObjectId::new().to_hex() }
    }

    /// The identity of this process, the same in every call.
    #[must_use]
    pub fn of_this_process() -> Self {
        static THIS: LazyLock<Identity> = LazyLock::new(|| {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            Identity::new(host.trim().to_owned(), std::process::id().into())
        });
        THIS.clone()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name(&self.host, self.process))
    }
}

/// The displayed name of an instance: `host:process`.
pub(super) fn name(host: &str, process: i64) -> String {
    format!("{host}:{process}")
}
