//! Running out of memory: what was requested, who held the device, and what the process itself held.
//!
//! A driver call that fails is not the end: frameworks release idle memory and try again. So an entry begins as **pressure**. A
//! framework's report (`Oom`) with the driver's result makes it an out-of-memory error of the device. A report without a result is a
//! limit of the **pool**, which did not call the driver. Whether the process survived is decided by what follows, when a run is made.
//!
//! A process without an agent reports nothing: if it ends while its device is nearly full, an out-of-memory error is **suspected**.
//!
//! Entries are few: repeated requests are one entry, their number is capped, and the cost of an entry (a copy of the cells, a visit of
//! every block) is spread over the records in between.

pub(crate) mod device;
pub(crate) mod records;
