//! Running out of memory: what was asked for, who had the device, and what the process itself held.
//!
//! A driver call that fails is no end: frameworks give back what they hold idle and try again. So an entry
//! begins as **pressure**; the framework's own word (`Oom`) with the driver's result makes it a true one of the device. The word
//! without a result is a limit of the **pool**, which did not ask. Whether the process survived is judged by what
//! follows, by who makes runs.
//!
//! A process without an agent says nothing: if it ends while its device is nearly full, that is **suspected**.
//!
//! Entries are few: what is said again and again is one, the most are capped, and the cost of taking one
//! (a copy of the cells, a look at every block) is spread over the records in between.

pub(crate) mod device;
pub(crate) mod records;
