//! Releases of PyTorch, and the differences between their allocators.

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

    /// Returns whether the model's rules were compared with this release. Later releases get the rules of the last known one.
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
            pools_serve_expandable: !since(10),
            pools_serve_before_release: since(11),
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

    /// Parses a version in the form of `torch.__version__`: `2.15.0+cu130`.
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

/// Differences between releases; each is named with the first release that has it. Found by comparing runs of both releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Whether the setting `expandable_segments` exists (2.1).
    pub has_expandable_segments: bool,
    /// Whether `roundup_power2_divisions:1` rounds to multiples of 512 bytes; before 2.4, sizes above 512 stayed as requested.
    pub rounds_one_division: bool,
    /// Whether private pools may have expandable segments (2.5, pull request 128068).
    pub private_pools_expand: bool,
    /// Whether expandable segments are kept when oversize or long unused memory is released (2.5, pull request 134338).
    pub spares_expandable_segments: bool,
    /// Whether the setting `max_non_split_rounding_mb` exists (2.6).
    pub has_non_split_rounding: bool,
    /// Whether pools with `use_on_oom` serve requests that would fail otherwise (2.8).
    pub has_pools_for_shortage: bool,
    /// Whether these pools also serve from their expandable segments (before 2.10).
    pub pools_serve_expandable: bool,
    /// Whether these pools serve a request before free memory is released for it; before 2.11 they did afterwards.
    pub pools_serve_before_release: bool,
    /// Whether `>` in a list of divisions applies after the entry of the last key; before 2.10 it includes that entry.
    pub list_tail_starts_after_last_key: bool,
    /// Whether unused segments are also returned if the process's memory fraction is 1.0 (before 2.10).
    pub full_fraction_collects: bool,
    /// Whether the settings text may have the key `per_process_memory_fraction` (2.10).
    pub has_fraction_key: bool,
    /// Whether `max_split_size_mb:20` is allowed; before 2.10 it had to be larger than 20.
    pub least_split_is_allowed: bool,
    /// Whether the setting `large_segment_size_mb` exists (2.11, pull request 172056).
    pub has_large_segment_size: bool,
    /// Which of several free blocks of equal size is used.
    pub tie_break: TieBreak,
    /// Whether the setting `throw_on_cudamalloc_oom` exists (2.12).
    pub has_throw_on_oom: bool,
    /// Whether free memory of the default pools is released while requests go to a program's own pool: before such a request fails,
    /// except during a capture, and by `empty_cache` (2.13).
    pub user_pools_release: bool,
    /// How a fraction of the device's memory is rounded to bytes.
    pub fraction: Fraction,
    /// Whether `expandable_segments_reserve` and `expandable_segments_reserve_by_class` exist (2.15). With them, a request that is larger
    /// than the address range of an expandable segment fails at once; before, each such request left an unused range.
    pub has_reserve_keys: bool,
    /// Whether `release_lock_on_cudamalloc` and keys that begin with `pinned_` exist (2.2).
    pub has_release_lock_key: bool,
    /// Whether `graph_capture_record_stream_reuse` exists (2.9).
    pub has_stream_reuse_key: bool,
}

/// Which of several free blocks of equal size is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TieBreak {
    /// The block with the lowest address (up to 2.11).
    Address,
    /// The block object that was created first (2.12, pull request 178362).
    BlockAge,
    /// The block of the segment that was created first, then the lowest address (2.13, pull request 183591).
    SegmentAge,
}

/// How a fraction of the device's memory is rounded to bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fraction {
    /// Down (up to 2.12).
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
