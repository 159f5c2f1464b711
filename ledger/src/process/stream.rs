//! The order of a process's records: which came, and what is missing.

/// Between ResyncBegin and ResyncEnd.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resync {
    /// Rows said again so far.
    pub rows: u64,
    /// Rows born after it are left to the ring.
    pub after_seq: u64,
    /// Nothing was lost: what is said is known already, and better, for its rows are those of no single moment. Nothing of it is
    /// taken, so that a peak is seen that comes before the ring's head. Each new connection begins with such a resync.
    pub confirms: bool,
}
