//! The settings beside the rules, read.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use secrecy::SecretString;

use denormd_model::partition::MOST;

use super::{
    certificate::{self, Certificate},
    diagnose::{ConfigPath, Mistake},
    file, keys,
    reader::{Field, Fields, Reader},
    sections::{Advise, Http, Lease, Limits, Log, LogFormat, Mongodb, State, Undo},
    sources::Sources,
    tree::Node,
    uri,
};

/// The default of `name`.
const DEFAULT_NAME: &str = "default";
/// The default of `log.filter`.
const DEFAULT_FILTER: &str = "info";

const URI_HINT: &str = "give `mongodb.uri` or `mongodb.uri_file` in a file, or DENORMD__MONGODB__URI or \
                        DENORMD__MONGODB__URI_FILE in the environment";

/// All settings.
pub(super) struct Settings {
    pub name: String,
    pub mongodb: Mongodb,
    pub http: Http,
    pub state: State,
    pub log: Log,
    pub limits: Limits,
    pub lease: Lease,
    pub undo: Undo,
    pub advise: Advise,
}

impl Reader {
    pub fn settings(&mut self, root: &Node, sources: &Sources) -> Option<Settings> {
        let root = self.fields(&Field { at: ConfigPath::default(), node: root }, &super::layer::SECTIONS, |_| None)?;
        let name = root.get("name").and_then(|field| self.name(&field));
        let mongodb = self.mongodb(&root, sources);
        let http = self.http(&root, sources);
        let state = self.state(&root);
        let log = self.log(&root);
        let limits = self.limits(&root);
        let lease = self.lease(&root);
        let undo = self.undo(&root);
        let advise = self.advise(&root);
        Some(Settings {
            name: name.unwrap_or_else(|| DEFAULT_NAME.to_owned()),
            mongodb: mongodb?,
            http,
            state,
            log,
            limits,
            lease,
            undo,
            advise,
        })
    }

    /// A section that may be left out whole.
    fn section<'a>(&mut self, root: &Fields<'a>, key: &str, known: &[&str]) -> Option<Fields<'a>> {
        self.fields(&root.get(key)?, known, |_| None)
    }

    fn mongodb(&mut self, root: &Fields<'_>, sources: &Sources) -> Option<Mongodb> {
        if root.get("mongodb").is_none() {
            self.mistake(Mistake::new(root.at.key("mongodb"), "the key `mongodb.uri` is missing").hint(URI_HINT));
        }
        let section = self.section(root, "mongodb", &keys::names(keys::MONGODB))?;
        let database = section.get("database").and_then(|field| self.text(&field));
        let uri = match (section.get("uri"), section.get("uri_file")) {
            (Some(uri), None) => self.text(&uri).and_then(|text| self.uri(&uri.at, &text)),
            (None, Some(file)) => self.uri_file(&file, sources),
            (Some(uri), Some(file)) => {
                self.mistake(
                    Mistake::new(file.at, "`uri` and `uri_file` are both given")
                        .on_key()
                        .related(uri.at, "`uri` is given here")
                        .hint("keep one of them"),
                );
                None
            }
            (None, None) => {
                self.mistake(Mistake::new(section.at.clone(), "the key `mongodb.uri` is missing").hint(URI_HINT));
                None
            }
        };
        let uri_file = section.get("uri_file").and_then(|file| self.file(&file, sources));
        let allowed = section
            .get("allow_sharded")
            .and_then(|field| self.choice(&field, &[("never", false), ("experimental", true)]));
        Some(Mongodb { uri: uri?, uri_file, database, allow_sharded: allowed.unwrap_or_default() })
    }

    /// Only what would make a host of a part of a password is looked at: the driver parses the rest.
    fn uri(&mut self, at: &ConfigPath, text: &str) -> Option<SecretString> {
        if text.starts_with("mongodb://") || text.starts_with("mongodb+srv://") {
            let Some((message, hint)) = uri::flaw(text) else { return Some(SecretString::from(text.to_owned())) };
            self.mistake(Mistake::new(at.clone(), message).hint(hint));
            return None;
        }
        let message = "this is not a MongoDB connection string";
        self.mistake(Mistake::new(at.clone(), message).hint("it begins with mongodb:// or mongodb+srv://"));
        None
    }

    fn uri_file(&mut self, field: &Field<'_>, sources: &Sources) -> Option<SecretString> {
        let what = "`uri_file` holds the connection string";
        let content = self.content(field, sources, what)?;
        self.uri(&field.at, content.trim())
    }

    /// The file that a setting names: a relative path starts at the directory of the config file that says it.
    fn file(&mut self, field: &Field<'_>, sources: &Sources) -> Option<PathBuf> {
        let name = self.text(field)?;
        Some(sources.directory(&field.at).unwrap_or(Path::new("")).join(name))
    }

    fn content(&mut self, field: &Field<'_>, sources: &Sources, what: &str) -> Option<String> {
        let path = self.file(field, sources)?;
        match file::read(&path, file::SECRET) {
            Ok(content) => Some(content),
            Err(error) => {
                let message = format!("cannot read {}: {error}", path.display());
                let hint = format!("{what}; a relative path starts at the config file's directory");
                self.mistake(Mistake::new(field.at.clone(), message).hint(hint));
                None
            }
        }
    }

    fn http(&mut self, root: &Fields<'_>, sources: &Sources) -> Http {
        let default = Http::default();
        let Some(section) = self.section(root, "http", &keys::names(keys::HTTP)) else { return default };
        let listen = section.get("listen").and_then(|field| self.listen(&field)).unwrap_or(default.listen);
        let (token, file) = (section.get("token"), section.get("token_file"));
        if let (Some(token), Some(file)) = (&token, &file) {
            let mistake = Mistake::new(file.at.clone(), "`token` and `token_file` are both given").on_key();
            self.mistake(mistake.related(token.at.clone(), "`token` is given here").hint("keep one of them"));
        }
        let allowed_hosts = section.get("allowed_hosts").and_then(|field| self.words(&field)).unwrap_or_default();
        let token_file = file.as_ref().and_then(|file| self.file(file, sources));
        let token = match (token, file) {
            (Some(token), _) => self.text(&token).and_then(|text| self.token(&token.at, &text)),
            (None, Some(file)) => {
                let content = self.content(&file, sources, "`token_file` holds the token");
                content.and_then(|content| self.token(&file.at, content.trim()))
            }
            (None, None) => None,
        };
        let token_for_reads = self.token_for_reads(&section, token.is_some());
        let (certificate, certificate_files) = self.certificate(&section, sources);
        Http { listen, token, token_file, token_for_reads, allowed_hosts, certificate, certificate_files }
    }

    /// The certificate for HTTPS, and the files that hold it and its key.
    fn certificate(&mut self, section: &Fields<'_>, sources: &Sources) -> (Option<Certificate>, Vec<PathBuf>) {
        let (cert, key) = (section.get("tls_cert_file"), section.get("tls_key_file"));
        let Some(cert) = cert else {
            if let Some(key) = key {
                let mistake = Mistake::new(key.at, "there is no certificate that the key could belong to").on_key();
                self.mistake(mistake.hint("give http.tls_cert_file"));
            }
            return (None, Vec::new());
        };
        let key = key.as_ref().unwrap_or(&cert);
        let files: Vec<PathBuf> = [&cert, key].into_iter().filter_map(|field| self.file(field, sources)).collect();
        let mut read = |field: &Field<'_>, what: &str| {
            let content = self.content(field, sources, what)?;
            Some((field.at.clone(), content))
        };
        let chain = read(&cert, "`tls_cert_file` holds the server's certificate and its chain, in PEM");
        let secret = read(key, "`tls_key_file` holds the certificate's private key, in PEM");
        let (Some((at, chain)), Some((key_at, secret))) = (chain, secret) else { return (None, files) };
        let chain = certificate::chain(chain.as_bytes()).map_err(|why| (at, why));
        let secret = certificate::key(secret.as_bytes()).map_err(|why| (key_at.clone(), why));
        let whole = chain.and_then(|chain| Ok((chain, secret?)));
        let whole = whole.and_then(|(chain, secret)| Certificate::new(chain, secret).map_err(|why| (key_at, why)));
        match whole {
            Ok(certificate) => (Some(certificate), files),
            Err((at, why)) => {
                self.mistake(Mistake::new(at, format!("this certificate cannot be used: {why}")));
                (None, files)
            }
        }
    }

    fn token_for_reads(&mut self, section: &Fields<'_>, token: bool) -> bool {
        let Some(field) = section.get("require_token") else { return false };
        let everything = self.choice(&field, &[("changes", false), ("everything", true)]).unwrap_or_default();
        if everything && !token {
            let mistake = Mistake::new(field.at, "there is no token that requests could need");
            self.mistake(mistake.hint("give http.token_file"));
        }
        everything
    }

    fn token(&mut self, at: &ConfigPath, text: &str) -> Option<SecretString> {
        if text.len() >= Http::SHORTEST_TOKEN {
            return Some(SecretString::from(text.to_owned()));
        }
        let message = format!("a token has {} characters at least", Http::SHORTEST_TOKEN);
        self.mistake(Mistake::new(at.clone(), message).hint("make one with `openssl rand -hex 32`"));
        None
    }

    fn listen(&mut self, field: &Field<'_>) -> Option<SocketAddr> {
        let text = self.text(field)?;
        let listen = text.parse().ok();
        if listen.is_none() {
            let message = format!("`{text}` is not an address and a port");
            let hint = format!("write {}, or 0.0.0.0:9464 for every interface", Http::DEFAULT_LISTEN);
            self.mistake(Mistake::new(field.at.clone(), message).hint(hint));
        }
        listen
    }

    fn state(&mut self, root: &Fields<'_>) -> State {
        let database =
            self.section(root, "state", &keys::names(keys::STATE)).and_then(|section| section.get("database"));
        database.and_then(|field| self.text(&field)).map_or_else(State::default, |database| State { database })
    }

    fn log(&mut self, root: &Fields<'_>) -> Log {
        let Some(section) = self.section(root, "log", &keys::names(keys::LOG)) else { return Log::default() };
        let filter = section.get("filter").and_then(|field| self.text(&field));
        let format = section.get("format").and_then(|field| {
            self.choice(&field, &[("auto", LogFormat::Auto), ("text", LogFormat::Text), ("json", LogFormat::Json)])
        });
        let otlp = section.get("otlp").and_then(|field| self.collector(&field));
        Log { filter: filter.unwrap_or_else(|| DEFAULT_FILTER.to_owned()), format: format.unwrap_or_default(), otlp }
    }

    fn collector(&mut self, field: &Field<'_>) -> Option<String> {
        let text = self.text(field)?;
        if text.strip_prefix("http://").is_some_and(|rest| !rest.is_empty() && !rest.contains(['@', ' '])) {
            return Some(text);
        }
        let hint = "write http://127.0.0.1:4318; for TLS and passwords let a collector beside denormd send it on";
        self.mistake(Mistake::new(field.at.clone(), "this is not the address of an OTLP collector").hint(hint));
        None
    }

    fn limits(&mut self, root: &Fields<'_>) -> Limits {
        let default = Limits::default();
        let Some(section) = self.section(root, "limits", &keys::names(keys::LIMITS)) else { return default };
        Limits {
            batch_keys: self.limit(&section, "batch_keys").unwrap_or(default.batch_keys),
            batch_bytes: self.limit(&section, "batch_bytes").unwrap_or(default.batch_bytes),
            batches: self.limit(&section, "batches").unwrap_or(default.batches),
            pending: self.limit(&section, "pending").unwrap_or(default.pending),
            read_timeout: self.seconds(&section, "read_timeout_seconds", 1).unwrap_or(default.read_timeout),
            write_timeout: self.seconds(&section, "write_timeout_seconds", 1).unwrap_or(default.write_timeout),
            destroy_grace: self.seconds(&section, "destroy_grace_seconds", 0).unwrap_or(default.destroy_grace),
            destroy_per_hour: self.limit(&section, "destroy_per_hour"),
            audit_per_second: self.limit(&section, "audit_per_second").unwrap_or(default.audit_per_second),
            backfill_per_second: self.limit(&section, "backfill_per_second"),
        }
    }

    fn lease(&mut self, root: &Fields<'_>) -> Lease {
        let default = Lease::default();
        let Some(section) = self.section(root, "lease", &keys::names(keys::LEASE)) else { return default };
        Lease {
            ttl: self.seconds(&section, "ttl_seconds", 2).unwrap_or(default.ttl),
            partitions: self.partitions(&section).unwrap_or(default.partitions),
        }
    }

    fn partitions(&mut self, section: &Fields<'_>) -> Option<u32> {
        let field = section.get("partitions")?;
        let partitions = u32::try_from(self.count(&field)?).unwrap_or(u32::MAX);
        if (1..=MOST).contains(&partitions) {
            return Some(partitions);
        }
        self.mistake(
            Mistake::new(field.at.clone(), format!("expected 1 to {MOST} partitions, found {partitions}"))
                .hint("a few for each instance are enough: every partition reads the change streams"),
        );
        None
    }

    fn undo(&mut self, root: &Fields<'_>) -> Undo {
        let default = Undo::default();
        let Some(section) = self.section(root, "undo", &keys::names(keys::UNDO)) else { return default };
        Undo {
            enabled: section
                .get("mode")
                .and_then(|field| self.choice(&field, &[("keep", true), ("off", false)]))
                .unwrap_or(default.enabled),
            keep: section.get("keep").and_then(|field| self.span(&field)).unwrap_or(default.keep),
            max_bytes: section.get("max_bytes").and_then(|field| self.count(&field)).unwrap_or(default.max_bytes),
        }
    }

    fn advise(&mut self, root: &Fields<'_>) -> Advise {
        let mut advise = Advise::default();
        let Some(section) = self.section(root, "advise", &keys::names(keys::ADVISE)) else { return advise };
        if let Some(history) = self.seconds(&section, "history_seconds", 1) {
            advise.history = history;
        }
        for (key, setting) in [
            ("sample", &mut advise.sample),
            ("scan_documents", &mut advise.scan_documents),
            ("history_events", &mut advise.history_events),
            ("embed_elements", &mut advise.embed_elements),
            ("references_warn", &mut advise.references_warn),
            ("references_stop", &mut advise.references_stop),
            ("document_warn_bytes", &mut advise.document_warn),
            ("document_bad_bytes", &mut advise.document_bad),
            ("copy_ratio", &mut advise.copy_ratio),
            ("no_copy_ratio", &mut advise.no_copy_ratio),
            ("subset", &mut advise.subset),
            ("indexes", &mut advise.indexes),
            ("lookup_percent", &mut advise.lookup_percent),
            ("collections", &mut advise.collections),
        ] {
            if let Some(count) = section.get(key).and_then(|field| self.count(&field)) {
                *setting = count;
            }
        }
        advise
    }

    fn limit(&mut self, section: &Fields<'_>, key: &str) -> Option<usize> {
        usize::try_from(self.count(&section.get(key)?)?).ok()
    }

    fn seconds(&mut self, section: &Fields<'_>, key: &str, least: i64) -> Option<Duration> {
        let field = section.get(key)?;
        let number = self.integer(&field)?;
        // A day: what is longer is a slip of units, and would overflow deadlines further down.
        if (least..=86_400).contains(&number) {
            return u64::try_from(number).ok().map(Duration::from_secs);
        }
        let message = format!("expected {least} to 86400 seconds, found {number}");
        self.mistake(Mistake::new(field.at, message));
        None
    }
}

impl Default for Http {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 9464)),
            token: None,
            token_file: None,
            token_for_reads: false,
            allowed_hosts: Vec::new(),
            certificate: None,
            certificate_files: Vec::new(),
        }
    }
}

impl Default for State {
    fn default() -> Self {
        Self { database: Self::DEFAULT_DATABASE.to_owned() }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { filter: DEFAULT_FILTER.to_owned(), format: LogFormat::default(), otlp: None }
    }
}
