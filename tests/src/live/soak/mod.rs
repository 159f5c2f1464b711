//! What the soak of a whole node is made of (tests/suite/soak.rs says what it does).
//!
//! ```text
//! random    decisions: the same seed, the same script
//! actor     a program that comes, does something, and goes
//! troupe    64 of them, and what became of each that ever was
//! manager   who starts and ends the daemon, and keeps its connections as systemd would
//! fault     what is mixed in
//! clients   who asks meanwhile, and who goes away in the middle
//! look      what the daemon says beside the machine's truth, while nothing moves
//! health    what the daemon needs, and what its log says
//! end       what is left when all are gone
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
