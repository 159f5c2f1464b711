//! Sources of records: the driver's callbacks, NVTX, PyTorch, the Python interpreter, and the C API.

pub mod api;
pub mod cupti;
pub(crate) mod nvtx;
pub(crate) mod python_host;
pub mod torch;
