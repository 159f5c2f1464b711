pub(crate) mod in_flight;
pub(crate) mod pool;
pub(crate) mod row;
