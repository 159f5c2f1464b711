//! Iterates over the objects of a JSON array in a file that need not be valid JSON as a whole: it may be truncated, still be
//! written by a running program, or contain several arrays.

use std::io::{self, BufRead};

/// Maximum length of an object in bytes; a longer one is reported as [`Next::Bad`].
const MAX_OBJECT_BYTES: usize = 1 << 20;
/// Maximum number of consecutive bytes outside objects. After more, reading stops, to limit the time of the search.
const MAX_BETWEEN_BYTES: u64 = 16 << 20;

/// What [`Objects::next`] found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A complete object; its bytes are in [`Objects::bytes`].
    Object,
    /// Bytes that begin like an object but are not one, or are too long.
    Bad,
    /// The file ends inside an object or before the end of the array.
    Cut,
    /// There are more than [`MAX_BETWEEN_BYTES`] consecutive bytes outside objects.
    Hole,
    /// The file ends after the array.
    End,
}

pub(super) struct Objects<R> {
    reader: R,
    /// Name of the array in the file, with quotes. Everything before this name is skipped.
    key: &'static [u8],
    /// While searching for the array: number of bytes of `key` that match so far. `None` inside the array.
    matched: Option<usize>,
    /// Bytes of the object that was read last.
    pub bytes: Vec<u8>,
    /// Number of bytes read so far.
    pub offset: u64,
}

#[derive(Clone, Copy)]
struct Inside {
    /// Number of brackets that are open at this place.
    depth: u32,
    /// Whether the parser is within a string.
    text: bool,
    /// Whether the last byte was a backslash that escapes the next byte.
    escaped: bool,
}

impl<R: BufRead> Objects<R> {
    /// Reads the array that follows the name `key` (given with its quotes). If `is_array`, the file itself is the array.
    pub fn new(reader: R, key: &'static [u8], is_array: bool) -> Self {
        let matched = if is_array { None } else { Some(0) };
        Objects { reader, key, matched, bytes: Vec::new(), offset: 0 }
    }

    pub fn next(&mut self) -> io::Result<Next> {
        self.bytes.clear();
        let mut inside: Option<Inside> = None;
        let mut between = 0_u64;
        loop {
            let buffer = match self.reader.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            if buffer.is_empty() {
                let is_open = inside.is_some() || self.matched.is_none();
                return Ok(if is_open { Next::Cut } else { Next::End });
            }
            let mut used = 0;
            let mut found = None;
            for &byte in buffer {
                used += 1;
                found = match &mut inside {
                    Some(state) => {
                        self.bytes.push(byte);
                        step(state, byte)
                            .or_else(|| (self.bytes.len() >= MAX_OBJECT_BYTES).then_some(Next::Bad))
                    }
                    None => {
                        between += 1;
                        match (&mut self.matched, byte) {
                            (None, b'{') => {
                                self.bytes.push(byte);
                                inside = Some(Inside { depth: 1, text: false, escaped: false });
                            }
                            (None, b']') => self.matched = Some(0),
                            (None, _) => {}
                            (Some(matched), byte) => {
                                if seek(self.key, matched, byte) {
                                    self.matched = None;
                                }
                            }
                        }
                        (between > MAX_BETWEEN_BYTES).then_some(Next::Hole)
                    }
                };
                if found.is_some() {
                    break;
                }
            }
            self.reader.consume(used);
            self.offset += used as u64;
            if let Some(found) = found {
                return Ok(found);
            }
        }
    }
}

/// Processes one byte of an object. Returns a result if the object ends with this byte, or if the byte is invalid.
fn step(state: &mut Inside, byte: u8) -> Option<Next> {
    let is_control = byte < b' ' && (state.text || !matches!(byte, b'\t' | b'\n' | b'\r'));
    match byte {
        _ if is_control => return Some(Next::Bad),
        _ if state.escaped => state.escaped = false,
        b'\\' if state.text => state.escaped = true,
        b'"' => state.text = !state.text,
        _ if state.text => {}
        b'{' | b'[' => state.depth += 1,
        b'}' | b']' => {
            state.depth -= 1;
            if state.depth == 0 {
                return Some(if byte == b'}' { Next::Object } else { Next::Bad });
            }
        }
        _ => {}
    }
    None
}

/// Processes one byte while searching for the key, a colon and a bracket. Returns true if this byte completes them.
fn seek(key: &[u8], matched: &mut usize, byte: u8) -> bool {
    let blank = byte.is_ascii_whitespace();
    match (*matched).checked_sub(key.len()) {
        None if key.get(*matched) == Some(&byte) => *matched += 1,
        Some(0) if byte == b':' => *matched += 1,
        Some(_) if blank => {}
        Some(1) if byte == b'[' => return true,
        _ => *matched = usize::from(key.first() == Some(&byte)),
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &[u8], is_array: bool) -> Vec<String> {
        let mut objects = Objects::new(text, b"\"events\"", is_array);
        let mut found = Vec::new();
        loop {
            match objects.next().expect("memory") {
                Next::Object => found.push(String::from_utf8_lossy(&objects.bytes).into_owned()),
                Next::Bad => found.push("bad".into()),
                end => {
                    found.push(format!("{end:?}"));
                    return found;
                }
            }
        }
    }

    #[test]
    fn objects_of_whole_and_broken_files() {
        let whole = br#"{"x":{"y":[1]}, "events" : [ {"a":"}\"{"} , {"b":[{}]}], "z":{}}"#;
        assert_eq!(all(whole, false), [r#"{"a":"}\"{"}"#, r#"{"b":[{}]}"#, "End"]);
        assert_eq!(all(b"[,{},\n{}", true), ["{}", "{}", "Cut"]);
        assert_eq!(all(b"[{\"a", true), ["Cut"]);
        assert_eq!(all(b"{\"events\":[{}]}{\"events\":[{}", false), ["{}", "{}", "Cut"]);
        assert_eq!(all(b"[{\"a\n{}]", true), ["bad", "{}", "End"]);
        assert_eq!(all(b"[{\"a\":1]}]", true), ["bad", "End"], "a bracket ends the array");
        assert_eq!(all(b"nothing", false), ["End"]);
        let long = [b"[{\"a\":\"", vec![b'x'; 3 << 20].as_slice(), b"\"},{}]"].concat();
        assert_eq!(all(&long, true).last().map(String::as_str), Some("End"));
    }
}
