//! Executes a pickle on a stack machine. Opcodes that name or call code are rejected (opcode.rs).
//!
//! No function is recursive, so a deeply nested file cannot exhaust the stack. Memory is at most some 24 bytes for each byte of
//! the file, and never more than [`MAX_MEMORY_BYTES`]. If the file claims a length, memory is allocated only as the bytes are
//! read.

use super::arena::{Arena, Full, Kind, NONE, Ref, reserve};
use super::bytes::{Bytes, Fault};
use super::opcode::{has_name, op, refusal};
use gpumem_model::escape::escape;
use std::io::Read;
use std::str::FromStr;

/// Maximum memory in bytes for the values, the stack and the memo (values stored for later use) of one file together.
pub(super) const MAX_MEMORY_BYTES: u64 = 4 << 30;
const MAX_PROTOCOL: u64 = 5;
/// Number of opcodes between two checks of the memory limit. Opcodes with text check the limit themselves.
const CHECK_EVERY: u32 = 1024;
/// Marks a memo entry without a value.
const UNUSED: Ref = Ref::MAX;

/// Result of running a pickle: all values, and `root`, the value at the top of the stack at the end.
#[derive(Debug)]
pub(super) struct Unpickled {
    pub arena: Arena,
    pub root: Ref,
    /// Length of the pickle in bytes.
    pub bytes: u64,
    /// Whether the file continues after the pickle.
    pub has_more: bool,
}

/// Runs the pickle at the beginning of the file.
pub(super) fn unpickle(reader: impl Read, max_memory_bytes: u64) -> Result<Unpickled, Fault> {
    let mut machine = Machine {
        bytes: Bytes::new(reader),
        arena: Arena::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        piece: Vec::new(),
        max_memory_bytes,
    };
    let mut until_check = CHECK_EVERY;
    loop {
        let at = machine.bytes.offset();
        let Some(opcode) = machine.bytes.next()? else {
            return Err(machine.bytes.bad("the file ends here, before the pickle does: it was cut off"));
        };
        if opcode == op::STOP {
            break;
        }
        machine.step(opcode, at)?;
        until_check -= 1;
        if until_check == 0 {
            until_check = CHECK_EVERY;
            machine.check_memory()?;
        }
    }
    let root = machine.pop()?;
    let bytes = machine.bytes.offset();
    let has_more = machine.bytes.has_more()?;
    Ok(Unpickled { arena: machine.arena, root, bytes, has_more })
}

struct Machine<R> {
    bytes: Bytes<R>,
    arena: Arena,
    stack: Vec<Ref>,
    /// Height that the stack had at each mark. A mark is set before the items of a container are pushed.
    marks: Vec<u32>,
    /// Values that the pickle stored for later use, by their number.
    memo: Vec<Ref>,
    /// Bytes of the string or number that is being read.
    piece: Vec<u8>,
    max_memory_bytes: u64,
}

impl<R: Read> Machine<R> {
    fn check_memory(&self) -> Result<(), Fault> {
        let index_bytes =
            (self.stack.len() + self.marks.len() + self.memo.len()) as u64 * size_of::<Ref>() as u64;
        if self.arena.bytes() + index_bytes > self.max_memory_bytes {
            let mib = self.max_memory_bytes >> 20;
            return Err(self.bytes.bad(format!("its values take more than {mib} MiB of memory: too large")));
        }
        Ok(())
    }

    fn out_of_memory(&self) -> Fault {
        let mib = self.arena.bytes() >> 20;
        self.bytes.bad(format!("more values than there is memory for, after {mib} MiB of them"))
    }

    /// Pushes a new value. `create` gets the arena, and the bytes that were read last.
    fn push_new(&mut self, create: impl FnOnce(&mut Arena, &[u8]) -> Result<Ref, Full>) -> Result<(), Fault> {
        let value = create(&mut self.arena, &self.piece).map_err(|Full| self.out_of_memory())?;
        self.push(value)
    }

    fn push(&mut self, value: Ref) -> Result<(), Fault> {
        reserve(&mut self.stack, 1).map_err(|Full| self.out_of_memory())?;
        self.stack.push(value);
        Ok(())
    }

    /// Returns the height of the stack at the last mark. Opcodes must not take items below it.
    fn floor(&self) -> usize {
        self.marks.last().map_or(0, |&mark| mark as usize)
    }

    fn pop(&mut self) -> Result<Ref, Fault> {
        let found = if self.stack.len() > self.floor() { self.stack.pop() } else { None };
        found.ok_or_else(|| self.bytes.bad("an opcode takes a value, and there is none"))
    }

    fn top(&self) -> Result<Ref, Fault> {
        let found = if self.stack.len() > self.floor() { self.stack.last().copied() } else { None };
        found.ok_or_else(|| self.bytes.bad("an opcode needs a value, and there is none"))
    }

    /// Removes the last mark and returns the stack position of the first item after it.
    fn unmark(&mut self) -> Result<usize, Fault> {
        let mark = self.marks.pop().map(|mark| mark as usize).filter(|&mark| mark <= self.stack.len());
        mark.ok_or_else(|| self.bytes.bad("an opcode needs a mark, and there is none"))
    }

    /// Moves the stack's items from position `from` on into `container`.
    fn fill(&mut self, container: Ref, from: usize) -> Result<(), Fault> {
        let items = self.stack.get(from..).unwrap_or_default();
        if matches!(self.arena.kind(container), Some(Kind::Dict)) && items.len() % 2 != 0 {
            return Err(self.bytes.bad("a dict gets a key without a value"));
        }
        let filled = self.arena.fill(container, items);
        self.stack.truncate(from);
        filled.map_err(|Full| self.out_of_memory())
    }

    /// Creates a container of the stack's items from position `from` on.
    fn gather(&mut self, kind: Kind, from: usize) -> Result<(), Fault> {
        let container = self.arena.new_container(kind).map_err(|Full| self.out_of_memory())?;
        self.fill(container, from)?;
        self.push(container)
    }

    fn gather_last(&mut self, kind: Kind, count: usize) -> Result<(), Fault> {
        match self.stack.len().checked_sub(count).filter(|&from| from >= self.floor()) {
            Some(from) => self.gather(kind, from),
            None => Err(self.bytes.bad("a tuple takes more values than there are")),
        }
    }

    /// Adds the stack's items from position `from` on to the container below them.
    fn add(&mut self, from: usize, kind: Kind) -> Result<(), Fault> {
        let below = from.checked_sub(1).filter(|&below| below >= self.floor());
        let container = below.and_then(|below| self.stack.get(below)).copied();
        match container {
            Some(container) if self.arena.kind(container) == Some(kind) => self.fill(container, from),
            Some(other) => {
                let what = self.arena.describe(other);
                Err(self.bytes.bad(format!("an opcode puts something into {what} as if it were a {kind:?}")))
            }
            None => Err(self.bytes.bad("an opcode puts something into a container, and there is none")),
        }
    }

    fn gather_marked(&mut self, kind: Kind) -> Result<(), Fault> {
        let from = self.unmark()?;
        self.gather(kind, from)
    }

    fn add_marked(&mut self, kind: Kind) -> Result<(), Fault> {
        let from = self.unmark()?;
        self.add(from, kind)
    }

    fn put(&mut self, place: u64) -> Result<(), Fault> {
        let value = self.top()?;
        // Writers number memo entries from 0 on, so an entry's number is less than the number of bytes so far.
        if place > self.bytes.offset() {
            return Err(self.bytes.bad(format!("memo place {place} is further than the file is long")));
        }
        let place = place as usize;
        if place >= self.memo.len() {
            let more = place + 1 - self.memo.len();
            reserve(&mut self.memo, more).map_err(|Full| self.out_of_memory())?;
            self.memo.resize(place + 1, UNUSED);
        }
        if let Some(slot) = self.memo.get_mut(place) {
            *slot = value;
        }
        Ok(())
    }

    fn get(&mut self, place: u64) -> Result<(), Fault> {
        let value = usize::try_from(place).ok().and_then(|place| self.memo.get(place)).copied();
        match value.filter(|&value| value != UNUSED) {
            Some(value) => self.push(value),
            None => Err(self.bytes.bad(format!("memo place {place} has no value"))),
        }
    }

    fn bad_number(&self) -> Fault {
        self.bytes.bad("a line that should be a number is not a number")
    }

    fn line_number<T: FromStr>(&mut self) -> Result<T, Fault> {
        self.bytes.line(&mut self.piece)?;
        let number = std::str::from_utf8(&self.piece).ok().and_then(|text| text.trim().parse().ok());
        number.ok_or_else(|| self.bad_number())
    }

    fn text(&mut self, len: u64) -> Result<(), Fault> {
        self.bytes.piece(len, &mut self.piece)?;
        self.push_new(|arena, piece| arena.new_text(piece))?;
        self.check_memory()
    }

    fn skip_bytes(&mut self, len: u64) -> Result<(), Fault> {
        self.bytes.piece(len, &mut self.piece)?;
        self.push_new(|arena, _| arena.new_bytes())
    }

    fn int(&mut self, value: i64) -> Result<(), Fault> {
        self.push_new(|arena, _| arena.new_int(Some(value)))
    }

    /// Reads an integer of `len` bytes in two's complement.
    fn long(&mut self, len: u64) -> Result<(), Fault> {
        self.bytes.piece(len, &mut self.piece)?;
        let sign = if self.piece.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
        let mut low = [sign; 8];
        self.piece.iter().zip(&mut low).for_each(|(from, to)| *to = *from);
        let value = i64::from_le_bytes(low);
        let fits = self.piece.iter().skip(8).all(|&byte| byte == sign) && (value < 0) == (sign != 0);
        self.push_new(|arena, _| arena.new_int(fits.then_some(value)))
    }

    /// Reads a decimal integer (opcodes INT and LONG).
    fn decimal(&mut self) -> Result<(), Fault> {
        self.bytes.line(&mut self.piece)?;
        let text = String::from_utf8_lossy(&self.piece);
        let digits = text.trim().trim_end_matches('L');
        let is_number = digits.trim_start_matches('-').bytes().all(|byte| byte.is_ascii_digit());
        match (digits, digits.parse()) {
            ("00", _) => self.push(Arena::bool(false)),
            ("01", _) => self.push(Arena::bool(true)),
            (_, Ok(value)) => self.int(value),
            (_, Err(_)) if is_number && !digits.is_empty() => self.push_new(|arena, _| arena.new_int(None)),
            _ => Err(self.bad_number()),
        }
    }

    fn float_line(&mut self) -> Result<(), Fault> {
        let number = self.line_number()?;
        self.push_new(|arena, _| arena.new_float(number))
    }

    /// Reads a text of protocol 0. With `is_quoted` it is a quoted string of Python 2; its escapes are not decoded, because names
    /// have none. Otherwise it is Latin-1 with `\u` escapes.
    fn text_line(&mut self, is_quoted: bool) -> Result<(), Fault> {
        self.bytes.line(&mut self.piece)?;
        let has_quotes = matches!(self.piece.as_slice(), [b'\'', .., b'\''] | [b'"', .., b'"']);
        if is_quoted && !has_quotes {
            return Err(self.bytes.bad("a string without its quotes"));
        }
        self.push_new(|arena, piece| match piece {
            [_, inner @ .., _] if is_quoted => arena.new_text(inner),
            piece => arena.new_text(unescaped(piece).as_bytes()),
        })?;
        self.check_memory()
    }

    /// Reads the number that follows an opcode: a length, a memo place or a small integer. Returns 0 if the opcode has none.
    fn argument(&mut self, opcode: u8) -> Result<u64, Fault> {
        Ok(match opcode {
            op::BINGET | op::BINPUT | op::BININT1 | op::LONG1 | op::PROTO => self.bytes.byte()?.into(),
            op::SHORT_BINUNICODE | op::SHORT_BINSTRING | op::SHORT_BINBYTES => self.bytes.byte()?.into(),
            op::BININT2 => u16::from_le_bytes(self.bytes.array()?).into(),
            op::LONG_BINGET | op::LONG_BINPUT | op::BININT | op::LONG4 => self.four_bytes()?,
            op::BINUNICODE | op::BINSTRING | op::BINBYTES => self.four_bytes()?,
            op::BINUNICODE8 | op::BINBYTES8 | op::BYTEARRAY8 | op::FRAME => {
                u64::from_le_bytes(self.bytes.array()?)
            }
            op::GET | op::PUT => self.line_number()?,
            _ => 0,
        })
    }

    fn four_bytes(&mut self) -> Result<u64, Fault> {
        Ok(u32::from_le_bytes(self.bytes.array()?).into())
    }

    fn step(&mut self, opcode: u8, at: u64) -> Result<(), Fault> {
        let argument = self.argument(opcode)?;
        match opcode {
            op::BINGET | op::LONG_BINGET | op::GET => self.get(argument),
            op::MEMOIZE => self.put(self.memo.len() as u64),
            op::BINPUT | op::LONG_BINPUT | op::PUT => self.put(argument),
            op::MARK => {
                let height = u32::try_from(self.stack.len()).map_err(|_| self.out_of_memory())?;
                reserve(&mut self.marks, 1).map_err(|Full| self.out_of_memory())?;
                self.marks.push(height);
                Ok(())
            }
            op::EMPTY_DICT => self.gather_last(Kind::Dict, 0),
            op::EMPTY_LIST => self.gather_last(Kind::List, 0),
            op::EMPTY_TUPLE => self.gather_last(Kind::Tuple, 0),
            op::EMPTY_SET => self.gather_last(Kind::Set, 0),
            op::SETITEMS => self.add_marked(Kind::Dict),
            op::APPENDS => self.add_marked(Kind::List),
            op::ADDITEMS => self.add_marked(Kind::Set),
            op::SETITEM => self.add(self.stack.len().saturating_sub(2), Kind::Dict),
            op::APPEND => self.add(self.stack.len().saturating_sub(1), Kind::List),
            op::DICT => self.gather_marked(Kind::Dict),
            op::LIST => self.gather_marked(Kind::List),
            op::TUPLE => self.gather_marked(Kind::Tuple),
            op::FROZENSET => self.gather_marked(Kind::Set),
            op::TUPLE1 => self.gather_last(Kind::Tuple, 1),
            op::TUPLE2 => self.gather_last(Kind::Tuple, 2),
            op::TUPLE3 => self.gather_last(Kind::Tuple, 3),
            op::BININT1 | op::BININT2 => self.int(argument as i64),
            op::BININT => self.int((argument as u32 as i32).into()),
            op::LONG1 | op::LONG4 => self.long(argument),
            op::INT | op::LONG => self.decimal(),
            op::BINFLOAT => {
                let value = f64::from_be_bytes(self.bytes.array()?);
                self.push_new(|arena, _| arena.new_float(value))
            }
            op::FLOAT => self.float_line(),
            op::NONE => self.push(NONE),
            op::NEWTRUE => self.push(Arena::bool(true)),
            op::NEWFALSE => self.push(Arena::bool(false)),
            op::SHORT_BINUNICODE | op::SHORT_BINSTRING => self.text(argument),
            op::BINUNICODE | op::BINSTRING | op::BINUNICODE8 => self.text(argument),
            op::STRING => self.text_line(true),
            op::UNICODE => self.text_line(false),
            op::SHORT_BINBYTES | op::BINBYTES | op::BINBYTES8 | op::BYTEARRAY8 => self.skip_bytes(argument),
            // As in Python's unpickler, POP removes a mark if the mark is the topmost element.
            op::POP if self.marks.last().is_some_and(|&mark| mark as usize == self.stack.len()) => {
                self.marks.pop();
                Ok(())
            }
            op::POP => self.pop().map(drop),
            op::POP_MARK => {
                let from = self.unmark()?;
                self.stack.truncate(from);
                Ok(())
            }
            op::DUP => self.top().and_then(|top| self.push(top)),
            op::PROTO if argument > MAX_PROTOCOL => {
                let what = format!("pickle protocol {argument}: 0 to {MAX_PROTOCOL} are read");
                Err(Fault::Bad { offset: at, what })
            }
            op::PROTO | op::FRAME => Ok(()),
            _ => Err(Fault::Bad { offset: at, what: self.refuse(opcode) }),
        }
    }

    /// Returns the error message for a rejected opcode, with the Python object that it names.
    fn refuse(&mut self, opcode: u8) -> String {
        let mut name = String::new();
        if has_name(opcode) {
            for _ in 0..2 {
                if self.bytes.line(&mut self.piece).is_err() {
                    break;
                }
                let text = String::from_utf8_lossy(&self.piece);
                let part = escape(&text.chars().take(60).collect::<String>());
                name = if name.is_empty() { part } else { format!("{name}.{part}") };
            }
        }
        refusal(opcode, &name)
    }
}

/// Decodes Latin-1 with `\uXXXX` and `\UXXXXXXXX` for other characters.
fn unescaped(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let digits = match (byte, after.first()) {
            (b'\\', Some(b'u')) => after.get(1..5),
            (b'\\', Some(b'U')) => after.get(1..9),
            _ => None,
        };
        let letter = digits.and_then(|digits| {
            let number = u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
            rest = after.get(digits.len() + 1..)?;
            char::from_u32(number)
        });
        text.push(letter.unwrap_or(byte.into()));
    }
    text
}
