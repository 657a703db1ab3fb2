//! The parts of a connection string that may be shown: the hosts, the database, and options that cannot hold a secret.

use super::tree::Span;

/// Options whose values may be shown, in lower case. Any other option may hold a secret.
const HARMLESS: [&str; 38] = [
    "appname",
    "authmechanism",
    "authsource",
    "compressors",
    "connecttimeoutms",
    "directconnection",
    "heartbeatfrequencyms",
    "journal",
    "loadbalanced",
    "localthresholdms",
    "maxconnecting",
    "maxidletimems",
    "maxpoolsize",
    "maxstalenessseconds",
    "minpoolsize",
    "readconcernlevel",
    "readpreference",
    "readpreferencetags",
    "replicaset",
    "retryreads",
    "retrywrites",
    "servermonitoringmode",
    "serverselectiontimeoutms",
    "sockettimeoutms",
    "srvmaxhosts",
    "srvservicename",
    "ssl",
    "timeoutms",
    "tls",
    "tlsallowinvalidcertificates",
    "tlsallowinvalidhostnames",
    "tlscafile",
    "tlscertificatekeyfile",
    "tlsinsecure",
    "uuidrepresentation",
    "w",
    "waitqueuetimeoutms",
    "wtimeoutms",
];
/// The other options that the driver knows: their names may be shown, their values may not.
const SECRET: [&str; 6] = [
    "authmechanismproperties",
    "proxyhost",
    "proxypassword",
    "proxyport",
    "proxyusername",
    "tlscertificatekeyfilepassword",
];
const HIDDEN: &str = "***";

/// The parts of a connection string that must not be shown, in order. Everything after the scheme is secret if the
/// parts cannot be identified: an unescaped `?` or `/` in a password makes part of it look like a host, an option or a
/// port.
pub(super) fn secrets(uri: &str) -> Vec<Span> {
    let scheme = uri.find("://").map(|at| at + 3);
    let start = scheme.unwrap_or_default();
    let all = (start < uri.len()).then_some(start..uri.len()).into_iter().collect();
    if scheme.is_none() || flaw(uri).is_some() {
        return all;
    }
    let (before, options) = split(uri, start..uri.len(), '?');
    let user = uri[before.clone()].rfind('@').map(|at| before.start..before.start + at);
    // An unescaped character in a password makes part of it look like a host.
    let escaped = |text: &str| !text.contains([':', '/', '?', '#', '[', ']', '@']);
    let pair = user.as_ref().map(|user| uri[user.clone()].split_once(':').unwrap_or((&uri[user.clone()], "")));
    if pair.is_some_and(|(name, password)| !escaped(name) || !escaped(password)) {
        return all;
    }
    let hosts_start = user.as_ref().map_or(before.start, |user| user.end + 1);
    let (hosts, database) = split(uri, hosts_start..before.end, '/');
    // With this scheme there is one name, and no port. Anything else is a user name and a password without `@` and host.
    if uri[..start].eq_ignore_ascii_case("mongodb+srv://") && uri[hosts.clone()].contains([',', ':']) {
        return all;
    }
    let is_database = |c: char| c.is_ascii_alphanumeric() || "-_%".contains(c);
    if !uri[hosts].split(',').all(is_host) || !database.is_none_or(|database| uri[database].chars().all(is_database)) {
        return all;
    }
    let mut found: Vec<Span> = user.into_iter().collect();
    let Some(options) = options else { return found };
    if uri[options.clone()].split('&').any(|option| !option.is_empty() && !option.contains('=')) {
        return all;
    }
    let mut at = options.start;
    for option in uri[options].split('&') {
        let (name, value) = split(uri, at..at + option.len(), '=');
        let known = uri[name.clone()].to_lowercase();
        match value {
            Some(_) if HARMLESS.contains(&known.as_str()) => {}
            Some(value) if SECRET.contains(&known.as_str()) => found.push(value),
            _ => found.push(at..at + option.len()),
        }
        at += option.len() + 1;
    }
    found.retain(|span| !span.is_empty());
    found
}

/// Defect of a connection string that must not reach the driver, and the suggested correction.
pub(super) fn flaw(uri: &str) -> Option<(&'static str, &'static str)> {
    let (before, options) = uri.split_once('?').unwrap_or((uri, ""));
    // The text before a `?` in the password would be read as hosts.
    if options.contains('@') {
        let hint = "write a `?` in the user name or the password as %3F, and an `@` in an option as %40";
        return Some(("the connection string has an `@` after a `?`", hint));
    }
    // The driver panics on some of these, and its panic quotes them.
    let escapes = before.split('%').skip(1);
    let is_escape = |text: &str| text.len() >= 2 && text.bytes().take(2).all(|byte| byte.is_ascii_hexdigit());
    if !escapes.into_iter().all(is_escape) {
        let hint = "write a `%` in the user name or the password as %25";
        return Some(("the connection string has a `%` without two hexadecimal digits after it", hint));
    }
    None
}

/// True if the driver knows an option of this name. Ignores case.
#[must_use]
pub fn is_known_option(name: &str) -> bool {
    let name = name.to_lowercase();
    HARMLESS.contains(&name.as_str()) || SECRET.contains(&name.as_str())
}

/// The connection string without its secrets.
pub(super) fn shown(uri: &str) -> String {
    let mut shown = uri.to_owned();
    for secret in secrets(uri).into_iter().rev() {
        shown.replace_range(secret, HIDDEN);
    }
    shown
}

/// The text before and after the first `separator`.
fn split(text: &str, span: Span, separator: char) -> (Span, Option<Span>) {
    match text[span.clone()].find(separator) {
        Some(at) => (span.start..span.start + at, Some(span.start + at + 1..span.end)),
        None => (span, None),
    }
}

/// `db1`, `db1:27017`, `[::1]:27017`, `%2Ftmp%2Fmongodb-27017.sock`
fn is_host(text: &str) -> bool {
    let (name, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, port)) => (address, port.strip_prefix(':')),
        None => text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port))),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._%:".contains(c);
    !name.is_empty()
        && name.chars().all(plain)
        && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_shown_of_a_connection_string() {
        for (uri, expected) in [
            ("mongodb://a", "mongodb://a"),
            (
                "mongodb://a:1,[::1]:2/shop?replicaSet=rs0&tls=true",
                "mongodb://a:1,[::1]:2/shop?replicaSet=rs0&tls=true",
            ),
            ("mongodb://u:p@a:1/shop?w=1", "mongodb://***@a:1/shop?w=1"),
            ("mongodb+srv://u:p@a.example/", "mongodb+srv://***@a.example/"),
            ("mongodb://u:p/w@a/", "mongodb://***"),
            ("mongodb://u::@p?w=1", "mongodb://***"),
            (
                "mongodb://a/?tlsCertificateKeyFile=/k.pem&tlsCertificateKeyFilePassword=p&AUTHMECHANISMPROPERTIES=a:b",
                "mongodb://a/?tlsCertificateKeyFile=/k.pem&tlsCertificateKeyFilePassword=***&AUTHMECHANISMPROPERTIES=***",
            ),
            ("mongodb://a/?pasword=p&w=1", "mongodb://a/?***&w=1"),
            ("mongodb://a/?w=1&p", "mongodb://***"),
            // An unescaped password, a missing host, an invalid port.
            ("mongodb://u:p?w@a/", "mongodb://***"),
            ("mongodb://u:12?w=p@a/", "mongodb://***"),
            ("mongodb://u:p", "mongodb://***"),
            ("mongodb://u:p,a/", "mongodb://***"),
            ("mongodb+srv://u:1,p", "mongodb+srv://***"),
            ("mongodb+srv://u:1", "mongodb+srv://***"),
            ("mongodb://u:p#w", "mongodb://***"),
            ("mongodb://", "mongodb://"),
            ("u:p@a", "***"),
        ] {
            assert_eq!(shown(uri), expected, "{uri}");
        }
    }
}
