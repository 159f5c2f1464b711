//! Whose ranges count: the default domain, and those that `GPUMEM_NVTX_DOMAINS` names. Libraries annotate each of their calls in
//! domains of their own (NCCL, CUB), which would bury the program's names.
//!
//! A domain's handle is a number: 0 the default one (NVTX's null), 1 one that is left out, and from 2 on the place among the wanted ones,
//! which is also its number among the owners of scopes but for the default domain, whose number there is 1.

use crate::base::row::mix;
use crate::driver::core::Core;
use crate::threads::OWNERS;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

const LEFT_OUT: usize = 1;
/// Hashes of the wanted domains' names; 0 while free. The first two places are never used.
static WANTED: [AtomicU64; OWNERS] = [const { AtomicU64::new(0) }; OWNERS];
static LEFT: AtomicU32 = AtomicU32::new(0);

/// Times that a domain was made which does not count.
pub fn left_out() -> u32 {
    LEFT.load(Relaxed)
}

/// The owner of scopes behind a handle; `None` for a domain that does not count.
#[inline(always)]
pub fn owner(handle: usize) -> Option<u8> {
    match handle {
        0 => Some(1),
        LEFT_OUT => None,
        wanted => (wanted < OWNERS).then_some(wanted as u8),
    }
}

/// The handle of the domain `name`: the same whoever asks.
pub fn create(core: &Core, name: &[u8]) -> usize {
    let wanted = core.settings.nvtx_domains.iter().any(|wanted| wanted == "*" || wanted.as_bytes() == name);
    if wanted {
        let hash = name.chunks(8).fold(mix(name.len() as u64, 0x9e37), |hash, part| {
            mix(hash, part.iter().fold(0, |word, &byte| word << 8 | u64::from(byte)))
        });
        let hash = hash.max(1);
        for (handle, place) in WANTED.iter().enumerate().skip(2) {
            match place.compare_exchange(0, hash, AcqRel, Acquire) {
                Ok(_) => return handle,
                Err(known) if known == hash => return handle,
                Err(_) => {}
            }
        }
    }
    LEFT.fetch_add(1, Relaxed);
    LEFT_OUT
}
