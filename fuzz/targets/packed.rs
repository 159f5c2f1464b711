//! Packed lists of the store: bytes are such a list or none, and a list comes back as it was.
#![no_main]
#![allow(dead_code)]

#[path = "../../runs/src/store/packed.rs"]
mod packed;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // A point that differs in nothing is as large as the one before.
    gpumem_fuzz::memory::bounded(4096 + 32 * bytes.len() * bytes.len().max(64), || {
        if let Some(points) = packed::unpack_points(bytes) {
            assert_eq!(packed::unpack_points(&packed::pack_points(&points)), Some(points));
        }
    });
    gpumem_fuzz::memory::bounded(4096 + 64 * bytes.len(), || {
        if let Some(columns) = packed::unpack_columns(bytes) {
            assert_eq!(packed::unpack_columns(&packed::pack_columns(&columns)), Some(columns));
        }
    });
});
