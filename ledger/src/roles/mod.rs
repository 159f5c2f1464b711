//! Data from which roles (parameter, gradient, activation, ...) are derived, and the memory of each role in each iteration.

pub(crate) mod iterations;
pub(crate) mod parameters;
pub(crate) mod state;
pub(crate) mod undecided;
