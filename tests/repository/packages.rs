//! The metadata of the packages in Cargo.toml: it names files that exist, and both formats bring the same. `make try-packages`
//! installs them.

use std::{collections::BTreeSet, path::Path, process::Command};

use toml::{Table, Value};

/// Made by deploy/build-packages.sh, from the binary.
const STAGE: &str = "target/package/";
const STAGED: [&str; 5] =
    ["denormd", "man/*.1", "completions/denormd.bash", "completions/denormd.fish", "completions/denormd.zsh"];
/// cargo-deb finds these by their names, and makes a file with the licence.
const BY_NAME: [&str; 3] = ["deploy/systemd/denormd.service", "deploy/systemd/denormd.sysusers", "LICENSE"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn package() -> Table {
    let mut package = manifest()["package"].as_table().unwrap().clone();
    // All crates share the rest, such as the version.
    package.extend(manifest()["workspace"]["package"].as_table().unwrap().clone());
    package
}

fn manifest() -> Table {
    std::fs::read_to_string(root().join("Cargo.toml")).unwrap().parse().unwrap()
}

/// Source and destination of each file of the .deb.
fn deb(package: &Table) -> Vec<(String, String)> {
    let assets = package["metadata"]["deb"]["assets"].as_array().unwrap().iter();
    let text = |asset: &Value, at: usize| asset[at].as_str().unwrap().to_owned();
    assets.map(|asset| (text(asset, 0), format!("/{}", text(asset, 1)))).collect()
}

/// Source and destination of each file of the .rpm.
fn rpm(package: &Table) -> Vec<(String, String)> {
    let assets = package["metadata"]["generate-rpm"]["assets"].as_array().unwrap().iter();
    let text = |asset: &Value, key: &str| asset[key].as_str().unwrap().to_owned();
    assets.map(|asset| (text(asset, "source"), text(asset, "dest"))).collect()
}

fn exists(source: &str) -> bool {
    let path = root().join(source);
    match source.split_once("*.") {
        Some((folder, extension)) => std::fs::read_dir(root().join(folder)).is_ok_and(|entries| {
            entries.flatten().any(|entry| entry.path().extension().is_some_and(|found| found == extension))
        }),
        None => path.is_file(),
    }
}

#[test]
fn the_metadata_names_files_that_exist() {
    let package = package();
    let staged: BTreeSet<String> = STAGED.iter().map(|name| format!("{STAGE}{name}")).collect();
    for (format, assets) in [("deb", deb(&package)), ("rpm", rpm(&package))] {
        let named: BTreeSet<String> =
            assets.iter().map(|(source, _)| source.clone()).filter(|source| source.starts_with(STAGE)).collect();
        assert_eq!(named, staged, "{format}");
        for (source, _) in assets.iter().filter(|(source, _)| !source.starts_with(STAGE)) {
            assert!(exists(source), "{format}: there is no {source}");
        }
    }
    for script in ["post_install_script", "pre_uninstall_script", "post_uninstall_script"] {
        assert!(exists(package["metadata"]["generate-rpm"][script].as_str().unwrap()), "{script}");
    }
    let sources = |assets: Vec<(String, String)>| assets.into_iter().map(|(source, _)| source).collect::<BTreeSet<_>>();
    let mut debian = sources(deb(&package));
    debian.extend(BY_NAME.map(str::to_owned));
    assert_eq!(debian, sources(rpm(&package)), "both formats bring the same files");
    assert!(BY_NAME.iter().all(|source| exists(source)));
}

#[test]
fn the_unit_starts_the_packaged_program() {
    let unit = std::fs::read_to_string(root().join("deploy/systemd/denormd.service")).unwrap();
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let program = command.split(' ').next().unwrap();
    let package = package();
    for (source, target) in deb(&package).into_iter().chain(rpm(&package)) {
        if source == format!("{STAGE}denormd") {
            let target = if target.ends_with('/') { format!("{target}denormd") } else { target };
            assert_eq!(target, program);
        }
    }
}

#[test]
fn the_packaged_config_is_valid_and_writes_nothing() {
    let path = root().join("deploy/packages/denormd.yaml");
    let folder = tempfile::tempdir().unwrap();
    let uri = folder.path().join("uri");
    std::fs::write(&uri, "mongodb://localhost:27017/?replicaSet=rs0\n").unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let config: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
    let rules = config["rules"].as_array().unwrap();
    assert!(!rules.is_empty() && rules.iter().all(|rule| rule["shadow"] == true), "{rules:?}");
    let output = Command::new(env!("CARGO_BIN_EXE_denormd"))
        .args(["plan", "--offline", "--config"])
        .arg(&path)
        .env("DENORMD__MONGODB__URI_FILE", &uri)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn archives_have_one_name_wherever_they_are_named() {
    let package = package();
    let (version, repository) = (package["version"].as_str().unwrap(), package["repository"].as_str().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let targets =
        ["aarch64-apple-darwin", "x86_64-apple-darwin", "aarch64-unknown-linux-musl", "x86_64-unknown-linux-musl"];
    let archive = |target: &str| format!("denormd-{version}-{target}.tar.gz");
    for target in targets {
        std::fs::write(folder.path().join(archive(target)), target).unwrap();
    }
    let output = Command::new(root().join("deploy/homebrew-formula.sh")).arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let formula = String::from_utf8(output.stdout).unwrap();
    let binstall = package["metadata"]["binstall"]["pkg-url"].as_str().unwrap();
    let workflow = std::fs::read_to_string(root().join(".github/workflows/release.yaml")).unwrap();
    for target in targets {
        let url = format!("{repository}/releases/download/v{version}/{}", archive(target));
        assert!(formula.contains(&format!("url \"{url}\"")), "{formula}");
        let filled = [("{ repo }", repository), ("{ version }", version), ("{ target }", target)];
        let filled = filled.iter().fold(binstall.to_owned(), |url, (name, value)| url.replace(name, value));
        assert_eq!(filled, url);
        assert!(workflow.contains(&format!("target: {target}")), "{target}");
    }
    assert_eq!(workflow.matches("name=denormd-${GITHUB_REF_NAME#v}-$TARGET").count(), 2);
}

#[test]
fn the_version_is_the_same_everywhere() {
    let package = package();
    let version = package["version"].as_str().unwrap();
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let newest = read("CHANGELOG.md").lines().find_map(|line| line.strip_prefix("## ").map(str::to_owned)).unwrap();
    assert_eq!(newest.split(' ').next(), Some(version), "the changelog's newest section");
    for example in ["example", "example/shop", "example-sidecar"] {
        let kustomization = read(&format!("deploy/kubernetes/{example}/kustomization.yaml"));
        assert!(kustomization.contains(&format!("newTag: {version}\n")), "{example}");
    }
}

/// Cargo refuses a workspace of which a member is missing, and the image's build context has nothing but what is listed.
#[test]
fn the_image_is_built_from_all_members_of_the_workspace() {
    let ignored = std::fs::read_to_string(root().join(".dockerignore")).unwrap();
    let manifest = manifest();
    for member in manifest["workspace"]["members"].as_array().unwrap() {
        let folder = member.as_str().unwrap().split('/').next().unwrap();
        assert!(folder == "." || ignored.lines().any(|line| line == format!("!{folder}")), "{folder}");
    }
    // `denormd runbook` includes it.
    assert!(ignored.lines().any(|line| line == "!deploy/RUNBOOK.md"));
}
