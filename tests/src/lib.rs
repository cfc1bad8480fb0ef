//! Harnesses of the integration tests: what several test targets share.

pub mod agent;
pub mod apiserver;
pub mod bench;
pub mod beside;
pub mod bpf;
pub mod command_line;
pub mod datapath;
pub mod golden;
pub mod interrupt;
pub mod ipvs;
pub mod kube;
pub mod kube_proxy;
pub mod lab;
pub mod model;
pub mod objects;
pub mod packet;
pub mod plane;
pub mod prometheus;
pub mod runner;
pub mod schedules;
pub mod socket;
pub mod standing;
pub mod tool;
pub mod world;
