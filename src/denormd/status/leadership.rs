//! The leadership of the deployment as far as this instance knows: one state machine for the page, `/readyz`, `denormd
//! status`, the metrics and the timeline. Pure.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use denormd_engine::{
    deployment::{identity::Identity, lease::Holder},
    events::Event,
};
use denormd_model::clock::millis;

/// Time without a read or a renewal after which a lease counts as unknown. It is read once a second and renewed every
/// two seconds, so this has passed five seconds after the beginning of an outage.
pub const SILENCE: Duration = Duration::from_secs(4);

/// The role of this instance in its deployment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Leadership {
    /// From the start of the process until the lease is read for the first time, and from the moment that this instance
    /// takes the lease until its pipeline follows changes.
    #[default]
    Starting,
    /// From the moment that the pipeline follows changes, while its lease is renewed.
    Leader {
        /// The number of the leader's term; of several partitions, the highest.
        term: i64,
    },
    /// While the lease is read and names other instances, or none.
    Standby {
        /// The leaders: none while the lease is free, several if partitions are shared.
        leaders: Vec<Holder>,
    },
    /// While a lease that was read or renewed before has not been for [`SILENCE`]. Ends when a lease is read again.
    Unknown {
        /// Time of the last read or renewal, in milliseconds since 1970.
        since: i64,
    },
}

/// The lease, or the leases of all partitions, as last read.
#[derive(Debug, Clone)]
pub struct Reading {
    /// Time of the read.
    pub at: Instant,
    /// The holders, by the ids of the leases; free leases are not included.
    pub held: BTreeMap<String, Holder>,
}

/// The inputs of the state.
#[derive(Debug, Clone)]
pub struct Facts<'a> {
    /// This instance.
    pub instance: &'a Identity,
    /// The terms of the running pipelines, and the time since the renewal of each lease, if there is one.
    pub running: Vec<(i64, Option<Duration>)>,
    /// The last read of the leases.
    pub read: Option<&'a Reading>,
}

impl Leadership {
    /// The role of this instance at `now`, in milliseconds since 1970.
    #[must_use]
    pub fn of(facts: &Facts<'_>, now: i64) -> Self {
        let silent = |age: Duration| (age >= SILENCE).then(|| Self::Unknown { since: now - millis(age) });
        if let Some(term) = facts.running.iter().map(|(term, _)| *term).max() {
            let renewed = facts.running.iter().filter_map(|(_, renewed)| *renewed).max();
            return renewed.and_then(silent).unwrap_or(Self::Leader { term });
        }
        let Some(read) = facts.read else { return Self::Starting };
        if let Some(unknown) = silent(read.at.elapsed()) {
            return unknown;
        }
        let mut leaders: Vec<Holder> = read.held.values().cloned().collect();
        leaders.sort_by(|a, b| (who(a), b.term).cmp(&(who(b), a.term)));
        leaders.dedup_by(|a, b| who(a) == who(b));
        if leaders.iter().any(|leader| leader.id == facts.instance.id) {
            return Self::Starting;
        }
        Self::Standby { leaders }
    }

    /// Its name in metrics and output.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Starting => Self::NAMES[0],
            Self::Leader { .. } => Self::NAMES[1],
            Self::Standby { .. } => Self::NAMES[2],
            Self::Unknown { .. } => Self::NAMES[3],
        }
    }

    /// The names of all states.
    pub const NAMES: [&'static str; 4] = ["starting", "leader", "standby", "unknown"];

    /// True if an instance leads, as far as this one knows.
    #[must_use]
    pub fn has_leader(&self) -> bool {
        match self {
            Self::Leader { .. } => true,
            Self::Standby { leaders } => !leaders.is_empty(),
            Self::Starting | Self::Unknown { .. } => false,
        }
    }

    /// True if this instance certainly leads.
    #[must_use]
    pub fn leads(&self) -> bool {
        matches!(self, Self::Leader { .. })
    }

    /// A sentence about it; None for a leader, which the summary describes by its lag.
    #[must_use]
    pub fn sentence(&self) -> Option<String> {
        match self {
            Self::Starting => Some("Starting: changes are not followed yet.".to_owned()),
            Self::Leader { .. } => None,
            Self::Standby { leaders } if leaders.is_empty() => {
                Some("Standing by: no instance leads at the moment.".to_owned())
            }
            Self::Standby { .. } => {
                let verb = if self.leaders().len() == 1 { "leads" } else { "lead" };
                Some(format!("Standing by: {} {verb}.", self.leaders().join(" and ")))
            }
            Self::Unknown { .. } => Some("Leader unknown: the lease cannot be read or renewed.".to_owned()),
        }
    }

    /// The names of the leaders of a standby, each once.
    #[must_use]
    pub fn leaders(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.holders().iter().map(|leader| leader.instance.as_str()).collect();
        names.dedup();
        names
    }

    fn holders(&self) -> &[Holder] {
        if let Self::Standby { leaders } = self { leaders } else { &[] }
    }

    /// The event for the timeline after the state `before`. The beginning and the end of a leadership are recorded
    /// where they happen, with their reasons.
    #[must_use]
    pub fn news(&self, before: &Self, now: i64) -> Option<Event> {
        let event = |at: i64, what: &str, text: String| Some(Event::new(at, what, Vec::new(), text));
        match (before, self) {
            (Self::Unknown { .. }, Self::Leader { term }) => {
                event(now, "leader", format!("this instance still leads, term {term}: its lease is renewed again"))
            }
            (_, Self::Standby { leaders })
                if !leaders.is_empty() && !before.holders().iter().map(who).eq(leaders.iter().map(who)) =>
            {
                event(now, "standby", format!("standing by: the lease names {}", self.leaders().join(" and ")))
            }
            (_, Self::Unknown { since }) if before.name() != self.name() => {
                event(*since, "leader_unknown", self.sentence()?.trim_end_matches('.').to_owned())
            }
            _ => None,
        }
    }
}

/// Name and id of the instance that holds a lease. Those of release 0.1 have no id.
fn who(holder: &Holder) -> (&str, &str) {
    (&holder.instance, &holder.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(age: u64, holders: &[&str]) -> Reading {
        // The name is the part of the id before a space: the instance `me:1 before` has the name `me:1`.
        let holder = |id: &&str| Holder {
            instance: id.split(' ').next().unwrap_or_default().to_owned(),
            id: (*id).to_owned(),
            term: 3,
            since: 0,
            until: 108_000,
        };
        let held = holders.iter().enumerate().map(|(nth, name)| (format!("d#{nth}/3"), holder(name)));
        Reading { at: Instant::now().checked_sub(Duration::from_secs(age)).unwrap(), held: held.collect() }
    }

    fn of(running: &[Option<u64>], read: Option<&Reading>) -> Leadership {
        let running = running.iter().map(|age| (7, age.map(Duration::from_secs))).collect();
        let me = Identity { host: "me".to_owned(), process: 1, id: "me:1".to_owned() };
        Leadership::of(&Facts { instance: &me, running, read }, 100_000)
    }

    #[test]
    fn it_starts_until_a_lease_is_read_and_stands_by_whoever_that_names() {
        assert_eq!(of(&[], None), Leadership::Starting);
        let of_other = reading(1, &["other:2"]);
        let standby = of(&[], Some(&of_other));
        assert_eq!(standby.sentence().unwrap(), "Standing by: other:2 leads.");
        let free = of(&[], Some(&reading(0, &[])));
        assert_eq!(free, Leadership::Standby { leaders: Vec::new() });
        let both = of(&[], Some(&reading(0, &["b:2", "a:1", "b:2"])));
        assert_eq!(both.sentence().unwrap(), "Standing by: a:1 and b:2 lead.");
        assert_eq!(of(&[], Some(&reading(0, &["me:1"]))), Leadership::Starting, "it is about to lead");
        let predecessor = of(&[], Some(&reading(0, &["me:1 before"])));
        assert_eq!(predecessor.sentence().unwrap(), "Standing by: me:1 leads.", "another container, of the same name");
        let of_release_0_1 = Reading { at: Instant::now(), held: reading(0, &[" "]).held };
        assert_eq!(of(&[], Some(&of_release_0_1)).name(), "standby", "its leases have no id");
    }

    #[test]
    fn it_leads_while_its_lease_is_renewed_and_claims_nothing_of_a_lease_that_it_cannot_read() {
        let mine = reading(0, &["me:1"]);
        assert_eq!(of(&[Some(3)], Some(&mine)), Leadership::Leader { term: 7 });
        assert_eq!(of(&[Some(4)], Some(&mine)), Leadership::Unknown { since: 96_000 });
        assert_eq!(of(&[Some(1), Some(9)], Some(&mine)).name(), "unknown", "of two leases one is not renewed");
        assert_eq!(of(&[None], None), Leadership::Leader { term: 7 }, "without a lease there is none to renew");
        let old = reading(5, &["other:2"]);
        assert_eq!(of(&[], Some(&old)), Leadership::Unknown { since: 95_000 });
        assert!(!of(&[], Some(&old)).sentence().unwrap().contains("other"));
    }

    #[test]
    fn what_is_told_in_the_timeline_is_a_change() {
        let (me, other) = (Leadership::Leader { term: 1 }, of(&[], Some(&reading(0, &["other:2"]))));
        let (nobody, unknown) = (Leadership::Standby { leaders: Vec::new() }, Leadership::Unknown { since: 0 });
        let told = |before: &Leadership, after: &Leadership| after.news(before, 0).map(|event| event.what);
        assert_eq!(told(&nobody, &other).as_deref(), Some("standby"));
        assert_eq!(told(&other, &of(&[], Some(&reading(0, &["other:2 again"])))).as_deref(), Some("standby"));
        assert_eq!(told(&other, &other), None);
        let mut renewed = other.clone();
        if let Leadership::Standby { leaders } = &mut renewed {
            leaders[0].until += 2000;
        }
        assert_eq!(told(&other, &renewed), None, "it names the same leader");
        assert_eq!(told(&other, &nobody), None, "somebody will take it in a moment");
        assert_eq!(told(&me, &unknown).as_deref(), Some("leader_unknown"));
        assert_eq!(told(&unknown, &Leadership::Unknown { since: 5 }), None);
        assert_eq!(told(&unknown, &me).as_deref(), Some("leader"), "its lease was never lost");
    }
}
