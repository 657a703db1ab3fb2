//! Checks that the status of each instance lists all instances with their roles.

use std::{net::SocketAddr, time::Duration};

use denormd::{
    server::client,
    status::{BEHIND, Leadership, Status},
};
use futures_util::future::join_all;
use tokio::time::Instant;

use super::instance::Instance;

/// Time limit after the faults. Until then, partitions may be handed over, and instances that are gone may be listed.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits until the status of every instance has one entry with the right role for each of them, each partition has one leader, and
/// a standby hears the leaders. Returns the first mistake that remains at the limit.
pub async fn are_shown(daemons: &[Instance]) -> Result<(), String> {
    let names: Vec<String> = daemons.iter().map(Instance::name).collect();
    let start = Instant::now();
    loop {
        let asked = join_all(daemons.iter().map(|daemon| status(daemon.address))).await;
        let found = match asked.into_iter().collect::<Option<Vec<Status>>>() {
            Some(statuses) => wrong(&names, &statuses),
            None => Some("an instance does not answer".to_owned()),
        };
        let Some(found) = found else { return Ok(()) };
        if start.elapsed() > LIMIT {
            return Err(found);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn status(instance: SocketAddr) -> Option<Status> {
    client::get(instance, "/v1/status", Duration::from_secs(5)).await.ok()?.json().ok()
}

/// The first mistake in the statuses of these instances.
fn wrong(names: &[String], statuses: &[Status]) -> Option<String> {
    let is_leader = |status: &Status| status.leadership.leads();
    let led = |status: &Status| status.partitions.as_ref().map_or_else(|| vec![0], |partitions| partitions.led.clone());
    let mut partitions: Vec<u32> = statuses.iter().filter(|status| is_leader(status)).flat_map(led).collect();
    partitions.sort_unstable();
    let of = statuses[0].partitions.as_ref().map_or(1, |partitions| partitions.of);
    if !partitions.iter().copied().eq(0..of) {
        return Some(format!("of {of} partitions, these have leaders: {partitions:?}"));
    }
    let with_names = || names.iter().map(String::as_str).zip(statuses);
    let mut leaders: Vec<&str> = with_names().filter(|(_, status)| is_leader(status)).map(|(name, _)| name).collect();
    leaders.dedup();
    with_names().find_map(|(name, status)| {
        let instances = status.instances.iter();
        let mut shown: Vec<(&str, &str, bool)> =
            instances.map(|one| (one.name.as_str(), one.role.as_str(), one.this)).collect();
        let role = |one: &Status| if is_leader(one) { "leader" } else { "standby" };
        let mut expected: Vec<(&str, &str, bool)> =
            with_names().map(|(other, one)| (other, role(one), std::ptr::eq(one, status))).collect();
        shown.sort_unstable();
        expected.sort_unstable();
        if shown != expected {
            return Some(format!("{name} names the instances {shown:?} instead of {expected:?}"));
        }
        if status.instances.iter().any(|one| one.other_rules) {
            return Some(format!("{name} says that rules differ: {:?}", status.instances));
        }
        match &status.leadership {
            Leadership::Leader { .. } => None,
            Leadership::Standby { .. } if status.leadership.leaders() == leaders => {
                let is_heard = status.heard_seconds.is_some_and(|silence| silence < BEHIND);
                (!is_heard).then(|| format!("{name} hears of its leaders only after {:?} s", status.heard_seconds))
            }
            other => Some(format!("{name} is {other:?}, and {leaders:?} lead")),
        }
    })
}
