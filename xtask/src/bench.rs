//! `cargo xtask bench`: the bench on this machine, or inside a virtual machine for what this one's kernel lacks.
//!
//! What is measured and how stands in `tests/src/bench`. The invariant: what a guest has measured is in the file that was named, or
//! the task fails.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::agent;
use crate::command::say;
use crate::layout::Layout;
use crate::setup::{self, Group, KernelLine};
use crate::vm::{self, Ending, Image, MARK, Program, shell_words};

/// Where the guest writes its JSON.
const GUEST_JSON: &str = "/tmp/bench.json";

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Measure inside a virtual machine with this kernel, 6.1 or 6.12: ratios of one run there still mean something.
    #[arg(long, value_parser = crate::kernel_line)]
    kernel: Option<KernelLine>,
    /// Kill the virtual machine after so many seconds.
    #[arg(long, default_value_t = 3600, value_name = "SECONDS", requires = "kernel")]
    timeout: u64,
    /// Write what was measured to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Arguments of `evenkeel-bench`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl Options {
    fn beside_kube_proxy(&self) -> bool {
        self.arguments.iter().any(|argument| argument == "--kube")
    }
}

/// `cargo xtask bench`.
pub(crate) fn command(layout: &Layout, options: &Options) -> Result<ExitCode> {
    let mut groups = vec![Group::Build];
    groups.push(match options.kernel {
        Some(_) => Group::Vm,
        None => Group::Sockets,
    });
    if options.beside_kube_proxy() {
        groups.push(Group::ControlPlane);
        if options.kernel.is_some() {
            groups.push(Group::KubeProxy);
        }
    }
    if options.kernel.is_some() {
        fit_for_guest(options)?;
    } else {
        agent::need_root(
            "bench",
            "cargo build --release -p lb-user -p lb-tests --bins` and then `sudo target/release/evenkeel-bench",
        )?;
    }
    setup::require(layout, &groups)?;
    // The bench starts agents of its own.
    agent::build(layout, &["lb-user", "lb-tests"], true)?;
    match options.kernel {
        Some(kernel) => inside(layout, options, kernel),
        None => here(layout, options),
    }
}

/// Refuses what a guest could not do, before anything is built.
fn fit_for_guest(options: &Options) -> Result<()> {
    let given = |flag: &str| {
        let mut arguments = options.arguments.iter();
        arguments.any(|argument| argument.to_string_lossy().starts_with(flag))
    };
    if given("--json") {
        bail!("with --kernel, --json stands before the bench's own arguments: its file is of this machine");
    }
    if options.beside_kube_proxy() && !given("--kube-api-services") {
        bail!("with --kernel, --kube wants --kube-api-services 0: guests have no API server of Kubernetes");
    }
    Ok(())
}

/// Replaces this process by the bench.
fn here(layout: &Layout, options: &Options) -> Result<ExitCode> {
    let mut bench = Command::new(layout.target.join("release/evenkeel-bench"));
    bench.env("EVENKEEL_BIN", layout.target.join("release/evenkeel"));
    if options.beside_kube_proxy()
        && let Some(folder) = setup::find_control_plane(layout)
    {
        bench.env("EVENKEEL_CONTROL_PLANE", folder);
    }
    if let Some(file) = &options.json {
        bench.arg("--json").arg(file);
    }
    agent::become_program(bench, &options.arguments)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the bench in a guest; the exit status is the bench's.
fn inside(layout: &Layout, options: &Options, kernel: KernelLine) -> Result<ExitCode> {
    let release = layout.target.join("release");
    let programs = ["evenkeel", "evenkeel-bench"].map(|name| Program {
        host: release.join(name),
        guest: Path::new("/bin").join(name),
    });
    let mut image = Image::new(programs.into());
    if options.beside_kube_proxy()
        && let Some(folder) = setup::find_control_plane(layout)
    {
        image.add_kube_proxy(&folder)?;
    }
    image.run(&format!(
        "evenkeel-bench --json {GUEST_JSON} {}; measured=$?\n\
         printf '\\n{MARK} begin json\\n'; cat {GUEST_JSON} 2>/dev/null; printf '\\n{MARK} end json\\n'; (exit $measured)",
        shell_words(&options.arguments)?
    ));
    let guest = vm::prepare(layout, kernel, &image)?;
    say(&format!(
        "xtask: measuring on kernel {kernel}, emulated: everything takes twenty times as long"
    ));
    let mut told = Told::default();
    let ending = guest.boot(Duration::from_secs(options.timeout), &mut |line| {
        if let Some(line) = told.take(line) {
            // A closed standard output must not keep the guest from being reaped.
            let _ = writeln!(io::stdout().lock(), "{line}");
        }
    })?;
    let Ending::Exit(code) = ending else {
        bail!(
            "the bench did not end: guest {}; its console is in {}",
            ending.said(),
            guest.console().display()
        );
    };
    // What the kernel says on the console may stand between its lines.
    serde_json::from_str::<serde::de::IgnoredAny>(&told.json).with_context(|| {
        format!(
            "the bench wrote no JSON; its console is in {}",
            guest.console().display()
        )
    })?;
    if let Some(file) = &options.json {
        fs::write(file, told.json.trim_end().to_owned() + "\n").with_context(|| format!("write {}", file.display()))?;
    }
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// What the guest's console said.
#[derive(Debug, Default)]
struct Told {
    /// Whether the lines are the file's.
    of_file: bool,
    json: String,
}

impl Told {
    /// Takes a line of the file away, and gives back one for the reader.
    fn take<'a>(&mut self, line: &'a str) -> Option<&'a str> {
        if let Some(mark) = line.strip_prefix(MARK) {
            self.of_file = mark.trim() == "begin json";
            return None;
        }
        if self.of_file {
            self.json.push_str(line);
            self.json.push('\n');
            return None;
        }
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::{Options, Told};

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn parsed(words: &[&str]) -> Options {
        let line = std::iter::once(&"bench").chain(words);
        Line::try_parse_from(line).map(|line| line.options).expect("good")
    }

    #[test]
    fn the_bench_gets_all_that_follows_its_first_argument() {
        let inside = parsed(&["--kernel", "6.12", "--json", "a.json", "--kube", "--kube-modes", "ipvs"]);
        assert!(inside.kernel.is_some() && inside.beside_kube_proxy());
        assert_eq!(inside.json.as_deref(), Some(std::path::Path::new("a.json")));
        assert_eq!(inside.arguments, ["--kube", "--kube-modes", "ipvs"]);
        let here = parsed(&["--kube", "--json", "b.json"]);
        assert_eq!((here.json, here.arguments.len()), (None, 3));
        assert_eq!(parsed(&["--", "--help"]).arguments, ["--help"]);
    }

    #[test]
    fn the_file_is_told_from_what_is_shown() {
        let mut told = Told::default();
        let lines = [
            "connect",
            "EVENKEEL-VM: begin json",
            "{",
            "}",
            "EVENKEEL-VM: end json",
            "EVENKEEL-VM: exit 0",
        ];
        let shown: Vec<&str> = lines.into_iter().filter_map(|line| told.take(line)).collect();
        assert_eq!(shown, ["connect"]);
        assert_eq!(told.json, "{\n}\n");
    }
}
