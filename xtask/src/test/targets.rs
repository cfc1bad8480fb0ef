//! Builds the test executables and lists them.
//!
//! Cargo says where they are; nothing is guessed from file names. The invariant: a suite runs in its package's folder,
//! as under `cargo test`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::command::{cargo, shown, step};
use crate::ebpf;
use crate::layout::Layout;
use crate::vm::Program;

/// The feature that makes the agent keep what a later list no longer has.
const DEFECT: &str = "lb-user/defect-relist-keeps";

/// One test executable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Suite {
    /// How the summary calls it: the package and the target, or the target alone for a test of `lb-tests`.
    pub(crate) name: String,
    pub(crate) executable: PathBuf,
    /// The package's folder.
    pub(crate) folder: PathBuf,
    /// Whether it makes real sockets, and so runs in virtual machines as well.
    pub(crate) in_guests: bool,
}

/// All that the tests need.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) suites: Vec<Suite>,
    /// The agent's binary.
    pub(crate) agent: PathBuf,
}

impl Built {
    /// What a guest gets: the agent, and the suites of real sockets below /tests.
    pub(crate) fn guest_programs(&self) -> Vec<Program> {
        let suites = self.suites.iter().filter(|suite| suite.in_guests).map(|suite| Program {
            host: suite.executable.clone(),
            guest: guest_path(suite),
        });
        let agent = Program {
            host: self.agent.clone(),
            guest: PathBuf::from("/bin/evenkeel"),
        };
        suites.chain([agent]).collect()
    }
}

/// Where a suite lies in a guest.
pub(crate) fn guest_path(suite: &Suite) -> PathBuf {
    Path::new("/tests").join(&suite.name)
}

/// Builds the kernel object, the binaries and all tests.
pub(crate) fn build(layout: &Layout) -> Result<Built> {
    ebpf::build(layout)?;
    let messages = step("building the tests", || {
        // One selection for both, so that cargo resolves features alike and builds each crate once.
        let mut bins = cargo(&layout.root);
        bins.args(["build", "--locked", "--workspace", "--bins"]);
        crate::command::run(&mut bins)?;
        let mut build = cargo(&layout.root);
        build
            .args(["test", "--locked", "--workspace", "--no-run"])
            .args(["--message-format", "json-render-diagnostics"])
            .stderr(Stdio::inherit());
        let output = build.output().context("cannot start `cargo`")?;
        if !output.status.success() {
            bail!("`{}` failed; the compiler's words are above", shown(&build));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    })?;
    Ok(Built {
        suites: suites(&messages)?,
        agent: layout.target.join("debug/evenkeel"),
    })
}

/// Builds an agent that loses removals, beside the ordinary one.
pub(crate) fn build_defect(layout: &Layout) -> Result<PathBuf> {
    step("building an agent with a defect, which the tests must find", || {
        // The workspace's selection, as of the tests, so that crates below are built once.
        let agent = |features: &[&str]| {
            let mut build = cargo(&layout.root);
            build.args(["build", "--locked", "--workspace", "--bin", "evenkeel"]);
            crate::command::run(build.args(features))
        };
        let kept = layout.target.join("defect/evenkeel");
        let built = agent(&["--features", DEFECT]).and_then(|()| {
            let folder = kept.parent().context("a file lies in a folder")?;
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
            fs::copy(layout.target.join("debug/evenkeel"), &kept).context("keep the agent with a defect")
        });
        // The ordinary one takes its place again, whatever happened; it is built already.
        agent(&[])?;
        built?;
        Ok(kept)
    })
}

#[derive(Deserialize)]
struct Message {
    reason: String,
    executable: Option<PathBuf>,
    manifest_path: Option<PathBuf>,
    package_id: Option<String>,
    profile: Option<Profile>,
    target: Option<Target>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

fn suites(messages: &str) -> Result<Vec<Suite>> {
    let mut suites = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Message = serde_json::from_str(line).context("read cargo's messages")?;
        let (Some(executable), Some(manifest), Some(target)) =
            (message.executable, message.manifest_path, message.target)
        else {
            continue;
        };
        if message.reason != "compiler-artifact" || !message.profile.is_some_and(|profile| profile.test) {
            continue;
        }
        let package = package_name(message.package_id.as_deref().unwrap_or_default());
        let integration = target.kind.iter().any(|kind| kind == "test");
        let name = if integration && package == "lb-tests" {
            target.name.clone()
        } else if target.kind.iter().any(|kind| kind == "bin") {
            format!("{package} (binary {})", target.name)
        } else if integration {
            format!("{package} ({})", target.name)
        } else {
            package.clone()
        };
        suites.push(Suite {
            in_guests: integration && package == "lb-tests" && runs_in_guests(&target.name),
            name,
            executable,
            folder: manifest.parent().context("a manifest lies in a folder")?.to_path_buf(),
        });
    }
    suites.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(suites)
}

fn runs_in_guests(target: &str) -> bool {
    target.starts_with("sock_") || target.starts_with("tc_") || target == "founding_story"
}

/// The name in a package id such as `path+file:///x/lb-user#0.1.0` or `path+file:///x/tests#lb-tests@0.1.0`.
fn package_name(id: &str) -> String {
    let (place, fragment) = id.rsplit_once('#').unwrap_or((id, ""));
    match fragment.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => place.rsplit('/').next().unwrap_or(place).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{package_name, suites};

    #[test]
    fn suites_come_from_test_artifacts_only() {
        let artifact = |id: &str, manifest: &str, target: &str, kind: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"{id}","manifest_path":"{manifest}","target":{{"name":"{target}","kind":["{kind}"]}},"profile":{{"test":{test}}},"executable":"/t/{target}-1"}}"#
            )
        };
        let messages = [
            artifact(
                "path+file:///x/tests#lb-tests@0.1.0",
                "/x/tests/Cargo.toml",
                "sock_connect",
                "test",
                true,
            ),
            artifact(
                "path+file:///x/tests#lb-tests@0.1.0",
                "/x/tests/Cargo.toml",
                "golden",
                "test",
                true,
            ),
            artifact(
                "path+file:///x/lb-user#0.1.0",
                "/x/lb-user/Cargo.toml",
                "evenkeel",
                "bin",
                false,
            ),
            artifact(
                "path+file:///x/lb-user#0.1.0",
                "/x/lb-user/Cargo.toml",
                "lb_user",
                "lib",
                true,
            ),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let suites = suites(&messages.join("\n")).expect("good messages");
        let seen: Vec<_> = suites
            .iter()
            .map(|suite| (suite.name.as_str(), suite.in_guests))
            .collect();
        assert_eq!(seen, [("golden", false), ("lb-user", false), ("sock_connect", true)]);
    }

    #[test]
    fn both_forms_of_package_ids_are_read() {
        assert_eq!(package_name("path+file:///x/lb-user#0.1.0"), "lb-user");
        assert_eq!(package_name("path+file:///x/tests#lb-tests@0.1.0"), "lb-tests");
    }
}
