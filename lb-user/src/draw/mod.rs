//! What every drawing needs: text that cannot break out of its markup, numbers as people read them, scales with ticks.
//!
//! Pure. What a drawing shows is its own room's business: the demonstration's in `demo`, the report's in `report`.

mod markup;
mod number;
mod scale;

pub(crate) use markup::{abridge, escape, text_width, wrap};
pub(crate) use number::{compact, percent, thousands};
pub(crate) use scale::{Scale, clock, time_ticks};
