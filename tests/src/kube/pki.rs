//! Keys and certificates of the control plane: one authority, a certificate for each who speaks, keys for account tokens.
//!
//! Everything lies in the lab's own folder and is worth nothing outside it. The serving certificate can be issued anew while the
//! API server runs, which reads its files again.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType,
};

/// Who may do everything.
const ADMINISTRATORS: &str = "system:masters";

/// The authority and where its files lie.
#[derive(Debug)]
pub struct Pki {
    folder: PathBuf,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Pki {
    /// Makes an authority, and the key that signs account tokens.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub fn new(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        let mut params = named("evenkeel lab authority", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let pki = Self {
            folder: folder.to_owned(),
            authority,
        };
        pki.write("ca.crt", &pki.authority.pem())?;
        let tokens = KeyPair::generate()?;
        pki.write("tokens.key", &tokens.serialize_pem())?;
        pki.write("tokens.pub", &tokens.public_key_pem())?;
        Ok(pki)
    }

    /// A file of the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Issues the API server's certificate, `server.crt` and `server.key`, for names and addresses.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub fn issue_server(&self, names: &[&str], addresses: &[IpAddr]) -> Result<()> {
        let mut params = named("kube-apiserver", None);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        for name in names {
            params.subject_alt_names.push(SanType::DnsName((*name).try_into()?));
        }
        params
            .subject_alt_names
            .extend(addresses.iter().map(|address| SanType::IpAddress(*address)));
        self.issue("server", &params)
    }

    /// Issues a client's certificate, `NAME.crt` and `NAME.key`; an administrator may do everything.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub fn issue_client(&self, name: &str, user: &str, administrator: bool) -> Result<()> {
        let mut params = named(user, administrator.then_some(ADMINISTRATORS));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(name, &params)
    }

    fn issue(&self, name: &str, params: &CertificateParams) -> Result<()> {
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.authority)?;
        // The key first: a reader that finds the new certificate finds its key.
        self.write(&format!("{name}.key"), &key.serialize_pem())?;
        self.write(&format!("{name}.crt"), &certificate.pem())
    }

    /// Replaces a file whole.
    fn write(&self, name: &str, text: &str) -> Result<()> {
        let (path, fresh) = (self.file(name), self.file(&format!("{name}.new")));
        fs::write(&fresh, text).with_context(|| format!("write {}", fresh.display()))?;
        fs::rename(&fresh, &path).with_context(|| format!("replace {}", path.display()))
    }
}

fn named(name: &str, group: Option<&str>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params
}
