//! Models the bytes that the driver adds to the requested sizes of direct allocations, from two sums over the live allocations.
//!
//! The driver maps physical memory in granules. An allocation above a limit has granules of its own; smaller ones share granules.
//! VMM handles have whole granules by contract, and a pool counts with its reserved bytes, so neither is rounded. The sizes of
//! arrays are estimates that already include padding.

/// How the driver rounds sizes. tests/gpu measures it; a test compares it with the simulated GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundingRule {
    /// Mapping granularity in bytes; a power of two.
    pub granule: u64,
    /// Allocations up to this size, in bytes, share granules with others.
    pub shared_up_to: u64,
}

/// The rule that the ledger uses. Source: issue 1244 of the project colibri, an RTX 3090 with CUDA 13.1: 1 MiB took 1.00 MiB, 1 MiB
/// and a byte took 2 MiB.
pub const ROUNDING_RULE: RoundingRule = RoundingRule { granule: 2 << 20, shared_up_to: 1 << 20 };

pub(crate) const GRANULE: i64 = ROUNDING_RULE.granule as i64;

pub(crate) fn whole_granules(bytes: i64) -> i64 {
    bytes.wrapping_add(bytes.wrapping_neg().rem_euclid(GRANULE))
}

/// Rounding of a set of live allocations, or of one allocation that is added to the set or subtracted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Rounding {
    /// Unused bytes in granules that belong to a single allocation.
    own: i64,
    /// Bytes of allocations that share granules.
    shared: i64,
}

impl Rounding {
    /// Returns the rounding of one allocation; `bytes` is at most [`crate::rows::row::MAX_BYTES`].
    #[inline]
    pub fn of(bytes: u64) -> Self {
        if bytes <= ROUNDING_RULE.shared_up_to {
            Rounding { own: 0, shared: bytes as i64 }
        } else {
            Rounding { own: (bytes as i64).wrapping_neg() & (GRANULE - 1), shared: 0 }
        }
    }

    #[inline]
    pub fn plus(self, other: Rounding) -> Self {
        Rounding { own: self.own.wrapping_add(other.own), shared: self.shared.wrapping_add(other.shared) }
    }

    #[inline]
    pub fn minus(self, other: Rounding) -> Self {
        Rounding { own: self.own.wrapping_sub(other.own), shared: self.shared.wrapping_sub(other.shared) }
    }

    /// Returns the bytes that the driver charges beyond the requested sizes.
    pub fn bytes(self) -> i64 {
        self.own.wrapping_add(self.shared.wrapping_neg().rem_euclid(GRANULE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_ones_have_granules_of_their_own_and_small_ones_share() {
        let of = |sizes: &[u64]| {
            let all = sizes.iter().fold(Rounding::default(), |sum, &size| sum.plus(Rounding::of(size)));
            all.bytes()
        };
        assert_eq!(of(&[]), 0);
        assert_eq!(of(&[1 << 20]), 1 << 20, "the rest of a granule");
        assert_eq!(of(&[1 << 20; 64]), 0, "two of 1 MiB share one");
        assert_eq!(of(&[(1 << 20) + 1]), (1 << 20) - 1);
        assert_eq!(of(&[2 << 20, 20 << 20]), 0);
        assert_eq!(of(&[(2 << 20) + 1]), (2 << 20) - 1);
        assert_eq!(of(&[512, 512]), (2 << 20) - 1024);
        assert_eq!(
            of(&[(1 << 20) - 512, (1 << 20) - 512, 2048]),
            (2 << 20) - 1024,
            "the third opens another"
        );
        assert_eq!(of(&[crate::rows::row::MAX_BYTES]), 0);
        assert_eq!(Rounding::of(100).minus(Rounding::of(100)), Rounding::default());
        assert_eq!(
            Rounding::default().minus(Rounding::of(100)).bytes(),
            100,
            "a wrong report is not clamped"
        );
    }

    #[test]
    fn whole_granules_are_never_less() {
        assert_eq!([0, 1, GRANULE, GRANULE + 1].map(whole_granules), [0, GRANULE, GRANULE, 2 * GRANULE]);
        assert_eq!([-1, -GRANULE].map(whole_granules), [0, -GRANULE]);
    }
}
