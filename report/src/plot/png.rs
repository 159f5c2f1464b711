//! Draws a picture as pixels. Only polygons and lines occur, so two computations suffice: the fraction of a pixel that a polygon
//! covers, and the distance of a pixel from a line. Letters are lines too (strokes.rs), so no font is needed.

use super::drawing::{Drawing, Item, hatch, inside};
use super::palette::{Color, WHITE};
use super::strokes;
use miniz_oxide::deflate::compress_to_vec_zlib;

/// Pixels per point: 144 dpi, which is sharp on current screens.
const SCALE: f64 = 2.0;
/// Maximum number of pixels of a picture, more than any of our pictures has. Each pixel takes three bytes of memory.
const MAX_PIXELS: usize = 32 << 20;
/// Number of scan lines by which each row of pixels is sampled.
const SAMPLES: u32 = 4;

/// Error: the picture has too many pixels for PNG.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a picture of {width} x {height} pixels is too large for PNG; show fewer panels, or take --svg or --pdf"
)]
pub struct TooLarge {
    pub width: usize,
    pub height: usize,
}

impl Drawing {
    /// Returns the picture as PNG, with 8 bits each of red, green and blue, and two pixels per point.
    ///
    /// # Errors
    /// If it would have too many pixels.
    pub fn png(&self) -> Result<Vec<u8>, TooLarge> {
        let size = |points: f64| (points * SCALE).ceil().max(1.0) as usize;
        let (width, height) = (size(self.width), size(self.height));
        if width.saturating_mul(height) > MAX_PIXELS {
            return Err(TooLarge { width, height });
        }
        let mut canvas = Canvas { width, height, pixels: [WHITE.0, WHITE.1, WHITE.2].repeat(width * height) };
        for item in &self.items {
            canvas.paint(item);
        }
        Ok(canvas.encoded())
    }
}

struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl Canvas {
    fn paint(&mut self, item: &Item) {
        match item {
            Item::Shape { points, fill, stroke, .. } => {
                self.fill(points, fill.ground[0]);
                if let Some((ink, lines)) = hatch(points, fill) {
                    lines.into_iter().for_each(|(from, to)| self.strokes(&[vec![from, to]], 0.7, ink));
                }
                if let (Some((color, width)), Some(&first)) = (stroke, points.first()) {
                    let closed: Vec<_> = points.iter().copied().chain([first]).collect();
                    self.strokes(&[closed], *width, *color);
                }
            }
            Item::Line { points, color, width, dashed } => {
                let pieces = if *dashed { dashes(points, 4.0, 3.0) } else { vec![points.clone()] };
                self.strokes(&pieces, *width, *color);
            }
            Item::Text(text) => {
                let shown = super::Text { text: strokes::shown(&text.text), ..text.clone() };
                let before = shown.before();
                let place = |(x, y): (f64, f64)| (text.x + (x * text.size - before), text.y - y * text.size);
                let letters = strokes::strokes(&shown.text, text.bold).into_iter();
                let letters: Vec<Vec<_>> =
                    letters.map(|line| line.into_iter().map(place).collect()).collect();
                self.strokes(&letters, strokes::pen(text.bold) * text.size, text.color);
            }
        }
    }

    /// Paints the inside of a polygon (even-odd rule).
    fn fill(&mut self, points: &[(f64, f64)], color: Color) {
        let points = scaled(points);
        let Some((rows, columns)) = self.covered(points.iter().copied(), 0.0) else { return };
        let mut cover = vec![0.0_f64; columns.len()];
        for row in rows {
            cover.fill(0.0);
            for sample in 0..SAMPLES {
                let y = row as f64 + (f64::from(sample) + 0.5) / f64::from(SAMPLES);
                for (from, to) in inside(&points, y) {
                    let first = (from.floor().max(0.0) as usize).max(columns.start);
                    let last = (to.ceil().max(0.0) as usize).min(columns.end);
                    for column in first..last {
                        let left = from.max(column as f64);
                        let share = (to.min(column as f64 + 1.0) - left).max(0.0);
                        if let Some(cover) = cover.get_mut(column - columns.start) {
                            *cover += share / f64::from(SAMPLES);
                        }
                    }
                }
            }
            for (column, share) in columns.clone().zip(&cover) {
                self.blend(column, row, color, *share);
            }
        }
    }

    /// Paints lines with a round pen. Each pixel is painted by the nearest line only, so crossing lines do not add up.
    fn strokes(&mut self, lines: &[Vec<(f64, f64)>], width: f64, color: Color) {
        let radius = width * SCALE / 2.0;
        let lines: Vec<Vec<(f64, f64)>> = lines.iter().map(|line| scaled(line)).collect();
        let all = lines.iter().flatten().copied();
        let Some((rows, columns)) = self.covered(all, radius + 1.0) else { return };
        let mut cover = vec![0.0_f64; rows.len() * columns.len()];
        for line in &lines {
            let ends = line.iter().zip(line.iter().skip(1));
            let dot = line.first().filter(|_| line.len() == 1).map(|point| (point, point));
            for (from, to) in ends.chain(dot) {
                let own = self.covered([*from, *to].into_iter(), radius + 1.0);
                let Some((own_rows, own_columns)) = own else { continue };
                for row in own_rows {
                    for column in own_columns.clone() {
                        let pixel = (column as f64 + 0.5, row as f64 + 0.5);
                        let share = (radius + 0.5 - distance(pixel, *from, *to)).clamp(0.0, 1.0);
                        // A line thinner than a pixel covers at most its own width of the pixel.
                        let share = share.min(2.0 * radius);
                        let at = (row - rows.start) * columns.len() + (column - columns.start);
                        if let Some(cover) = cover.get_mut(at) {
                            *cover = cover.max(share);
                        }
                    }
                }
            }
        }
        let pixels = rows.flat_map(|row| columns.clone().map(move |column| (column, row)));
        for ((column, row), share) in pixels.zip(cover) {
            self.blend(column, row, color, share);
        }
    }

    /// Returns the rows and columns of pixels that contain `points`, plus a margin of `beyond`.
    fn covered(
        &self,
        points: impl Iterator<Item = (f64, f64)>,
        beyond: f64,
    ) -> Option<(std::ops::Range<usize>, std::ops::Range<usize>)> {
        let none = (f64::INFINITY, f64::NEG_INFINITY);
        let (x, y) = points.fold((none, none), |(x, y), point| {
            ((x.0.min(point.0), x.1.max(point.0)), (y.0.min(point.1), y.1.max(point.1)))
        });
        let range = |(low, high): (f64, f64), size: usize| {
            let low = ((low - beyond).floor().max(0.0) as usize).min(size);
            low..((high + beyond).ceil().max(0.0) as usize).min(size)
        };
        let (rows, columns) = (range(y, self.height), range(x, self.width));
        (!rows.is_empty() && !columns.is_empty()).then_some((rows, columns))
    }

    fn blend(&mut self, column: usize, row: usize, Color(red, green, blue): Color, share: f64) {
        let at = (row * self.width + column) * 3;
        let Some(pixel) = self.pixels.get_mut(at..at + 3) else { return };
        if share > 0.0 {
            let share = share.min(1.0);
            for (part, ink) in pixel.iter_mut().zip([red, green, blue]) {
                *part = (f64::from(*part) * (1.0 - share) + f64::from(ink) * share).round() as u8;
            }
        }
    }

    fn encoded(&self) -> Vec<u8> {
        let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
        let mut chunk = |name: &[u8; 4], data: &[u8]| {
            out.extend_from_slice(&(data.len() as u32).to_be_bytes());
            out.extend_from_slice(name);
            out.extend_from_slice(data);
            let sum = crc32(name.iter().chain(data));
            out.extend_from_slice(&sum.to_be_bytes());
        };
        let [width, height] = [self.width, self.height].map(|size| (size as u32).to_be_bytes());
        // 8 bits, RGB, deflate, a filter for each line, not interlaced.
        chunk(b"IHDR", &[width.as_slice(), &height, &[8, 2, 0, 0, 0]].concat());
        let per_metre = ((SCALE * 72.0 / 0.0254).round() as u32).to_be_bytes();
        chunk(b"pHYs", &[per_metre.as_slice(), &per_metre, &[1]].concat());
        // Each line is stored as its difference from the line above, because most lines are equal.
        let mut lines = Vec::with_capacity(self.pixels.len() + self.height);
        let mut above = vec![0_u8; self.width * 3];
        for line in self.pixels.chunks_exact(self.width * 3) {
            lines.push(2);
            lines.extend(line.iter().zip(&above).map(|(part, above)| part.wrapping_sub(*above)));
            above.copy_from_slice(line);
        }
        chunk(b"IDAT", &compress_to_vec_zlib(&lines, 6));
        chunk(b"IEND", &[]);
        out
    }
}

/// Converts points of the picture (1/72 inch) to pixels.
fn scaled(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    points.iter().map(|(x, y)| (x * SCALE, y * SCALE)).collect()
}

/// Returns the distance from a point to a line segment.
fn distance(point: (f64, f64), from: (f64, f64), to: (f64, f64)) -> f64 {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let (px, py) = (point.0 - from.0, point.1 - from.1);
    let length = dx * dx + dy * dy;
    let along = if length > 0.0 { ((px * dx + py * dy) / length).clamp(0.0, 1.0) } else { 0.0 };
    (px - along * dx).hypot(py - along * dy)
}

fn dashes(points: &[(f64, f64)], on: f64, off: f64) -> Vec<Vec<(f64, f64)>> {
    let mut pieces = Vec::new();
    // Position within the pattern of dashes.
    let mut phase = 0.0_f64;
    for (from, to) in points.iter().zip(points.iter().skip(1)) {
        let length = (to.0 - from.0).hypot(to.1 - from.1);
        let at = |along: f64| {
            let share = along / length;
            (from.0 + (to.0 - from.0) * share, from.1 + (to.1 - from.1) * share)
        };
        let mut along = 0.0;
        while along < length {
            let left = if phase < on { on - phase } else { on + off - phase };
            let end = (along + left).min(length);
            if phase < on {
                pieces.push(vec![at(along), at(end)]);
            }
            phase = (phase + end - along) % (on + off);
            along = end.max(along + 1e-6);
        }
    }
    pieces
}

/// Returns the CRC-32 checksum that PNG and gzip use.
pub fn crc32<'b>(bytes: impl Iterator<Item = &'b u8>) -> u32 {
    !bytes.fold(!0_u32, |sum, byte| {
        let sum = sum ^ u32::from(*byte);
        (0..8).fold(sum, |sum, _| if sum & 1 == 1 { 0xedb8_8320 ^ (sum >> 1) } else { sum >> 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::super::palette::BLACK;
    use super::super::palette::Pattern;
    use super::super::{Rect, Text};
    use super::*;

    fn pixel(png: &[u8], width: usize, x: usize, y: usize) -> [u8; 3] {
        // The compressed data: after the chunk name IDAT, before its checksum.
        let at = png.windows(4).position(|name| name == b"IDAT").expect("pixels") + 4;
        let lines = miniz_oxide::inflate::decompress_to_vec_zlib(&png[at..png.len() - 16]).expect("deflate");
        let stride = width * 3 + 1;
        let column = |part: usize| {
            lines.chunks(stride).take(y + 1).fold(0_u8, |sum, line| sum.wrapping_add(line[1 + x * 3 + part]))
        };
        [column(0), column(1), column(2)]
    }

    #[test]
    fn pixels_are_where_shapes_are() {
        let mut drawing = Drawing::new("", 20.0, 10.0);
        let red = Color(255, 0, 0);
        drawing.rect(
            Rect { x: 5.0, y: 2.0, width: 10.0, height: 5.25 },
            Pattern::plain([red; 2]),
            None,
            None,
        );
        let png = drawing.png().expect("small");
        assert_eq!(&png[16..24], [0, 0, 0, 40, 0, 0, 0, 20]);
        assert_eq!(pixel(&png, 40, 9, 8), [255; 3]);
        assert_eq!(pixel(&png, 40, 10, 8), [255, 0, 0]);
        assert_eq!(pixel(&png, 40, 29, 13), [255, 0, 0]);
        assert_eq!(pixel(&png, 40, 20, 14), [255, 128, 128], "half of it");
        assert_eq!(pixel(&png, 40, 30, 8), [255; 3]);
        assert_eq!(crc32(b"IEND".iter()), 0xae42_6082);
        assert_eq!(crc32(b"123456789".iter()), 0xcbf4_3926);
    }

    #[test]
    fn words_leave_ink_and_nothing_too_large_is_made() {
        let mut drawing = Drawing::new("", 40.0, 20.0);
        let text = Text {
            text: "I".into(),
            x: 10.0,
            y: 15.0,
            size: 12.0,
            anchor: super::super::Anchor::Start,
            bold: false,
            color: BLACK,
        };
        drawing.text(text);
        let png = drawing.png().expect("small");
        // The vertical stroke is at 139 thousandths of the font size: 11.67 points, pixel 23.
        assert!(pixel(&png, 80, 23, 22)[0] < 60, "{:?}", pixel(&png, 80, 23, 22));
        assert_eq!(pixel(&png, 80, 30, 22), [255; 3]);
        let large = Drawing::new("", 1e9, 10.0).png();
        assert_eq!(large, Err(TooLarge { width: 2_000_000_000, height: 20 }));
    }
}
