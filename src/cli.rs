//! The command line: what can be typed, and what it says of itself.

mod operator;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

pub use operator::{CheckOptions, DeadLetters, Letters};

/// Keeps the fields you copy between MongoDB collections equal to their source.
#[derive(Debug, Parser)]
#[command(
    version = env!("DENORMD_VERSION"),
    about,
    after_help = "Examples:
  denormd plan --config shop.yaml            what the rules need, and whether the cluster has it
  denormd plan --config shop.yaml --apply    create what is missing
  denormd run --config shop.yaml             keep the copies true

Exit status: 0 done, 1 failed, 2 usage or config error, 3 check found differences."
)]
pub struct Cli {
    /// Config files and directories, layered in order.
    #[arg(long, short, global = true, env = "DENORMD_CONFIG", value_delimiter = ',', default_value = "denormd.yaml")]
    pub config: Vec<PathBuf>,
    /// How results are printed.
    #[arg(long, global = true, value_enum, default_value_t = Output::Text)]
    pub output: Output,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What a command's help says of its exit status, where it says nothing more precise.
const EXIT_STATUS: &str = "Exit status: 0 done, 1 failed, 2 usage or config error.";

impl Cli {
    /// Reads the command line; prints help, or what is wrong with it, and exits.
    #[must_use]
    pub fn read() -> Self {
        let matches = Self::documented().get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    /// The definitions that help, completions and man pages come from: each command says its exit status.
    #[must_use]
    pub fn documented() -> clap::Command {
        with_exit_status(Self::command())
    }
}

fn with_exit_status(command: clap::Command) -> clap::Command {
    let command = command.mut_subcommands(with_exit_status);
    let said = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    if said.contains("Exit status:") { command } else { command.after_help(format!("{said}\n\n{EXIT_STATUS}")) }
}

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// The daemon: brings existing data up to date, then follows every change.
    #[command(after_help = "Examples:
  denormd run --config shop.yaml
  DENORMD__MONGODB__URI='mongodb://db/?replicaSet=rs0' denormd run --config rules/

SIGTERM and SIGINT end what is in flight, save the position, and exit with 0.")]
    Run,
    /// Checks the config, and what the cluster must have for it. Reads only.
    #[command(after_help = "Examples:
  denormd plan --config shop.yaml --offline  the config alone, without a server
  denormd plan --config shop.yaml            against the cluster, reading only
  denormd plan --config shop.yaml --apply    creates missing indexes and enables pre-images, after printing them
  denormd plan --output json | jq .ready

For each rule: the paths it reads and owns, the index of each lookup; and, from a sample of its documents, the share of
references that resolve by BSON type, fan-out, growth, and what a backfill would change. It ends with `ready`, or with a
numbered list of what to do.

Exit status: 0 ready, 1 failed, 2 something is to be done first.")]
    Plan {
        /// Check the config alone, without a server.
        #[arg(long, conflicts_with = "apply")]
        offline: bool,
        /// Carry out the commands that plan prints.
        #[arg(long)]
        apply: bool,
        /// How many targets of each rule are drawn at random; 0 for none.
        #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(0..=100_000))]
        sample: u32,
    },
    /// Runs the rules on documents in files, and compares what comes out with what the files expect. Asks no server.
    #[command(after_help = "Examples:
  denormd test --config shop.yaml tests/shop.yaml        every case of the file
  denormd test tests/*.yaml --output json | jq '.[] | select(.passed | not)'
  denormd test tests/shop.yaml --uri mongodb://localhost:27017/?replicaSet=rs0

A file holds cases: documents before, and what some of them should be afterwards. Values are Extended JSON, as in rules.

  cases:
    - name: a product gets its parts' names
      given:
        parts: [{ _id: 1, name: bolt }]
        products: [{ _id: 10, parts: [{ id: 1 }] }]
      expect:
        products: [{ _id: 10, parts: [{ id: 1, name: bolt }] }]
      gone: { products: [11] }        # _ids of documents that a rule should have deleted

A document under `expect` is compared whole, types told apart; one that is not listed is not compared. What rules commonly
use is evaluated here, as MongoDB 6.0 does; a rule with anything else fails its case and names it. --uri tries the same cases with the
daemon's own pipeline, in databases of their own that are dropped afterwards (denormd_test_…): nothing else is touched.

Exit status: 0 every case passed, 1 one failed, 2 a mistake in a file or in the config.")]
    Test {
        /// Files of cases: .yaml, .json or .toml.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// A server to try the cases on, in databases of their own.
        #[arg(long, value_name = "URI")]
        uri: Option<String>,
    },
    /// Writes what somebody needs who is to help into one file: config, plan, status, metrics, state. Nothing from documents.
    #[command(after_help = "Examples:
  denormd support-bundle --config shop.yaml                writes denormd-support-SECONDS.json
  denormd support-bundle --to bundle.json
  denormd support-bundle --to - | jq .daemon.status.summary

In it: the settings in force (passwords and tokens hidden), the rules, what `plan` finds, what the running daemon says of itself, a week of
the timeline, the state (keys and _ids hidden), dead letters counted by reason, the server's version, members and oplog,
and the indexes of the collections. It names hosts, databases, collections and fields; the rules are in it as they are in the config.")]
    SupportBundle {
        /// Where it goes, `-` for standard output.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
        /// Where the daemon listens, when not at the config's http.listen.
        #[arg(long, value_name = "IP:PORT")]
        address: Option<SocketAddr>,
    },
    /// Prints the settings in force, each with where it comes from. Passwords are hidden.
    #[command(after_help = "Examples:
  denormd config --config rules/
  denormd config --output json")]
    Config,
    /// Prints the config's JSON Schema, for editors.
    #[command(after_help = "Examples:
  denormd schema > denormd.schema.json
  # yaml-language-server: $schema=denormd.schema.json    first line of a YAML config, for completion and checks")]
    Schema {
        /// The reference of all keys in Markdown instead.
        #[arg(long)]
        reference: bool,
    },
    /// Prints what a shell needs to complete the commands.
    #[command(after_help = "Examples:
  denormd completions bash > /etc/bash_completion.d/denormd
  denormd completions zsh > ~/.zfunc/_denormd")]
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Writes the man pages.
    #[command(after_help = "Examples:
  denormd man | man -l -                                 this program's page
  denormd man --out /usr/local/share/man/man1            one page a command")]
    Man {
        /// The folder to write them to; without it, one page is printed.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Prints the least role that the rules need, as createRole and createUser. Asks no server.
    #[command(after_help = "Examples:
  denormd role --config shop.yaml | mongosh 'mongodb://admin@db/admin'
  denormd role --name shop-denormd --with-apply           and what `plan --apply` needs
  denormd role --output json                              the createRole command alone")]
    Role {
        /// The role's name.
        #[arg(long, default_value = "denormd")]
        name: String,
        /// With what `plan --apply` needs: createIndex, collMod, createCollection.
        #[arg(long)]
        with_apply: bool,
    },
    /// Looks at the data and says what MongoDB's six rules of thumb make of it, with the number behind each sentence. Reads only.
    #[command(after_help = "Examples:
  denormd advise --uri mongodb://localhost:27017/shop         no config file is needed
  denormd advise --config shop.yaml --observe 10m             while the application is busy
  denormd advise --match products.parts.id=parts._id          a relationship that its names do not tell
  denormd advise --output json | jq '.relationships[].advice[] | select(.kind == \"copy\")'

It draws samples, counts along indexes, reads the names of changed fields from the oplog, and takes the members' counters
twice. It never writes and never touches profiler settings. What it may not read is \"not known\". The thresholds are the
config's section `advise`.")]
    Advise(Survey),
    /// Writes a first rules file from what `advise` finds.
    #[command(after_help = "Examples:
  denormd init --uri mongodb://localhost:27017/shop           writes denormd.yaml
  denormd init --config shop.yaml --to rules.yaml
  denormd init --uri mongodb://localhost:27017/shop --to -    to standard output

A file that exists is not overwritten. Read what it wrote, then: denormd plan --apply")]
    Init {
        /// Where the rules go, `-` for standard output; the config's path where there is no such file.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
        /// What to look at.
        #[command(flatten)]
        survey: Survey,
    },
    /// Takes away the fields of a rule that is no longer in the config, or that a changed rule no longer owns.
    #[command(after_help = "Examples:
  denormd prune old-names --config shop.yaml --dry-run
  denormd prune old-names --config shop.yaml

What another rule of the config owns is left alone. The leader does it, in pages; where nobody leads, this command takes the
lease meanwhile.

Exit status: 0 done or nothing to do, 1 failed, 2 no such rule, or the leader's rules own the fields.")]
    Prune {
        /// The rule's name.
        rule: String,
        /// Say what would go, and from how many documents, and leave it.
        #[arg(long)]
        dry_run: bool,
    },
    /// Brings existing targets up to date, as a new rule does by itself. The leader does it, beside live changes.
    #[command(after_help = "Examples:
  denormd backfill --config shop.yaml                     every rule
  denormd backfill --config shop.yaml --rule part-names   one

Returns when it is done. The leader does it, and interrupting this command does not interrupt that; where nobody leads, this
command does, and the next leader goes on where it was.")]
    Backfill {
        /// Which rules; all of them when none is named.
        #[arg(long)]
        rule: Vec<String>,
        /// Ask for it, and do not wait.
        #[arg(long)]
        no_wait: bool,
    },
    /// Lets a held rule go on, and applies what the brake held back.
    #[command(after_help = "Examples:
  denormd release part-names --config shop.yaml

A rule is held when its source collection was dropped or renamed away, or when `remove` or `delete` would have destroyed
more than limits.destroy_per_hour. Released, it is backfilled: an absent source counts as an empty one.")]
    Release {
        /// The rule's name.
        rule: String,
    },
    /// What the running daemon says: are we behind, since when, on which rule, will data be lost, what to do.
    #[command(after_help = "Examples:
  denormd status --config shop.yaml
  denormd status --config shop.yaml --output json | jq .lag_seconds
  watch -n 2 denormd status --address 127.0.0.1:9464

Exit status: 0 when a daemon answers, however it fares (see `health`), 1 when none does.")]
    Status {
        /// Where the daemon listens, when not at the config's http.listen.
        #[arg(long, value_name = "IP:PORT")]
        address: Option<SocketAddr>,
    },
    /// The timeline: who led when, what was wrong and for how long, reloads, backfills. Read from the state database.
    #[command(after_help = "Examples:
  denormd events --config shop.yaml                the last day
  denormd events --config shop.yaml --since 7d
  denormd events --config shop.yaml --since 2h --output json | jq .[].text

It needs no running daemon. A few thousand events are kept; then the oldest go.")]
    Events {
        /// How far back: 30m, 2h, 7d.
        #[arg(long, value_name = "AGE", default_value = "1d", value_parser = age)]
        since: Duration,
    },
    /// What to do about an alert, with what the running daemon says filled in.
    #[command(after_help = "Examples:
  denormd runbook                                  the alerts there are
  denormd runbook DenormdBehind --config shop.yaml
  denormd runbook behind --address 10.0.0.7:9464

The same text is in deploy/RUNBOOK.md.")]
    Runbook {
        /// The alert's name, with or without `Denormd`.
        alert: Option<String>,
        /// Where the daemon listens, when not at the config's http.listen.
        #[arg(long, value_name = "IP:PORT")]
        address: Option<SocketAddr>,
    },
    /// Returns once everything up to now (or an operation time) is applied: read your writes.
    #[command(after_help = "Examples:
  denormd wait --config shop.yaml                      everything that is committed now
  denormd wait --operation-time 1700000000.5 --timeout 5

An operation time is what the driver's session holds after a write. Chains of rules are followed to their end, and an
open backfill is waited for.

Exit status: 0 applied, 1 not within the timeout or no leader answers, 2 usage.")]
    Wait {
        /// Where the daemon listens, when not at the config's http.listen.
        #[arg(long, value_name = "IP:PORT")]
        address: Option<SocketAddr>,
        /// The operation time to wait for, as seconds.increment.
        #[arg(long, value_name = "TIME")]
        operation_time: Option<String>,
        /// How many seconds to wait at most.
        #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=3600))]
        timeout: u32,
    },
    /// Compares every target with its definition and says what differs. Safe beside live writes.
    #[command(after_help = "Examples:
  denormd check --config shop.yaml                         every target of every rule
  denormd check --rule part-names --sample 10000           ten thousand, drawn at random
  denormd check --rule part-names --resume                 goes on where an interrupted one was
  denormd check --rule part-names --repair                 and has the leader write what is right
  denormd check --output json | jq -r 'select(.target) | .target'

A difference counts when it stays the same, look after look, each time that the daemon has applied everything that was
committed at the look before. Kinds: missing, surplus, type (1 instead of 1.0), length and order of an array, value,
dangling (on_missing should have taken it away). Values are shown with --show-values alone.

With --output json: a line for each target that differs, then one for each rule.

Exit status: 0 nothing differs (or all is repaired), 1 failed, 2 usage or config error, 3 differences are left.")]
    Check(CheckOptions),
    /// Says of one target what each owned path should hold, which source documents that comes from, and what is stored.
    #[command(after_help = "Examples:
  denormd explain part-names 17 --config shop.yaml
  denormd explain part-names 65f0c0ffee65f0c0ffee65f0      an ObjectId
  denormd explain part-names '\"17\"' --output json          Extended JSON: the string 17

Exit status: 0 told, however it is, 1 there is no such document, 2 usage or config error.")]
    Explain {
        /// The rule's name.
        rule: String,
        /// The target's _id: Extended JSON, a plain string, or an ObjectId's digits.
        id: String,
    },
    /// Stops a rule: its fields stay as they are until it is resumed. Takes effect within seconds, and outlives restarts.
    #[command(after_help = "Examples:
  denormd pause part-names --config shop.yaml
  denormd pause part-names --for 30m                      resumes by itself

The saved position goes on, so a pause does not use up the oplog's headroom, and other rules are not held up. The price: a
resumed rule is backfilled whole. `denormd status` names the cause `paused`; `denormd wait` does not wait for the rule.")]
    Pause {
        /// The rule's name.
        rule: String,
        /// For how long: 90s, 30m, 2h, 7d. Without it, until `denormd resume`.
        #[arg(long = "for", value_name = "TIME", value_parser = age)]
        time: Option<Duration>,
    },
    /// Lets a paused rule go on. It is backfilled whole, beside live changes.
    #[command(after_help = "Examples:
  denormd resume part-names --config shop.yaml")]
    Resume {
        /// The rule's name.
        rule: String,
    },
    /// What could not be written, and why.
    #[command(
        name = "dead-letters",
        subcommand,
        after_help = "Examples:
  denormd dead-letters list --config shop.yaml            which, since when, and why
  denormd dead-letters retry --rule part-names            has the leader try them at once
  denormd dead-letters drop --key 17                      forgets them"
    )]
    DeadLetters(DeadLetters),
    /// Succeeds when the running daemon is well: for the health checks of containers.
    #[command(after_help = "Examples:
  HEALTHCHECK CMD [\"denormd\", \"health\"]
  denormd health --live --config shop.yaml             does its loop turn? Does not depend on MongoDB

Exit status: 0 ready (or alive), 1 not, or no daemon answers.")]
    Health {
        /// Where the daemon listens, when not at the config's http.listen.
        #[arg(long, value_name = "IP:PORT")]
        address: Option<SocketAddr>,
        /// Ask whether it is alive, not whether it is ready.
        #[arg(long)]
        live: bool,
    },
}

/// What `advise` and `init` look at.
#[derive(Debug, clap::Args)]
pub struct Survey {
    /// The connection string, when there is no config file. With a password, DENORMD__MONGODB__URI keeps it off the process list.
    #[arg(long)]
    pub uri: Option<String>,
    /// Databases to look at; the config's, or the connection string's, when none is named.
    #[arg(long)]
    pub database: Vec<String>,
    /// How long reads are counted: 30s, 10m, 2h. Zero takes the counters since the members started.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = age)]
    pub observe: Duration,
    /// A relationship to look at: COLLECTION.PATH=COLLECTION.PATH.
    #[arg(long = "match", value_name = "PAIR", value_parser = pair)]
    pub matches: Vec<(String, String)>,
}

/// `products.parts.id=parts._id`
fn pair(text: &str) -> Result<(String, String), String> {
    let (holder, held) = text.split_once('=').ok_or("write COLLECTION.PATH=COLLECTION.PATH")?;
    Ok((holder.trim().to_owned(), held.trim().to_owned()))
}

/// `30m`, `2h`, `7d`, or seconds.
fn age(text: &str) -> Result<Duration, String> {
    let wrong = || "write a number and s, m, h or d, as in 30m, 2h or 7d".to_owned();
    let (number, unit) = match text.char_indices().last() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => (&text[..at], unit),
        _ => (text, 's'),
    };
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(seconds).filter(|seconds| *seconds < 1 << 32).map(Duration::from_secs).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_a_number_and_a_unit() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("7d", 604_800)] {
            assert_eq!(age(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for wrong in ["", "d", "-1d", "1.5h", "1w", "99999999999d", "ä"] {
            assert!(age(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_command_has_examples_and_says_its_exit_status() {
        fn look(command: &clap::Command) {
            for command in command.get_subcommands() {
                let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                for part in ["Examples:\n  ", "\n\nExit status: 0 "] {
                    assert!(help.contains(part), "{} has no {part:?}: {help}", command.get_name());
                }
                look(command);
            }
        }
        look(&Cli::documented());
    }

    #[test]
    fn a_pair_has_two_sides() {
        assert_eq!(pair("a.b = c._id"), Ok(("a.b".to_owned(), "c._id".to_owned())));
        assert!(pair("a.b").is_err());
    }
}
