//! Harnesses of the integration tests: what several test targets share.

pub mod apiserver;
pub mod bpf;
pub mod datapath;
pub mod runner;
pub mod socket;
pub mod world;
