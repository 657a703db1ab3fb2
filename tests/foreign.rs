//! Databases that only speak MongoDB's protocol: a server with their replies is refused with its name and the reason,
//! before anything is written.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
};

use bson::{Document, doc};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::running::denormd;

/// Operation codes of the wire protocol.
const OP_REPLY: i32 = 1;
const OP_QUERY: i32 = 2004;
const OP_MSG: i32 = 2013;

/// A server that answers `hello` and `buildInfo`, and refuses everything else.
struct Impostor {
    address: SocketAddr,
    /// The names of the received commands.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Impostor {
    async fn start(hello: Document, build_info: Document) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (address, asked) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let all = asked.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, hello.clone(), build_info.clone(), all.clone()));
            }
        });
        Self { address, asked }
    }
}

async fn serve(
    mut stream: TcpStream,
    hello: Document,
    build_info: Document,
    asked: Arc<Mutex<Vec<String>>>,
) -> std::io::Result<()> {
    loop {
        let length = usize::try_from(stream.read_i32_le().await?).unwrap();
        let mut rest = vec![0; length - 4];
        stream.read_exact(&mut rest).await?;
        let number = |at: usize| i32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
        let (request, code) = (number(0), number(8));
        // After the header, flags: a query has the collection's name and two numbers, a message the kind of its first section.
        let command = match code {
            OP_QUERY => &rest[16 + rest[16..].iter().position(|byte| *byte == 0).unwrap() + 1 + 8..],
            OP_MSG => &rest[17..],
            code => panic!("operation code {code}"),
        };
        let command = Document::from_reader(command).unwrap();
        let name = command.keys().next().unwrap().to_lowercase();
        let mut reply = match name.as_str() {
            "hello" | "ismaster" => hello.clone(),
            "buildinfo" => build_info.clone(),
            _ => {
                doc! {"ok": 0, "code": 59, "codeName": "CommandNotFound", "errmsg": format!("no such command: {name}")}
            }
        };
        asked.lock().unwrap().push(name);
        if !reply.contains_key("ok") {
            reply.insert("ok", 1.0);
        }
        let mut body = match code {
            OP_QUERY => [8_i32, 0, 0, 0, 1].iter().flat_map(|number| number.to_le_bytes()).collect(),
            _ => vec![0; 5],
        };
        reply.to_writer(&mut body).unwrap();
        let header =
            [i32::try_from(body.len()).unwrap() + 16, 1, request, if code == OP_QUERY { OP_REPLY } else { OP_MSG }];
        let mut message: Vec<u8> = header.iter().flat_map(|number| number.to_le_bytes()).collect();
        message.append(&mut body);
        stream.write_all(&message).await?;
    }
}

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
    // The fields that distinguish them are those of src/mongo/product.rs.
    for (hello, build_info, name, reason) in [
        (
            hello(doc! {}),
            build_info([7, 0, 77, 0], doc! {"ferretdb": {"version": "v2.0.0"}}),
            "FerretDB",
            "no change streams",
        ),
        (
            router(doc! {"internal": {"documentdb_versions": ["0.109-0", "0.109.0"]}}),
            build_info([7, 0, 0, 0], doc! {}),
            "DocumentDB",
            "cluster time",
        ),
        (router(doc! {}), build_info([4, 2, 0, 0], doc! {"_t": "BuildInfoResponse"}), "Cosmos DB", "leave out deletes"),
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
        let impostor = Impostor::start(hello, build_info).await;
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
        let asked = impostor.asked.lock().unwrap();
        let harmless = ["hello", "ismaster", "buildinfo", "ping", "endsessions"];
        assert!(asked.iter().all(|command| harmless.contains(&command.as_str())), "{asked:?}");
    }
}
