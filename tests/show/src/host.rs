//! Resource usage of processes, as reported by Linux, and signals to them.

use std::{fs, process::Command, sync::LazyLock};

/// The unit of CPU time in `/proc/PID/stat`, in ticks per second.
static TICKS: LazyLock<f64> = LazyLock::new(|| {
    let output = Command::new("getconf").arg("CLK_TCK").output().expect("getconf runs");
    String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number of ticks")
});

/// The CPU seconds that a process has used.
pub fn cpu(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process that runs, on Linux");
    // The second field is a name in parentheses, which may contain anything; utime and stime are the 14th and the 15th.
    let (_, rest) = stat.rsplit_once(')').expect("a name in parentheses");
    let spent = rest.split_whitespace().skip(11).take(2);
    spent.map(|ticks| ticks.parse::<f64>().expect("a number of ticks")).sum::<f64>() / *TICKS
}

/// Memory in megabytes: the current resident memory, and its peak.
pub fn memory(pid: u32) -> (f64, f64) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process that runs, on Linux");
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.split_whitespace().next().and_then(|text| text.parse::<f64>().ok()).unwrap_or_default() / 1024.0
    };
    (of("VmRSS:"), of("VmHWM:"))
}

/// Sends a signal: `STOP` suspends a process, `CONT` resumes it.
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().expect("kill runs");
    assert!(status.success(), "SIG{name} could not be sent");
}
