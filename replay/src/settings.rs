//! Settings of the allocator, in the syntax of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF.

use crate::release::{Release, Rules};

pub(crate) const MIB: u64 = 1 << 20;
/// Number of entries in the list of divisions: one for each power of two from 1 MiB to 32 GiB.
const ENTRIES: usize = 16;
/// Default size in bytes of a segment for requests from 1 to 10 MiB.
const LARGE_SEGMENT: u64 = 20 * MIB;
/// Minimum size of a block in bytes, and the unit of rounding.
const MIN_BLOCK: u64 = 512;
/// Maximum rounded size in bytes of a request that is served from a segment for small blocks.
pub(crate) const SMALL: u64 = MIB;
/// Size in bytes of a segment for small blocks.
pub(crate) const SMALL_SEGMENT: u64 = 2 * MIB;
/// Requests of this many bytes or more get a segment of their own size.
const OWN_SEGMENT: u64 = 10 * MIB;
/// The size of a segment for a request of at least [`OWN_SEGMENT`] bytes is a multiple of this, in bytes.
const OWN_SEGMENT_STEP: u64 = 2 * MIB;
/// A remainder of a large block of at most this many bytes stays with the block.
const KEPT_REST: u64 = MIB;

/// The allocator that serves the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// PyTorch's caching allocator.
    #[default]
    Native,
    /// The driver's pool, whose memory is known as a lower bound only.
    CudaMallocAsync,
}

/// Settings of the allocator.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The allocator that serves the requests.
    pub backend: Backend,
    /// Blocks of at least this size in bytes are never split; `None` for no limit.
    pub max_split_bytes: Option<u64>,
    /// A block for a request of at least `max_split_bytes` must be less than this many bytes larger than the request.
    pub non_split_rounding_bytes: u64,
    /// Number of steps between two powers of two to which sizes are rounded up; 0 rounds to multiples of 512 bytes. Entry n is
    /// for sizes from 2^n MiB.
    pub divisions: [u64; ENTRIES],
    /// Fraction of the allowed memory above which unused segments are returned to the driver; 0 for never.
    pub collection_threshold: f64,
    /// Whether segments are expandable: they grow by mapping pages.
    pub expandable_segments: bool,
    /// Size in bytes of a segment for requests from 1 to 10 MiB.
    pub large_segment_bytes: u64,
    /// Fraction of the device's memory that this process may reserve; `None` for no limit.
    pub fraction: Option<f64>,
    /// Whether a request that exceeds the fraction fails without releasing memory first.
    pub throw_on_oom: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            backend: Backend::Native,
            max_split_bytes: None,
            non_split_rounding_bytes: LARGE_SEGMENT,
            divisions: [0; ENTRIES],
            collection_threshold: 0.0,
            expandable_segments: false,
            large_segment_bytes: LARGE_SEGMENT,
            fraction: None,
            throw_on_oom: false,
        }
    }
}

/// Error: the release would reject the settings text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The release does not have the key.
    #[error("PyTorch {release} has no allocator setting `{key}`")]
    UnknownKey {
        /// The key as typed.
        key: String,
        /// The release whose rules apply.
        release: Release,
    },
    /// The key does not accept the value.
    #[error("`{key}:{value}` is not valid in PyTorch {release}: {expected}")]
    BadValue {
        /// The key as typed.
        key: String,
        /// The value as typed.
        value: String,
        /// The release whose rules apply.
        release: Release,
        /// Description of valid values.
        expected: &'static str,
    },
    /// The text is not a list of keys and values.
    #[error("`{found}` stands where `{expected}` was expected")]
    Syntax {
        /// The part of the text that is wrong; empty at the end of the text.
        found: String,
        /// What the grammar expects at this place, such as `:`.
        expected: &'static str,
    },
}

/// Splits a settings text into words and the separators `:` `,` `[` `]`.
struct Tokens<'a> {
    rest: &'a str,
    release: Release,
}

const SEPARATORS: [char; 4] = [':', ',', '[', ']'];

impl<'a> Tokens<'a> {
    fn peek(&self) -> &'a str {
        let rest = self.rest.trim_start();
        match rest.find(SEPARATORS) {
            Some(0) => &rest[..1],
            Some(end) => rest[..end].trim_end(),
            None => rest.trim_end(),
        }
    }

    fn next(&mut self) -> &'a str {
        let token = self.peek();
        self.rest = &self.rest.trim_start()[token.len()..];
        token
    }

    fn expect(&mut self, expected: &'static str) -> Result<(), SettingsError> {
        let found = self.next();
        (found == expected)
            .then_some(())
            .ok_or_else(|| SettingsError::Syntax { found: found.to_owned(), expected })
    }

    /// Reads the `:VALUE` of a key. `read` parses the value; `expected` describes valid values.
    fn value<T>(
        &mut self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, SettingsError> {
        self.expect(":")?;
        let value = self.next();
        read(value).ok_or_else(|| self.bad(key, value, expected))
    }

    fn bad(&self, key: &str, value: &str, expected: &'static str) -> SettingsError {
        SettingsError::BadValue {
            key: key.to_owned(),
            value: value.to_owned(),
            release: self.release,
            expected,
        }
    }
}

fn flag(value: &str) -> Option<bool> {
    match value {
        "True" => Some(true),
        "False" => Some(false),
        _ => None,
    }
}

/// Reads a number of MiB, as bytes. No device has 256 TiB.
fn mebibytes(value: &str) -> Option<u64> {
    value.parse::<u64>().ok()?.checked_mul(MIB).filter(|bytes| *bytes <= 1 << 48)
}

fn division(value: &str) -> Option<u64> {
    value
        .parse()
        .ok()
        .filter(|division: &u64| *division == 0 || division.is_power_of_two() && *division <= 1 << 32)
}

impl Settings {
    /// Parses a settings text by the rules of a release. Settings that the text lacks have their defaults.
    pub fn parse(text: &str, release: Release) -> Result<Self, SettingsError> {
        let rules = release.rules();
        let mut settings = Settings::default();
        let mut rounding = None;
        let mut tokens = Tokens { rest: text, release };
        while !tokens.peek().is_empty() {
            if tokens.peek() == "," {
                tokens.next();
                continue;
            }
            let key = tokens.next();
            match key {
                "backend" => {
                    settings.backend =
                        tokens.value(key, "native or cudaMallocAsync", |value| match value {
                            "native" => Some(Backend::Native),
                            "cudaMallocAsync" => Some(Backend::CudaMallocAsync),
                            _ => None,
                        })?;
                }
                "max_split_size_mb" => {
                    settings.max_split_bytes = Some(tokens.value(key, "a number of MiB", mebibytes)?);
                }
                "max_non_split_rounding_mb" if rules.has_non_split_rounding => {
                    rounding = Some(tokens.value(key, "a number of MiB", mebibytes)?);
                }
                "roundup_power2_divisions" => settings.divisions = divisions(&mut tokens, key, rules)?,
                "garbage_collection_threshold" => {
                    let read = |value: &str| value.parse().ok().filter(|share| *share > 0.0 && *share < 1.0);
                    settings.collection_threshold = tokens.value(key, "a share between 0 and 1", read)?;
                }
                "expandable_segments" if rules.has_expandable_segments => {
                    settings.expandable_segments = tokens.value(key, "True or False", flag)?;
                }
                "per_process_memory_fraction" if rules.has_fraction_key => {
                    let read = |value: &str| value.parse().ok().filter(|share| (0.0..=1.0).contains(share));
                    settings.fraction = Some(tokens.value(key, "a share from 0 to 1", read)?);
                }
                "large_segment_size_mb" if rules.has_large_segment_size => {
                    let read = |value: &str| mebibytes(value).filter(|bytes| *bytes > 10 * MIB);
                    settings.large_segment_bytes = tokens.value(key, "a number of MiB above 10", read)?;
                }
                "throw_on_cudamalloc_oom" if rules.has_throw_on_oom => {
                    settings.throw_on_oom = tokens.value(key, "True or False", flag)?;
                }
                _ if is_without_effect(key, rules) => {
                    tokens.value(key, "a value", |value| (!value.is_empty()).then_some(()))?;
                }
                _ => return Err(SettingsError::UnknownKey { key: key.to_owned(), release }),
            }
            if !matches!(tokens.peek(), "" | ",") {
                tokens.expect(",")?;
            }
        }
        settings.non_split_rounding_bytes = rounding.unwrap_or(settings.large_segment_bytes);
        let bounded =
            [("max_split_size_mb", settings.max_split_bytes), ("max_non_split_rounding_mb", rounding)];
        let least = settings.large_segment_bytes + u64::from(!rules.least_split_is_allowed);
        for (key, bytes) in bounded {
            if let Some(bytes) = bytes.filter(|bytes| *bytes < least) {
                let expected = match (rules.least_split_is_allowed, rules.has_large_segment_size) {
                    (false, _) => "a number of MiB above 20",
                    (true, false) => "a number of MiB from 20 up",
                    (true, true) => "at least large_segment_size_mb, which is 20 by default",
                };
                return Err(tokens.bad(key, &(bytes / MIB).to_string(), expected));
            }
        }
        Ok(settings)
    }

    /// Returns the size of the segment that the driver is asked for, to serve a request of this rounded size.
    pub fn segment_bytes(&self, rounded: u64) -> u64 {
        if rounded <= SMALL {
            SMALL_SEGMENT
        } else if rounded < OWN_SEGMENT {
            self.large_segment_bytes
        } else {
            rounded.next_multiple_of(OWN_SEGMENT_STEP)
        }
    }

    /// Returns whether a request of `rounded` bytes leaves the `rest` bytes of a larger free block free.
    ///
    /// `is_expandable`: the block's segment is expandable.
    pub fn splits(&self, rounded: u64, rest: u64, is_expandable: bool) -> bool {
        if is_expandable || rounded <= SMALL {
            rest >= MIN_BLOCK
        } else {
            rest > KEPT_REST && self.max_split_bytes.is_none_or(|max| rounded < max)
        }
    }

    /// Returns the size to which a request of `bytes` is rounded.
    pub fn round(&self, bytes: u64, rules: Rules) -> u64 {
        if bytes < MIN_BLOCK {
            return MIN_BLOCK;
        }
        let divisions = self.divisions[(bytes.ilog2().saturating_sub(20) as usize).min(ENTRIES - 1)];
        if divisions == 1 && !rules.rounds_one_division {
            return bytes;
        }
        if divisions > 1 && bytes > MIN_BLOCK * divisions && !bytes.is_power_of_two() {
            return bytes.next_multiple_of((1 << bytes.ilog2()) / divisions);
        }
        if divisions > 1 && bytes > MIN_BLOCK * divisions {
            return bytes;
        }
        bytes.next_multiple_of(MIN_BLOCK)
    }
}

/// Returns whether `key` is a setting of the release that does not affect the model.
fn is_without_effect(key: &str, rules: Rules) -> bool {
    match key {
        "release_lock_on_cudamalloc" => rules.has_release_lock_key,
        "graph_capture_record_stream_reuse" => rules.has_stream_reuse_key,
        "expandable_segments_reserve" | "expandable_segments_reserve_by_class" => rules.has_reserve_keys,
        _ => key.starts_with("pinned_") && rules.has_release_lock_key,
    }
}

/// Parses one number of divisions for all sizes, or a list `[MIB:DIVISIONS,...,>:DIVISIONS]`.
///
/// The first key of a list also sets the entries below it. Entries between two keys stay 0.
fn divisions(tokens: &mut Tokens<'_>, key: &str, rules: Rules) -> Result<[u64; ENTRIES], SettingsError> {
    const EXPECTED: &str = "0, a power of two, or a list such as [256:1,512:2,>:4]";
    tokens.expect(":")?;
    let value = tokens.next();
    if value != "[" {
        return division(value).map(|all| [all; ENTRIES]).ok_or_else(|| tokens.bad(key, value, EXPECTED));
    }
    let mut list = [0; ENTRIES];
    let mut last = None;
    loop {
        let size = tokens.next();
        let divisions = tokens.value(size, EXPECTED, division)?;
        if size == ">" {
            let first = last.unwrap_or(0) + usize::from(rules.list_tail_starts_after_last_key);
            list[first.min(ENTRIES)..].fill(divisions);
        } else {
            let size = size.parse::<u64>().ok().filter(|size| size.is_power_of_two());
            let size = size.ok_or_else(|| tokens.bad(key, "list", EXPECTED))?;
            let entry = (size.ilog2() as usize).min(ENTRIES - 1);
            let first = if last.is_none() { 0 } else { entry };
            list[first..=entry].fill(divisions);
            last = Some(entry);
        }
        match tokens.next() {
            "," => {}
            "]" => return Ok(list),
            found => return Err(SettingsError::Syntax { found: found.to_owned(), expected: "]" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, minor: u16) -> Result<Settings, SettingsError> {
        Settings::parse(text, Release::new(minor))
    }

    #[test]
    fn keys_exist_from_their_release_on() {
        let since = [
            ("backend:native", 0),
            ("expandable_segments:True", 1),
            ("release_lock_on_cudamalloc:True", 2),
            ("pinned_num_register_threads:8", 2),
            ("max_non_split_rounding_mb:64", 6),
            ("graph_capture_record_stream_reuse:True", 9),
            ("max_split_size_mb:20", 10),
            ("per_process_memory_fraction:0.5", 10),
            ("large_segment_size_mb:64", 11),
            ("throw_on_cudamalloc_oom:True", 12),
            ("expandable_segments_reserve:0.5", 15),
        ];
        for (text, first) in since {
            for minor in 0..=15 {
                assert_eq!(parse(text, minor).is_ok(), minor >= first, "{text} in 2.{minor}");
            }
        }
    }

    #[test]
    fn errors_say_what_would_be_right() {
        let error = |text, minor| parse(text, minor).expect_err(text).to_string();
        assert_eq!(error("expandable:True", 15), "PyTorch 2.15 has no allocator setting `expandable`");
        assert_eq!(
            error("max_split_size_mb:20", 9),
            "`max_split_size_mb:20` is not valid in PyTorch 2.9: a number of MiB above 20"
        );
        assert_eq!(
            error("max_split_size_mb:32,large_segment_size_mb:64", 15),
            "`max_split_size_mb:32` is not valid in PyTorch 2.15: at least large_segment_size_mb, which is 20 by default"
        );
        assert_eq!(
            error("expandable_segments:true", 15),
            "`expandable_segments:true` is not valid in PyTorch 2.15: True or False"
        );
        assert_eq!(error("backend", 15), "`` stands where `:` was expected");
        for text in [
            "garbage_collection_threshold:1",
            "roundup_power2_divisions:3",
            "max_split_size_mb:x",
            "a b",
            ":",
        ] {
            assert!(parse(text, 15).is_err(), "{text}");
        }
    }

    #[test]
    fn texts_with_blanks_and_several_keys_are_read() {
        let settings =
            parse(" max_split_size_mb : 32 , expandable_segments:True,backend:cudaMallocAsync,", 15)
                .expect("valid");
        assert_eq!(settings.max_split_bytes, Some(32 * MIB));
        assert!(settings.expandable_segments);
        assert_eq!(settings.backend, Backend::CudaMallocAsync);
        let settings = parse("large_segment_size_mb:64", 11).expect("valid");
        assert_eq!(settings.non_split_rounding_bytes, 64 * MIB);
    }

    #[test]
    fn lists_of_divisions_do_not_inherit() {
        let list = |text: &str, minor| {
            parse(&format!("roundup_power2_divisions:{text}"), minor).expect(text).divisions
        };
        assert_eq!(list("8", 15), [8; 16]);
        let first = [2, 2, 0, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4];
        assert_eq!(list("[2:2,8:8,>:4]", 15), first);
        assert_eq!(list("[2:2,8:8,>:4]", 9)[..4], [2, 2, 0, 4]);
        assert_eq!(list("[>:4]", 9), [4; 16]);
        assert_eq!(list("[>:4]", 10)[..2], [0, 4]);
        assert_eq!(list("[65536:2]", 15), [2; 16]);
    }

    #[test]
    fn sizes_are_rounded_by_the_divisions_of_their_power_of_two() {
        let round = |text: &str, minor: u16, bytes| {
            let settings = parse(text, minor).expect(text);
            settings.round(bytes, Release::new(minor).rules())
        };
        for (bytes, rounded) in
            [(1, 512), (512, 512), (513, 1024), (1 << 20, 1 << 20), ((1 << 20) + 1, (1 << 20) + 512)]
        {
            assert_eq!(round("", 15, bytes), rounded);
        }
        let four = "roundup_power2_divisions:4";
        for (bytes, rounded) in
            [(1200, 1536), (2048, 2048), (2049, 2560), (4096, 4096), (5000, 5120), (4097, 5120)]
        {
            assert_eq!(round(four, 15, bytes), rounded, "{bytes}");
        }
        assert_eq!(round("roundup_power2_divisions:1", 3, 1000), 1000);
        assert_eq!(round("roundup_power2_divisions:1", 4, 1000), 1024);
    }

    #[test]
    fn segments_are_2_mib_20_mib_or_a_multiple_of_2_mib() {
        let segments = [512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 11 * MIB]
            .map(|rounded| Settings::default().segment_bytes(rounded) / MIB);
        assert_eq!(segments, [2, 2, 20, 20, 10, 12]);
    }
}
