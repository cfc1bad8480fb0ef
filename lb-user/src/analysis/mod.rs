//! What the numbers mean: pure functions and folds over counts and connection records.
//!
//! Here live the statistics behind every share that a person or a metric sees. Nothing here reads a clock, a map or a
//! file: time and counts come in as arguments, so that each judgement can be replayed and tested. The reading of
//! counters and of the ring buffer is `observe`; what is printed is `view`.

pub mod calls;
pub mod cause;
pub mod chi_square;
pub mod drift;
mod gamma;
pub mod history;
pub mod imbalance;
pub mod passage;
pub mod poisson;
pub mod ports;
pub mod reuse;
#[cfg(test)]
mod simulated;
pub mod starvation;
pub mod stickiness;
pub mod window;
