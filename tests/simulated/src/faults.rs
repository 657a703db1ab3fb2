//! Faults of single commands, drawn from the model's seed: refusals, lost answers, delays, cursors that are gone.

use std::time::Duration;

use bson::{Document, doc};
use rand::{Rng, seq::IndexedRandom};

use crate::{
    read::time_limit,
    replication::Connection,
    replies::Failure,
    state::{Cursor, Model, State},
};

/// Errors that say nothing about the command itself. Those by which a driver learns of an election are left out: elections
/// cause them.
const REFUSALS: [i32; 12] = [6, 24, 50, 89, 112, 134, 202, 246, 262, 365, 9001, 14031];
/// Errors after the write was applied.
const UNCONFIRMED: [i32; 5] = [50, 64, 91, 100, 11602];
/// Errors that end a cursor.
const CURSORS: [i32; 3] = [43, 136, 237];

/// How often, of a thousand commands, each kind of fault strikes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Faults {
    /// An error instead of running the command.
    pub refused: u32,
    /// The connection is closed before the command runs.
    pub cut_off: u32,
    /// The command runs, and the connection is closed instead of an answer.
    pub answer_lost: u32,
    /// The write is applied, and the answer says that no majority has confirmed it.
    pub unconfirmed: u32,
    /// The command runs late, also if its client has given up by then. A write that would run after its time limit may exceed it
    /// instead.
    pub delayed: u32,
    /// The longest delay in milliseconds.
    pub longest: u64,
    /// A `getMore` finds its cursor gone.
    pub cursors: u32,
}

/// What befalls one command.
#[derive(Debug)]
pub enum Strike {
    Nothing,
    Refused(Document),
    CutOff,
    AnswerLost,
    Unconfirmed(i32),
    Delayed(Duration),
    /// A write exceeds its time limit; true if it takes effect.
    TimedOut(Duration, bool),
}

impl Model {
    /// Faults strike commands of the programs whose names begin with `program` with these frequencies from now on.
    pub fn afflict(&self, program: &str, faults: Faults) {
        self.state().faults = (program.to_owned(), faults);
    }

    /// The number of faults that have struck, by kind.
    #[must_use]
    pub fn struck(&self) -> std::collections::BTreeMap<&'static str, u32> {
        self.state().struck.clone()
    }

    /// Ends the cursors of all change streams.
    pub fn kill_streams(&self) {
        self.state().cursors.retain(|_, cursor| matches!(cursor, Cursor::Rows(..)));
        self.wake();
    }

    /// Delays each command and each answer by a random time up to `most` from now on.
    pub fn set_latency(&self, most: Duration) {
        self.state().latency = most;
    }

    /// Waits for the latency of one command or answer.
    pub(crate) async fn delay(&self) {
        let time = {
            let state = &mut *self.state();
            state.latency.mul_f64(state.draws.random())
        };
        if !time.is_zero() {
            tokio::time::sleep(time).await;
        }
    }

    /// Ignores all further commands of this program: its process was killed. Returns false if it has never connected.
    #[must_use]
    pub fn ignore(&self, program: &str) -> bool {
        self.state().ignored.insert(program.to_owned());
        self.wake();
        self.has_seen(program)
    }

    /// Holds back the commands of this program, and the answers to them, until [`Model::connect`]. Returns false if it has
    /// never connected.
    #[must_use]
    pub fn disconnect(&self, program: &str) -> bool {
        self.state().disconnected.insert(program.to_owned());
        self.has_seen(program)
    }

    /// Ends [`Model::disconnect`].
    pub fn connect(&self, program: &str) {
        self.state().disconnected.remove(program);
        self.wake();
    }

    fn has_seen(&self, program: &str) -> bool {
        self.state().programs.contains(program)
    }

    /// Waits while the program is disconnected. Returns false if it is ignored.
    pub(crate) async fn can_communicate(&self, program: &str) -> bool {
        loop {
            let changed = self.changed();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let state = self.state();
                if state.ignored.contains(program) {
                    return false;
                }
                if !state.disconnected.contains(program) {
                    return true;
                }
            }
            changed.await;
        }
    }

    pub(crate) fn strike(&self, connection: &Connection, command: &Document) -> Strike {
        self.state().strike(connection, command)
    }
}

impl State {
    fn strike(&mut self, connection: &Connection, command: &Document) -> Strike {
        let (program, faults) = &self.faults;
        let (faults, name) = (*faults, command.keys().next().map(String::as_str).unwrap_or_default());
        if program.is_empty()
            || !connection.program.starts_with(program)
            || ["hello", "isMaster", "ismaster", "endSessions", "killCursors"].contains(&name)
        {
            return Strike::Nothing;
        }
        let kinds = [
            ("refused", faults.refused),
            ("cut off", faults.cut_off),
            ("answer lost", faults.answer_lost),
            ("unconfirmed", if crate::replication::wants_majority(command) { faults.unconfirmed } else { 0 }),
            ("delayed", faults.delayed),
            ("cursor gone", if name == "getMore" { faults.cursors } else { 0 }),
        ];
        let mut drawn = self.draws.random_range(0..1000);
        let struck = kinds.into_iter().find(|(_, rate)| {
            let hit = drawn < *rate;
            drawn = drawn.saturating_sub(*rate);
            hit
        });
        let Some((kind, _)) = struck else { return Strike::Nothing };
        *self.struck.entry(kind).or_default() += 1;
        match kind {
            "refused" => Strike::Refused(self.failed(&REFUSALS)),
            "cut off" => Strike::CutOff,
            "answer lost" => Strike::AnswerLost,
            "unconfirmed" => Strike::Unconfirmed(*UNCONFIRMED.choose(&mut self.draws).unwrap_or(&64)),
            "delayed" => {
                let time = Duration::from_millis(self.draws.random_range(1..=faults.longest.max(1)));
                let limit = time_limit(command).map(|limit| Duration::from_millis(limit.unsigned_abs()));
                match limit.filter(|limit| *limit < time && ["update", "delete"].contains(&name)) {
                    Some(limit) if self.draws.random() => Strike::TimedOut(limit, self.draws.random()),
                    _ => Strike::Delayed(time),
                }
            }
            _ => {
                self.cursors.remove(&command.get_i64("getMore").unwrap_or_default());
                Strike::Refused(self.failed(&CURSORS))
            }
        }
    }

    /// The reply with one of these errors.
    fn failed(&mut self, codes: &[i32]) -> Document {
        let code = *codes.choose(&mut self.draws).unwrap_or(&6);
        let reply = Failure::new(code, "a fault of the simulation").reply();
        self.signed(reply)
    }
}

/// A reply whose write no majority has confirmed.
pub fn unconfirmed(mut reply: Document, code: i32) -> Document {
    if reply.get_f64("ok").is_ok_and(|ok| ok > 0.0) {
        reply.insert("writeConcernError", doc! {"code": code, "errmsg": "a fault of the simulation"});
    }
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_is_delayed_beyond_its_time_limit_may_exceed_it() {
        let model = Model::new(1);
        model.afflict("denormd", Faults { delayed: 1000, longest: 3000, ..Faults::default() });
        let mut connection = model.connection(None);
        "denormd".clone_into(&mut connection.program);
        let strikes =
            |command: Document| -> Vec<Strike> { (0..100).map(|_| model.strike(&connection, &command)).collect() };
        let writes = strikes(doc! {"update": "c", "maxTimeMS": 1});
        for takes_effect in [false, true] {
            let is_so = |strike: &Strike| matches!(strike, Strike::TimedOut(_, effect) if *effect == takes_effect);
            assert!(writes.iter().any(is_so));
        }
        let is_late = |strike: &Strike| matches!(strike, Strike::Delayed(_));
        assert!(writes.iter().any(is_late));
        assert!(strikes(doc! {"update": "c"}).iter().all(is_late));
        assert!(strikes(doc! {"find": "c", "maxTimeMS": 1}).iter().all(is_late));
    }
}
