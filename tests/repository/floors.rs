//! A module imports only from modules above it in CONTRIBUTING.md's listing of `src`. Cargo refuses a circle of crates; their
//! order and the order of the modules in a crate are checked here.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The name at the beginning of a text.
fn head(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
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

fn contributing() -> String {
    let text = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    text.split_once("## The way of the data").unwrap().1.split_once("\n## ").unwrap().0.to_owned()
}

/// The crates and their modules as CONTRIBUTING.md lists them. Crates of one part have no modules there.
fn listing() -> Vec<(String, Vec<String>)> {
    let mut crates: Vec<(String, Vec<String>)> = Vec::new();
    for line in contributing().lines() {
        if let Some(module) = line.strip_prefix("        ").filter(|rest| rest.starts_with(char::is_alphabetic)) {
            crates.last_mut().unwrap().1.push(head(module));
        } else if let Some((name, _)) = line.strip_prefix("      ").and_then(|rest| rest.split_once("/ ")) {
            crates.push((name.to_owned(), Vec::new()));
        }
    }
    assert!(crates.len() > 5, "the listing of `src` is not found: {crates:?}");
    crates
}

/// The text of each module of a crate, its parts included. The text of the crate's root is left out: it only lists them.
fn modules(name: &str) -> BTreeMap<String, String> {
    fn add(path: PathBuf, module: Option<&str>, out: &mut BTreeMap<String, String>) {
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        let module = module.unwrap_or(&stem);
        if path.is_dir() {
            for entry in fs::read_dir(path).unwrap() {
                add(entry.unwrap().path(), Some(module), out);
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.entry(module.to_owned()).or_default().push_str(&fs::read_to_string(&path).unwrap());
        }
    }
    let mut out = BTreeMap::new();
    for entry in fs::read_dir(root().join("src").join(name)).unwrap() {
        add(entry.unwrap().path(), None, &mut out);
    }
    out.retain(|module, _| !matches!(module.as_str(), "main" | "lib"));
    out
}

#[test]
fn a_module_imports_only_from_those_above_it() {
    let mut wrong = Vec::new();
    for (name, listed) in listing().iter().filter(|(_, listed)| !listed.is_empty()) {
        let modules = modules(name);
        assert_eq!(listed.iter().collect::<BTreeSet<_>>(), modules.keys().collect(), "the modules of `{name}`");
        for (module, text) in &modules {
            let above: Vec<&String> = listed.iter().take_while(|other| *other != module).collect();
            let upward = imports(text).into_iter().filter(|import| modules.contains_key(import) && import != module);
            wrong.extend(
                upward.filter(|import| !above.contains(&import)).map(|import| format!("{module} imports {import}")),
            );
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The standard library's clocks in a text: imported, or by their paths.
fn clocks(text: &str) -> Vec<&'static str> {
    let imports: String = text.split("use std::").skip(1).filter_map(|rest| rest.split(';').next()).collect();
    let is_used = |clock: &&str| imports.contains(clock) || text.contains(&format!("std::time::{clock}"));
    ["Instant", "SystemTime"].into_iter().filter(is_used).collect()
}

#[test]
fn only_clocks_that_a_simulation_controls_are_read() {
    let mut wrong = Vec::new();
    let mut folders = vec![root().join("src")];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("model/clock.rs") {
                let text = fs::read_to_string(&path).unwrap();
                wrong.extend(clocks(&text).into_iter().map(|clock| format!("{} uses {clock}", path.display())));
                if text.contains("DateTime::now()") {
                    wrong.push(format!("{} uses DateTime::now", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "tokio's Instant, or denormd_model::clock:\n{}", wrong.join("\n"));
}

/// The packages of the project that a package depends on.
fn dependencies(manifest: &Path) -> Vec<String> {
    let manifest: toml::Table = fs::read_to_string(manifest).unwrap().parse().unwrap();
    let names = manifest["dependencies"].as_table().unwrap().keys();
    names.filter_map(|name| Some(name.strip_prefix("denormd-")?.to_owned())).collect()
}

#[test]
fn a_crate_depends_only_on_those_above_it() {
    let listed: Vec<String> = listing().into_iter().map(|(name, _)| name).collect();
    let folders =
        fs::read_dir(root().join("src")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(folders.collect::<BTreeSet<_>>(), listed.iter().cloned().collect());
    for (at, name) in listed.iter().enumerate() {
        let folder = if name == "denormd" { root().to_owned() } else { root().join("src").join(name) };
        for dependency in dependencies(&folder.join("Cargo.toml")) {
            assert!(listed[..at].contains(&dependency), "{name} depends on {dependency}");
        }
    }
    // The daemon works without advice, and computes no expression itself.
    let engine = dependencies(&root().join("src/engine/Cargo.toml"));
    assert!(!engine.iter().any(|name| name == "advise" || name == "mql"), "{engine:?}");
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

/// Each step of the walk names a function that exists in its module.
#[test]
fn the_walk_of_an_event_names_functions_that_exist() {
    let modules = modules("engine");
    let driver: String = crate_text("mongo");
    let text = contributing();
    let steps = text.lines().filter(|line| line.starts_with(|first: char| first.is_ascii_digit()));
    let named: Vec<&str> = steps.flat_map(|line| line.split('`')).filter(|word| word.contains("::")).collect();
    assert!(named.len() >= 10, "{named:?}");
    for path in named {
        let (module, function) = (head(path), path.rsplit("::").next().unwrap());
        let text = if module == "mongo" { &driver } else { &modules[&module] };
        assert!(text.contains(&format!("fn {function}(")), "{path}");
    }
}

fn crate_text(name: &str) -> String {
    modules(name).into_values().collect()
}
