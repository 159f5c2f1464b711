//! An agent's shared memory (memfd), which is untrusted. Its seals and size are checked. It is read with pread, never mapped.

use super::frames::word;
use gpumem_wire::layout::{self, Header};
use gpumem_wire::{SLOT_BYTES, Slot};
use rustix::fs::{SealFlags, SeekFrom, fcntl_get_seals, fstat, seek};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    /// The descriptor is not a memfd, or its size can still change.
    #[error("the memory is not sealed against resizing")]
    Seals,
    #[error("the memory has {0} bytes, more than the limit of {1} (agent.shared_mib)")]
    TooLarge(u64, u64),
    #[error("the memory's header: {0}")]
    Header(#[from] layout::Error),
    #[error("the memory's header changed")]
    Changed,
    #[error("reading the memory: {0}")]
    Read(#[from] Errno),
}

#[derive(Debug)]
pub(crate) struct Memory {
    file: File,
    /// Header when the memory was accepted.
    header: Header,
    file_bytes: u64,
}

impl Memory {
    /// Checks the memory's seals, size and header. `max_bytes` is its maximum size, which bounds the cost of reading it later.
    pub(crate) fn accept(fd: OwnedFd, max_bytes: u64) -> Result<Self, MemoryError> {
        match fcntl_get_seals(&fd) {
            Ok(seals) if seals.contains(SEALS) => {}
            _ => return Err(MemoryError::Seals),
        }
        let file_bytes = u64::try_from(fstat(&fd)?.st_size).unwrap_or(0);
        if file_bytes > max_bytes {
            return Err(MemoryError::TooLarge(file_bytes, max_bytes));
        }
        let file = File::from(fd);
        let header = read_header(&file, file_bytes)?;
        Ok(Memory { file, header, file_bytes })
    }

    /// Reads the header again and returns it with its current values. Fails if constant fields have changed.
    pub(crate) fn header(&self) -> Result<Header, MemoryError> {
        let now = read_header(&self.file, self.file_bytes)?;
        let fixed = |header: &Header| (header.ring_slots, header.live_rows, header.name_bytes);
        if fixed(&now) == fixed(&self.header) { Ok(now) } else { Err(MemoryError::Changed) }
    }

    /// Fills `buffer` with names (of tags, for example). `offset`: number of bytes of the names before it.
    pub(crate) fn names(&self, offset: u64, buffer: &mut [u8]) -> Result<(), MemoryError> {
        let start = self.header.names_offset().ok_or(layout::Error::Size)?;
        read_exact(&self.file, buffer, start + offset)
    }

    /// Appends the ring's records with sequence numbers `first..=last` to `slots`, in order. Skips overwritten records.
    pub(crate) fn ring(&self, first: u64, last: u64, slots: &mut Vec<Slot>) -> Result<(), MemoryError> {
        let mut bytes = Vec::new();
        let mut seq = first;
        while seq <= last {
            // Each iteration reads up to the end of the ring at most, where the sequence wraps.
            let to_end = self.header.ring_slots - ((seq - 1) & (self.header.ring_slots - 1));
            let count = (last - seq + 1).min(to_end);
            bytes.resize(count as usize * SLOT_BYTES, 0);
            read_exact(&self.file, &mut bytes, self.header.slot_offset(seq))?;
            for (slot, seq) in bytes.as_chunks::<SLOT_BYTES>().0.iter().zip(seq..) {
                if word(slot, 0) == seq {
                    slots.push(*slot);
                }
            }
            seq += count;
        }
        Ok(())
    }

    /// Appends the rows (live allocations) among `first..first + count` to `rows`. Skips pages that were never written, which
    /// are most of the table in most programs.
    pub(crate) fn live(&self, first: u64, count: u64, rows: &mut Vec<Slot>) -> Result<(), MemoryError> {
        let end = first.saturating_add(count).min(self.header.live_rows);
        let (mut at, mut bytes) = (first, Vec::new());
        while let Some(next) = self.next_live(at)?.filter(|next| *next < end) {
            let start = self.row_offset(next)?;
            let hole = seek(&self.file, SeekFrom::Hole(start))?;
            at = (next + (hole - start).div_ceil(SLOT_BYTES as u64).max(1)).min(end);
            bytes.resize((at - next) as usize * SLOT_BYTES, 0);
            read_exact(&self.file, &mut bytes, start)?;
            rows.extend(bytes.as_chunks::<SLOT_BYTES>().0.iter().filter(|slot| word(slot, 0) != 0));
        }
        Ok(())
    }

    /// Returns the number of the next row that may be live, starting at `first`; `None` if there is none.
    pub(crate) fn next_live(&self, first: u64) -> Result<Option<u64>, MemoryError> {
        let start = self.row_offset(first)?;
        match seek(&self.file, SeekFrom::Data(start)) {
            Ok(found) => {
                let row = first + found.saturating_sub(start) / SLOT_BYTES as u64;
                Ok((row < self.header.live_rows).then_some(row))
            }
            Err(Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn row_offset(&self, row: u64) -> Result<u64, MemoryError> {
        let start = self.header.live_offset().ok_or(layout::Error::Size)?;
        Ok(start.saturating_add(row.saturating_mul(SLOT_BYTES as u64)))
    }
}

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn read_header(file: &File, file_bytes: u64) -> Result<Header, MemoryError> {
    let mut bytes = [0; 72];
    read_exact(file, &mut bytes, 0)?;
    Ok(Header::decode(&bytes, file_bytes)?)
}

/// Fills `buffer`. A short read is an error, because the size was checked and cannot shrink.
fn read_exact(file: &File, buffer: &mut [u8], offset: u64) -> Result<(), MemoryError> {
    file.read_exact_at(buffer, offset).map_err(|error| {
        Errno::from_io_error(&error).map_or_else(|| layout::Error::Size.into(), MemoryError::Read)
    })
}

#[cfg(test)]
pub(super) mod by_hand {
    use super::*;
    use gpumem_wire::{MAJOR, MINOR};
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    /// Shared memory of an agent before it is sealed: only a header with these fields.
    pub(crate) fn unsealed(ring_slots: u64, live_rows: u64, head_seq: u64) -> (OwnedFd, Header) {
        let (major, minor, pid, start_ticks) = (MAJOR, MINOR, 1, 1);
        let (name_bytes, lost, names_end) = (64, 0, 0);
        let header = Header {
            major,
            minor,
            pid,
            start_ticks,
            ring_slots,
            live_rows,
            name_bytes,
            head_seq,
            lost,
            names_end,
        };
        let fd = memfd_create("by hand", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, header.file_bytes().expect("small")).expect("room");
        assert_eq!(rustix::io::pwrite(&fd, &header.encode(), 0), Ok(72));
        (fd, header)
    }

    pub(crate) fn accepted(fd: OwnedFd) -> Memory {
        fcntl_add_seals(&fd, SEALS).expect("sealed");
        Memory::accept(fd, 1 << 30).expect("as it should be")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::pwrite;

    #[test]
    fn live_rows_are_found_in_a_table_that_is_mostly_empty() {
        let live_rows = 100_000;
        let (fd, header) = by_hand::unsealed(16, live_rows, 0);
        let written = [0, 1, 47, 48, 5000, 40_000, live_rows - 1];
        for row in written {
            let mut slot = [0; SLOT_BYTES];
            slot[..8].copy_from_slice(&(row + 1).to_le_bytes());
            let at = header.live_offset().expect("small") + row * SLOT_BYTES as u64;
            assert_eq!(pwrite(&fd, &slot, at), Ok(SLOT_BYTES));
        }
        let memory = by_hand::accepted(fd);
        for piece in [1, 7, 64, 4096, live_rows, u64::MAX] {
            let (mut rows, mut first, mut pieces) = (Vec::new(), 0, 0);
            while let Some(next) = memory.next_live(first).expect("readable") {
                memory.live(next, piece, &mut rows).expect("readable");
                first = next.saturating_add(piece);
                pieces += 1;
            }
            let found: Vec<u64> = rows.iter().map(|row| word(row, 0) - 1).collect();
            assert_eq!(found, written, "in pieces of {piece}");
            assert!(pieces <= 5 * 64, "{pieces} pieces of {piece}: only what was written to");
        }
    }
}
