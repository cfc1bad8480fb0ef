//! What a kernel holds, told without the numbers that depend on how it came about: ids, offsets, generations.
//!
//! Read from `map dump` of the maps that hold the desired state. Two kernels with equal contents treat every new connection alike.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Write as _},
};

use anyhow::{Context, Result, bail};
use lb_user::view::MapDumpView;

use crate::lab::node::LabNode;

/// The Service by which the lab knows that agents are up to date: it is never the same twice.
const MARKER: &str = "default/lab-marker";
/// Where an agent's probe of its own datapath dials; its port is another one in each agent.
const PROBED: &str = "127.255.77.1:";
const PROBE: &str = "(the agent's own probe)";

/// A kernel's contents, a line each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    lines: BTreeSet<String>,
}

impl Contents {
    /// Reads them from a node's agent.
    ///
    /// # Errors
    /// Where it does not answer, or what it says makes no sense.
    pub fn of(node: &LabNode) -> Result<Self> {
        let (dumps, services) = node.ask(|agent| Ok((agent.dump_state()?, agent.services()?)))?;
        let names: BTreeMap<String, String> = services
            .into_iter()
            .map(|service| {
                (
                    service.id.to_string(),
                    format!("{}/{}", service.namespace, service.name),
                )
            })
            .collect();
        let dump = |map: &str| dumps.get(map).with_context(|| format!("no dump of {map}"));
        let mut contents = Self::read(&names, dump)?;
        contents
            .lines
            .retain(|line| !line.contains(MARKER) && !line.contains(PROBE));
        Ok(contents)
    }

    fn read<'d>(services: &BTreeMap<String, String>, dump: impl Fn(&str) -> Result<&'d MapDumpView>) -> Result<Self> {
        let probe = dump("FRONTENDS")?
            .rows
            .iter()
            .filter(|row| row.key.starts_with(PROBED))
            .find_map(|row| row.value.strip_prefix("service=")?.split(' ').next());
        let named = |id: &str| {
            if Some(id) == probe {
                return PROBE.to_owned();
            }
            let name = services.get(id).cloned();
            name.unwrap_or_else(|| format!("(Service {id}, which the agent does not name)"))
        };
        let mut backends = BTreeMap::new();
        for row in &dump("BACKENDS")?.rows {
            let mut words = row.value.split(' ');
            let at = words.next().unwrap_or_default();
            let fields = fields(words)?;
            let service = named(field(&fields, "service")?);
            backends.insert(&*row.key, format!("{at} of {service} {}", field(&fields, "state")?));
        }
        let mut sets: BTreeMap<String, String> = BTreeMap::new();
        for row in &dump("LISTS")?.rows {
            let id = row.key.strip_prefix("set ").context("a list belongs to a set")?;
            let fields = fields(row.value.split(' '))?;
            let members = field(&fields, "members")?;
            let mut told = BTreeSet::new();
            for member in members.split(',').filter(|member| !member.is_empty()) {
                let (backend, weight) = member.split_once('x').context("a member has a weight")?;
                let backend = backends.get(backend).cloned();
                let backend = backend.unwrap_or_else(|| "(a backend that is not there)".to_owned());
                told.insert(format!("{backend} x{weight}"));
            }
            let slots = field(&fields, "slots")?;
            let told: Vec<String> = told.into_iter().collect();
            sets.insert(id.to_owned(), format!("{{{slots} slots: {}}}", told.join(", ")));
        }
        let set = |id: &str| sets.get(id).cloned().unwrap_or_else(|| "{}".to_owned());
        let mut lines = BTreeSet::new();
        for row in &dump("FRONTENDS")?.rows {
            let mut told = format!("{} ->", row.key);
            for word in row.value.split(' ') {
                let (name, value) = word.split_once('=').context("a word has a name and a value")?;
                let value = match name {
                    "service" => named(value),
                    "set" => set(value),
                    "outside" if value != "no" => set(value),
                    _ => value.to_owned(),
                };
                let _written = write!(told, " {name}={value}");
            }
            lines.insert(told);
        }
        for row in &dump("SOURCES")?.rows {
            let (id, range) = row
                .key
                .strip_prefix("service ")
                .and_then(|rest| rest.split_once(' '))
                .context("a source range belongs to a Service")?;
            lines.insert(format!("sources of {}: {range}", named(id)));
        }
        // Backends that no set holds any more: draining ones keep their connections.
        for told in backends.values() {
            lines.insert(format!("backend {told}"));
        }
        Ok(Self { lines })
    }

    /// How this differs from another, a line each; `None` if it does not.
    pub fn difference(&self, other: &Self) -> Option<String> {
        if self == other {
            return None;
        }
        let only = |one: &Self, other: &Self, sign: char| -> String {
            let mut told = String::new();
            for line in one.lines.difference(&other.lines) {
                let _written = writeln!(told, "{sign} {line}");
            }
            told
        };
        Some(only(self, other, '-') + &only(other, self, '+'))
    }
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

fn fields<'w>(words: impl Iterator<Item = &'w str>) -> Result<BTreeMap<&'w str, &'w str>> {
    words
        .map(|word| word.split_once('=').with_context(|| format!("{word:?} has no value")))
        .collect()
}

fn field<'w>(fields: &BTreeMap<&'w str, &'w str>, name: &str) -> Result<&'w str> {
    match fields.get(name) {
        Some(value) => Ok(value),
        None => bail!("no {name} in {fields:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lb_user::view::MapRowView;

    fn dumps(rows: &[(&str, &str, &str)]) -> BTreeMap<String, MapDumpView> {
        let mut dumps: BTreeMap<String, MapDumpView> = ["FRONTENDS", "LISTS", "BACKENDS", "SOURCES"]
            .into_iter()
            .map(|name| {
                let empty = MapDumpView {
                    name: name.to_owned(),
                    truncated: false,
                    rows: Vec::new(),
                };
                (name.to_owned(), empty)
            })
            .collect();
        for (map, key, value) in rows {
            let row = MapRowView {
                key: (*key).to_owned(),
                value: (*value).to_owned(),
            };
            dumps.get_mut(*map).expect("a map of the test").rows.push(row);
        }
        dumps
    }

    fn read(rows: &[(&str, &str, &str)], service: &str) -> Contents {
        let dumps = dumps(rows);
        let services = BTreeMap::from([(service.to_owned(), "default/web".to_owned())]);
        Contents::read(&services, |map| dumps.get(map).context("no such map")).expect("good dumps")
    }

    #[test]
    fn numbers_that_history_gave_do_not_count_and_members_do() {
        let kernel = |service: &str, backend: &str, set: &str, at: &str| {
            let front = format!("service={service} set={set} kind=ClusterIP outside=no");
            let list = format!("table=7 slots=13 members={backend}x100");
            let value = format!("{at}/TCP service={service} state=active");
            read(
                &[
                    ("FRONTENDS", "10.96.0.1:80/TCP", &front),
                    ("LISTS", &format!("set {set}"), &list),
                    ("BACKENDS", backend, &value),
                ],
                service,
            )
        };
        let one = kernel("1", "4", "9", "10.0.0.1:80");
        assert_eq!(one.difference(&kernel("2", "5", "3", "10.0.0.1:80")), None);
        let other = one.difference(&kernel("1", "4", "9", "10.0.0.2:80"));
        assert!(other.is_some_and(|told| told.contains("+ backend 10.0.0.2:80/TCP of default/web active")));
    }
}
