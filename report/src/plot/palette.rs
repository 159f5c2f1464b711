//! Colours of categories. A category has the same colour in each run, picture and page: known categories have fixed colours, other
//! names get theirs from a hash, or the next free one. The colours are distinguishable for colour-blind readers. They are the hues
//! of Okabe and Ito.
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
/// Colour of paper.
pub const WHITE: Color = Color(255, 255, 255);

/// Number of categories with their own colour; smaller ones belong in one row `(N smaller)`.
pub const RANKS: usize = 12;

/// Colours for [light, dark] theme. For the dark theme, dark colours are lightened to contrast with the background.
const COLORS: [[Color; 2]; RANKS] = [
    [Color(0x00, 0x72, 0xb2), Color(0x2f, 0x8f, 0xd0)], // blue
    [Color(0xf0, 0xb4, 0x40), Color(0xf0, 0xb4, 0x40)], // orange
    [Color(0x00, 0x7d, 0x5a), Color(0x0f, 0x9b, 0x73)], // green
    [Color(0xf0, 0xe4, 0x6a), Color(0xf0, 0xe4, 0x6a)], // yellow
    [Color(0xb8, 0x4a, 0x00), Color(0xd8, 0x6a, 0x1e)], // vermillion
    [Color(0x8c, 0xcf, 0xf2), Color(0x8c, 0xcf, 0xf2)], // sky
    [Color(0x9a, 0x3f, 0x78), Color(0xba, 0x5c, 0x97)], // purple
    [Color(0xa6, 0xd9, 0xb8), Color(0xa6, 0xd9, 0xb8)], // mint
    [Color(0x3b, 0x3f, 0x8c), Color(0x5a, 0x5e, 0xd0)], // indigo
    [Color(0xc0, 0x9c, 0x84), Color(0xd8, 0xb4, 0x8c)], // tan
    [Color(0x6b, 0x54, 0x2a), Color(0x94, 0x78, 0x44)], // brown
    [Color(0x6a, 0x9a, 0xe8), Color(0x8a, 0xa0, 0xf8)], // periwinkle
];

/// Categories of the built-in rules with the number of their colour. Categories that are often stacked on each other differ in
/// lightness, too.
const FIXED: [(&str, usize); 24] = [
    ("parameters", 0),
    ("Weights", 0),
    ("gradients", 1),
    ("Weight Gradients", 1),
    ("optimizer state", 2),
    ("Optimizer State", 2),
    ("temporaries", 3),
    ("Temporary", 3),
    ("gradients or temporaries", 3),
    ("activations", 4),
    ("Feature Maps", 4),
    ("workspace (cuBLAS etc.)", 5),
    ("workspace", 5),
    ("Workspace", 5),
    ("retained forward outputs", 6),
    ("kv cache", 7),
    ("parameter copies", 8),
    ("inputs", 9),
    ("Inputs", 9),
    ("buffers", 10),
    ("Auxiliary State", 10),
    ("libnccl", 11),
    ("libnccl (outside torch)", 11),
    ("Communication", 11),
];

/// Returns the colours with this number for [light, dark] theme; numbers from [`RANKS`] on repeat the colours.
pub fn color(number: usize) -> [Color; 2] {
    COLORS[number % RANKS]
}

/// Returns the number of the colour that a category has when no other category of its picture has it, and whether it is fixed.
pub fn preferred(name: &str) -> (usize, bool) {
    if let Some((_, number)) = FIXED.iter().find(|(fixed, _)| *fixed == name) {
        return (*number, true);
    }
    // FNV-1a.
    let hash =
        name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    ((hash >> 16) as usize % RANKS, false)
}

/// Returns the number of the colour of each name of a picture. `names` begins with the largest. A name without a fixed colour gets
/// the next free one if its preferred colour is taken.
pub fn numbers<S: AsRef<str>>(names: &[S]) -> Vec<usize> {
    let preferred: Vec<(usize, bool)> = names.iter().map(|name| preferred(name.as_ref())).collect();
    let mut is_taken = [false; RANKS];
    for (number, _) in preferred.iter().filter(|(_, is_fixed)| *is_fixed) {
        is_taken[*number] = true;
    }
    let number = |(number, is_fixed): (usize, bool)| {
        if is_fixed {
            return number;
        }
        let free = (number..number + RANKS).map(|next| next % RANKS).find(|next| !is_taken[*next]);
        let number = free.unwrap_or(number);
        is_taken[number] = true;
        number
    };
    preferred.into_iter().map(number).collect()
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

/// Bytes that no rule matches: beige on paper, light grey on a dark page.
pub const OTHERS: Pattern = Pattern {
    ground: [Color(0xec, 0xe4, 0xd4), Color(0xb4, 0xb8, 0xbe)],
    ink: None,
    degrees: 0.0,
    spacing: 0.0,
};
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
    fn known_categories_keep_their_colour_in_each_picture() {
        let names = ["activations", "GPT/h.0", "parameters", "GPT/h.1"];
        let one = numbers(&names);
        assert_eq!((one[0], one[2]), (4, 0));
        assert_eq!(numbers(&["parameters"]), [0]);
        // Without others, a name has its preferred colour, whatever its size.
        assert_eq!(numbers(&["GPT/h.1"]), [preferred("GPT/h.1").0]);
    }

    #[test]
    fn names_of_a_picture_share_no_colour_while_there_are_enough() {
        let many: Vec<String> = (0..RANKS - 2).map(|layer| format!("GPT/h.{layer}")).collect();
        let mut names: Vec<&str> = many.iter().map(String::as_str).collect();
        names.splice(3..3, ["parameters", "gradients"]);
        let mut all = numbers(&names);
        all.sort_unstable();
        assert_eq!(all, (0..RANKS).collect::<Vec<_>>());
        assert_eq!(numbers(&["parameters", "Weights"]), [0, 0], "both are fixed");
    }

    #[test]
    fn others_are_not_white_and_no_category_looks_like_them() {
        for theme in [0, 1] {
            let others = OTHERS.ground[theme];
            assert_ne!(others, WHITE);
            for number in 0..RANKS {
                let [one, other] = [others, color(number)[theme]].map(|color| seen_by("all", color));
                let far = one.iter().zip(other).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                assert!(far > 0.1, "{theme} {number}: {far}");
            }
        }
    }

    /// Returns the hue of a colour in degrees.
    fn hue(Color(r, g, b): Color) -> f64 {
        let [r, g, b] = [r, g, b].map(f64::from);
        let (most, least) = (r.max(g).max(b), r.min(g).min(b));
        let sector = if most == r {
            (g - b) / (most - least)
        } else if most == g {
            2.0 + (b - r) / (most - least)
        } else {
            4.0 + (r - g) / (most - least)
        };
        (60.0 * sector).rem_euclid(360.0)
    }

    #[test]
    fn a_category_has_the_same_hue_in_both_themes() {
        for (number, [light, dark]) in COLORS.into_iter().enumerate() {
            let far = (hue(light) - hue(dark)).abs();
            assert!(far.min(360.0 - far) < 20.0, "{number}: {} and {}", hue(light), hue(dark));
        }
    }

    #[test]
    fn no_two_categories_look_the_same() {
        for theme in [0, 1] {
            for kind in ["all", "protan", "deutan"] {
                for (rank, other) in (0..RANKS).flat_map(|rank| (0..rank).map(move |other| (rank, other))) {
                    let (a, b) = (seen_by(kind, color(rank)[theme]), seen_by(kind, color(other)[theme]));
                    let far = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                    assert!(far > 0.1, "{theme} {kind}: {rank} and {other} are {far} apart");
                }
            }
        }
    }

    #[test]
    fn text_on_a_colour_can_be_read() {
        for rank in 0..RANKS {
            let color = color(rank)[0];
            let (a, b) = (color.luminance() + 0.05, color.text().luminance() + 0.05);
            assert!(a.max(b) / a.min(b) > 4.5, "{rank}");
        }
        assert_eq!(color(0)[0].hex(), "#0072b2");
    }
}
