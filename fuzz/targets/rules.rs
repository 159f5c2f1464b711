//! Parses a file of rules and matches its patterns.
#![no_main]

use gpumem_report::category::Pattern;
use gpumem_report::rules::Groupings;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Groupings::parse(text, gpumem_fuzz::NAME) {
        Ok(groupings) => {
            for rules in [&groupings.layer, &groupings.structure] {
                for rule in &rules.rules {
                    for pattern in rule.tags.iter().chain(&rule.libraries) {
                        let _ = pattern.matches(text);
                    }
                }
            }
        }
        Err(error) => assert!(error.to_string().starts_with(gpumem_fuzz::NAME), "{error}"),
    }
    // Compares a glob on a text with a naive matcher.
    if let Some((glob, tag)) = text.split_once('\n') {
        match Pattern::new(glob) {
            Ok(pattern) if !glob.starts_with("re:") && glob.len() < 12 && tag.len() < 12 => {
                let (pieces, letters): (Vec<char>, Vec<char>) =
                    (glob.chars().collect(), tag.chars().collect());
                assert_eq!(pattern.matches(tag), matches(&pieces, &letters), "{glob:?} on {tag:?}");
            }
            Ok(pattern) => drop(pattern.matches(tag)),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
});

fn matches(glob: &[char], text: &[char]) -> bool {
    match (glob.split_first(), text.split_first()) {
        (None, None) => true,
        (Some(('*', rest)), None) => matches(rest, text),
        (Some(('*', rest)), Some((_, after))) => matches(rest, text) || matches(glob, after),
        (Some((wanted, rest)), Some((found, after))) => {
            (*wanted == '?' || wanted == found) && matches(rest, after)
        }
        _ => false,
    }
}
