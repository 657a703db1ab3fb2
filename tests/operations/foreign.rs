//! Databases that only speak MongoDB's protocol: a server with their replies is refused with its name and the reason,
//! before anything is written.

use bson::{Document, doc};

use crate::support::{
    impostor::{Impostor, no_such_command, recorded},
    running::denormd,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_only_speaks_the_protocol_is_refused_with_its_name_and_the_reason() {
    let hello = |more: Document| {
        let mut hello = doc! {
            "helloOk": true, "ismaster": true, "isWritablePrimary": true, "minWireVersion": 0, "maxWireVersion": 21,
            "maxBsonObjectSize": 16_777_216, "maxMessageSizeBytes": 48_000_000, "maxWriteBatchSize": 100_000,
        };
        hello.extend(more);
        hello
    };
    let router = |more: Document| {
        let mut router = hello(doc! {"msg": "isdbgrid"});
        router.extend(more);
        router
    };
    let build_info = |version: [i32; 4], more: Document| {
        let text = format!("{}.{}.{}", version[0], version[1], version[2]);
        let mut build_info = doc! {"version": text, "versionArray": version.to_vec(), "bits": 64};
        build_info.extend(more);
        build_info
    };
    // The replies of src/mongo/product.rs, where their sources are.
    for (hello, build_info, name, reason) in [
        (
            hello(doc! {}),
            build_info([7, 0, 77, 0], doc! {"ferretdb": {"version": "v2.0.0", "package": "docker"}}),
            "FerretDB",
            "no change streams",
        ),
        (
            router(doc! {"internal": {"documentdb_versions": ["0.109-0", "0.109.0"]}}),
            build_info([7, 0, 0, 0], doc! {}),
            "DocumentDB",
            "cluster time",
        ),
        (router(doc! {"internal": {}}), build_info([7, 0, 0, 0], doc! {}), "DocumentDB", "cluster time"),
        (hello(doc! {}), build_info([3, 2, 0, 0], doc! {"_t": "BuildInfoResponse"}), "Cosmos DB", "leave out deletes"),
        (
            router(doc! {}),
            build_info([3, 6, 0, 0], doc! {"dataLake": {"version": "v20200329"}}),
            "Atlas Data Federation",
            "cannot be written to",
        ),
        // Not foreign, and refused as before.
        (hello(doc! {}), build_info([7, 0, 28, 0], doc! {}), "standalone", "replica set"),
        (router(doc! {}), build_info([5, 0, 31, 0], doc! {}), "MongoDB 5.0", "too old"),
    ] {
        let impostor = Impostor::start(None, move |name, _| match name {
            "hello" | "ismaster" => recorded(hello.clone()),
            "buildinfo" => recorded(build_info.clone()),
            _ => no_such_command(name),
        })
        .await;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("denormd.yaml");
        let rule = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";
        let uri = format!("mongodb://{}/?directConnection=true", impostor.address);
        std::fs::write(
            &file,
            format!(
                "mongodb: {{ uri: \"{uri}\", database: shop }}\nhttp: {{ listen: \"127.0.0.1:0\" }}\nrules:\n{rule}\n"
            ),
        )
        .unwrap();
        for command in ["plan", "run"] {
            let file = file.clone();
            let output =
                tokio::task::spawn_blocking(move || denormd(&file).arg(command).output().unwrap()).await.unwrap();
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(4), "{command}, {name}: {told}");
            assert!(told.contains(name) && told.contains(reason), "{command}, {name}: {told}");
        }
        let harmless = ["hello", "ismaster", "buildinfo", "ping", "endsessions"];
        let asked: Vec<Document> = impostor.asked();
        let name = |command: &Document| command.keys().next().unwrap().to_lowercase();
        assert!(asked.iter().all(|command| harmless.contains(&name(command).as_str())), "{asked:?}");
    }
}
