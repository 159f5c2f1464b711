pub(crate) mod device;
pub(crate) mod identity;
pub(crate) mod quota;
