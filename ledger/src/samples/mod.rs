//! Samples: NVML readings of a process, joined with its records.

pub(crate) mod pending;
