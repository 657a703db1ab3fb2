//! Facts that a leader keeps between batches. They are empty at the start of each leadership, and may be lost at any
//! time.

use std::sync::Arc;

use crate::workqueue::Pending;

mod fan_outs;
mod kept;
mod removals;
mod sources;
mod traits;

pub use fan_outs::RunningFanOuts;
pub use kept::KeptValues;
pub(super) use kept::{Kept, is_behind};
pub use removals::Removals;
pub use sources::KnownSources;
pub(super) use traits::Traits;

/// Facts about the rules and their collections that spare a read, or bound what a rule removes.
#[derive(Debug, Default)]
pub struct Memory {
    /// The fan-out jobs in progress.
    pub fan_outs: RunningFanOuts,
    /// The values that rules keep in their first backfill.
    pub kept: KeptValues,
    /// The documents of trees that wait, or run.
    pub pending: Arc<Pending>,
    /// The values that rules have removed.
    pub removals: Removals,
    /// The source collections that have existed.
    pub sources: KnownSources,
    /// Traits of the rules' data that reads and writes have shown.
    pub(crate) traits: Traits,
}
