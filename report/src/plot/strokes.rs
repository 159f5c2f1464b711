//! Letters as strokes of a round pen, with Helvetica's widths. So PNG pictures have the same layout as SVG and PDF pictures, and
//! no machine needs a font. Coordinates are in thousandths of the font size, with y upwards from the baseline.

use super::helvetica::{REPLACEMENT, advance};

#[derive(Debug, Clone, Copy)]
enum Mark {
    /// A line through points; a single point is a dot.
    Path(&'static [(i16, i16)]),
    /// An arc of an ellipse: (centre, half axes, (first, last) angle). Angles are in degrees counterclockwise.
    Arc((i16, i16), (i16, i16), (i16, i16)),
}
use Mark::{Arc, Path};

/// Returns the width of the pen, as a fraction of the font size.
pub(super) fn pen(bold: bool) -> f64 {
    if bold { 0.122 } else { 0.08 }
}

/// Strokes of the characters U+0020 to U+007E.
#[rustfmt::skip]
const ASCII: [&[Mark]; 95] = [
    &[],
    &[Path(&[(139, 680), (139, 220)]), Path(&[(139, 45)])],
    &[Path(&[(110, 680), (110, 480)]), Path(&[(245, 680), (245, 480)])],
    &[Path(&[(215, 660), (130, 40)]), Path(&[(425, 660), (340, 40)]), Path(&[(60, 450), (520, 450)]), Path(&[(36, 240), (496, 240)])],
    &[Arc((278, 510), (165, 135), (25, 270)), Arc((278, 220), (185, 155), (90, -155)), Path(&[(278, 740), (278, -30)])],
    &[Arc((200, 515), (135, 165), (0, 360)), Arc((690, 205), (135, 165), (0, 360)), Path(&[(630, 690), (260, 30)])],
    &[Path(&[(620, 40), (191, 500)]), Arc((295, 560), (120, 120), (210, -40)), Path(&[(387, 483), (148, 314)]), Arc((270, 195), (190, 155), (130, 350)), Path(&[(457, 168), (560, 360)])],
    &[Path(&[(96, 680), (96, 480)])],
    &[Arc((430, 250), (315, 520), (125, 235))],
    &[Arc((-97, 250), (315, 520), (55, -55))],
    &[Path(&[(195, 690), (195, 440)]), Path(&[(87, 628), (303, 502)]), Path(&[(87, 502), (303, 628)])],
    &[Path(&[(292, 470), (292, 40)]), Path(&[(77, 255), (507, 255)])],
    &[Path(&[(150, 45), (150, 10), (105, -100)])],
    &[Path(&[(60, 270), (273, 270)])],
    &[Path(&[(139, 45)])],
    &[Path(&[(25, 0), (253, 690)])],
    &[Arc((278, 360), (200, 322), (0, 360))],
    &[Path(&[(130, 550), (305, 680), (305, 40)])],
    &[Arc((275, 495), (190, 187), (170, -30)), Path(&[(439, 402), (85, 40), (485, 40)])],
    &[Arc((265, 522), (170, 160), (150, -90)), Path(&[(210, 362), (265, 362)]), Arc((265, 200), (205, 162), (90, -150))],
    &[Path(&[(400, 40), (400, 680), (50, 210), (515, 210)])],
    &[Path(&[(465, 680), (150, 680), (108, 374)]), Arc((268, 245), (205, 205), (141, -145))],
    &[Arc((280, 245), (198, 205), (0, 360)), Arc((287, 300), (205, 382), (50, 180))],
    &[Path(&[(60, 680), (500, 680), (215, 40)])],
    &[Arc((278, 522), (168, 160), (0, 360)), Arc((278, 200), (203, 162), (0, 360))],
    &[Arc((276, 475), (198, 205), (0, 360)), Arc((269, 420), (205, 382), (-130, 0))],
    &[Path(&[(139, 470)]), Path(&[(139, 45)])],
    &[Path(&[(139, 470)]), Path(&[(150, 45), (150, 10), (105, -100)])],
    &[Path(&[(500, 460), (85, 255), (500, 50)])],
    &[Path(&[(77, 335), (507, 335)]), Path(&[(77, 175), (507, 175)])],
    &[Path(&[(84, 460), (499, 255), (84, 50)])],
    &[Arc((278, 510), (172, 172), (170, -45)), Path(&[(400, 388), (278, 268), (278, 210)]), Path(&[(278, 45)])],
    &[Arc((508, 270), (430, 410), (-15, 295)), Arc((490, 275), (165, 185), (0, 360)), Path(&[(672, 460), (650, 190)]), Arc((790, 210), (140, 110), (190, 325))],
    &[Path(&[(30, 40), (333, 680), (637, 40)]), Path(&[(135, 262), (532, 262)])],
    &[Path(&[(400, 370), (110, 370)]), Path(&[(370, 680), (110, 680), (110, 40), (390, 40)]), Arc((370, 525), (185, 155), (90, -90)), Arc((390, 205), (205, 165), (90, -90))],
    &[Arc((378, 360), (305, 325), (42, 318))],
    &[Path(&[(340, 680), (120, 680), (120, 40), (340, 40)]), Arc((340, 360), (305, 320), (90, -90))],
    &[Path(&[(595, 40), (120, 40), (120, 680), (575, 680)]), Path(&[(120, 375), (545, 375)])],
    &[Path(&[(120, 40), (120, 680), (560, 680)]), Path(&[(120, 365), (505, 365)])],
    &[Arc((385, 360), (312, 325), (42, 325)), Path(&[(420, 335), (675, 335), (675, 50)])],
    &[Path(&[(118, 40), (118, 680)]), Path(&[(604, 40), (604, 680)]), Path(&[(118, 375), (604, 375)])],
    &[Path(&[(139, 40), (139, 680)])],
    &[Path(&[(380, 680), (380, 215)]), Arc((225, 215), (155, 180), (0, -180))],
    &[Path(&[(118, 40), (118, 680)]), Path(&[(585, 680), (118, 260)]), Path(&[(275, 402), (605, 40)])],
    &[Path(&[(118, 680), (118, 40), (520, 40)])],
    &[Path(&[(115, 40), (115, 680), (416, 90), (718, 680), (718, 40)])],
    &[Path(&[(118, 40), (118, 680), (604, 40), (604, 680)])],
    &[Arc((389, 360), (315, 325), (0, 360))],
    &[Path(&[(118, 40), (118, 680), (390, 680)]), Arc((390, 512), (190, 168), (90, -90)), Path(&[(390, 344), (118, 344)])],
    &[Arc((389, 360), (315, 325), (0, 360)), Path(&[(490, 190), (680, 15)])],
    &[Path(&[(118, 40), (118, 680), (410, 680)]), Arc((410, 520), (190, 160), (90, -90)), Path(&[(410, 360), (118, 360)]), Path(&[(420, 360), (615, 40)])],
    &[Arc((333, 520), (215, 165), (25, 270)), Arc((333, 195), (245, 160), (90, -155))],
    &[Path(&[(40, 680), (571, 680)]), Path(&[(305, 680), (305, 40)])],
    &[Path(&[(115, 680), (115, 270)]), Arc((361, 270), (246, 235), (180, 360)), Path(&[(607, 270), (607, 680)])],
    &[Path(&[(40, 680), (333, 45), (627, 680)])],
    &[Path(&[(40, 680), (255, 45), (472, 660), (690, 45), (904, 680)])],
    &[Path(&[(50, 680), (617, 40)]), Path(&[(617, 680), (50, 40)])],
    &[Path(&[(35, 680), (333, 325), (632, 680)]), Path(&[(333, 325), (333, 40)])],
    &[Path(&[(60, 680), (550, 680), (50, 40), (565, 40)])],
    &[Path(&[(230, 690), (110, 690), (110, -160), (230, -160)])],
    &[Path(&[(25, 690), (253, 0)])],
    &[Path(&[(48, 690), (168, 690), (168, -160), (48, -160)])],
    &[Path(&[(60, 400), (234, 680), (409, 400)])],
    &[Path(&[(20, -115), (536, -115)])],
    &[Path(&[(100, 690), (200, 580)])],
    &[Arc((272, 340), (178, 146), (160, 0)), Path(&[(450, 340), (450, 105)]), Arc((510, 105), (60, 65), (180, 265)), Path(&[(450, 302), (235, 272)]), Arc((235, 156), (158, 116), (90, 270)), Arc((235, 165), (215, 125), (270, 360))],
    &[Path(&[(88, 680), (88, 40)]), Arc((285, 263), (197, 223), (0, 360))],
    &[Arc((268, 263), (198, 223), (42, 318))],
    &[Path(&[(468, 680), (468, 40)]), Arc((271, 263), (197, 223), (0, 360))],
    &[Path(&[(75, 270), (481, 270)]), Arc((278, 263), (203, 223), (0, 322))],
    &[Path(&[(130, 40), (130, 570)]), Arc((235, 570), (105, 115), (180, 80)), Path(&[(30, 478), (240, 478)])],
    &[Arc((271, 275), (197, 211), (0, 360)), Path(&[(468, 486), (468, 15)]), Arc((273, 15), (195, 185), (0, -150))],
    &[Path(&[(88, 680), (88, 40)]), Arc((278, 300), (190, 186), (170, 0)), Path(&[(468, 300), (468, 40)])],
    &[Path(&[(111, 486), (111, 40)]), Path(&[(111, 660)])],
    &[Path(&[(111, 486), (111, -60)]), Arc((15, -60), (96, 110), (0, -85)), Path(&[(111, 660)])],
    &[Path(&[(88, 680), (88, 40)]), Path(&[(425, 486), (88, 185)]), Path(&[(205, 290), (460, 40)])],
    &[Path(&[(111, 680), (111, 40)])],
    &[Path(&[(88, 486), (88, 40)]), Arc((252, 315), (164, 171), (170, 0)), Path(&[(416, 315), (416, 40)]), Arc((580, 315), (164, 171), (180, 0)), Path(&[(744, 315), (744, 40)])],
    &[Path(&[(88, 486), (88, 40)]), Arc((278, 300), (190, 186), (170, 0)), Path(&[(468, 300), (468, 40)])],
    &[Arc((278, 263), (203, 223), (0, 360))],
    &[Path(&[(88, 486), (88, -170)]), Arc((285, 263), (197, 223), (0, 360))],
    &[Path(&[(468, 486), (468, -170)]), Arc((271, 263), (197, 223), (0, 360))],
    &[Path(&[(100, 486), (100, 40)]), Arc((275, 290), (175, 196), (175, 80))],
    &[Arc((250, 375), (152, 111), (30, 270)), Arc((250, 152), (172, 112), (90, -150))],
    &[Path(&[(135, 620), (135, 145)]), Arc((228, 145), (93, 105), (180, 285)), Path(&[(25, 478), (245, 478)])],
    &[Path(&[(88, 486), (88, 226)]), Arc((278, 226), (190, 186), (180, 350)), Path(&[(468, 486), (468, 40)])],
    &[Path(&[(35, 486), (250, 45), (465, 486)])],
    &[Path(&[(30, 486), (190, 45), (361, 470), (532, 45), (692, 486)])],
    &[Path(&[(40, 486), (460, 40)]), Path(&[(460, 486), (40, 40)])],
    &[Path(&[(35, 486), (255, 45)]), Path(&[(465, 486), (225, -85), (150, -160), (70, -155)])],
    &[Path(&[(45, 486), (440, 486), (45, 40), (460, 40)])],
    &[Path(&[(270, 690), (205, 665), (175, 610), (175, 350), (90, 265), (175, 180), (175, -80), (205, -135), (270, -160)])],
    &[Path(&[(130, 690), (130, -170)])],
    &[Path(&[(64, 690), (129, 665), (159, 610), (159, 350), (244, 265), (159, 180), (159, -80), (129, -135), (64, -160)])],
    &[Path(&[(80, 220), (140, 285), (215, 290), (365, 215), (440, 220), (505, 290)])],
];

const SHARP_S: &[Mark] = &[
    Path(&[(88, 40), (88, 545)]),
    Arc((235, 545), (147, 137), (180, -55)),
    Path(&[(319, 433), (245, 378)]),
    Arc((305, 210), (200, 170), (107, -135)),
];
const GRAVE: Mark = Path(&[(-90, 130), (30, 0)]);
const ACUTE: Mark = Path(&[(90, 130), (-30, 0)]);
const HAT: Mark = Path(&[(-110, 0), (0, 125), (110, 0)]);
const TILDE: Mark = Path(&[(-120, 40), (-70, 90), (60, 40), (120, 90)]);
const DOTS: [Mark; 2] = [Path(&[(-95, 60)]), Path(&[(95, 60)])];
const RING: Mark = Arc((0, 75), (65, 65), (0, 360));
const CEDILLA: Mark = Path(&[(0, -30), (40, -110), (-40, -160)]);

/// Returns the base letter, and the accent's strokes relative to their place. `None` for characters without an accent.
fn accented(letter: char) -> Option<(char, &'static [Mark])> {
    const TABLE: [(&str, &str, &[Mark]); 7] = [
        ("ÀÈÌÒÙàèìòù", "AEIOUaeıou", &[GRAVE]),
        ("ÁÉÍÓÚÝáéíóúý", "AEIOUYaeıouy", &[ACUTE]),
        ("ÂÊÎÔÛâêîôû", "AEIOUaeıou", &[HAT]),
        ("ÃÑÕãñõ", "ANOano", &[TILDE]),
        ("ÄËÏÖÜäëïöüÿ", "AEIOUaeıouy", &DOTS),
        ("Åå", "Aa", &[RING]),
        ("Çç", "Cc", &[CEDILLA]),
    ];
    TABLE.iter().find_map(|(letters, bases, marks)| {
        let at = letters.chars().position(|other| other == letter)?;
        Some((bases.chars().nth(at)?, *marks))
    })
}

/// Returns the strokes of a text that [`shown`] returned, each a line through points. Coordinates are in multiples of the font
/// size from the start of the text, with y upwards.
pub(super) fn strokes(text: &str, bold: bool) -> Vec<Vec<(f64, f64)>> {
    let mut out = Vec::new();
    let mut x = 0.0;
    for letter in text.chars() {
        letter_strokes(letter, x, bold, &mut out);
        x += f64::from(advance(letter, bold)) / 1000.0;
    }
    out
}

/// Returns the text in which characters without strokes are replaced by [`REPLACEMENT`].
pub(super) fn shown(text: &str) -> String {
    let shown = |letter: char| {
        let letter = super::helvetica::shown(letter);
        if is_known(letter) { letter } else { REPLACEMENT }
    };
    text.chars().map(shown).collect()
}

fn is_known(letter: char) -> bool {
    matches!(letter, ' '..='~' | '\u{a0}' | '·' | '×' | '°' | 'ß' | REPLACEMENT) || accented(letter).is_some()
}

/// Returns the strokes of a character without an accent.
fn marks_of(letter: char) -> &'static [Mark] {
    match letter {
        'ı' => &[Path(&[(139, 486), (139, 40)])],
        '·' => &[Path(&[(139, 270)])],
        '°' => &[Arc((200, 570), (105, 105), (0, 360))],
        '×' => &[Path(&[(110, 437), (474, 73)]), Path(&[(474, 437), (110, 73)])],
        'ß' => SHARP_S,
        letter => ASCII.get((u32::from(letter) as usize).wrapping_sub(0x20)).copied().unwrap_or_default(),
    }
}

fn letter_strokes(letter: char, x: f64, bold: bool, out: &mut Vec<Vec<(f64, f64)>>) {
    let mut draw = |marks: &[Mark], dx: f64, dy: f64, flip: f64| {
        out.extend(marks.iter().map(|mark| {
            let points = points(*mark).into_iter();
            points.map(|(px, py)| (dx + px * flip / 1000.0, dy + py * flip / 1000.0)).collect::<Vec<_>>()
        }));
    };
    // Bold letters are wider but have the same strokes, so the strokes are centred in the width.
    let (width, plain) = (f64::from(advance(letter, bold)), f64::from(advance(letter, false)));
    let x = x + (width - plain) / 2000.0;
    if letter == REPLACEMENT {
        return draw(marks_of('?'), x + 0.58, 0.52, -1.0); // an inverted question mark
    }
    let (base, accent) = accented(letter).unwrap_or((letter, &[]));
    draw(marks_of(base), x, 0.0, 1.0);
    let height = match letter {
        'Ç' | 'ç' => 0.0,
        _ if base.is_uppercase() => 0.76,
        _ => 0.58,
    };
    draw(accent, x + plain / 2000.0, height, 1.0);
}

fn points(mark: Mark) -> Vec<(f64, f64)> {
    match mark {
        Path(points) => points.iter().map(|&(x, y)| (f64::from(x), f64::from(y))).collect(),
        Arc((x, y), (rx, ry), (from, to)) => {
            /// Angle between two points of an arc, in degrees.
            const STEP: f64 = 10.0;
            let (from, to) = (f64::from(from), f64::from(to));
            let steps = ((to - from).abs() / STEP).ceil().max(1.0);
            let at = |step: i32| {
                let (sin, cos) = (from + (to - from) * f64::from(step) / steps).to_radians().sin_cos();
                (f64::from(x) + f64::from(rx) * cos, f64::from(y) + f64::from(ry) * sin)
            };
            (0..=steps as i32).map(at).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_letter_stays_in_its_room() {
        for letter in (' '..='~').chain('\u{a0}'..='\u{ff}').filter(|letter| is_known(*letter)) {
            let width = f64::from(advance(letter, false)) / 1000.0;
            let strokes = strokes(&letter.to_string(), false);
            assert_eq!(strokes.is_empty(), letter.is_whitespace(), "{letter}");
            for (x, y) in strokes.into_iter().flatten() {
                assert!((-0.04..=width + 0.04).contains(&x), "{letter}: {x} of {width}");
                assert!((-0.22..=0.95).contains(&y), "{letter}: {y}");
            }
        }
        assert_eq!(shown("µ€中é"), "\u{bf}\u{bf}\u{bf}é", "seen, and taken for nothing else");
    }
}
