//! Where the control plane's programs lie: `cargo xtask` builds them and says so.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

/// The variable that names the folder.
const VARIABLE: &str = "EVENKEEL_CONTROL_PLANE";

/// The folder of etcd, kube-apiserver, kube-controller-manager, kube-proxy and kubectl, if this machine has them.
pub fn folder() -> Option<PathBuf> {
    env::var_os(VARIABLE).map(PathBuf::from)
}

/// The path of one of them.
///
/// # Errors
/// Where it is not there, with how it comes.
pub fn find(name: &str) -> Result<PathBuf> {
    let folder = folder().with_context(|| {
        format!("{VARIABLE} does not say where {name} is: start this with `cargo xtask kube`, which builds it")
    })?;
    let path = folder.join(name);
    ensure!(path.is_file(), "there is no {}", path.display());
    Ok(path)
}

/// The `PATH` with the folder in front, for commands that people run in the lab.
pub fn search_path(folder: &Path) -> std::ffi::OsString {
    let others = env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(folder.to_owned()).chain(env::split_paths(&others));
    env::join_paths(all).unwrap_or(others)
}
