//! Crashes, killed and frozen servers and daemons, outages, attacks.

pub mod attacks;
pub mod crashes;
pub mod fault_runs;
pub mod injected;
pub mod outages;
pub mod zombies;
