//! Differences between two versions of a text, such as JSON in which some numbers have changed.
//!
//! A difference is a list of steps: three numbers `copy`, `skip` and `n` (varints, see [`packed`](super::packed)), and `n` bytes.
//! A step copies bytes of the old text, skips old bytes, and inserts the `n` bytes. So a patched text is never longer than the
//! old text and the difference together.

use crate::varint::{put, take};

/// Maximum number of pieces, skipped and inserted ones together, before the next common piece.
const AHEAD: usize = 16;

/// Returns the difference from `old` to `new`. Compares both piece by piece; a piece ends with a comma.
pub(super) fn difference(old: &[u8], new: &[u8]) -> Vec<u8> {
    let pieces = |text| <[u8]>::split_inclusive(text, |byte| *byte == b',').collect::<Vec<_>>();
    let (old, new): (Vec<&[u8]>, Vec<&[u8]>) = (pieces(old), pieces(new));
    let (mut steps, mut i, mut j) = (Steps::default(), 0, 0);
    while i < old.len() || j < new.len() {
        let is_same = |skip: usize, insert: usize| {
            (0..2).all(|next| old.get(i + skip + next) == new.get(j + insert + next))
        };
        if old.get(i) == new.get(j) {
            steps.copy(old[i].len());
            (i, j) = (i + 1, j + 1);
            continue;
        }
        let nearest = (1..=AHEAD).flat_map(|sum| (0..=sum).map(move |skip| (skip, sum - skip)));
        let (skip, insert) =
            nearest.into_iter().find(|&(skip, insert)| is_same(skip, insert)).unwrap_or((1, 1));
        let (skip, insert) = (skip.min(old.len() - i), insert.min(new.len() - j));
        for next in 0..skip.max(insert) {
            let old = if next < skip { old[i + next] } else { &[] };
            let new = if next < insert { new[j + next] } else { &[] };
            steps.replace(old, new);
        }
        (i, j) = (i + skip, j + insert);
    }
    steps.flush();
    steps.out
}

/// Returns the new text; `None` if the difference does not fit this old text.
pub(super) fn patched(mut old: &[u8], mut difference: &[u8]) -> Option<Vec<u8>> {
    let mut new = Vec::with_capacity(old.len());
    while !difference.is_empty() {
        let mut length = || usize::try_from(take(&mut difference)?).ok();
        let (copy, skip, insert) = (length()?, length()?, length()?);
        new.extend_from_slice(old.get(..copy)?);
        old = old.get(copy..)?.get(skip..)?;
        new.extend_from_slice(difference.get(..insert)?);
        difference = &difference[insert..];
    }
    old.is_empty().then_some(new)
}

/// Builds a difference: the finished steps as bytes, and the step in progress.
#[derive(Default)]
struct Steps {
    out: Vec<u8>,
    copy: usize,
    skip: usize,
    insert: Vec<u8>,
}

impl Steps {
    /// Copies bytes of the old text.
    fn copy(&mut self, bytes: usize) {
        if bytes > 0 && (self.skip > 0 || !self.insert.is_empty()) {
            self.flush();
        }
        self.copy += bytes;
    }

    /// Replaces bytes, of which the common beginning and end are copied.
    fn replace(&mut self, old: &[u8], new: &[u8]) {
        let common = |pairs: &mut dyn Iterator<Item = (&u8, &u8)>| pairs.take_while(|(a, b)| a == b).count();
        let start = common(&mut old.iter().zip(new));
        let (old, new) = (&old[start..], &new[start..]);
        let end = common(&mut old.iter().rev().zip(new.iter().rev()));
        self.copy(start);
        self.skip += old.len() - end;
        self.insert.extend_from_slice(&new[..new.len() - end]);
        self.copy(end);
    }

    fn flush(&mut self) {
        put(&mut self.out, self.copy as u64);
        put(&mut self.out, self.skip as u64);
        put(&mut self.out, self.insert.len() as u64);
        self.out.append(&mut self.insert);
        (self.copy, self.skip) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn patched_text_is_the_new_one(old in "[ab,]{0,60}", new in "[ab,]{0,60}", noise: Vec<u8>) {
            let (old, new) = (old.as_bytes(), new.as_bytes());
            prop_assert_eq!(patched(old, &difference(old, new)), Some(new.to_vec()));
            let _ = patched(old, &noise);
        }
    }

    #[test]
    fn changed_numbers_and_new_elements_take_few_bytes() {
        let text = |time: u64, count: u64| {
            let list: Vec<u64> = (0..count).map(|at| at * 1000).collect();
            format!(
                "{{\"time_ns\":{time},\"named\":{list:?},\"slack\":{list:?},\"more\":{{\"last\":{time}}}}}"
            )
        };
        let (old, new) = (text(7_000_000_000, 64), text(7_000_000_123, 65));
        let difference = difference(old.as_bytes(), new.as_bytes());
        assert!(difference.len() < 70, "{} bytes", difference.len());
        assert_eq!(patched(old.as_bytes(), &difference), Some(new.into_bytes()));
    }
}
