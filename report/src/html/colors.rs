//! The palette as a style sheet has it: variables for light and dark, and a class for each colour.

use crate::plot::palette::{
    Color, Pattern, RANKS, Theme, category, idle, opaque, others, predates, smaller, untrackable,
};
use std::fmt::Write;

/// A name, and what it looks like.
type Hatched = (&'static str, fn(Theme) -> Pattern);

/// Rules of the style sheet. Browsers that know no `light-dark` are light.
pub(super) fn style() -> String {
    let mut names: Vec<(String, [Color; 2])> = Vec::new();
    let mut classes = String::new();
    let both = |of: &dyn Fn(Theme) -> Color| [Theme::Light, Theme::Dark].map(of);
    let mut plain = |name: String, colors: [Color; 2]| {
        let _ = writeln!(classes, ".{name} {{ background: var(--{name}); color: var(--on-{name}); }}");
        names.push((format!("on-{name}"), colors.map(Color::text)));
        names.push((name, colors));
    };
    for rank in 0..RANKS {
        plain(format!("c{rank}"), both(&|theme| category(rank, theme)));
    }
    plain("others".to_owned(), both(&|theme| others(theme).ground));
    plain("smaller".to_owned(), both(&|theme| smaller(theme).ground));
    let hatched: [Hatched; 4] =
        [("idle", idle), ("opaque", opaque), ("predates", predates), ("untrackable", untrackable)];
    for (name, of) in hatched {
        names.push((name.to_owned(), both(&|theme| of(theme).ground)));
        names.push((format!("{name}-ink"), both(&|theme| of(theme).ink.unwrap_or(of(theme).ground))));
        // CSS turns clockwise, and a line runs across its gradient.
        let (degrees, spacing) = (-of(Theme::Light).degrees, of(Theme::Light).spacing * 4.0 / 3.0);
        let _ = writeln!(
            classes,
            ".{name} {{ background: repeating-linear-gradient({degrees}deg, var(--{name}-ink) 0 1px, var(--{name}) 1px \
             {spacing:.0}px); color: var(--ink); }}"
        );
    }
    let light: String =
        names.iter().map(|(name, [light, _])| format!("--{name}: {};\n", light.hex())).collect();
    let themed: String = names
        .iter()
        .map(|(name, [light, dark])| format!("--{name}: light-dark({}, {});\n", light.hex(), dark.hex()))
        .collect();
    format!(
        ":root {{\n{light}}}\n@supports (color: light-dark(red, red)) {{ :root {{\n{themed}}} }}\n{classes}.free {{ background: var(--bg); }}\n"
    )
}
