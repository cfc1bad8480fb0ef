//! The agent and the command line of Evenkeel.
//!
//! The rooms, in the data's way: `source` (IO) → `model` (types) → `desired` (fold) → `compile` (tables) → `plan`
//! (difference) → `datapath` (IO) → the kernel; back come `observe` (IO) → `analysis` → `metrics`, `http`, `cli`.
//! `reconcile` alone joins the halves.

// The fixture of the views is compiled into unit tests and, by path, into integration tests; both call the crate by its name.
#[cfg(test)]
extern crate self as lb_user;

pub mod agent;
pub mod analysis;
pub mod cli;
pub mod compile;
pub mod config;
pub mod control;
pub mod datapath;
pub mod demo;
pub mod desired;
pub mod doctor;
mod draw;
pub mod http;
mod interrupt;
pub mod lab;
pub mod metrics;
pub mod model;
mod netlink;
pub mod node;
pub mod observe;
pub mod plan;
pub mod reconcile;
pub mod report;
pub mod source;
pub mod supervise;
pub mod view;
