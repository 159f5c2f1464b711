//! Sizes, times, steps, shares and names in gpumemctl's arguments: each word has one meaning, and the agent accepts
//! every accepted value.
#![no_main]
#![allow(dead_code)]

#[path = "../../ctl/src/args/typed.rs"]
mod typed;

use gpumem::sources::api::recordings::RecordingLimits;
use gpumem_fuzz::harmless;
use gpumem_report::diff::gate::Limit;
use gpumem_report::text::escape;
use libfuzzer_sys::fuzz_target;

/// Reference parser: digits and a unit, multiplied without overflow; `None` for all other text and for 0.
fn meant(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    units.iter().find_map(|(unit, factor)| {
        let digits = text.strip_suffix(unit)?;
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let digits = digits.trim_start_matches('0');
        let number =
            is_number.then(|| if digits.is_empty() { Ok(0) } else { digits.parse::<u128>() })?.ok()?;
        u64::try_from(number.checked_mul(u128::from(*factor))?).ok().filter(|number| *number > 0)
    })
}

const SIZES: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("K", 1 << 10),
    ("M", 1 << 20),
    ("G", 1 << 30),
    ("T", 1 << 40),
    ("", 1),
];
const TIMES: [(&str, u64); 5] = [("s", 1), ("min", 60), ("m", 60), ("h", 3600), ("", 1)];

fn told<T>(read: Result<T, String>) -> Option<T> {
    read.inspect_err(|error| harmless(error)).ok()
}

/// Limits that the agent receives from gpumemctl and the daemon.
fn agents(limit: &str) -> Option<RecordingLimits> {
    Some(RecordingLimits::of_command(&format!("/file\0{limit}"))?.1)
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let size = told(typed::size(text));
    assert_eq!(size, meant(text, &SIZES), "{text:?}");
    if let Some(bytes) = size {
        assert_eq!(agents(&format!("max_size={bytes}")).and_then(|limits| limits.max_bytes), Some(bytes));
    }
    let seconds = told(typed::seconds(text));
    assert_eq!(seconds, meant(text, &TIMES), "{text:?}");
    if let Some(steps) = told(typed::steps(text)) {
        assert_eq!(
            agents(&format!("steps={}:{}", steps.0, steps.1)).and_then(|limits| limits.steps),
            Some(steps)
        );
        assert_eq!(typed::steps(&format!("{}:{}", steps.0, steps.1)), Ok(steps));
    }
    if let Some(percent) = told(typed::percent(text)) {
        assert!((0.0..=100.0).contains(&percent));
        assert_eq!(typed::percent(&format!("{percent}%")), Ok(percent));
    }
    if let Some(name) = told(typed::job_name(text)) {
        assert!(name == text && !name.contains(['/', '\0', ' ']) && name.len() <= 64);
    }
    match text.parse::<Limit>() {
        // Equals the typed size if that has no space before the unit, no lower-case unit and no decimals.
        Ok(Limit::Bytes(limit)) => {
            assert!(limit >= 0);
            if let Some(bytes) = text.strip_suffix('B').and(size) {
                assert_eq!(u64::try_from(limit), Ok(bytes), "{text:?}");
            }
        }
        Ok(Limit::Millionths(limit)) => assert!(limit >= 0 && text.ends_with('%')),
        Err(error) => harmless(&escape(&error.to_string())),
    }
});
