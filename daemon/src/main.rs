//! gpumemd.

fn main() {}
