//! Reads the ELF header of a program or library: the machine it is for, and the loader that it requests.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Maximum number of program headers that are read.
const MAX_HEADERS: u16 = 64;
/// Type of the program header with the loader's path (PT_INTERP).
const INTERPRETER: u32 = 3;
/// Type of the program header of a file that is linked dynamically (PT_DYNAMIC).
const DYNAMIC: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Elf {
    /// Word size of the file's machine in bits: 32 or 64.
    pub bits: u8,
    /// EM_* value: 62 is x86-64, 183 is aarch64.
    pub machine: u16,
    /// Path of the loader; `None` for static programs and libraries.
    pub interpreter: Option<String>,
    pub is_dynamic: bool,
}

impl Elf {
    /// Reads the header of a file. The error is `InvalidData` if the file is not an ELF file.
    pub(crate) fn read(path: &Path) -> io::Result<Elf> {
        let file = File::open(path)?;
        let no_elf = || io::Error::new(io::ErrorKind::InvalidData, "is not an ELF file");
        let mut head = [0; 64];
        file.read_exact_at(&mut head, 0).map_err(|_| no_elf())?;
        if !head.starts_with(b"\x7fELF") || head[5] != 1 {
            return Err(no_elf());
        }
        let bits = if head[4] == 2 { 64 } else { 32 };
        let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let mut elf = Elf { bits, machine: half(18), ..Elf::default() };
        if bits == 32 {
            return Ok(elf); // a 32-bit program can never load the agent
        }
        let table = u64::from_le_bytes(head[32..40].try_into().unwrap_or_default());
        let (size, count) = (half(54), half(56).min(MAX_HEADERS));
        for number in 0..count {
            let mut entry = [0; 56];
            let at = table.saturating_add(u64::from(size) * u64::from(number));
            file.read_exact_at(&mut entry, at).map_err(|_| no_elf())?;
            let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap_or_default());
            match u32::from_le_bytes(entry[0..4].try_into().unwrap_or_default()) {
                DYNAMIC => elf.is_dynamic = true,
                INTERPRETER => {
                    let length = usize::try_from(word(32)).unwrap_or(0).min(256);
                    let mut name = vec![0; length];
                    file.read_exact_at(&mut name, word(8)).map_err(|_| no_elf())?;
                    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                    elf.interpreter = Some(String::from_utf8_lossy(name).into_owned());
                }
                _ => {}
            }
        }
        Ok(elf)
    }

    pub(crate) fn machine_name(&self) -> String {
        match (self.machine, self.bits) {
            (62, 64) => "x86-64".into(),
            (62, _) => "x32".into(),
            (3, _) => "32-bit x86".into(),
            (183, _) => "aarch64".into(),
            (40, _) => "32-bit ARM".into(),
            (243, _) => "RISC-V".into(),
            (other, bits) => format!("machine {other}, {bits} bits"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Elf;
    use std::path::Path;

    #[test]
    fn this_program_is_one() {
        let own = Elf::read(Path::new("/proc/self/exe")).expect("an ELF file");
        assert_eq!((own.bits, own.is_dynamic), (64, true));
        assert!(own.interpreter.as_ref().is_some_and(|name| name.contains("/ld")), "{own:?}");
        assert!(Elf::read(Path::new("/proc/self/status")).is_err());
        assert!(Elf::read(Path::new("/nonexistent")).is_err());
    }
}
