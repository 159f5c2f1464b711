//! ELF files as the agent reads them: from disk and from memory. Reads must stay inside the image.
#![no_main]
#![allow(dead_code)]

#[path = "../../agent-lib/src/base/elf.rs"]
mod elf;
#[path = "../../agent-lib/src/base/image.rs"]
mod image;
#[path = "../../agent-lib/src/naming/callers/symbols.rs"]
mod symbols;

/// Paths of the agent's modules, as the included sources expect them.
mod base {
    pub(crate) use crate::elf;
    pub use gpumem::base::descriptor;
}

use gpumem_fuzz::number;
use image::Image;
use libc::Elf64_Phdr;
use libfuzzer_sys::fuzz_target;
use std::cell::Cell;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes as a file, and the number of reads that returned no bytes.
struct File<'a>(&'a [u8], Cell<u32>);

impl FileExt for File<'_> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len());
        let count = buffer.len().min(self.0.len() - from);
        self.1.set(self.1.get() + u32::from(count == 0));
        buffer[..count].copy_from_slice(&self.0[from..from + count]);
        Ok(count)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

fuzz_target!(|bytes: &[u8]| {
    let _ = elf::loadable_bytes(bytes);
    let Some((&how, rest)) = bytes.split_first() else { return };
    let mut from = rest;
    let (start, address) = (number(&mut from, 2), number(&mut from, 2));
    let file = File(from, Cell::new(0));
    if let Some(name) = symbols::name(&file, start, address) {
        assert!(name.to_bytes().len() < 1024 && !name.is_empty());
    }
    assert!(file.1.get() <= 6, "a file that has ended is read on and on");
    in_memory(how, rest);
});

/// Reads a mapped image whose headers and tables have arbitrary offsets. AddressSanitizer detects reads outside the image.
fn in_memory(how: u8, bytes: &[u8]) {
    let mut from = bytes;
    let count = usize::from(how & 3) + 1;
    let places: Vec<(u64, u64, u64)> =
        (0..count).map(|_| (number(&mut from, 1), number(&mut from, 2), number(&mut from, 2))).collect();
    let image = from.to_vec().into_boxed_slice();
    let base = image.as_ptr() as usize;
    let len = image.len() as u64;
    let headers: Vec<Elf64_Phdr> = places
        .into_iter()
        .map(|(kind, address, size)| {
            // A segment marked as loaded exists; any other may point anywhere.
            let is_load = kind & 3 != 0;
            let address = if is_load { address % (len + 1) } else { address };
            let bytes = if is_load { size.min(len - address) } else { size };
            let flags = (kind >> 2 & 7) as u32;
            let kind = if is_load { 1 } else { [2, 0x6474_e552][usize::from(kind & 32 != 0)] };
            let (p_offset, p_paddr, p_filesz, p_align) = (0, 0, 0, 0);
            let (p_type, p_flags, p_vaddr, p_memsz) = (kind, flags, address, bytes);
            Elf64_Phdr { p_type, p_flags, p_offset, p_vaddr, p_paddr, p_filesz, p_memsz, p_align }
        })
        .collect();
    // SAFETY: every loaded segment lies within the image.
    let found = unsafe { Image::new(base, &headers) };
    let inside = |at: usize| base <= at && at + size_of::<usize>() <= base + image.len();
    for slot in found.slots(&[&[c"cudaMalloc", c"a"], &[c"b"]]).into_iter().flatten() {
        assert!(inside(slot.at) && slot.at % size_of::<usize>() == 0);
        let _ = found.is_page_sealed(slot.at, 4096);
    }
    for name in [c"cudaMalloc", c"a", c""] {
        assert!(found.defines(name).is_none_or(|at| found.runs(at)));
    }
    // SAFETY: both ranges are the image.
    if image.len() >= 20 {
        let end = base + image.len();
        if let Some((first, to)) = unsafe { elf::functions(base, image.len(), base, end) } {
            assert!(base <= first && first < to && to <= end);
        }
    }
}
