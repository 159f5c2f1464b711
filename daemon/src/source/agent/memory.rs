//! An agent's memfd. It belongs to a stranger: its seals and size are checked, it is read with pread in bounded
//! pieces and never mapped.

use super::frames::word;
use gpumem_wire::layout::{self, Header};
use gpumem_wire::{SLOT_BYTES, Slot};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::io::{Errno, pread};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// What a handed over descriptor must be sealed against.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Why a descriptor is not taken.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Not a memfd, or its size can still change.
    #[error("the memory is not sealed against change of its size")]
    Seals,
    /// More than is read.
    #[error("the memory has {0} bytes, at most {1} are taken (agent.shared_mib)")]
    TooLarge(u64, u64),
    /// Its header is wrong.
    #[error("the memory's header: {0}")]
    Header(#[from] layout::Error),
    /// The parts moved after the first look.
    #[error("the memory's header changed")]
    Changed,
    /// The system said no.
    #[error("reading the memory: {0}")]
    Read(#[from] Errno),
}

/// An agent's memory.
#[derive(Debug)]
pub struct Memory {
    fd: OwnedFd,
    header: Header,
    file_bytes: u64,
}

impl Memory {
    /// Looks whether the descriptor is what it should be, and no larger than `max_bytes`: that bounds what the end of one agent
    /// can cost.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn accept(fd: OwnedFd, max_bytes: u64) -> Result<Self, Refusal> {
        match fcntl_get_seals(&fd) {
            Ok(seals) if seals.contains(SEALS) => {}
            _ => return Err(Refusal::Seals),
        }
        let file_bytes = u64::try_from(fstat(&fd)?.st_size).unwrap_or(0);
        if file_bytes > max_bytes {
            return Err(Refusal::TooLarge(file_bytes, max_bytes));
        }
        let header = read_header(&fd, file_bytes)?;
        Ok(Memory { fd, header, file_bytes })
    }

    /// The header as it is now. What may not change must not have.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn header(&self) -> Result<Header, Refusal> {
        let now = read_header(&self.fd, self.file_bytes)?;
        let fixed = |header: &Header| (header.ring_slots, header.live_rows, header.name_bytes);
        if fixed(&now) == fixed(&self.header) { Ok(now) } else { Err(Refusal::Changed) }
    }

    /// Fills `buffer` from the names, beginning at `offset` in them.
    ///
    /// # Errors
    /// What reading says.
    pub fn names(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Refusal> {
        let start = self.header.names_offset().ok_or(layout::Error::Size)?;
        read_exact(&self.fd, buffer, start + offset)
    }

    /// Appends to `slots` what the ring holds of the records `first..=last`, in order; what is not there is
    /// left out.
    ///
    /// # Errors
    /// What reading says.
    pub fn ring(&self, first: u64, last: u64, slots: &mut Vec<Slot>) -> Result<(), Refusal> {
        let mut bytes = Vec::new();
        let mut seq = first;
        while seq <= last {
            // In one piece up to where the ring begins again.
            let to_end = self.header.ring_slots - ((seq - 1) & (self.header.ring_slots - 1));
            let count = (last - seq + 1).min(to_end);
            bytes.resize(count as usize * SLOT_BYTES, 0);
            read_exact(&self.fd, &mut bytes, self.header.slot_offset(seq))?;
            for (slot, seq) in bytes.as_chunks::<SLOT_BYTES>().0.iter().zip(seq..) {
                if word(slot, 0) == seq {
                    slots.push(*slot);
                }
            }
            seq += count;
        }
        Ok(())
    }

    /// Appends to `rows` the live rows among those at `first..first + count`.
    ///
    /// # Errors
    /// What reading says.
    pub fn live(&self, first: u64, count: u64, rows: &mut Vec<Slot>) -> Result<(), Refusal> {
        let count = count.min(self.header.live_rows.saturating_sub(first));
        let start = self.header.live_offset().ok_or(layout::Error::Size)?;
        let mut bytes = vec![0; count as usize * SLOT_BYTES];
        read_exact(&self.fd, &mut bytes, start + first * SLOT_BYTES as u64)?;
        rows.extend(bytes.as_chunks::<SLOT_BYTES>().0.iter().filter(|slot| word(slot, 0) != 0));
        Ok(())
    }
}

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn read_header(fd: &OwnedFd, file_bytes: u64) -> Result<Header, Refusal> {
    let mut bytes = [0; 72];
    read_exact(fd, &mut bytes, 0)?;
    Ok(Header::decode(&bytes, file_bytes)?)
}

/// The size was checked and cannot shrink: too few bytes are a lie.
fn read_exact(fd: &OwnedFd, mut buffer: &mut [u8], mut offset: u64) -> Result<(), Refusal> {
    while !buffer.is_empty() {
        match pread(fd, &mut *buffer, offset) {
            Ok(0) => return Err(layout::Error::Size.into()),
            Ok(read) => {
                buffer = &mut buffer[read..];
                offset += read as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
