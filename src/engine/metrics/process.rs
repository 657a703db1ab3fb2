//! The `process_*` metrics that every Prometheus client has, read from Linux's `/proc`. Elsewhere they stay at 0.
//!
//! The `prometheus` crate's own collector would bring a second `rustix` and four more crates for these few lines.

use std::fs;

use prometheus::{Counter, Gauge, IntGauge};

use super::Families;
use denormd_mongo::error::Result;

/// Ticks of `/proc` in one second: fixed for programs on every architecture that Rust has a Linux target for.
const TICKS: f64 = 100.0;

/// The gauges of this process.
#[derive(Debug)]
pub struct Process {
    cpu: Counter,
    resident: IntGauge,
    virtual_bytes: IntGauge,
    open: IntGauge,
    most: IntGauge,
    started: Gauge,
}

/// Values read from `/proc` at one moment.
#[derive(Debug, Default, PartialEq)]
struct Reading {
    cpu_seconds: f64,
    resident_bytes: i64,
    virtual_bytes: i64,
    open_descriptors: i64,
    most_descriptors: i64,
    /// Seconds since 1970.
    started: f64,
}

impl Process {
    pub(super) fn new(families: &Families) -> Result<Self> {
        let process = Self {
            cpu: families.add(Counter::new("process_cpu_seconds_total", "User and system CPU time."))?,
            resident: families.int_gauge("process_resident_memory_bytes", "Resident memory.")?,
            virtual_bytes: families.int_gauge("process_virtual_memory_bytes", "Virtual memory.")?,
            open: families.int_gauge("process_open_fds", "Open file descriptors.")?,
            most: families.int_gauge("process_max_fds", "Maximum number of open file descriptors.")?,
            started: families
                .gauge("process_start_time_seconds", "Start time of the process, in seconds since 1970.")?,
        };
        process.refresh();
        Ok(process)
    }

    /// Updates the gauges with the current values.
    pub fn refresh(&self) {
        let Some(now) = read() else { return };
        self.cpu.inc_by((now.cpu_seconds - self.cpu.get()).max(0.0));
        self.resident.set(now.resident_bytes);
        self.virtual_bytes.set(now.virtual_bytes);
        self.open.set(now.open_descriptors);
        self.most.set(now.most_descriptors);
        self.started.set(now.started);
    }
}

fn read() -> Option<Reading> {
    let file = |name: &str| fs::read_to_string(format!("/proc/{name}")).ok();
    let open = fs::read_dir("/proc/self/fd").ok()?.count();
    let texts = [file("self/stat")?, file("self/status")?, file("self/limits")?, file("stat")?];
    let [stat, status, limits, machine] = &texts;
    Some(Reading { open_descriptors: i64::try_from(open).ok()?, ..parse(stat, status, limits, machine)? })
}

fn parse(stat: &str, status: &str, limits: &str, machine: &str) -> Option<Reading> {
    // The second field is the program's name in parentheses, which may contain anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |nth: usize| fields.get(nth)?.parse::<f64>().ok();
    let after = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<i64>().ok()
    };
    let booted = machine.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse::<f64>().ok()?;
    Some(Reading {
        cpu_seconds: (ticks(11)? + ticks(12)?) / TICKS,
        resident_bytes: after(status, "VmRSS:")? * 1024,
        virtual_bytes: after(status, "VmSize:")? * 1024,
        open_descriptors: 0,
        // "unlimited" is not a number, and means no limit.
        most_descriptors: after(limits, "Max open files").unwrap_or(i64::MAX),
        started: booted + ticks(19)? / TICKS,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_proc_says_is_read_whatever_the_program_is_called() {
        let stat = "12 (den) ormd (x) S 1 12 12 0 -1 4194560 2543 0 5 0 250 50 0 0 20 0 6 0 4200 28827648 2563 18446744073709551615 1 1";
        let status = "Name:\tdenormd\nVmSize:\t   28152 kB\nVmRSS:\t   10252 kB\n";
        let limits = "Limit                     Soft Limit           Hard Limit           Units\nMax open files            1024                 524288               files\n";
        let found = parse(stat, status, limits, "cpu 1 2 3\nbtime 1700000000\n").unwrap();
        let expected = Reading {
            cpu_seconds: 3.0,
            resident_bytes: 10252 * 1024,
            virtual_bytes: 28152 * 1024,
            open_descriptors: 0,
            most_descriptors: 1024,
            started: 1_700_000_042.0,
        };
        assert_eq!(found, expected);
        assert_eq!(parse("", status, limits, ""), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_memory_descriptors_and_a_start() {
        let now = read().unwrap();
        assert!(now.resident_bytes > 1 << 20 && now.virtual_bytes >= now.resident_bytes, "{now:?}");
        assert!(now.open_descriptors > 2 && now.most_descriptors >= now.open_descriptors, "{now:?}");
        let age = denormd_model::clock::wall_millis() / 1000
            - i64::try_from(std::time::Duration::from_secs_f64(now.started).as_secs()).unwrap();
        assert!((-5..3600).contains(&age), "{now:?}");
    }
}
