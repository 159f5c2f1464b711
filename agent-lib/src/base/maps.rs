//! Text of /proc/self/maps, read in pieces into memory that is there.

/// Of a line, so much: `start-end rwxp` is at its beginning, names of files are behind this.
const LINE_BYTES: usize = 64;

/// Whether the page of `at` is writable, by the first line that has it. `read` gives the next bytes, 0 at the end.
pub fn is_writable(at: usize, mut read: impl FnMut(&mut [u8]) -> usize) -> Option<bool> {
    let (mut buffer, mut line, mut filled) = ([0_u8; 4096], [0_u8; LINE_BYTES], 0);
    loop {
        let count = read(&mut buffer);
        for &byte in buffer.get(..count).filter(|bytes| !bytes.is_empty())? {
            if byte != b'\n' {
                if let Some(place) = line.get_mut(filled) {
                    *place = byte;
                    filled += 1;
                }
                continue;
            }
            let found = line.get(..filled).and_then(|line| of_line(line, at));
            if found.is_some() {
                return found;
            }
            filled = 0;
        }
    }
}

/// Of a line `start-end rwxp ...`, if `at` lies there.
fn of_line(line: &[u8], at: usize) -> Option<bool> {
    // Bytes of a name that were cut, or are no text at all, are behind what is read.
    let end = line.iter().position(|byte| !byte.is_ascii()).unwrap_or(line.len());
    let line = std::str::from_utf8(line.get(..end)?).ok()?;
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    (number(start)? <= at && at < number(end)?).then(|| rest.as_bytes().get(1) == Some(&b'w'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_in_pieces_of_any_size() {
        let text = "junk\n1000-2000 rw-p 0\n7f00-8f00 r--p 00000000 00:00 0\n9000-a000 rw-p 0 0 0 \u{e4}\n";
        for piece in [1, 3, 4096] {
            let is_writable = |at| {
                let mut rest = text.as_bytes();
                is_writable(at, |buffer| {
                    let (now, later) = rest.split_at(rest.len().min(piece));
                    buffer[..now.len()].copy_from_slice(now);
                    rest = later;
                    now.len()
                })
            };
            let told = [0, 0xfff, 0x1000, 0x1fff, 0x2000, 0x7f00, 0x8f00, 0x9000].map(is_writable);
            let (yes, no) = (Some(true), Some(false));
            assert_eq!(told, [None, None, yes, yes, None, no, None, yes]);
        }
    }
}
