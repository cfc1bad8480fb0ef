//! What a node's kernel holds and has counted, read by other ways than the agent's where the agent is what is tested.
//!
//! Flows are read from the pinned maps, counters from the metrics. The one thing that is written is the clock's offset, by
//! which a test lets time pass.

use std::{net::SocketAddr, path::Path, sync::atomic::Ordering};

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, HashMap, Map, MapData};
use lb_common::{
    abi::{ABI_VERSION, FLOW_VERSION, TCP, UDP},
    addr::{Addr, Port},
    affinity::{Affinity, AffinityKey},
    flow::{Flow, Settings, TupleEntry, TupleKey},
    maps,
};

use super::node::LabNode;
use crate::agent::until;

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl LabNode {
    /// How often the packet programs of the node did something, by the name in metrics; both directions together.
    ///
    /// # Errors
    /// Where the agent does not answer, or knows no such action.
    pub fn counted(&self, action: &str) -> Result<u64> {
        let metrics = self.ask(crate::agent::Agent::metrics)?;
        // A hook has the series of what it can do alone.
        let series = |hook| format!("evenkeel_connects_total{{action=\"{action}\",hook=\"{hook}\"}}");
        let counts: Vec<f64> = ["ingress", "egress"]
            .into_iter()
            .filter_map(|hook| metrics.get(&series(hook)).copied())
            .collect();
        ensure!(!counts.is_empty(), "no packet program counts {action:?}");
        Ok(counts.iter().sum::<f64>() as u64)
    }

    /// What the packet programs of the node have done so far, as text; a word of why there is none otherwise.
    pub fn deeds(&self) -> String {
        let metrics = match self.ask(crate::agent::Agent::metrics) {
            Ok(metrics) => metrics,
            Err(error) => return format!("(no counters: {error:#})"),
        };
        let deeds: Vec<String> = metrics
            .iter()
            .filter(|(series, count)| {
                **count > 0.0 && series.starts_with("evenkeel_connects_total{") && series.contains("gress\"}")
            })
            .map(|(series, count)| {
                let labels = series.trim_start_matches("evenkeel_connects_total");
                format!("{labels} {count}")
            })
            .collect();
        deeds.join(", ")
    }

    /// Waits until something was counted so often at least.
    ///
    /// # Errors
    /// How often it was counted instead.
    pub fn wait_counted(&self, action: &str, at_least: u64) -> Result<()> {
        until("packets counted", || {
            let found = self.counted(action)?;
            ensure!(
                found >= at_least,
                "{action} of node {}: {found}, and not {at_least}",
                self.number
            );
            Ok(())
        })
    }

    /// The flow between a client and a frontend, if the table has one.
    ///
    /// # Errors
    /// Where the maps are not there.
    pub fn flow(&self, transport: Transport, client: SocketAddr, frontend: SocketAddr) -> Result<Option<Flow>> {
        let folder = self.pins().join(format!("flows-{FLOW_VERSION}"));
        let tuples: HashMap<MapData, TupleKey, TupleEntry> =
            HashMap::try_from(Map::HashMap(pinned(&folder.join(maps::TUPLES))?))?;
        let proto = match transport {
            Transport::Tcp => TCP,
            Transport::Udp => UDP,
        };
        let (a, b) = (Addr::from(client.ip()), Addr::from(frontend.ip()));
        let key = TupleKey::between(a, Port::new(client.port()), b, Port::new(frontend.port()), proto);
        let entry = match tuples.get(&key, 0) {
            Ok(entry) => entry,
            Err(aya::maps::MapError::KeyNotFound) => return Ok(None),
            Err(error) => return Err(error).context("look a tuple up"),
        };
        let flows: Array<MapData, Flow> = Array::try_from(Map::Array(pinned(&folder.join(maps::FLOWS))?))?;
        let flow = flows.get(&entry.slot, 0).context("read a flow")?;
        Ok((flow.serial() == entry.serial()).then_some(flow))
    }

    /// Lets so many seconds pass for the node's flows.
    ///
    /// # Errors
    /// Where the map is not there.
    pub fn let_pass(&self, seconds: u64) -> Result<()> {
        let path = self.pins().join(ABI_VERSION.to_string()).join(maps::SETTINGS);
        let mut settings: Array<MapData, Settings> = Array::try_from(Map::Array(pinned(&path)?))?;
        let mut now = settings.get(&0, 0).context("read the settings")?;
        // The clock never goes back while the lab stands, whatever a fresh map says.
        let ahead = self.ahead.fetch_add(seconds, Ordering::Relaxed) + seconds;
        now.clock_offset_ns = ahead * 1_000_000_000;
        settings.set(0, now, 0).context("write the settings")
    }
}

impl LabNode {
    /// Lets the node's affinities be so many seconds older.
    ///
    /// # Errors
    /// Where the map is not there.
    pub fn age_affinity(&self, seconds: u64) -> Result<()> {
        let path = self.pins().join(ABI_VERSION.to_string()).join(maps::AFFINITY);
        let mut memories: HashMap<MapData, AffinityKey, Affinity> = HashMap::try_from(Map::LruHashMap(pinned(&path)?))?;
        let all: Vec<_> = memories.iter().collect::<Result<_, _>>().context("read affinities")?;
        for (key, mut memory) in all {
            memory.last_ns = memory.last_ns.saturating_sub(seconds * 1_000_000_000);
            memories.insert(key, memory, 0).context("write an affinity")?;
        }
        Ok(())
    }
}

fn pinned(path: &Path) -> Result<MapData> {
    MapData::from_pin(path).with_context(|| format!("open {}", path.display()))
}
