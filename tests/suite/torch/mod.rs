//! Lane `torch`: unmodified PyTorch wheels on the simulated machine.

mod allocators;
mod caches;
mod causes;
mod churn;
mod compiled;
mod inside;
mod keepers;
mod late;
mod libraries;
mod lines;
mod odd;
mod ooms;
mod parameters;
mod planted_by_others;
mod replay;
mod reports;
mod roles;
mod savings;
mod surgery;
mod training;
mod why;
