//! What reconciling asks of the maps, whether they are the kernel's or memory.

use lb_common::backend::{BackendCounters, ServiceCounters, Tally};

use super::{
    kernel::{Kernel, MapsError},
    window::WindowError,
};
use crate::{
    compile::{Capacity, Contents},
    plan::Plan,
};

/// Whether no connection is open that will count its end for this backend.
pub fn is_backend_idle(counters: &BackendCounters) -> bool {
    let idle = |tally: Tally| tally.established <= tally.closed;
    idle(counters.inside) && idle(counters.direct) && idle(counters.outside)
}

/// Whether no connection is open that will count its end for this Service.
pub fn is_service_idle(counters: &ServiceCounters) -> bool {
    counters.established <= counters.closed
}

/// Ids whose counters say that connections are open, whether or not the ids stand for anything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenIds {
    /// Backends.
    pub backends: Vec<u32>,
    /// Services.
    pub services: Vec<u32>,
}

/// The state maps, as plans see them.
pub trait Maps {
    /// How much they hold.
    fn capacity(&self) -> Capacity;

    /// Carries out a plan, in the order of [`crate::plan::Phase::ORDER`]. What was written before an error stays written.
    ///
    /// # Errors
    /// When a map has no room, or the kernel refuses.
    fn apply(&mut self, plan: &Plan) -> Result<(), MapsError>;

    /// Reads all state back.
    ///
    /// # Errors
    /// When the kernel refuses a read.
    fn dump(&self) -> Result<Contents, MapsError>;

    /// Reads a Maglev table; `offset` in elements, `slots` its size.
    ///
    /// # Errors
    /// When it lies beyond the array.
    fn table(&self, offset: u32, slots: u32) -> Result<Vec<u16>, WindowError>;

    /// The counters of one backend.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn backend_counter(&self, id: u32) -> Result<BackendCounters, MapsError>;

    /// The counters of one Service.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn service_counter(&self, id: u32) -> Result<ServiceCounters, MapsError>;

    /// The ids with open connections: all counters are read.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn open_ids(&self) -> Result<OpenIds, MapsError>;
}

impl Maps for Kernel {
    fn capacity(&self) -> Capacity {
        self.capacity()
    }

    fn apply(&mut self, plan: &Plan) -> Result<(), MapsError> {
        self.apply(plan)
    }

    fn dump(&self) -> Result<Contents, MapsError> {
        self.dump()
    }

    fn table(&self, offset: u32, slots: u32) -> Result<Vec<u16>, WindowError> {
        self.table(offset, slots)
    }

    fn backend_counter(&self, id: u32) -> Result<BackendCounters, MapsError> {
        self.backend_counter(id)
    }

    fn service_counter(&self, id: u32) -> Result<ServiceCounters, MapsError> {
        self.service_counter(id)
    }

    fn open_ids(&self) -> Result<OpenIds, MapsError> {
        let mut open = OpenIds::default();
        self.backend_counters(u32::MAX, |id, counters| {
            if !is_backend_idle(&counters) {
                open.backends.push(id);
            }
        })?;
        self.service_counters(u32::MAX, |id, counters| {
            if !is_service_idle(&counters) {
                open.services.push(id);
            }
        })?;
        Ok(open)
    }
}
