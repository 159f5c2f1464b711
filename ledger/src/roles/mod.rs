pub(crate) mod iterations;
pub(crate) mod parameters;
pub(crate) mod state;
pub(crate) mod undecided;
