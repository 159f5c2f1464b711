pub(crate) mod block_ring;
pub(crate) mod in_flight;
pub(crate) mod pool;
pub(crate) mod row;
pub(crate) mod table;
