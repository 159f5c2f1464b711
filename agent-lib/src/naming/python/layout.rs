//! Offsets in CPython's structures, in bytes, for each version of CPython.
//!
//! ```text
//!          thread state -> frame     previous  code  first local
//! 3.9      24                        24        32    360
//! 3.10     24                        24        32    352
//! 3.11     56, then 8                48        32    72
//! 3.12     56, then 0                8         0     72
//! 3.13 on  as published at the start of _PyRuntime
//! ```
//!
//! The offsets were measured with `offsetof` on x86-64. agent-lib/tests/suite/frames.rs verifies them on every interpreter that
//! it finds: 3.9.18, 3.10.13, 3.11.7, 3.12.1, 3.13.0, 3.14.10 and 3.15.2 so far. Free-threaded builds are detected and not read
//! (3.14.9). aarch64 has the same structs (LP64, no bit fields), untested. interpreter.rs compares the frames with Python's own
//! list before anything is read directly.

use crate::naming::python::memory::{FAR, Memory, Pointer};

/// CPython's version: major and minor, e.g. (3, 11).
pub(crate) type Version = (u8, u8);

/// Format of a code object's table of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lines {
    /// 3.9: pairs of bytes: instruction step and line step.
    Steps,
    /// 3.10: pairs of bytes: length of a range in bytes and its line step; -128 means no line.
    Ranges,
    /// Line table of 3.11 and later: entries of variable length.
    Locations,
}

/// How a frame stores its current instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CurrentInstruction {
    /// As an index: offset in the frame of a C int, and the unit (bytes) of that number.
    Index(u16, i32),
    /// As a pointer: its offset in the frame, and the offset in the code object of the first instruction.
    Pointer(u16, u16),
}

/// Offsets of fields of CPython's structures, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Layout {
    pub version: Version,
    /// Offset in a thread state of the pointer to its frame, or to a struct with that pointer (`through`).
    pub frame: u16,
    /// Offset of the pointer to the frame in that struct; `None` if the thread state itself has the pointer.
    pub through: Option<u16>,
    /// Bits of a reference that are the address: 3.14 and later keep flags in the lowest two bits.
    pub mask: u64,
    /// Offset in a frame of the pointer to the calling frame.
    pub previous: u16,
    /// Offset in a frame of the pointer to its code object.
    pub code: u16,
    /// Offset in a frame of its first local variable. The other variables follow.
    pub locals: u16,
    pub instruction: CurrentInstruction,
    /// Offset in a frame of its owner, a byte, and the first value that means an internal frame, without Python code.
    pub owner: Option<(u16, u8)>,
    /// Offset in a code object of its name.
    pub code_name: u16,
    /// Offset in a code object of its file's name.
    pub code_file: u16,
    /// Offset in a code object of its first line, a C int.
    pub code_first_line: u16,
    /// Offset in a code object of its table of lines.
    pub code_lines: u16,
    pub lines: Lines,
    /// Offset in an ASCII str of its characters.
    pub text: u16,
    /// Offset in a tuple of its items.
    pub items: u16,
}

/// In every object, the offset of the pointer to the object's type.
pub(crate) const TYPE: u16 = 8;
/// Offset in a tuple, bytes object or str of its length.
pub(crate) const LENGTH: u16 = 16;
/// Offset in a str of the bits that state how its characters are stored.
pub(crate) const TEXT_STATE: u16 = 32;
/// Offset in a bytes object of its data.
pub(crate) const BYTES: u16 = 32;
/// In a cell object, the offset of the pointer to the object that the cell holds.
pub(crate) const CELL: u16 = 16;
/// In a type, the offset of the pointer to the tuple of its bases in method resolution order (`tp_mro`).
pub(crate) const BASES: u16 = 344;

/// Layouts of versions that publish no offsets.
const KNOWN: [Layout; 4] = [IN_3_9, IN_3_10, IN_3_11, IN_3_12];
const IN_3_9: Layout = Layout {
    version: (3, 9),
    frame: 24,
    through: None,
    mask: u64::MAX,
    previous: 24,
    code: 32,
    locals: 360,
    instruction: CurrentInstruction::Index(104, 1),
    owner: None,
    code_name: 112,
    code_file: 104,
    code_first_line: 40,
    code_lines: 120,
    lines: Lines::Steps,
    text: 48,
    items: 24,
};
const IN_3_10: Layout = Layout {
    version: (3, 10),
    locals: 352,
    instruction: CurrentInstruction::Index(96, 2),
    lines: Lines::Ranges,
    ..IN_3_9
};
const IN_3_11: Layout = Layout {
    version: (3, 11),
    frame: 56,
    through: Some(8),
    previous: 48,
    locals: 72,
    instruction: CurrentInstruction::Pointer(56, 184),
    code_name: 128,
    code_file: 112,
    code_first_line: 72,
    code_lines: 136,
    lines: Lines::Locations,
    ..IN_3_9
};
const IN_3_12: Layout = Layout {
    version: (3, 12),
    through: Some(0),
    previous: 8,
    code: 0,
    instruction: CurrentInstruction::Pointer(56, 192),
    owner: Some((70, 3)),
    code_first_line: 68,
    text: 40,
    ..IN_3_11
};

/// Parses "3.11.7 (main, ...": the version, and whether it has a GIL.
pub(crate) fn version(text: &str) -> Option<(Version, bool)> {
    let number = text.split([' ', '+']).next()?;
    let mut parts = number.split('.');
    let version = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some((version, !text.contains("free-threading")))
}

/// Returns the layout of a version, unless it is unknown or inconsistent. `runtime` is the address of _PyRuntime.
pub(crate) fn of(version: Version, memory: &impl Memory, runtime: Option<Pointer>) -> Result<Layout, String> {
    let (major, minor) = version;
    let layout = match version {
        (3, 13..=15) => {
            let runtime = runtime.ok_or_else(|| format!("CPython {major}.{minor} without _PyRuntime"))?;
            published(version, memory, runtime)?
        }
        _ => {
            let known = KNOWN.iter().find(|known| known.version == version);
            *known.ok_or_else(|| format!("this agent does not know CPython {major}.{minor}"))?
        }
    };
    if layout.is_sane() { Ok(layout) } else { Err("inconsistent offsets".to_owned()) }
}

/// Positions in the published table, in words, at which the parts about each structure begin.
struct Parts {
    state: u16,
    frame: u16,
    code: u16,
    object: u16,
    tuple: u16,
    bytes: u16,
    text: u16,
}

const IN_3_13: Parts = Parts { state: 19, frame: 28, code: 34, object: 44, tuple: 50, bytes: 64, text: 67 };
const IN_3_14: Parts = Parts { state: 22, frame: 31, code: 39, object: 50, tuple: 56, bytes: 74, text: 77 };
const IN_3_15: Parts = Parts { state: 22, frame: 39, code: 47, object: 58, tuple: 68, bytes: 86, text: 89 };

/// Reads the published table: a cookie, the version, whether there is no GIL, and a part for each structure. A part is the
/// structure's size and offsets in it. Each of these takes a word.
fn published(version: Version, memory: &impl Memory, runtime: Pointer) -> Result<Layout, String> {
    let word = |index: u16| memory.word(runtime, index * 8).ok_or("_PyRuntime cannot be read");
    if word(0)?.to_ne_bytes() != *b"xdebugpy" {
        return Err("_PyRuntime does not begin with its offsets".to_owned());
    }
    let (major, minor) = (word(1)? >> 24, word(1)? >> 16 & 0xff);
    if (major, minor) != (version.0.into(), version.1.into()) {
        return Err(format!("_PyRuntime belongs to CPython {major}.{minor}"));
    }
    if word(2)? != 0 {
        return Err(NO_GIL.to_owned());
    }
    let (parts, mask) = match version.1 {
        13 => (IN_3_13, u64::MAX),
        14 => (IN_3_14, !3),
        _ => (IN_3_15, !3),
    };
    // Returns the offset at `index` of a part, if a field of `bytes` bytes there is aligned and lies inside of the struct.
    let field = |part: u16, index: u16, bytes: u64| -> Result<u16, &'static str> {
        let (size, offset) = (word(part)?, word(part + index)?);
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= size) && offset % bytes == 0;
        u16::try_from(offset).ok().filter(|_| is_inside).ok_or("inconsistent offsets")
    };
    // The published offsets must equal the constants above.
    let objects = [(parts.object, 1, TYPE), (parts.tuple, 2, LENGTH), (parts.bytes, 1, LENGTH)];
    for (part, index, offset) in objects.into_iter().chain([(parts.text, 2, LENGTH)]) {
        if field(part, index, 8)? != offset {
            return Err("this build of CPython arranges the fields of its objects differently".to_owned());
        }
    }
    // The offsets of characters, bytes and items lie behind the struct or in its last bytes, so `field` would refuse them.
    let text = u16::try_from(word(parts.text + 3)?).unwrap_or(u16::MAX);
    if field(parts.text, 1, 4)? != TEXT_STATE || word(parts.bytes + 2)? != u64::from(BYTES) {
        return Err("this build of CPython arranges the fields of str and bytes differently".to_owned());
    }
    let items = u16::try_from(word(parts.tuple + 1)?).unwrap_or(u16::MAX);
    Ok(Layout {
        version,
        frame: field(parts.state, 4, 8)?,
        through: None,
        mask,
        previous: field(parts.frame, 1, 8)?,
        code: field(parts.frame, 2, 8)?,
        locals: field(parts.frame, 4, 8)?,
        instruction: CurrentInstruction::Pointer(field(parts.frame, 3, 8)?, field(parts.code, 9, 8)?),
        owner: Some((field(parts.frame, 5, 1)?, 3)),
        code_name: field(parts.code, 3, 8)?,
        code_file: field(parts.code, 1, 8)?,
        code_first_line: field(parts.code, 5, 4)?,
        code_lines: field(parts.code, 4, 8)?,
        lines: Lines::Locations,
        text,
        items,
    })
}

/// Error for free-threaded builds, whose other threads may change objects at any time; reading their frames is untested.
pub(crate) const NO_GIL: &str = "CPython without a GIL (free-threaded) is not supported";

impl Layout {
    /// Whether all offsets of 8-byte words are multiples of 8 and within range.
    fn is_sane(&self) -> bool {
        let instruction = match self.instruction {
            CurrentInstruction::Index(at, _) => [at & !7, 0],
            CurrentInstruction::Pointer(at, first) => [at, first & !7],
        };
        let thread = [self.frame, self.through.unwrap_or(0)];
        let frame = [self.previous, self.code, self.locals];
        let code = [self.code_name, self.code_file, self.code_lines];
        let words = [&instruction[..], &thread, &frame, &code, &[self.text, self.items]].concat();
        let is_near = |offset: u16| usize::from(offset) < FAR / 2;
        is_near(self.code_first_line) && words.iter().all(|&word| word % 8 == 0 && is_near(word))
    }

    /// Returns the layouts of all versions, for tests: the published ones as x86-64 publishes them.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Layout> {
        let mut all = KNOWN.to_vec();
        for version in [(3, 13), (3, 14), (3, 15)] {
            let image = tests::image(version, false);
            let memory = tests::Words(&image);
            all.push(of(version, &memory, Pointer::new(tests::BASE)).expect("a layout"));
        }
        all
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const BASE: u64 = 0x5555_0000_0000;

    /// Words at `BASE`.
    #[derive(Debug)]
    pub(crate) struct Words<'a>(pub &'a [u64]);

    impl Memory for Words<'_> {
        fn word(&self, at: Pointer, offset: u16) -> Option<u64> {
            let offset = at.address().checked_sub(BASE)? as usize + usize::from(offset);
            self.0.get(offset / 8).copied()
        }

        fn bytes(&self, _: Pointer, _: u16, _: &mut [u8]) -> bool {
            false
        }
    }

    /// The start of _PyRuntime in 3.13.0, 3.14.10 and 3.15.2 on x86-64, as far as it is read.
    pub(crate) fn image(version: Version, free_threaded: bool) -> Vec<u64> {
        let mut words = vec![0; 96];
        words[0] = u64::from_ne_bytes(*b"xdebugpy");
        words[1] = u64::from(version.0) << 24 | u64::from(version.1) << 16 | 0xf0;
        words[2] = free_threaded.into();
        let mut part =
            |at: u16, fields: &[u64]| words[usize::from(at)..][..fields.len()].copy_from_slice(fields);
        let (parts, state, frame, code, item) = match version.1 {
            13 => (IN_3_13, 304, [80, 8, 0, 56, 72, 70], [208, 112, 120, 128, 136, 68, 52, 96, 104, 200], 24),
            minor => {
                let (parts, state) = if minor == 14 { (IN_3_14, 832) } else { (IN_3_15, 888) };
                (parts, state, [88, 8, 0, 56, 80, 74], [216, 112, 120, 128, 136, 68, 52, 96, 104, 208], 32)
            }
        };
        part(parts.state, &[state, 0, 8, 16, 72, 152, 160, 200, 36]);
        part(parts.frame, &frame);
        part(parts.code, &code);
        part(parts.object, &[16, 8]);
        part(parts.tuple, &[item + 8, item, 16]);
        part(parts.bytes, &[40, 16, 32]);
        part(parts.text, &[64, 32, 16, 40]);
        words
    }

    fn read(version: Version, image: &[u64]) -> Result<Layout, String> {
        of(version, &Words(image), Pointer::new(BASE))
    }

    #[test]
    fn versions_as_interpreters_say_them() {
        assert_eq!(version("3.11.7 (main, Dec  8 2023, 18:56:57) [GCC 12.2.0]"), Some(((3, 11), true)));
        assert_eq!(version("3.14.0rc2+ (heads/3.14"), Some(((3, 14), true)));
        assert_eq!(version("3.13.0 experimental free-threading build (main"), Some(((3, 13), false)));
        assert_eq!(version("3.14.2 free-threading build (main"), Some(((3, 14), false)));
        for odd in ["", "3", "x.y", "3.-1", "3.999"] {
            assert_eq!(version(odd), None, "{odd}");
        }
    }

    #[test]
    fn offsets_are_read_from_what_the_interpreter_publishes() {
        let layout = read((3, 13), &image((3, 13), false)).expect("a layout");
        let few = (layout.frame, layout.previous, layout.code, layout.locals, layout.mask, layout.items);
        assert_eq!(few, (72, 8, 0, 72, u64::MAX, 24));
        assert_eq!((layout.instruction, layout.owner), (CurrentInstruction::Pointer(56, 200), Some((70, 3))));
        let layout = read((3, 14), &image((3, 14), false)).expect("a layout");
        let few = (layout.frame, layout.previous, layout.code, layout.locals, layout.mask, layout.items);
        assert_eq!(few, (72, 8, 0, 80, !3, 32));
        assert_eq!((layout.instruction, layout.owner), (CurrentInstruction::Pointer(56, 208), Some((74, 3))));
    }

    #[test]
    fn what_is_not_known_is_not_guessed() {
        for version in [(2, 7), (3, 7), (3, 8), (3, 16), (4, 0)] {
            assert!(read(version, &image((3, 14), false)).is_err(), "{version:?}");
        }
        assert!(read((3, 15), &image((3, 14), false)).is_err());
        assert_eq!(read((3, 14), &image((3, 14), true)), Err(NO_GIL.to_owned()));
        assert_eq!(read((3, 13), &image((3, 13), true)), Err(NO_GIL.to_owned()));
        assert!(read((3, 13), &image((3, 14), false)).expect_err("another").contains("3.14"));
        assert!(of((3, 13), &Words(&[]), None).is_err());
        assert!(read((3, 13), &[]).is_err());
        assert!(read((3, 13), &image((3, 13), false)[..60]).is_err());
    }

    /// With any corrupt word there is no panic and no offset that the reader would refuse.
    #[test]
    fn a_corrupt_table_gives_no_layout_or_a_sane_one() {
        for version in [(3, 13), (3, 14), (3, 15)] {
            let image = image(version, false);
            for index in 0..image.len() {
                for value in [0, 1, 7, 4096, 1 << 16, 1 << 40, u64::MAX, u64::MAX - 7] {
                    let mut image = image.clone();
                    image[index] = value;
                    if let Ok(layout) = read(version, &image) {
                        assert!(layout.is_sane());
                    }
                }
            }
        }
    }
}
