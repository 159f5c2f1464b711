//! Reads ELF images: the loaded size of a cubin (without symbols and debug data), and the address range of a file's functions.
//!
//! The functions are those in the unwinder's table (.eh_frame_hdr), because the executable segment may contain constants, too.

use libc::{Elf64_Ehdr, Elf64_Phdr, Elf64_Shdr, Elf64_Sym};

/// Flag SHF_ALLOC of a section: it is loaded into memory.
const ALLOCATED: u64 = 2;

/// A structure that can be read from bytes.
///
/// # Safety
/// The type must consist of numbers, so that any bytes are a valid value.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: they consist of numbers.
unsafe impl Plain for Elf64_Ehdr {}
// SAFETY: as above.
unsafe impl Plain for Elf64_Phdr {}
// SAFETY: as above.
unsafe impl Plain for Elf64_Shdr {}
// SAFETY: as above.
unsafe impl Plain for Elf64_Sym {}

pub(crate) fn from_bytes<T: Plain>(bytes: &[u8]) -> Option<T> {
    // SAFETY: there are enough bytes, and any bytes are a valid value.
    (bytes.len() >= size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// An ELF file, which may be damaged. `read` fills a buffer with the bytes of the file from an offset on.
pub(crate) struct ElfFile<'a> {
    read: &'a dyn Fn(u64, &mut [u8]) -> Option<()>,
    pub head: Elf64_Ehdr,
}

impl<'a> ElfFile<'a> {
    /// Reads the header; `None` unless it is that of a 64-bit ELF.
    pub(crate) fn new(read: &'a dyn Fn(u64, &mut [u8]) -> Option<()>) -> Option<Self> {
        let mut head = [0; size_of::<Elf64_Ehdr>()];
        read(0, &mut head)?;
        head.starts_with(b"\x7fELF\x02").then_some(ElfFile { read, head: from_bytes(&head)? })
    }

    /// Reads entry `number` of the table at offset `table` in the file. Entries have `each` bytes.
    fn entry<T: Plain>(&self, table: u64, each: u16, number: u64) -> Option<T> {
        let mut bytes = [0; 64];
        let bytes = bytes.get_mut(..size_of::<T>()).filter(|bytes| usize::from(each) >= bytes.len())?;
        (self.read)(table.checked_add(number.checked_mul(each.into())?)?, bytes)?;
        from_bytes(bytes)
    }

    pub(crate) fn section(&self, number: u64) -> Option<Elf64_Shdr> {
        self.entry(self.head.e_shoff, self.head.e_shentsize, number)
    }

    /// Returns at most `limit` section headers, up to the end of the file.
    pub(crate) fn sections(&self, limit: u16) -> impl Iterator<Item = Elf64_Shdr> {
        (0..self.head.e_shnum.min(limit).into()).map_while(|number| self.section(number))
    }

    /// Returns at most `limit` program headers, up to the end of the file.
    pub(crate) fn segments(&self, limit: u16) -> impl Iterator<Item = Elf64_Phdr> {
        let (table, each) = (self.head.e_phoff, self.head.e_phentsize);
        (0..self.head.e_phnum.min(limit).into()).map_while(move |number| self.entry(table, each, number))
    }
}

/// Returns the total bytes of the sections that are loaded; 0 if `image` is not a 64-bit ELF.
pub(crate) fn loadable_bytes(image: &[u8]) -> u64 {
    let read = |offset: u64, out: &mut [u8]| {
        out.copy_from_slice(image.get(usize::try_from(offset).ok()?..)?.get(..out.len())?);
        Some(())
    };
    ElfFile::new(&read).map_or(0, |file| {
        let loaded = file.sections(u16::MAX).filter(|section| section.sh_flags & ALLOCATED != 0);
        loaded.map(|section| section.sh_size).fold(0, u64::saturating_add)
    })
}

/// First bytes of .eh_frame_hdr as linkers write it: version 1, then the encodings of a relative pointer, of a count, and of a
/// table with pairs of a function and its description (FDE).
const HEADER: [u8; 4] = [1, 0x1b, 0x03, 0x3b];

/// Returns the addresses of the first function and of the end of the last one; the latter is `end` if the last function's size is
/// unknown. `None` if the table at `header` has another format, or addresses outside of `start` to `end`.
///
/// # Safety
/// `bytes` bytes from `header` on must be readable, and so must everything between `start` and `end`.
pub(crate) unsafe fn functions(
    header: usize,
    bytes: usize,
    start: usize,
    end: usize,
) -> Option<(usize, usize)> {
    // SAFETY: reads within these bounds, which the caller guarantees.
    let word = |at: usize| unsafe { (at as *const u32).read_unaligned() };
    let near = |from: usize, at: usize| from.checked_add_signed(word(at) as i32 as isize);
    if bytes < 20 || word(header).to_le_bytes() != HEADER {
        return None;
    }
    let count = word(header + 8) as usize;
    if count == 0 || count > (bytes - 12) / 8 {
        return None;
    }
    let last = header + 12 + (count - 1) * 8;
    let (first, last, description) =
        (near(header, header + 12)?, near(header, last)?, near(header, last + 4)?);
    // A description (FDE) begins with four words: length, offset of the common part, function (relative to this word), its size
    // in bytes.
    let described = start <= description && description.checked_add(16)? <= end;
    let known = described && near(description + 8, description + 8) == Some(last);
    let to = if known { last + word(description + 12) as usize } else { end };
    (start <= first && first < to && to <= end).then_some((first, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sections_that_are_loaded_count() {
        let mut image = vec![0_u8; 64 + 3 * size_of::<Elf64_Shdr>()];
        image[..5].copy_from_slice(b"\x7fELF\x02");
        image[40] = 64;
        image[58] = 64;
        image[60] = 3;
        for (index, (flags, bytes)) in [(2, 1000_u64), (0, 5000), (6, 24)].into_iter().enumerate() {
            let at = 64 + index * size_of::<Elf64_Shdr>();
            image[at + 8] = flags;
            image[at + 32..at + 40].copy_from_slice(&bytes.to_le_bytes());
        }
        assert_eq!(loadable_bytes(&image), 1024);
        assert_eq!(loadable_bytes(&image[..100]), 0);
        assert_eq!(loadable_bytes(b"fatbin"), 0);
        image[60] = 255; // more sections than there are
        assert_eq!(loadable_bytes(&image), 1024);
    }

    fn image(functions: &[(i32, u32)], header: [u8; 4]) -> Vec<u32> {
        // Words: 0..16 code, 16.. header and table, then descriptions.
        let mut image = vec![0_u32; 16];
        image.extend([u32::from_le_bytes(header), 0, functions.len() as u32]);
        let descriptions = 16 + 3 + 2 * functions.len();
        for (index, (at, _)) in functions.iter().enumerate() {
            image.push((at - 64) as u32);
            image.push(((descriptions + 4 * index) * 4 - 64) as u32);
        }
        for (at, bytes) in functions {
            let place = (image.len() * 4 + 8) as i32;
            image.extend([12, 0, (at - place) as u32, *bytes]);
        }
        image
    }

    fn found(image: &[u32]) -> Option<(usize, usize)> {
        let base = image.as_ptr() as usize;
        let bytes = size_of_val(image);
        // SAFETY: the image's own bounds.
        let found = unsafe { super::functions(base + 64, bytes - 64, base, base + bytes) };
        found.map(|(from, to)| (from - base, to - base))
    }

    #[test]
    fn functions_reach_from_the_first_to_the_end_of_the_last() {
        assert_eq!(found(&image(&[(8, 4), (24, 10), (40, 12)], HEADER)), Some((8, 52)));
        assert_eq!(found(&image(&[(0, 64)], HEADER)), Some((0, 64)));
    }

    #[test]
    fn what_is_not_as_linkers_write_it_is_left_alone() {
        assert_eq!(found(&image(&[(8, 4)], [1, 0x1b, 0x03, 0xff])), None);
        assert_eq!(found(&image(&[], HEADER)), None);
        let mut many = image(&[(8, 4)], HEADER);
        many[18] = 1 << 30;
        assert_eq!(found(&many), None);
        // A function outside of the file, and one with an impossible length.
        assert_eq!(found(&image(&[(-8, 4)], HEADER)), None);
        assert_eq!(found(&image(&[(8, 1 << 20)], HEADER)), None);
    }
}
