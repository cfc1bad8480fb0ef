//! Placeholder for the build.
fn main() {}
