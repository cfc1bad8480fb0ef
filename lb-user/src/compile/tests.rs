//! Properties of compiling, over random histories of a small world, and the cases that were once wrong.

mod history;
mod restart;
mod room;
mod sharing;
pub(crate) mod world;
