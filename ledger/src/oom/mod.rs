//! Out-of-memory errors: the request, the processes that held the device, and the memory that the process itself held.
//!
//! A failed driver call is not fatal: frameworks release idle memory and retry. So an entry begins as **pressure**. A framework's
//! report (`Oom`) with the driver's result makes it an out-of-memory error of the device. A report without a result means a limit
//! of the **pool**, which did not call the driver. Whether the process survived is decided from its later records, when a run is
//! made.
//!
//! A process without an agent reports nothing: if it ends while its device is nearly full, an out-of-memory error is
//! **suspected**.
//!
//! Entries are few: repeated requests share one entry, and the number of entries is limited. The cost of an entry (a copy of the
//! cells, a visit of every block) is spread over the records in between.

pub(crate) mod device;
pub(crate) mod records;
