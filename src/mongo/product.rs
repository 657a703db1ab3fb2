//! Recognises databases that speak MongoDB's protocol but are not MongoDB, by their host names and their replies.
//! docs/compatibility.md cites the sources for the features that each of them lacks.

use bson::Document;

/// The unsupported database behind these hosts, recognised by their names and the replies to `hello` and `buildInfo`: its
/// name as its vendor writes it, and the features that it lacks. None for MongoDB and products built from its source,
/// such as Percona Server for MongoDB.
#[must_use]
pub fn foreign(hosts: &[String], hello: &Document, build_info: &Document) -> Option<(&'static str, &'static str)> {
    let ends_with = |suffix: &str| {
        hosts.iter().any(|host| {
            let name = host.rsplit_once(':').map_or(host.as_str(), |(name, _)| name);
            name.to_ascii_lowercase().ends_with(suffix)
        })
    };
    // FerretDB 2 runs on the open-source DocumentDB, so it is checked first.
    if ["ferretdb", "ferretdbVersion"].iter().any(|name| build_info.contains_key(name)) {
        Some(("FerretDB", "it has no change streams"))
    // Holds `documentdb_versions` or `cosmos_versions`, or nothing in some releases. MongoDB has no such field.
    } else if hello.contains_key("internal") || ends_with(".mongocluster.cosmos.azure.com") {
        // Azure's service was Cosmos DB for MongoDB vCore before.
        let lacks = "its change streams are missing or a preview without a cluster time";
        Some(("DocumentDB (Azure's, or the open-source one)", lacks))
    } else if build_info.contains_key("_t") || ends_with(".mongo.cosmos.azure.com") {
        Some(("Azure Cosmos DB for MongoDB (RU)", "its change streams leave out deletes"))
    // Instance-based or elastic.
    } else if ends_with(".docdb.amazonaws.com") || ends_with(".docdb-elastic.amazonaws.com") {
        Some(("Amazon DocumentDB", "its change streams have no pre-images"))
    } else if ends_with(".firestore.goog") {
        Some(("Firestore with MongoDB compatibility", "it has no change streams of MongoDB's kind"))
    } else if build_info.contains_key("dataLake") {
        Some(("Atlas Data Federation", "it has no change streams and cannot be written to"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    /// Hosts, replies and the expected results. Each source is public; what it leaves out of a reply is left out here,
    /// but for the version. "build-info" is packages/mongodb-build-info/test/fixtures.ts of mongodb-js/devtools-shared.
    fn replies() -> Vec<(&'static str, Document, Document, Option<&'static str>)> {
        let document_db = "DocumentDB (Azure's, or the open-source one)";
        let set = doc! {"isWritablePrimary": true, "setName": "rs0", "maxWireVersion": 21};
        let router = doc! {"isWritablePrimary": true, "msg": "isdbgrid"};
        let with_internal = |internal: Document| {
            let mut hello = router.clone();
            hello.insert("internal", internal);
            hello
        };
        let genuine = doc! {"version": "7.0.28", "modules": [], "versionArray": [7, 0, 28, 0]};
        let gateway = doc! {"version": "7.0.0", "versionArray": [7, 0, 0, 0]};
        vec![
            ("db1.example:27017", set.clone(), genuine.clone(), None),
            ("db1.example:27017", router.clone(), genuine.clone(), None),
            // Percona Server is MongoDB with modules of its own.
            (
                "db1.example:27017",
                set.clone(),
                doc! {"version": "7.0.14-8", "psmdbVersion": "7.0.14-8", "versionArray": [7, 0, 14, 0]},
                None,
            ),
            // An Atlas cluster, and a host whose name only contains that of another product.
            ("cluster0-shard-00-00.ab1cd.mongodb.net:27017", set.clone(), genuine.clone(), None),
            ("docdb.amazonaws.com.example:27017", set.clone(), genuine.clone(), None),
            // build-info, COSMOSDB_BUILD_INFO.
            (
                "localhost:10255",
                set.clone(),
                doc! {
                    "_t": "BuildInfoResponse", "ok": 1, "version": "3.2.0", "gitVersion": "45d947729a0315accb6d4f15a6b06be6d9c19fe7",
                    "targetMinOS": "Windows 7/Windows Server 2008 R2", "modules": [], "allocator": "tcmalloc",
                    "javascriptEngine": "Chakra", "sysInfo": "deprecated", "versionArray": [3, 2, 0, 0], "bits": 64,
                    "debug": false, "maxBsonObjectSize": 524_288,
                    "openssl": {"running": "OpenSSL 1.0.1p-fips 9 Jul 2015", "compiled": "OpenSSL 1.0.1p-fips 9 Jul 2015"},
                },
                Some("Azure Cosmos DB for MongoDB (RU)"),
            ),
            // build-info, COSMOS_DB_URI.
            (
                "compass.mongo.cosmos.azure.com:19555",
                set.clone(),
                genuine.clone(),
                Some("Azure Cosmos DB for MongoDB (RU)"),
            ),
            ("compass-vcore.mongocluster.cosmos.azure.com", router.clone(), genuine.clone(), Some(document_db)),
            // documentdb/documentdb, issue 547: what is meant to be there, and what the image of 0.109 said.
            (
                "localhost:10260",
                with_internal(doc! {"documentdb_versions": ["0.109-0", "0.109.0"]}),
                gateway.clone(),
                Some(document_db),
            ),
            ("localhost:10260", with_internal(doc! {}), gateway.clone(), Some(document_db)),
            // powersync-ja/powersync-service, pull requests 783 and 605: Azure's newer and older gateways.
            (
                "c.example:10260",
                with_internal(doc! {"documentdb_versions": ["1.116-1", "1.117.0", "12.1-1"]}),
                gateway.clone(),
                Some(document_db),
            ),
            ("c.example:10260", with_internal(doc! {"cosmos_versions": []}), gateway, Some(document_db)),
            // FerretDB/FerretDB, internal/handler/msg_hello.go and msg_buildinfo.go of version 2, and of version 1.
            (
                "localhost:27017",
                doc! {"isWritablePrimary": true, "maxWireVersion": 21, "readOnly": false},
                doc! {
                    "version": "7.0.77", "modules": [], "sysInfo": "deprecated", "versionArray": [7, 0, 77, 0], "bits": 64,
                    "ferretdb": {"version": "v2.0.0", "package": "docker"}, "ok": 1.0,
                },
                Some("FerretDB"),
            ),
            (
                "localhost:27017",
                set.clone(),
                doc! {
                    "version": "7.0.42", "modules": [], "sysInfo": "deprecated", "versionArray": [7, 0, 42, 0], "bits": 64,
                    "ferretdbVersion": "v1.20.1", "ferretdbFeatures": {"aggregationStages": []}, "ok": 1.0,
                },
                Some("FerretDB"),
            ),
            // build-info, DOCUMENT_DB_URIS and FIRESTORE_URIS.
            (
                "docdb-2001-01-01-01-01-01.cluster-abc.eu-central-1.docdb.amazonaws.com:27017",
                set.clone(),
                genuine.clone(),
                Some("Amazon DocumentDB"),
            ),
            (
                "elastic-docdb-123456789.eu-central-1.DOCDB-ELASTIC.amazonaws.com:27017",
                router.clone(),
                genuine.clone(),
                Some("Amazon DocumentDB"),
            ),
            (
                "bbccdaf5-527a-4be5-9881-b7073e92002b.europe-north2.firestore.goog:443",
                router.clone(),
                genuine,
                Some("Firestore with MongoDB compatibility"),
            ),
            // build-info, DATALAKE_BUILD_INFO.
            (
                "data.example:27017",
                router,
                doc! {
                    "ok": 1, "version": "3.6.0", "versionArray": [3, 6, 0, 0],
                    "dataLake": {"version": "v20200329", "gitVersion": "0f318ss78bfad79ede3721e91iasj6f61644f", "date": "2020-03-29T15:41:22Z"},
                },
                Some("Atlas Data Federation"),
            ),
        ]
    }

    #[test]
    fn each_is_recognised_by_what_it_says_or_is_called() {
        for (host, hello, build_info, expected) in replies() {
            let name = foreign(&[host.to_owned()], &hello, &build_info).map(|(name, _)| name);
            assert_eq!(name, expected, "{host} {build_info}");
        }
    }
}
