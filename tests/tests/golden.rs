//! From manifests to the maps' contents: every case in `golden/`, through the fold, the compiler and the plan into maps
//! in memory. `maps.txt` holds what they contain after each state.
//!
//! After each state, the same state again writes nothing, a check finds nothing wrong, and an agent that starts anew on
//! these maps finds nothing to write. In the end everything is removed, and nothing may stay.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::IpAddr,
    process::ExitCode,
};

use lb_common::{
    abi::UDP,
    addr::{Addr, Port},
    backend::{Backend, state},
    frontend::flag,
};
use lb_tests::golden;
use lb_user::{
    compile::{Capacity, Contents, List},
    datapath::{fake::Memory, maps::Maps},
    desired::{Config, Desired},
    model::{Content, Kind, Update},
    reconcile::Reconciler,
};
use libtest_mimic::{Arguments, Trial};

const ROOM: Capacity = Capacity {
    frontends: 2048,
    services: 256,
    sets: 2048,
    backends: 4096,
    lists: 16_384,
    tables: 65_536,
    memberships: 1024,
    sources: 1024,
};

fn main() -> ExitCode {
    let cases = golden::cases();
    assert!(!cases.is_empty(), "the folder of cases is empty");
    let trials = cases.into_iter().map(|case| {
        Trial::test(case.clone(), move || {
            check(&case);
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// An agent on these maps that knows the case's settings and what `text` says.
fn start(memory: Memory, config: &Config, first: &[Update]) -> Reconciler<Memory> {
    let mut agent = Reconciler::new(Desired::new(config.clone()), memory).expect("memory is read");
    for update in first {
        agent.take(update.clone());
    }
    for kind in [Kind::Service, Kind::Slice, Kind::Node] {
        agent.take(Update::Synced(kind));
    }
    agent
}

fn check(case: &str) {
    let steps = golden::steps(case);
    let (config, host) = golden::configure(&steps[0].1);
    let host = Update::Addresses(host);
    let mut agent = start(Memory::new(ROOM), &config, std::slice::from_ref(&host));
    let mut said = String::new();
    for (file, text) in &steps {
        let updates = golden::updates(file, text);
        for update in &updates {
            agent.take(update.clone());
        }
        let before = agent.kernel().writes;
        agent.flush();
        let writes = agent.kernel().writes - before;
        assert_eq!(agent.sync_state().errors, BTreeMap::new(), "{case}: {file}");
        let contents = agent.kernel().dump().expect("memory is read");
        let _ = writeln!(said, "== {file} ({writes} writes)\n{}", Dump(agent.kernel(), &contents));

        for update in &updates {
            agent.take(update.clone());
        }
        agent.flush();
        assert_eq!(
            agent.kernel().writes,
            before + writes,
            "{case}: {file} again writes something"
        );
        assert_eq!(
            agent.check().expect("memory is read"),
            0,
            "{case}: {file} leaves something to repair"
        );

        let mut all = vec![host.clone()];
        all.extend(updates);
        let mut next = start(agent.kernel().clone(), &config, &all);
        let flushed = next.flush();
        assert_eq!(
            (flushed.puts, flushed.drops),
            (0, 0),
            "{case}: a restart after {file} writes something"
        );
        // A Service without a frontend of its own has left no trace, and its id is nobody's.
        for (name, service) in agent
            .applied()
            .iter()
            .filter(|(_, service)| !service.frontends.is_empty())
        {
            assert_eq!(
                next.applied().get(name),
                Some(service),
                "{case}: a restart after {file} changes something"
            );
        }
    }
    golden::compare(case, "maps.txt", &format!("{}\n", said.trim_end()));

    agent.take(Update::Replace(Content::Services(Vec::new())));
    agent.take(Update::Replace(Content::Slices(Vec::new())));
    agent.flush();
    let left = agent.kernel().dump().expect("memory is read");
    assert_eq!(left, Contents::default(), "{case}: something stays when all is removed");
}

/// The contents of maps, for people.
struct Dump<'a>(&'a Memory, &'a Contents);

fn socket(addr: Addr, port: Port, proto: u8) -> String {
    let socket = std::net::SocketAddr::new(IpAddr::from(addr), port.get());
    format!("{socket} {}", if proto == UDP { "UDP" } else { "TCP" })
}

fn place(backend: &Backend) -> String {
    socket(backend.addr, backend.port, backend.proto)
}

impl Dump<'_> {
    fn frontends(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sorted: BTreeMap<_, _> = self.1.frontends.iter().collect();
        for (key, frontend) in sorted {
            let kind = match frontend.flags >> flag::KIND_SHIFT & flag::KIND_MASK {
                0 => "ClusterIP",
                1 => "NodePort",
                2 => "ExternalIP",
                _ => "LoadBalancer",
            };
            let at = socket(key.addr, key.port, key.proto);
            write!(
                f,
                "frontend {at} -> set {}, service {}, {kind}",
                frontend.set_id, frontend.service_id
            )?;
            if frontend.flags & flag::UNREACHABLE_WHEN_EMPTY != 0 {
                write!(f, ", unreachable if empty")?;
            }
            if frontend.affinity_seconds > 0 {
                write!(f, ", affinity {} s", frontend.affinity_seconds)?;
            }
            if frontend.flags & flag::OUTSIDE == 0 {
                assert_eq!(
                    frontend.outside_set_id, frontend.set_id,
                    "{at} names a set that nobody meets"
                );
                writeln!(f)?;
                continue;
            }
            write!(f, "; outside -> set {}", frontend.outside_set_id)?;
            let says = [
                (flag::SILENT_WHEN_EMPTY_OUTSIDE, "silent if empty"),
                (flag::MASQUERADE_OUTSIDE, "masqueraded"),
                (flag::SOURCE_RANGES, "from source ranges alone"),
            ];
            for (_, said) in says.iter().filter(|(bit, _)| frontend.flags & bit != 0) {
                write!(f, ", {said}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }

    fn sources(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sorted: BTreeSet<_> = self.1.sources.iter().collect();
        for source in sorted {
            let (service, first) = (source.key.service_id, IpAddr::from(source.key.addr));
            // As the trie has them: 32 bits of the Service's id, and IPv4 in its mapped form.
            writeln!(f, "sources of service {service}: {first}, {} bits", source.bits)?;
        }
        Ok(())
    }

    fn sets(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(memory, contents) = self;
        let ids: BTreeMap<_, _> = contents.sets.iter().collect();
        for (id, word) in ids {
            let Some(list) = contents.lists.get(id) else {
                assert_eq!(word.count(), 0, "set {id} has no list");
                writeln!(f, "set {id}: empty")?;
                continue;
            };
            let List {
                table, slots, content, ..
            } = list;
            writeln!(f, "set {id}: table at {table}, {slots} slots, digest {content:016x}")?;
            let mut shares = vec![0usize; list.members.len()];
            for slot in memory.table(*table, *slots).expect("a table within the array") {
                shares[usize::from(slot)] += 1;
            }
            for ((backend_id, weight), share) in list.members.iter().zip(shares) {
                let at = contents
                    .backends
                    .get(backend_id)
                    .map_or_else(|| "vacant".to_owned(), place);
                write!(f, "  backend {backend_id} at {at}, {share} slots")?;
                if *weight != 1 {
                    write!(f, ", weight {weight}")?;
                }
                if contents
                    .memberships
                    .iter()
                    .any(|m| (m.set_id, m.backend_id) == (*id, *backend_id))
                {
                    write!(f, ", may be remembered")?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }

    fn backends(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sorted: BTreeMap<_, _> = self.1.backends.iter().collect();
        for (id, backend) in sorted {
            let state = match backend.state {
                state::ACTIVE => "active",
                state::DRAINING => "draining",
                other => panic!("backend {id} has state {other}"),
            };
            writeln!(
                f,
                "backend {id}: {} of service {}, {state}",
                place(backend),
                backend.service_id
            )?;
        }
        Ok(())
    }
}

impl std::fmt::Display for Dump<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if *self.1 == Contents::default() {
            return writeln!(f, "nothing");
        }
        self.frontends(f)?;
        self.sources(f)?;
        self.sets(f)?;
        self.backends(f)
    }
}
