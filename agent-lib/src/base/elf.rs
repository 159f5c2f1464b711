//! How much of a cubin is loaded: the sections of its ELF image that occupy memory, without symbols and debug data.

const SECTION_BYTES: usize = 64;
const ALLOCATED: u64 = 2;

fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(len)?)?;
    Some(field.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

/// Sum of the sections with SHF_ALLOC; 0 if `image` is no 64-bit ELF.
pub fn loadable_bytes(image: &[u8]) -> u64 {
    if !image.starts_with(b"\x7fELF\x02") {
        return 0;
    }
    let header = || {
        let sections = usize::try_from(number(image, 40, 8)?).ok()?;
        Some((sections, number(image, 58, 2)? as usize, number(image, 60, 2)? as usize))
    };
    let Some((sections, size, count)) = header() else { return 0 };
    if size < SECTION_BYTES {
        return 0;
    }
    let loaded = |index: usize| {
        let at = sections.checked_add(index * size)?;
        (number(image, at.checked_add(8)?, 8)? & ALLOCATED != 0).then(|| number(image, at + 32, 8)).flatten()
    };
    (0..count).filter_map(loaded).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sections_that_are_loaded_count() {
        let mut image = vec![0_u8; 64 + 3 * SECTION_BYTES];
        image[..5].copy_from_slice(b"\x7fELF\x02");
        image[40] = 64;
        image[58] = 64;
        image[60] = 3;
        for (index, (flags, bytes)) in [(2, 1000_u64), (0, 5000), (6, 24)].into_iter().enumerate() {
            let at = 64 + index * SECTION_BYTES;
            image[at + 8] = flags;
            image[at + 32..at + 40].copy_from_slice(&bytes.to_le_bytes());
        }
        assert_eq!(loadable_bytes(&image), 1024);
        assert_eq!(loadable_bytes(&image[..100]), 0);
        assert_eq!(loadable_bytes(b"fatbin"), 0);
        image[60] = 255; // more sections than there are
        assert_eq!(loadable_bytes(&image), 1024);
    }
}
