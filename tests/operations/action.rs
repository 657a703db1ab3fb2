//! The GitHub Action that checks rules: its script in a repository of its own, with the variables of a workflow and
//! a stand-in for `gh`. And what all workflows have in common.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use bson::doc;
use serde_json::Value;

const SETTINGS: &str = "mongodb: { database: shop }\n";
const RULE: &str =
    "  - name: host\n    copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } }\n";
const CASES: &str = "cases:\n  - name: the address is copied\n    given: { hosts: [{ _id: 1, ip: x }], logs: [{ _id: 1, host: 1 }] }\n    expect: { logs: [{ _id: 1, host: 1, ip: x }] }\n";

/// A stand-in for `gh api`: it keeps each call, and answers with the ids in the file `comments`.
const GH: &str = r#"#!/usr/bin/env bash
cd "$(dirname "$0")"
echo "$*" >>calls
[ ! -e refuses ] || exit 1
for argument; do case $argument in body=@*) cat "${argument#body=@}" >body ;; esac; done
case $* in *--jq*) cat comments 2>/dev/null || true ;; esac
"#;

fn actions() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(".github")
}

/// A repository with a pull request that changes its config.
struct PullRequest {
    folder: tempfile::TempDir,
    environment: BTreeMap<&'static str, String>,
}

impl PullRequest {
    fn new(old: &[(&str, &str)], new: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let programs = folder.path().join("programs");
        fs::create_dir(&programs).unwrap();
        fs::create_dir(folder.path().join("repository")).unwrap();
        fs::write(programs.join("gh"), GH).unwrap();
        assert!(Command::new("chmod").arg("+x").arg(programs.join("gh")).status().unwrap().success());
        let path = std::env::var("PATH").unwrap();
        let environment = BTreeMap::from([
            ("PATH", format!("{}:{path}", programs.display())),
            ("INPUT_DENORMD", env!("CARGO_BIN_EXE_denormd").to_owned()),
            ("INPUT_CONFIG", "denormd.yaml".to_owned()),
            ("INPUT_COMMENT", "true".to_owned()),
            ("GITHUB_REPOSITORY", "shop/shop".to_owned()),
            ("GITHUB_STEP_SUMMARY", folder.path().join("summary").display().to_string()),
            ("PULL_REQUEST", "7".to_owned()),
        ]);
        let mut request = Self { folder, environment };
        request.git(&["init", "--quiet"]);
        request.commit(old);
        let base = request.git(&["rev-parse", "HEAD"]);
        request.environment.insert("BASE", base.trim().to_owned());
        request.commit(new);
        request
    }

    fn place(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn git(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("git");
        command.args(["-c", "user.name=a", "-c", "user.email=a@example.com"]).args(arguments);
        let output = command.current_dir(self.place("repository")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn commit(&self, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = self.place("repository").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        self.git(&["add", "--all"]);
        self.git(&["commit", "--quiet", "--allow-empty", "--message", "a change"]);
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.environment.insert(name, value.to_owned());
        self
    }

    /// Runs the action, and returns its exit status, the report and what it printed.
    fn check(&self) -> (i32, String, String) {
        let mut command = Command::new(actions().join("actions/check-rules/check-rules.sh"));
        command.env_clear().envs(&self.environment).current_dir(self.place("repository"));
        let Output { status, stdout, stderr } = command.output().unwrap();
        let printed = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        (status.code().unwrap(), self.read("summary"), printed)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.place(name)).unwrap_or_default()
    }
}

fn config(rules: &str) -> String {
    format!("{SETTINGS}rules:\n{rules}")
}

#[test]
fn a_pull_request_gets_a_comment_that_is_kept_up_to_date() {
    let changed = RULE.replace("{ ip: $ip }", "{ ip: $ip, name: $name }");
    let request = PullRequest::new(
        &[("denormd.yaml", &config(RULE)), ("tests/rules.yaml", CASES)],
        &[("denormd.yaml", &config(&changed))],
    )
    .with("INPUT_TESTS", "tests/*.yaml none/**/*.yaml");
    let (code, report, printed) = request.check();
    assert_eq!(code, 0, "{report}{printed}");
    for part in [
        "### denormd: 1 rule changed; 1 backfill\n",
        "- changed `host`: `shop.hosts` to `shop.logs`\n",
        "  - owns `name`\n",
        "\n**denormd plan --offline**: the config is sound (the cluster was not asked)\n",
        "\n**denormd test**: 1 passed, 0 failed\n",
    ] {
        assert!(report.contains(part), "{part}: {report}");
    }
    let calls = request.read("programs/calls");
    assert!(calls.contains("--method POST repos/shop/shop/issues/7/comments --field body=@"), "{calls}");
    let body = request.read("programs/body");
    assert_eq!(body, format!("<!-- denormd check-rules denormd.yaml -->\n{report}"));

    // A second push: the comment that is there is written anew.
    fs::write(request.place("programs/comments"), "41\n42\n").unwrap();
    assert_eq!(request.check().0, 0);
    let calls = request.read("programs/calls");
    assert!(
        calls.ends_with(&format!(
            "--method PATCH repos/shop/shop/issues/comments/41 --field body=@{}\n",
            calls.rsplit("body=@").next().unwrap().trim()
        )),
        "{calls}"
    );

    // From a fork, or while GitHub fails, the check itself still counts, and no second comment is made.
    fs::write(request.place("programs/refuses"), "").unwrap();
    let before = request.read("programs/calls").lines().count();
    let (code, _, printed) = request.check();
    assert_eq!((code, printed.contains("::warning::the pull request cannot be commented on")), (0, true), "{printed}");
    assert_eq!(request.read("programs/calls").lines().count(), before + 1);
}

#[test]
fn what_is_wrong_fails_the_check_and_is_in_the_comment() {
    let wrong = RULE.replace("copy:", "cpy:");
    let request = PullRequest::new(&[("denormd.yaml", &config(RULE))], &[("denormd.yaml", &config(&wrong))]);
    let (code, report, printed) = request.check();
    assert_eq!(code, 1, "{printed}");
    assert!(report.contains("### denormd: the change cannot be described\n"), "{report}");
    for part in
        ["\n**denormd plan --offline**: failed\n\n    denormd.yaml:", "\n    denormd.yaml:4:5: unknown key `cpy`"]
    {
        assert!(report.contains(part), "{part}: {report}");
    }
    assert!(!report.contains("mongodb.uri"), "the connection string comes with the deployment: {report}");
    assert!(request.read("programs/body").contains("unknown key `cpy`"));

    // Mended in the next one: what was wrong before does not fail it.
    let request = PullRequest::new(&[("denormd.yaml", &config(&wrong))], &[("denormd.yaml", &config(RULE))]);
    let (code, report, printed) = request.check();
    assert_eq!(code, 0, "{report}{printed}");
    assert!(report.contains("the old config cannot be used, so nothing is compared"), "{report}");

    let other = CASES.replace("ip: x }] }\n", "ip: y }] }\n");
    let request = PullRequest::new(&[], &[("denormd.yaml", &config(RULE)), ("cases.yaml", &other)]);
    let (code, report, _) = request.with("INPUT_TESTS", "cases.yaml").check();
    assert_eq!(code, 1);
    assert!(
        report.contains("\n**denormd test**: failed\n\n    FAILED  cases.yaml: the address is copied\n"),
        "{report}"
    );
    let request = PullRequest::new(&[], &[("denormd.yaml", &config(RULE))]);
    let (code, report, _) = request.with("INPUT_TESTS", "cases/*.yaml").check();
    assert_eq!((code, report.contains("no file fits the patterns")), (1, true), "{report}");
}

#[test]
fn a_config_may_be_new_a_folder_or_untouched() {
    // The first config of a repository.
    let request = PullRequest::new(&[], &[("denormd.yaml", &config(RULE))]);
    let (code, report, printed) = request.check();
    assert_eq!(code, 0, "{report}{printed}");
    assert!(report.starts_with("### denormd: 1 rule added; 1 backfill; 1 new command\n"), "{report}");

    // A folder: a file of it is gone.
    let request = PullRequest::new(
        &[("rules/a.yaml", SETTINGS), ("rules/b.yaml", &format!("rules:\n{RULE}"))],
        &[("rules/b.yaml", "rules: []\n")],
    );
    let (code, report, printed) = request.with("INPUT_CONFIG", "rules/").check();
    assert_eq!(code, 0, "{report}{printed}");
    assert!(report.starts_with("### denormd: 1 rule retired\n"), "{report}");

    // Nobody is told of a change that means nothing.
    let request = PullRequest::new(&[("denormd.yaml", &config(RULE))], &[("README.md", "words")]);
    let (code, report, _) = request.check();
    assert_eq!((code, report.starts_with("### denormd: both configs mean the same\n")), (0, true), "{report}");
    assert!(!request.read("programs/calls").contains("POST"));
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_cluster_it_tells_fan_out_and_adoption_and_no_document() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let hosts = (0..3).map(|id| doc! {"_id": format!("secret-{id}"), "ip": "10.0.0.1"});
    db.collection("hosts").insert_many(hosts).await.unwrap();
    let logs =
        (0..30).map(|id| doc! {"_id": format!("secret-{id}"), "host": format!("secret-{}", id % 3), "ip": "mine"});
    db.collection("logs").insert_many(logs).await.unwrap();
    let index = mongodb::IndexModel::builder().keys(doc! {"host": 1}).build();
    db.collection::<bson::Document>("logs").create_index(index).await.unwrap();
    let config = |rules: &str| {
        let settings = format!("mongodb: {{ database: {0} }}\nstate: {{ database: {0}_state }}\n", test.name);
        config(rules).replace(SETTINGS, &settings)
    };
    let both = format!(
        "{RULE}  - name: rack\n    copy: {{ source: hosts, target: logs, match: {{ host: _id }}, set: {{ rack: $rack }} }}\n"
    );
    let request = PullRequest::new(&[("denormd.yaml", &config(RULE))], &[("denormd.yaml", &config(&both))]);
    let request = request.with("INPUT_URI", &test.uri);
    let (code, report, printed) = tokio::task::spawn_blocking(move || request.check()).await.unwrap();
    assert_eq!(code, 0, "{report}{printed}");
    for part in [
        "### denormd: 1 rule added; 1 backfill\n",
        "\n**denormd plan, on the cluster**: 1 rule would be blocked until you agree\n",
        "    fan-out     targets of a source: median 10, p99 10, worst 10, of 3 sampled\n",
        "    existing data\n      host: adds 0, overwrites 30, removes 0 (all 30 targets compared)\n",
        "rule host: it will be blocked, because it would overwrite 30 of 30 existing values",
    ] {
        assert!(report.contains(part), "{part}: {report}");
    }
    assert!(!report.contains("secret") && !report.contains(&test.uri), "{report}");

    let request = PullRequest::new(&[], &[("denormd.yaml", &config(RULE))]);
    let request = request.with("INPUT_URI", "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200");
    let (code, report, _) = tokio::task::spawn_blocking(move || request.check()).await.unwrap();
    assert_eq!((code, report.contains("**denormd plan, on the cluster**: failed")), (1, true), "{report}");
}

#[test]
fn a_release_is_downloaded_and_its_checksum_compared() {
    let request = PullRequest::new(&[], &[("denormd.yaml", &config(RULE))]);
    let release = request.place("shop/denormd/releases/download/v9.9.9");
    fs::create_dir_all(&release).unwrap();
    let arch = if cfg!(target_arch = "aarch64") { "aarch64" } else { "x86_64" };
    // As the workflow `release.yaml` names them.
    let name = format!("denormd-9.9.9-{arch}-unknown-linux-musl");
    fs::write(release.join("denormd"), format!("#!/bin/sh\nexec {} \"$@\"\n", env!("CARGO_BIN_EXE_denormd"))).unwrap();
    // The checksums of a release are of all its files.
    let pack = format!(
        "chmod +x denormd && tar -czf {name}.tar.gz denormd && sha256sum {name}.tar.gz >SHA256SUMS && echo '{:064}  other' >>SHA256SUMS",
        0
    );
    assert!(Command::new("sh").args(["-c", &pack]).current_dir(&release).status().unwrap().success());
    let server = format!("file://{}", request.folder.path().display());
    let request = request
        .with("INPUT_DENORMD", "")
        .with("INPUT_VERSION", "9.9.9")
        .with("INPUT_REPOSITORY", "shop/denormd")
        .with("GITHUB_SERVER_URL", &server);
    let (code, report, printed) = request.check();
    assert_eq!(code, 0, "{report}{printed}");
    fs::write(release.join("SHA256SUMS"), format!("{:064}  {name}.tar.gz\n", 0)).unwrap();
    let (code, _, printed) = request.check();
    assert!(code != 0 && printed.contains("did NOT match"), "{code} {printed}");
}

/// Every workflow and action of the repository.
fn workflows() -> Vec<(PathBuf, Value)> {
    let folders = [actions().join("workflows"), actions().join("actions/check-rules")];
    let files = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        let value = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (path, value)
    };
    files.map(read).collect()
}

/// All values with a key, at any depth.
fn values<'a>(value: &'a Value, key: &str, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(entries) => {
            for (name, inner) in entries {
                found.extend(inner.as_str().filter(|_| name == key));
                values(inner, key, found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| values(item, key, found)),
        _ => {}
    }
}

#[test]
fn workflows_are_pinned_and_their_scripts_are_scripts() {
    let workflows = workflows();
    assert!(workflows.len() > 3);
    for (path, workflow) in &workflows {
        let (mut uses, mut runs) = (Vec::new(), Vec::new());
        values(workflow, "uses", &mut uses);
        values(workflow, "run", &mut runs);
        assert!(!runs.is_empty(), "{}", path.display());
        for action in uses {
            let commit = action.split_once('@').map(|(_, commit)| commit);
            let pinned =
                commit.is_some_and(|commit| commit.len() == 40 && commit.bytes().all(|b| b.is_ascii_hexdigit()));
            assert!(pinned || action.starts_with("./"), "{}: {action}", path.display());
        }
        for script in runs {
            // GitHub replaces each of these by a word.
            let plain: String = script
                .split("${{")
                .enumerate()
                .map(
                    |(nth, part)| {
                        if nth == 0 { part.to_owned() } else { format!("word{}", part.split_once("}}").unwrap().1) }
                    },
                )
                .collect();
            let output = Command::new("bash").args(["-n", "-c", &plain]).output().unwrap();
            assert!(
                output.status.success(),
                "{}: {script}\n{}",
                path.display(),
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
    // Each input of the action reaches its script, and the script uses no other.
    let (_, action) = workflows.iter().find(|(path, _)| path.ends_with("check-rules/action.yaml")).unwrap();
    let script = fs::read_to_string(actions().join("actions/check-rules/check-rules.sh")).unwrap();
    let given = action["runs"]["steps"][0]["env"].as_object().unwrap();
    for name in action["inputs"].as_object().unwrap().keys() {
        let used = given.values().any(|value| value.as_str().unwrap().contains(&format!("inputs.{name} ")));
        assert!(used, "{name}");
    }
    for name in given.keys().filter(|name| *name != "GH_TOKEN") {
        assert!(script.contains(name.as_str()), "{name}");
    }
    let mut used =
        script.split(|c: char| !c.is_ascii_uppercase() && c != '_').filter(|word| word.starts_with("INPUT_"));
    assert!(used.all(|word| given.contains_key(word)));
}
