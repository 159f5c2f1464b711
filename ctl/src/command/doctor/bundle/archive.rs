//! A .tar.gz of small texts: ustar headers, deflated in one piece (RFC 1952).

use miniz_oxide::deflate::compress_to_vec;

const BLOCK: usize = 512;
/// The best of miniz_oxide; these are kilobytes.
const LEVEL: u8 = 9;

/// The files, packed. Names are short and plain.
pub(super) fn pack(files: &[(String, Vec<u8>)], time_s: u64) -> Vec<u8> {
    let mut tar = Vec::new();
    for (name, content) in files {
        tar.extend(header(name, content.len(), time_s));
        tar.extend(content);
        tar.resize(tar.len().next_multiple_of(BLOCK), 0);
    }
    tar.resize(tar.len() + 2 * BLOCK, 0);
    // Deflated, no name, no time, made by Unix.
    let mut packed = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 2, 3];
    packed.extend(compress_to_vec(&tar, LEVEL));
    packed.extend(crc32(&tar).to_le_bytes());
    packed.extend((tar.len() as u32).to_le_bytes());
    packed
}

fn header(name: &str, bytes: usize, time_s: u64) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    let mut put = |at: usize, text: &[u8]| {
        for (place, byte) in header.iter_mut().skip(at).zip(text) {
            *place = *byte;
        }
    };
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(108, b"0000000\0"); // whose files they are is nobody's business
    put(116, b"0000000\0");
    put(124, format!("{bytes:011o}\0").as_bytes());
    put(136, format!("{time_s:011o}\0").as_bytes());
    put(148, b"        0");
    put(257, b"ustar\x0000");
    // The sum counts its own place as blanks.
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    for (place, byte) in header.iter_mut().skip(148).zip(format!("{sum:06o}\0 ").bytes()) {
        *place = byte;
    }
    header
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_the_known_ones() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        let header = header("a.txt", 8, 0);
        assert_eq!(
            (&header[..6], &header[124..136], header[156]),
            (&b"a.txt\0"[..], &b"00000000010\0"[..], b'0')
        );
    }
}
