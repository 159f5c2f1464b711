//! Finds the function at an address in the file on disk: in its symbol table or, in stripped files, in its exported symbols.
//!
//! For the sender. A file may be damaged or replaced; inconsistent data is treated as absent.

use crate::base::descriptor;
use crate::base::elf::{ElfFile, from_bytes};
use libc::{Elf64_Shdr, Elf64_Sym, PT_LOAD};
use std::ffi::CString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Maximum size of a symbol table to read, in bytes: 700,000 symbols.
const TABLE_BYTES: u64 = 16 << 20;
/// Maximum length of a name in bytes.
const NAME_BYTES: usize = 1024;
/// Maximum number of sections to read.
const SECTIONS: u16 = 8192;
/// Maximum number of segments to read; programs and libraries have a dozen.
const SEGMENTS: u16 = 256;
const SHT_SYMTAB: u32 = 2;
const SHT_DYNSYM: u32 = 11;
const STT_FUNC: u8 = 2;
/// Type of a symbol whose function is chosen when the file is loaded.
const STT_GNU_IFUNC: u8 = 10;

/// Returns the name of the function at `address` in the file that is mapped from `start` on.
pub(crate) fn at(path: &Path, start: u64, address: u64) -> Option<CString> {
    name(&descriptor::file_up(File::open(path).ok()?).ok()?, start, address)
}

/// Like `at`, for an open file.
pub(crate) fn name(file: &impl FileExt, start: u64, address: u64) -> Option<CString> {
    let fill = |offset: u64, out: &mut [u8]| file.read_exact_at(out, offset).ok();
    let elf = ElfFile::new(&fill).filter(|elf| elf.head.e_ident[5] == 1)?; // little-endian
    // The address in the file that the first segment is linked for. It is mapped at `start`.
    let first = elf.segments(SEGMENTS).find(|segment| segment.p_type == PT_LOAD)?.p_vaddr & !0xfff;
    let wanted = address.checked_sub(start)?.checked_add(first)?;
    let of_type = |kind: u32| elf.sections(SECTIONS).find(|section| section.sh_type == kind);
    let table = of_type(SHT_SYMTAB).or_else(|| of_type(SHT_DYNSYM))?;
    let strings = elf.section(table.sh_link.into())?;
    let name = function(file, &table, wanted)?;
    let mut text = vec![0; NAME_BYTES];
    let read = file.read_at(&mut text, strings.sh_offset.checked_add(name.into())?).ok()?;
    let end = text.get(..read)?.iter().position(|&byte| byte == 0)?;
    text.truncate(end);
    CString::new(text).ok().filter(|name| !name.is_empty())
}

/// Finds the function that contains `address`. Returns where its name begins in the section of names.
fn function(file: &impl FileExt, table: &Elf64_Shdr, address: u64) -> Option<u32> {
    if table.sh_size > TABLE_BYTES {
        return None;
    }
    let mut symbols = vec![0; usize::try_from(table.sh_size).ok()?];
    file.read_exact_at(&mut symbols, table.sh_offset).ok()?;
    let holds = |symbol: &Elf64_Sym| {
        let is_in = symbol.st_value <= address && address - symbol.st_value < symbol.st_size;
        let is_function = matches!(symbol.st_info & 15, STT_FUNC | STT_GNU_IFUNC);
        is_function && symbol.st_shndx != 0 && is_in
    };
    let symbols = symbols.chunks_exact(size_of::<Elf64_Sym>()).filter_map(from_bytes::<Elf64_Sym>);
    symbols.filter(holds).max_by_key(|symbol| symbol.st_value).map(|symbol| symbol.st_name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[inline(never)]
    #[unsafe(no_mangle)]
    extern "C" fn gpumem_test_function_with_a_name(value: u64) -> u64 {
        std::hint::black_box(value) + 1
    }

    fn here() -> (String, u64) {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
        let program = std::env::current_exe().expect("known");
        let program = program.to_str().expect("UTF-8").to_owned();
        let first = maps.lines().find(|line| line.ends_with(&program)).expect("mapped");
        let start = u64::from_str_radix(first.split_once('-').expect("a range").0, 16).expect("a number");
        (program, start)
    }

    #[test]
    fn functions_of_this_program_are_found_by_any_address_in_them() {
        let (program, start) = here();
        let function = gpumem_test_function_with_a_name as *const () as u64;
        for address in [function, function + 1] {
            let found = at(program.as_ref(), start, address).expect("it has symbols");
            assert_eq!(found.to_str(), Ok("gpumem_test_function_with_a_name"));
        }
        assert_eq!(at(program.as_ref(), start, start), None, "no function begins a file");
        assert_eq!(at(program.as_ref(), start, 0), None);
        assert_eq!(at("/nowhere".as_ref(), start, function), None);
    }

    #[test]
    fn damaged_files_say_nothing() {
        let (program, start) = here();
        let path = std::env::temp_dir().join(format!("gpumem-symbols-{}", std::process::id()));
        std::fs::copy(&program, &path).expect("copied");
        let file = File::options().read(true).write(true).open(&path).expect("open");
        let function = gpumem_test_function_with_a_name as *const () as u64;
        for at_byte in (0..64).chain(200..260) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at_byte).expect("within");
            let [byte] = byte;
            file.write_all_at(&[byte ^ 0xff], at_byte).expect("written");
            at(&path, start, function); // returns an answer or none, and does not panic
            file.write_all_at(&[byte], at_byte).expect("written");
        }
        assert!(at(&path, start, function).is_some());
        let bytes = file.metadata().expect("there").len();
        for cut in [bytes - 1, bytes / 2, 200, 64, 63, 3, 0] {
            file.set_len(cut).expect("cut");
            at(&path, start, function);
        }
        std::fs::remove_file(&path).expect("removed");
    }

    /// A file in memory that counts its reads.
    struct Counted(Vec<u8>, std::cell::Cell<u32>);

    impl FileExt for Counted {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
            self.1.set(self.1.get() + 1);
            (&self.0[self.0.len().min(offset as usize)..]).read(buffer)
        }

        fn write_at(&self, _: &[u8], _: u64) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::Unsupported.into())
        }
    }

    #[test]
    fn headers_that_are_not_there_cost_one_read() {
        let mut file = vec![0_u8; 200];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(32, &64_u64.to_le_bytes());
        put(40, &128_u64.to_le_bytes());
        // The most headers of each kind that are possible; the first one is there.
        put(54, &[56, 0, 255, 255]);
        put(58, &[64, 0, 255, 255]);
        for (kind, most) in [(0_u32, 3), (PT_LOAD, 5)] {
            file[64..68].copy_from_slice(&kind.to_le_bytes());
            let counted = Counted(file.clone(), 0.into());
            assert_eq!(name(&counted, 0, 1), None);
            assert!(counted.1.get() <= 2 * most, "{} reads", counted.1.get());
        }
        // Headers of length 0 would repeat the same one forever.
        (file[54], file[58]) = (0, 0);
        let counted = Counted(file, 0.into());
        assert_eq!((name(&counted, 0, 1), counted.1.get()), (None, 1));
    }
}
