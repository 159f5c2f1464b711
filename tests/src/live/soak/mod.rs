//! Parts of the soak test of a whole node (tests/suite/soak.rs describes it).
//!
//! ```text
//! random    decisions: the same seed, the same script
//! actor     a program that starts, acts, and ends
//! troupe    64 actors, and the fate of every actor so far
//! manager   starts and ends the daemon, and keeps its connections as systemd would
//! fault     injected faults
//! clients   concurrent clients, some of which disconnect in mid-reply
//! look      the daemon's figures compared with the machine's truth, while nothing moves
//! health    the daemon's resources and log
//! end       checks that nothing else remains once every program has ended
//! ```

pub mod actor;
pub mod clients;
pub mod end;
pub mod fault;
pub mod health;
pub mod look;
pub mod manager;
pub mod random;
pub mod troupe;

pub use actor::Actor;
pub use clients::Clients;
pub use fault::{Fault, Injector};
pub use health::Health;
pub use manager::Manager;
pub use random::Random;
pub use troupe::Troupe;
