//! Combinations of constructs in one rule, for the reference under `docs/`. A test compares them with what
//! `plan::compile` accepts, so a new construct needs an entry here and an example in the test.

/// The kinds of rule, as in the table's head.
pub const KINDS: [&str; 4] = ["`copy` with `set`", "`copy` with `into`", "`collect`", "`aggregate`"];

/// A construct that a rule may use.
#[derive(Debug, Clone, Copy)]
pub struct Construct {
    /// The name in the table.
    pub name: &'static str,
    /// For each of [`KINDS`], the reason to refuse it; empty if the kind may use it.
    pub kinds: [&'static str; 4],
}

const COPY: &str = "a key of `copy`: the other kinds have `on_empty`";
const AGGREGATE: &str = "a key of `aggregate`";
const ELEMENT: &str = "`into` fills one array of the target, not one in each element";
const VALUE: &str = "`into` has no value of one reference to set";
const SEVERAL: &str = "beside the array, the result would belong to all elements";
const SINGLE: &str = "a tree has values of single documents";
const CREATE: &str = "an `aggregate` has one document for each key";
const TREE: &str = "in a tree, one plain field of a document holds the `_id` of its parent";
const ROOT: &str = "a document without a parent is a root: its values are in `otherwise`";
const WHOLE: &str = "the `_id` of the target is the whole key";

/// The constructs, in the table's order.
pub const CONSTRUCTS: &[Construct] = &[
    Construct { name: "`by`, `into`", kinds: [AGGREGATE, AGGREGATE, AGGREGATE, ""] },
    Construct { name: "`let`", kinds: [AGGREGATE, AGGREGATE, AGGREGATE, ""] },
    Construct { name: "`$$target`", kinds: ["", "", "", ""] },
    Construct { name: "an array in the source's path", kinds: ["", "", "", ""] },
    Construct { name: "paths in the target's elements", kinds: ["", ELEMENT, "", ""] },
    Construct { name: "paths in the elements and beside", kinds: ["", ELEMENT, SEVERAL, SEVERAL] },
    Construct { name: "arrays on both sides of `match`", kinds: ["", "", "", ""] },
    Construct { name: "`otherwise`", kinds: ["", VALUE, COPY, COPY] },
    Construct { name: "`once`", kinds: ["", VALUE, COPY, COPY] },
    Construct { name: "`on_missing: null`, `keep`", kinds: ["", "", COPY, COPY] },
    Construct { name: "`on_missing: remove`", kinds: ["", VALUE, COPY, COPY] },
    Construct { name: "`on_missing: delete`", kinds: ["", VALUE, COPY, COPY] },
    Construct { name: "`touch`", kinds: ["", "", "", ""] },
    Construct { name: "`shadow`", kinds: ["", "", "", ""] },
    Construct { name: "`recursive`", kinds: ["", SINGLE, SINGLE, ""] },
    Construct { name: "`create`", kinds: [CREATE, CREATE, CREATE, ""] },
];

/// Two constructs that no rule has together, by their names, and the reason.
pub const REFUSED: &[(&str, &str, &str)] = &[
    (
        "`$$target`",
        "paths in the elements and beside",
        "each element would have its own value, but the paths beside the array have one value for all elements",
    ),
    ("`$$target`", "`once`", "the value follows the target, and `once` keeps it"),
    ("`$$target`", "`on_missing: remove`", "it depends on the reference alone"),
    ("`$$target`", "`on_missing: delete`", "it depends on the reference alone"),
    ("paths in the target's elements", "`on_missing: delete`", "the target has other elements"),
    (
        "paths in the elements and beside",
        "`once`",
        "beside the array, the value follows the first source, which may change",
    ),
    (
        "paths in the elements and beside",
        "`on_missing: remove`",
        "beside the array, no single element holds the reference",
    ),
    ("paths in the elements and beside", "`on_missing: delete`", "the target has other elements"),
    (
        "arrays on both sides of `match`",
        "`once`",
        "beside the array, the value follows the first source, which may change",
    ),
    (
        "arrays on both sides of `match`",
        "`on_missing: remove`",
        "beside the array, no single element holds the reference",
    ),
    ("arrays on both sides of `match`", "`on_missing: delete`", "the target has other elements"),
    ("`once`", "`on_missing: null`, `keep`", "a value that is filled in once stays, whatever becomes of its source"),
    ("`once`", "`on_missing: remove`", "a value that is filled in once stays, whatever becomes of its source"),
    ("`once`", "`on_missing: delete`", "a value that is filled in once stays, whatever becomes of its source"),
    ("`otherwise`", "`once`", "both say what a target without a source has"),
    ("`otherwise`", "`on_missing: null`, `keep`", "both say what a target without a source has"),
    ("`otherwise`", "`on_missing: remove`", "both say what a target without a source has"),
    ("`otherwise`", "`on_missing: delete`", "both say what a target without a source has"),
    ("`on_missing: null`, `keep`", "`on_missing: remove`", "a rule has one `on_missing`"),
    ("`on_missing: null`, `keep`", "`on_missing: delete`", "a rule has one `on_missing`"),
    ("`on_missing: remove`", "`on_missing: delete`", "a rule has one `on_missing`"),
    (
        "`on_missing: remove`",
        "`touch`",
        "`remove` depends on the reference alone, `touch` on the differences in a target",
    ),
    ("`on_missing: delete`", "`touch`", "no target is left whose time could be set"),
    ("`recursive`", "`by`, `into`", SINGLE),
    ("`recursive`", "an array in the source's path", TREE),
    ("`recursive`", "paths in the target's elements", TREE),
    ("`recursive`", "paths in the elements and beside", TREE),
    ("`recursive`", "arrays on both sides of `match`", TREE),
    ("`recursive`", "`once`", "the documents below follow the value, and `once` keeps it"),
    ("`recursive`", "`on_missing: null`, `keep`", ROOT),
    ("`recursive`", "`on_missing: remove`", ROOT),
    ("`recursive`", "`on_missing: delete`", ROOT),
    ("`recursive`", "`touch`", "a tree is written level by level, without being compared"),
    ("`recursive`", "`shadow`", "nothing would be written that the next level could read"),
    ("`create`", "`$$target`", "a value cannot come from a document that may not exist"),
    ("`create`", "paths in the target's elements", WHOLE),
    ("`create`", "arrays on both sides of `match`", WHOLE),
    ("`create`", "`touch`", "the documents are inserted and deleted as a whole"),
    ("`create`", "`recursive`", "the documents of a tree exist"),
];

/// True if some kind of rule may use both constructs, each on its own.
#[must_use]
pub fn share_a_kind(one: &Construct, other: &Construct) -> bool {
    one.kinds.iter().zip(other.kinds).any(|(one, other)| one.is_empty() && other.is_empty())
}

/// The reason why no rule has both constructs, if they are refused together.
#[must_use]
pub fn refused(one: &str, other: &str) -> Option<&'static str> {
    let both = |(a, b, _): &&(&str, &str, &str)| (*a == one && *b == other) || (*a == other && *b == one);
    REFUSED.iter().find(both).map(|(.., why)| *why)
}

/// The table in Markdown: the constructs by kinds and by each other.
#[must_use]
pub fn table() -> String {
    let mut notes: Vec<&'static str> = Vec::new();
    let mut note = |why: &'static str| {
        let known = notes.iter().position(|known| *known == why);
        let nth = known.unwrap_or_else(|| {
            notes.push(why);
            notes.len() - 1
        });
        format!("no ({})", nth + 1)
    };
    let mut out = String::from("| | | ");
    out.push_str(&KINDS.map(|kind| format!("{kind} | ")).concat());
    let head: Vec<String> = (1..CONSTRUCTS.len()).map(|nth| letter(nth - 1).to_string()).collect();
    out.push_str(&format!("{} |\n|---|---|{}\n", head.join(" | "), "---|".repeat(KINDS.len() + head.len())));
    for (nth, one) in CONSTRUCTS.iter().enumerate() {
        out.push_str(&format!("| {} | {} |", letter(nth), one.name));
        for why in one.kinds {
            out.push_str(&format!(" {} |", if why.is_empty() { "yes".to_owned() } else { note(why) }));
        }
        for (place, other) in CONSTRUCTS[..CONSTRUCTS.len() - 1].iter().enumerate() {
            let cell = match refused(one.name, other.name) {
                _ if place >= nth => String::new(),
                Some(why) => note(why),
                None if share_a_kind(one, other) => "yes".to_owned(),
                None => "–".to_owned(),
            };
            out.push_str(&format!(" {cell} |"));
        }
        out.push('\n');
    }
    out.push_str("\n–: no kind of rule has both.\n\n");
    for (nth, why) in notes.iter().enumerate() {
        out.push_str(&format!("{}. {why}\n", nth + 1));
    }
    out
}

/// `A`, `B`, …: the name of a construct's column.
fn letter(nth: usize) -> char {
    u8::try_from(nth).ok().and_then(|nth| b'A'.checked_add(nth)).map_or('?', char::from)
}
