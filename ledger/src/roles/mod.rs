//! Data of roles: blocks without a settled role, and the memory held in each iteration by role.

pub(crate) mod iterations;
pub(crate) mod parameters;
pub(crate) mod state;
pub(crate) mod undecided;
