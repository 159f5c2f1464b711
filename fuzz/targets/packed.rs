//! Packed lists of the store: any bytes unpack or are refused, and an unpacked list survives a round trip.
#![no_main]
#![allow(dead_code)]

#[path = "../../runs/src/store/packed.rs"]
mod packed;
#[path = "../../runs/src/varint.rs"]
mod varint;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // A point equal to its predecessor is packed in few bytes, but unpacks to the same size.
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
