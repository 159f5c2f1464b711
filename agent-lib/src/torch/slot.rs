//! Slots through which a library calls functions that other libraries could replace: found by the function's name in the
//! relocations that the loader follows, and changed. What is called through no slot cannot be.

use libc::{Elf64_Sym, c_char, c_int, c_void};
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicPtr, Ordering::Release};

const DT_PLTRELSZ: u64 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_JMPREL: u64 = 23;

/// An entry of DT_JMPREL: where, symbol << 32 | kind, addend.
#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

/// A library that the loader has mapped.
#[derive(Debug, Clone)]
pub struct Mapped {
    /// As the loader knows it.
    pub path: CString,
    base: usize,
    dynamic: usize,
    /// Read-only since it was loaded: start and end.
    relro: (usize, usize),
}

struct Wanted<'a> {
    file: &'a [u8],
    /// `file` is its beginning.
    is_start: bool,
    found: Option<Mapped>,
}

impl Mapped {
    /// The library whose file is called `file`.
    pub fn find(file: &str) -> Option<Mapped> {
        Self::of(file, false)
    }

    /// One whose file's name begins so.
    pub fn starting_with(file: &str) -> Option<Mapped> {
        Self::of(file, true)
    }

    fn of(file: &str, is_start: bool) -> Option<Mapped> {
        let mut wanted = Wanted { file: file.as_bytes(), is_start, found: None };
        // SAFETY: the function has this type, and a place for its answer.
        unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut wanted).cast()) };
        wanted.found
    }

    /// Puts `with` into the slot of `symbol`: `false` if the library has none. It stays mapped, says the caller.
    pub fn patch(&self, symbol: &CStr, with: *mut c_void) -> bool {
        let (mut names, mut symbols, mut relocations, mut bytes) = (0, 0, 0, 0);
        let mut entry = self.dynamic as *const [u64; 2];
        loop {
            // SAFETY: the dynamic section ends with DT_NULL.
            let [kind, value] = unsafe { *entry };
            match kind {
                0 => break,
                DT_STRTAB => names = value as usize,
                DT_SYMTAB => symbols = value as usize,
                DT_JMPREL => relocations = value as usize,
                DT_PLTRELSZ => bytes = value as usize,
                _ => {}
            }
            // SAFETY: as above.
            entry = unsafe { entry.add(1) };
        }
        if [names, symbols, relocations].contains(&0) {
            return false;
        }
        // SAFETY: the loader has made these addresses those of the mapped tables.
        let table = unsafe {
            std::slice::from_raw_parts(relocations as *const Relocation, bytes / size_of::<Relocation>())
        };
        let is_it = |relocation: &&Relocation| {
            // SAFETY: a symbol of this library, whose name lies in its table of names.
            unsafe {
                let of = &*(symbols as *const Elf64_Sym).add((relocation.info >> 32) as usize);
                libc::strcmp((names + of.st_name as usize) as *const c_char, symbol.as_ptr()) == 0
            }
        };
        let Some(found) = table.iter().find(is_it) else { return false };
        let slot = self.base.wrapping_add(found.offset as usize);
        if self.relro.0 <= slot && slot < self.relro.1 {
            let page = slot & !4095;
            // SAFETY: a page of the library's own data.
            if unsafe { libc::mprotect(page as *mut c_void, 4096, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
                return false;
            }
        }
        // SAFETY: a slot that the library calls through: a pointer to a function of the same type.
        unsafe { &*(slot as *const AtomicPtr<c_void>) }.store(with, Release);
        true
    }
}

unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, wanted: *mut c_void) -> c_int {
    // SAFETY: what dl_iterate_phdr hands over, and `find`'s place.
    let (info, wanted) = unsafe { (&*info, &mut *wanted.cast::<Wanted<'_>>()) };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: a C string, and the headers of a mapped file.
    let (path, headers) = unsafe {
        (
            CStr::from_ptr(info.dlpi_name),
            std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()),
        )
    };
    let file = path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    if !(file == wanted.file || wanted.is_start && file.starts_with(wanted.file)) {
        return 0;
    }
    let base = info.dlpi_addr as usize;
    let at = |kind| headers.iter().find(|header| header.p_type == kind);
    let range = |header: &libc::Elf64_Phdr| {
        let start = base.wrapping_add(header.p_vaddr as usize);
        (start, start.wrapping_add(header.p_memsz as usize))
    };
    let Some(dynamic) = at(libc::PT_DYNAMIC) else { return 0 };
    let relro = at(libc::PT_GNU_RELRO).map_or((0, 0), range);
    wanted.found = Some(Mapped { path: path.to_owned(), base, dynamic: range(dynamic).0, relro });
    1
}
