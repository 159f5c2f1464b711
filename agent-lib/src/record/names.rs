//! Names: frames of Device, Tag, Module and Stack records in the memfd, and a table from names to tags. A tag is the number of a
//! name with its parents, such as `model/layer`.
//!
//! A writer reserves a range of the memfd, writes its frame there, and marks the frame as done. Then it moves `names_end` over
//! all frames that are done. So `names_end` never passes an unfinished frame, and no thread waits for another.
//!
//! A tag is the index in the table plus one. So a thread gets it at once, even while another thread adds the name. A 64-bit hash
//! of (parent, name) identifies a name: with 100,000 names a collision has a probability of 3 in 10^10.

use crate::base::memfd::{AtomicU32, AtomicU64, Shared, anonymous, fence};
use crate::base::row::mix;
use gpumem_wire::{Body, MAX_TAG_BYTES, Record, Stamp, frame};
use std::sync::atomic::Ordering::*;

/// Number of entries in the hash table of tags, a power of two.
const PLACES: usize = if cfg!(loom) { 8 } else { 1 << 17 };
/// Maximum number of entries that a lookup examines.
const REACH: usize = if cfg!(loom) { 8 } else { 64 };
/// Size in bytes of a cell: the memory for names is divided into cells. A frame (the encoded record of
/// a name) is larger, so at most one begins in each cell.
const CELL: u64 = 64;
const _: () = assert!(CELL <= (frame::PREFIX_BYTES + gpumem_wire::SLOT_BYTES) as u64);

/// The name frames and the table of tags; see the module's docs.
#[derive(Debug)]
pub struct Names {
    base: *mut u8,
    bytes: u64,
    end: &'static AtomicU64,
    reserved: AtomicU64,
    /// For each cell, the length of the finished frame that begins in it; else 0.
    done: &'static [AtomicU32],
    /// For each place of the table, the hash of (parent, name); 0 while the place is free.
    keys: &'static [AtomicU64],
    /// For each place, offset << 16 | length of the name with its parents; 0 until it is written.
    paths: &'static [AtomicU64],
    /// Number of times that a name was not added because the memory or the table for names was full. Each attempt counts.
    pub refused: AtomicU64,
}

// SAFETY: a range at `base` is written only by the thread that reserved it, and read only once its frame is done.
unsafe impl Send for Names {}
// SAFETY: as above.
unsafe impl Sync for Names {}

impl Names {
    /// Creates an empty table in `shared`; `None` without memory.
    pub fn new(shared: &Shared) -> Option<Self> {
        let bytes = shared.header.name_bytes;
        Some(Names {
            base: shared.names(),
            bytes,
            end: shared.names_end(),
            reserved: AtomicU64::new(0),
            done: anonymous((bytes / CELL) as usize + 1)?,
            keys: anonymous(PLACES)?,
            paths: anonymous(PLACES)?,
            refused: AtomicU64::new(0),
        })
    }

    /// After a fork, copies the names that the parent process had added.
    pub(crate) fn adopt(&self, parent: &Names) {
        let end = parent.end().min(self.bytes);
        // SAFETY: copies finished frames of the parent's mapping to this one, which no other thread uses yet.
        unsafe { std::ptr::copy_nonoverlapping(parent.base, self.base, end as usize) };
        let cells = (end / CELL) as usize + 1;
        for (to, from) in self.done.iter().zip(parent.done).take(cells) {
            to.store(from.load(Relaxed), Relaxed);
        }
        if let Some(next) = self.done.get((end / CELL) as usize) {
            next.store(0, Relaxed);
        }
        for (place, path) in parent.paths.iter().enumerate() {
            let at = path.load(Relaxed);
            if at != 0 && (at >> 16) + (at & 0xffff) <= end {
                self.paths[place].store(at, Relaxed);
                self.keys[place].store(parent.keys[place].load(Relaxed), Relaxed);
            }
        }
        self.reserved.store(end, Relaxed);
        self.end.store(end, Release);
    }

    /// Returns the offset in bytes up to which all frames are finished.
    pub fn end(&self) -> u64 {
        self.end.load(Acquire)
    }

    /// Appends the finished frames between `from` and `to` to `out`, as many as fit into its capacity. Returns the offset of the
    /// next frame.
    pub fn copy(&self, from: u64, to: u64, out: &mut Vec<u8>) -> u64 {
        let mut at = from;
        while at < to {
            let len = u64::from(self.done[(at / CELL) as usize].load(Acquire));
            if len == 0 || out.len() + len as usize > out.capacity() {
                break;
            }
            out.extend_from_slice(self.read(at, len));
            at += len;
        }
        at
    }

    fn read(&self, offset: u64, len: u64) -> &[u8] {
        // SAFETY: callers pass a range inside of a finished frame, which is never written again.
        unsafe { std::slice::from_raw_parts(self.base.add(offset as usize), len as usize) }
    }

    /// Adds a name record; returns the position of its payload, or `None` if there is no room.
    pub(crate) fn add(&self, record: &Record<'_>) -> Option<u64> {
        let (slot, payload) = record.encode();
        let len = record.frame_bytes() as u64;
        if len > self.bytes || len > frame::MAX_FRAME_BYTES as u64 {
            self.refused.fetch_add(1, Relaxed);
            return None;
        }
        let taken =
            self.reserved.fetch_update(AcqRel, Relaxed, |at| (at + len <= self.bytes).then_some(at + len));
        let Ok(start) = taken else {
            self.refused.fetch_add(1, Relaxed);
            return None;
        };
        let prefix = (len as u32 - frame::PREFIX_BYTES as u32).to_le_bytes();
        let mut at = start;
        for part in [&prefix[..], &slot[..], payload] {
            // SAFETY: only this thread uses the reserved range, which lies inside the mapping.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), self.base.add(at as usize), part.len());
            }
            at += part.len() as u64;
        }
        self.done[(start / CELL) as usize].store(len as u32, Release);
        // If two threads finish at once, one must see the other's frame. Otherwise the end would stay before the later frame.
        fence(SeqCst);
        self.advance();
        Some(at - payload.len() as u64)
    }

    fn advance(&self) {
        loop {
            let end = self.end.load(Acquire);
            let Some(len) = self.done.get((end / CELL) as usize).map(|len| len.load(Acquire)) else { return };
            if len == 0 || end >= self.bytes {
                return;
            }
            let _ = self.end.compare_exchange(end, end + u64::from(len), AcqRel, Relaxed);
        }
    }

    /// Returns the tag of `parent/name`, adding it if it is new; 0 if there is no room for it.
    #[inline]
    pub fn intern(&self, parent: u32, name: &[u8]) -> u32 {
        let Some(place) = self.place(hash(parent, name)) else { return 0 };
        if self.paths[place].load(Relaxed) == 0 {
            return self.introduce(place, parent, name);
        }
        place as u32 + 1
    }

    /// Returns the tag of `parent/name`, if it exists.
    #[inline]
    pub fn known(&self, parent: u32, name: &[u8]) -> Option<u32> {
        let key = hash(parent, name);
        for probe in 0..REACH {
            let place = (key as usize).wrapping_add(probe) & (PLACES - 1);
            match self.keys[place].load(Acquire) {
                found if found == key => {
                    return (self.paths[place].load(Relaxed) != 0).then_some(place as u32 + 1);
                }
                0 => return None,
                _ => {}
            }
        }
        None
    }

    /// Returns the place of a key, claiming one if the key is new; `None` if there is no room.
    #[inline]
    fn place(&self, key: u64) -> Option<usize> {
        for probe in 0..REACH {
            let place = (key as usize).wrapping_add(probe) & (PLACES - 1);
            match self.keys[place].load(Acquire) {
                found if found == key => return Some(place),
                0 => match self.keys[place].compare_exchange(0, key, AcqRel, Acquire) {
                    Ok(_) => return Some(place),
                    Err(found) if found == key => return Some(place),
                    Err(_) => {}
                },
                _ => {}
            }
        }
        self.refused.fetch_add(1, Relaxed);
        None
    }

    /// Returns the tag `outer/inner` of two tags; `outer` if there is no room for it.
    #[inline]
    pub fn join(&self, outer: u32, inner: u32) -> u32 {
        // The two numbers identify the tag: the hash is that of a special name, which no text can equal.
        let mut key = [0xff; 6];
        key[..4].copy_from_slice(&inner.to_le_bytes());
        let Some(place) = self.place(hash(outer, &key)) else { return outer };
        if self.paths[place].load(Relaxed) == 0 {
            return match self.introduce(place, outer, self.path(inner).unwrap_or(b"?")) {
                0 => outer,
                tag => tag,
            };
        }
        place as u32 + 1
    }

    /// Writes the name of a new tag; returns 0 if there is no room. Two threads may do this for one tag, which does no harm.
    #[cold]
    #[inline(never)]
    fn introduce(&self, place: usize, parent: u32, name: &[u8]) -> u32 {
        let tag = place as u32 + 1;
        let mut path = [0; MAX_TAG_BYTES];
        let mut len = 0;
        if parent != 0 {
            let outer = self.path(parent).unwrap_or(b"?");
            path[..outer.len()].copy_from_slice(outer);
            len = outer.len();
            if len < MAX_TAG_BYTES {
                path[len] = b'/';
                len += 1;
            }
        }
        for chunk in name.utf8_chunks() {
            let escapes = escapes(chunk.invalid());
            for part in [chunk.valid(), std::str::from_utf8(&escapes).unwrap_or("?").trim_end_matches('\0')] {
                let room = (0..=part.len().min(MAX_TAG_BYTES - len))
                    .rev()
                    .find(|&at| part.is_char_boundary(at))
                    .unwrap_or(0);
                path[len..len + room].copy_from_slice(&part.as_bytes()[..room]);
                len += room;
            }
        }
        let text = std::str::from_utf8(&path[..len]).unwrap_or("?");
        let stamp = Stamp { tag, ..Stamp::default() };
        let offset = self.add(&Record { stamp, body: Body::Tag { path: text } });
        match offset {
            Some(offset) => {
                self.paths[place].store(offset << 16 | text.len() as u64, Release);
                tag
            }
            None => 0,
        }
    }

    /// Returns the name of a tag, with its parents' names before it: `model/layer`.
    pub fn path(&self, tag: u32) -> Option<&[u8]> {
        let at = self.paths.get((tag as usize).checked_sub(1)?)?.load(Acquire);
        (at != 0).then(|| self.read(at >> 16, at & 0xffff))
    }
}

/// Returns up to three bytes that are not UTF-8 as text, each like `\xE9`, and then zeros. So different names stay different.
fn escapes(bytes: &[u8]) -> [u8; 12] {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut out = [0; 12];
    for (place, byte) in out.chunks_exact_mut(4).zip(bytes) {
        place.copy_from_slice(&[b'\\', b'x', DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    }
    out
}

/// Returns a 64-bit hash of (parent, name); never 0.
#[inline(always)]
fn hash(parent: u32, name: &[u8]) -> u64 {
    let mut hash = mix(u64::from(parent) ^ 0x9e37_79b9_7f4a_7c15, name.len() as u64);
    let mut words = name.chunks_exact(8);
    for word in &mut words {
        hash = fold(hash, u64::from_le_bytes(std::array::from_fn(|byte| word[byte])));
    }
    let rest = words.remainder();
    if !rest.is_empty() {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        hash = fold(hash, u64::from_le_bytes(last));
    }
    hash.max(1)
}

#[inline(always)]
fn fold(hash: u64, word: u64) -> u64 {
    let product = u128::from(hash ^ word ^ 0xa076_1d64_78bd_642f) * 0xe703_7ed1_a0b4_28db;
    (product as u64 ^ (product >> 64) as u64).wrapping_add(word.rotate_left(23))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::memfd::Sizes;

    #[test]
    fn a_name_without_room_is_none() {
        let sizes = Sizes { ring_slots: 2, live_rows: 64, name_bytes: 4096 };
        let shared = Shared::create(c"names-test", sizes, 1, 2).expect("memory");
        let names = Names::new(&shared).expect("memory");
        let (outer, module) = (names.intern(0, b"outer"), names.intern(0, b"module"));
        let all: Vec<u32> =
            (0..100).map(|number: u32| names.intern(0, format!("step {number}").as_bytes())).collect();
        let known = all.iter().filter(|&&tag| tag != 0).count();
        assert!((20..80).contains(&known), "{known}");
        assert!(all.iter().all(|&tag| tag == 0 || names.path(tag).is_some()), "numbers without names");
        assert_eq!(names.intern(0, b"step 99"), 0);
        assert_eq!(names.join(outer, module), outer);
        assert_eq!(names.intern(0, b"module"), module);
    }
}
