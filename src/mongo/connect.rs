//! Connects, and checks the requirements on a cluster before the first write.

use std::{path::PathBuf, time::Duration};

use bson::{Document, doc};
use mongodb::{
    Client,
    error::ErrorKind,
    options::{
        ClientOptions, ConnectionString, Credential, HostInfo, ReadConcern, ReadPreference, SelectionCriteria,
        ServerAddress,
    },
};
use secrecy::{ExposeSecret, SecretString};

use super::{Server, primary::is_router, product::foreign, reach};
use crate::{
    code,
    error::{Error, Kind, Result},
};
use denormd_rules::config::{file, is_known_option};

/// Time limit for finding a server. Callers retry indefinitely.
const SERVER_SELECTION: Duration = Duration::from_secs(10);

/// Time limit for finding one member of the set.
const MEMBER_SELECTION: Duration = Duration::from_secs(3);

/// Connects, and checks that the cluster can be used: a replica set, or the routers of a sharded cluster, of MongoDB 6.0
/// or later.
pub async fn connect(uri: &SecretString) -> Result<Client> {
    let mut options = options(uri).await?;
    options.app_name.get_or_insert_with(|| "denormd".to_owned());
    options.server_selection_timeout.get_or_insert(SERVER_SELECTION);
    // Every read and write of denormd needs the primary (DESIGN: reads no older than the event).
    options.selection_criteria = Some(SelectionCriteria::ReadPreference(ReadPreference::Primary));
    options.retry_writes = Some(false);
    reach::watch(&mut options);
    let users = options.credential.as_ref().map(|credential| users_of(credential, options.default_database.as_deref()));
    let hosts: Vec<String> = options.hosts.iter().map(ToString::to_string).collect();
    let client = Client::with_options(options)?;
    let refused = |error: Error| {
        match (error.kind, &users) {
        // The driver gives no further details, not even which server it was.
        (Kind::Privilege, Some(users)) if error.code != Some(code::UNAUTHORIZED) => error.context(&hosts.join(", ")).hint(format!(
            "the user is looked up in the database `{users}`; if it was created in another one, say so by authSource= in the \
             connection string"
        )),
        _ => error,
    }
    };
    check_topology(&client, &hosts).await.map_err(refused)?;
    Ok(client)
}

/// The database that contains the user.
fn users_of(credential: &Credential, database: Option<&str>) -> String {
    credential.source.as_deref().or(database).unwrap_or("admin").to_owned()
}

/// The options of the connection string. An error only contains hosts, names of options and kinds of file errors: any
/// other part may belong to a password.
async fn options(uri: &SecretString) -> Result<ClientOptions> {
    let text = uri.expose_secret();
    let unusable = |why: String| {
        Error::new(Kind::Config, format!("mongodb.uri cannot be used: {why}"))
            .hint("a URI looks like mongodb://user:password@host:27017/?replicaSet=rs0")
    };
    let Ok(parsed) = ConnectionString::parse(text) else { return Err(unusable(blame(text))) };
    for file in certificates(uri) {
        file::bytes(&file, file::SECRET).map_err(|error| {
            unusable(format!("a file that tlsCAFile or tlsCertificateKeyFile names cannot be read ({})", error.kind()))
        })?;
    }
    ClientOptions::parse(text).await.map_err(|error| match (error.kind.as_ref(), &parsed.host_info) {
        (ErrorKind::DnsResolve { .. }, HostInfo::DnsRecord(host)) => {
            Error::new(Kind::Connection, format!("the SRV record of {host} cannot be looked up"))
                .hint("mongodb+srv:// takes the hosts from DNS; mongodb:// names them itself")
        }
        (ErrorKind::DnsResolve { .. }, _) => Error::new(Kind::Connection, "DNS gives no answer"),
        _ => unusable("its options do not go together".to_owned()),
    })
}

/// Identifies the part of a connection string that the driver refuses. Each part is tried with the others replaced,
/// because the driver's own messages quote them.
fn blame(uri: &str) -> String {
    let works = |uri: &str| ConnectionString::parse(uri).is_ok();
    let rest = uri.split_once("://").map_or("", |(_, rest)| rest);
    let (before, options) = rest.split_once('?').unwrap_or((rest, ""));
    let (user, hosts) = before.rsplit_once('@').map_or((None, before), |(user, hosts)| (Some(user), hosts));
    let (hosts, database) = hosts.split_once('/').unwrap_or((hosts, ""));
    if user.is_some_and(|user| !works(&format!("mongodb://{user}@localhost/"))) {
        return "the user name or the password has a character that must be percent-encoded (: / ? # [ ] @ %)"
            .to_owned();
    }
    if !works(&format!("mongodb://{hosts}/")) {
        return "its hosts cannot be read (in a user name or a password, the characters : / ? # [ ] @ % must be percent-encoded)"
            .to_owned();
    }
    if !works(&format!("mongodb://localhost/{database}")) {
        return "a database cannot have this name".to_owned();
    }
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let alone = ["", "user:password@", "user@"].map(|user| format!("mongodb://{user}localhost/?{option}"));
        if alone.iter().any(|alone| works(alone)) {
            continue;
        }
        return match option.split_once('=').map(|(name, _)| name) {
            Some(name) if is_known_option(name) => format!("its option {name} has a value that it cannot have"),
            Some(_) => "one of its options is not known".to_owned(),
            None => "one of its options has no value".to_owned(),
        };
    }
    "its parts do not go together".to_owned()
}

/// Connects to a single member of the set, whatever its role.
pub async fn member(uri: &SecretString, host: &str) -> Result<Client> {
    let mut options = options(uri).await?;
    options.hosts = vec![ServerAddress::parse(host)?];
    options.direct_connection = Some(true);
    options.repl_set_name = None;
    options.app_name.get_or_insert_with(|| "denormd".to_owned());
    options.server_selection_timeout = Some(MEMBER_SELECTION);
    options.selection_criteria = Some(SelectionCriteria::ReadPreference(ReadPreference::Nearest { options: None }));
    Ok(Client::with_options(options)?)
}

/// The database named in the URI, if any.
pub async fn default_database(uri: &SecretString) -> Option<String> {
    ClientOptions::parse(uri.expose_secret()).await.ok()?.default_database
}

/// The certificate files named in the URI: the driver reads them once for each client.
#[must_use]
pub fn certificates(uri: &SecretString) -> Vec<PathBuf> {
    let files = named_options(uri.expose_secret())
        .filter(|(name, _)| matches!(name.as_str(), "tlscafile" | "tlscertificatekeyfile"))
        .map(|(_, value)| PathBuf::from(value));
    files.collect()
}

/// The options of the URI that disable the verification of certificates, spelled as in the documentation.
#[must_use]
pub fn insecure(uri: &SecretString) -> Vec<&'static str> {
    let known = ["tlsInsecure", "tlsAllowInvalidCertificates", "tlsAllowInvalidHostnames"];
    let on: Vec<String> =
        named_options(uri.expose_secret()).filter(|(_, value)| value == "true").map(|(name, _)| name).collect();
    known.into_iter().filter(|known| on.contains(&known.to_lowercase())).collect()
}

/// The options of a URI: names in lower case, values decoded.
fn named_options(uri: &str) -> impl Iterator<Item = (String, String)> {
    let query = uri.split_once('?').map_or("", |(_, query)| query);
    query.split('&').filter_map(|option| option.split_once('=')).map(|(name, value)| {
        (name.to_lowercase(), percent_encoding::percent_decode_str(value).decode_utf8_lossy().into_owned())
    })
}

async fn check_topology(client: &Client, hosts: &[String]) -> Result<()> {
    let hello = client.database("admin").run_command(doc! {"hello": 1}).await?;
    let build_info: Document = client.database("admin").run_command(doc! {"buildInfo": 1}).await?;
    if let Some((name, lacks)) = foreign(hosts, &hello, &build_info) {
        return Err(Error::new(Kind::Topology, format!("this is {name}: {lacks}"))
            .hint("denormd works on MongoDB 6.0 or later and on Percona Server for MongoDB; docs/compatibility.md says what else was looked at"));
    }
    let is_router = is_router(&hello);
    if !is_router && !hello.contains_key("setName") {
        return Err(Error::new(Kind::Topology, "the server is a standalone, and change streams need a replica set")
            .hint(
                "start mongod with --replSet rs0 and run rs.initiate() once; a replica set of one member is enough",
            ));
    }
    let version = server_version(&build_info)?;
    if version < (6, 0) {
        return Err(Error::new(Kind::Topology, format!("MongoDB {}.{} is too old", version.0, version.1))
            .hint("denormd needs MongoDB 6.0 or later"));
    }
    // A config server may be a shard too.
    if hello.contains_key("configsvr") {
        return Err(part_of_a_cluster("a config server"));
    }
    if !is_router && is_shard(client).await {
        return Err(part_of_a_cluster("one shard"));
    }
    Ok(())
}

/// True for a shard of a sharded cluster. Without the privilege to read this, a shard is taken for a replica set.
async fn is_shard(client: &Client) -> bool {
    let version = client.database("admin").collection::<Document>("system.version");
    let identity = version.find_one(doc! {"_id": "shardIdentity"}).read_concern(ReadConcern::majority());
    identity.await.is_ok_and(|identity| identity.is_some())
}

fn part_of_a_cluster(part: &str) -> Error {
    Error::new(Kind::Topology, format!("this is {part} of a sharded cluster, which has only a part of the changes"))
        .hint("connect to the routers of the cluster (mongos)")
}

/// Refuses a router unless the config accepts what has never run on a sharded cluster.
pub async fn check_sharding(server: &Server, allowed: bool) -> Result<()> {
    if allowed || !server.is_router().await? {
        return Ok(());
    }
    Err(Error::new(Kind::Topology, "this is a sharded cluster, on which denormd has never run").hint(
        "`allow_sharded: experimental` under `mongodb` in the config tries it; docs/compatibility.md says what is known",
    ))
}

fn server_version(build_info: &Document) -> Result<(i32, i32)> {
    let parts = build_info.get_array("versionArray").map_err(|_| Error::internal("buildInfo without a version"))?;
    let part = |n: usize| parts.get(n).and_then(bson::Bson::as_i32).unwrap_or_default();
    Ok((part(0), part(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_uri_says_of_certificates() {
        let uri = |text: &str| SecretString::from(text.to_owned());
        let whole = uri("mongodb://u:p@h/d?tls=true&tlsCAFile=/etc/my%20ca.pem&tlsCertificateKeyFile=/k.pem");
        assert_eq!(certificates(&whole), [PathBuf::from("/etc/my ca.pem"), PathBuf::from("/k.pem")]);
        assert!(insecure(&whole).is_empty());
        for (text, expected) in [
            ("mongodb://h/?tlsInsecure=true", vec!["tlsInsecure"]),
            ("mongodb://h/?tls=true&TLSALLOWINVALIDCERTIFICATES=true", vec!["tlsAllowInvalidCertificates"]),
            ("mongodb://h/?tlsInsecure=false", vec![]),
            ("mongodb://tlsInsecure=true@h/", vec![]),
        ] {
            assert_eq!(insecure(&uri(text)), expected, "{text}");
        }
    }

    #[test]
    fn the_part_of_a_connection_string_that_is_refused_is_named_and_not_shown() {
        for (uri, expected) in [
            ("mongodb://user:can:ary@host/", "the user name or the password has a character"),
            ("mongodb://user:can%zary@host/", "the user name or the password has a character"),
            ("mongodb://user:can/ary@host/", "the user name or the password has a character"),
            ("mongodb://user:canary", "its hosts cannot be read"),
            ("mongodb://user:?canary@host", "its hosts cannot be read"),
            ("mongodb://host/can$ary", "a database cannot have this name"),
            ("mongodb://host/?connectTimeoutMS=canary", "its option connectTimeoutMS has a value"),
            ("mongodb://host/?authMechanism=canary", "its option authMechanism has a value"),
            ("mongodb://host/?canary", "one of its options has no value"),
            (
                "mongodb://host/?tls=true&tlsInsecure=true&tlsAllowInvalidCertificates=true",
                "its parts do not go together",
            ),
        ] {
            assert!(ConnectionString::parse(uri).is_err(), "the driver takes {uri}");
            assert!(blame(uri).starts_with(expected), "{uri}: {}", blame(uri));
        }
    }
}
