//! A module imports only from floors below its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The floors, lowest first. Modules of one floor do not import each other, except where a floor is one stage with parts.
const FLOORS: &[&[&str]] = &[
    &["error", "failpoint"],
    &["key", "field_path", "position", "rule_state"],
    &["metrics", "evaluate", "pace", "partition"],
    &["config", "change"],
    &["logging", "mongo"],
    &["plan"],
    &["request", "advise"],
    &["route", "dead_letter", "events", "watch", "checkpoint"],
    &["workqueue", "lease", "instances"],
    &["reconcile", "repartitioning"],
    &["preflight"],
    &["unavailable"],
    &["backfill", "fan_out", "audit", "check", "prune", "undo"],
    &["inspection", "dry_run"],
    &["pipeline"],
    &["leadership"],
    &["status"],
    &["server"],
    &["cli"],
    &["commands"],
];

fn floor(module: &str) -> usize {
    FLOORS
        .iter()
        .position(|floor| floor.contains(&module))
        .unwrap_or_else(|| panic!("`{module}` has no floor: add it to tests/floors.rs"))
}

/// Every `crate::module` in a text, in `use` lines (braced groups too) and in paths.
fn imports(text: &str) -> BTreeSet<String> {
    let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            Some(group) => found.extend(group_heads(group)),
            None => {
                found.insert(head(rest));
            }
        }
    }
    found
}

fn head(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The first names of the entries of a braced group, nested groups skipped.
fn group_heads(group: &str) -> Vec<String> {
    let (mut depth, mut heads, mut entry) = (0, Vec::new(), String::new());
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => heads.push(std::mem::take(&mut entry)),
            _ if depth == 0 => entry.push(c),
            _ => {}
        }
    }
    heads.push(entry);
    heads.iter().map(|entry| head(entry.trim())).filter(|head| !head.is_empty()).collect()
}

fn sources(folder: &Path, module: Option<&str>, out: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        let name = module.map_or(stem, ToOwned::to_owned);
        if path.is_dir() {
            sources(&path, Some(&name), out);
        } else if path.extension().is_some_and(|e| e == "rs") && !matches!(name.as_str(), "main" | "lib") {
            out.entry(name).or_default().push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn no_module_imports_from_its_own_floor_or_above() {
    let mut modules = BTreeMap::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), None, &mut modules);
    let mut wrong = Vec::new();
    for (module, text) in &modules {
        for import in imports(text).iter().filter(|import| *import != module) {
            if floor(import) >= floor(module) {
                wrong.push(format!("{module} imports {import}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_upward_import_is_seen_in_every_form() {
    for text in [
        "use crate::pipeline;",
        "use crate::{\n    key::{Key, X},\n    pipeline::Handle,\n};",
        "fn f() { crate::pipeline::start() }",
    ] {
        assert!(imports(text).contains("pipeline"), "{text}");
    }
    assert!(!imports("use crate::{a::{pipeline}};").contains("pipeline"));
}

fn contributing() -> String {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("CONTRIBUTING.md")).unwrap();
    text.split_once("## The way of the data").unwrap().1.split_once("\n## ").unwrap().0.to_owned()
}

/// A newcomer finds each module in the table of CONTRIBUTING.md, below those that it imports.
#[test]
fn the_table_of_modules_is_complete_and_in_order() {
    let rows = contributing();
    let rows = rows.lines().filter_map(|line| line.strip_prefix("| `")?.split_once(" | "));
    let listed: Vec<Vec<String>> =
        rows.map(|(names, _)| names.split(", ").map(|name| name.trim_matches('`').to_owned()).collect()).collect();
    let all: BTreeSet<&str> = FLOORS.iter().copied().flatten().copied().collect();
    let mut modules: Vec<&str> = listed.iter().flatten().map(String::as_str).collect();
    for row in listed.windows(2) {
        let lowest = |row: &[String]| row.iter().map(|module| floor(module)).min();
        assert!(lowest(&row[0]) <= lowest(&row[1]), "{row:?}");
    }
    modules.sort_unstable();
    assert_eq!(modules, all.into_iter().collect::<Vec<_>>());
}

/// Each step of the walk names a function that exists in its module.
#[test]
fn the_walk_of_an_event_names_functions_that_exist() {
    let mut modules = BTreeMap::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), None, &mut modules);
    let text = contributing();
    let steps = text.lines().filter(|line| line.starts_with(|first: char| first.is_ascii_digit()));
    let named: Vec<&str> = steps.flat_map(|line| line.split('`')).filter(|word| word.contains("::")).collect();
    assert!(named.len() >= 10, "{named:?}");
    for path in named {
        let (module, function) = (head(path), path.rsplit("::").next().unwrap());
        assert!(modules[&module].contains(&format!("fn {function}(")), "{path}");
    }
}
