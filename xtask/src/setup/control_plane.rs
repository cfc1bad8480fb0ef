//! The real control plane for `cargo xtask kube`: etcd, kube-apiserver, kube-controller-manager, kube-proxy and kubectl.
//!
//! Built from Go modules as `tests/kube/go.mod` names them, once, into the cache. The invariant: a folder in the cache is whole,
//! and was built from exactly the `go.mod` and `go.sum` that lie beside its programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command::{logged, step};
use crate::layout::{Layout, find_program};

/// The programs, as `go build` names them.
const PROGRAMS: [&str; 5] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kubectl",
];
/// What they are built from, besides the modules.
const SOURCES: [&str; 2] = ["go.mod", "go.sum"];

/// The folder that has the programs of this tree's `go.mod`.
pub(crate) fn find(layout: &Layout) -> Option<PathBuf> {
    let folder = folder(layout).ok()?;
    let whole = PROGRAMS.iter().all(|program| folder.join(program).is_file());
    let same = |name| fs::read(folder.join(name)).ok() == fs::read(modules(layout).join(name)).ok();
    (whole && SOURCES.into_iter().all(same)).then_some(folder)
}

/// Go, if it is here.
pub(super) fn go() -> Option<PathBuf> {
    find_program("go").or_else(|| {
        let usual = PathBuf::from("/usr/local/go/bin/go");
        usual.is_file().then_some(usual)
    })
}

/// Builds the programs into the cache.
pub(super) fn build(layout: &Layout) -> Result<()> {
    let Some(go) = go() else {
        return Ok(()); // Reported as missing.
    };
    let version = version(layout)?;
    let folder = folder(layout)?;
    let partial = folder.with_extension("partial");
    remove(&partial)?;
    fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
    let name = format!("building etcd and Kubernetes {version} (some ten minutes on two cores, once)");
    step(&name, || {
        logged(
            super::TRIES,
            &layout.log("control-plane"),
            Command::new(go)
                .current_dir(modules(layout))
                .env("CGO_ENABLED", "0")
                .args(["build", "-trimpath", "-ldflags"])
                .arg(format!("-s -w -X k8s.io/component-base/version.gitVersion={version}"))
                .arg("-o")
                .arg(&partial)
                .args(["./etcd", "tool"]),
        )
    })?;
    for name in SOURCES {
        fs::copy(modules(layout).join(name), partial.join(name)).with_context(|| format!("copy {name}"))?;
    }
    remove(&folder)?;
    fs::rename(&partial, &folder).with_context(|| format!("move {} into place", partial.display()))
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn modules(layout: &Layout) -> PathBuf {
    layout.root.join("tests/kube")
}

fn folder(layout: &Layout) -> Result<PathBuf> {
    Ok(layout.cache.join(format!("kubernetes-{}", version(layout)?)))
}

/// The version of `k8s.io/kubernetes` that `go.mod` requires, with its `v`.
fn version(layout: &Layout) -> Result<String> {
    let path = modules(layout).join("go.mod");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    required(&text).with_context(|| format!("{} requires no k8s.io/kubernetes", path.display()))
}

fn required(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word == "require");
        (words.next() == Some("k8s.io/kubernetes"))
            .then(|| words.next().map(str::to_owned))
            .flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::required;

    #[test]
    fn the_version_is_read_from_either_form_of_requirement() {
        let block = "require (\n\tk8s.io/api v0.0.0\n\tk8s.io/kubernetes v1.36.3 // indirect\n)\n";
        assert_eq!(required(block).as_deref(), Some("v1.36.3"));
        assert_eq!(required("require k8s.io/kubernetes v1.2.3").as_deref(), Some("v1.2.3"));
        assert_eq!(required("replace k8s.io/api => k8s.io/api v0.36.3"), None);
    }
}
