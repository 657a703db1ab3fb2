//! The meaning of the rules: compiled rules, the paths that each depends on, and the rules that feed each other. No
//! I/O: a plan is made without a server.

pub mod bucket;
pub mod compile;
pub mod create;
pub mod expression;
pub mod graph;
pub mod privileges;
pub mod reference;
pub mod rule;
pub mod touch;
pub mod tree;

pub use bucket::Bucket;
pub use compile::{compile, is_once, narrowed, owned_paths};
pub use reference::{Pair, Reference};
pub use rule::{Assignment, Creates, Groups, Keyed, Plan, Rule, RuleId, Side, Values, is_same_definition};
