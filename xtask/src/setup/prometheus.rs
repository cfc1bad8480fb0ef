//! Prometheus and its `promtool`, for the tests of rules and dashboard.
//!
//! The machine's own are used where it has both; else Debian's package is unpacked into the cache. It is never installed: the
//! package would start a service.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::apt::Apt;
use crate::command::step;
use crate::layout::{Layout, find_program};

const PROGRAMS: [&str; 2] = ["prometheus", "promtool"];

/// The folder that has both programs.
pub(crate) fn find(layout: &Layout) -> Option<PathBuf> {
    let ours = programs_in(&folder(layout));
    if has_both(&ours) {
        return Some(ours);
    }
    let folder = find_program(PROGRAMS[0])?.parent()?.to_path_buf();
    has_both(&folder).then_some(folder)
}

/// Where the package is unpacked.
pub(super) fn folder(layout: &Layout) -> PathBuf {
    layout.cache.join("prometheus")
}

/// Downloads the package and unpacks it into the cache.
pub(super) fn fetch(layout: &Layout, apt: &mut Apt<'_>) -> Result<()> {
    apt.refresh();
    step("downloading Debian's prometheus", || {
        apt.unpack("prometheus", &folder(layout), |files| has_both(&programs_in(files)))
    })
}

fn programs_in(files: &Path) -> PathBuf {
    files.join("usr/bin")
}

fn has_both(folder: &Path) -> bool {
    PROGRAMS.iter().all(|program| folder.join(program).is_file())
}
