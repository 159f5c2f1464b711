//! Pickle opcodes of protocols 0 to 5: those that build plain values, and those that are rejected because they name or run code.
//!
//! A pickle is a program for a stack machine. A few opcodes import Python objects and call them, which makes a pickle dangerous.
//! The machine of pickle.rs does not implement these opcodes: a file can only build lists, dicts, strings and numbers.

pub(super) mod op {
    pub const MARK: u8 = b'(';
    pub const STOP: u8 = b'.';
    pub const POP: u8 = b'0';
    pub const POP_MARK: u8 = b'1';
    pub const DUP: u8 = b'2';
    pub const FLOAT: u8 = b'F';
    pub const INT: u8 = b'I';
    pub const BININT: u8 = b'J';
    pub const BININT1: u8 = b'K';
    pub const LONG: u8 = b'L';
    pub const BININT2: u8 = b'M';
    pub const NONE: u8 = b'N';
    pub const STRING: u8 = b'S';
    pub const BINSTRING: u8 = b'T';
    pub const SHORT_BINSTRING: u8 = b'U';
    pub const UNICODE: u8 = b'V';
    pub const BINUNICODE: u8 = b'X';
    pub const APPEND: u8 = b'a';
    pub const DICT: u8 = b'd';
    pub const EMPTY_DICT: u8 = b'}';
    pub const APPENDS: u8 = b'e';
    pub const GET: u8 = b'g';
    pub const BINGET: u8 = b'h';
    pub const LONG_BINGET: u8 = b'j';
    pub const LIST: u8 = b'l';
    pub const EMPTY_LIST: u8 = b']';
    pub const PUT: u8 = b'p';
    pub const BINPUT: u8 = b'q';
    pub const LONG_BINPUT: u8 = b'r';
    pub const SETITEM: u8 = b's';
    pub const TUPLE: u8 = b't';
    pub const EMPTY_TUPLE: u8 = b')';
    pub const SETITEMS: u8 = b'u';
    pub const BINFLOAT: u8 = b'G';
    pub const PROTO: u8 = 0x80;
    pub const TUPLE1: u8 = 0x85;
    pub const TUPLE2: u8 = 0x86;
    pub const TUPLE3: u8 = 0x87;
    pub const NEWTRUE: u8 = 0x88;
    pub const NEWFALSE: u8 = 0x89;
    pub const LONG1: u8 = 0x8a;
    pub const LONG4: u8 = 0x8b;
    pub const BINBYTES: u8 = b'B';
    pub const SHORT_BINBYTES: u8 = b'C';
    pub const SHORT_BINUNICODE: u8 = 0x8c;
    pub const BINUNICODE8: u8 = 0x8d;
    pub const BINBYTES8: u8 = 0x8e;
    pub const EMPTY_SET: u8 = 0x8f;
    pub const ADDITEMS: u8 = 0x90;
    pub const FROZENSET: u8 = 0x91;
    pub const MEMOIZE: u8 = 0x94;
    pub const FRAME: u8 = 0x95;
    pub const BYTEARRAY8: u8 = 0x96;
}

/// Rejected opcodes, as (byte, name, effect).
const REFUSED: [(u8, &str, &str); 15] = [
    (b'c', "GLOBAL", NAMES),
    (0x93, "STACK_GLOBAL", NAMES),
    (b'R', "REDUCE", "calls a Python function"),
    (b'b', "BUILD", "sets the state of a Python object"),
    (b'i', "INST", "makes a Python object"),
    (b'o', "OBJ", "makes a Python object"),
    (0x81, "NEWOBJ", "makes a Python object"),
    (0x92, "NEWOBJ_EX", "makes a Python object"),
    (0x82, "EXT1", NAMES),
    (0x83, "EXT2", NAMES),
    (0x84, "EXT4", NAMES),
    (b'P', "PERSID", "asks the program for an object"),
    (b'Q', "BINPERSID", "asks the program for an object"),
    (0x97, "NEXT_BUFFER", "asks the program for memory"),
    (0x98, "READONLY_BUFFER", "asks the program for memory"),
];
const NAMES: &str = "names Python code";

/// Returns whether an opcode (GLOBAL or INST) is followed by the name of a Python object, as two lines.
pub(super) fn has_name(opcode: u8) -> bool {
    matches!(opcode, b'c' | b'i')
}

/// Explains why an opcode is rejected. `name` is the Python object that it refers to, if the file states it.
pub(super) fn refusal(opcode: u8, name: &str) -> String {
    match REFUSED.iter().find(|(byte, ..)| *byte == opcode) {
        Some((_, title, what)) => {
            let name = if name.is_empty() { String::new() } else { format!(" ({name})") };
            format!(
                "the pickle {what}{name}: opcode {title}, which is refused; a snapshot of \
                 torch.cuda.memory._snapshot() has plain lists, dicts, strings and numbers"
            )
        }
        None if opcode.is_ascii_graphic() => {
            format!("byte {opcode:#04x} ('{}') is not an opcode of a pickle", opcode as char)
        }
        None => format!("byte {opcode:#04x} is not an opcode of a pickle"),
    }
}
