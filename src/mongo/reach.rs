//! Records the last known state of each server, and explains why one cannot be reached. The driver's own selection
//! error is plain text, mixed with details that users should not see.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{Arc, Weak},
};

use bson::Document;
use mongodb::{
    error::ErrorKind,
    event::{EventHandler, sdam::SdamEvent},
    options::ClientOptions,
};
use parking_lot::Mutex;
use tokio_rustls::rustls;

use crate::{
    code::named,
    error::{Error, Kind},
};

/// A process has one cluster. A driver error does not identify its client, so the newest one that still exists is assumed:
/// that of a refused config is dropped.
static CLIENTS: Mutex<Vec<Weak<Reach>>> = Mutex::new(Vec::new());

/// Servers by their address.
#[derive(Debug)]
struct Reach {
    /// `replicaSet` of the connection string.
    set: Option<String>,
    servers: Mutex<BTreeMap<String, Heard>>,
}

/// Last known state of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Heard {
    what: String,
    advice: Advice,
    /// True if the driver no longer monitors it.
    is_closed: bool,
}

/// Advice for the user; with several servers, the first of these counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Advice {
    Initiate,
    OtherSet,
    Standalone,
    Tls,
    Name,
    Closed,
    Wait,
    Start,
}

impl Advice {
    fn text(self) -> &'static str {
        match self {
            Self::Initiate => "run rs.initiate() once on one of its members",
            Self::OtherSet => "give the set's real name as replicaSet= in the connection string",
            Self::Standalone => {
                "start mongod with --replSet rs0 and run rs.initiate() once; a set of one member is enough"
            }
            Self::Tls => {
                "give tlsCAFile= in the connection string with the authority that signed the server's certificate; the host names in \
                 the connection string must be in the certificate, and the dates right"
            }
            Self::Name => "are the host names in the connection string right, and known to this machine's DNS?",
            Self::Closed => "if the servers demand TLS, add tls=true to the connection string",
            Self::Wait => {
                "an election takes some seconds; if it does not end, too few members of the set can reach each other"
            }
            Self::Start => "are the servers up, and can this machine reach them at these addresses?",
        }
    }
}

/// Records the monitoring events of the client with these options.
pub(super) fn watch(options: &mut ClientOptions) {
    let reach = Arc::new(Reach { set: options.repl_set_name.clone(), servers: Mutex::default() });
    CLIENTS.lock().push(Arc::downgrade(&reach));
    options.sdam_event_handler = Some(EventHandler::callback(move |event| reach.note(&event)));
}

/// The newest client that still exists.
fn newest() -> Option<Arc<Reach>> {
    let mut clients = CLIENTS.lock();
    clients.retain(|client| client.strong_count() > 0);
    clients.last().and_then(Weak::upgrade)
}

/// The error for a failed selection of the primary.
pub(super) fn unreachable() -> Error {
    newest().map_or_else(|| Error::new(Kind::Unavailable, NO_PRIMARY), |reach| reach.error())
}

/// The error for a request without an answer in time, with the last known state of each server.
#[must_use]
pub fn silent() -> Error {
    Error::new(Kind::Connection, newest().map_or_else(|| "no answer in time".to_owned(), |reach| reach.silence()))
}

/// The error for a lost connection, with the last known state of each server.
pub(super) fn lost(how: &str) -> Error {
    let heard = newest().map(|reach| reach.heard()).unwrap_or_default();
    Error::new(Kind::Connection, format!("{how}{heard}"))
}

const NO_PRIMARY: &str = "no primary can be reached";
const PRIMARY: &str = "the primary";

impl Reach {
    fn note(&self, event: &SdamEvent) {
        match event {
            SdamEvent::ServerOpening(event) => self.opened(&event.address.to_string()),
            SdamEvent::ServerHeartbeatSucceeded(event) => {
                self.answered(&event.server_address.to_string(), self.said(&event.reply));
            }
            SdamEvent::ServerHeartbeatFailed(event) => {
                self.failed(&event.server_address.to_string(), failed(&event.failure));
            }
            SdamEvent::ServerClosed(event) => self.closed(&event.address.to_string()),
            _ => {}
        }
    }

    fn opened(&self, address: &str) {
        self.servers.lock().remove(address);
    }

    fn answered(&self, address: &str, heard: Heard) {
        let mut servers = self.servers.lock();
        servers.retain(|_, heard| !heard.is_closed);
        servers.insert(address.to_owned(), heard);
    }

    /// The driver ends the last request to a server that it has closed, and that is no news of the server.
    fn failed(&self, address: &str, heard: Heard) {
        let mut servers = self.servers.lock();
        if servers.get(address).is_none_or(|known| !known.is_closed) {
            servers.insert(address.to_owned(), heard);
        }
    }

    /// The server has left the set, or the set calls it by another name. Until another server answers, its last state may be
    /// the reason of an error.
    fn closed(&self, address: &str) {
        if let Some(heard) = self.servers.lock().get_mut(address) {
            heard.is_closed = true;
        }
    }

    /// The state of a server according to its `hello` reply.
    fn said(&self, hello: &Document) -> Heard {
        let heard = |what: &str, advice| Heard { what: what.to_owned(), advice, is_closed: false };
        let is = |name: &str| hello.get_bool(name).unwrap_or_default();
        let name = hello.get_str("setName").ok();
        match (name, &self.set) {
            _ if is("isreplicaset") => heard("its replica set is not initiated", Advice::Initiate),
            (Some(name), Some(wanted)) if name != wanted => {
                heard(&format!("it is a member of the replica set `{name}`, not of `{wanted}`"), Advice::OtherSet)
            }
            (None, Some(_)) if !hello.contains_key("msg") => {
                heard("a standalone, not a member of a replica set", Advice::Standalone)
            }
            _ if is("isWritablePrimary") => heard(PRIMARY, Advice::Wait),
            _ if is("secondary") => heard("a secondary", Advice::Wait),
            _ => heard("neither primary nor secondary", Advice::Wait),
        }
    }

    /// ` (a:1: connection refused; b:2: a secondary)`
    fn heard(&self) -> String {
        let servers = self.servers.lock();
        let mut text = String::new();
        for (nth, (address, heard)) in servers.iter().enumerate() {
            write!(text, "{}{address}: {}", if nth == 0 { " (" } else { "; " }, heard.what).ok();
        }
        if !servers.is_empty() {
            text.push(')');
        }
        text
    }

    /// The server that did not answer, if the primary is known.
    fn silence(&self) -> String {
        let servers = self.servers.lock();
        let primary = servers.iter().find(|(_, heard)| heard.what == PRIMARY).map(|(address, _)| address.clone());
        drop(servers);
        match primary {
            Some(address) => format!("the primary {address} did not answer in time"),
            None => format!("no answer in time{}", self.heard()),
        }
    }

    fn error(&self) -> Error {
        let message = format!("{NO_PRIMARY}{}", self.heard());
        let servers = self.servers.lock();
        let advice = servers.values().map(|heard| heard.advice).min().unwrap_or(Advice::Start);
        Error::new(Kind::Unavailable, message).hint(advice.text())
    }
}

fn failed(error: &mongodb::error::Error) -> Heard {
    let (what, advice) = match error.kind.as_ref() {
        ErrorKind::Io(error) => failed_io(error),
        ErrorKind::DnsResolve { .. } => ("its name does not resolve".to_owned(), Advice::Name),
        ErrorKind::Command(error) => (named(error.code, &error.code_name), Advice::Start),
        ErrorKind::Authentication { .. } => ("it refuses the user name or the password".to_owned(), Advice::Start),
        _ => ("it cannot be asked".to_owned(), Advice::Start),
    };
    Heard { what, advice, is_closed: false }
}

fn failed_io(error: &std::io::Error) -> (String, Advice) {
    use std::io::ErrorKind as Io;
    if let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        return (format!("TLS: {tls}"), Advice::Tls);
    }
    match error.kind() {
        Io::ConnectionRefused => ("connection refused".to_owned(), Advice::Start),
        Io::TimedOut => ("no answer in time".to_owned(), Advice::Start),
        Io::UnexpectedEof | Io::ConnectionReset | Io::BrokenPipe | Io::ConnectionAborted => {
            ("the connection was closed".to_owned(), Advice::Closed)
        }
        // Errors of name resolution have neither a kind nor a number.
        _ if error.raw_os_error().is_none() => (error.to_string(), Advice::Name),
        kind => (kind.to_string(), Advice::Start),
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn an_error_names_every_server_and_what_to_do() {
        let reach = Reach { set: Some("rs0".to_owned()), servers: Mutex::default() };
        assert_eq!(reach.error().message, "no primary can be reached");
        let said = |hello: Document| reach.said(&hello);
        let secondary = said(doc! {"setName": "rs0", "secondary": true});
        let refused = failed(&std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into());
        reach.servers.lock().extend([("a:1".to_owned(), refused), ("b:2".to_owned(), secondary)]);
        let error = reach.error();
        assert_eq!(error.message, "no primary can be reached (a:1: connection refused; b:2: a secondary)");
        assert_eq!(error.hint.as_deref(), Some(Advice::Wait.text()));
        assert_eq!(reach.silence(), "no answer in time (a:1: connection refused; b:2: a secondary)");
        reach.servers.lock().insert("c:3".to_owned(), said(doc! {"setName": "rs0", "isWritablePrimary": true}));
        assert_eq!(reach.silence(), "the primary c:3 did not answer in time");
        for (hello, what, advice) in [
            (doc! {"isreplicaset": true}, "its replica set is not initiated", Advice::Initiate),
            (doc! {"setName": "x"}, "it is a member of the replica set `x`, not of `rs0`", Advice::OtherSet),
            (doc! {"isWritablePrimary": true}, "a standalone, not a member of a replica set", Advice::Standalone),
            (doc! {"setName": "rs0", "isWritablePrimary": true}, "the primary", Advice::Wait),
        ] {
            assert_eq!(said(hello), Heard { what: what.to_owned(), advice, is_closed: false });
        }
        // `localhost:3` turned out to be `c:3`; the driver ended its last request to it.
        let (primary, cancelled) = (
            said(doc! {"setName": "rs0", "isWritablePrimary": true}),
            Heard { what: "it cannot be asked".to_owned(), advice: Advice::Start, is_closed: false },
        );
        reach.answered("localhost:3", primary.clone());
        reach.closed("localhost:3");
        reach.failed("localhost:3", cancelled.clone());
        assert_eq!(reach.silence(), "the primary c:3 did not answer in time");
        assert!(reach.heard().contains("localhost:3: the primary"), "{}", reach.heard());
        reach.answered("c:3", primary);
        assert!(!reach.heard().contains("localhost"), "{}", reach.heard());
        reach.opened("localhost:3");
        reach.failed("localhost:3", cancelled);
        assert!(reach.heard().contains("localhost:3: it cannot be asked"), "{}", reach.heard());
        let tls = std::io::Error::other(rustls::Error::InvalidCertificate(rustls::CertificateError::Expired));
        assert_eq!(failed(&tls.into()).advice, Advice::Tls);
    }
}
