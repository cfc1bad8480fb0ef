//! A cluster with a real control plane: etcd, kube-apiserver and its controllers, with the lab's nodes and an agent on each.
//!
//! Services, EndpointSlices, readiness and termination come from Kubernetes' own controllers; Pods are namespaces with a process of
//! their own, run by a node agent of the lab's; the data path is the kernel's. What is right is the cases' business. The
//! invariant: everything dies with the [`Cluster`], however that ends.

pub mod account;
pub mod api;
pub mod cases;
pub mod cluster;
pub mod contents;
pub mod control;
pub mod faults;
pub mod kubelet;
pub mod main;
pub mod names;
pub mod pki;
pub mod process;
pub mod programs;
pub mod report;
pub mod stage;
pub mod standing;
mod web;

pub use cluster::Cluster;
pub use stage::{Stack, Stage};
