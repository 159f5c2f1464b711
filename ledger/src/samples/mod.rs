pub(crate) mod pending;
