//! A module imports only from modules above it in CONTRIBUTING.md's listing of `src`, and the parts of a module do not import
//! each other in a cycle. Cargo refuses a cycle of crates; their order, the order of the modules in a crate and the parts
//! of the modules are checked here.

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
    entries(group).iter().map(|entry| head(entry)).filter(|head| !head.is_empty()).collect()
}

/// The entries of a braced group, up to its closing brace.
fn entries(group: &str) -> Vec<String> {
    let (mut depth, mut entries, mut entry) = (0, Vec::new(), String::new());
    for c in group.chars() {
        match c {
            '}' if depth == 0 => break,
            ',' if depth == 0 => entries.push(std::mem::take(&mut entry)),
            _ => {
                depth += i32::from(c == '{') - i32::from(c == '}');
                entry.push(c);
            }
        }
    }
    entries.push(entry);
    entries.iter().map(|entry| entry.trim().to_owned()).filter(|entry| !entry.is_empty()).collect()
}

fn contributing() -> String {
    let text = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    text.split_once("## How data flows").unwrap().1.split_once("\n## ").unwrap().0.to_owned()
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

/// A path by its names, for example `["crate", "pipeline", "Handle"]`. That of a file begins below the crate.
type Names = Vec<String>;

/// The paths that a path with groups stands for.
fn expanded(path: &str) -> Vec<Names> {
    match path.split_once('{') {
        Some((prefix, group)) => {
            entries(group).iter().flat_map(|entry| expanded(&format!("{}{entry}", prefix.trim()))).collect()
        }
        None => vec![path.split("::").map(|name| head(name.trim())).filter(|name| !name.is_empty()).collect()],
    }
}

/// The imports of a file: those that it passes on (`pub use`), and all of them.
#[derive(Default)]
struct Imports {
    passed_on: Vec<Names>,
    all: Vec<Names>,
}

impl Imports {
    fn of(text: &str) -> Self {
        let text = text.split("#[cfg(test)]\nmod ").next().unwrap();
        let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        let (mut imports, mut rest) = (Self::default(), String::new());
        for statement in code.join("\n").split_inclusive(';') {
            let declared =
                statement.rsplit_once("use ").map(|(before, path)| (before.rsplit('\n').next().unwrap().trim(), path));
            match declared.filter(|(before, _)| before.is_empty() || before.starts_with("pub") && !before.contains(' '))
            {
                Some((visibility, path)) => {
                    let paths = expanded(path);
                    if !visibility.is_empty() {
                        imports.passed_on.extend(paths.clone());
                    }
                    imports.all.extend(paths);
                }
                None => rest.push_str(statement),
            }
        }
        for start in ["crate::", "super::", "self::"] {
            for (at, _) in rest.match_indices(start).filter(|(at, _)| !rest[..*at].ends_with("::")) {
                let path = rest[at..].split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').next().unwrap();
                imports.all.extend(expanded(path));
            }
        }
        imports
    }
}

/// The imports of each file of a crate, without its root.
fn files(name: &str) -> BTreeMap<Names, Imports> {
    fn add(folder: &Path, place: &[String], out: &mut BTreeMap<Names, Imports>) {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let place = [place, &[path.file_stem().unwrap().to_string_lossy().into_owned()]].concat();
            match path.is_dir() {
                true if path.ends_with("tests") => {}
                true => add(&path, &place, out),
                false if path.extension().is_some_and(|extension| extension == "rs") => {
                    out.insert(place, Imports::of(&fs::read_to_string(&path).unwrap()));
                }
                false => {}
            }
        }
    }
    let mut out = BTreeMap::new();
    add(&root().join("src").join(name), &[], &mut out);
    out.retain(|place, _| !matches!(place.join("/").as_str(), "main" | "lib"));
    out
}

/// The file that an import of the file at `place` leads to, also through files that pass it on.
fn file_of(files: &BTreeMap<Names, Imports>, place: &[String], import: &[String], steps: u8) -> Option<Names> {
    let (mut at, mut names) = match import.first()?.as_str() {
        "crate" => (Vec::new(), &import[1..]),
        "self" => (place.to_vec(), &import[1..]),
        "super" => {
            let up = import.iter().take_while(|name| *name == "super").count();
            (place[..place.len().checked_sub(up)?].to_vec(), &import[up..])
        }
        child => (files.contains_key(&[place, &[child.to_owned()]].concat()).then(|| place.to_vec())?, import),
    };
    while let Some((name, rest)) = names.split_first() {
        let below = [at.as_slice(), std::slice::from_ref(name)].concat();
        if !files.contains_key(&below) {
            let passed_on = files.get(&at).into_iter().flat_map(|imports| &imports.passed_on);
            let mut same = passed_on.filter(|import| at != place && steps > 0 && import.last() == Some(name));
            return same.find_map(|import| file_of(files, &at, import, steps - 1)).or(Some(at));
        }
        (at, names) = (below, rest);
    }
    Some(at)
}

/// The parts of one module that import each other in a cycle, with these imports.
fn cycle(mut imports: BTreeSet<(String, String)>) -> BTreeSet<(String, String)> {
    loop {
        let importing: BTreeSet<String> = imports.iter().map(|(part, _)| part.clone()).collect();
        let imported: BTreeSet<String> = imports.iter().map(|(_, part)| part.clone()).collect();
        let before = imports.len();
        imports.retain(|(part, other)| imported.contains(part) && importing.contains(other));
        if imports.len() == before {
            return imports;
        }
    }
}

#[test]
fn the_parts_of_a_module_import_each_other_in_no_cycle() {
    let mut wrong = Vec::new();
    for (name, _) in listing() {
        let files = files(&name);
        // The imports between the parts of each module: a part's own parts count as the part.
        let mut modules: BTreeMap<Names, BTreeSet<(String, String)>> = BTreeMap::new();
        for (place, imports) in &files {
            for other in imports.all.iter().filter_map(|import| file_of(&files, place, import, 4)) {
                let common = place.iter().zip(&other).take_while(|(a, b)| a == b).count();
                if let (Some(part), Some(other)) = (place.get(common), other.get(common)) {
                    modules.entry(place[..common].to_vec()).or_default().insert((part.clone(), other.clone()));
                }
            }
        }
        for (module, imports) in modules {
            let module = [std::slice::from_ref(&name), &module].concat().join("/");
            wrong.extend(cycle(imports).iter().map(|(part, other)| format!("{module}: {part} imports {other}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_import_is_seen_in_every_form_and_a_cycle_without_what_leads_to_it() {
    let names = |path: &str| path.split("::").map(str::to_owned).collect::<Names>();
    let imports = Imports::of(
        "//! use super::no;\nuse super::{\n    b::{self, X as Y},\n    c,\n};\npub use d::Z;\nfn f() { crate::m::e() }\n\
         #[cfg(test)]\nmod tests {\n    use super::no;\n}\n",
    );
    let all = ["super::b::self", "super::b::X", "super::c", "d::Z", "crate::m::e"].map(names);
    assert_eq!((imports.all.as_slice(), imports.passed_on.as_slice()), (all.as_slice(), [names("d::Z")].as_slice()));
    let files: BTreeMap<Names, Imports> =
        [("m", "pub use a::X;"), ("m::a", "pub use b::Y;"), ("m::a::b", ""), ("m::c", "use super::X;")]
            .map(|(place, text)| (names(place), Imports::of(text)))
            .into();
    assert_eq!(file_of(&files, &names("m::c"), &names("super::X"), 4), Some(names("m::a")));
    assert_eq!(file_of(&files, &names("m::c"), &names("crate::m::a::Y"), 4), Some(names("m::a::b")));
    assert_eq!(file_of(&files, &names("m::c"), &names("std::sync::Arc"), 4), None);
    let pair = |(part, other): (&str, &str)| (part.to_owned(), other.to_owned());
    let pairs = [("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")].map(pair);
    assert_eq!(cycle(pairs.clone().into()), pairs[1..3].iter().cloned().collect());
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
