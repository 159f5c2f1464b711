//! Writes the calling thread's Python stack as text, the innermost frame first. Allocates nothing and calls nothing of the interpreter.

use crate::naming::python::layout::{self, CurrentInstruction, Layout, Lines};
use crate::naming::python::lines;
use crate::naming::python::memory::{FAR, Memory, Pointer};
use crate::naming::python::walk::Reader;
use std::io::{Cursor, Write};

/// Maximum length of a function's name, in characters.
pub(crate) const NAME: usize = 120;
/// Maximum length of a path, in characters; only the end of a longer path is kept.
pub(crate) const FILE: usize = 160;
/// Maximum number of frames of a stack.
const MAX_STACK: usize = 1024;
/// Ends of the names of PyTorch's files whose functions call the engine of the backward pass.
const BACKWARD_FILES: [&[u8]; 2] = [b"/torch/autograd/graph.py", b"/torch/autograd/__init__.py"];
/// Maximum number of bytes of a table of lines to read.
const TABLE: usize = 1 << 16;

/// Addresses of PyCode_Type, PyUnicode_Type, PyBytes_Type and PyCell_Type.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Types {
    pub code: u64,
    pub text: u64,
    pub bytes: u64,
    pub cell: u64,
}

/// A buffer that is filled with text. Its position is the number of bytes written.
pub(crate) type TextBuffer<'a> = Cursor<&'a mut [u8]>;

/// Appends as many bytes as there is room for; returns whether all fitted.
pub(crate) fn put(out: &mut TextBuffer<'_>, bytes: &[u8]) -> bool {
    out.write_all(bytes).is_ok()
}

/// Texts that follow the function, the file and the line of a frame.
pub(crate) type Separators = [&'static [u8]; 3];
/// Separators for lines of the form `function (file:line)`.
pub(crate) const SENTENCE: Separators = [b" (", b":", b")\n"];
/// Separators for lines of the form `function<TAB>file<TAB>line`. Names have no tabs: control characters are written as `?`.
pub(crate) const COLUMNS: Separators = [b"\t", b"\t", b"\n"];

impl<M: Memory> Reader<'_, M> {
    /// Writes a line for each frame, the innermost first. Once three quarters of the buffer are full, writes only frames of the
    /// program's own files. So the program's line is there even below many frames of libraries.
    pub(crate) fn write_stack(&self, state: u64, separators: Separators, out: &mut TextBuffer<'_>) {
        let for_all = out.get_ref().len() / 4 * 3;
        for frame in self.frames(state).up_to(MAX_STACK) {
            let before = out.position();
            let fits = self.write_frame(frame, separators, out);
            if !fits || out.position() as usize > for_all && self.is_installed(frame) {
                out.set_position(before);
            }
        }
    }

    /// Whether the frame's file belongs to an installed package or to Python itself.
    fn is_installed(&self, frame: Pointer) -> bool {
        let mut room = [0; FILE + 3];
        lines::is_installed(self.file(frame, &mut room))
    }

    /// Returns the end of the path of the frame's file; empty without a code object.
    fn file<'b>(&self, frame: Pointer, room: &'b mut [u8; FILE + 3]) -> &'b [u8] {
        let mut out = TextBuffer::new(room.as_mut_slice());
        if let Some(code) = self.code(frame).and_then(Pointer::new) {
            self.write_text(code, self.layout.code_file, &mut out);
        }
        let used = out.position() as usize;
        &room[..used]
    }

    /// Returns whether the innermost Python function of a thread is the one that waits for PyTorch's backward pass.
    pub(crate) fn waits_for_backward(&self, state: u64) -> bool {
        let is_function = |frame: &Pointer| {
            let code = self.code(*frame).and_then(Pointer::new);
            code.is_some_and(|code| self.is(code, self.types.code)) && !self.internal(*frame)
        };
        let mut room = [0; FILE + 3];
        let innermost = self.frames(state).find(is_function);
        innermost.is_some_and(|frame| {
            let file = self.file(frame, &mut room);
            BACKWARD_FILES.iter().any(|end| file.ends_with(end))
        })
    }

    fn write_frame(&self, frame: Pointer, [file, line, end]: Separators, out: &mut TextBuffer<'_>) -> bool {
        let code = self.code(frame).and_then(Pointer::new);
        let Some(code) = code.filter(|&code| self.is(code, self.types.code) && !self.internal(frame)) else {
            return true;
        };
        self.write_text(code, self.layout.code_name, out)
            && put(out, file)
            && self.write_text(code, self.layout.code_file, out)
            && put(out, line)
            && self.write_line_number(frame, code, out)
            && put(out, end)
    }

    /// Writes the number of the frame's current line, or `?` if it is unknown.
    pub(crate) fn write_line_number(&self, frame: Pointer, code: Pointer, out: &mut TextBuffer<'_>) -> bool {
        match self.line_number(frame, code) {
            Some(number) if number >= 0 => write!(out, "{number}").is_ok(),
            _ => put(out, b"?"),
        }
    }

    fn is(&self, object: Pointer, kind: u64) -> bool {
        self.memory.word(object, layout::TYPE) == Some(kind)
    }

    /// Returns the length of a str in characters, the number of bytes for each character, and the offset of the first one.
    fn characters(&self, text: Pointer) -> Option<(usize, usize, u16)> {
        let len = usize::try_from(self.memory.word(text, layout::LENGTH)?).ok().filter(|&len| len < FAR)?;
        // The state of interning is followed by the width (3 bits), and whether the str is compact and ASCII.
        let state = self.memory.int(text, layout::TEXT_STATE)?;
        let (width, is_compact, is_ascii) = (state >> 2 & 7, state & 0x20 != 0, state & 0x40 != 0);
        let is_known = matches!((width, is_compact, is_ascii), (1, true, true) | (1 | 2 | 4, true, false));
        // Without ASCII, the UTF-8 length and the UTF-8 pointer precede the characters; up to 3.11 another length does, too.
        let after_header = match (is_ascii, self.layout.text == TEXT_UNTIL_3_11) {
            (true, _) => 0,
            (false, true) => 24,
            (false, false) => 16,
        };
        let is_known = is_known && self.is(text, self.types.text) && len * (width as usize) < FAR / 2;
        is_known.then_some((len, width as usize, self.layout.text + after_header))
    }

    /// Writes the str that a code object holds at an offset as UTF-8: the beginning of its name, or the end of its file's name.
    /// Writes `?` for control characters, invalid characters and an invalid str. Returns whether the text fitted.
    pub(crate) fn write_text(&self, code: Pointer, offset: u16, out: &mut TextBuffer<'_>) -> bool {
        let text = self.memory.pointer(code, offset);
        let characters = text.and_then(|text| Some((text, self.characters(text)?)));
        let Some((text, (len, width, first))) = characters else { return put(out, b"?") };
        let is_file = offset == self.layout.code_file;
        let count = len.min(if is_file { FILE } else { NAME });
        let start = if is_file { len - count } else { 0 };
        let mut bytes = [0; 4 * FILE];
        let bytes = &mut bytes[..count * width];
        if !self.memory.bytes(text, first + (start * width) as u16, bytes) {
            return put(out, b"?");
        }
        let put_character = |out: &mut TextBuffer<'_>, number: &[u8]| {
            let mut word = [0; 4];
            word[..width].copy_from_slice(number);
            // No name contains control characters. The views escape other characters that could be misleading.
            let character = char::from_u32(u32::from_le_bytes(word)).filter(|found| !found.is_control());
            let room = out.get_ref().len() - out.position() as usize;
            let character = character.unwrap_or('?');
            character.len_utf8() <= room && put(out, character.encode_utf8(&mut [0; 4]).as_bytes())
        };
        (start == 0 || put(out, b"..."))
            && bytes.chunks_exact(width).all(|number| put_character(out, number))
            && (is_file || count == len || put(out, b"..."))
    }

    /// Returns the number of the frame's current line; `None` if it is unknown.
    pub(crate) fn line_number(&self, frame: Pointer, code: Pointer) -> Option<i32> {
        let (memory, layout): (_, &Layout) = (self.memory, self.layout);
        let at = match layout.instruction {
            CurrentInstruction::Index(at, unit) => memory.int(frame, at)?.checked_mul(unit)?,
            CurrentInstruction::Pointer(at, first) => {
                let first = code.address() + u64::from(first);
                i32::try_from(memory.word(frame, at)?.checked_sub(first)?).ok()?
            }
        };
        let first = memory.int(code, layout.code_first_line)?;
        let table = memory.pointer(code, layout.code_lines).filter(|&at| self.is(at, self.types.bytes))?;
        let len = usize::try_from(memory.word(table, layout::LENGTH)?).ok()?.min(TABLE);
        // Reads whole words: the bytes begin at a multiple of 8, and the object's memory reaches to the end of their last 8.
        let start = table.address() + u64::from(layout::BYTES);
        let words = (start..).step_by(8).map_while(|at| memory.word(Pointer::new(at)?, 0));
        let mut table = words.flat_map(u64::to_ne_bytes).take(len);
        let mut pair = || Some((i32::from(table.next()?), table.next()? as i8));
        let (mut line, mut end) = (first, 0);
        match layout.lines {
            Lines::Steps => {
                while let Some((step, lines)) = pair() {
                    end += step;
                    if end > at {
                        break;
                    }
                    line = line.checked_add(lines.into())?;
                }
                Some(line)
            }
            Lines::Ranges => loop {
                let (length, lines) = pair()?;
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
                    // The first number of an entry of form 13 or 14, in groups of 6 bits. Bit 7 marks the next entry's head.
                    let (mut number, mut shift) = (0, 0);
                    let mut is_open = matches!(form, 13 | 14);
                    let next = loop {
                        match table.next() {
                            Some(byte) if byte < 0x80 => {
                                if is_open && shift < 30 {
                                    number |= i32::from(byte & 63) << shift;
                                    shift += 6;
                                    is_open = byte & 64 != 0;
                                }
                            }
                            other => break other,
                        }
                    };
                    let step = match form {
                        10..=12 => i32::from(form) - 10,
                        13 | 14 => (number >> 1) * if number & 1 == 0 { 1 } else { -1 },
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
}

/// `Layout::text` of CPython up to 3.11.
const TEXT_UNTIL_3_11: u16 = 48;
