//! Joins the halves: desired state on one side, the kernel on the other.
//!
//! Level-triggered: whatever happened in between, a Service that changed is compiled from its whole desired state and
//! compared with what the kernel is believed to hold. Errors stay here: a Service that cannot be applied keeps its old
//! state, is reported and tried again. Nothing is written before every kind has synced (C24).

mod changes;
mod owners;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use lb_common::{backend::state, frontend::FrontendKey};

pub use self::changes::Changes;
use self::{changes::Note, owners::Owners};
use crate::{
    compile::{Compiled, CompiledSet, Compiler, Contents, TableWrite, slots_of, table_hash},
    datapath::{
        kernel::{Kernel, MapsError},
        maps::{Maps, is_backend_idle, is_service_idle},
    },
    desired::Desired,
    model::{DesiredService, ObjectName, Update},
    observe::{Directory, UsableBackends},
    plan::Plan,
};

/// How the last applications went.
#[derive(Clone, Debug, Default)]
pub struct SyncState {
    /// When a change last came in.
    pub last_queued: Option<SystemTime>,
    /// When a change last reached the kernel.
    pub last_applied: Option<SystemTime>,
    /// Since when the oldest change waits that has not been applied.
    pub pending_since: Option<SystemTime>,
    /// How long the last application took.
    pub last_duration: Option<Duration>,
    /// Applications that failed.
    pub failures: u64,
    /// What stands in the way now, by Service.
    pub errors: BTreeMap<ObjectName, String>,
    /// Those of them for which a map has no room. They wait for room, not for time: nothing of theirs is pending.
    pub crowded_out: BTreeSet<ObjectName>,
    /// Things found lost, foreign or wrong in the kernel, and put right.
    pub repairs: u64,
    /// From the coming in of a change to its being in the kernel, one entry each since they were last taken.
    pub latencies: Vec<Duration>,
}

/// What one flush did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Services that were written.
    pub services: usize,
    /// Writes that add or change, and writes that remove.
    pub puts: usize,
    /// Writes that remove.
    pub drops: usize,
}

/// Desired state, what was compiled from it, and the kernel.
#[derive(Debug)]
pub struct Reconciler<M = Kernel> {
    desired: Desired,
    compiler: Compiler,
    /// What the kernel is believed to hold.
    applied: HashMap<ObjectName, Compiled>,
    by_id: HashMap<u32, ObjectName>,
    owners: Owners,
    kernel: M,
    /// Services to look at, and since when.
    dirty: BTreeMap<ObjectName, Instant>,
    /// What the kernel held at the start; taken by the first flush.
    found: Option<Contents>,
    sync: SyncState,
    /// Services of the agent's own, beside those that are wanted from outside.
    own: BTreeMap<ObjectName, DesiredService>,
    usable: Arc<UsableBackends>,
    /// Ids of Services that were removed, until somebody asks: their numbers may soon be another's.
    removed: Vec<u32>,
    /// Kept for those who judge records.
    directory: Option<Arc<Directory>>,
    /// Counted for those who asked for it.
    changes: Option<Changes>,
    epoch: Instant,
}

/// A compiler that goes on with what the kernel holds. An id that an earlier agent freed is not handed out while connections of
/// its old owner are open: their ends would count for the new one.
fn restore(kernel: &impl Maps, contents: &Contents, now_ms: u64) -> Result<Compiler, MapsError> {
    let mut compiler = Compiler::restore(kernel.capacity(), contents);
    compiler.withhold(&kernel.open_ids()?, now_ms);
    Ok(compiler)
}

impl<M: Maps> Reconciler<M> {
    /// Reads the kernel's state back; nothing is written.
    ///
    /// # Errors
    /// When the kernel refuses a read.
    pub fn new(desired: Desired, kernel: M) -> Result<Self, MapsError> {
        let contents = kernel.dump()?;
        let kernel_backends = kernel.capacity().backends;
        Ok(Self {
            desired,
            compiler: restore(&kernel, &contents, 0)?,
            applied: HashMap::new(),
            by_id: HashMap::new(),
            owners: Owners::default(),
            kernel,
            dirty: BTreeMap::new(),
            found: Some(contents),
            sync: SyncState::default(),
            own: BTreeMap::new(),
            usable: Arc::new(UsableBackends::new(kernel_backends)),
            removed: Vec::new(),
            directory: None,
            changes: None,
            epoch: Instant::now(),
        })
    }

    /// Takes one step of input.
    pub fn take(&mut self, update: Update) {
        let note = self.changes.as_ref().and_then(|_| Note::of(&update));
        let changed = self.desired.apply(update);
        if let (Some(changes), Some(note)) = (&mut self.changes, note) {
            changes.add(note, &changed);
        }
        if changed.is_empty() {
            return;
        }
        let now = Instant::now();
        self.sync.last_queued = Some(SystemTime::now());
        self.sync.pending_since.get_or_insert_with(SystemTime::now);
        for name in changed.services {
            self.dirty.entry(name).or_insert(now);
        }
    }

    /// Adds a Service of the agent's own (the self-probe's).
    pub fn add_own(&mut self, service: DesiredService) {
        self.dirty.entry(service.name.clone()).or_insert_with(Instant::now);
        self.own.insert(service.name.clone(), service);
    }

    /// True for a Service of the agent's own, which is not shown to people.
    pub fn is_own(&self, name: &ObjectName) -> bool {
        self.own.contains_key(name)
    }

    /// Writes what has changed into the kernel. Before the first sync nothing is written; the first flush after it writes
    /// the difference to what was found.
    pub fn flush(&mut self) -> Flushed {
        if !self.desired.synced() {
            return Flushed::default();
        }
        let started = Instant::now();
        let flushed = match self.found.take() {
            Some(found) => self.first(found),
            None if self.dirty.is_empty() => return Flushed::default(),
            None => self.incremental(),
        };
        self.sync.last_duration = Some(started.elapsed());
        let waits = self
            .sync
            .errors
            .keys()
            .any(|name| !self.sync.crowded_out.contains(name));
        if !waits && self.is_synced() {
            self.sync.last_applied = Some(SystemTime::now());
            self.sync.pending_since = None;
        }
        flushed
    }

    /// The first full comparison: what the kernel holds against what everybody wants.
    fn first(&mut self, found: Contents) -> Flushed {
        let mut tables = Vec::new();
        let mut refused: Vec<DesiredService> = Vec::new();
        let mut names: Vec<ObjectName> = self.desired.names().chain(self.own.keys()).cloned().collect();
        names.sort();
        for name in names {
            let Some(desired) = self.desired_service(&name) else {
                continue;
            };
            match self.compiler.compile(&desired, None, &mut tables) {
                Ok(compiled) => {
                    self.sync.errors.remove(&name);
                    self.sync.crowded_out.remove(&name);
                    self.applied.insert(name, compiled);
                }
                Err(full) => {
                    self.sync.crowded_out.insert(name.clone());
                    self.fail(&name, full.to_string());
                    refused.push(desired);
                }
            }
        }
        self.keep_as_found(&refused, &found);
        let mut broken = Vec::new();
        let mut plan = Plan::against(&found, self.applied.values(), &mut broken);
        plan.tables = tables;
        // A table that is shared, or adopted, is not in `tables`; one that is both new and broken is.
        let rebuilt = self.rebuild(&broken, &plan.tables);
        drop(broken);
        plan.tables.extend(rebuilt);
        let size = plan.size();
        let services = self.applied.len();
        if let Err(error) = self.kernel.apply(&plan) {
            // Nobody knows how far it came: everything is looked at again.
            self.sync.failures += 1;
            tracing::error!(%error, "the first synchronisation failed; it is tried again");
            let found = self.kernel.dump().unwrap_or(found);
            match restore(&self.kernel, &found, self.now_ms()) {
                Ok(compiler) => self.compiler = compiler,
                Err(error) => {
                    tracing::error!(%error, "the counters cannot be read; ids with open connections may be reused");
                    self.compiler = Compiler::restore(self.kernel.capacity(), &found);
                }
            }
            self.applied.clear();
            self.found = Some(found);
            return Flushed::default();
        }
        let now = self.now_ms();
        self.compiler.forget_restored(now);
        self.owners.clear();
        for (name, service) in &self.applied {
            self.by_id.insert(service.service_id, name.clone());
            self.owners.exchange(None, Some(service));
            self.tell_observers(name, service, true);
        }
        self.settle_all();
        Flushed {
            services,
            puts: size.puts,
            drops: size.drops,
        }
    }

    /// What does not fit keeps what the kernel holds of it.
    fn keep_as_found(&mut self, refused: &[DesiredService], found: &Contents) {
        if refused.is_empty() {
            return;
        }
        let elsewhere: HashSet<FrontendKey> = self
            .applied
            .values()
            .flat_map(|service| service.frontends.iter().map(|(key, _)| *key))
            .collect();
        for desired in refused {
            if let Some(old) = self.compiler.as_found(desired, found, &elsewhere) {
                self.applied.insert(desired.name.clone(), old);
            }
        }
    }

    fn settle_all(&mut self) {
        let failed: BTreeSet<ObjectName> = self.sync.errors.keys().cloned().collect();
        if let Some(changes) = &mut self.changes {
            let now = SystemTime::now();
            for name in self.dirty.keys().filter(|name| !failed.contains(*name)) {
                changes.done(name, now);
            }
        }
        self.sync.latencies.extend(
            self.dirty
                .iter()
                .filter(|(name, _)| !failed.contains(*name))
                .map(|(_, since)| since.elapsed()),
        );
        self.dirty.retain(|name, _| failed.contains(name));
    }

    fn incremental(&mut self) -> Flushed {
        let dirty = std::mem::take(&mut self.dirty);
        let mut merged = Plan::default();
        let mut changes: Vec<(ObjectName, Instant, Option<Compiled>)> = Vec::new();
        for (name, since) in dirty {
            let old = self.applied.get(&name);
            let new = match self.desired_service(&name) {
                Some(desired) => match self.compiler.compile(&desired, old, &mut merged.tables) {
                    Ok(compiled) => Some(compiled),
                    Err(full) => {
                        self.sync.crowded_out.insert(name.clone());
                        self.fail(&name, full.to_string());
                        self.dirty.insert(name, since);
                        continue;
                    }
                },
                None => None,
            };
            merged.merge(Plan::between(old, new.as_ref()));
            changes.push((name, since, new));
        }
        let size = merged.size();
        let mut flushed = Flushed {
            services: changes.len(),
            puts: size.puts,
            drops: size.drops,
        };
        let mut taken = Vec::new();
        match self.kernel.apply(&merged) {
            Ok(()) => {
                for (name, since, new) in changes {
                    taken.extend(self.accept(name, since, new));
                }
            }
            Err(error) if changes.len() == 1 => {
                for (name, since, new) in changes {
                    self.refuse(&name, new.as_ref(), &error.to_string());
                    self.dirty.insert(name, since);
                }
                flushed.services = 0;
            }
            Err(_) => {
                // One of them does not fit. The tables are written first; then each Service is tried alone.
                let tables = Plan {
                    tables: merged.tables,
                    ..Plan::default()
                };
                let written = self.kernel.apply(&tables).map_err(|error| error.to_string());
                // Who takes a frontend over comes before who lets it go, so that it is never away.
                changes.sort_by_cached_key(|(name, _, new)| {
                    let plan = Plan::between(self.applied.get(name), new.as_ref());
                    !new.as_ref().is_some_and(|new| self.owners.gains(&plan, new.service_id))
                });
                for (name, since, new) in changes {
                    let mut plan = Plan::between(self.applied.get(&name), new.as_ref());
                    if let Some(old) = self.applied.get(&name) {
                        self.owners.spare(&mut plan, old.service_id);
                    }
                    let result = written
                        .clone()
                        .and_then(|()| self.kernel.apply(&plan).map_err(|e| e.to_string()));
                    match result {
                        Ok(()) => taken.extend(self.accept(name, since, new)),
                        Err(error) => {
                            self.refuse(&name, new.as_ref(), &error);
                            self.dirty.insert(name, since);
                            flushed.services -= 1;
                        }
                    }
                }
            }
        }
        self.cede(taken);
        flushed
    }

    /// Notes that a Service is in the kernel as `new`. Returns the frontends that it took from others.
    fn accept(&mut self, name: ObjectName, since: Instant, new: Option<Compiled>) -> Vec<(FrontendKey, u32)> {
        let now = self.now_ms();
        let old = self.applied.remove(&name);
        let taken = self.owners.exchange(old.as_ref(), new.as_ref());
        if let Some(old) = &old {
            self.compiler.retire(old, new.as_ref(), now);
            self.by_id.remove(&old.service_id);
            self.tell_observers(&name, old, false);
        }
        self.sync.errors.remove(&name);
        self.sync.crowded_out.remove(&name);
        self.sync.latencies.push(since.elapsed());
        if let Some(changes) = &mut self.changes {
            changes.done(&name, SystemTime::now());
        }
        if new.is_none()
            && let Some(old) = &old
        {
            self.removed.push(old.service_id);
        }
        if let Some(new) = new {
            self.tell_observers(&name, &new, true);
            self.by_id.insert(new.service_id, name.clone());
            self.applied.insert(name, new);
        }
        taken
    }

    /// Takes frontends from Services that could not let them go in the same step: others have them now.
    fn cede(&mut self, taken: Vec<(FrontendKey, u32)>) {
        for (key, loser) in taken {
            let Some(name) = self.by_id.get(&loser) else { continue };
            if let Some(service) = self.applied.get_mut(name)
                && self.owners.is_elsewhere(&key, loser)
            {
                self.compiler.cede(service, &key);
            }
        }
    }

    /// The kernel refused: what was compiled is given back, and the old state is written again where it was touched.
    fn refuse(&mut self, name: &ObjectName, new: Option<&Compiled>, error: &str) {
        let now = self.now_ms();
        if let Some(new) = new {
            let old = self.applied.get(name);
            let mut back = Plan::between(Some(new), old);
            // The old lists are whole, since their room has not been freed; and the old ids count on.
            back.lists.clear();
            back.fresh_backends.clear();
            back.fresh_services.clear();
            self.owners.give_back(&mut back, new.service_id, |owner, key| {
                let service = self.applied.get(self.by_id.get(&owner)?)?;
                service
                    .frontends
                    .iter()
                    .find(|(k, _)| k == key)
                    .map(|(_, value)| *value)
            });
            if let Err(error) = self.kernel.apply(&back) {
                tracing::warn!(service = %name, %error, "the old state could not be written back; the next check repairs it");
            }
            self.compiler.withdraw(new, old, now);
        }
        self.fail(name, error.to_owned());
    }

    fn fail(&mut self, name: &ObjectName, error: String) {
        self.sync.failures += 1;
        if self.sync.errors.get(name) != Some(&error) {
            tracing::error!(service = %name, %error, "a Service could not be applied; its old state stands");
        }
        self.sync.errors.insert(name.clone(), error);
    }

    /// Compares the kernel's contents with what was applied, and repairs what is lost, foreign or wrong. Returns how many
    /// entries were.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn check(&mut self) -> Result<usize, MapsError> {
        if self.found.is_some() {
            return Ok(0);
        }
        let contents = self.kernel.dump()?;
        let mut broken = Vec::new();
        let mut plan = Plan::against(&contents, self.applied.values(), &mut broken);
        let rebuilt = self.rebuild(&broken, &[]);
        drop(broken);
        plan.tables.extend(rebuilt);
        // Counters of what was lost go on: nobody else has had these ids.
        plan.fresh_backends.clear();
        plan.fresh_services.clear();
        let size = plan.size();
        let wrong = size.puts + size.drops;
        if wrong > 0 {
            self.kernel.apply(&plan)?;
            self.sync.repairs += wrong as u64;
            tracing::warn!(
                puts = size.puts,
                drops = size.drops,
                "the kernel's maps differed from what was applied; repaired"
            );
        }
        Ok(wrong)
    }

    /// Builds the tables of sets again; those at an offset in `but` are already at hand.
    fn rebuild(&self, sets: &[&CompiledSet], but: &[TableWrite]) -> Vec<TableWrite> {
        let mut done: BTreeSet<u32> = but.iter().map(|t| t.offset).collect();
        let mut wrong: HashSet<u32> = HashSet::new();
        for set in sets {
            if done.insert(set.table.offset) {
                let held = self.kernel.table(set.table.offset, set.table.slots);
                if !held.is_ok_and(|slots| table_hash(slots) == set.table.content) {
                    wrong.insert(set.set_id);
                }
            }
        }
        if wrong.is_empty() {
            return Vec::new();
        }
        let all = self
            .applied
            .values()
            .flat_map(|service| service.sets.iter().map(move |set| (service, set)));
        all.filter(|(_, set)| wrong.contains(&set.set_id))
            .filter_map(|(service, set)| {
                Some(TableWrite {
                    offset: set.table.offset,
                    slots: slots_of(service, set)?,
                })
            })
            .collect()
    }

    /// Makes freed ids and ranges available again, where nothing refers to them any more.
    pub fn reclaim(&mut self) {
        let now = self.now_ms();
        let kernel = &self.kernel;
        self.compiler.reclaim(
            now,
            |id| kernel.backend_counter(id).is_ok_and(|c| is_backend_idle(&c)),
            |id| kernel.service_counter(id).is_ok_and(|c| is_service_idle(&c)),
        );
    }

    /// True if something waits to be written, and may be.
    pub fn has_work(&self) -> bool {
        self.desired.synced() && (self.found.is_some() || !self.dirty.is_empty())
    }

    /// True once the first synchronisation has been written.
    pub fn is_synced(&self) -> bool {
        self.found.is_none()
    }

    /// The desired state.
    pub fn desired(&self) -> &Desired {
        &self.desired
    }

    /// The kernel.
    pub fn kernel(&self) -> &M {
        &self.kernel
    }

    /// The kernel, to be written beside plans (opt-outs, sweeps).
    pub fn kernel_mut(&mut self) -> &mut M {
        &mut self.kernel
    }

    /// What the kernel is believed to hold, by Service.
    pub fn applied(&self) -> &HashMap<ObjectName, Compiled> {
        &self.applied
    }

    /// The Service of an id.
    pub fn service_of(&self, id: u32) -> Option<&ObjectName> {
        self.by_id.get(&id)
    }

    /// How the applications go.
    pub fn sync_state(&self) -> &SyncState {
        &self.sync
    }

    /// Counts changes from now on.
    pub fn count_changes(&mut self) {
        self.changes = Some(Changes::new(SystemTime::now()));
    }

    /// The changes, where they are counted.
    pub fn changes(&self) -> Option<&Changes> {
        self.changes.as_ref()
    }

    /// Takes the latencies that were noted since the last call.
    pub fn take_latencies(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.sync.latencies)
    }

    /// Counts a repair that was made elsewhere (a link that was attached again).
    pub fn count_repairs(&mut self, n: u64) {
        self.sync.repairs += n;
    }

    /// (used, capacity) by map.
    pub fn usage(&self) -> Vec<(&'static str, u64, u64)> {
        self.compiler
            .usage()
            .into_iter()
            .map(|(map, used, capacity)| (map, u64::from(used), u64::from(capacity)))
            .collect()
    }

    /// The desired state of a Service that is served.
    pub fn desired_service(&self, name: &ObjectName) -> Option<DesiredService> {
        match self.own.get(name) {
            Some(own) => Some(own.clone()),
            None => self.desired.service(name),
        }
    }

    /// Which backends may get new connections, shared with whoever judges records.
    pub fn usable(&self) -> Arc<UsableBackends> {
        Arc::clone(&self.usable)
    }

    /// Ids of the Services that were removed since the last call.
    pub fn take_removed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.removed)
    }

    /// Keeps a directory of what addresses and ids stand for.
    pub fn keep_directory(&mut self, directory: Arc<Directory>) {
        self.directory = Some(directory);
    }

    /// Tells those who judge records which backends may get connections, and what addresses and ids there are.
    fn tell_observers(&self, name: &ObjectName, service: &Compiled, present: bool) {
        for (id, backend) in &service.backends {
            self.usable.set(*id, present && backend.state == state::ACTIVE);
        }
        let Some(directory) = &self.directory else { return };
        // The agent's own Service is nobody's business: its connections are events for no one.
        if present && !self.is_own(name) {
            directory.name(service.service_id, name);
        } else if !present {
            directory.forget(service.service_id, service.backends.iter().map(|(id, _)| *id));
        }
        let frontends = service.frontends.iter().map(|(key, _)| (*key, 0));
        let backends = service
            .backends
            .iter()
            .map(|(id, b)| (FrontendKey::new(b.addr, b.port, b.proto), *id));
        for (key, backend_id) in frontends.chain(backends) {
            if present {
                directory.put(key, service.service_id, backend_id);
            } else {
                directory.remove(&key, service.service_id);
            }
        }
    }

    fn now_ms(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }
}

#[cfg(test)]
mod tests;
