//! The change streams that the pipeline follows, and their checkpoints.

use std::{sync::Arc, time::Duration};

use tokio::{task::JoinSet, time::Instant};

use super::schedule::Schedule;
use crate::{checkpoint::store::Store, reconcile::Context, snapshot::StreamFacts, watch::StreamSpec};
use denormd_model::{
    failpoint,
    position::{ClusterTime, Position},
};
use denormd_mongo::error::{Error, Kind};

/// Interval between checkpoints while work continues.
const SAVE_EVERY: Duration = Duration::from_secs(1);

/// The name of this work in recorded errors.
pub const SAVE_POSITION: &str = "save position";

/// A stream, and its checkpoint.
#[derive(Debug)]
pub(super) struct Stream {
    pub spec: StreamSpec,
    pub saved: Option<Position>,
    /// Time of its last answer.
    pub delivered: Instant,
}

/// The streams, by their numbers.
#[derive(Debug)]
pub(super) struct Streams {
    followed: Vec<Stream>,
    /// The saving of checkpoints in progress: at most one.
    saving: JoinSet<Saved>,
    last_save: Instant,
    /// Number of effects at the last checkpoint, and a cluster time by which all of them were committed.
    effects: Option<(u64, ClusterTime)>,
    rewound: bool,
}

/// The result of saving checkpoints.
#[derive(Debug, Default)]
struct Saved {
    positions: Vec<(usize, Position)>,
    effects: Option<(u64, ClusterTime)>,
    /// The state database has an older position than the one saved before.
    rewound: bool,
}

impl Streams {
    pub fn new() -> Self {
        Self { followed: Vec::new(), saving: JoinSet::new(), last_save: Instant::now(), effects: None, rewound: false }
    }

    /// Adds a stream that is followed from its checkpoint on.
    pub fn add(&mut self, spec: StreamSpec, saved: Position) {
        self.followed.push(Stream { spec, saved: Some(saved), delivered: Instant::now() });
    }

    /// The streams, in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = &Stream> {
        self.followed.iter()
    }

    /// Records that a stream has answered; returns its database.
    pub fn delivered(&mut self, stream: usize) -> &str {
        let stream = &mut self.followed[stream];
        stream.delivered = Instant::now();
        &stream.spec.database
    }

    /// The progress of each stream.
    pub fn facts(&self, schedule: &Schedule) -> Vec<StreamFacts> {
        let facts = self.followed.iter().enumerate().map(|(nth, stream)| StreamFacts {
            database: stream.spec.database.clone(),
            reached: schedule.reached(nth).time,
            applied: schedule.applied(nth),
            saved: stream.saved.as_ref().map(|position| position.time),
            delivered: stream.delivered,
        });
        facts.collect()
    }

    /// True if a position could not be saved because the stored one is older than the one saved before.
    pub fn is_rewound(&self) -> bool {
        self.rewound
    }

    /// Saves the checkpoints in the background, at intervals.
    pub fn save_at_intervals(&mut self, context: &Arc<Context>, store: &Store, schedule: &Schedule) {
        while let Some(saved) = self.saving.try_join_next() {
            self.saved(saved.unwrap_or_default());
        }
        if self.saving.is_empty() && self.last_save.elapsed() >= SAVE_EVERY {
            self.save(context, store, schedule);
        }
    }

    /// Saves the last checkpoints, and waits until that is done.
    pub async fn close(&mut self, context: &Arc<Context>, store: &Store, schedule: &Schedule) {
        self.wait().await;
        self.save(context, store, schedule);
        self.wait().await;
    }

    async fn wait(&mut self) {
        while let Some(saved) = self.saving.join_next().await {
            self.saved(saved.unwrap_or_default());
        }
    }

    fn save(&mut self, context: &Arc<Context>, store: &Store, schedule: &Schedule) {
        self.last_save = Instant::now();
        let due: Vec<(usize, StreamSpec, Position, Option<ClusterTime>)> = self
            .followed
            .iter()
            .enumerate()
            .filter_map(|(nth, stream)| Some((nth, stream, schedule.frontier(nth)?)))
            .filter(|(_, stream, frontier)| stream.saved.as_ref() != Some(*frontier))
            .map(|(nth, stream, frontier)| {
                (nth, stream.spec.clone(), frontier.clone(), stream.saved.as_ref().map(|saved| saved.time))
            })
            .collect();
        if due.is_empty() {
            return;
        }
        let (context, store) = (context.clone(), store.clone());
        let (counted, known) = (context.counts.effects(), self.effects);
        self.saving.spawn(async move {
            let mut result = Saved::default();
            let until = match known.filter(|(before, _)| *before == counted) {
                Some((_, until)) => until,
                None => match context.server.operation_time().await {
                    Ok(now) => now,
                    Err(error) => return not_saved(&context, result, &error),
                },
            };
            result.effects = Some((counted, until));
            for (nth, spec, position, known) in due {
                failpoint::here("position-saving");
                match store.save_position(&context.server, &spec.database, &spec.pipeline, &position, known, until).await {
                    Ok(()) => {
                        failpoint::here("position-saved");
                        result.positions.push((nth, position));
                    }
                    Err(error) if error.kind == Kind::HistoryLost => {
                        tracing::error!(error = %error.message, "the cluster was restored to an earlier time: starting over from its state");
                        result.rewound = true;
                    }
                    Err(error) => result = not_saved(&context, result, &error),
                }
            }
            result
        });
    }

    fn saved(&mut self, saved: Saved) {
        for (nth, position) in saved.positions {
            self.followed[nth].saved = Some(position);
        }
        self.effects = saved.effects.or(self.effects);
        self.rewound |= saved.rewound;
    }
}

fn not_saved(context: &Context, result: Saved, error: &Error) -> Saved {
    tracing::warn!(error = %error.message, "the checkpoint could not be saved; trying again");
    context.metrics.record_error(None, SAVE_POSITION, error);
    result
}
