//! The agent's own account: what `deploy/kubernetes/rbac.yaml` grants, and tokens for it.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::api::Api;

/// The account's name for the API server.
pub const USER: &str = "system:serviceaccount:kube-system:evenkeel";
/// The path of the account.
const ACCOUNT: &str = "/api/v1/namespaces/kube-system/serviceaccounts/evenkeel";
/// The path of its role.
pub const ROLE: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles/evenkeel";
/// The path of its binding.
const BINDING: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/evenkeel";

/// The objects of the deployment: account, role, binding.
///
/// # Errors
/// Where the file cannot be read.
pub fn objects() -> Result<Vec<Value>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes/rbac.yaml");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    serde_saphyr::from_multiple(&text).with_context(|| format!("read {}", path.display()))
}

/// Makes the account and grants it what the deployment does.
///
/// # Errors
/// Why the server refuses.
pub fn grant(api: &Api) -> Result<()> {
    for object in objects()? {
        api.apply(&object)?;
    }
    Ok(())
}

/// Takes every right of the account away.
///
/// # Errors
/// Why the server refuses.
pub fn revoke(api: &Api) -> Result<()> {
    api.delete(BINDING, None)
}

/// Writes a fresh token of the account into a file, whole.
///
/// # Errors
/// Why the server refuses, or the file cannot be written.
pub fn write_token(api: &Api, file: &Path) -> Result<()> {
    let asked = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600},
    });
    let answer = api.create(&format!("{ACCOUNT}/token"), &asked)?;
    let token = answer["status"]["token"].as_str().context("the answer has no token")?;
    let fresh = file.with_extension("new");
    fs::write(&fresh, token).with_context(|| format!("write {}", fresh.display()))?;
    fs::rename(&fresh, file).with_context(|| format!("replace {}", file.display()))
}

/// Ends the life of every token so far: the account is made anew.
///
/// # Errors
/// Why the server refuses.
pub fn expire_tokens(api: &Api) -> Result<()> {
    api.delete(ACCOUNT, None)?;
    grant(api)
}
