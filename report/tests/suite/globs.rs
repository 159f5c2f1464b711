//! Compares the glob matcher with a direct implementation of the definition.
use gpumem_report::category::Pattern;
use proptest::prelude::*;

/// Tries everything: exponential, but obviously correct.
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

proptest! {
    #[test]
    fn globs_match_as_defined(glob in "[ab\u{e4}?*]{0,7}", text in "[ab\u{e4}]{0,8}") {
        let (pieces, letters): (Vec<char>, Vec<char>) = (glob.chars().collect(), text.chars().collect());
        let pattern = Pattern::new(&glob).expect("a glob is always a pattern");
        prop_assert_eq!(pattern.matches(&text), matches(&pieces, &letters), "{} on {}", glob, text);
    }
}
