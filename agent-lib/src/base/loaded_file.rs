//! Finds the files that the loader has mapped, and writes a word in a page that the loader makes read-only after relocation.
//!
//! /proc/self/maps shows whether such a page is writable now. It is read in pieces into a fixed buffer, without allocation.

use super::image::Image;
use std::ffi::{CStr, c_int, c_void};

/// A mapped file, while the loader's lock is held.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MappedFile<'a> {
    /// Path of the file; empty for the program's own file.
    pub path: &'a [u8],
    pub image: Image<'a>,
    /// Numbers of files that the loader has mapped and unmapped so far; 0 if it does not report them.
    pub changes: (u64, u64),
}

impl<'a> MappedFile<'a> {
    /// # Safety
    /// `info` must be what dl_iterate_phdr passes, with its size.
    unsafe fn new(info: &'a libc::dl_phdr_info, bytes: usize) -> Self {
        // SAFETY: the headers of a mapped file; its name is null or a C string.
        unsafe {
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            let name = info.dlpi_name;
            let path = if name.is_null() { &[][..] } else { CStr::from_ptr(name).to_bytes() };
            let has_changes = bytes >= size_of::<libc::dl_phdr_info>();
            let changes = if has_changes { (info.dlpi_adds, info.dlpi_subs) } else { (0, 0) };
            MappedFile { path, image: Image::new(info.dlpi_addr as usize, headers), changes }
        }
    }

    pub(crate) fn name(&self) -> &'a [u8] {
        self.path.rsplit(|&byte| byte == b'/').next().unwrap_or(self.path)
    }
}

/// Calls `visit` with each mapped file in the loader's order until it returns true. The loader's lock is held meanwhile. So
/// `visit` must not allocate if another thread may wait for the loader while it holds the allocator's lock.
pub(crate) fn find_mapped<F: FnMut(MappedFile<'_>) -> bool>(mut visit: F) {
    unsafe extern "C" fn call<F: FnMut(MappedFile<'_>) -> bool>(
        info: *mut libc::dl_phdr_info,
        bytes: usize,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: dl_iterate_phdr passes valid data, and the closure of `find_mapped`.
        unsafe { (*visit.cast::<F>())(MappedFile::new(&*info, bytes)).into() }
    }
    // SAFETY: the function has this type, and the closure outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(call::<F>), (&raw mut visit).cast()) };
}

/// Calls `write`, which writes the word at `at`, in a page that the loader makes read-only. Returns false if the page could not
/// be made writable.
#[cold]
pub(crate) fn write_sealed(image: &Image<'_>, at: usize, write: impl FnOnce()) -> bool {
    // SAFETY: passes no pointers.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(4096);
    // The loader makes only whole pages of the segment read-only, so a partial last page stays writable. If the page is writable
    // now, the loader has not finished with this file and makes the page read-only afterwards.
    let is_writable = if image.is_page_sealed(at, page) { is_page_writable(at) } else { Some(true) };
    let start = (at & !(page - 1)) as *mut c_void;
    // SAFETY: a page of a mapped file, which is readable all the time.
    let protect = |access| unsafe { libc::mprotect(start, page, access) == 0 };
    match is_writable {
        Some(true) => write(),
        Some(false) if protect(libc::PROT_READ | libc::PROT_WRITE) => {
            write();
            protect(libc::PROT_READ);
        }
        _ => return false,
    }
    true
}

/// Whether the page of `at` is writable now, according to /proc/self/maps, read with system calls only.
fn is_page_writable(at: usize) -> Option<bool> {
    // SAFETY: the path is a C string.
    let fd = unsafe { libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the buffer has this length.
    let read = |buffer: &mut [u8]| unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    let found = is_writable(at, |buffer| usize::try_from(read(buffer)).unwrap_or(0));
    // SAFETY: opened above.
    unsafe { libc::close(fd) };
    found
}

/// Number of bytes to store of each line of /proc/self/maps: `start-end rwxp` and more. File names come after that.
const LINE_BYTES: usize = 64;

/// Like `is_page_writable`. `read` fills the buffer with the next bytes of the file and returns their number, 0 at the end.
pub(crate) fn is_writable(at: usize, mut read: impl FnMut(&mut [u8]) -> usize) -> Option<bool> {
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
            let found = line.get(..filled).and_then(|line| parse_line(line, at));
            if found.is_some() {
                return found;
            }
            filled = 0;
        }
    }
}

/// Parses a line `start-end rwxp ...`: whether the range is writable; `None` if `at` is not in it.
fn parse_line(line: &[u8], at: usize) -> Option<bool> {
    // Bytes that are not ASCII belong to a file name, after the part that is parsed.
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

    #[test]
    fn pages_of_this_process_are_told_apart() {
        let mut word = 0_u64;
        assert_eq!(is_page_writable(&raw mut word as usize), Some(true));
        assert_eq!(is_page_writable(is_page_writable as *const () as usize), Some(false));
    }
}
