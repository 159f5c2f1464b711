//! The report as one self-contained HTML page that makes no network requests.
//!
//! The page also contains the report as text, for browsers that run no scripts. The script draws everything else from one JSON
//! document in the page. Strings from processes cannot act as code: no string can end the JSON document (see [`inert`]), and the
//! script sets text, never markup. In addition, the content security policy forbids all requests and all other scripts.

mod blocks;
mod data;
mod holdings;

use super::{Report, group as table};
use crate::encode::markup;
use crate::plot::palette::{self, Color, RANKS};
use crate::text::{self, Layout};
use base64::prelude::{BASE64_STANDARD, Engine};
use data::Limits;
use gpumem_model::escape::escape;
use gpumem_model::escape::escape_json;
use sha2::{Digest, Sha256};
use std::fmt::Write;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = concat!(
    include_str!("base.js"),
    include_str!("moment.js"),
    include_str!("statement.js"),
    include_str!("zoom.js"),
    include_str!("timeline.js"),
    include_str!("drawing.js"),
    include_str!("blocks.js"),
    include_str!("blocks_drawing.js"),
    include_str!("groupings.js"),
    include_str!("icicle.js"),
    include_str!("lists.js"),
    include_str!("page.js"),
);
const FILE: &str = include_str!("file.js");

/// Maximum size of a page in bytes. A page is larger only if its processes do not fit even with the smallest limits.
pub const MAX_BYTES: usize = 5_000_000;
/// Maximum number of processes of a group whose text form is in the page.
const MOST_TEXTS: usize = 16;

/// Returns the page of one process.
pub fn html(report: &Report<'_>) -> String {
    page(None, std::slice::from_ref(report), &text::text(report, Layout::default()))
}

/// Returns the page of several processes under a title. `command` is the command that the user typed.
pub fn group(title: &str, reports: &[Report<'_>], command: &str) -> String {
    let runs: Vec<&gpumem_model::run::Run> = reports.iter().map(|report| report.run).collect();
    let mut words = table::text(title, &runs, command);
    for report in reports.iter().take(MOST_TEXTS) {
        words += &format!("\n{}", text::text(report, Layout::default()));
    }
    page(Some(title), reports, &words)
}

fn page(title: Option<&str>, reports: &[Report<'_>], words: &str) -> String {
    let title =
        title.map(escape).unwrap_or_else(|| reports.first().map_or("no process".to_owned(), text::heading));
    let body = |data: &str| {
        format!(
            "<a class=\"skip\" href=\"#main\">to the report</a>\n<main id=\"main\" tabindex=\"-1\"></main>\n\
             <section aria-label=\"the report as text\"><details id=\"text\" class=\"wide\" open><summary>The same as text</summary>\
             <pre tabindex=\"0\" role=\"group\" aria-label=\"text\">{}</pre></details></section>\n\
             <script type=\"application/json\" id=\"data\">{data}</script>\n",
            markup(words)
        )
    };
    limited(Limits::default(), MAX_BYTES, |limits| {
        let data = data::page(&title, reports, limits);
        // Keys are strings and numbers are finite, so serialisation cannot fail.
        let data = inert(&serde_json::to_string(&data).unwrap_or_default());
        assembled(&title, "", &body(&data), FILE, "").page
    })
}

/// Lowers the limits until the text that `make` returns has at most `most_bytes`, or until the limits are at their minimum.
fn limited(limits: Limits, most_bytes: usize, make: impl Fn(Limits) -> String) -> String {
    let mut limits = limits;
    loop {
        let text = make(limits);
        match limits.lowered() {
            Some(fewer) if text.len() > most_bytes => limits = fewer,
            _ => return text,
        }
    }
}

/// Returns a report as data for the script of a page that requests it repeatedly. Lowers the limits until the data has at most
/// `most_bytes`, if possible. `tags`: whether the data contains tags.
pub fn data(report: &Report<'_>, tags: bool, most_bytes: usize) -> String {
    let title = text::heading(report);
    // The page requests and draws this data every 2 seconds, so it has fewer points than a saved report.
    let limits = Limits {
        blocks: 0,
        points: 128,
        buckets: 256,
        steps: 64,
        ooms: 16,
        devices: 16,
        holdings: 2048,
        tags,
    };
    limited(limits, most_bytes, |limits| {
        let data = data::page(&title, std::slice::from_ref(report), limits);
        inert(&serde_json::to_string(&data).unwrap_or_default())
    })
}

/// A page and its content security policy.
#[derive(Debug, Clone)]
pub struct Shell {
    /// The HTML text.
    pub page: String,
    /// The content security policy. The page contains it too.
    pub policy: String,
}

/// Returns a page without a report: the drawing scripts, and `own_script`, which requests a report from the server of the page.
pub fn shell(title: &str, own_style: &str, own_script: &str, words: &str) -> Shell {
    let body = format!(
        "<a class=\"skip\" href=\"#main\">to the numbers</a>\n<main id=\"main\" tabindex=\"-1\"><noscript>{}</noscript></main>\n",
        markup(words)
    );
    assembled(title, own_style, &body, own_script, " connect-src 'self';")
}

/// Returns the page with this body. `own_style` and `own_script` follow the style and the script that all pages share.
fn assembled(title: &str, own_style: &str, body: &str, own_script: &str, more_policy: &str) -> Shell {
    let style = STYLE.to_owned() + &color_style() + own_style;
    let script = SCRIPT.to_owned() + own_script;
    let policy = format!(
        "default-src 'none'; script-src '{}'; style-src '{}';{more_policy} base-uri 'none'; form-action 'none'",
        hash_source(&script),
        hash_source(&style)
    );
    let mut page = String::with_capacity(body.len() + script.len() + style.len() + 2048);
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"referrer\" content=\"no-referrer\">\n\
         <title>{}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}<script>{script}</script>\n</body>\n</html>\n",
        markup(title),
    );
    Shell { page, policy }
}

/// Returns the hash of a script or style as a source in a content security policy: `sha256-...`.
fn hash_source(text: &str) -> String {
    format!("sha256-{}", BASE64_STANDARD.encode(Sha256::digest(text)))
}

/// Escapes JSON so that it is inert inside HTML, editors and terminals. `<`, `>` and `&` could end the document or begin a
/// comment. Line and paragraph separators end lines of scripts; other characters change the reading direction. These characters
/// occur only in strings.
fn inert(json: &str) -> String {
    escape_json(json, |character| matches!(character, '<' | '>' | '&'))
}

/// Returns the palette as CSS rules: variables for light and dark themes, and a class for each colour. Browsers without
/// `light-dark` get the light theme.
fn color_style() -> String {
    let mut names: Vec<(String, [Color; 2])> = Vec::new();
    let mut classes = String::new();
    let mut plain = |name: String, colors: [Color; 2]| {
        let _ = writeln!(classes, ".{name} {{ background: var(--{name}); color: var(--on-{name}); }}");
        names.push((format!("on-{name}"), colors.map(Color::text)));
        names.push((name, colors));
    };
    for number in 0..RANKS {
        plain(format!("c{number}"), palette::color(number));
    }
    plain("others".to_owned(), palette::OTHERS.ground);
    plain("smaller".to_owned(), palette::SMALLER.ground);
    let hatched = [
        ("idle", palette::IDLE),
        ("opaque", palette::OPAQUE),
        ("predates", palette::PREDATES),
        ("untrackable", palette::UNTRACKABLE),
    ];
    for (name, pattern) in hatched {
        names.push((name.to_owned(), pattern.ground));
        names.push((format!("{name}-ink"), pattern.ink.unwrap_or(pattern.ground)));
        // CSS angles are clockwise, and stripes are perpendicular to their gradient.
        let (degrees, spacing) = (-pattern.degrees, pattern.spacing * 4.0 / 3.0);
        // Stripes are whole pixels apart in a row of pixels; otherwise some of them would be drawn wider than others.
        let slope = if pattern.degrees % 90.0 == 0.0 { 1.0 } else { std::f64::consts::SQRT_2 };
        let spacing = (spacing * slope).round() / slope;
        let _ = writeln!(
            classes,
            ".{name} {{ background: repeating-linear-gradient({degrees}deg, var(--{name}-ink) 0 1px, var(--{name}) 1px \
             {spacing:.4}px); color: var(--ink); }}"
        );
    }
    let light: String =
        names.iter().map(|(name, [light, _])| format!("--{name}: {};\n", light.hex())).collect();
    let themed: String = names
        .iter()
        .map(|(name, [light, dark])| format!("--{name}: light-dark({}, {});\n", light.hex(), dark.hex()))
        .collect();
    format!(
        ":root {{\n{light}}}\n@supports (color: light-dark(red, red)) {{ :root {{\n{themed}}} }}\n{classes}\
         .free {{ background: radial-gradient(circle, var(--line) 1px, var(--bg) 1.5px) 0 0 / 6px 6px; }}\n.rest {{ background: var(--panel); }}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Groupings;
    use gpumem_model::blocks::{Block, Blocks};
    use gpumem_model::run::Run;

    pub fn run_of_a_log() -> Run {
        let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        gpumem_import::read_file(&log, None).expect("a log").remove(0)
    }

    #[test]
    fn nothing_ends_the_document() {
        let bad = "</script><!-- & \u{2028}\u{2029}\u{202e}\u{0}\u{7f}\u{feff} \u{1f600}";
        let json = serde_json::to_string(bad).expect("a string");
        let inert = inert(&json);
        assert!(!inert.contains(['<', '>', '&', '\u{2028}', '\u{202e}', '\u{7f}']), "{inert}");
        assert!(inert.contains('\u{1f600}'), "{inert}");
        assert_eq!(serde_json::from_str::<String>(&inert).expect("JSON still"), bad);
        assert_eq!(markup("<a b='\"&'>"), "&lt;a b=&#39;&quot;&amp;&#39;&gt;");
    }

    #[test]
    fn single_blocks_are_the_first_to_be_left_out() {
        let mut limits = Limits::default();
        while limits.blocks > 0 {
            let lower = limits.lowered().expect("fewer blocks");
            assert!(lower.blocks < limits.blocks);
            let others = Limits { blocks: limits.blocks, ..lower };
            assert_eq!(format!("{others:?}"), format!("{limits:?}"));
            limits = lower;
        }
        assert_eq!(limits.lowered().map(|lower| lower.points), Some(128));
    }

    #[test]
    fn each_of_many_processes_with_single_blocks_has_its_details() {
        let made_ns = (1..=4200).map(|at| at * 1_000_003);
        let blocks = made_ns.clone().map(|made_ns| Block {
            address: made_ns << 12,
            bytes: made_ns << 10,
            cell: 0,
            made_ns: Some(made_ns),
            freed_ns: Some(made_ns + 2_000_001),
        });
        let mut run = run_of_a_log();
        let details = &mut run.devices[0].details;
        details.blocks = Blocks { to_ns: 4_202_100_000, blocks: blocks.collect(), ..Blocks::default() };
        details.blocks.tracked = made_ns.map(|time_ns| (time_ns, time_ns as i64)).collect();
        let reports: Vec<Report<'_>> =
            (0..28).map(|_| Report::new(&run, Groupings::preset(None).clone(), None)).collect();
        let page = group("many", &reports, "");
        assert!(page.len() <= MAX_BYTES, "{}", page.len());
        assert_eq!(page.matches("\"levels\":[[").count(), 28);
    }

    #[test]
    fn a_policy_names_the_hash_of_a_script() {
        assert_eq!(hash_source("abc"), "sha256-ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=");
    }

    #[test]
    fn the_script_could_stand_in_any_page() {
        for part in [SCRIPT, FILE, STYLE] {
            let part =
                part.to_ascii_lowercase().replace("http://www.w3.org/2000/svg", "").replace("url(#", "");
            for word in
                ["</script", "</style", "<!--", "http:", "https:", "innerhtml", "eval(", "url(", "import("]
            {
                assert!(!part.contains(word), "{word}");
            }
        }
    }
}
