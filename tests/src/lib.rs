pub mod apiserver;
pub mod bench;
