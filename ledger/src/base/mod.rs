//! Lowest layer of the crate: identities, devices, memory quotas.

pub(crate) mod device;
pub(crate) mod identity;
pub(crate) mod quota;
