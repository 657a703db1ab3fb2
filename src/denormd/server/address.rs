//! The address of a running daemon: `--address`.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

/// A host and a port, optionally with the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// True for HTTPS, false for HTTP. None if the address does not specify it.
    pub https: Option<bool>,
    /// A name, or an IP address without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl Address {
    /// The same with loopback in place of the unspecified address.
    pub(super) fn reachable(mut self) -> Self {
        match self.host.parse() {
            Ok(IpAddr::V4(ip)) if ip.is_unspecified() => "127.0.0.1".clone_into(&mut self.host),
            Ok(IpAddr::V6(ip)) if ip.is_unspecified() => "::1".clone_into(&mut self.host),
            _ => {}
        }
        self
    }

    /// `HOST:PORT`
    pub(super) fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self { https: None, host: address.ip().to_string(), port: address.port() }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write IP:PORT, HOST:PORT, or https://HOST:PORT".to_owned();
        let (https, rest, usual) = match text.split_once("://") {
            None => (None, text, None),
            Some(("http", rest)) => (Some(false), rest.trim_end_matches('/'), Some(80)),
            Some(("https", rest)) => (Some(true), rest.trim_end_matches('/'), Some(443)),
            Some(_) => return Err(wrong()),
        };
        let (host, port) = match rest.rsplit_once(':') {
            // The colon of an IPv6 address without a port.
            Some((host, port)) if !port.ends_with(']') => (host, Some(port.parse().map_err(|_| wrong())?)),
            _ => (rest, usual),
        };
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(host) if host.parse::<IpAddr>().is_ok() => host,
            None if !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)) => host,
            _ => return Err(wrong()),
        };
        Ok(Self { https, host: host.to_owned(), port: port.ok_or_else(wrong)? })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.https == Some(true) {
            f.write_str("https://")?;
        }
        f.write_str(&self.authority())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port_with_or_without_a_protocol() {
        for (text, https, host, port) in [
            ("127.0.0.1:9464", None, "127.0.0.1", 9464),
            ("[::1]:9464", None, "::1", 9464),
            ("denormd.shop.svc:9464", None, "denormd.shop.svc", 9464),
            ("https://denormd.example", Some(true), "denormd.example", 443),
            ("https://[::1]:1/", Some(true), "::1", 1),
            ("http://10.0.0.7:9464", Some(false), "10.0.0.7", 9464),
        ] {
            assert_eq!(text.parse(), Ok(Address { https, host: host.to_owned(), port }), "{text}");
        }
        for wrong in ["", "host", ":1", "host:", "host:99999", "::1:9464", "ftp://host:1", "https://a/b:1", "u@host:1"]
        {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
        for (text, shown) in [("0.0.0.0:1", "127.0.0.1:1"), ("https://[::]:1", "https://[::1]:1"), ("a:1", "a:1")] {
            assert_eq!(text.parse::<Address>().unwrap().reachable().to_string(), shown);
        }
    }
}
