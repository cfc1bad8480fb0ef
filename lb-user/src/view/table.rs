//! Maglev tables: `evenkeel table get`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The table of one backend set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TableView {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub service: String,
    /// The set within the Service, such as `http/TCP/IPv4/cluster`.
    pub set: String,
    /// The set's id in the kernel.
    pub set_id: u32,
    /// Slots; 0 while nothing is published.
    pub size: u32,
    /// How often the set was published (modulo the kernel's counter).
    pub generation: u32,
    /// A digest of the slots, in hex: equal on every node that has the same endpoints.
    pub digest: String,
    /// Slots by backend, in the set's order.
    pub backends: Vec<TableSlotsView>,
}

/// How many slots a backend has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TableSlotsView {
    /// The address.
    pub addr: IpAddr,
    /// The port.
    pub port: u16,
    /// Its id in the kernel.
    pub id: u32,
    /// Its weight.
    pub weight: u32,
    /// Its slots.
    pub slots: u32,
    /// Slots over all slots (0 to 1).
    pub share: f64,
    /// Weight over all weights (0 to 1).
    pub fair_share: f64,
}
