//! Copies the kernel object to where `include_bytes_aligned!` finds it.
//!
//! The object is built by another compiler for another target (`xtask/src/ebpf.rs`), never from here: a build script
//! that starts cargo would wait for the lock that its own cargo holds.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-env-changed=EVENKEEL_BPF_OBJECT");
    let manifest = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR for build scripts");
    let root = Path::new(&manifest).parent().expect("the crate lies in the repository");
    let object =
        env::var_os("EVENKEEL_BPF_OBJECT").map_or_else(|| root.join("target/bpf/evenkeel.bpf.o"), PathBuf::from);
    // A path that does not exist yet counts as changed until it does.
    println!("cargo::rerun-if-changed={}", object.display());
    let Ok(bytes) = fs::read(&object) else {
        // Cargo prints this sentence and stops.
        println!(
            "cargo::error=the kernel object {} is not built yet: run `cargo xtask build` first",
            object.display()
        );
        return;
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR for build scripts"));
    fs::write(out.join("evenkeel.bpf.o"), bytes).expect("OUT_DIR is writable");
}
