//! Windows into array maps that the agent can map into its memory.
//!
//! A map's pages count as the agent's memory while they are mapped, so a window is mapped for one batch of reads or
//! writes, and unmapped when it is dropped. A page given back by `MADV_DONTNEED` would fault for good.

use std::{
    marker::PhantomData,
    num::NonZeroUsize,
    os::fd::{AsFd, BorrowedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use aya::maps::MapData;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use thiserror::Error;

/// An array map of `T` that can be mapped (`BPF_F_MMAPABLE`).
#[derive(Debug)]
pub struct Array<T> {
    data: MapData,
    len: u32,
    _t: PhantomData<T>,
}

/// Why a window could not be opened.
#[derive(Debug, Error)]
pub enum WindowError {
    /// Beyond the array.
    #[error("entries {first}..{end} lie beyond the map's {len}")]
    Beyond {
        /// First entry asked for.
        first: u32,
        /// One past the last.
        end: u64,
        /// Entries of the map.
        len: u32,
    },
    /// The kernel refuses.
    #[error("cannot map the array: {0}")]
    Map(#[from] nix::Error),
}

impl<T: aya::Pod> Array<T> {
    /// Takes a map of `len` entries whose value is `T`; the caller has compared the layout.
    pub(super) fn new(data: MapData, len: u32) -> Self {
        const {
            assert!(size_of::<T>().is_multiple_of(8), "array elements stride eight bytes");
        };
        Self {
            data,
            len,
            _t: PhantomData,
        }
    }

    /// Number of entries.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// True for an array without entries; the kernel makes none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The map's descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.data.fd().as_fd()
    }

    /// Maps `count` entries from `first`.
    ///
    /// # Errors
    /// When they lie beyond the map, or the kernel refuses.
    pub fn window(&self, first: u32, count: u32) -> Result<Window<T>, WindowError> {
        let end = u64::from(first) + u64::from(count);
        if end > u64::from(self.len) {
            return Err(WindowError::Beyond {
                first,
                end,
                len: self.len,
            });
        }
        let page = page_size();
        let from = first as usize * size_of::<T>();
        let base = from - from % page;
        let length = NonZeroUsize::new(end as usize * size_of::<T>() - base).unwrap_or(NonZeroUsize::MIN);
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases no memory of ours.
        let mapping = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                self.fd(),
                // An offset that does not fit is refused by the kernel.
                libc::off_t::try_from(base).unwrap_or(libc::off_t::MAX),
            )
        }?;
        Ok(Window {
            mapping,
            bytes: length.get(),
            skip: from - base,
            count,
            _t: PhantomData,
        })
    }
}

fn page_size() -> usize {
    use std::sync::OnceLock;
    static PAGE: OnceLock<usize> = OnceLock::new();
    *PAGE.get_or_init(|| {
        nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
            .ok()
            .flatten()
            .and_then(|size| usize::try_from(size).ok())
            .unwrap_or(4096)
    })
}

/// A mapped part of an array.
#[derive(Debug)]
pub struct Window<T> {
    mapping: NonNull<std::ffi::c_void>,
    bytes: usize,
    skip: usize,
    count: u32,
    _t: PhantomData<T>,
}

impl<T: aya::Pod> Window<T> {
    pub(super) fn element(&self, index: u32) -> *mut T {
        assert!(index < self.count, "a window is read and written within its bounds");
        // SAFETY: within the mapping, by the assertion and the window's construction.
        unsafe {
            self.mapping
                .as_ptr()
                .cast::<u8>()
                .add(self.skip)
                .cast::<T>()
                .add(index as usize)
        }
    }

    /// Number of entries.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// True for a window of no entries.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Reads the entry at `index` of the window.
    pub fn get(&self, index: u32) -> T {
        // SAFETY: a live element; the kernel may change it meanwhile, which a volatile read allows for.
        unsafe { std::ptr::read_volatile(self.element(index)) }
    }

    /// Writes the entry at `index` of the window. Programs may see it half written: write only what nothing names yet.
    pub fn set(&mut self, index: u32, value: T) {
        // SAFETY: a live element, ours to write.
        unsafe { std::ptr::write_volatile(self.element(index), value) }
    }
}

impl Window<u64> {
    /// Writes eight bytes in one store, after everything that was written before.
    pub fn publish(&mut self, index: u32, value: u64) {
        // SAFETY: a live element, aligned to eight bytes, only ever accessed as one word.
        unsafe { AtomicU64::from_ptr(self.element(index)) }.store(value, Ordering::Release);
    }
}

impl<T> Drop for Window<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, and no reference into it outlives the window.
        let _ = unsafe { munmap(self.mapping, self.bytes) };
    }
}
