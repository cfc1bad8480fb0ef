//! The kernel's side: loading, attaching, pinning, and reading and writing maps.
//!
//! All effects on the kernel's BPF state are here. What is to be written is decided by `plan`; nothing here orders steps.

pub mod attach;
pub mod btf;
pub mod census;
pub mod fake;
pub mod filters;
pub mod flows;
mod index;
pub mod kernel;
pub mod load;
pub mod maps;
pub mod pins;
mod sources;
pub mod syscall;
pub mod window;
