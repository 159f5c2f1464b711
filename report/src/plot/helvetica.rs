//! Widths of Helvetica's characters (Adobe's metrics, in thousandths of the font size), for the layout in all formats. Every PDF
//! reader has this font, and most machines have one with the same widths (Arial, Liberation Sans).

/// Widths of U+0020 to U+007E in Helvetica.
const ASCII: [u16; 95] = [
    278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278, 556, 556, 556, 556, 556,
    556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556, 1015, 667, 667, 722, 722, 667, 611, 778, 722, 278,
    500, 667, 556, 833, 722, 778, 667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469,
    556, 333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556, 556, 556, 333, 500,
    278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584,
];

/// Widths of U+0020 to U+007E in Helvetica-Bold.
const ASCII_BOLD: [u16; 95] = [
    278, 333, 474, 556, 556, 889, 722, 238, 333, 333, 389, 584, 278, 333, 278, 278, 556, 556, 556, 556, 556,
    556, 556, 556, 556, 556, 333, 333, 584, 584, 584, 611, 975, 722, 722, 722, 722, 667, 611, 778, 722, 278,
    556, 722, 611, 833, 722, 778, 667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 333, 278, 333, 584,
    556, 333, 556, 611, 556, 611, 556, 333, 611, 611, 278, 278, 556, 278, 889, 611, 611, 611, 611, 389, 556,
    333, 611, 556, 778, 556, 556, 500, 389, 280, 389, 584,
];

/// Widths of U+00A0 to U+00FF. Letters with accents have the same width as the letters without.
const LATIN_1: [u16; 96] = [
    278, 333, 556, 556, 556, 556, 260, 556, 333, 737, 370, 556, 584, 333, 737, 333, 400, 584, 333, 333, 333,
    556, 537, 278, 333, 333, 365, 556, 834, 834, 834, 611, 667, 667, 667, 667, 667, 667, 1000, 722, 667, 667,
    667, 667, 278, 278, 278, 278, 722, 722, 778, 778, 778, 778, 778, 584, 778, 722, 722, 722, 722, 667, 667,
    611, 556, 556, 556, 556, 556, 556, 889, 500, 556, 556, 556, 556, 278, 278, 278, 278, 556, 556, 556, 556,
    556, 556, 556, 584, 611, 556, 556, 556, 556, 500, 556, 500,
];

/// Character shown in place of one that the font lacks: it is visible, and not mistaken for the original.
pub const REPLACEMENT: char = '\u{bf}';

/// Returns the character that Helvetica shows for `character`, or [`REPLACEMENT`] if the font lacks it.
pub fn shown(character: char) -> char {
    match character {
        ' '..='~' | '\u{a0}'..='\u{ff}' => character,
        '\u{2013}' | '\u{2014}' | '\u{2212}' => '-',
        '\u{2018}' | '\u{2019}' => '\'',
        '\u{201c}' | '\u{201d}' => '"',
        _ => REPLACEMENT,
    }
}

/// Returns the width of a character in thousandths of the font size. Characters that the font lacks count as the widest possible.
pub fn advance(character: char, bold: bool) -> u16 {
    let code = u32::from(character) as usize;
    let of = |table: &[u16], first: usize| table.get(code.wrapping_sub(first)).copied();
    let ascii = if bold { &ASCII_BOLD } else { &ASCII };
    of(ascii, 0x20).or_else(|| of(&LATIN_1, 0xa0)).unwrap_or(1000)
}

/// Returns the width of a text in points.
pub fn width(text: &str, size: f64, bold: bool) -> f64 {
    let thousandths: f64 = text.chars().map(|character| f64::from(advance(character, bold))).sum();
    thousandths * size / 1000.0
}

/// Shortens a text to the width `room`, with two dots in place of its middle. Paths differ at their end and other names at their
/// beginning, so both ends are kept.
pub fn fitted(text: &str, size: f64, bold: bool, room: f64) -> String {
    if width(text, size, bold) <= room {
        return text.to_owned();
    }
    let letters: Vec<char> = text.chars().collect();
    // Each end gets half of the width.
    let half = (room - width("..", size, bold)).max(0.0) / 2.0;
    let head = fitting(letters.iter().copied(), size, bold, half);
    let tail = fitting(letters.iter().rev().copied(), size, bold, half);
    head.chain(['.', '.']).chain(tail.collect::<Vec<_>>().into_iter().rev()).collect()
}

/// Returns the first characters that fit into the width `room`.
fn fitting(
    letters: impl Iterator<Item = char>,
    size: f64,
    bold: bool,
    room: f64,
) -> impl Iterator<Item = char> {
    letters.scan(room, move |left, letter| {
        *left -= f64::from(advance(letter, bold)) * size / 1000.0;
        (*left >= 0.0).then_some(letter)
    })
}

/// Factor by which substitute fonts may be wider than Helvetica, in PDF and SVG readers that do not compress text.
pub const WIDER: f64 = 1.14;

/// Shortens the names of a list like [`fitted`]. Names that would become equal show the part in which they differ.
pub fn distinct(names: &[&str], size: f64, room: f64) -> Vec<String> {
    let short: Vec<String> = names.iter().map(|name| fitted(name, size, false, room)).collect();
    let alike = |index: usize| -> Vec<&str> {
        let own = short.get(index);
        names.iter().zip(&short).filter(|(_, other)| Some(*other) == own).map(|(name, _)| *name).collect()
    };
    let shorten = |(index, name): (usize, &&str)| {
        let alike = alike(index);
        let same = alike.iter().fold(name.len(), |same, other| {
            let common = name.chars().zip(other.chars()).take_while(|(a, b)| a == b);
            same.min(if name == other { same } else { common.map(|(letter, _)| letter.len_utf8()).sum() })
        });
        let is_distinct = alike.iter().all(|other| other == name);
        match name.get(..same).filter(|_| !is_distinct) {
            // Starts at the path component in which the names differ.
            Some(common) => {
                let from =
                    common.rfind('/').map_or(same.saturating_sub(common.len().min(8)), |slash| slash + 1);
                beginning(&format!("..{}", name.get(from..).unwrap_or(name)), size, room)
            }
            None => fitted(name, size, false, room),
        }
    };
    names.iter().enumerate().map(shorten).collect()
}

/// Shortens a text to the width `room`, with two dots in place of its end.
fn beginning(text: &str, size: f64, room: f64) -> String {
    if width(text, size, false) <= room {
        return text.to_owned();
    }
    fitting(text.chars(), size, false, room - width("..", size, false)).chain("..".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_those_of_the_font() {
        // "Hello" is 722 + 556 + 222 + 222 + 556 thousandths wide.
        assert!((width("Hello", 10.0, false) - 22.78).abs() < 1e-9);
        assert!((width("Hello", 10.0, true) - 24.45).abs() < 1e-9);
        assert_eq!(advance('~', false), 584);
        assert_eq!(advance('\u{ff}', false), 500);
        assert_eq!(advance('\u{e9}', false), advance('e', false));
        assert_eq!(shown('\u{4e2d}'), '\u{bf}');
    }

    #[test]
    fn what_is_too_long_keeps_both_ends() {
        let name = "model/layers.17/self_attention/output_projection/weight";
        let short = fitted(name, 9.0, false, 120.0);
        assert!(width(&short, 9.0, false) <= 120.0, "{short}");
        assert!(
            short.starts_with("model/la") && short.ends_with("weight") && short.contains(".."),
            "{short}"
        );
        assert_eq!(fitted("short", 9.0, false, 120.0), "short");
        assert_eq!(fitted("anything", 9.0, false, 0.0), "..");
    }

    #[test]
    fn long_names_of_a_list_are_distinct() {
        let names: Vec<String> =
            (0..30).map(|layer| format!("model/layers.{layer}/self_attention/output_projection")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).chain(["short", "same", "same"]).collect();
        let told = distinct(&names, 9.0, 110.0);
        let different: std::collections::BTreeSet<&String> = told.iter().collect();
        assert_eq!(different.len(), 32, "{told:?}");
        assert!(told.iter().all(|name| width(name, 9.0, false) <= 110.0), "{told:?}");
        assert!(told[7].starts_with("..layers.7/self"), "{}", told[7]);
        assert_eq!(told[30], "short");
    }
}
