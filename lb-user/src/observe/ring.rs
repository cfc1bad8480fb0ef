//! Reading the ring buffer.
//!
//! The programs wake the reader once in 64 records; a timer takes what lies there besides, so that the last records of a
//! burst are not old.

use std::{io, time::Duration};

use aya::maps::{MapData, RingBuf};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::timeout,
};

/// The longest that a record waits for its reader.
const PATIENCE: Duration = Duration::from_millis(100);

/// The records of the kernel programs.
pub struct Ring {
    buffer: AsyncFd<RingBuf<MapData>>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl Ring {
    /// Takes the ring buffer. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the runtime cannot watch it.
    pub fn new(buffer: RingBuf<MapData>) -> io::Result<Self> {
        // SAFETY: the ring buffer keeps one descriptor open for as long as it lives, and is dropped together with this.
        let buffer = unsafe { AsyncFd::register_with_interest(buffer, Interest::READABLE) }?;
        Ok(Self { buffer })
    }

    /// Waits for records, or for the timer.
    ///
    /// # Errors
    /// When the runtime cannot watch the buffer.
    pub async fn wait(&mut self) -> io::Result<()> {
        if let Ok(ready) = timeout(PATIENCE, self.buffer.readable_mut()).await {
            ready?.clear_ready();
        }
        Ok(())
    }

    /// Hands over what lies in the buffer, at most `most` records. Returns how many there were.
    pub fn drain(&mut self, most: usize, mut each: impl FnMut(&[u8])) -> usize {
        let buffer = self.buffer.get_mut();
        let mut taken = 0;
        while taken < most
            && let Some(record) = buffer.next()
        {
            each(&record);
            taken += 1;
        }
        taken
    }
}
