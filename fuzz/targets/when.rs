//! Times in arguments: a parsed time prints in a form that parses to the same time.
#![no_main]
#![allow(dead_code)]

#[path = "../../ctl/src/when.rs"]
mod when;

use gpumem_fuzz::harmless;
use gpumem_report::text::escape;
use libfuzzer_sys::fuzz_target;
use when::When;

/// 2026-11-20 10:30:00 UTC.
const NOW: i64 = 1_795_170_600_000_000_000;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match text.parse::<When>() {
        Ok(when) => {
            let printed = when.to_string();
            match &when {
                // Times before 1970 print as the start of time.
                When::At(at_ns) if *at_ns < 0 => {}
                // Fractions of a second are not printed.
                When::OfDay(..) => assert!(printed.parse::<When>().is_ok(), "{text:?} is {printed:?}"),
                _ => assert_eq!(printed.parse().as_ref(), Ok(&when), "{text:?} is {printed:?}"),
            }
            let _ = when.unix_ns(NOW);
        }
        Err(error) => harmless(&escape(&error)),
    }
    let _ = when::two(text);
});
