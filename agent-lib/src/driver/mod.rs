//! Records the driver's calls and stores their effects: allocations, handles, mappings, pools and devices.

pub mod allocations;
pub mod core;
pub(crate) mod devices;
pub(crate) mod exports;
pub mod guard;
pub(crate) mod pool_polling;
pub(crate) mod pools;
pub(crate) mod torch_pools;
pub(crate) mod vmm;
