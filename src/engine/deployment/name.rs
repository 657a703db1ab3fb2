//! The name of an instance in leases, reports and the timeline.

use std::fmt;

/// Host and process. Two instances may have the same name: a container that restarts keeps its host name, and its process has
/// the id 1 again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceName {
    /// Host name of the machine or container.
    pub host: String,
    /// Process id.
    pub process: i64,
}

impl InstanceName {
    /// The name of this process.
    #[must_use]
    pub fn of_this_process() -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Self { host: host.trim().to_owned(), process: std::process::id().into() }
    }
}

impl fmt::Display for InstanceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.process)
    }
}
