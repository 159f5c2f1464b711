//! Samples of NVML.

pub(crate) mod pending;
