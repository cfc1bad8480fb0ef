//! Programs of interfaces: observers and translators, as TCX links or as filters.
//!
//! A link is pinned by its program and the interface's index, which a rename does not change. The invariants: observers and
//! translators of one interface know nothing of each other; translators stand before everybody else's programs, whose verdict
//! might otherwise keep a packet from being translated back.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
};

use aya::{Ebpf, programs::Program};
use nix::net::if_::{if_nameindex, if_nametoindex};

use super::{AttachError, Attachments, Done, Held};
use crate::datapath::{
    filters::{self, Filter},
    load::{self, FOLLOWING, LoadError, PACKET, REWRITING, TRANSLATING, TRANSLATING_RAW},
    pins::Pins,
    syscall::{self, Direction, LinkInfo, Order, Target},
};

/// How packets begin on an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layer {
    /// By an Ethernet header.
    Ethernet,
    /// By an IP header.
    Raw,
}

impl Layer {
    /// What packets begin with on interfaces of a type (`ARPHRD_*`); none where no program could read them.
    pub fn of_hardware(kind: u16) -> Option<Self> {
        match kind {
            libc::ARPHRD_ETHER => Some(Self::Ethernet),
            libc::ARPHRD_NONE
            | libc::ARPHRD_RAWHDLC
            | libc::ARPHRD_PPP
            | libc::ARPHRD_TUNNEL
            | libc::ARPHRD_TUNNEL6
            | libc::ARPHRD_SIT
            | libc::ARPHRD_IPGRE
            | ARPHRD_IP6GRE
            | ARPHRD_RAWIP => Some(Self::Raw),
            _ => None,
        }
    }

    /// The programs that translate there: where packets come in, and where they leave.
    fn programs(self) -> [&'static str; 2] {
        match self {
            Self::Ethernet => TRANSLATING,
            Self::Raw => TRANSLATING_RAW,
        }
    }
}

const ARPHRD_RAWIP: u16 = 519;
const ARPHRD_IP6GRE: u16 = 823;

/// An interface with programs of ours.
#[derive(Clone, Debug)]
pub(super) struct Carried {
    name: String,
    observed: bool,
    translated: Option<Layer>,
}

/// A program of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hook {
    program: &'static str,
    index: u32,
}

impl Hook {
    /// The hook of a link, by the link's name.
    fn of_link(link: &str) -> Option<Self> {
        programs().find_map(|program| {
            let index = link.strip_prefix(program)?.strip_prefix('-')?.parse().ok()?;
            Some(Self { program, index })
        })
    }

    fn direction(self) -> Direction {
        if self.program.ends_with("_ingress") {
            Direction::Ingress
        } else {
            Direction::Egress
        }
    }

    fn order(self) -> Order {
        if PACKET.contains(&self.program) {
            Order::Last
        } else {
            Order::First
        }
    }

    /// The priority of its filter, where TC has no links: before those that the kernel numbers itself, translators first.
    fn priority(self) -> u16 {
        if PACKET.contains(&self.program) { 0xe1 } else { 0xe0 }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.program, self.index)
    }
}

/// All programs of interfaces, by name.
fn programs() -> impl Iterator<Item = &'static str> {
    PACKET.into_iter().chain(TRANSLATING).chain(TRANSLATING_RAW)
}

/// Whether the interface of a link is in the calling thread's network namespace: another one's has an index there too.
pub(super) fn is_here(link: LinkInfo) -> bool {
    let Target::Interface(index) = link.target else {
        return true;
    };
    Direction::BOTH.iter().any(|direction| {
        syscall::tcx_programs(index, *direction).is_ok_and(|all| all.iter().any(|(id, _)| *id == link.id))
    })
}

impl Attachments {
    /// Attaches the observers to an interface.
    ///
    /// # Errors
    /// When the interface does not exist, or the kernel refuses.
    ///
    /// # Kernel
    /// TCX links from 6.6; below, filters on the clsact qdisc, which outlive the agent until `cleanup`.
    pub fn attach_interface(&mut self, object: &mut Ebpf, interface: &str) -> Result<Vec<(String, Done)>, AttachError> {
        let index = if_nametoindex(interface).map_err(|source| AttachError::Interface {
            interface: interface.to_owned(),
            source,
        })?;
        self.carry(index, interface);
        let done = self.attach_both(object, index, PACKET)?;
        if let Some(carried) = self.interfaces.get_mut(&index) {
            carried.observed = true;
        }
        Ok(done)
    }

    /// Attaches the translators to an interface, or swaps them into the links that are there. They are loaded with the first
    /// interface of its kind.
    ///
    /// # Errors
    /// When the interface does not exist, or the kernel refuses.
    ///
    /// # Kernel
    /// As for [`Self::attach_interface`].
    pub fn translate(
        &mut self,
        object: &mut Ebpf,
        index: u32,
        interface: &str,
        layer: Layer,
    ) -> Result<Vec<(String, Done)>, AttachError> {
        let programs = layer.programs();
        for program in programs {
            load::load_program(object, program)?;
        }
        let other = self.interfaces.get(&index).and_then(|carried| carried.translated);
        if other.is_some_and(|other| other != layer) {
            self.stop_translating(index)?;
        }
        self.carry(index, interface);
        let done = self.attach_both(object, index, programs)?;
        if let Some(carried) = self.interfaces.get_mut(&index) {
            carried.translated = Some(layer);
        }
        Ok(done)
    }

    /// Detaches the translators from an interface: first where packets come in, so that nothing new is translated that would not
    /// be translated back.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn stop_translating(&mut self, index: u32) -> Result<(), AttachError> {
        for program in TRANSLATING.into_iter().chain(TRANSLATING_RAW) {
            self.detach_hook(Hook { program, index })?;
        }
        if let Some(carried) = self.interfaces.get_mut(&index) {
            carried.translated = None;
            if !carried.observed {
                self.interfaces.remove(&index);
            }
        }
        Ok(())
    }

    /// Detaches everything of ours from an interface.
    pub(super) fn detach_interface(&mut self, index: u32) -> Result<(), AttachError> {
        self.stop_translating(index)?;
        for program in PACKET {
            self.detach_hook(Hook { program, index })?;
        }
        self.interfaces.remove(&index);
        Ok(())
    }

    /// Whether the observers are on an interface.
    pub fn observes(&self, index: u32) -> bool {
        self.interfaces.get(&index).is_some_and(|carried| carried.observed)
    }

    /// The interfaces where packets are translated, by index.
    pub fn translated(&self) -> Vec<u32> {
        let all = self
            .interfaces
            .iter()
            .filter(|(_, carried)| carried.translated.is_some());
        all.map(|(index, _)| *index).collect()
    }

    /// Whether translators are on an interface, of this agent or an earlier one.
    ///
    /// # Errors
    /// When filters cannot be listed.
    pub fn has_translators(&self, index: u32) -> Result<bool, AttachError> {
        let translates = |program: &str| !PACKET.contains(&program);
        if has_tcx() {
            let mut links = programs()
                .filter(|program| translates(program))
                .map(|program| Hook { program, index }.to_string());
            let pinned = |link: &str| self.pins.as_ref().is_some_and(|pins| pins.link(link).exists());
            return Ok(links.any(|link| self.held.contains_key(&link) || pinned(&link)));
        }
        let found = filters_of(index, "", self.pins.as_ref(), self.succeeds)?;
        Ok(found.iter().any(|(hook, _)| translates(hook.program)))
    }

    /// Forgets interfaces that are no longer there, whose links went with them, and learns the names of those that are.
    pub fn keep_interfaces(&mut self, there: &[(String, u32)]) {
        let gone: Vec<u32> = self
            .interfaces
            .iter_mut()
            .filter_map(
                |(index, carried)| match there.iter().find(|(_, there)| there == index) {
                    Some((name, _)) => {
                        carried.name.clone_from(name);
                        None
                    }
                    None => Some(*index),
                },
            )
            .collect();
        for index in gone {
            self.interfaces.remove(&index);
            for program in programs() {
                let link = Hook { program, index }.to_string();
                self.held.remove(&link);
                if let Some(pins) = &self.pins {
                    // The pin of a link whose interface has gone holds nothing.
                    let _gone = std::fs::remove_file(pins.link(&link));
                }
            }
        }
    }

    /// Detaches what an earlier agent has left on interfaces, but translators where they are wanted: the try to take them over may
    /// have failed, and is made again.
    ///
    /// # Errors
    /// When something cannot be listed or removed.
    pub fn sweep_interfaces(&mut self, wanted: impl Fn(u32) -> bool) -> Result<Vec<String>, AttachError> {
        let mut swept = Vec::new();
        let unknown = |held: &Self, hook: Hook| {
            !held.held.contains_key(&hook.to_string()) && (PACKET.contains(&hook.program) || !wanted(hook.index))
        };
        let Some(pins) = self.pins.clone() else {
            return Ok(swept);
        };
        let links = pins.links().map_err(|source| AttachError::Predecessor {
            folder: pins.folder(),
            source,
        })?;
        // One that does not go keeps no other from going.
        let mut failed = None;
        for link in links {
            if Hook::of_link(&link).is_some_and(|hook| unknown(self, hook)) {
                match self.detach(&link) {
                    Ok(()) => swept.push(link),
                    Err(error) => failed = Some(error),
                }
            }
        }
        if !has_tcx() {
            for (name, index) in interfaces()? {
                for (hook, filter) in filters_of(index, &name, Some(&pins), self.succeeds)? {
                    if unknown(self, hook) {
                        match remove_filter(hook, &filter, &name) {
                            Ok(()) => swept.push(hook.to_string()),
                            Err(error) => failed = Some(error),
                        }
                    }
                }
            }
        }
        failed.map_or(Ok(swept), Err)
    }

    /// Moves another version's pinned links to our pins, where we have none, so that the next attach swaps their programs, and the
    /// sweep after it takes away what nobody wants any more.
    ///
    /// Links that this version does not know stay where they are.
    ///
    /// # Errors
    /// When a pin cannot be moved.
    pub fn adopt(&mut self, other: &Pins) -> Result<(), AttachError> {
        self.succeeds = true;
        let Some(pins) = &self.pins else { return Ok(()) };
        let failed = |source| AttachError::Predecessor {
            folder: other.folder(),
            source,
        };
        for link in other.links().map_err(failed)? {
            let ours = if FOLLOWING.contains(&&*link) || REWRITING.contains(&&*link) {
                Some(link.clone())
            } else {
                Hook::of_link(&link)
                    .or_else(|| of_named_link(&link))
                    .map(|hook| hook.to_string())
            };
            if let Some(ours) = ours
                && !pins.link(&ours).exists()
            {
                std::fs::rename(other.link(&link), pins.link(&ours)).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// The program and the interface of a link or filter, by the link's name.
    pub fn interface_of(&self, link: &str) -> Option<(&'static str, &str)> {
        let hook = Hook::of_link(link)?;
        Some((hook.program, &self.interfaces.get(&hook.index)?.name))
    }

    /// Attaches again what is gone from interfaces. One that refuses keeps no other from being repaired.
    pub(super) fn repair_interfaces(&mut self, object: &mut Ebpf) -> Vec<String> {
        let mut repaired = Vec::new();
        for (index, carried) in self.interfaces.clone() {
            let observers = carried.observed.then_some(PACKET);
            let translators = carried.translated.map(Layer::programs);
            for programs in observers.into_iter().chain(translators) {
                match self.attach_both(object, index, programs) {
                    Ok(all) => {
                        let lost = all.into_iter().filter(|(_, done)| *done != Done::InPlace);
                        repaired.extend(lost.map(|(link, _)| link));
                    }
                    // It goes, and is forgotten when the interfaces are looked at next.
                    Err(AttachError::Interface { .. }) => {}
                    Err(error) => {
                        tracing::error!(%error, "a program that was lost could not be attached; it is tried again");
                    }
                }
            }
        }
        repaired
    }

    /// Whether the filter of a link's name is there, with a program.
    pub(super) fn filter_is_there(&self, link: &str) -> bool {
        let Some(hook) = Hook::of_link(link) else { return false };
        filters::list(hook.index, hook.direction()).is_ok_and(|all| {
            let mut ours = all
                .iter()
                .filter(|filter| is_of(hook, filter, self.pins.as_ref(), self.succeeds));
            ours.any(|filter| filter.program_id != 0)
        })
    }

    fn carry(&mut self, index: u32, name: &str) {
        let carried = self.interfaces.entry(index).or_insert_with(|| Carried {
            name: String::new(),
            observed: false,
            translated: None,
        });
        name.clone_into(&mut carried.name);
    }

    /// Attaches a pair of programs: the one of leaving packets first, so that what is translated is translated back.
    fn attach_both(
        &mut self,
        object: &mut Ebpf,
        index: u32,
        programs: [&'static str; 2],
    ) -> Result<Vec<(String, Done)>, AttachError> {
        let mut done = Vec::new();
        for program in programs.into_iter().rev() {
            let hook = Hook { program, index };
            match self.attach_hook(object, hook) {
                Ok(how) => done.push((hook.to_string(), how)),
                Err(error) => {
                    // What worked before goes on working; only half of a pair is nobody's wish.
                    for (link, _) in done.iter().filter(|(_, how)| *how == Done::Attached) {
                        if let Some(hook) = Hook::of_link(link) {
                            self.detach_hook(hook)?;
                        }
                    }
                    let carried = self.interfaces.get(&index);
                    if carried.is_some_and(|carried| !carried.observed && carried.translated.is_none()) {
                        self.interfaces.remove(&index);
                    }
                    return Err(error);
                }
            }
        }
        Ok(done)
    }

    fn attach_hook(&mut self, object: &mut Ebpf, hook: Hook) -> Result<Done, AttachError> {
        let link = hook.to_string();
        let program = object
            .program_mut(hook.program)
            .ok_or(LoadError::Missing(hook.program))?;
        if has_tcx()
            && let Some(known) = self.swap(program, &link, Target::Interface(hook.index))?
        {
            return Ok(known);
        }
        let Program::SchedClassifier(program) = program else {
            return Err(LoadError::Missing(hook.program).into());
        };
        let refused = |source| self.refused(hook, source);
        let fd = program.fd().map_err(|error| refused(io::Error::other(error)))?;
        if has_tcx() {
            if let Some(Held::Tcx(_)) = self.held.get(&link) {
                return Ok(Done::InPlace);
            }
            let made = syscall::tcx_link(fd.as_fd(), hook.index, hook.direction(), hook.order()).map_err(refused)?;
            let held = match &self.pins {
                Some(pins) => {
                    syscall::object_pin(made.as_fd(), &pins.link(&link)).map_err(|error| AttachError::Pin {
                        link: link.clone(),
                        reason: error.to_string(),
                    })?;
                    Held::Pinned
                }
                None => Held::Tcx(made),
            };
            self.held.insert(link, held);
            return Ok(Done::Attached);
        }
        let id = program.info().map_err(|error| refused(io::Error::other(error)))?.id();
        let done = self.put_filter(hook, fd.as_fd(), id)?;
        self.held.insert(link, Held::Filter);
        Ok(done)
    }

    fn put_filter(&self, hook: Hook, program: BorrowedFd<'_>, program_id: u32) -> Result<Done, AttachError> {
        let refused = |source| self.refused(hook, source);
        filters::add_clsact(hook.index).map_err(|source| match refused(source) {
            AttachError::Hook { interface, source, .. } => AttachError::Qdisc { interface, source },
            gone => gone,
        })?;
        let all = filters::list(hook.index, hook.direction()).map_err(refused)?;
        let known = all
            .iter()
            .find(|filter| is_of(hook, filter, self.pins.as_ref(), self.succeeds));
        let (filter, done) = match known {
            Some(known) if known.program_id == program_id => return Ok(Done::InPlace),
            // One of an earlier version learns whose it is.
            Some(known) => {
                let name = filter_name(hook.program, self.pins.as_ref());
                (Filter { name, ..known.clone() }, Done::Swapped)
            }
            None => {
                let taken = |handle: &u32| all.iter().any(|f| (f.priority, f.handle) == (hook.priority(), *handle));
                let new = Filter {
                    priority: hook.priority(),
                    handle: (1..=u32::from(u16::MAX)).find(|handle| !taken(handle)).unwrap_or(1),
                    name: filter_name(hook.program, self.pins.as_ref()),
                    program_id,
                };
                (new, Done::Attached)
            }
        };
        filters::put(hook.index, hook.direction(), &filter, program, known.is_some()).map_err(refused)?;
        Ok(done)
    }

    /// The error of a refusal, by whether the interface is still there.
    fn refused(&self, hook: Hook, source: io::Error) -> AttachError {
        let interface = self
            .interfaces
            .get(&hook.index)
            .map_or_else(|| format!("with index {}", hook.index), |carried| carried.name.clone());
        if source.raw_os_error() == Some(libc::ENODEV) {
            return AttachError::Interface {
                interface,
                source: nix::Error::ENODEV,
            };
        }
        AttachError::Hook {
            program: hook.program,
            interface,
            source,
        }
    }

    fn detach_hook(&mut self, hook: Hook) -> Result<(), AttachError> {
        let link = hook.to_string();
        if let Some(Held::Filter) = self.held.get(&link) {
            let name = self
                .interfaces
                .get(&hook.index)
                .map_or("", |carried| carried.name.as_str());
            for (known, filter) in filters_of(hook.index, name, self.pins.as_ref(), self.succeeds)? {
                if known == hook {
                    remove_filter(hook, &filter, name)?;
                }
            }
        }
        self.detach(&link)
    }
}

/// The hook of a link that is named by its interface's name, as earlier versions did; a BPF file system refuses dots, which
/// stand there as colons.
fn of_named_link(link: &str) -> Option<Hook> {
    PACKET.iter().find_map(|program| {
        let interface = link.strip_prefix(program)?.strip_prefix('-')?.replace(':', ".");
        let index = if_nametoindex(interface.as_str()).ok()?;
        Some(Hook { program, index })
    })
}

/// The name of a program's filter: it says whose it is, where several installations share a node.
fn filter_name(program: &str, pins: Option<&Pins>) -> String {
    match pins.and_then(|pins| pins.root().file_name()) {
        Some(installation) => format!("{program}@{}", installation.to_string_lossy()),
        None => program.to_owned(),
    }
}

/// Whether a filter runs a hook's program. Earlier versions named the program alone: `nameless` filters are this installation's
/// only where it had such a version.
fn is_of(hook: Hook, filter: &Filter, pins: Option<&Pins>, nameless: bool) -> bool {
    filter.priority == hook.priority()
        && (filter.name == filter_name(hook.program, pins) || nameless && filter.name == hook.program)
}

/// The filters of an installation on an interface.
fn filters_of(
    index: u32,
    interface: &str,
    pins: Option<&Pins>,
    nameless: bool,
) -> Result<Vec<(Hook, Filter)>, AttachError> {
    let mut found = Vec::new();
    for direction in Direction::BOTH {
        let all = filters::list(index, direction).map_err(|source| AttachError::Filters {
            operation: "list",
            interface: interface.to_owned(),
            source,
        })?;
        for filter in all {
            let hooks = programs().map(|program| Hook { program, index });
            let known = hooks
                .filter(|hook| hook.direction() == direction)
                .find(|hook| is_of(*hook, &filter, pins, nameless));
            if let Some(hook) = known {
                found.push((hook, filter));
            }
        }
    }
    Ok(found)
}

fn remove_filter(hook: Hook, filter: &Filter, interface: &str) -> Result<(), AttachError> {
    filters::remove(hook.index, hook.direction(), filter).map_err(|source| AttachError::Filters {
        operation: "remove",
        interface: interface.to_owned(),
        source,
    })
}

/// Removes the filters that an installation has left on the interfaces of this network namespace, or only says which: program and
/// interface. There are none where interfaces have links for programs.
///
/// # Errors
/// When something cannot be listed or removed.
pub fn remove_filters(pins: &Pins, dry_run: bool) -> Result<Vec<(&'static str, String)>, AttachError> {
    let mut removed = Vec::new();
    if has_tcx() {
        return Ok(removed);
    }
    let nameless = pins.other_abis().is_ok_and(|all| !all.is_empty());
    for (name, index) in interfaces()? {
        for (hook, filter) in filters_of(index, &name, Some(pins), nameless)? {
            if !dry_run {
                remove_filter(hook, &filter, &name)?;
            }
            removed.push((hook.program, name.clone()));
        }
    }
    Ok(removed)
}

/// The interfaces of this network namespace, by name and index.
///
/// # Errors
/// When the kernel does not tell.
pub fn interfaces() -> Result<Vec<(String, u32)>, AttachError> {
    let all = if_nameindex().map_err(AttachError::List)?;
    Ok(all
        .iter()
        .map(|interface| (interface.name().to_string_lossy().into_owned(), interface.index()))
        .collect())
}

/// Whether interfaces have links for programs (6.6).
pub fn has_tcx() -> bool {
    use aya::util::KernelVersion;
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_name_their_program_and_their_interfaces_index() {
        let hook = Hook {
            program: "lb_egress",
            index: 12,
        };
        assert_eq!(hook.to_string(), "lb_egress-12");
        assert_eq!(Hook::of_link("lb_egress-12"), Some(hook));
        for odd in ["lb_egress", "lb_egress-", "lb_egress-eth0", "connect4", "lb_egress-12x"] {
            assert_eq!(Hook::of_link(odd), None, "{odd}");
        }
    }

    #[test]
    fn filters_are_told_apart_by_installation_and_priority() {
        let hook = Hook {
            program: "lb_ingress",
            index: 3,
        };
        let filter = |name: &str, priority| Filter {
            priority,
            handle: 1,
            name: name.to_owned(),
            program_id: 9,
        };
        let pins = Pins::new("/sys/fs/bpf".as_ref(), "evenkeel");
        let is_of = |hook, filter: &Filter, nameless| is_of(hook, filter, Some(&pins), nameless);
        for nameless in [false, true] {
            assert!(is_of(hook, &filter("lb_ingress@evenkeel", 0xe0), nameless));
            // Without an installation's name it is an earlier version's, if there was one here, or another installation's.
            assert_eq!(is_of(hook, &filter("lb_ingress", 0xe0), nameless), nameless);
            assert!(!is_of(hook, &filter("lb_ingress@other", 0xe0), nameless));
            assert!(!is_of(hook, &filter("lb_ingress@evenkeel", 1), nameless));
            assert!(!is_of(hook, &filter("lb_egress@evenkeel", 0xe0), nameless));
        }
    }

    #[test]
    fn link_headers_follow_the_hardware_type() {
        assert_eq!(Layer::of_hardware(1), Some(Layer::Ethernet));
        assert_eq!(Layer::of_hardware(65_534), Some(Layer::Raw));
        assert_eq!(Layer::of_hardware(768), Some(Layer::Raw));
        assert_eq!(Layer::of_hardware(32), None);
    }
}
