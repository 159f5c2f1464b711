//! Samples of NVML.

pub(crate) mod pending;
pub(crate) mod waiting;
