//! What the user wrote: the sections of a config file, how they are loaded and layered, and how a mistake in them is
//! shown with its place. What the rules *mean* is decided one floor up, in [`crate::plan`].
//!
//! The way of a config through this floor: [`Format`] turns each text into a tree with places, `layer` lays the settings
//! over each other, `reader`, `settings` and `rule` read trees into [`sections`] and collect mistakes, `sources` and
//! `excerpt` show where those stand.

pub mod certificate;
pub mod diagnose;
mod excerpt;
pub mod file;
pub mod format;
pub mod keys;
mod layer;
mod literal;
pub mod load;
mod reader;
mod rule;
pub mod schema;
pub mod sections;
mod settings;
mod sources;
mod test_file;
mod tree;
mod uri;

pub use certificate::Certificate;
pub use diagnose::{ConfigPath, Mistake, Step};
pub use excerpt::Place;
pub use format::Format;
pub use load::{ConfigError, Effective, Loaded, load, load_if_any, load_str, load_text, process_environment, snapshot};
pub use reader::span;
pub use sections::{
    Advise, Aggregate, BackfillMode, Collect, Config, Copy, Guard, Http, KeyType, Lease, Limits, Log, LogFormat,
    Mongodb, OnDrift, OnEmpty, OnMissing, Pattern, Rule, Side, State,
};
pub use sources::{LocatedMistake, Related};
pub use test_file::{Documents, TestCase, TestFile};
pub use uri::is_known_option;
