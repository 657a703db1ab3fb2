//! `denormd test` as a user types it; without a server its output is the same as with one.

use std::path::{Path, PathBuf};

use bson::doc;
use denormd_fixture::ReplicaSet;

use crate::support::{daemon::config, process::Program};

fn examples() -> Vec<(PathBuf, PathBuf)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("config");
    let files = std::fs::read_dir(folder.join("tests")).unwrap().map(|entry| entry.unwrap().path());
    let pairs: Vec<_> = files.map(|file| (folder.join(file.file_name().unwrap()), file)).collect();
    assert!(pairs.len() > 6);
    pairs
}

#[tokio::test(flavor = "multi_thread")]
async fn the_examples_pass_without_a_server_and_with_one() {
    // A set of its own: other tests run `denormd test` on the shared one, and all databases are listed below.
    let set = ReplicaSet::start(1).await;
    let uri = set.uri();
    for (rules, cases) in examples() {
        let program = Program::new(&std::fs::read_to_string(&rules).unwrap());
        let cases = cases.to_str().unwrap();
        let told = program.run(&["test", cases]).await.exits(0);
        assert!(told.out.ends_with(" passed, 0 failed\n"), "{}", told.out);
        let with = program.run(&["test", cases, "--uri", &uri]).await.exits(0);
        assert_eq!(told.out, with.out);
    }
    let left =
        set.client().await.list_database_names().filter(doc! {"name": {"$regex": "^denormd_test_"}}).await.unwrap();
    assert_eq!(left, [""; 0], "the databases are dropped");
}

const RULES: &str = r#"
  - name: names
    copy: { source: parts, target: products, match: { "parts.$[].id": _id }, set: { "parts.$[].name": $name }, on_missing: remove }
  - name: host
    copy: { source: hosts, target: logs, match: { host: _id }, set: { at.ip: $ip }, on_missing: delete }
  - name: ratio
    copy: { source: hosts, target: machines, match: { host: _id }, set: { load: { $divide: [$a, $b] } } }
  - name: sine
    copy: { source: hosts, target: waves, match: { host: _id }, set: { s: { $sin: $a } } }
"#;

const CASES: &str = r"
cases:
  - name: passes
    given:
      parts: [{ _id: 1, name: bolt }]
      products: [{ _id: 10, parts: [{ id: 1 }, { id: 2 }] }]
      hosts: [{ _id: 1, ip: x }]
      logs: [{ _id: 1, host: 1 }, { _id: 2, host: 2 }]
    expect: { products: [{ _id: 10, parts: [{ id: 1, name: bolt }] }], logs: [{ _id: 1, host: 1, at: { ip: x } }] }
    gone: { logs: [2] }
  - name: fails
    given: { parts: [{ _id: 1, name: bolt }], products: [{ _id: 10, n: 1, parts: [{ id: 1 }] }] }
    expect: { products: [{ _id: 10, n: 1.0, parts: [{ id: 1, name: nut }] }, { _id: 11 }] }
    gone: { products: [10] }
  - name: cannot be computed or written
    given:
      hosts: [{ _id: 1, a: 1, b: 0, ip: x }]
      machines: [{ _id: 1, host: 1 }]
      logs: [{ _id: 1, host: 1, at: 5 }]
    expect: { machines: [{ _id: 1, host: 1 }] }
";

/// The failing cases fail in the same way with a server, except for the text of a failed write.
#[tokio::test(flavor = "multi_thread")]
async fn what_differs_is_told_path_by_path() {
    let test = denormd_fixture::database().await;
    let program = Program::new(&config(&test, RULES));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cases.yaml");
    std::fs::write(&file, CASES).unwrap();
    let file = file.to_str().unwrap();
    let told = program.run(&["test", file]).await.exits(1);
    let expected = "FAILED  FILE: fails
    DB.products 10
      n
        expected 1.0 (double)
        found    1 (int)
      parts[0].name
        expected \"nut\"
        found    \"bolt\"
    DB.products 11
      the document
        expected {\"_id\":11}
        found    nothing
    DB.products 10
      the document
        expected nothing
        found    {\"_id\":10,\"n\":1,\"parts\":[{\"id\":1,\"name\":\"bolt\"}]}
FAILED  FILE: cannot be computed or written
    rule ratio, target 1: `$divide` by zero
    rule host, target 1: `at` of the target is no subdocument, and the rule writes below it
1 passed, 2 failed
";
    let out = told.out.replace(file, "FILE").replace(&test.name, "DB");
    assert_eq!(out, format!("ok      FILE: passes\n{expected}"));
    assert_eq!(told.err, "2 cases failed\n");
    let with = program.run(&["test", file, "--uri", &test.uri]).await.exits(1);
    let out = with.out.replace(file, "FILE").replace(&test.name, "DB");
    let same = expected.split("FAILED  FILE: cannot").next().unwrap();
    assert!(out.contains(same) && out.contains("became a dead letter"), "{out}");
    assert!(out.ends_with("1 passed, 2 failed\n"), "{out}");
    let json = program.run(&["test", file, "--output", "json"]).await.exits(1).json();
    assert_eq!(json[0]["passed"], true);
    assert_eq!(json[1]["problems"][0]["expected"]["$numberDouble"], "1.0");
    assert_eq!(json[2]["problems"][0]["error"], "`$divide` by zero");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_a_server_can_tell_is_refused_by_name() {
    let test = denormd_fixture::database().await;
    let program = Program::new(&config(&test, RULES));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cases.yaml");
    let case = "cases:\n- name: sine\n  given: { hosts: [{ _id: 1, a: 0.0 }], waves: [{ _id: 1, host: 1 }] }\n  expect: { waves: [{ _id: 1, host: 1, s: 0.0 }] }\n";
    std::fs::write(&file, case).unwrap();
    let file = file.to_str().unwrap();
    let told = program.run(&["test", file]).await.exits(1);
    assert!(
        told.out.contains("rule sine: `$sin` needs a server\n      run `denormd test --uri mongodb://…`"),
        "{}",
        told.out
    );
    program.run(&["test", file, "--uri", &test.uri]).await.exits(0);

    std::fs::write(file, case.replace("waves: [{ _id: 1, host: 1, s", "wavs: [{ _id: 1, host: 1, s")).unwrap();
    let told = program.run(&["test", file]).await.exits(2);
    assert!(told.err.contains("cases.yaml:4:13: no rule reads or writes a collection `wavs`"), "{}", told.err);
    assert!(told.err.contains("did you mean `waves`?"), "{}", told.err);
}
