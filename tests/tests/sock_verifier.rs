//! The verifier accepts every program on every kernel, in every form in which it is loaded; what it costs is recorded.
//!
//! A golden file per kernel line holds the verified instructions and the jitted bytes of each program.
//! `EVENKEEL_BLESS=1` writes it anew, on the machine whose kernel it is; a guest prints its numbers when they differ.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail, ensure};
use lb_common::maps::feature;
use lb_tests::runner::{self, in_guest, skip, test};
use lb_user::datapath::load::{self, Mode, Options, Sizes};

/// Kernel lines whose numbers are recorded, with the file's content: guests have no checkout.
const GOLDEN: [(&str, &str); 3] = [
    ("6.1", include_str!("../golden/verifier/6.1.txt")),
    ("6.12", include_str!("../golden/verifier/6.12.txt")),
    ("6.18", include_str!("../golden/verifier/6.18.txt")),
];

/// A program may cost this much more than recorded before somebody has to look, in percent.
const GROWTH: u32 = 10;

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for (name, mode, features, log_level, follow) in [
        ("balance", Mode::Balance, feature::STATE, 0, true),
        (
            "balance_with_opt_out",
            Mode::Balance,
            feature::STATE | feature::OPT_OUT,
            0,
            true,
        ),
        ("balance_without_state", Mode::Balance, 0, 0, false),
        (
            "balance_with_logs",
            Mode::Balance,
            feature::STATE | feature::OPT_OUT,
            5,
            true,
        ),
        ("observe", Mode::Observe, feature::STATE, 0, true),
        (
            "observe_with_all",
            Mode::Observe,
            feature::STATE | feature::OPT_OUT,
            5,
            true,
        ),
    ] {
        tests.push(test(format!("every_program_loads::{name}"), move || {
            measure(mode, features, log_level, follow).map(drop)
        }));
    }
    tests.push(test("verified_instructions_do_not_grow_silently", numbers_hold));
    runner::run(tests)
}

/// What a program costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cost {
    /// Instructions that the verifier went through, over all paths.
    verified: u32,
    /// Bytes of machine code; 0 without a JIT.
    jitted: u32,
}

fn measure(mode: Mode, features: u32, log_level: u8, follow: bool) -> Result<BTreeMap<String, Cost>> {
    // The programs do not depend on the sizes of the maps.
    let sizes = Sizes {
        frontends: 64,
        sets: 64,
        lists: 256,
        tables: 256,
        backends: 64,
        services: 64,
        sockets: 64,
        flows: 64,
    };
    let options = Options {
        mode,
        sizes,
        features,
        log_level,
        follow_connections: follow,
        packets: mode == Mode::Observe,
        translate: mode == Mode::Balance,
    };
    let mut object = load::load(&options, None).map_err(anyhow::Error::from)?;
    let mut wanted: Vec<&str> = load::PACKET.to_vec();
    if mode == Mode::Balance {
        wanted.extend(load::REWRITING);
        wanted.extend(load::TRANSLATING);
        for name in load::TRANSLATING_RAW {
            load::load_program(&mut object, name)?;
            wanted.push(name);
        }
    }
    if follow {
        wanted.extend(load::FOLLOWING);
    }
    let mut costs = BTreeMap::new();
    for name in wanted {
        let info = object
            .program(name)
            .with_context(|| format!("no program {name}"))?
            .info()?;
        let verified = info
            .verified_instruction_count()
            .with_context(|| format!("the kernel does not tell what {name} costs"))?;
        ensure!(verified > 0, "{name} was not verified");
        let jitted = info.size_jitted();
        costs.insert(name.to_owned(), Cost { verified, jitted });
    }
    Ok(costs)
}

fn numbers_hold() -> Result<()> {
    let mut found = BTreeMap::new();
    for (label, mode) in [("balance", Mode::Balance), ("observe", Mode::Observe)] {
        for (name, cost) in measure(mode, feature::STATE | feature::OPT_OUT, 0, true)? {
            found.insert(format!("{label} {name}"), cost);
        }
    }
    let line = kernel_line()?;
    let text = render(&found);
    if std::env::var_os("EVENKEEL_BLESS").is_some_and(|v| v == "1") && !in_guest() {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("golden/verifier/{line}.txt"));
        return fs::write(&path, &text).with_context(|| format!("write {}", path.display()));
    }
    let Some((_, golden)) = GOLDEN.iter().find(|(known, _)| *known == line) else {
        return Err(skip(format!("no numbers are recorded for kernel {line}")));
    };
    let mut complaints = String::new();
    let known = parse(golden)?;
    for (program, cost) in &found {
        match known.get(program) {
            None => writeln!(complaints, "{program} is not recorded")?,
            Some(before) => {
                if cost.verified > before.verified + before.verified * GROWTH / 100 {
                    writeln!(
                        complaints,
                        "{program} grew from {} to {}",
                        before.verified, cost.verified
                    )?;
                }
            }
        }
    }
    for program in known.keys().filter(|program| !found.contains_key(*program)) {
        writeln!(complaints, "{program} is recorded and does not exist")?;
    }
    ensure!(
        complaints.is_empty(),
        "{complaints}if this is wanted, golden/verifier/{line}.txt becomes:\n{text}"
    );
    Ok(())
}

const HEADER: &str = "# mode, program, verified instructions, jitted bytes; written by EVENKEEL_BLESS=1\n";

fn render(costs: &BTreeMap<String, Cost>) -> String {
    let mut text = HEADER.to_owned();
    for (program, cost) in costs {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{program} {} {}", cost.verified, cost.jitted);
    }
    text
}

fn parse(text: &str) -> Result<BTreeMap<String, Cost>> {
    let mut costs = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [mode, program, verified, jitted] = words[..] else {
            bail!("cannot read the recorded line {line:?}");
        };
        let cost = Cost {
            verified: verified.parse()?,
            jitted: jitted.parse()?,
        };
        costs.insert(format!("{mode} {program}"), cost);
    }
    Ok(costs)
}

/// The running kernel's major and minor version, such as `6.12`.
fn kernel_line() -> Result<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("read the kernel's release")?;
    let mut parts = release.trim().split(['.', '-', '+']);
    match (parts.next(), parts.next()) {
        (Some(major), Some(minor)) => Ok(format!("{major}.{minor}")),
        _ => bail!("a release without a minor version: {release}"),
    }
}
