//! Roles of blocks as data: blocks without a settled role, and what each iteration held by role.

pub(crate) mod iterations;
pub(crate) mod parameters;
pub(crate) mod state;
pub(crate) mod undecided;
