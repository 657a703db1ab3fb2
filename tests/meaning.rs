//! The meaning of rules: values, references, filters, and random histories against the oracle.

pub mod apps;
pub mod beside;
pub mod combinations;
pub mod copy_rules;
pub mod created;
pub mod evaluate;
pub mod exact_meaning;
pub mod grouped;
pub mod histories;
pub mod keys_on_server;
pub mod kinds;
pub mod model;
pub mod of_target;
pub mod patterns;
pub mod touches;
pub mod trees;
pub mod unreadable;
pub mod versions;
