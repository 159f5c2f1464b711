//! /proc/PID/maps, environ and stat, as read by doctor and the agent. Hostile names in them must not shift other fields.
#![no_main]
#![allow(dead_code)]

#[path = "../../agent-lib/src/base/image.rs"]
mod image;
#[path = "../../agent-lib/src/base/loaded_file.rs"]
mod loaded_file;
#[path = "../../ctl/src/proc.rs"]
mod text;

use libfuzzer_sys::fuzz_target;
use std::path::Path;

const LIBRARY: &str = "libgpumem.so";

fuzz_target!(|bytes: &[u8]| {
    let told = String::from_utf8_lossy(bytes);
    for file in text::files(&told) {
        assert!(file.starts_with('/') && !file.contains('\n') && told.contains(file));
    }
    if let Some(path) = text::mapped(&told, LIBRARY) {
        let name = Path::new(&path).file_name().expect("a name").to_string_lossy();
        assert!(name.starts_with(LIBRARY) && text::files(&told).any(|file| file == path));
    }
    let _ = text::age(&told, &told);
    set(bytes);
    pages(bytes);
    named(bytes);
});

/// The first entry with the name counts, as in getenv; an empty value counts as unset.
fn set(environ: &[u8]) {
    for name in ["A", "CUDA_INJECTION64_PATH"] {
        let first = environ.split(|byte| *byte == 0).find_map(|entry| {
            let (own, value) = entry.split_at(entry.iter().position(|byte| *byte == b'=')?);
            (own == name.as_bytes()).then(|| String::from_utf8_lossy(&value[1..]).into_owned())
        });
        assert_eq!(text::variable(environ, name), first.filter(|value| !value.is_empty()));
    }
}

/// The result does not depend on how the text is split into reads.
fn pages(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk::<2>() else { return };
    let at = usize::from(u16::from_le_bytes(*head));
    let read = |piece: usize| {
        let mut rest = rest;
        loaded_file::is_writable(at, |buffer| {
            let (now, later) = rest.split_at(rest.len().min(piece).min(buffer.len()));
            buffer[..now.len()].copy_from_slice(now);
            rest = later;
            now.len()
        })
    };
    let whole = read(usize::MAX);
    assert!([1, 7, 64, 65].into_iter().all(|piece| read(piece) == whole));
}

/// Lines with a hostile file name, and with a hostile name without a file, as the kernel writes them.
fn named(bytes: &[u8]) {
    let name: String = String::from_utf8_lossy(bytes).chars().filter(|one| !one.is_control()).collect();
    let line = "7f0000000000-7f0000001000 r-xp 00000000 00:00 0                          ";
    let of = |name: &str| format!("{line}{name}\n{line}\n");
    assert_eq!(text::files(&of(&format!("[anon:{name}]"))).next(), None);
    if !name.contains('/') && !name.ends_with(' ') {
        let path = format!("/opt/{LIBRARY}{name}");
        assert_eq!(text::mapped(&of(&path), LIBRARY), Some(path));
    }
    let at = 0x7f00_0000_0fff;
    let mut rest = of(&format!("/{name}"));
    rest.push_str("7f0000001000-7f0000002000 rw-p 00000000 00:00 0\n");
    let told = [at, at + 1, at + 0x1001].map(|at| {
        let mut rest = rest.as_bytes();
        loaded_file::is_writable(at, |buffer| {
            let (now, later) = rest.split_at(rest.len().min(buffer.len()));
            buffer[..now.len()].copy_from_slice(now);
            rest = later;
            now.len()
        })
    });
    assert_eq!(told, [Some(false), Some(true), None]);
}
