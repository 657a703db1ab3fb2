//! The settings beside the rules, read.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use secrecy::SecretString;

use super::{
    certificate::{self, Certificate},
    diagnose::{ConfigPath, Mistake},
    file,
    key::Key,
    keys,
    reader::{Field, Fields, Reader, list, nearest},
    sections::{Advise, Config, Http, Lease, Limits, Log, LogFormat, Mongodb, State, Undo},
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

impl Reader {
    /// The config without its rules.
    pub fn settings(&mut self, root: &Node, sources: &Sources) -> Option<Config> {
        let root = self.fields(&Field { at: ConfigPath::default(), node: root }, &keys::sections(), |_| None)?;
        let name = root.get("name").and_then(|field| self.name(&field));
        let mongodb = self.mongodb(&root, sources);
        let http = self.http(&root, sources);
        let log = self.log(&root);
        let state = self.declared(&root, "state", keys::STATE, State::read);
        // The server does not replicate `local`: after a failover, two instances could lead.
        if ["admin", "config", "local"].contains(&state.database.as_str()) {
            let message = format!("`{}` is a database of the server's own", state.database);
            let mistake = Mistake::new(root.at.key("state").key("database"), message);
            self.mistake(mistake.hint("write another name, such as denormd"));
        }
        let limits = self.declared(&root, "limits", keys::LIMITS, Limits::read);
        let lease = self.declared(&root, "lease", keys::LEASE, Lease::read);
        let undo = self.declared(&root, "undo", keys::UNDO, Undo::read);
        let advise = self.declared(&root, "advise", keys::ADVISE, Advise::read);
        Some(Config {
            name: name.unwrap_or_else(|| DEFAULT_NAME.to_owned()),
            mongodb: mongodb?,
            rules: Vec::new(),
            http,
            state,
            log,
            limits,
            lease,
            undo,
            advise,
        })
    }

    fn declared<T: Default>(
        &mut self,
        root: &Fields<'_>,
        section: &str,
        known: &[Key],
        read: fn(&mut Self, &Fields<'_>) -> T,
    ) -> T {
        self.section(root, section, &keys::names(known)).map(|fields| read(self, &fields)).unwrap_or_default()
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
                let mistake = Mistake::new(key.at, "`tls_key_file` needs `tls_cert_file`").on_key();
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
            let mistake = Mistake::new(field.at, "`require_token: everything` needs a token");
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

    fn log(&mut self, root: &Fields<'_>) -> Log {
        let Some(section) = self.section(root, "log", &keys::names(keys::LOG)) else { return Log::default() };
        let filter = section.get("filter").and_then(|field| self.log_filter(&field));
        let format = section.get("format").and_then(|field| {
            self.choice(&field, &[("auto", LogFormat::Auto), ("text", LogFormat::Text), ("json", LogFormat::Json)])
        });
        let otlp = section.get("otlp").and_then(|field| self.collector(&field));
        Log { filter: filter.unwrap_or_else(|| DEFAULT_FILTER.to_owned()), format: format.unwrap_or_default(), otlp }
    }

    /// A word that is no level would count as a target, and switch off everything else.
    fn log_filter(&mut self, field: &Field<'_>) -> Option<String> {
        const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
        let text = self.text(field)?;
        let parts: Vec<&str> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
        // In brackets are the fields of a span.
        let plain = parts.iter().filter(|part| !part.contains(['[', ']', '{', '}']));
        let is_known = |level: &&str| {
            let is_number = matches!(level.as_bytes(), [b'0'..=b'5']);
            is_number || LEVELS.iter().any(|known| known.eq_ignore_ascii_case(level))
        };
        let Some(unknown) = plain.map(|part| part.rsplit('=').next().unwrap_or(part)).find(|level| !is_known(level))
        else {
            return Some(parts.join(","));
        };
        let message = format!("`{unknown}` is not a level of the log: {}", list(&LEVELS));
        let mistake = Mistake::new(field.at.clone(), message);
        self.mistake(match nearest(unknown, &LEVELS) {
            Some(near) => mistake.hint(format!("did you mean `{near}`?")),
            None => mistake.hint("write LEVEL, or TARGET=LEVEL for a part of the log, as in `info,mongodb=debug`"),
        });
        None
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

impl Default for Log {
    fn default() -> Self {
        Self { filter: DEFAULT_FILTER.to_owned(), format: LogFormat::default(), otlp: None }
    }
}
