//! Properties of compiling, over random histories of a small world, and the cases that were once wrong.

mod history;
mod restart;
mod room;
mod sharing;
mod watch;
pub(crate) mod world;
