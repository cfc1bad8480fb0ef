//! The maps in the kernel: `evenkeel map list|dump`.

use serde::{Deserialize, Serialize};

/// One map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MapInfoView {
    /// Its name.
    pub name: String,
    /// The kernel's name of its type, such as `hash` or `lru_hash`.
    #[serde(rename = "type")]
    pub map_type: String,
    /// Its id in the kernel.
    pub id: u32,
    /// Bytes of a key.
    pub key_size: u32,
    /// Bytes of a value.
    pub value_size: u32,
    /// Entries in use; none where they cannot be counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entries: Option<u64>,
    /// Entries that fit.
    pub max_entries: u64,
    /// Kernel memory, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Where it is pinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pin: Option<String>,
}

/// The contents of one map, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MapDumpView {
    /// The map's name.
    pub name: String,
    /// True when there were more entries than rows.
    pub truncated: bool,
    /// The entries, sorted by key.
    pub rows: Vec<MapRowView>,
}

/// One entry, with addresses and ports as people write them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MapRowView {
    /// The key, such as `10.96.0.10:53/UDP`.
    pub key: String,
    /// The value, as `name=value` words.
    pub value: String,
}
