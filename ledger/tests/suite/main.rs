//! Tests of the ledger through its public interface: scripts of observations, and the resulting snapshots.

mod accounts;
mod arbitrary;
mod blind;
mod causes;
mod causes_any;
mod causes_in_doubt;
mod common;
mod driver_pools;
mod live_samples;
mod ooms;
mod oracle;
mod own;
mod parameters;
mod peaks;
mod pools;
mod properties;
mod resync;
mod roles;
mod roles_any;
mod samples;
mod scripts;
mod shares;
mod timeline;
mod trends;
mod vmm;
