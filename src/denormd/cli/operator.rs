//! The options of the operator's commands.

use clap::Subcommand;

/// Options of `plan`.
#[derive(Debug, clap::Args)]
pub struct PlanOptions {
    /// Check the config alone, without a server.
    #[arg(long, conflicts_with = "apply")]
    pub offline: bool,
    /// Carry out the commands that plan prints.
    #[arg(long)]
    pub apply: bool,
    /// Number of targets to draw at random for each rule; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub sample: u32,
    /// Show examples of the values that would be added, overwritten or removed.
    #[arg(long)]
    pub show_values: bool,
}

/// Options of `check`.
#[derive(Debug, clap::Args)]
pub struct CheckOptions {
    /// Rules to check; all of them by default.
    #[arg(long)]
    pub rule: Vec<String>,
    /// Check only this number of targets of each rule, drawn at random.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub sample: Option<u64>,
    /// Rewrite the targets that differ: the leader does it, or this command if there is no leader.
    #[arg(long)]
    pub repair: bool,
    /// Resume where the last check was interrupted.
    #[arg(long, conflicts_with = "sample")]
    pub resume: bool,
    /// Show the expected and the stored values.
    #[arg(long)]
    pub show_values: bool,
    /// Maximum number of targets to list for each rule; 0 for all. All are counted.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub limit: u64,
}

/// The actions on dead letters.
#[derive(Debug, Subcommand)]
pub enum DeadLetters {
    /// Lists them, the newest first.
    #[command(after_help = "Examples:
  denormd dead-letters list --config shop.yaml
  denormd dead-letters list --rule part-names --output json")]
    List {
        /// The dead letters to list.
        #[command(flatten)]
        which: Letters,
        /// Maximum number of dead letters to list.
        #[arg(long, value_name = "N", default_value_t = 100)]
        limit: u32,
    },
    /// Asks the leader to retry them at once, and reports the outcome.
    #[command(after_help = "Examples:
  denormd dead-letters retry --rule part-names
  denormd dead-letters retry --key 17
  denormd dead-letters retry --key 65f0c0ffee65f0c0ffee65f0        an ObjectId

Exit status: 0 all are gone, 1 some failed again, 2 usage or config error, 4 a rule is blocked, paused or unavailable, has not
run or, with --all or --key, is not in this config.")]
    Retry {
        /// The dead letters to retry.
        #[command(flatten)]
        which: Letters,
        /// Retry all of them.
        #[arg(long, conflicts_with_all = ["rule", "key"])]
        all: bool,
    },
    /// Drops them without a retry. Their targets stay as they are until a source or a reference changes, or until the
    /// next audit, unless the rule has `guard: off` or `on_drift: report`.
    #[command(after_help = "Examples:
  denormd dead-letters drop --rule part-names --key 17")]
    Drop {
        /// The dead letters to drop.
        #[command(flatten)]
        which: Letters,
        /// Drop all of them.
        #[arg(long, conflicts_with_all = ["rule", "key"])]
        all: bool,
    },
}

/// Options that select dead letters.
#[derive(Debug, clap::Args)]
pub struct Letters {
    /// Only those of this rule.
    #[arg(long)]
    pub rule: Option<String>,
    /// Only those with this key or target: Extended JSON, a plain string, or an ObjectId's digits.
    #[arg(long, value_name = "VALUE")]
    pub key: Option<String>,
}
