//! The agent's source files, with loom's atomics in place of the processor's.
#![cfg(loom)]
#![allow(dead_code)]

#[path = "../../../agent-lib/src/record/names.rs"]
pub mod names;
#[path = "../../../agent-lib/src/base/ring.rs"]
pub mod ring;
#[path = "../../../agent-lib/src/threads/table.rs"]
pub mod table;

/// The modules under the agent's paths.
pub mod base {
    pub use crate::{memfd, ring, row};
}

/// Replaces agent-lib/src/base/memfd.rs: zeroed memory that is never freed.
pub mod memfd {
    pub use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};

    pub type Words = [AtomicU64; 8];

    /// Parts of a memfd.
    #[derive(Debug)]
    pub struct Shared {
        pub header: Header,
        ring: &'static [Words],
        head: &'static AtomicU64,
        lost: &'static AtomicU64,
        names_end: &'static AtomicU64,
        names: *mut u8,
    }

    #[derive(Debug)]
    pub struct Header {
        pub name_bytes: u64,
    }

    impl Shared {
        pub fn new(ring_slots: usize, name_bytes: usize) -> Self {
            Shared {
                header: Header { name_bytes: name_bytes as u64 },
                ring: anonymous(ring_slots).expect("memory"),
                head: Box::leak(Box::default()),
                lost: Box::leak(Box::default()),
                names_end: Box::leak(Box::default()),
                names: vec![0_u8; name_bytes].leak().as_mut_ptr(),
            }
        }
        pub fn ring(&self) -> &'static [Words] {
            self.ring
        }
        pub fn head(&self) -> &'static AtomicU64 {
            self.head
        }
        pub fn lost(&self) -> &'static AtomicU64 {
            self.lost
        }
        pub fn names_end(&self) -> &'static AtomicU64 {
            self.names_end
        }
        pub fn names(&self) -> *mut u8 {
            self.names
        }
    }

    pub fn anonymous<T: Default>(count: usize) -> Option<&'static [T]> {
        let all: Vec<T> = std::iter::repeat_with(T::default).take(count).collect();
        Some(all.leak())
    }

    pub fn fetch_to_write<T>(_: &T) {}
    pub fn fetch_to_read<T>(_: &T) {}
}

/// The parts of agent-lib/src/base/row.rs that these sources use.
pub mod row {
    /// Spreads two numbers over 64 bits.
    pub fn mix(a: u64, b: u64) -> u64 {
        let product = u128::from(a ^ 0x9e37_79b9_7f4a_7c15) * u128::from(b ^ 0xbf58_476d_1ce4_e5b9);
        (product as u64) ^ (product >> 64) as u64
    }
}
