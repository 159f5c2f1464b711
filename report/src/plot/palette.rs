//! Colours of categories: the largest category has the first colour. The colours are distinguishable for colour-blind readers.
//! They are the hues of Okabe and Ito. Adjacent colours also differ in lightness, so that they differ on a grey printer. Pictures
//! and pages use the same colours.
//!
//! No form relies on colour alone: every form names its parts in the order in which they are stacked. Parts without a category
//! have a pattern or no colour.

/// A colour as red, green and blue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Color(pub u8, pub u8, pub u8);

impl Color {
    /// Returns the colour as CSS and SVG write it: `#0072b2`.
    pub fn hex(self) -> String {
        format!("#{:02x}{:02x}{:02x}", self.0, self.1, self.2)
    }

    /// Returns WCAG's relative luminance, 0 to 1.
    pub fn luminance(self) -> f64 {
        let linear = |part: u8| {
            let part = f64::from(part) / 255.0;
            if part <= 0.040_45 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * linear(self.0) + 0.7152 * linear(self.1) + 0.0722 * linear(self.2)
    }

    /// Returns black or white, whichever is more readable on this colour.
    pub fn text(self) -> Color {
        if self.luminance() > 0.179 { BLACK } else { WHITE }
    }
}

/// Text colour on paper.
pub const BLACK: Color = Color(0, 0, 0);
/// Colour of paper, and of the part `Others` on paper.
pub const WHITE: Color = Color(255, 255, 255);

/// Number of categories with their own colour; smaller ones belong in one row `(N smaller)`.
pub const RANKS: usize = 12;

/// Colours for [light, dark] theme. The lightness of adjacent colours differs by at least half. For the dark theme, dark colours
/// are lightened to contrast with the background.
const CATEGORIES: [[Color; 2]; RANKS] = [
    [Color(0x00, 0x72, 0xb2), Color(0x2f, 0x8f, 0xd0)], // blue
    [Color(0xf0, 0xb4, 0x40), Color(0xf0, 0xb4, 0x40)], // orange
    [Color(0x00, 0x7d, 0x5a), Color(0x0f, 0x9b, 0x73)], // green
    [Color(0xf0, 0xe4, 0x6a), Color(0xf0, 0xe4, 0x6a)], // yellow
    [Color(0xb8, 0x4a, 0x00), Color(0xd8, 0x6a, 0x1e)], // vermillion
    [Color(0x8c, 0xcf, 0xf2), Color(0x8c, 0xcf, 0xf2)], // sky
    [Color(0x9a, 0x3f, 0x78), Color(0xba, 0x5c, 0x97)], // purple
    [Color(0xa6, 0xd9, 0xb8), Color(0xa6, 0xd9, 0xb8)], // mint
    [Color(0x3b, 0x3f, 0x8c), Color(0x7a, 0x5c, 0xc8)], // indigo
    [Color(0xc0, 0x9c, 0x84), Color(0xd8, 0xb4, 0x8c)], // tan
    [Color(0x6b, 0x54, 0x2a), Color(0x94, 0x78, 0x44)], // brown
    [Color(0x6a, 0x9a, 0xe8), Color(0xd2, 0xfa, 0xa2)], // periwinkle
];

/// Returns the colours of a category for [light, dark] theme. `rank` is its place by size, 0 for the largest; ranks beyond
/// [`RANKS`] repeat the colours.
pub fn category(rank: usize) -> [Color; 2] {
    CATEGORIES[rank % RANKS]
}

/// Appearance of an area: a background, and lines on it if the area stands for memory without a category.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pattern {
    /// Background colour for [light, dark] theme.
    pub ground: [Color; 2],
    /// Colour of the lines for [light, dark] theme; `None` for a plain background.
    pub ink: Option<[Color; 2]>,
    /// Direction of the lines, in degrees from the horizontal, counterclockwise.
    pub degrees: f64,
    /// Distance between lines, in points (96-dpi pixels times 0.75).
    pub spacing: f64,
}

impl Pattern {
    /// Returns a plain background in these colours for [light, dark] theme.
    pub fn plain(ground: [Color; 2]) -> Self {
        Pattern { ground, ..OTHERS }
    }
}

/// Bytes that no rule matches: white on paper, grey on a dark page.
pub const OTHERS: Pattern =
    Pattern { ground: [WHITE, Color(0xb4, 0xb8, 0xbe)], ink: None, degrees: 0.0, spacing: 0.0 };
/// The sum of small categories: plain grey.
pub const SMALLER: Pattern = Pattern { ground: [Color(0xd6, 0xd6, 0xd6), Color(0x7d, 0x82, 0x8a)], ..OTHERS };
/// Idle pool memory: a light, falling hatch.
pub const IDLE: Pattern = Pattern {
    ground: [Color(0xf4, 0xf4, 0xf4), Color(0x33, 0x37, 0x3d)],
    ink: Some([Color(0xa8, 0xa8, 0xa8), Color(0x7d, 0x82, 0x8a)]),
    degrees: -45.0,
    spacing: 6.0,
};
/// Pools that report no blocks: horizontal lines.
pub const OPAQUE: Pattern = Pattern { degrees: 0.0, spacing: 4.0, ..IDLE };
/// Memory older than the agent: vertical lines.
pub const PREDATES: Pattern = Pattern { degrees: 90.0, spacing: 4.0, ..IDLE };
/// Untrackable memory: a strong, rising hatch.
pub const UNTRACKABLE: Pattern = Pattern {
    ground: [WHITE, Color(0x1c, 0x1f, 0x24)],
    ink: Some([Color(0x3c, 0x3c, 0x3c), Color(0xd0, 0xd4, 0xda)]),
    degrees: 45.0,
    spacing: 4.0,
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a colour as seen by a person who lacks one kind of cone (Viénot, Brettel and Mollon 1999, in linear light).
    fn seen_by(kind: &str, color: Color) -> [f64; 3] {
        let linear = |part: u8| (f64::from(part) / 255.0).powf(2.2);
        let (r, g, b) = (linear(color.0), linear(color.1), linear(color.2));
        let (l, m, s) = (
            17.8824 * r + 43.5161 * g + 4.11935 * b,
            3.45565 * r + 27.1554 * g + 3.86714 * b,
            0.029_956_6 * r + 0.184_309 * g + 1.467_09 * b,
        );
        let (l, m, s) = match kind {
            "protan" => (2.02344 * m - 2.52581 * s, m, s),
            "deutan" => (l, 0.494_207 * l + 1.248_27 * s, s),
            _ => (l, m, s),
        };
        [
            0.080_944_4 * l - 0.130_504 * m + 0.116_721 * s,
            -0.010_248_5 * l + 0.054_019_3 * m - 0.113_615 * s,
            -0.000_365_3 * l - 0.004_121_6 * m + 0.693_511 * s,
        ]
        .map(|part| part.clamp(0.0, 1.0).powf(1.0 / 2.2))
    }

    #[test]
    fn neighbours_differ_for_every_eye_and_without_colour() {
        for theme in [0, 1] {
            for rank in 0..RANKS {
                let (one, next) = (category(rank)[theme], category(rank + 1)[theme]);
                for kind in ["all", "protan", "deutan"] {
                    let (a, b) = (seen_by(kind, one), seen_by(kind, next));
                    let far = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                    assert!(far > 0.25, "{theme} {rank} {kind}: {far}");
                }
                let (a, b) = (one.luminance() + 0.05, next.luminance() + 0.05);
                assert!(a.max(b) / a.min(b) > 1.5, "{theme} {rank} in grey: {}", a.max(b) / a.min(b));
            }
        }
    }

    #[test]
    fn no_two_categories_look_the_same() {
        for theme in [0, 1] {
            for kind in ["all", "protan", "deutan"] {
                for (rank, other) in (0..RANKS).flat_map(|rank| (0..rank).map(move |other| (rank, other))) {
                    let (a, b) =
                        (seen_by(kind, category(rank)[theme]), seen_by(kind, category(other)[theme]));
                    let far = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                    assert!(far > 0.1, "{theme} {kind}: {rank} and {other} are {far} apart");
                }
            }
        }
    }

    #[test]
    fn text_on_a_colour_can_be_read() {
        for rank in 0..RANKS {
            let color = category(rank)[0];
            let (a, b) = (color.luminance() + 0.05, color.text().luminance() + 0.05);
            assert!(a.max(b) / a.min(b) > 4.5, "{rank}");
        }
        assert_eq!(category(0)[0].hex(), "#0072b2");
    }
}
