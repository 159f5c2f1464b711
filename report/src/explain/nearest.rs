//! What may have been meant by a word that is not known.

/// Names that are offered.
const OFFERED: usize = 4;
/// Longest word that is compared.
const LONGEST: usize = 64;

/// The nearest of `known`, the best first; one that is a part of the other counts as near.
pub(super) fn nearest(word: &str, known: &[String]) -> Vec<String> {
    let word: Vec<char> = super::plain(word).chars().take(LONGEST).collect();
    let text: String = word.iter().collect();
    let mut near: Vec<(usize, &String)> = known
        .iter()
        .filter_map(|name| {
            let other: Vec<char> = super::plain(name).chars().take(LONGEST).collect();
            let distance = distance(&word, &other);
            let name_text: String = other.iter().collect();
            let is_part = |whole: &str, part: &str| part.len() >= 3 && whole.contains(part);
            let begins = is_part(&name_text, &text) || is_part(&text, &name_text);
            let most = 1 + word.len() / 3;
            (begins || distance <= most).then_some((if begins { distance.min(1) } else { distance }, name))
        })
        .collect();
    near.sort();
    near.dedup_by(|a, b| a.1 == b.1);
    near.into_iter().take(OFFERED).map(|(_, name)| name.clone()).collect()
}

/// Letters that must be changed, added or left out.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.iter().enumerate() {
        let mut diagonal = i;
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
        for (j, right) in b.iter().enumerate() {
            let (above, before) = (row.get(j + 1).copied().unwrap_or(0), row.get(j).copied().unwrap_or(0));
            let cost = diagonal + usize::from(left != right);
            if let Some(cell) = row.get_mut(j + 1) {
                *cell = cost.min(above + 1).min(before + 1);
            }
            diagonal = above;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_words_are_found() {
        let letters = |text: &str| text.chars().collect::<Vec<_>>();
        assert_eq!(distance(&letters("kitten"), &letters("sitting")), 3);
        assert_eq!(distance(&letters(""), &letters("abc")), 3);
        let known = ["tracked", "Untrackable", "used", "unaccounted"].map(str::to_owned);
        assert_eq!(nearest("traked", &known), ["tracked"]);
        assert_eq!(nearest("untrack", &known), ["Untrackable"]);
        assert!(nearest("xyzzy", &known).is_empty());
    }
}
