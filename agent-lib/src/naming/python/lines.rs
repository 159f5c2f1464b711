//! Names untagged blocks after the program's line that allocates them, e.g. `train.py:212 make_buffer`.
//!
//! That line is executed by the innermost frame whose file belongs neither to PyTorch nor to the standard library. So a copy that
//! PyTorch or `copy.deepcopy` makes gets its caller's line. If all frames are in such libraries, the innermost one counts.
//!
//! Lines are cached, as formatting one takes some microseconds. The lock-free cache maps a hash of the code object and the
//! instruction to the line's tag. A code object may be freed and its address reused, so its file and first line are part of the
//! hash. The number of lines with their own tag is bounded; the blocks of further lines share a name.

use crate::base::memfd::LazyTable;
use crate::base::row::mix;
use crate::naming::python::layout::{self, CurrentInstruction};
use crate::naming::python::memory::{Memory, Pointer};
use crate::naming::python::text::{FILE, NAME, TextBuffer, put};
use crate::naming::python::walk::Reader;
use crate::record::names::Names;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

/// Number of entries of the cache: a power of two.
const ENTRIES: usize = 1 << 15;
const MOST_ENTRIES: usize = ENTRIES / 2;
/// Maximum number of lines with a separate tag.
const MOST_LINES: usize = 4096;
/// Number of entries, from the hashed position on, that a lookup tries.
const REACH: usize = 16;
const TAG_BITS: u32 = 20;
/// Bits of an entry that hold the hash; the lower bits hold the tag.
const CHECK: u64 = !0 << TAG_BITS;
/// Values that the cache holds for a code object's hash, in place of a tag: the code is the program's own, or a library's.
const OWN: u32 = 1;
const LIBRARY: u32 = 2;
/// The name that all lines after the first `MOST_LINES` share.
const REST: &[u8] = b"(other lines)";

/// Directories of packages that allocate for their callers.
const PACKAGES: [&[u8]; 5] = [b"torch/", b"functorch/", b"torchgen/", b"triton/", b"gpumem/"];
/// Prefixes of the file names of generated code; such names are meaningless to users.
const GENERATED: [&[u8]; 4] = [b"<frozen ", b"<gpumem", b"<eval_with_key>", b"<torch_package"];

pub(crate) struct Lines {
    entries: LazyTable<AtomicU64, ENTRIES>,
    /// Number of cache entries in use.
    used: AtomicUsize,
    /// Number of lines that have a separate tag, at most `MOST_LINES`.
    lines: AtomicUsize,
}

#[derive(Clone, Copy)]
struct Code {
    at: Pointer,
    hash: u64,
}

impl Lines {
    pub(crate) const fn new() -> Self {
        Lines { entries: LazyTable::new(), used: AtomicUsize::new(0), lines: AtomicUsize::new(0) }
    }

    /// Returns the tag of the line that a thread with this Python state executes in the program's own code, or in a library if no
    /// frame is the program's own. 0 if the thread has no frame or the names are full.
    pub(crate) fn tag<M: Memory>(&self, names: &Names, reader: &Reader<'_, M>, state: u64) -> u32 {
        let mut innermost = None;
        for frame in reader.frames(state) {
            let Some(code) = code_of(reader, frame) else { continue };
            if self.is_own(reader, code) {
                return self.line(names, reader, frame, code);
            }
            innermost = innermost.or(Some((frame, code)));
        }
        innermost.map_or(0, |(frame, code)| self.line(names, reader, frame, code))
    }

    /// Whether a code object is the program's own.
    fn is_own<M: Memory>(&self, reader: &Reader<'_, M>, code: Code) -> bool {
        if let Some(kind) = self.find(code.hash) {
            return kind == OWN;
        }
        let mut room = [0; FILE + 3];
        let mut out = TextBuffer::new(&mut room);
        reader.write_text(code.at, reader.layout.code_file, &mut out);
        let used = out.position() as usize;
        let kind = if is_library(&room[..used]) { LIBRARY } else { OWN };
        self.cache(code.hash, kind);
        kind == OWN
    }

    /// Returns the tag of the line that a frame executes.
    fn line<M: Memory>(&self, names: &Names, reader: &Reader<'_, M>, frame: Pointer, code: Code) -> u32 {
        let at = match reader.layout.instruction {
            CurrentInstruction::Index(at, _) => reader.memory.int(frame, at).map(|at| at as u64),
            CurrentInstruction::Pointer(at, _) => reader.memory.word(frame, at),
        };
        let hash = mix(code.hash, at.unwrap_or(0));
        if let Some(tag) = self.find(hash) {
            return tag;
        }
        let mut room = [0; FILE + NAME + 32];
        let used = write(reader, frame, code.at, &mut room);
        let tag = self.tag_of(names, &room[..used]);
        if tag != 0 && tag >> TAG_BITS == 0 {
            self.cache(hash, tag);
        }
        tag
    }

    /// Returns the tag of a line's text. Several instructions may share a line, so only a new text counts towards `MOST_LINES`.
    #[cold]
    fn tag_of(&self, names: &Names, text: &[u8]) -> u32 {
        if let Some(tag) = names.known(0, text) {
            return tag;
        }
        if self.lines.load(Relaxed) >= MOST_LINES {
            return names.intern(0, REST);
        }
        self.lines.fetch_add(1, Relaxed);
        names.intern(0, text)
    }

    /// Returns the cache's words in which the entry of a hash can be; none before `prepare`.
    fn probes(&self, hash: u64) -> impl Iterator<Item = &'static AtomicU64> {
        let entries = self.entries.get();
        let reach = if entries.is_empty() { 0 } else { REACH };
        (0..reach).map(move |probe| &entries[(hash as usize).wrapping_add(probe) % ENTRIES])
    }

    fn find(&self, hash: u64) -> Option<u32> {
        let entries = self.probes(hash).map(|entry| entry.load(Relaxed)).take_while(|&entry| entry != 0);
        let found = entries.into_iter().find(|entry| entry & CHECK == hash & CHECK)?;
        Some((found & !CHECK) as u32)
    }

    /// Allocates the cache. Not for callbacks. Without it, each lookup formats its line again.
    pub(crate) fn prepare(&self) {
        self.entries.make();
    }

    #[cold]
    fn cache(&self, hash: u64, tag: u32) {
        let entry = hash & CHECK | u64::from(tag);
        if self.used.load(Relaxed) >= MOST_ENTRIES {
            return;
        }
        for place in self.probes(hash) {
            match place.compare_exchange(0, entry, Relaxed, Relaxed) {
                Ok(_) => drop(self.used.fetch_add(1, Relaxed)),
                Err(found) if found & CHECK != entry & CHECK => continue,
                Err(_) => {}
            }
            return;
        }
    }
}

/// Returns the frame's code object; `None` for internal frames of the interpreter.
fn code_of<M: Memory>(reader: &Reader<'_, M>, frame: Pointer) -> Option<Code> {
    let (memory, layout) = (reader.memory, reader.layout);
    let at = reader.code(frame).and_then(Pointer::new)?;
    if memory.word(at, layout::TYPE)? != reader.types.code || reader.internal(frame) {
        return None;
    }
    let (file, first) = (memory.word(at, layout.code_file)?, memory.int(at, layout.code_first_line)?);
    Some(Code { at, hash: mix(mix(at.address(), file), first as u64) })
}

/// Writes `file:line function`, without the file's directories. Returns the number of bytes written.
fn write<M: Memory>(reader: &Reader<'_, M>, frame: Pointer, code: Pointer, room: &mut [u8]) -> usize {
    let mut out = TextBuffer::new(room);
    if !reader.write_text(code, reader.layout.code_file, &mut out) {
        put(&mut out, b"?");
    }
    let used = out.position() as usize;
    let name = out.get_ref()[..used].iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
    out.get_mut().copy_within(name..used, 0);
    out.set_position((used - name) as u64);
    put(&mut out, b":");
    reader.write_line_number(frame, code, &mut out);
    put(&mut out, b" ");
    if !reader.write_text(code, reader.layout.code_name, &mut out) {
        put(&mut out, b"?");
    }
    let used = out.position() as usize;
    // A slash would separate the components of a tag's path.
    out.get_mut()[..used].iter_mut().filter(|byte| **byte == b'/').for_each(|byte| *byte = b'|');
    used
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).rposition(|window| window == part)
}

const PACKAGES_END: &[u8] = b"-packages/";

/// Whether a file belongs to a package of `PACKAGES` or to the standard library, or is generated code; judged by its path.
fn is_library(file: &[u8]) -> bool {
    if let Some(at) = find(file, PACKAGES_END) {
        let package = &file[at + PACKAGES_END.len()..];
        return PACKAGES.iter().any(|name| package.starts_with(name));
    }
    is_installed(file)
}

/// Whether a file belongs to an installed package or to the standard library, or is generated code.
pub(crate) fn is_installed(file: &[u8]) -> bool {
    const VERSION: &[u8] = b"/python3.";
    let is_generated = GENERATED.iter().any(|name| file.starts_with(name));
    if is_generated || [b"/torchinductor_", PACKAGES_END].iter().any(|part| find(file, part).is_some()) {
        return true;
    }
    // e.g. lib/python3.12/copy.py
    let Some(at) = find(file, VERSION) else { return false };
    let is_lib = file[..at].ends_with(b"/lib") || file[..at].ends_with(b"/lib64");
    let version = file[at + VERSION.len()..].split(|&byte| byte == b'/').next().unwrap_or_default();
    is_lib && !version.is_empty() && version.iter().all(|byte| byte.is_ascii_digit() || *byte == b't')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_pytorch_and_of_the_standard_library_are_no_ones_own() {
        let venv = "/home/u/venv/lib/python3.11/site-packages";
        for (file, library) in [
            (format!("{venv}/torch/_tensor.py"), true),
            (format!("{venv}/torchvision/ops.py"), false),
            (format!("{venv}/transformers/cache_utils.py"), false),
            ("/usr/lib/python3/dist-packages/torch/serialization.py".to_owned(), true),
            ("/usr/lib/python3.11/copy.py".to_owned(), true),
            ("/opt/lib64/python3.14t/contextlib.py".to_owned(), true),
            ("/home/u/python3.11/train.py".to_owned(), false),
            ("/home/u/torch/train.py".to_owned(), false),
            ("<frozen runpy>".to_owned(), true),
            ("<stdin>".to_owned(), false),
            ("/tmp/torchinductor_u/ab/cdef.py".to_owned(), true),
            ("train.py".to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(is_library(file.as_bytes()), library, "{file}");
            let installed = library || file.contains("site-packages");
            assert_eq!(is_installed(file.as_bytes()), installed, "{file}");
        }
    }

    #[test]
    fn lines_are_remembered_and_many_share_a_name() {
        let lines = Lines::new();
        lines.cache(mix(1, 2), 3);
        lines.prepare();
        assert_eq!(lines.find(mix(1, 2)), None);
        for number in 0..2 * MOST_ENTRIES as u64 {
            lines.cache(mix(number, 7), 3 + (number % 1000) as u32);
        }
        assert!(lines.used.load(Relaxed) <= MOST_ENTRIES);
        let mut found = 0;
        for number in 0..2 * MOST_ENTRIES as u64 {
            let tag = lines.find(mix(number, 7));
            assert!(tag.is_none_or(|tag| tag == 3 + (number % 1000) as u32));
            found += u32::from(tag.is_some());
        }
        assert!(found > MOST_ENTRIES as u32 * 9 / 10, "{found}");
    }
}
