//! Lists the files that the dynamic loader has mapped. The loader holds its lock meanwhile, so nothing is allocated then.

use crate::base::elf;
use crate::base::loaded_file::{MappedFile, find_mapped};

/// Maximum length of a path in bytes; only the end of a longer path is kept.
pub(crate) const PATH_BYTES: usize = 1024;

/// A mapped file: its address range, and the range of its path in `Collection::names`.
pub(crate) struct Object {
    name: (usize, usize),
    pub start: usize,
    pub end: usize,
}

pub(crate) struct Segment {
    pub start: usize,
    pub end: usize,
    /// Address range of the functions in the segment; empty if it contains only data.
    pub code: (usize, usize),
    /// Index in `Collection::objects` of the file that the segment belongs to.
    pub object: usize,
}

/// List of all mapped files. Its vectors never grow beyond the capacity that they were made with.
pub(crate) struct Collection {
    pub objects: Vec<Object>,
    pub segments: Vec<Segment>,
    names: Vec<u8>,
    full: bool,
    /// Number of files mapped, and of files unmapped, since the process started.
    pub changes: (u64, u64),
}

impl Collection {
    /// Lists all mapped files; starts again with larger vectors if they were too small.
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

    /// Adds a file; returns false if the vectors have no room for it.
    fn add(&mut self, file: &MappedFile<'_>) -> bool {
        self.changes = file.changes;
        let (headers, base) = (file.image.headers, file.image.base);
        let loads = headers.iter().filter(|header| header.p_type == libc::PT_LOAD && header.p_memsz > 0);
        let room = self.segments.len() + loads.clone().count() <= self.segments.capacity()
            && self.names.len() + file.path.len() <= self.names.capacity()
            && self.objects.len() < self.objects.capacity();
        if !room {
            self.full = true;
            return false;
        }
        let range = |header: &libc::Elf64_Phdr| {
            let at = base.wrapping_add(header.p_vaddr as usize);
            (at & !4095, at.wrapping_add(header.p_memsz as usize))
        };
        let start = loads.clone().map(|header| range(header).0).min().unwrap_or(0);
        let end = loads.clone().map(|header| range(header).1).max().unwrap_or(0);
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
        let (first, last) = functions.unwrap_or((start, end));
        for header in loads {
            let (start, end) = range(header);
            let runs = header.p_flags & libc::PF_X != 0;
            let code = if runs { (first.max(start), last.min(end)) } else { (0, 0) };
            self.segments.push(Segment { start, end, code, object: self.objects.len() });
        }
        let from = self.names.len();
        self.names.extend_from_slice(file.path);
        self.objects.push(Object { name: (from, self.names.len()), start, end });
        true
    }

    /// Returns the path of the file at `index` of `objects`. The file at 0 is the program.
    pub(crate) fn path(&self, index: usize) -> String {
        use std::os::unix::ffi::OsStrExt;
        let (from, to) = self.objects[index].name;
        match (self.names.get(from..to).unwrap_or_default(), index) {
            ([], 0) => std::fs::read_link("/proc/self/exe")
                .map_or_else(|_| "(program)".to_owned(), |path| path_text(path.as_os_str().as_bytes())),
            ([], _) => "linux-vdso".to_owned(),
            (name, _) => path_text(name),
        }
    }
}

/// Converts a path to text; keeps only the end of a long one.
fn path_text(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    let mut from = text.len().saturating_sub(PATH_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text.get(from..).unwrap_or_default().to_owned()
}

/// Returns the number of files mapped, and of files unmapped, since the process started.
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
        let text = path_text(path.as_bytes());
        assert!(text.ends_with("/libx.so") && text.len() <= PATH_BYTES && text.len() > PATH_BYTES - 2);
        assert_eq!(path_text(b"/a/\xff.so"), "/a/\u{fffd}.so");
    }
}
