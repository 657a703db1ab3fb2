//! The config as the user wrote it: the sections of a config file, their loading and layering, and mistakes with their
//! places. The layer above, [`crate::plan`], determines the *meaning* of the rules.
//!
//! The steps in order: [`Format`] parses each text into a tree with places. `layer` merges the settings. `reader`,
//! `settings` and `rule` read the trees into [`sections`] and collect mistakes. `sources` and `excerpt` show the places
//! of the mistakes.

mod bucket;
pub mod certificate;
pub mod declared;
pub mod diagnose;
mod excerpt;
pub mod file;
pub mod format;
pub mod key;
pub mod keys;
mod layer;
pub(crate) mod literal;
pub mod load;
pub mod matrix;
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
pub use load::{
    ChangedSetting, ConfigError, Effective, Loaded, load, load_if_any, load_str, load_text, process_environment,
    snapshot,
};
pub use reader::{nearest, span};
pub use sections::{
    Advise, Aggregate, BackfillMode, Collect, Config, Copy, GroupForm, Guard, Http, KeyType, Lease, Limits, Log,
    LogFormat, Mongodb, OnDrift, OnEmpty, OnMissing, Pattern, Relation, Rule, Side, State, Undo,
};
pub use sources::{LocatedMistake, Related};
pub use test_file::{Documents, TestCase, TestFile};
pub use uri::is_known_option;
