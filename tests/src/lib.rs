//! Harnesses of the integration tests: what several test targets share.

pub mod apiserver;
pub mod runner;
