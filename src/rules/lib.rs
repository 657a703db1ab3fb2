//! The rules: the config as the user wrote it ([`config`]), and its meaning ([`plan`]). No server is asked.

pub mod config;
pub mod plan;
