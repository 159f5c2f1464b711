//! The files that the dynamic loader has mapped, read while it holds its lock. Nothing is allocated under that lock.

use crate::base::elf;
use crate::base::loaded_file::{MappedFile, find_mapped};

/// Longest path in bytes; a longer one is reduced to its end.
pub(crate) const PATH_BYTES: usize = 1024;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Object {
    /// Range of `Collection::names`.
    name: (usize, usize),
    pub start: usize,
    pub end: usize,
    pub functions: Option<(usize, usize)>,
    /// Range of `Collection::segments`.
    pub segments: (usize, usize),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct MappedSegment {
    pub start: usize,
    pub end: usize,
    pub runs: bool,
}

/// All mapped files, filled up to the capacity of its vectors.
#[derive(Debug)]
pub(crate) struct Collection {
    pub objects: Vec<Object>,
    pub segments: Vec<MappedSegment>,
    names: Vec<u8>,
    full: bool,
    /// Files mapped and unmapped so far, see `changes_now`.
    pub changes: (u64, u64),
}

impl Collection {
    /// Collects all mapped files; starts again with more room if there was too little.
    pub(crate) fn take() -> Self {
        let mut collection = Collection::new(256);
        for _ in 0..8 {
            find_mapped(|file| !collection.add(&file));
            if !collection.full {
                break;
            }
            collection = Collection::new(collection.objects.capacity() * 4);
        }
        collection
    }

    fn new(objects: usize) -> Self {
        Collection {
            objects: Vec::with_capacity(objects),
            segments: Vec::with_capacity(objects * 6),
            names: Vec::with_capacity(objects * 256),
            full: false,
            changes: (0, 0),
        }
    }

    /// Adds a file; returns false if there is no room for it.
    fn add(&mut self, file: &MappedFile<'_>) -> bool {
        self.changes = file.changes;
        let (headers, base) = (file.image.headers, file.image.base);
        let from = (self.segments.len(), self.names.len());
        let loads = headers.iter().filter(|header| header.p_type == libc::PT_LOAD && header.p_memsz > 0);
        let room = self.segments.len() + loads.clone().count() <= self.segments.capacity()
            && self.names.len() + file.path.len() <= self.names.capacity()
            && self.objects.len() < self.objects.capacity();
        if !room {
            self.full = true;
            return false;
        }
        let (mut start, mut end) = (usize::MAX, 0);
        for header in loads {
            let at = base.wrapping_add(header.p_vaddr as usize);
            let (at, to) = (at & !4095, at.wrapping_add(header.p_memsz as usize));
            self.segments.push(MappedSegment { start: at, end: to, runs: header.p_flags & libc::PF_X != 0 });
            (start, end) = (start.min(at), end.max(to));
        }
        if start >= end {
            return true;
        }
        let table = headers.iter().find(|header| header.p_type == libc::PT_GNU_EH_FRAME);
        let functions = table.and_then(|header| {
            let at = base.wrapping_add(header.p_vaddr as usize);
            let inside = start <= at && at.checked_add(header.p_memsz as usize)? <= end;
            // SAFETY: the table stays mapped while the loader's lock is held; the unwinder reads it in the same way.
            inside.then(|| unsafe { elf::functions(at, header.p_memsz as usize, start, end) }).flatten()
        });
        self.names.extend_from_slice(file.path);
        let (segments, name) = ((from.0, self.segments.len()), (from.1, self.names.len()));
        self.objects.push(Object { name, start, end, functions, segments });
        true
    }

    /// Returns the path of the object at `index`; the first object is the program.
    pub(crate) fn path(&self, index: usize) -> String {
        let name = self
            .objects
            .get(index)
            .map_or(&[][..], |object| self.names.get(object.name.0..object.name.1).unwrap_or_default());
        match (name.is_empty(), index) {
            (true, 0) => program(),
            (true, _) => "linux-vdso".to_owned(),
            _ => shown(name),
        }
    }
}

fn program() -> String {
    use std::os::unix::ffi::OsStrExt;
    let path = std::fs::read_link("/proc/self/exe");
    path.map_or_else(|_| "(program)".to_owned(), |path| shown(path.as_os_str().as_bytes()))
}

/// Converts a path to text, keeping the end of a long one.
fn shown(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    let mut from = text.len().saturating_sub(PATH_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text.get(from..).unwrap_or_default().to_owned()
}

/// Returns how many files were mapped and unmapped so far.
pub(crate) fn changes_now() -> (u64, u64) {
    let mut now = (0, 0);
    find_mapped(|file| {
        now = file.changes;
        true
    });
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_paths_keep_their_end() {
        let path = format!("/{}/libx.so", "é".repeat(PATH_BYTES));
        let shown = shown(path.as_bytes());
        assert!(shown.ends_with("/libx.so") && shown.len() <= PATH_BYTES && shown.len() > PATH_BYTES - 2);
        assert_eq!(super::shown(b"/a/\xff.so"), "/a/\u{fffd}.so");
    }
}
