//! Proves, in each process, that the layout is right: compares the frames that the walk finds with Python's list for the same
//! thread. Memory is read through the kernel, so a wrong layout causes an error and not a fault.

use crate::naming::python::memory::{Memory, Pointer};
use crate::naming::python::walk::Reader;

/// Maximum number of frames to compare.
pub(crate) const MOST: usize = 64;
/// Minimum number of frames: with fewer, the check does not show that the walk follows the chain of frames.
const LEAST: usize = 4;

/// The calling thread's frames according to Python, the innermost first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Said<'a> {
    pub codes: &'a [u64],
    /// Their first local variables; 0 where they are not compared.
    pub firsts: &'a [u64],
    /// Their lines; 0 where they are not compared.
    pub lines: &'a [i32],
}

impl Said<'_> {
    /// Converts the C API's arguments.
    ///
    /// # Safety
    /// Each pointer must be null or have `count` elements, which outlive the result.
    pub(crate) unsafe fn new(codes: *const u64, firsts: *const u64, lines: *const i32, count: u64) -> Self {
        // SAFETY: the caller guarantees the pointers.
        unsafe fn of<'a, T>(at: *const T, count: u64) -> &'a [T] {
            let count = usize::try_from(count).unwrap_or(0).min(1 << 16);
            // SAFETY: the caller guarantees the pointers.
            if at.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(at, count) } }
        }
        // SAFETY: the caller guarantees the pointers.
        unsafe { Said { codes: of(codes, count), firsts: of(firsts, count), lines: of(lines, count) } }
    }
}

/// Compares the frames with Python's list; returns the first difference.
pub(crate) fn check<M: Memory>(reader: &Reader<'_, M>, state: u64, said: Said<'_>) -> Result<(), String> {
    let count = said.codes.len();
    let compared = said.firsts.iter().filter(|&&first| first != 0).count();
    if count < LEAST || compared == 0 {
        return Err(format!("only {count} frames to compare, {compared} with a variable"));
    }
    let mut frames = reader.frames(state).filter(|&frame| !reader.internal(frame));
    for index in 0..count.min(MOST) {
        let wrong = |what: &str| format!("frame {index} of {count}: {what}");
        let frame = frames.next().ok_or_else(|| wrong("the chain of frames ends"))?;
        let code = reader.code(frame);
        if code != said.codes.get(index).copied() {
            return Err(wrong("another code object"));
        }
        let first = said.firsts.get(index).copied().unwrap_or(0);
        if first != 0 && reader.local(frame, 0) != Some(first) {
            return Err(wrong("another first variable"));
        }
        let code = code.and_then(Pointer::new).ok_or_else(|| wrong("no code object"))?;
        if reader.memory.word(code, crate::naming::python::layout::TYPE) != Some(reader.types.code) {
            return Err(wrong("its code is of another type"));
        }
        let line = said.lines.get(index).copied().unwrap_or(0);
        if line != 0 {
            let found = reader.line_number(frame, code);
            if found != Some(line) {
                return Err(wrong(&format!("line {found:?}, not {line}")));
            }
        }
    }
    match frames.next() {
        Some(_) if count < MOST => Err(format!("more frames than {count}")),
        _ => Ok(()),
    }
}
