//! The command line: commands, options and their help.

mod operator;

use std::{path::PathBuf, time::Duration};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use crate::server::client::Address;
use denormd_rules::config;

pub use operator::{CheckOptions, DeadLetters, Letters, PlanOptions};

/// The config file that is read if none is named.
pub const CONFIG: &str = "denormd.yaml";

/// Keeps the fields you copy between MongoDB collections equal to their source.
#[derive(Debug, Parser)]
#[command(
    version = env!("DENORMD_VERSION"),
    about,
    after_help = "Examples:
  denormd plan --config shop.yaml            what the rules need, and whether the cluster has it
  denormd plan --config shop.yaml --apply    create what is missing
  denormd run --config shop.yaml             keep the copies up to date

Exit status: 0 done, 1 failed, 2 usage or config error, 3 check found differences, 4 the cluster lacks something,
or the state of a rule (blocked, paused, unavailable, not run yet) does not allow it."
)]
pub struct Cli {
    /// Config files and directories, layered in order.
    #[arg(long, short, global = true, env = "DENORMD_CONFIG", value_delimiter = ',', default_value = CONFIG)]
    pub config: Vec<PathBuf>,
    /// Format of the results.
    #[arg(long, global = true, value_enum, default_value_t = Output::Text)]
    pub output: Output,
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The exit statuses in the help of a command without more precise ones.
const EXIT_STATUS: &str = "Exit status: 0 done, 1 failed, 2 usage or config error, 4 the cluster lacks something, or the \
    state of a rule (blocked, paused, unavailable, not run yet) does not allow it.";

impl Cli {
    /// Reads the command line. Prints help or an error, and exits, if there is nothing to run.
    #[must_use]
    pub fn read() -> Self {
        let matches = Self::documented().get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    /// The definitions behind help, completions and man pages. Each command lists its exit statuses.
    #[must_use]
    pub fn documented() -> clap::Command {
        let command = with_exit_status(Self::command());
        let mut built = command.clone();
        built.build();
        let command = with_usage(command, &mut built);
        let template = format!(
            "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}\nOptions:\n{{options}}{{after-help}}",
            groups()
        );
        command.help_template(template)
    }
}

/// The commands by purpose, in the usual order of use, each with a short description.
const GROUPS: [(&str, &[(&str, &str)]); 6] = [
    (
        "Begin",
        &[
            ("advise", "Advise on the schema, from the data that is there"),
            ("init", "Write a first rules file from that advice"),
            ("plan", "Check the rules, and what the cluster must have for them"),
            ("role", "Print the minimal role that the rules need"),
            ("test", "Run the rules on documents in files"),
            ("diff", "Show what a change of the config means"),
        ],
    ),
    (
        "Run",
        &[
            ("run", "Run the daemon"),
            ("health", "Succeed while the running daemon is ready"),
            ("wait", "Wait until everything up to now is applied"),
        ],
    ),
    (
        "Watch",
        &[
            ("status", "Show lag, states of rules, causes and what to do"),
            ("top", "Show the same live, in the terminal"),
            ("events", "Show the timeline"),
            ("runbook", "Show what to do about an alert"),
            ("support-bundle", "Collect diagnostics in one file, for support"),
        ],
    ),
    (
        "Check and repair",
        &[
            ("check", "Compare every target with its definition"),
            ("explain", "Explain one target's values"),
            ("backfill", "Bring existing targets up to date"),
            ("dead-letters", "List, retry or drop dead letters"),
            ("undo", "Put back the values that a rule's first backfill replaced"),
            ("prune", "Remove the fields of a rule that is no longer in the config"),
        ],
    ),
    (
        "Control",
        &[
            ("pause", "Stop a rule; its fields stay as they are"),
            ("resume", "Let a paused rule run again"),
            ("unblock", "Let a blocked rule run, and agree to what it does"),
        ],
    ),
    (
        "About denormd",
        &[
            ("config", "Print the settings in force"),
            ("schema", "Print the config's JSON Schema"),
            ("completions", "Print shell completions"),
            ("man", "Write the man pages"),
            ("help", "Print the help of a command"),
        ],
    ),
];

fn groups() -> String {
    let mut out = String::new();
    for (heading, commands) in GROUPS {
        out.push_str(&format!("{heading}:\n"));
        for (name, about) in commands {
            out.push_str(&format!("  {name:<14}  {about}\n"));
        }
    }
    out
}

fn with_exit_status(command: clap::Command) -> clap::Command {
    let command = command.mut_subcommands(with_exit_status);
    let mut said = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    if !said.contains("Exit status:") {
        said = format!("{said}\n\n{EXIT_STATUS}");
    }
    command.after_help(unwrapped(&said))
}

/// Joins the lines of each paragraph, which clap wraps at the width of the terminal; examples keep their lines.
fn unwrapped(help: &str) -> String {
    let paragraphs = help.split("\n\n").map(|paragraph| {
        let is_prose = !paragraph.lines().any(|line| line.starts_with(' '));
        if is_prose { paragraph.replace('\n', " ") } else { paragraph.to_owned() }
    });
    paragraphs.collect::<Vec<_>>().join("\n\n")
}

/// Fixes the usage line of each command. In an error, clap would list the options that are set, by the environment too,
/// as if they were required.
fn with_usage(command: clap::Command, built: &mut clap::Command) -> clap::Command {
    command.mut_subcommands(|command| {
        let Some(built) = built.find_subcommand_mut(command.get_name()) else { return command };
        let usage = built.render_usage().to_string();
        let command = with_usage(command, built);
        command.override_usage(usage.trim_start_matches("Usage:").trim().to_owned())
    })
}

/// Format of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text for people.
    Text,
    /// JSON for programs.
    Json,
}

/// The commands with their options.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Runs the daemon: brings existing data up to date, then follows every change.
    #[command(after_help = "Examples:
  denormd run --config shop.yaml
  DENORMD__MONGODB__URI='mongodb://db/?replicaSet=rs0' denormd run --config rules/

On SIGTERM or SIGINT, denormd finishes the writes in flight, saves the checkpoint and exits with 0; a second signal ends
the process at once, with 1. SIGHUP reads the config again.")]
    Run {
        /// Keep running while the config files cannot be loaded or the cluster lacks something: write nothing, report the
        /// reason and try again. Rules that contradict each other still exit with 2. For a sidecar, which must not keep the
        /// application from starting.
        #[arg(long)]
        wait_for_cluster: bool,
    },
    /// Checks the config, and whether the cluster has everything it needs. Reads only.
    #[command(after_help = "Examples:
  denormd plan --config shop.yaml --offline  the config alone, without a server
  denormd plan --config shop.yaml            against the cluster, reading only
  denormd plan --config shop.yaml --apply    creates what is missing
  denormd plan --output json | jq .ready

For each rule: the paths it reads and owns, the index of each lookup; and, from a sample of its documents, the share of
references that resolve by BSON type, fan-out, growth, and what a backfill would change. Then, for each rule and in total,
how many values it would add, and how many existing ones it would overwrite or remove. It ends with `ready`, with warnings
about what looks like a mistake, or with a numbered list of what to do.

Exit status: 0 ready, with warnings or without, 1 failed, 2 usage or config error, 4 not ready: something must be done first, or a rule would be blocked.")]
    Plan(PlanOptions),
    /// Runs the rules on documents in files, and compares the results with those the files expect. Needs no server.
    #[command(after_help = "Examples:
  denormd test --config shop.yaml tests/shop.yaml        every case of the file
  denormd test tests/*.yaml --output json | jq '.[] | select(.passed | not)'
  denormd test tests/shop.yaml --uri mongodb://localhost:27017/?replicaSet=rs0

A file holds cases: the documents before the rules run, and the expected state of some of them afterwards. Values are
Extended JSON, as in rules.

  cases:
    - name: a product gets its parts' names
      given:
        parts: [{ _id: 1, name: bolt }]
        products: [{ _id: 10, parts: [{ id: 1 }] }]
      expect:
        products: [{ _id: 10, parts: [{ id: 1, name: bolt }] }]
      gone: { products: [11] }        # _ids of documents that a rule should have deleted

A document under `expect` is compared as a whole, BSON types included; documents that are not listed are not compared. Common
operators are evaluated as in MongoDB 6.0; if a rule uses any other, its case fails and names the operator. --uri runs the same cases through
the daemon's pipeline, in temporary databases (denormd_test_…) that are dropped afterwards: nothing else is touched.

Exit status: 0 every case passed, 1 one failed, 2 a mistake in a file or in the config.")]
    Test {
        /// Files of cases: .yaml, .json or .toml.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// A server to run the cases on, in databases of their own.
        #[arg(long, value_name = "URI")]
        uri: Option<String>,
    },
    /// Shows what a change of the config means: rules, owned paths, backfills, indexes, privileges, settings. Needs no
    /// server.
    #[command(after_help = "Examples:
  git show main:shop.yaml | denormd diff - shop.yaml      what a branch changes
  denormd diff old/ rules/                                two folders of config files
  denormd diff old.yaml new.yaml --markdown               for a comment on a pull request
  denormd diff old.yaml new.yaml --output json | jq '.backfills[].rule'

A new rule is backfilled, and so is one whose definition has changed: anything that affects the values that it writes. The
values of a path that no rule owns any more stay until `denormd prune`. The daemon knows a rule by its name, so a renamed
rule is a new one; diff recognises it by its source, its target and the paths it owns.
Environment variables apply to both configs; --config is ignored. An empty standard input stands for no config.

Exit status: 0 compared, whatever differs, 1 failed, 2 usage, or an error in one of the configs.")]
    Diff {
        /// The config before the change: a file, a directory, several of them separated by commas, or `-` for standard
        /// input, in the format of NEW.
        old: Layers,
        /// The config after the change.
        new: Layers,
        /// Print Markdown instead of text.
        #[arg(long, conflicts_with = "output")]
        markdown: bool,
    },
    /// Collects diagnostics for support in one file: config, plan, status, metrics, state. Contains nothing from
    /// documents.
    #[command(after_help = "Examples:
  denormd support-bundle --config shop.yaml                writes denormd-support-SECONDS.json
  denormd support-bundle --to bundle.json
  denormd support-bundle --to - | jq .daemon.status.summary

In it: the settings in force (passwords and tokens hidden), the rules, what `plan` finds, the running daemon's own status, a week of the
timeline, the state (keys and _ids hidden), dead letters counted by reason, the server's version, members and oplog,
and the indexes of the collections. It names hosts, databases, collections and fields; the rules are in it as they are in the config.")]
    SupportBundle {
        /// The output file, `-` for standard output.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
        /// The daemon to ask.
        #[command(flatten)]
        asked: DaemonAddress,
    },
    /// Prints the settings in force, each with its origin. Passwords are hidden.
    #[command(after_help = "Examples:
  denormd config --config rules/
  denormd config --output json")]
    Config,
    /// Prints the config's JSON Schema, for editors.
    #[command(after_help = "Examples:
  denormd schema > denormd.schema.json

Editors complete and check a YAML config that begins with this line:

  # yaml-language-server: $schema=denormd.schema.json")]
    Schema {
        /// Print the reference of all keys in Markdown instead.
        #[arg(long)]
        reference: bool,
    },
    /// Prints a shell's completion script.
    #[command(after_help = "Examples:
  denormd completions bash > /etc/bash_completion.d/denormd
  denormd completions zsh > ~/.zfunc/_denormd")]
    Completions {
        /// The shell to complete in.
        shell: clap_complete::Shell,
    },
    /// Writes the man pages.
    #[command(after_help = "Examples:
  denormd man | man -l -                                 this program's page
  denormd man --out /usr/local/share/man/man1            one page per command")]
    Man {
        /// The folder to write them to. Without it, one page is printed.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Prints the minimal role that the rules need, as createRole and createUser. Needs no server.
    #[command(after_help = "Examples:
  denormd role --config shop.yaml > role.js               then, in mongosh as an administrator: load('role.js')
  denormd role --update > role.js                         for a role that exists, after a change of the rules
  denormd role --name shop-denormd --with-apply           and what `plan --apply` needs
  denormd role --without-oplog                            where nobody may read local.oplog.rs
  denormd role --output json                              the command for the role alone

Each privilege is preceded by what it is for.")]
    Role(RoleOptions),
    /// Examines the data and applies MongoDB's six rules of thumb to it, with the figures behind each
    /// recommendation. Reads only.
    #[command(after_help = "Examples:
  denormd advise --uri mongodb://localhost:27017/shop         no config file is needed
  denormd advise --config shop.yaml --observe 10m             while the application is busy
  denormd advise --config shop.yaml --match products.parts.id=parts._id
  denormd advise --config shop.yaml --output json | jq '.relationships[].advice[] | select(.kind == \"copy\")'

It draws samples, counts along indexes, reads the names of changed fields from the oplog, and takes the members' counters
twice. It never writes and never touches profiler settings. Figures that it may not read are shown as \"not known\". The
thresholds are the config's section `advise`.")]
    Advise(Inspection),
    /// Writes a first rules file from the results of `advise`.
    #[command(after_help = "Examples:
  denormd init --uri mongodb://localhost:27017/shop           writes denormd.yaml
  denormd init --config shop.yaml --to rules.yaml
  denormd init --uri mongodb://localhost:27017/shop --to -    to standard output

A file that exists is not overwritten. Read what it wrote, then: denormd plan --apply")]
    Init {
        /// The file to write the rules to, `-` for standard output. The default is the config's path, if no file exists
        /// there.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
        /// The data to examine.
        #[command(flatten)]
        inspection: Inspection,
    },
    /// Puts back the values that a rule's first backfill has overwritten or removed, where nobody else has written since.
    #[command(after_help = "Examples:
  denormd undo part-names --config shop.yaml --dry-run
  denormd pause part-names && denormd undo part-names

The values are kept for seven days (`undo.keep`), unless they need more than `undo.max_bytes`. A value goes back only where its
place still holds what the first backfill wrote. Values that the rule added where there was none stay, and documents or
elements that it deleted are not kept. The leader does the work, in pages; without a leader, this command takes the lease
meanwhile. Ctrl-C stops the work at its next page; what has been put back stays. If you resume the rule, it is backfilled again,
and the replaced values are kept again.

Exit status: 0 done or nothing to do, 1 failed, 2 no such rule, 4 the rule is running, or has not run, 130 interrupted.")]
    Undo {
        /// The rule's name.
        rule: String,
        /// Report how many values would be put back, without writing anything.
        #[arg(long)]
        dry_run: bool,
    },
    /// Removes the fields of a rule that is no longer in the config, or that a changed rule no longer owns.
    #[command(after_help = "Examples:
  denormd prune old-names --config shop.yaml --dry-run
  denormd prune old-names --config shop.yaml
  denormd prune --all --dry-run                           every rule that has retired fields

Values from before the rule are removed as well, unless `denormd undo RULE` puts them back first. Fields that another rule
of the config owns are left alone. The leader does the work, in pages; without a leader, this command takes the lease
meanwhile. Ctrl-C stops the work at its next page; what has been removed stays removed.

Exit status: 0 done or nothing to do, 1 failed, 2 no such rule, 4 the rule has not run, or a rule of the leader or of another
deployment owns the fields, 130 interrupted.")]
    Prune {
        /// The rule's name.
        #[arg(required_unless_present = "all")]
        rule: Option<String>,
        /// Prune every rule that has retired fields.
        #[arg(long, conflicts_with = "rule")]
        all: bool,
        /// Report the fields to remove, and the number of documents that have them, without removing anything.
        #[arg(long)]
        dry_run: bool,
    },
    /// Brings existing targets up to date, as happens automatically for a new rule. The leader does the work, during
    /// live changes.
    #[command(after_help = "Examples:
  denormd backfill --config shop.yaml                     every rule
  denormd backfill --config shop.yaml --rule part-names   one

Returns when the backfill is done. The leader does the work, and interrupting this command does not stop the backfill.
Without a leader, this command does the work itself; if it is interrupted, the next leader resumes the backfill.

Exit status: 0 all targets are up to date, 1 failed, or some targets became dead letters, 2 usage or config error, 4 the state of a
rule does not allow it.")]
    Backfill {
        /// Rules to backfill; all of them by default.
        #[arg(long)]
        rule: Vec<String>,
        /// Request the backfill without waiting for it.
        #[arg(long)]
        no_wait: bool,
    },
    /// Agrees to the effect of a blocked rule's backfill, and lets the rule run again.
    #[command(
        alias = "release",
        after_help = "\
Examples:
  denormd unblock part-names --config shop.yaml

A rule is blocked, and its values stay as they are, when its source collection is gone, when more targets would have lost
their values than limits.destroy_per_hour allows, or when its first backfill would change existing data. `denormd status`
shows the reason and the figures. This command prints them too, counted again, and agrees at once, without asking: the rule is
backfilled, and a source that does not exist counts as empty. The agreement is for this definition of the rule. `unblock`
refuses while the rule reads fields that another rule has not written yet, because its effect is unknown.

Exit status: 0 all targets are up to date, or the rule was not blocked, 1 failed, or some targets became dead letters, 2 usage or
config error, 4 the state of the rule does not allow it."
    )]
    Unblock {
        /// The rule's name.
        rule: String,
    },
    /// Shows the running daemon's status: lag, its start and cause, the rules it affects, the risk of data loss, and
    /// advice.
    #[command(after_help = "Examples:
  denormd status --config shop.yaml
  denormd status --config shop.yaml --output json | jq .lag_seconds
  denormd status --address 127.0.0.1:9464      no config is needed

Exit status: 0 if a daemon answers, whatever its state (see `health`), 1 if none does.")]
    Status {
        /// The daemon to ask.
        #[command(flatten)]
        asked: DaemonAddress,
    },
    /// Shows the running daemon's status live in the terminal: lag, rates, backfills, causes, and a row for each rule.
    #[command(after_help = "Examples:
  denormd top --config shop.yaml
  denormd top --address 10.0.0.7:9464             no config is needed; any instance answers, a standby too

Keys: q, Esc or Ctrl-C quit; the arrows or j and k select a rule, PageUp and PageDown go further; Enter or d shows the details
of the rule, s changes the order, ? shows the keys. It asks once a second, and is not used by programs: they use `status --output json`.
While the daemon does not answer, the last state stays on the screen, marked as unknown since the last answer.

Exit status: 0 quit, 1 failed, 2 usage, or not a terminal (use `status`).")]
    Top {
        /// The daemon to ask.
        #[command(flatten)]
        asked: DaemonAddress,
    },
    /// Shows the timeline: leaders, problems and their duration, reloads, backfills. Reads it from the state database.
    #[command(after_help = "Examples:
  denormd events --config shop.yaml                the last day
  denormd events --config shop.yaml --since 7d
  denormd events --config shop.yaml --since 2h --output json | jq .[].text

It needs no running daemon. A few thousand events are kept; older ones are deleted.")]
    Events {
        /// Age of the oldest event to show: 30m, 2h, 7d.
        #[arg(long, value_name = "AGE", default_value = "1d", value_parser = age)]
        since: Duration,
    },
    /// Shows how to respond to an alert, with the running daemon's current values filled in.
    #[command(after_help = "Examples:
  denormd runbook                                  the alerts there are
  denormd runbook DenormdBehind --config shop.yaml
  denormd runbook behind --address 10.0.0.7:9464

The same text is in deploy/RUNBOOK.md.")]
    Runbook {
        /// The alert's name, with or without `Denormd`.
        alert: Option<String>,
        /// The daemon to ask.
        #[command(flatten)]
        asked: DaemonAddress,
    },
    /// Waits until everything up to now (or up to an operation time) is applied, so that you read your own writes.
    #[command(after_help = "Examples:
  denormd wait --config shop.yaml                      everything that is committed now
  denormd wait --operation-time 1700000000.5 --timeout 5

An operation time is the `operationTime` of the driver's session after a write. Chains of rules are followed to their end, and an
open backfill is waited for.

Exit status: 0 applied, except for the rules that it lists on standard error (`except` in JSON), 1 not within the timeout, or no
instance answers, 2 usage.")]
    Wait {
        /// The daemon to ask.
        #[command(flatten)]
        asked: DaemonAddress,
        /// The operation time to wait for, as seconds.increment.
        #[arg(long, value_name = "TIME")]
        operation_time: Option<String>,
        /// Maximum time to wait, in seconds.
        #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=3600))]
        timeout: u32,
    },
    /// Compares every target with its definition and reports the differences. Safe during live writes.
    #[command(after_help = "Examples:
  denormd check --config shop.yaml                         every target of every rule
  denormd check --rule part-names --sample 10000           ten thousand, drawn at random
  denormd check --rule part-names --resume                 resumes an interrupted check
  denormd check --rule part-names --repair                 the leader then writes the right values
  denormd check --output json | jq -r 'select(.target) | .target'

A difference is reported only if it persists: the target is compared again once the daemon has applied everything that was
committed at the previous comparison. Kinds: missing, surplus, type (1 instead of 1.0), length and order of an array, value,
dangling (on_missing should have removed it). Values are shown only with --show-values.

With --output json: a line for each target that differs, then one for each rule.

Exit status: 0 nothing differs (or all is repaired), 1 failed, or some documents could not be compared, 2 usage or config error,
3 differences are left, 4 the leader has another definition of a rule, or the rules cannot run.")]
    Check(CheckOptions),
    /// Shows for one target the expected value of each owned path, the source documents it comes from, and the stored
    /// value.
    #[command(after_help = "Examples:
  denormd explain part-names 17 --config shop.yaml
  denormd explain part-names 65f0c0ffee65f0c0ffee65f0      an ObjectId
  denormd explain part-names '\"17\"' --output json          Extended JSON: the string 17

Exit status: 0 explained, whatever the result, 1 there is no such document, 2 usage or config error.")]
    Explain {
        /// The rule's name.
        rule: String,
        /// The target's _id: Extended JSON, a plain string, or an ObjectId's digits.
        id: String,
    },
    /// Pauses a rule, or all: their fields stay as they are until the rule is resumed. Persists across restarts.
    #[command(after_help = "Examples:
  denormd pause part-names --config shop.yaml
  denormd pause part-names --for 30m                      resumes by itself
  denormd pause --all                                     the emergency stop

It returns when the leader reports the pause: `denormd status` and the page show it from then on.

The checkpoint advances during a pause, so a pause does not use up the oplog window, and other rules go on. The price: a
resumed rule is backfilled from the start. `denormd status` names the cause `paused`; `denormd wait` does not wait for the rule.")]
    Pause {
        /// The rule's name.
        #[arg(required_unless_present = "all")]
        rule: Option<String>,
        /// Pause all rules at once.
        #[arg(long, conflicts_with = "rule")]
        all: bool,
        /// Duration of the pause: 90s, 30m, 2h, 7d. Without it, until `denormd resume`.
        #[arg(long = "for", value_name = "TIME", value_parser = some_time)]
        time: Option<Duration>,
    },
    /// Resumes a paused rule with a full backfill, during live changes.
    #[command(after_help = "Examples:
  denormd resume part-names --config shop.yaml
  denormd resume --all                                    all that are paused")]
    Resume {
        /// The rule's name.
        #[arg(required_unless_present = "all")]
        rule: Option<String>,
        /// Resume all paused rules.
        #[arg(long, conflicts_with = "rule")]
        all: bool,
    },
    /// Lists, retries or drops dead letters: writes that failed, with their reasons.
    #[command(
        name = "dead-letters",
        subcommand,
        after_help = "Examples:
  denormd dead-letters list --config shop.yaml            which, since when, and why
  denormd dead-letters retry --rule part-names            the leader retries them at once
  denormd dead-letters drop --key 17                      deletes them"
    )]
    DeadLetters(DeadLetters),
    /// Succeeds if the running daemon is healthy: for the health checks of containers.
    #[command(after_help = "Examples:
  HEALTHCHECK CMD [\"denormd\", \"health\", \"--live\"]     is its event loop running? Independent of MongoDB
  denormd health --config shop.yaml                      for a readiness check

Exit status: 0 ready (or alive), 1 not, or no daemon answers.")]
    Health {
        /// The daemon to ask.
        #[command(flatten)]
        asked: DaemonAddress,
        /// Check that it is alive, not that it is ready.
        #[arg(long)]
        live: bool,
    },
}

/// A config in files and directories, layered in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers(pub Vec<PathBuf>);

impl Layers {
    /// True for `-`, standard input.
    #[must_use]
    pub fn is_input(&self) -> bool {
        self.0 == [PathBuf::from("-")]
    }
}

impl From<&str> for Layers {
    fn from(text: &str) -> Self {
        Self(text.split(',').map(PathBuf::from).collect())
    }
}

/// The daemon that a command asks.
#[derive(Debug, Default, clap::Args)]
pub struct DaemonAddress {
    /// The daemon's address, if it differs from the config's http.listen: IP:PORT, HOST:PORT or https://HOST:PORT.
    #[arg(long)]
    pub address: Option<Address>,
    /// The authority that issued the daemon's certificate, in PEM, if it is not a public one and not in the config.
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
}

/// Options of `role`.
#[derive(Debug, clap::Args)]
pub struct RoleOptions {
    /// The role's name.
    #[arg(long, default_value = "denormd")]
    pub name: String,
    /// Print updateRole instead, for a role that exists. It replaces all privileges: repeat the other options.
    #[arg(long)]
    pub update: bool,
    /// Include the privileges that `plan --apply` needs: createIndex, collMod, createCollection.
    #[arg(long)]
    pub with_apply: bool,
    /// Leave out the privilege to read the oplog: the remaining oplog window is then unknown.
    #[arg(long)]
    pub without_oplog: bool,
}

/// Options of `advise` and `init`.
#[derive(Debug, clap::Args)]
pub struct Inspection {
    /// The connection string, if there is no config file. With a password, DENORMD__MONGODB__URI keeps it off the
    /// process list.
    #[arg(long)]
    pub uri: Option<String>,
    /// Databases to examine. The default is the database of the config or of the connection string.
    #[arg(long)]
    pub database: Vec<String>,
    /// Time for which to count reads: 30s, 10m, 2h. Zero uses the counters since the members started.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = age)]
    pub observe: Duration,
    /// A relationship to examine: COLLECTION.PATH=COLLECTION.PATH.
    #[arg(long = "match", value_name = "PAIR", value_parser = pair)]
    pub matches: Vec<(String, String)>,
}

/// Parses a pair such as `products.parts.id=parts._id`.
fn pair(text: &str) -> Result<(String, String), String> {
    let (holder, held) = text.split_once('=').ok_or("write COLLECTION.PATH=COLLECTION.PATH")?;
    Ok((holder.trim().to_owned(), held.trim().to_owned()))
}

/// Parses a duration: `30m`, `2h`, `7d`, or seconds.
fn age(text: &str) -> Result<Duration, String> {
    config::span(text).ok_or_else(|| "write a number and s, m, h or d, as in 30m, 2h or 7d".to_owned())
}

fn some_time(text: &str) -> Result<Duration, String> {
    age(text).and_then(|time| if time.is_zero() { Err("write a time of at least 1s".to_owned()) } else { Ok(time) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_is_in_one_group_of_the_help() {
        let mut grouped: Vec<&str> =
            GROUPS.iter().flat_map(|(_, commands)| commands.iter().map(|(name, _)| *name)).collect();
        let mut known: Vec<String> =
            Cli::command().get_subcommands().map(|command| command.get_name().to_owned()).collect();
        known.push("help".to_owned());
        grouped.sort_unstable();
        known.sort_unstable();
        assert_eq!(grouped, known);
        let help = Cli::documented().render_help().to_string();
        assert!(help.contains("\nWatch:\n  status "), "{help}");
        // clap lays out the options.
        for line in help.lines().take_while(|line| *line != "Options:") {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }

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
                // clap wraps prose; wrapped here as well, it would be ragged.
                for paragraph in help.split("\n\n") {
                    let is_prose = paragraph.lines().skip(1).any(|line| !line.starts_with(' '));
                    assert!(!is_prose, "{}: {paragraph}", command.get_name());
                }
                look(command);
            }
        }
        look(&Cli::documented());
    }

    #[test]
    fn a_usage_error_names_no_option_as_required() {
        let command = ["denormd", "--config", "shop.yaml", "explain"];
        let error = Cli::documented().try_get_matches_from(command).unwrap_err().to_string();
        assert!(error.contains("\nUsage: denormd explain [OPTIONS] <RULE> <ID>\n"), "{error}");
    }

    #[test]
    fn a_pair_has_two_sides() {
        assert_eq!(pair("a.b = c._id"), Ok(("a.b".to_owned(), "c._id".to_owned())));
        assert!(pair("a.b").is_err());
    }
}
