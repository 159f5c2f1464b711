//! Finds the function at an address in the file on disk: from its symbol table or, in stripped files, from its exported
//! symbols. For the sender. Files may be damaged or replaced; inconsistent data is treated as absent.

use crate::base::descriptor;
use std::ffi::CString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Largest symbol table that is read, in bytes: 700,000 symbols.
const MOST: u64 = 16 << 20;
/// Longest name, in bytes.
const NAME: usize = 1024;
const SECTIONS: u16 = 8192;
/// Most segments to read; programs and libraries have a dozen.
const SEGMENTS: u16 = 256;

const SYMBOLS: u32 = 2;
const EXPORTED: u32 = 11;
const LOAD: u32 = 1;
/// Symbol types: function, and function chosen when it is loaded (IFUNC).
const FUNCTIONS: [u8; 2] = [2, 10];

/// Returns the name of the function at `address`, in the file that is mapped from `start` on.
pub(crate) fn at(path: &Path, start: u64, address: u64) -> Option<CString> {
    name(&descriptor::file_up(File::open(path).ok()?).ok()?, start, address)
}

/// The same for an open file.
pub(crate) fn name(file: &impl FileExt, start: u64, address: u64) -> Option<CString> {
    let head: [u8; 64] = read(file, 0)?;
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let first = first_segment(file, &head)?;
    let wanted = address.checked_sub(start)?.checked_add(first)?;
    let (sections, bytes, count) = (u64_at(&head, 40)?, u64::from(u16_at(&head, 58)?), u16_at(&head, 60)?);
    let section =
        |number: u64| -> Option<[u8; 64]> { read(file, sections.checked_add(number.checked_mul(bytes)?)?) };
    // If the file ends before its headers do, the remaining ones are ignored.
    let headers = || (0..u64::from(count.min(SECTIONS))).map_while(section);
    let of_kind = |kind: u32| headers().find(|header| u32_at(header, 4) == Some(kind));
    if bytes < 64 {
        return None;
    }
    let table = of_kind(SYMBOLS).or_else(|| of_kind(EXPORTED))?;
    let strings = section(u32_at(&table, 40)?.into())?;
    let name = function(file, &table, wanted)?;
    let mut text = vec![0; NAME];
    let offset = u64_at(&strings, 24)?.checked_add(name.into())?;
    let read = file.read_at(&mut text, offset).ok()?;
    let end = text.get(..read)?.iter().position(|&byte| byte == 0)?;
    text.truncate(end);
    CString::new(text).ok().filter(|name| !name.is_empty())
}

/// Returns the preferred address of the first segment, rounded down to a page. Its distance from the actual address is the same
/// for all addresses.
fn first_segment(file: &impl FileExt, head: &[u8; 64]) -> Option<u64> {
    let (offset, bytes, count) = (u64_at(head, 32)?, u64::from(u16_at(head, 54)?), u16_at(head, 56)?);
    if bytes < 56 {
        return None;
    }
    let header = |number: u64| -> Option<[u8; 56]> { read(file, offset.checked_add(number * bytes)?) };
    let first = (0..u64::from(count.min(SEGMENTS)))
        .map_while(header)
        .find(|header| u32_at(header, 0) == Some(LOAD))?;
    Some(u64_at(&first, 16)? & !0xfff)
}

/// Returns the offset of the name of the function that contains `address`.
fn function(file: &impl FileExt, table: &[u8; 64], address: u64) -> Option<u32> {
    let (offset, bytes) = (u64_at(table, 24)?, u64_at(table, 32)?);
    if bytes > MOST {
        return None;
    }
    let mut symbols = vec![0; usize::try_from(bytes).ok()?];
    file.read_exact_at(&mut symbols, offset).ok()?;
    let holds = |symbol: &[u8]| -> Option<(u64, u32)> {
        let (info, section) = (*symbol.get(4)?, u16_at(symbol, 6)?);
        let (value, size) = (u64_at(symbol, 8)?, u64_at(symbol, 16)?);
        let is_in = value <= address && address - value < size;
        (FUNCTIONS.contains(&(info & 15)) && section != 0 && is_in).then_some((value, u32_at(symbol, 0)?))
    };
    symbols.chunks_exact(24).filter_map(holds).max_by_key(|(value, _)| *value).map(|(_, name)| name)
}

fn read<const BYTES: usize>(file: &impl FileExt, offset: u64) -> Option<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    file.read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}
fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}
fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
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
            let [byte] = read::<1>(&file, at_byte).expect("within");
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
        for (kind, most) in [(0_u32, 3), (LOAD, 5)] {
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
