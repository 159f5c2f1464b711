//! Where a session's frames go, and the beacon that says what it is doing.

use super::super::call_state::{Doing, Lamp};
use crate::clock::now_ns;
use gpumem_wire::{Body, Record, Stamp};
use std::io::{self, Write};

/// Least time between two identical values of the beacon.
const SAY_SAME_NS: u64 = 50_000_000;

/// Where frames go, and the beacon that says what is being done.
pub(crate) struct Outlet {
    /// Frames that have not been written.
    pub frames: Vec<u8>,
    sink: Box<dyn Write>,
    beacon: Option<Lamp>,
    /// What the beacon says, and since when.
    said: (Doing, u64),
}

impl Outlet {
    /// An outlet over `sink`.
    pub(crate) fn new(sink: Box<dyn Write>, beacon: Option<Lamp>) -> Outlet {
        Outlet { frames: Vec::with_capacity(16 * 1024), sink, beacon, said: (Doing::Nothing, 0) }
    }

    /// Says what is done next. Calls for one device that follow each other quickly are one.
    pub(crate) fn doing(&mut self, doing: Doing) {
        let Some(beacon) = &mut self.beacon else { return };
        let now = now_ns();
        if self.said.0 != doing || now.saturating_sub(self.said.1) >= SAY_SAME_NS {
            self.said = (doing, now);
            beacon.set(doing);
        }
    }

    /// Adds a record.
    pub(crate) fn say(&mut self, stamp: Stamp, body: Body<'_>) {
        Record { stamp, body }.append_frame(&mut self.frames);
    }

    /// Writes what there is.
    ///
    /// # Errors
    /// The reader is gone.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.doing(Doing::Nothing);
        if !self.frames.is_empty() {
            self.sink.write_all(&self.frames)?;
            self.sink.flush()?;
            self.frames.clear();
        }
        Ok(())
    }
}
