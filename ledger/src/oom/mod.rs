//! Out-of-memory (OOM) entries: the failed request, the memory that the process held, and the other processes on the device.
//!
//! A failed driver call is not fatal, because frameworks free idle memory and retry. So an entry begins with kind **pressure**. A
//! framework's report (`Oom` record) with the driver's result makes it kind **device**. A report without a result means that the
//! framework's **pool** reached its own limit and did not call the driver. Whether the process survived is decided from its later
//! records, when a run is made.
//!
//! A process without an agent reports nothing. If it ends while its device is nearly full, an OOM is **suspected**.
//!
//! Repeated requests share one entry, and the number of entries is limited. An entry copies all cells and visits every block. The
//! next copy waits for a number of records that grows with this cost.

pub(crate) mod device;
pub(crate) mod records;
