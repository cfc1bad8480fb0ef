//! A whole array map, mapped into memory: read and written without a system call.

use std::{ffi::c_void, io, marker::PhantomData, os::fd::AsFd, ptr::NonNull};

use anyhow::{Context, Result, ensure};
use aya::{
    Ebpf,
    maps::{Map, MapData},
};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// An array map of `T` in this process's memory.
pub struct Mapped<T> {
    at: NonNull<c_void>,
    bytes: usize,
    len: u32,
    /// Held, so that the map lives.
    _data: MapData,
    _t: PhantomData<T>,
}

impl<T> std::fmt::Debug for Mapped<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapped").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T: aya::Pod> Mapped<T> {
    /// Takes an array out of an object and maps it.
    pub fn take(object: &mut Ebpf, name: &str) -> Result<Self> {
        let Some(Map::Array(data)) = object.take_map(name) else {
            anyhow::bail!("no array {name}");
        };
        let info = data.info()?;
        ensure!(info.value_size() as usize == size_of::<T>(), "values of {name}");
        let len = info.max_entries();
        let bytes = len as usize * size_of::<T>();
        let length = bytes.try_into().context("an array without entries")?;
        let flags = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases no memory of ours.
        let at = unsafe { mmap(None, length, flags, MapFlags::MAP_SHARED, data.fd().as_fd(), 0) }
            .map_err(io::Error::from)
            .with_context(|| format!("map {name}"))?;
        Ok(Self {
            at,
            bytes,
            len,
            _data: data,
            _t: PhantomData,
        })
    }

    /// Number of entries.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Never: the kernel makes no array without entries.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn element(&self, index: u32) -> *mut T {
        assert!(index < self.len, "entry {index} of {}", self.len);
        // SAFETY: within the mapping, by the assertion.
        unsafe { self.at.as_ptr().cast::<T>().add(index as usize) }
    }

    /// Reads an entry.
    pub fn get(&self, index: u32) -> T {
        // SAFETY: a live element of a type whose every bit pattern is a value; programs run only when this thread runs them.
        unsafe { self.element(index).read_volatile() }
    }

    /// Writes an entry.
    pub fn set(&mut self, index: u32, value: T) {
        // SAFETY: as above.
        unsafe { self.element(index).write_volatile(value) }
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, and no reference into it is ever given out.
        let _ = unsafe { munmap(self.at, self.bytes) };
    }
}
