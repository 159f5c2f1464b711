//! The thread's Python stack as text, for records that want it: a line per frame, the innermost first. Nothing is allocated and nothing
//! of the interpreter called.

use crate::naming::python::layout::{self, Layout, Lines, Place};
use crate::naming::python::memory::{FAR, Memory, Pointer};
use crate::naming::python::walk::Reader;

/// Characters of a function's name.
pub(crate) const NAME: usize = 120;
/// Characters of a path: its end.
pub(crate) const FILE: usize = 160;
/// Bytes of a table of lines that are read.
const TABLE: usize = 1 << 16;

/// Types that are looked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Types {
    /// PyCode_Type.
    pub code: u64,
    /// PyUnicode_Type.
    pub text: u64,
    /// PyBytes_Type.
    pub bytes: u64,
}

/// Room, and how much of it is used.
#[derive(Debug)]
pub(crate) struct Out<'a> {
    room: &'a mut [u8],
    used: usize,
}

impl<'a> Out<'a> {
    /// Empty room.
    pub(crate) fn new(room: &'a mut [u8]) -> Self {
        Out { room, used: 0 }
    }

    /// Room whose first bytes are written already.
    pub(crate) fn behind(room: &'a mut [u8], used: usize) -> Self {
        Out { room, used }
    }

    /// Bytes written.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Adds bytes; whether all of them had room.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> bool {
        let rest = self.room.get_mut(self.used..).unwrap_or_default();
        let count = bytes.len().min(rest.len());
        rest[..count].copy_from_slice(&bytes[..count]);
        self.used += count;
        count == bytes.len()
    }

    /// Adds bytes if all of them have room; whether they had.
    fn put_whole(&mut self, bytes: &[u8]) -> bool {
        self.used + bytes.len() <= self.room.len() && self.put(bytes)
    }

    /// Adds a number without its sign; whether it had room.
    pub(crate) fn number(&mut self, number: i32) -> bool {
        let mut digits = [0; 10];
        let (mut rest, mut at) = (number.unsigned_abs(), digits.len());
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.put(&digits[at..])
    }
}

/// Writes `function (file:line)` per frame; a frame that has no room is left out. Whether all had.
pub(crate) fn stack<M: Memory>(reader: &Reader<'_, M>, types: &Types, state: u64, out: &mut Out<'_>) -> bool {
    for frame in reader.frames(state) {
        let before = out.used;
        if !line(reader, types, frame, out) {
            out.used = before;
            return false;
        }
    }
    true
}

fn line<M: Memory>(reader: &Reader<'_, M>, types: &Types, frame: Pointer, out: &mut Out<'_>) -> bool {
    let (memory, layout) = (reader.memory, reader.layout);
    let code = reader.code(frame).and_then(Pointer::new);
    let Some(code) = code.filter(|&code| is(memory, code, types.code) && !reader.internal(frame)) else {
        return true;
    };
    let text = |at: u16, most: usize, end: bool, out: &mut Out<'_>| match memory.pointer(code, at) {
        Some(text) => write_text(reader, types, text, most, end, out),
        None => out.put(b"?"),
    };
    text(layout.code_name, NAME, false, out)
        && out.put(b" (")
        && text(layout.code_file, FILE, true, out)
        && out.put(b":")
        && match line_number(reader, types, frame, code) {
            Some(number) if number >= 0 => out.number(number),
            _ => out.put(b"?"),
        }
        && out.put(b")\n")
}

fn is(memory: &impl Memory, object: Pointer, kind: u64) -> bool {
    memory.word(object, layout::TYPE) == Some(kind)
}

/// How a str keeps its characters: bytes of each, and where the first is.
fn characters<M: Memory>(reader: &Reader<'_, M>, text: Pointer) -> Option<(usize, u16)> {
    // Behind how it is interned: the width (3 bits), compact, ASCII.
    let state = reader.memory.int(text, layout::TEXT_STATE)?;
    let (width, is_compact, is_ascii) = (state >> 2 & 7, state & 0x20 != 0, state & 0x40 != 0);
    let first = reader.layout.text;
    match (width, is_compact, is_ascii) {
        (1, true, true) => Some((1, first)),
        // Behind what ASCII needs: its length as UTF-8, and the text as that; up to 3.11 another length.
        (1 | 2 | 4, true, false) => {
            Some((width as usize, first + if first == TEXT_UNTIL_3_11 { 24 } else { 16 }))
        }
        _ => None,
    }
}

/// `Layout::text` of CPython up to 3.11.
const TEXT_UNTIL_3_11: u16 = 48;

/// Writes a str as UTF-8, at most `most` characters from its beginning or `end`; `?` for what is none or is not printable. Whether it had
/// room.
pub(crate) fn write_text<M: Memory>(
    reader: &Reader<'_, M>,
    types: &Types,
    text: Pointer,
    most: usize,
    end: bool,
    out: &mut Out<'_>,
) -> bool {
    let memory = reader.memory;
    let len = memory.word(text, layout::LENGTH).and_then(|len| usize::try_from(len).ok());
    let known = characters(reader, text).filter(|_| is(memory, text, types.text));
    let (Some((width, first)), Some(len)) = (known, len.filter(|&len| len < FAR)) else {
        return out.put(b"?");
    };
    if len * width >= FAR / 2 {
        return out.put(b"?");
    }
    let shown = len.min(most).min(FILE);
    let start = if end { len - shown } else { 0 };
    let mut bytes = [0; 4 * FILE];
    let bytes = &mut bytes[..shown * width];
    if !memory.bytes(text, first + (start * width) as u16, bytes) {
        return out.put(b"?");
    }
    let put = |out: &mut Out<'_>, number: &[u8]| {
        let mut word = [0; 4];
        word[..width].copy_from_slice(number);
        let character = char::from_u32(u32::from_le_bytes(word)).filter(|character| is_printable(*character));
        let mut room = [0; 4];
        out.put_whole(character.unwrap_or('?').encode_utf8(&mut room).as_bytes())
    };
    (start == 0 || out.put(b"..."))
        && bytes.chunks_exact(width).all(|number| put(out, number))
        && (end || shown == len || out.put(b"..."))
}

/// Views show by number what acts or hides; here only what no name has.
fn is_printable(character: char) -> bool {
    !character.is_control()
}

/// The line that the frame is at.
pub(crate) fn line_number<M: Memory>(
    reader: &Reader<'_, M>,
    types: &Types,
    frame: Pointer,
    code: Pointer,
) -> Option<i32> {
    let (memory, layout): (_, &Layout) = (reader.memory, reader.layout);
    let at = match layout.place {
        Place::Index(at, unit) => memory.int(frame, at)?.checked_mul(unit)?,
        Place::Instruction(at, first) => {
            let first = code.address() + u64::from(first);
            i32::try_from(memory.word(frame, at)?.checked_sub(first)?).ok()?
        }
    };
    let first = memory.int(code, layout.code_first_line)?;
    let table = memory.pointer(code, layout.code_lines).filter(|&table| is(memory, table, types.bytes))?;
    let len = usize::try_from(memory.word(table, layout::LENGTH)?).ok()?.min(TABLE);
    let mut table = Bytes { memory, at: table.address() + u64::from(layout::BYTES), left: len, window: None };
    let pair = |table: &mut Bytes<'_, M>| Some((i32::from(table.next()?), table.next()? as i8));
    let (mut line, mut end) = (first, 0);
    match layout.lines {
        Lines::Steps => {
            while let Some((step, lines)) = pair(&mut table) {
                end += step;
                if end > at {
                    break;
                }
                line = line.checked_add(lines.into())?;
            }
            Some(line)
        }
        Lines::Ranges => loop {
            let (length, lines) = pair(&mut table)?;
            end += length;
            if lines != -128 {
                line = line.checked_add(lines.into())?;
            }
            if end > at {
                return (lines != -128).then_some(line);
            }
        },
        Lines::Locations => {
            let mut head = table.next()?;
            loop {
                let form = head >> 3 & 15;
                end += (i32::from(head & 7) + 1) * 2;
                let mut rest = 0; // of the entry: the first number in it
                let mut shift = 0;
                let mut open = matches!(form, 13 | 14);
                let next = loop {
                    let byte = table.next();
                    match byte {
                        Some(byte) if byte < 0x80 => {
                            if open && shift < 30 {
                                rest |= i32::from(byte & 63) << shift;
                                shift += 6;
                                open = byte & 64 != 0;
                            }
                        }
                        other => break other,
                    }
                };
                let step = match form {
                    10..=12 => i32::from(form) - 10,
                    13 | 14 => (rest >> 1) * if rest & 1 == 0 { 1 } else { -1 },
                    _ => 0,
                };
                line = line.checked_add(step)?;
                if end > at {
                    return (form != 15).then_some(line);
                }
                head = next?;
            }
        }
    }
}

/// Bytes one after the other.
struct Bytes<'a, M> {
    memory: &'a M,
    at: u64,
    left: usize,
    window: Option<[u8; 8]>,
}

impl<M: Memory> Bytes<'_, M> {
    fn next(&mut self) -> Option<u8> {
        self.left = self.left.checked_sub(1)?;
        let within = (self.at & 7) as usize;
        if within == 0 || self.window.is_none() {
            // Words: the bytes begin at a multiple of 8, and what follows them in their word is the object's own.
            let word = self.memory.word(Pointer::new(self.at & !7)?, 0)?;
            self.window = Some(word.to_ne_bytes());
        }
        self.at += 1;
        self.window.map(|window| window[within])
    }
}
