//! Releases of PyTorch, and what differs between their allocators.

use std::fmt;
use std::str::FromStr;

/// A release line of PyTorch: 2.15 includes 2.15.0 and 2.15.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    minor: u16,
}

/// A text that is not the version of a PyTorch release from 2.0 on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a release of PyTorch from 2.0 on, such as 2.15.0")]
pub struct UnknownRelease(String);

impl Release {
    /// First release line with known rules.
    pub const FIRST: Release = Release { minor: 0 };
    /// Last release line with known rules.
    pub const LAST: Release = Release { minor: 15 };

    /// Returns the release line 2.`minor`.
    pub const fn new(minor: u16) -> Self {
        Release { minor }
    }

    /// Whether the rules of this release line were compared with the release itself. Those of a newer one are the rules of the
    /// last known release.
    pub fn is_known(self) -> bool {
        self <= Release::LAST
    }

    /// Returns the rules of this release line.
    pub fn rules(self) -> Rules {
        let since = |minor| self.minor >= minor;
        Rules {
            has_expandable_segments: since(1),
            rounds_one_division: since(4),
            private_pools_expand: since(5),
            spares_expandable_segments: since(5),
            has_non_split_rounding: since(6),
            has_pools_for_shortage: since(8),
            list_tail_starts_after_last_key: since(10),
            full_fraction_collects: !since(10),
            has_fraction_key: since(10),
            least_split_is_allowed: since(10),
            has_large_segment_size: since(11),
            tie_break: match self.minor {
                0..=11 => TieBreak::Address,
                12 => TieBreak::BlockAge,
                _ => TieBreak::SegmentAge,
            },
            has_throw_on_oom: since(12),
            user_pools_release: since(13),
            fraction: if since(13) { Fraction::Nearest } else { Fraction::Down },
            has_reserve_keys: since(15),
            has_release_lock_key: since(2),
            has_stream_reuse_key: since(9),
        }
    }
}

impl FromStr for Release {
    type Err = UnknownRelease;

    /// Reads a version as `torch.__version__` has it: `2.15.0+cu130`.
    fn from_str(text: &str) -> Result<Self, UnknownRelease> {
        let mut parts = text.split(['.', '+']);
        let minor = (parts.next() == Some("2")).then(|| parts.next()?.parse().ok()).flatten();
        minor.map(Release::new).ok_or_else(|| UnknownRelease(text.chars().take(40).collect()))
    }
}

impl fmt::Display for Release {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "2.{}", self.minor)
    }
}

/// What differs between releases. Each rule was found by comparing real runs of the releases on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// `expandable_segments` exists (2.1).
    pub has_expandable_segments: bool,
    /// One division rounds to 512 bytes, as any other size; before 2.4 sizes above 512 stayed as requested.
    pub rounds_one_division: bool,
    /// Private pools have expandable segments (2.5, pull request 128068).
    pub private_pools_expand: bool,
    /// The release of oversize blocks and the collection leave expandable segments alone (2.5, pull request 134338).
    pub spares_expandable_segments: bool,
    /// `max_non_split_rounding_mb` exists (2.6).
    pub has_non_split_rounding: bool,
    /// Pools with `use_on_oom` serve requests for which there is no memory (2.8).
    pub has_pools_for_shortage: bool,
    /// In a list of divisions, `>` begins after the entry of the last key; before 2.10 at that entry.
    pub list_tail_starts_after_last_key: bool,
    /// A fraction of 1.0 turns the collection on (before 2.10).
    pub full_fraction_collects: bool,
    /// `per_process_memory_fraction` is a key of the settings text (2.10).
    pub has_fraction_key: bool,
    /// `max_split_size_mb:20` is allowed; before 2.10 it had to be larger.
    pub least_split_is_allowed: bool,
    /// `large_segment_size_mb` exists (2.11, pull request 172056).
    pub has_large_segment_size: bool,
    /// Order of free blocks of one size.
    pub tie_break: TieBreak,
    /// `throw_on_cudamalloc_oom` exists (2.12).
    pub has_throw_on_oom: bool,
    /// A request of a pool that a program made releases the cache before it fails, unless its stream is being captured (2.13).
    pub user_pools_release: bool,
    /// How a fraction of the device becomes bytes.
    pub fraction: Fraction,
    /// `expandable_segments_reserve` and `expandable_segments_reserve_by_class` exist (2.15).
    pub has_reserve_keys: bool,
    /// `release_lock_on_cudamalloc` and keys that begin with `pinned_` exist (2.2).
    pub has_release_lock_key: bool,
    /// `graph_capture_record_stream_reuse` exists (2.9).
    pub has_stream_reuse_key: bool,
}

/// Which of several free blocks of one size is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TieBreak {
    /// The block with the lowest address (up to 2.11).
    Address,
    /// The block object that was created first (2.12, pull request 178362).
    BlockAge,
    /// The block of the segment that was created first, then the lowest address (2.13, pull request 183591).
    SegmentAge,
}

/// How a fraction of the device becomes bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fraction {
    /// Rounded down (up to 2.12).
    Down,
    /// To the nearest byte (2.13).
    Nearest,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_wheels_are_read() {
        for (text, minor) in [("2.15.0", 15), ("2.4.1+cu121", 4), ("2.0", 0), ("2.99.0a0+git12", 99)] {
            assert_eq!(text.parse(), Ok(Release::new(minor)), "{text}");
        }
        for text in ["", "1.13.1", "2", "2.x", "torch 2.1", "3.0.0"] {
            assert!(text.parse::<Release>().is_err(), "{text}");
        }
        assert!(!Release::new(16).is_known());
        assert_eq!(Release::new(16).rules(), Release::LAST.rules());
    }
}
