//! Verification of a daemon's certificate by the commands that query it.

use std::{path::PathBuf, sync::Arc};

use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
};

use denormd_mongo::error::{Error, Kind, Result};
use denormd_rules::config::{certificate, file};

/// The certificates that are trusted.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// The daemon's own certificate, from the config that the command also reads: trusted under any name.
    pub own: Option<CertificateDer<'static>>,
    /// The file of trusted authorities; None for the ones that are compiled in.
    pub ca_file: Option<PathBuf>,
    /// Accepts any certificate: a probe learns only that a daemon is well, and sends no token. Kubernetes' probes do
    /// the same.
    pub probe: bool,
}

impl Trust {
    /// The TLS configuration of the client.
    pub(super) fn client(&self) -> Result<Arc<ClientConfig>> {
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(self.roots()?), provider.clone()).build();
        let authorities = verifier.map_err(|error| Error::internal(format!("no verifier of certificates: {error}")))?;
        let verifier = Verifier { authorities, trust: self.clone(), provider: provider.clone() };
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::internal(format!("no TLS: {error}")))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        Ok(Arc::new(client))
    }

    fn roots(&self) -> Result<RootCertStore> {
        let Some(path) = &self.ca_file else {
            return Ok(RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() });
        };
        let unusable = |why: String| Error::new(Kind::Config, format!("--ca-file {}: {why}", path.display()));
        let pem = file::bytes(path, file::SECRET).map_err(|error| unusable(error.to_string()))?;
        let mut roots = RootCertStore::empty();
        for root in certificate::chain(&pem).map_err(unusable)? {
            roots.add(root).map_err(|error| unusable(error.to_string()))?;
        }
        Ok(roots)
    }
}

/// Trusts the certificate of the config, then the authorities.
#[derive(Debug)]
struct Verifier {
    authorities: Arc<WebPkiServerVerifier>,
    trust: Trust,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        if self.trust.probe || self.trust.own.as_ref() == Some(leaf) {
            return Ok(ServerCertVerified::assertion());
        }
        self.authorities.verify_server_cert(leaf, chain, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Advice on a failed handshake.
pub(super) fn advice(error: &std::io::Error) -> &'static str {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>()) {
        Some(TlsError::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        )) => "ask by a name that is in the certificate: --address https://NAME:PORT",
        Some(TlsError::InvalidCertificate(_)) => {
            "give the daemon's config, or the authority that issued its certificate: --ca-file FILE"
        }
        _ => "does the daemon serve HTTPS there? http.tls_cert_file says so",
    }
}
