//! The agent and the command line of Evenkeel.
//!
//! The rooms, in the data's way: `source` (IO) → `model` (types) → `desired` (fold) → `compile` (tables) → `plan`
//! (difference) → `datapath` (IO) → the kernel; back come `observe` (IO) → `analysis` → `metrics`, `http`, `cli`.
//! `reconcile` alone joins the halves.

pub mod demo;
pub mod lab;
pub mod model;
