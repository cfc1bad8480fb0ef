//! From a dialled address to a backend: the decisions of [`lb_common::select`] on the kernel's maps.

use crate::{
    ctx, globals,
    maps::{AFFINITY, BACKEND_INDEX, BACKENDS, FRONTENDS, LISTS, MEMBERS, OPTED_OUT, SETS, TABLES},
};
use aya_ebpf::{
    helpers::{bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id},
    programs::SockAddrContext,
};
use lb_common::{
    abi::TCP,
    addr::{Addr, Port},
    affinity::{Affinity, AffinityKey, Membership},
    backend::{EndpointKey, state},
    frontend::{Frontend, FrontendKey},
    maps::feature,
    select::{self, Tables},
    set::{ListEntry, SetWord},
};

/// Deepest cgroup level at which an opt-out is looked for; pods lie at 3 to 5.
const MAX_LEVEL: i32 = 8;

/// The kernel's maps as [`select`] reads them.
struct Maps;

impl Tables for Maps {
    /// Nothing: the backend is read again where it is used, by [`address`].
    type Backend = ();

    #[inline(always)]
    fn list(&self, index: u32) -> Option<ListEntry> {
        let entry = LISTS.get_ptr(index)?;
        // SAFETY: a live array element; read field by field, for `c` changes under us.
        Some(unsafe {
            ListEntry {
                a: (*entry).a,
                b: (*entry).b,
                c: core::ptr::read_volatile(&raw const (*entry).c),
            }
        })
    }

    #[inline(always)]
    fn element(&self, index: u32) -> Option<u64> {
        // SAFETY: a live array element.
        TABLES.get_ptr(index).map(|element| unsafe { *element })
    }

    #[inline(always)]
    fn backend(&self, id: u32) -> Option<((), bool)> {
        let backend = BACKENDS.get_ptr(id)?;
        // SAFETY: a live array element.
        match unsafe { (*backend).state } {
            state::VACANT => None,
            state => Some(((), state == state::ACTIVE)),
        }
    }
}

/// The frontend of a dialled address.
#[inline(always)]
pub fn frontend(addr: Addr, port: Port, proto: u8) -> Option<*const Frontend> {
    let key = FrontendKey::new(addr, port, proto);
    FRONTENDS.get_ptr(&key)
}

/// (Service, backend) of an endpoint's own TCP address, where any Service has it.
#[inline(always)]
pub fn endpoint(addr: Addr, port: Port) -> Option<(u32, u32)> {
    let id = BACKEND_INDEX.get_ptr(&EndpointKey::new(addr, port, TCP, 0))?;
    // SAFETY: an element of the map; removed elements stay readable until the program ends.
    let id = unsafe { *id };
    let backend = BACKENDS.get_ptr(id)?;
    // SAFETY: a live array element.
    Some((unsafe { (*backend).service_id }, id))
}

/// True if the current task's cgroup, or one above it, is opted out.
#[inline(always)]
pub fn opted_out() -> bool {
    if !globals::has(feature::OPT_OUT) {
        return false;
    }
    // SAFETY: the helpers take no pointers.
    let own = unsafe { bpf_get_current_cgroup_id() };
    if OPTED_OUT.get_ptr(&own).is_some() {
        return true;
    }
    let mut level = 1;
    while level < MAX_LEVEL {
        // SAFETY: as above.
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(level) };
        if id == 0 {
            return false;
        }
        if OPTED_OUT.get_ptr(&id).is_some() {
            return true;
        }
        level += 1;
    }
    false
}

/// How one member is told from the others.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The better of two by load: each TCP connection is its own key.
    Load,
    /// The hash alone: a UDP socket stays with its backend, a packet's tuple has the same one on every node.
    Hash,
}

/// No entry of the list array.
pub const NO_ENTRY: u32 = u32::MAX;

/// A chosen backend.
pub struct Chosen {
    /// Its id.
    pub id: u32,
    /// Its entry in the list array; [`NO_ENTRY`] where affinity chose. (An `Option` here leaves its payload
    /// uninitialised on one path, which the verifier refuses.)
    pub entry: u32,
}

/// The address and port of a backend.
///
/// A pointer that is carried out of the choice instead, through its `Option`s, loses its origin on the way on kernel 6.1
/// ("R9 invalid mem access 'scalar'"): there the verifier forgets which branch had set it.
#[inline(always)]
pub fn address(id: u32) -> Option<(Addr, Port)> {
    let backend = BACKENDS.get_ptr(id)?;
    // SAFETY: a live array element.
    Some(unsafe { ((*backend).addr, (*backend).port) })
}

/// A set's word; that of an empty one where there is no such set.
#[inline(always)]
pub fn word(set_id: u32) -> SetWord {
    match SETS.get_ptr(set_id) {
        // SAFETY: a live array element, aligned; the agent writes it in one store.
        Some(word) => SetWord(unsafe { core::ptr::read_volatile(word.cast::<u64>()) }),
        None => SetWord(0),
    }
}

/// Chooses a backend for a socket of this node; `None` if nothing is usable.
#[inline(always)]
pub fn choose_for_socket(ctx: &SockAddrContext, frontend: &Frontend, cookie: u64, by: By) -> Option<Chosen> {
    // An address is not chosen yet; a pod is one network namespace.
    let client = if frontend.affinity_seconds != 0 {
        AffinityKey::inside(ctx::netns_cookie(ctx), frontend.set_id)
    } else {
        AffinityKey::inside(0, 0)
    };
    let hash = select::socket_hash(cookie, frontend.set_id);
    let chosen = choose(
        word(frontend.set_id),
        frontend.set_id,
        frontend.affinity_seconds,
        &client,
        hash,
        by,
    )?;
    if frontend.affinity_seconds != 0 && chosen.entry != NO_ENTRY {
        remember(&client, chosen.id);
    }
    Some(chosen)
}

/// Chooses a backend of a set for whoever `client` is, if the set has affinity, and `hash` says; `None` if nothing is usable.
/// What was chosen by hash (it has an entry then) is remembered by who accepts it.
#[inline(always)]
pub fn choose(
    word: SetWord,
    set_id: u32,
    affinity_seconds: u32,
    client: &AffinityKey,
    hash: u64,
    by: By,
) -> Option<Chosen> {
    if word.count() == 0 {
        return None;
    }
    let header = Maps.list(word.offset())?;
    let sticky = affinity_seconds != 0;
    if sticky && let Some(chosen) = remembered(client, set_id, affinity_seconds) {
        return Some(chosen);
    }
    fresh(word, header, hash, by)
}

/// Remembers which backend a client meets.
#[inline(always)]
pub fn remember(client: &AffinityKey, backend_id: u32) {
    let memory = Affinity {
        backend_id,
        pad: 0,
        last_ns: ctx::now(),
    };
    // A full map evicts its oldest client; an insert can fail only for want of memory, and then affinity is lost
    // for this client until the next connect.
    let _ = AFFINITY.insert(client, &memory, 0);
}

/// The backend that the client met last, if its memory holds and the backend is still a usable member of the set.
#[inline(always)]
fn remembered(key: &AffinityKey, set_id: u32, affinity_seconds: u32) -> Option<Chosen> {
    let seen = AFFINITY.get_ptr_mut(key)?;
    // SAFETY: an element of the map; it may be evicted and reused while we look, which gives at worst another member
    // of this or another set, refused by the membership check below.
    let memory = unsafe { *seen };
    let now = ctx::now();
    let member = Membership {
        set_id,
        backend_id: memory.backend_id,
    };
    if !memory.holds(now, affinity_seconds) || MEMBERS.get_ptr(&member).is_none() {
        return None;
    }
    let ((), usable) = Maps.backend(memory.backend_id)?;
    if !usable {
        return None;
    }
    // SAFETY: as above.
    unsafe { (*seen).last_ns = now };
    Some(Chosen {
        id: memory.backend_id,
        entry: NO_ENTRY,
    })
}

#[inline(always)]
fn fresh(word: SetWord, header: ListEntry, hash: u64, by: By) -> Option<Chosen> {
    let pick = match by {
        By::Load => select::pick_balanced(&Maps, word, header, hash),
        By::Hash => select::pick(&Maps, word, header, hash),
    }?;
    Some(Chosen {
        id: pick.entry.a,
        entry: pick.list_index,
    })
}
