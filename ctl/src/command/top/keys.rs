//! Decodes keys from the bytes that a terminal sends.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    Char(char),
    Enter,
    Escape,
    Tab,
    Backspace,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
    /// Ctrl-L: draws the whole screen again.
    Redraw,
}

impl Key {
    /// Returns by how many rows the key moves the selection in a list that shows `page` rows; `None` for other keys.
    pub(crate) fn step(self, page: usize) -> Option<isize> {
        Some(match self {
            Key::Up | Key::Char('k') => -1,
            Key::Down | Key::Char('j') => 1,
            Key::PageUp => -(page as isize),
            Key::PageDown | Key::Char(' ') => page as isize,
            Key::Home => isize::MIN,
            Key::End => isize::MAX,
            _ => return None,
        })
    }
}

/// Decodes keys. Returns them with the number of decoded bytes; the other bytes may be the beginning of a key.
pub(crate) fn keys(bytes: &[u8]) -> (Vec<Key>, usize) {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some((key, length)) = bytes.get(at..).and_then(key) {
        found.extend(key);
        at += length;
    }
    (found, at)
}

/// Decodes the first key. Returns the key (`None` if it is unknown) and its length in bytes; `None` if the bytes are incomplete.
fn key(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    match bytes {
        [] | [0x1b] => None,
        [0x1b, b'[', rest @ ..] => {
            let end = rest.iter().position(|byte| (0x40..=0x7e).contains(byte))?;
            Some((sequence(rest.get(..end)?, *rest.get(end)?), end + 3))
        }
        [0x1b, b'O', last, ..] => Some((sequence(b"", *last), 3)),
        [0x1b, b'O'] => None,
        [0x1b, ..] => Some((Some(Key::Escape), 1)),
        [b'\r' | b'\n', ..] => Some((Some(Key::Enter), 1)),
        [b'\t', ..] => Some((Some(Key::Tab), 1)),
        [0x08 | 0x7f, ..] => Some((Some(Key::Backspace), 1)),
        [0x0c, ..] => Some((Some(Key::Redraw), 1)),
        [byte, ..] if *byte < 0x20 => Some((None, 1)),
        [byte, ..] => {
            let length = match byte {
                0xc2..=0xdf => 2,
                0xe0..=0xef => 3,
                0xf0..=0xf4 => 4,
                _ => 1,
            };
            if bytes.len() < length {
                return None;
            }
            let text = bytes.get(..length).and_then(|bytes| std::str::from_utf8(bytes).ok());
            match text.and_then(|text| text.chars().next()) {
                Some(character) => Some((Some(Key::Char(character)), length)),
                None => Some((None, 1)),
            }
        }
    }
}

/// Decodes an escape sequence by its parameters and its last byte.
fn sequence(parameters: &[u8], last: u8) -> Option<Key> {
    // Parameters after a semicolon are modifiers such as Shift.
    let number = parameters.split(|byte| *byte == b';').next().unwrap_or_default();
    Some(match (number, last) {
        (_, b'A') => Key::Up,
        (_, b'B') => Key::Down,
        (_, b'C') => Key::Right,
        (_, b'D') => Key::Left,
        (_, b'H') | (b"1" | b"7", b'~') => Key::Home,
        (_, b'F') | (b"4" | b"8", b'~') => Key::End,
        (b"5", b'~') => Key::PageUp,
        (b"6", b'~') => Key::PageDown,
        (_, b'M') if parameters.is_empty() => Key::Enter,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_keys() {
        let (found, read) =
            keys(b"q\x1b[A\x1bOB\x1b[5~\x1b[1;5C\r\x7f\t\xc3\xbc\x1b[99~\x1b[200~\x01\xff\x0c/");
        use Key::*;
        let all = [Char('q'), Up, Down, PageUp, Right, Enter, Backspace, Tab, Char('ü'), Redraw, Char('/')];
        assert_eq!((found.as_slice(), read), (all.as_slice(), 37));
    }

    #[test]
    fn what_is_not_whole_is_waited_for() {
        for part in [&b"\x1b"[..], b"\x1b[", b"\x1b[1;5", b"\x1bO", b"\xe6\xbc", b""] {
            assert_eq!(keys(part), (Vec::new(), 0), "{part:?}");
        }
        assert_eq!(keys(b"a\x1b[6"), (vec![Key::Char('a')], 1));
        assert_eq!(keys(b"\x1bx").0, [Key::Escape, Key::Char('x')]);
        let all: Vec<u8> = (0..=255).collect();
        for start in 0..256 {
            let (_, read) = keys(&all[start..]);
            assert!(read <= 256 - start);
        }
    }
}
