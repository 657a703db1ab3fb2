//! The certificate of the HTTP server: `http.tls_cert_file` and `http.tls_key_file`.

use std::sync::Arc;

use tokio_rustls::rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

/// A certificate with its matching key.
#[derive(Debug, Clone)]
pub struct Certificate {
    /// The TLS configuration for handshakes.
    pub server: Arc<ServerConfig>,
    /// The certificate without its issuers, by which commands recognise the daemon of their config.
    pub own: CertificateDer<'static>,
}

impl Certificate {
    /// Combines a chain, which starts with the server's own certificate, and its key.
    pub fn new(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<Self, String> {
        let own = chain.first().cloned().ok_or("it holds no certificate")?;
        let server = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(|error| error.to_string())?;
        Ok(Self { server: Arc::new(server), own })
    }
}

/// The certificates of a PEM file, at least one.
pub fn chain(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    match chain {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        _ => Err("it holds no certificate in PEM".to_owned()),
    }
}

/// The first private key of a PEM file.
pub fn key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|_| "it holds no private key in PEM (without a passphrase)".to_owned())
}
