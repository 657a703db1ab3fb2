//! What the user wrote: the sections of a config file, how they are loaded and layered, and how a mistake in them is
//! shown with its place. What the rules *mean* is decided one floor up, in [`crate::plan`].

pub mod diagnose;
pub mod load;
pub mod sections;

pub use diagnose::{ConfigPath, Mistake, Step};

pub use sections::{
    Aggregate, BackfillMode, Collect, Config, Copy, Guard, Http, KeyType, Limits, Log, LogFormat, Mongodb, OnDrift,
    OnEmpty, OnMissing, Pattern, Rule, Side, State,
};
