//! The state of the driver as its calls change it: allocations, handles, mappings, pools, devices.

pub mod allocations;
pub mod core;
pub mod devices;
pub mod exports;
pub mod guard;
pub mod multicast;
mod pool_polling;
pub mod pools;
pub mod torch_pools;
pub mod vmm;
