//! Finds the words in which a mapped library stores the addresses of imported functions (slots), and the functions that a library
//! defines. Reads the program headers and dynamic tables in memory, while the loader's lock is held. Allocates nothing.
//!
//! A file may be damaged or hostile. Each read is checked against the readable segments; what lies outside counts as absent.

use libc::{Elf64_Phdr, Elf64_Rel, Elf64_Sym, PF_R, PF_W, PF_X, PT_DYNAMIC, PT_GNU_RELRO, PT_LOAD};
use std::ffi::CStr;

mod tag {
    pub(crate) const PLTRELSZ: i64 = 2;
    pub(crate) const HASH: i64 = 4;
    pub(crate) const STRTAB: i64 = 5;
    pub(crate) const SYMTAB: i64 = 6;
    pub(crate) const RELA: i64 = 7;
    pub(crate) const RELASZ: i64 = 8;
    pub(crate) const STRSZ: i64 = 10;
    pub(crate) const REL: i64 = 17;
    pub(crate) const RELSZ: i64 = 18;
    pub(crate) const PLTREL: i64 = 20;
    pub(crate) const JMPREL: i64 = 23;
    pub(crate) const GNU_HASH: i64 = 0x6fff_fef5;
}

/// Types of relocations that store a function's address in a slot: with a PLT, and without one (`-fno-plt`, as in conda-forge).
const STORES_ADDRESS: [u32; 2] = if cfg!(target_arch = "aarch64") { [1026, 1025] } else { [7, 6] };

/// Maximum number of relocations to search in a table: libtorch_cpu has 1.5 million, libc10_cuda 600.
const MAX_RELOCATIONS: usize = 1 << 22;
/// Maximum number of symbols to check in one bucket of a hash table.
const MAX_CHAIN: usize = 1 << 12;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Entry {
    tag: i64,
    value: u64,
}

/// A mapped file.
#[derive(Debug, Clone, Copy)]
pub struct Image<'a> {
    /// Difference between the addresses in memory and those in the headers.
    pub(crate) base: usize,
    pub(crate) headers: &'a [Elf64_Phdr],
}

/// The slot that holds an imported function's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Address of the slot, an aligned word of the library.
    pub at: usize,
    /// Whether the loader makes the slot's page read-only after relocation.
    pub(crate) is_sealed: bool,
}

/// Addresses of the tables of dynamic symbols and their names. Each address is checked when it is used.
#[derive(Debug, Clone, Copy)]
struct Symbols {
    symbols: usize,
    names: usize,
    name_bytes: usize,
}

impl<'a> Image<'a> {
    /// Describes the file that is mapped at `base`.
    ///
    /// # Safety
    /// Segments that `headers` declares as readable must be mapped and readable for `'a`.
    pub unsafe fn new(base: usize, headers: &'a [Elf64_Phdr]) -> Self {
        Image { base, headers }
    }

    fn range(&self, header: &Elf64_Phdr) -> Option<(usize, usize)> {
        let start = self.base.checked_add(usize::try_from(header.p_vaddr).ok()?)?;
        Some((start, start.checked_add(usize::try_from(header.p_memsz).ok()?)?))
    }

    /// Returns the start and end address in memory of each segment of type `kind` that has these flags.
    fn segments(&self, kind: u32, flags: u32) -> impl Iterator<Item = (usize, usize)> {
        let wanted = move |header: &&Elf64_Phdr| header.p_type == kind && header.p_flags & flags == flags;
        self.headers.iter().filter(wanted).filter_map(|header| self.range(header))
    }

    /// Returns the end of the loaded segment that contains `at` and has at least these flags.
    fn end(&self, at: usize, flags: u32) -> Option<usize> {
        self.segments(PT_LOAD, flags).find(|&(start, end)| start <= at && at < end).map(|(_, end)| end)
    }

    pub(crate) fn runs(&self, address: usize) -> bool {
        self.end(address, PF_X).is_some()
    }

    /// Whether `value` is below the end of a segment in the file. Then it is an address relative to the base, not one in memory.
    pub(crate) fn is_offset(&self, value: usize) -> bool {
        let ends = self.headers.iter().filter(|header| header.p_type == PT_LOAD);
        ends.map(|load| load.p_vaddr.saturating_add(load.p_memsz)).any(|end| (value as u64) < end)
    }

    /// Reads the value at `at`, which need not be aligned.
    fn read<T: Copy>(&self, at: usize) -> Option<T> {
        let end = self.end(at, PF_R)?;
        // SAFETY: inside of a readable segment; each `T` used consists of numbers.
        (end - at >= size_of::<T>()).then(|| unsafe { (at as *const T).read_unaligned() })
    }

    fn entry(&self, tag: i64) -> Option<u64> {
        let (start, end) = self.segments(PT_DYNAMIC, 0).next()?;
        let entries = (start..end).step_by(size_of::<Entry>()).map_while(|at| self.read::<Entry>(at));
        entries.take_while(|entry| entry.tag != 0).find(|entry| entry.tag == tag).map(|entry| entry.value)
    }

    /// Returns the address in an entry of the dynamic section. glibc's loader has added the base if the section is writable;
    /// musl's never does.
    fn address(&self, tag: i64) -> Option<usize> {
        let value = self.entry(tag)? as usize;
        Some(if self.end(value, PF_R).is_some() { value } else { self.base.wrapping_add(value) })
    }

    fn symbols(&self) -> Option<Symbols> {
        let (symbols, names) = (self.address(tag::SYMTAB)?, self.address(tag::STRTAB)?);
        Some(Symbols { symbols, names, name_bytes: self.entry(tag::STRSZ)? as usize })
    }

    fn symbol(&self, tables: &Symbols, index: usize) -> Option<Elf64_Sym> {
        self.read(tables.symbols.checked_add(index.checked_mul(size_of::<Elf64_Sym>())?)?)
    }

    fn is_named(&self, tables: &Symbols, offset: u32, name: &CStr) -> bool {
        let name = name.to_bytes_with_nul();
        let equals = || {
            let at = tables.names.checked_add(offset as usize)?;
            let end = self.end(at, PF_R)?.min(tables.names.checked_add(tables.name_bytes)?);
            if end.checked_sub(at)? < name.len() {
                return None;
            }
            // SAFETY: inside of a readable segment.
            Some(unsafe { std::slice::from_raw_parts(at as *const u8, name.len()) } == name)
        };
        equals().unwrap_or(false)
    }

    /// Returns the slots of the functions `wanted`; each function may have several names.
    pub fn slots<const N: usize>(&self, wanted: &[&[&CStr]; N]) -> [Option<Slot>; N] {
        let mut found = [None; N];
        let Some(tables) = self.symbols() else { return found };
        let plt_has_addends = self.entry(tag::PLTREL).is_some_and(|kind| kind != tag::REL as u64);
        let passes = [
            (tag::JMPREL, tag::PLTRELSZ, plt_has_addends),
            (tag::RELA, tag::RELASZ, true),
            (tag::REL, tag::RELSZ, false),
        ];
        for (start, bytes, has_addends) in passes {
            let (Some(start), Some(bytes)) = (self.address(start), self.entry(bytes)) else { continue };
            let Some(end) = self.end(start, PF_R) else { continue };
            let each = if has_addends { 24 } else { 16 };
            let count = ((bytes as usize).min(end - start) / each).min(MAX_RELOCATIONS);
            for index in 0..count {
                // SAFETY: `count` limits the reads to a readable segment.
                let relocation = unsafe { ((start + index * each) as *const Elf64_Rel).read_unaligned() };
                if !STORES_ADDRESS.contains(&(relocation.r_info as u32)) {
                    continue;
                }
                let Some(symbol) = self.symbol(&tables, (relocation.r_info >> 32) as usize) else { continue };
                let is_it =
                    |names: &&[&CStr]| names.iter().any(|name| self.is_named(&tables, symbol.st_name, name));
                let Some(which) = wanted.iter().position(is_it) else { continue };
                found[which] = found[which].or_else(|| self.slot(relocation.r_offset));
            }
            if found.iter().all(Option::is_some) {
                break;
            }
        }
        found
    }

    fn slot(&self, offset: u64) -> Option<Slot> {
        let at = self.base.checked_add(usize::try_from(offset).ok()?)?;
        let end = self.end(at, PF_R | PF_W)?;
        if end - at < size_of::<usize>() || !at.is_multiple_of(align_of::<usize>()) {
            return None;
        }
        let is_sealed = self.segments(PT_GNU_RELRO, 0).any(|(start, end)| start <= at && at < end);
        Some(Slot { at, is_sealed })
    }

    /// Returns the address at which this file defines the function `name`.
    pub(crate) fn defines(&self, name: &CStr) -> Option<usize> {
        let tables = self.symbols()?;
        let index = match self.address(tag::GNU_HASH) {
            Some(hashes) => self.find_gnu(&tables, hashes, name)?,
            None => self.find_sysv(&tables, self.address(tag::HASH)?, name)?,
        };
        let symbol = self.symbol(&tables, index)?;
        let (kind, binding) = (symbol.st_info & 15, symbol.st_info >> 4);
        // The symbol must be defined, a function or without a type, and global or weak. An indirect function would have to be
        // called to find its address.
        if symbol.st_shndx == 0 || !matches!(kind, 0 | 2) || !matches!(binding, 1 | 2) {
            return None;
        }
        let at = self.base.checked_add(usize::try_from(symbol.st_value).ok()?)?;
        self.runs(at).then_some(at)
    }

    fn find_gnu(&self, tables: &Symbols, at: usize, name: &CStr) -> Option<usize> {
        let [buckets, first, words, shift]: [u32; 4] = self.read(at)?;
        if buckets == 0 || words == 0 {
            return None;
        }
        let hash = name
            .to_bytes()
            .iter()
            .fold(5381_u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(byte.into()));
        let bloom = at + 16;
        let word: u64 = self.read(bloom.checked_add((hash as usize / 64 % words as usize) * 8)?)?;
        let bits = 1_u64 << (hash % 64) | 1_u64 << ((hash >> (shift & 31)) % 64);
        if word & bits != bits {
            return None;
        }
        let table = bloom.checked_add(words as usize * 8)?;
        let start: u32 = self.read(table.checked_add((hash % buckets) as usize * 4)?)?;
        let chains = table.checked_add(buckets as usize * 4)?;
        let begin = start.checked_sub(first).filter(|_| start != 0)? as usize;
        for index in begin..begin + MAX_CHAIN {
            let link: u32 = self.read(chains.checked_add(index * 4)?)?;
            if link | 1 == hash | 1 {
                let number = index + first as usize;
                let symbol = self.symbol(tables, number)?;
                if self.is_named(tables, symbol.st_name, name) {
                    return Some(number);
                }
            }
            if link & 1 != 0 {
                return None;
            }
        }
        None
    }

    fn find_sysv(&self, tables: &Symbols, at: usize, name: &CStr) -> Option<usize> {
        let [buckets, symbols]: [u32; 2] = self.read(at)?;
        if buckets == 0 {
            return None;
        }
        let hash = name.to_bytes().iter().fold(0_u32, |hash, &byte| {
            let hash = (hash << 4).wrapping_add(byte.into());
            let high = hash & 0xf000_0000;
            (hash ^ high >> 24) & !high
        });
        let mut index: u32 = self.read(at.checked_add(8 + (hash % buckets) as usize * 4)?)?;
        let chains = at.checked_add(8 + buckets as usize * 4)?;
        for _ in 0..MAX_CHAIN {
            if index == 0 || index >= symbols {
                return None;
            }
            let symbol = self.symbol(tables, index as usize)?;
            if self.is_named(tables, symbol.st_name, name) {
                return Some(index as usize);
            }
            index = self.read(chains.checked_add(index as usize * 4)?)?;
        }
        None
    }

    /// Whether the loader makes the whole page of `at` read-only. `page` is the page size.
    pub(crate) fn is_page_sealed(&self, at: usize, page: usize) -> bool {
        let whole = !(page - 1);
        self.segments(PT_GNU_RELRO, 0).any(|(start, end)| start & whole <= at && at < end & whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A synthetic ELF file in memory: one readable and writable segment, and addresses of code that does not exist.
    struct File {
        words: Vec<u64>,
        headers: Vec<Elf64_Phdr>,
    }

    const CODE: u64 = 0x10_0000;
    const NAME: &CStr = c"wanted";
    /// Byte offsets of the parts of the test's ELF image.
    const AT_DYNAMIC: u64 = 0;
    const AT_SYMBOLS: u64 = 512;
    const AT_NAMES: u64 = 1024;
    const AT_RELOCATIONS: u64 = 1536;
    const AT_HASH: u64 = 2048;
    const AT_SLOT: u64 = 3072;

    impl File {
        fn new() -> Self {
            let mut file = File { words: vec![0; 512], headers: Vec::new() };
            file.header(PT_LOAD, PF_R | PF_W, 0, 4096);
            file.header(PT_LOAD, PF_R | PF_X, CODE, 4096);
            file.header(PT_DYNAMIC, PF_R | PF_W, AT_DYNAMIC, 512);
            let dynamic = [
                (tag::SYMTAB, AT_SYMBOLS),
                (tag::STRTAB, AT_NAMES),
                (tag::STRSZ, 64),
                (tag::JMPREL, AT_RELOCATIONS),
                (tag::PLTRELSZ, 48),
                (tag::PLTREL, tag::RELA as u64),
            ];
            for (index, (tag, value)) in dynamic.into_iter().enumerate() {
                file.set_dynamic(index, tag, value);
            }
            file.bytes(AT_NAMES + 1, b"other\0wanted\0");
            file.symbol(1, 1, 0, 0);
            file.symbol(2, 7, 0, 0);
            file.relocation(0, AT_SLOT - 8, 1, STORES_ADDRESS[0]);
            file.relocation(1, AT_SLOT, 2, STORES_ADDRESS[0]);
            file
        }

        fn header(&mut self, p_type: u32, p_flags: u32, p_vaddr: u64, p_memsz: u64) {
            let (p_offset, p_paddr, p_filesz, p_align) = (0, 0, 0, 0);
            let header =
                Elf64_Phdr { p_type, p_flags, p_offset, p_vaddr, p_paddr, p_filesz, p_memsz, p_align };
            self.headers.push(header);
        }
        fn set(&mut self, at: u64, value: u64) {
            self.words[at as usize / 8] = value;
        }
        fn set_dynamic(&mut self, index: usize, tag: i64, value: u64) {
            self.set(AT_DYNAMIC + index as u64 * 16, tag as u64);
            self.set(AT_DYNAMIC + index as u64 * 16 + 8, value);
        }
        fn bytes(&mut self, at: u64, bytes: &[u8]) {
            for (index, &byte) in bytes.iter().enumerate() {
                let at = at as usize + index;
                let word = &mut self.words[at / 8];
                *word = *word & !(255 << (at % 8 * 8)) | u64::from(byte) << (at % 8 * 8);
            }
        }
        fn half(&mut self, at: u64, value: u32) {
            self.bytes(at, &value.to_le_bytes());
        }
        fn symbol(&mut self, index: u64, name: u64, section: u64, value: u64) {
            self.set(AT_SYMBOLS + index * 24, name | 0x12 << 32 | section << 48);
            self.set(AT_SYMBOLS + index * 24 + 8, value);
        }
        fn relocation(&mut self, index: u64, offset: u64, symbol: u64, kind: u32) {
            self.set(AT_RELOCATIONS + index * 24, offset);
            self.set(AT_RELOCATIONS + index * 24 + 8, symbol << 32 | u64::from(kind));
        }
        fn image(&self) -> Image<'_> {
            // SAFETY: the readable part is `words`; the code's segment is never read.
            unsafe { Image::new(self.words.as_ptr() as usize, &self.headers) }
        }
        fn found(&self) -> Option<u64> {
            let [slot] = self.image().slots(&[&[NAME]]);
            slot.map(|slot| (slot.at - self.words.as_ptr() as usize) as u64)
        }
        /// Adds a hash table of the older kind.
        fn with_sysv(mut self) -> Self {
            self.set_dynamic(6, tag::HASH, AT_HASH);
            self.half(AT_HASH, 1);
            self.half(AT_HASH + 4, 3);
            self.half(AT_HASH + 8, 1); // the bucket, and the chain 1 -> 2
            self.half(AT_HASH + 12 + 4, 2);
            self
        }
        /// Adds a hash table of the newer kind: two symbols, in order.
        fn with_gnu(mut self) -> Self {
            let hash =
                |name: &[u8]| name.iter().fold(5381_u32, |h, &b| h.wrapping_mul(33).wrapping_add(b.into()));
            self.set_dynamic(6, tag::GNU_HASH, AT_HASH);
            for (index, word) in [1, 1, 1, 6].into_iter().enumerate() {
                self.half(AT_HASH + index as u64 * 4, word);
            }
            self.set(AT_HASH + 16, u64::MAX);
            self.half(AT_HASH + 24, 1);
            self.half(AT_HASH + 28, hash(b"other") & !1);
            self.half(AT_HASH + 32, hash(b"wanted") | 1);
            self
        }
    }

    #[test]
    fn slots_are_found_by_name_in_any_table() {
        assert_eq!(File::new().found(), Some(AT_SLOT));
        let mut file = File::new(); // first as musl leaves it, then as glibc does
        let base = file.words.as_ptr() as u64;
        for (index, tag, value) in [(0, tag::SYMTAB, AT_SYMBOLS), (1, tag::STRTAB, AT_NAMES)] {
            file.set_dynamic(index, tag, base + value);
        }
        assert_eq!(file.found(), Some(AT_SLOT));
        let mut file = File::new(); // without addends
        file.set_dynamic(5, tag::PLTREL, tag::REL as u64);
        file.set_dynamic(4, tag::PLTRELSZ, 32);
        file.set(AT_RELOCATIONS + 16, AT_SLOT);
        file.set(AT_RELOCATIONS + 24, 2 << 32 | u64::from(STORES_ADDRESS[0]));
        assert_eq!(file.found(), Some(AT_SLOT));
        let mut file = File::new(); // without a PLT
        file.set_dynamic(3, tag::RELA, AT_RELOCATIONS);
        file.set_dynamic(4, tag::RELASZ, 48);
        file.relocation(1, AT_SLOT, 2, STORES_ADDRESS[1]);
        assert_eq!(file.found(), Some(AT_SLOT));
        assert!(!file.image().slots(&[&[NAME]])[0].is_some_and(|slot| slot.is_sealed));
        file.header(PT_GNU_RELRO, PF_R, AT_SLOT, 8);
        assert!(file.image().slots(&[&[NAME]])[0].is_some_and(|slot| slot.is_sealed));
    }

    #[test]
    fn definitions_are_found_by_either_hash() {
        for file in [File::new().with_sysv(), File::new().with_gnu()] {
            assert_eq!(file.image().defines(NAME), None, "an import");
            let mut file = file;
            file.symbol(2, 7, 9, CODE + 16);
            let at = file.image().defines(NAME).expect("it is there");
            assert_eq!(at as u64, file.words.as_ptr() as u64 + CODE + 16);
            assert_eq!(file.image().defines(c"missing"), None);
            file.symbol(2, 7, 9, 16);
            assert_eq!(file.image().defines(NAME), None, "data");
            file.symbol(2, 7, 9, u64::MAX - 8);
            assert_eq!(file.image().defines(NAME), None);
        }
        assert_eq!(File::new().image().defines(NAME), None, "no hashes");
    }

    /// Replaces every word of the file by harmful values: nothing is read outside of the file, and every search ends.
    #[test]
    fn damaged_files_are_no_trouble() {
        let evil =
            [0, 1, 7, 0x7fff_ffff, u64::from(u32::MAX), 1 << 32, 1 << 47, u64::MAX, u64::MAX - 7, 4095, 4088];
        for make in [File::new, || File::new().with_sysv(), || File::new().with_gnu()] {
            let whole = make();
            for at in 0..whole.words.len() {
                for value in evil {
                    let mut file = make();
                    file.words[at] = value;
                    let slot = file.found();
                    assert!(slot.is_none_or(|slot| slot <= 4088 && slot % 8 == 0));
                    let _ = file.image().defines(NAME);
                }
            }
            for index in 0..whole.headers.len() {
                for value in evil {
                    let mut file = make();
                    file.headers[index].p_vaddr = value;
                    if file.headers[index].p_type != PT_LOAD {
                        let _ = (file.found(), file.image().defines(NAME));
                    }
                    let mut file = make();
                    file.headers[index].p_memsz = value;
                    if file.headers[index].p_type != PT_LOAD || value <= 4096 {
                        let _ = (file.found(), file.image().defines(NAME));
                    }
                }
            }
        }
        let mut file = File::new();
        file.headers.clear();
        assert_eq!(file.found(), None);
    }
}
