//! What stands below everything else: identities, devices, extremes of the last minute.

pub(crate) mod device;
pub(crate) mod identity;
pub(crate) mod quota;
pub(crate) mod recent;
