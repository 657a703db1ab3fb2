//! Faults of members and of daemons that take longer: an initial sync, a wrong clock, a state database without room, a
//! new config, another release.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Instant,
};

use bson::doc;
use rand::Rng;

use super::{Stage, pause};
use crate::support::{daemon::PATIENCE, script::found_by};

/// Collections of the state database that daemons write. `failCommand` takes one at a time.
const WRITTEN: [&str; 8] = ["positions", "rules", "leases", "terms", "instances", "events", "reports", "dead_letters"];
/// Difference of a member's clock, in seconds: far less than the ten minutes that are promised, because a lease from a
/// fast clock is waited out.
const SKEW: i32 = 20;
/// One more rule, for a config that is read again.
const ONE_MORE: &str = "  - { name: shout, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { shout: { $concat: [\"!\", { $toString: $ip }] } } } }\n";

/// The variables by which libfaketime moves the clock of a process by seconds; elapsed time is real.
fn faketime(library: &Path, seconds: i32) -> BTreeMap<String, String> {
    let variables = [
        ("LD_PRELOAD", library.display().to_string()),
        ("FAKETIME", format!("{seconds:+}s")),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
    ];
    variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

impl Stage {
    /// Makes this member the primary.
    async fn step_up(&self, member: usize) {
        let begun = Instant::now();
        while self.set.primary().await != member {
            assert!(begun.elapsed() < PATIENCE, "member {member} is not elected");
            let admin = self.set.node(member).client().await.database("admin");
            // Refused while it lacks entries that the others have.
            admin.run_command(doc! {"replSetStepUp": 1}).await.ok();
            pause(200).await;
        }
    }

    /// Removes the data of a secondary, which copies it from another member, and makes it the primary.
    pub(super) async fn resync_member(&mut self) {
        let secondary = (self.set.primary().await + 1) % 3;
        let node = self.set.node(secondary);
        node.restart_empty().await;
        let begun = Instant::now();
        loop {
            let hello = node.client().await.database("admin").run_command(doc! {"hello": 1}).await;
            if hello.is_ok_and(|hello| hello.get_bool("secondary").unwrap_or_default()) {
                break;
            }
            // It copies whole collections, on a machine that may be busy with other work.
            assert!(begun.elapsed() < 5 * PATIENCE, "the initial sync does not end");
            pause(200).await;
        }
        self.set.wait_members().await;
        self.step_up(secondary).await;
        self.struck += 1;
    }

    /// Makes a member with a wrong clock the primary, for a time.
    pub(super) async fn skew_member(&mut self, milliseconds: u64) {
        let seconds = if milliseconds.is_multiple_of(2) { SKEW } else { -SKEW };
        let Some(library) = found_by("faketime.py") else { return };
        let variables = faketime(&library, seconds);
        let place = (self.set.primary().await + 1) % 3;
        let member = self.set.node(place);
        for variables in [variables, BTreeMap::new()] {
            let is_wrong = !variables.is_empty();
            member.set_environment(variables);
            member.terminate().await;
            member.restart().await;
            self.set.wait_members().await;
            if is_wrong {
                self.step_up(place).await;
                let hello = member.client().await.database("admin").run_command(doc! {"hello": 1}).await.unwrap();
                let clock = hello.get_datetime("localTime").unwrap().timestamp_millis();
                let differs = (clock - bson::DateTime::now().timestamp_millis()) / 1000;
                assert!((differs - i64::from(seconds)).abs() < 10, "its clock differs by {differs} s");
                pause(1000 + milliseconds).await;
            }
        }
        self.struck += 1;
    }

    /// Refuses all writes to one collection of the state database for a time, as a server without room on its disk does.
    pub(super) async fn state_disk_full(&mut self, milliseconds: u64) {
        let collection = WRITTEN[self.random.random_range(0..WRITTEN.len())];
        let commands = ["update", "insert", "findAndModify", "delete"].to_vec();
        let namespace = format!("{}_state.{collection}", self.world.test.name);
        let data = doc! {"failCommands": commands, "namespace": namespace, "errorCode": 14031};
        self.fail("alwaysOn".into(), data).await;
        pause(milliseconds).await;
        self.heal_commands().await;
    }

    /// Adds a rule to the config, or removes it, and has the daemons read the file again.
    pub(super) fn reload(&mut self) {
        self.extended = !self.extended;
        self.world.write_config("denormd.yaml", if self.extended { ONE_MORE } else { "" });
        for daemon in &self.daemons {
            daemon.signal("HUP");
        }
    }

    /// Replaces an instance by one of the previous release, or one of that by one of this release.
    pub(super) async fn upgrade(&mut self) {
        let Some(previous) = self.previous.clone() else {
            println!("skipped: Upgraded wants a program of the previous release in DENORMD_PREVIOUS");
            return;
        };
        let nth = self.daemons.iter().position(|daemon| Some(daemon.pid()) != self.veteran).unwrap();
        let is_previous = self.daemons[nth].program == previous;
        self.replace(nth, (!is_previous).then_some(previous)).await;
    }

    /// Replaces every daemon of the previous release by one of this release.
    pub(super) async fn finish_upgrade(&mut self) {
        let Some(previous) = self.previous.clone() else { return };
        while let Some(nth) = self.daemons.iter().position(|daemon| daemon.program == previous) {
            self.replace(nth, None).await;
        }
    }

    /// Stops a daemon, and starts one of this program, or else of this release.
    async fn replace(&mut self, nth: usize, program: Option<PathBuf>) {
        self.daemons.remove(nth).terminate().await;
        self.daemons.push(match program {
            Some(program) => self.world.daemon_of(&program),
            None => self.world.daemon(),
        });
    }
}
