//! Connecting, and what a cluster must be before anything is written to it.

use std::{path::PathBuf, time::Duration};

use bson::{Document, doc};
use mongodb::{
    Client,
    options::{ClientOptions, ReadPreference, SelectionCriteria, ServerAddress},
};
use secrecy::{ExposeSecret, SecretString};

use crate::error::{Error, Kind, Result};

/// How long an operation looks for a server before it reports that there is none. Callers retry for ever.
const SERVER_SELECTION: Duration = Duration::from_secs(10);

/// How long one member of the set is looked for.
const MEMBER_SELECTION: Duration = Duration::from_secs(3);

/// Connects, and checks that the cluster can be used: a replica set (or mongos) of MongoDB 6.0 or later.
pub async fn connect(uri: &SecretString) -> Result<Client> {
    let mut options = ClientOptions::parse(uri.expose_secret()).await.map_err(|error| {
        let message = match error.kind.as_ref() {
            mongodb::error::ErrorKind::InvalidArgument { message, .. } => {
                format!("mongodb.uri cannot be used: {message}")
            }
            _ => format!("mongodb.uri cannot be used: {}", Error::from(error.clone()).message),
        };
        Error::new(Kind::Config, message).hint("a URI looks like mongodb://user:password@host:27017/?replicaSet=rs0")
    })?;
    options.app_name.get_or_insert_with(|| "denormd".to_owned());
    options.server_selection_timeout.get_or_insert(SERVER_SELECTION);
    // Every read and write of ours wants the primary (DESIGN: reads no older than the event).
    options.selection_criteria = Some(SelectionCriteria::ReadPreference(ReadPreference::Primary));
    options.retry_writes = Some(false);
    let client = Client::with_options(options)?;
    check_topology(&client).await?;
    Ok(client)
}

/// Connects to one member of the set alone, whatever its role.
pub async fn member(uri: &SecretString, host: &str) -> Result<Client> {
    let mut options = ClientOptions::parse(uri.expose_secret()).await?;
    options.hosts = vec![ServerAddress::parse(host)?];
    options.direct_connection = Some(true);
    options.repl_set_name = None;
    options.app_name.get_or_insert_with(|| "denormd".to_owned());
    options.server_selection_timeout = Some(MEMBER_SELECTION);
    options.selection_criteria = Some(SelectionCriteria::ReadPreference(ReadPreference::Nearest { options: None }));
    Ok(Client::with_options(options)?)
}

/// The database that the URI names, if it does.
pub async fn default_database(uri: &SecretString) -> Option<String> {
    ClientOptions::parse(uri.expose_secret()).await.ok()?.default_database
}

/// The certificate files that the URI names: the driver reads them once for each client.
#[must_use]
pub fn certificates(uri: &SecretString) -> Vec<PathBuf> {
    let files = options(uri.expose_secret())
        .filter(|(name, _)| matches!(name.as_str(), "tlscafile" | "tlscertificatekeyfile"))
        .map(|(_, value)| PathBuf::from(value));
    files.collect()
}

/// The options of the URI that switch the verification of certificates off, as they are spelled in the documentation.
#[must_use]
pub fn insecure(uri: &SecretString) -> Vec<&'static str> {
    let known = ["tlsInsecure", "tlsAllowInvalidCertificates", "tlsAllowInvalidHostnames"];
    let on: Vec<String> =
        options(uri.expose_secret()).filter(|(_, value)| value == "true").map(|(name, _)| name).collect();
    known.into_iter().filter(|known| on.contains(&known.to_lowercase())).collect()
}

/// The options of a URI: names in lower case, values decoded.
fn options(uri: &str) -> impl Iterator<Item = (String, String)> {
    let query = uri.split_once('?').map_or("", |(_, query)| query);
    query.split('&').filter_map(|option| option.split_once('=')).map(|(name, value)| {
        (name.to_lowercase(), percent_encoding::percent_decode_str(value).decode_utf8_lossy().into_owned())
    })
}

async fn check_topology(client: &Client) -> Result<()> {
    let hello = client.database("admin").run_command(doc! {"hello": 1}).await?;
    let mongos = hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid");
    if !mongos && !hello.contains_key("setName") {
        return Err(Error::new(Kind::Topology, "the server is a standalone, and change streams need a replica set")
            .hint(
                "start mongod with --replSet rs0 and run rs.initiate() once; a replica set of one member is enough",
            ));
    }
    let version = server_version(client).await?;
    if version < (6, 0) {
        return Err(Error::new(Kind::Topology, format!("MongoDB {}.{} is too old", version.0, version.1))
            .hint("denormd needs MongoDB 6.0 or later"));
    }
    Ok(())
}

async fn server_version(client: &Client) -> Result<(i32, i32)> {
    let info: Document = client.database("admin").run_command(doc! {"buildInfo": 1}).await?;
    let parts = info.get_array("versionArray").map_err(|_| Error::internal("buildInfo without a version"))?;
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
}
