//! What the kernel programs and the agent must agree on: every shared byte, and every decision.
//!
//! The crate is `no_std`, without panics in what the kernel runs. Layouts are `repr(C)` with explicit padding, and
//! checked three ways: the `const` assertions of [`abi`], a test that reads the built object's BTF, and
//! [`abi::ABI_VERSION`] in the pin path. The decisions ([`select`], [`hash`]) are pure functions that the kernel
//! programs, the simulator behind `evenkeel explain` and the property tests run alike.
//!
//! Read in this order: [`addr`], [`frontend`], [`backend`], [`set`], [`hash`], [`select`], [`affinity`], [`socket`],
//! [`packet`], [`flow`], [`event`], [`counter`], [`maps`]; [`maglev`] builds what [`select`] reads.

#![no_std]

#[cfg(any(feature = "user", test))]
extern crate alloc;

pub mod abi;
pub mod addr;
pub mod affinity;
pub mod backend;
pub mod counter;
pub mod event;
pub mod flow;
pub mod frontend;
pub mod hash;
#[cfg(any(feature = "user", test))]
pub mod maglev;
pub mod maps;
pub mod packet;
pub mod select;
pub mod set;
pub mod socket;
