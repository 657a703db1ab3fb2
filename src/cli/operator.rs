//! What the operator's commands take.

use clap::Subcommand;

/// What `check` takes.
#[derive(Debug, clap::Args)]
pub struct CheckOptions {
    /// Which rules; all of them when none is named.
    #[arg(long)]
    pub rule: Vec<String>,
    /// Only so many targets of each rule, drawn at random.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub sample: Option<u64>,
    /// Have what differs written anew, by the leader; by this command where no daemon leads.
    #[arg(long)]
    pub repair: bool,
    /// Go on where the last check was interrupted.
    #[arg(long, conflicts_with = "sample")]
    pub resume: bool,
    /// Show the expected and the stored values.
    #[arg(long)]
    pub show_values: bool,
    /// How many targets of each rule are listed; 0 for all. All are counted.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub limit: u64,
}

/// What is done with dead letters.
#[derive(Debug, Subcommand)]
pub enum DeadLetters {
    /// Lists them, the newest first.
    #[command(after_help = "Examples:
  denormd dead-letters list --config shop.yaml
  denormd dead-letters list --rule part-names --output json")]
    List {
        /// Which ones.
        #[command(flatten)]
        which: Letters,
        /// How many at most.
        #[arg(long, value_name = "N", default_value_t = 100)]
        limit: u32,
    },
    /// Has the leader try them again at once, and says what came of it.
    #[command(after_help = "Examples:
  denormd dead-letters retry --rule part-names
  denormd dead-letters retry --key 17
  denormd dead-letters retry --key '{\"$oid\": \"65f0c0ffee65f0c0ffee65f0\"}'

Exit status: 0 all are gone, 1 some failed again.")]
    Retry {
        /// Which ones.
        #[command(flatten)]
        which: Letters,
        /// All of them.
        #[arg(long, conflicts_with_all = ["rule", "key"])]
        all: bool,
    },
    /// Forgets them without trying. Their targets stay as they are until a source or a reference changes, or the audit
    /// comes round.
    #[command(after_help = "Examples:
  denormd dead-letters drop --rule part-names --key 17")]
    Drop {
        /// Which ones.
        #[command(flatten)]
        which: Letters,
        /// All of them.
        #[arg(long, conflicts_with_all = ["rule", "key"])]
        all: bool,
    },
}

/// Which dead letters.
#[derive(Debug, clap::Args)]
pub struct Letters {
    /// Of this rule.
    #[arg(long)]
    pub rule: Option<String>,
    /// With this key or target: Extended JSON, or a plain string.
    #[arg(long, value_name = "VALUE")]
    pub key: Option<String>,
}
