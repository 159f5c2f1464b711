//! The recordings that the GPU suite made on real hardware, replayed (tests/gpu/README.md).

use crate::gpu_replay;
use std::path::Path;

#[test]
fn recordings_of_real_gpus_match_their_programs() {
    let seen = gpu_replay::verify(&Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu/recordings"));
    if seen.recordings == 0 {
        eprintln!("no recording of a real GPU is in tests/gpu/recordings yet: nothing was replayed");
        return;
    }
    eprintln!("{seen:?}");
    assert!(seen.expectations > 0, "recordings without anything to hold them against: {seen:?}");
}
