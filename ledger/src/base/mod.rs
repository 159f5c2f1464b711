//! Lowest layer: identities, devices, quotas, extremes of the last minute.

pub(crate) mod device;
pub(crate) mod identity;
pub(crate) mod quota;
