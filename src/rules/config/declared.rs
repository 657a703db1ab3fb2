//! The sections whose settings are independent of each other. Each setting is declared once: from it follow the field, the
//! key with its documentation, the default, and the reader.

#![expect(clippy::unreadable_literal, reason = "a default is also shown as it is written here")]

use std::time::Duration;

use denormd_model::partition::MOST;

use super::{
    diagnose::Mistake,
    key::{Form, Key, key},
    reader::{Field, Fields, Reader},
};

/// The type of a setting.
trait Setting: Sized {
    /// Reads a value of this form; None after a mistake.
    fn read(reader: &mut Reader, field: &Field<'_>, form: Form) -> Option<Self>;
}

impl Setting for u64 {
    fn read(reader: &mut Reader, field: &Field<'_>, _: Form) -> Option<Self> {
        reader.count(field)
    }
}

impl Setting for usize {
    fn read(reader: &mut Reader, field: &Field<'_>, _: Form) -> Option<Self> {
        Self::try_from(reader.count(field)?).ok()
    }
}

/// A number of partitions.
impl Setting for u32 {
    fn read(reader: &mut Reader, field: &Field<'_>, _: Form) -> Option<Self> {
        let partitions = Self::try_from(reader.count(field)?).unwrap_or(Self::MAX);
        if (1..=MOST).contains(&partitions) {
            return Some(partitions);
        }
        reader.mistake(
            Mistake::new(field.at.clone(), format!("expected 1 to {MOST} partitions, found {partitions}"))
                .hint("a few for each instance are enough: every partition reads the change streams"),
        );
        None
    }
}

impl Setting for Duration {
    fn read(reader: &mut Reader, field: &Field<'_>, form: Form) -> Option<Self> {
        let Form::Seconds(least) = form else { return reader.span(field) };
        let number = reader.integer(field)?;
        // A day: what is longer is a slip of units, and would overflow deadlines further down.
        if (least..=86_400).contains(&number) {
            return u64::try_from(number).ok().map(Self::from_secs);
        }
        let message = format!("expected {least} to 86400 seconds, found {number}");
        reader.mistake(Mistake::new(field.at.clone(), message));
        None
    }
}

/// The first word of a choice is true, the second one is false.
impl Setting for bool {
    fn read(reader: &mut Reader, field: &Field<'_>, form: Form) -> Option<Self> {
        let Form::Choice([(yes, _), (no, _)]) = form else { return reader.flag(field) };
        reader.choice(field, &[(*yes, true), (*no, false)])
    }
}

impl Setting for String {
    fn read(reader: &mut Reader, field: &Field<'_>, _: Form) -> Option<Self> {
        reader.text(field)
    }
}

impl<T: Setting> Setting for Option<T> {
    fn read(reader: &mut Reader, field: &Field<'_>, form: Form) -> Option<Self> {
        T::read(reader, field, form).map(Some)
    }
}

/// The default of a setting, as a value of its type.
macro_rules! value {
    () => {
        None
    };
    (Duration $seconds:literal) => {
        Duration::from_secs($seconds)
    };
    (String $text:literal) => {
        $text.to_owned()
    };
    ($type:ident $value:literal) => {
        $value
    };
}

/// The default of a setting, as text.
macro_rules! text {
    () => {
        ""
    };
    ($default:literal) => {
        stringify!($default)
    };
    ($default:literal $text:literal) => {
        $text
    };
}

/// Declares a section. A setting has a key, a field, its default (and the default in config syntax, if that is something
/// else), a form, and a description. One without a default is an `Option`.
macro_rules! section {
    ($(#[$doc:meta])* $section:ident, $keys:ident {
        $($(#[$of_field:meta])* $key:literal $field:ident: $type:ident $(<$inner:ident>)? $(= $default:literal $(as $text:literal)?)?, $form:expr, $about:literal;)*
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $section {
            $($(#[$of_field])* #[doc = $about] pub $field: $type $(<$inner>)?,)*
        }

        #[doc = concat!("The keys of [`", stringify!($section), "`].")]
        pub const $keys: &[Key] = &[$(key($key, $form, text!($($default $($text)?)?), $about),)*];

        impl Default for $section {
            fn default() -> Self {
                Self { $($field: value!($($type $default)?),)* }
            }
        }

        impl $section {
            /// Reads the section; a setting that is missing or wrong gets its default.
            pub(super) fn read(reader: &mut Reader, fields: &Fields<'_>) -> Self {
                let mut section = Self::default();
                $(if let Some(value) = fields.get($key).and_then(|field| Setting::read(reader, &field, $form)) {
                    section.$field = value;
                })*
                section
            }
        }
    };
}

section! {
    /// `state`: the location of denormd's own state.
    State, STATE {
        "database" database: String = "denormd" as "denormd", Form::Text,
            "The database for checkpoints, rule states, backfill progress and dead letters.";
    }
}

section! {
    /// `limits`: limits on concurrent work, memory and rates.
    Limits, LIMITS {
        "batch_keys" batch_keys: usize = 1000, Form::Count,
            "The most keys in one read or write command.";
        "batch_bytes" batch_bytes: usize = 4194304, Form::Count,
            "The most bytes that one batch reads before it writes. A larger batch is split; a single key that needs more is processed alone.";
        "batches" batches: usize = 3, Form::Count,
            "The maximum number of batches that run at once; no two contain the same key. One more may run for a rule that has no running batch.";
        "pending" pending: usize = 100000, Form::Count,
            "The most reconcile requests in memory. At this number the change streams are paused.";
        "read_timeout_seconds" read_timeout: Duration = 60, Form::Seconds(1),
            "The time limit of one read on the server. A batch that takes longer is split into eighths; with fewer than 16 keys, each key is read alone, one at a time. The limit of such a key doubles with each attempt, up to ten times this value; then the key becomes a dead letter.";
        "write_timeout_seconds" write_timeout: Duration = 5, Form::Seconds(1),
            "The time limit of one write command on the server. A target that takes longer, alone in its statement, becomes a dead letter after five attempts.";
        "destroy_grace_seconds" destroy_grace: Duration = 10, Form::Seconds(0),
            "The grace period of `on_missing: remove` and `delete`: they read again at its end, before they remove anything. Each new target with the same reference restarts the period, up to six times its length in all.";
        "destroy_per_hour" destroy_per_hour: Option<usize>, Form::Count,
            "The removal limit: the number of targets of one rule that may lose a value within an hour because their source is missing. The rule is blocked before it exceeds the limit. By default the larger of 1,000 and a tenth of the rule's targets.";
        "audit_per_second" audit_per_second: usize = 200, Form::Count,
            "Targets per second that the continuous audit of `guard: audit` compares.";
        "backfill_per_second" backfill_per_second: Option<usize>, Form::Count,
            "The most targets per second that backfills process, all rules together. By default as many as the replica set keeps up with.";
    }
}

section! {
    /// `lease`: the election of a leader among the instances of a deployment.
    Lease, LEASE {
        "ttl_seconds" ttl: Duration = 10, Form::Seconds(2),
            "The lifetime of a lease after its last renewal: 2 to 86400 seconds. Another instance takes over one second after the lease has expired. A write command may run for at most half of this time.";
        "partitions" partitions: u32 = 1, Form::Count,
            "Partitions of the keys, at most 64. Each has a leader of its own, and the instances share them. The same for all instances.";
    }
}

section! {
    /// `undo`: the values that first backfills overwrite or remove, kept for `denormd undo`.
    Undo, UNDO {
        "mode" enabled: bool = true as "keep", Form::Choice(&[ ("keep", "the values that a rule's first backfill overwrites or removes are kept"), ("off", "nothing is kept, and `denormd undo` has nothing to put back"), ]),
            "Turns the keeping of values on or off.";
        "keep" keep: Duration = 604_800 as "7d", Form::Span,
            "The time for which a value is kept.";
        "max_bytes" max_bytes: u64 = 268435456, Form::Count,
            "The most bytes of kept values, all rules together. Beyond it, a backfill continues without keeping further values, and logs a warning.";
    }
}

section! {
    /// `advise`: the thresholds of the advice, and the limits on reading. "Rules of thumb" are those of MongoDB's blog
    /// series "6 Rules of Thumb for MongoDB Schema Design". Values without a source are denormd's own.
    Advise, ADVISE {
        "sample" sample: u64 = 1000, Form::Count,
            "Documents to sample from each collection.";
        "scan_documents" scan_documents: u64 = 500000, Form::Count,
            "The most documents of a collection without an index that is read whole. A larger one is sampled.";
        "history_events" history_events: u64 = 1000000, Form::Count,
            "The most events to read from the oplog.";
        "history_seconds" history: Duration = 30, Form::Seconds(1),
            "The longest time to read events from the oplog.";
        /// "A couple of hundred", rule of thumb 3.
        ///
        "embed_elements" embed_elements: u64 = 250, Form::Count,
            "Elements: embed while the 99th percentile is below this.";
        /// "A few thousand", rule of thumb 3.
        ///
        "references_warn" references_warn: u64 = 2000, Form::Count,
            "References in an array from which `advise` warns.";
        /// "A few thousand", rule of thumb 3.
        ///
        "references_stop" references_stop: u64 = 5000, Form::Count,
            "References in an array from which `advise` advises against it.";
        /// A sixteenth of the server's limit of 16 MB.
        ///
        "document_warn_bytes" document_warn: u64 = 1048576, Form::Count,
            "Bytes of a document from which `advise` warns.";
        /// The rest up to 16 MB leaves time to act.
        ///
        "document_bad_bytes" document_bad: u64 = 10485760, Form::Count,
            "Bytes of a document from which `advise` advises against it.";
        /// "Mostly read and only seldom updated", rule of thumb 5.
        ///
        "copy_ratio" copy_ratio: u64 = 10, Form::Count,
            "Reads per write from which `advise` recommends a copy.";
        "no_copy_ratio" no_copy_ratio: u64 = 1, Form::Count,
            "Reads per write up to which `advise` recommends no copy.";
        /// The ten reviews of MongoDB's "Building with Patterns: The Subset Pattern".
        ///
        "subset" subset: u64 = 10, Form::Count,
            "Children that a parent shows, if the application's own limit is unknown.";
        /// Each adds a write to every write.
        ///
        "indexes" indexes: u64 = 10, Form::Count,
            "The most indexes on one collection.";
        "lookup_percent" lookup_percent: u64 = 10, Form::Count,
            "The largest share of `$lookup` among the reads, in percent.";
        /// MongoDB's manual, "Reduce the Number of Collections".
        ///
        "collections" collections: u64 = 10000, Form::Count,
            "The most collections.";
    }
}
