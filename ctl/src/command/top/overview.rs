//! Draws the view of all devices and all processes.

use super::list::{HISTORY, List};
use super::widgets::{BLUE, BOLD, CYAN, DIM, GREY, Look, PLAIN, RED, SELECTED, YELLOW, length, wrap};
use crate::command::node::{finding_line, is_problem};
use crate::command::ps::{self, DeviceAmounts};
use gpumem_model::control::{DeviceRow, ProcessRow, Ps};
use gpumem_model::units::{Unit, plural, signed};
use gpumem_report::table::width as width_of;
use gpumem_report::text::escape;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::{Constraint, Layout, Rect};
use ratatui_core::style::Style;
use ratatui_core::text::{Line, Span, Text};
use ratatui_core::widgets::{StatefulWidget, Widget};
use ratatui_widgets::table::{Cell, Row, Table, TableState};

/// Maximum number of findings, and of rows for each.
const FINDINGS: usize = 3;
const FINDING_ROWS: usize = 2;

/// Minimum width of a terminal at which each process has its age, and a sparkline of its used memory.
const WIDE: u16 = 110;

/// Heading of the time since a process began.
const AGE: &str = "TIME";

/// Form of a table with fixed columns and a last one that takes the rest of the width.
struct Form<const COLUMNS: usize> {
    heads: [&'static str; COLUMNS],
    /// Whether each column is aligned to the left.
    left: [bool; COLUMNS],
    /// Columns that a narrow terminal omits, in this order, so that the last column has room.
    omitted_first: &'static [usize],
    /// Columns that are omitted next, in this order, where even their own figures do not fit: a figure is never cut.
    omitted_last: &'static [usize],
    /// Column whose width is limited, and the limit.
    limited: (usize, usize),
    least: usize,
}

pub(crate) const DEVICE_HEADS: [&str; 7] = ["GPU", "", "UTIL", "POWER", "USED", "FREE", "SIZE"];
const DEVICES: Form<7> = Form {
    heads: DEVICE_HEADS,
    left: [true, true, false, false, false, false, false],
    omitted_first: &[3, 1, 2],
    omitted_last: &[6, 5],
    limited: (1, 24),
    least: 8,
};
/// Column with the state of a process.
const STATE: usize = 3;
const PROCESSES: Form<8> = Form {
    heads: ps::HEADS,
    left: ps::LEFT,
    omitted_first: &[6, 2, STATE, 7],
    omitted_last: &[5, 0],
    limited: (STATE, 14),
    least: 16,
};

impl<const COLUMNS: usize> Form<COLUMNS> {
    /// Returns the columns that have contents and fit into `width`, and their widths.
    fn columns(&self, rows: &[&[String; COLUMNS]], width: u16) -> (Vec<usize>, Vec<Constraint>) {
        let widest = |column: usize| {
            let cells = rows.iter().map(|cells| width_of(&cells[column])).max().unwrap_or(1);
            let limit = if column == self.limited.0 { self.limited.1 } else { usize::MAX };
            if cells == 0 { 0 } else { cells.max(self.heads[column].len()).min(limit) }
        };
        let mut shown: Vec<(usize, usize)> = (0..COLUMNS).map(|column| (column, widest(column))).collect();
        shown.retain(|(_, width)| *width > 0);
        let first = self.omitted_first.iter().map(|column| (column, self.least));
        for (omitted, least) in first.chain(self.omitted_last.iter().map(|column| (column, 0))) {
            if shown.iter().map(|(_, width)| width + 1).sum::<usize>() + least <= width.into() {
                continue;
            }
            shown.retain(|(column, _)| column != omitted);
        }
        shown.into_iter().map(|(column, width)| (column, length(width))).unzip()
    }

    /// Returns a cell of a column; numbers are aligned to the right.
    fn cell(&self, column: usize, text: &str, style: Style) -> Cell<'static> {
        let line = Line::from(Span::styled(text.to_owned(), style));
        Cell::from(if self.left[column] { line } else { line.right_aligned() })
    }
}

/// Parts of a device's bar: meaning, character with and without Unicode, style.
pub(super) const PARTS: [(&str, (char, char), Style); 5] = [
    ("chosen process", ('█', '#'), PLAIN.fg(CYAN)),
    ("other processes", ('▓', '='), PLAIN.fg(BLUE)),
    ("unaccounted", ('▒', '?'), PLAIN.fg(RED)),
    ("system", ('░', ':'), PLAIN.fg(GREY)),
    ("free", ('.', '.'), DIM),
];

/// Number of the first [`PARTS`], which are processes.
const PROCESS_PARTS: usize = 2;

/// Draws the view: findings, devices, devices that only agents report, processes.
pub(crate) fn draw(ps: &Ps, list: &mut List, area: Rect, frame: &mut Buffer, look: Look) {
    let unit = ps::unit(ps);
    let mut notes = findings(ps, area);
    if ps.devices.is_empty() {
        notes.push(Line::styled(ps::NO_DEVICE, RED));
    }
    let claims: Vec<Line> =
        ps::claims_line(&ps.claims).map(|text| Line::styled(text, YELLOW)).into_iter().collect();
    let room = usize::from(area.height).saturating_sub(notes.len() + claims.len());
    // At least half of the rows, and the row of their headings, are for processes.
    let limit = room.saturating_sub(2).saturating_sub(ps.processes.len().min(room / 2)).max(1);
    let shown = ps.devices.len().min(limit);
    let heights = [length(notes.len()), length(shown + usize::from(shown > 0)), length(claims.len())];
    let [of_notes, of_devices, of_claims, of_processes] =
        Layout::vertical(heights.into_iter().chain([Constraint::Fill(1)])).areas(area);
    Text::from(notes).render(of_notes, frame);
    Text::from(claims).render(of_claims, frame);
    if shown > 0 {
        let chosen = list.chosen_process(ps).filter(|_| look.is_live);
        let chosen_device = chosen.map_or(0, |process| process.device);
        let first = chosen_device.saturating_sub(shown - 1).min(ps.devices.len() - shown);
        devices(ps, (first, shown), chosen, unit, of_devices, frame, look);
        processes(ps, list, unit, of_processes, frame, look);
    }
}

/// Returns the lines of the most important findings, for at most a quarter of the rows.
fn findings(ps: &Ps, area: Rect) -> Vec<Line<'static>> {
    let room = (usize::from(area.height) / 4 / FINDING_ROWS).clamp(1, FINDINGS);
    let lines = ps.findings.iter().take(room).flat_map(|finding| {
        let style = if is_problem(finding) { BOLD.fg(YELLOW) } else { PLAIN };
        wrap(&finding_line(ps, finding, Some(area.width.into())), area, FINDING_ROWS, style)
    });
    let mut lines: Vec<Line> = lines.collect();
    if ps.findings.len() > room {
        lines.push(Line::styled(format!("{} more findings", ps.findings.len() - room), DIM));
    }
    lines
}

/// Draws a table of `shown` devices, from index `first` on.
fn devices(
    ps: &Ps,
    (first, shown): (usize, usize),
    chosen: Option<&ProcessRow>,
    unit: Unit,
    area: Rect,
    frame: &mut Buffer,
    look: Look,
) {
    let lines: Vec<[String; 7]> = (0..ps.devices.len()).map(|index| device_cells(ps, index, unit)).collect();
    let (columns, mut widths) = DEVICES.columns(&lines.iter().collect::<Vec<_>>(), area.width);
    widths.push(Constraint::Fill(1));
    let of_bar = last_width(&widths, area);
    let more = match ps.devices.len() - shown {
        0 => Line::styled(unit.name, DIM),
        more => Line::styled(format!("{}; {} more", unit.name, plural(more as u64, "GPU")), DIM),
    };
    let of_bars = ps.devices.iter().enumerate().map(|(index, device)| parts(ps, index, device, chosen));
    let drawn = ps.devices.iter().zip(of_bars).map(|(device, parts)| {
        let whole = device.total_bytes.filter(|_| device.used_bytes.is_some());
        whole.map_or([0; 5], |whole| part_columns(of_bar, signed(whole), &parts))
    });
    let most = drawn.fold([0; 5], |most, bar| std::array::from_fn(|part| usize::max(most[part], bar[part])));
    let more = legend(more, &most, of_bar, look);
    let head = |column: &usize| DEVICES.cell(*column, DEVICES.heads[*column], PLAIN);
    let header = Row::new(columns.iter().map(head).chain([more.into()])).style(BOLD);
    let row = |(index, cells): (usize, &[String; 7])| {
        let bar = device_bar(ps, index, chosen, of_bar, look);
        Row::new(
            columns.iter().map(|column| DEVICES.cell(*column, &cells[*column], PLAIN)).chain([bar.into()]),
        )
    };
    let rows = lines.iter().enumerate().skip(first).take(shown).map(row);
    Widget::render(Table::new(rows, widths).header(header), area, frame);
}

/// Adds the first words of the [`PARTS`] that a bar shows, with their characters, as far as they fit into `width` columns. They are
/// closer together if all fit only then.
fn legend(mut line: Line<'static>, columns: &[usize; 5], width: u16, look: Look) -> Line<'static> {
    let shown = PARTS.iter().zip(columns).filter(|(_, columns)| **columns > 0);
    let words: Vec<(&str, char, Style)> = shown
        .map(|((name, glyphs, style), _)| {
            (name.split(' ').next().unwrap_or_default(), look.glyph(*glyphs), *style)
        })
        .collect();
    let is_wide = line.width() + words.iter().map(|(word, ..)| word.len() + 4).sum::<usize>() <= width.into();
    let (before, between) = if is_wide { ("  ", " ") } else { (" ", "") };
    for (word, glyph, style) in words {
        if line.width() + before.len() + between.len() + word.len() + 1 > width.into() {
            break;
        }
        line.push_span(Span::styled(format!("{before}{glyph}"), style));
        line.push_span(Span::styled(format!("{between}{word}"), DIM));
    }
    line
}

/// Returns the width of the last column.
fn last_width(widths: &[Constraint], area: Rect) -> u16 {
    Layout::horizontal(widths).spacing(1).split(area).last().map_or(0, |column| column.width)
}

/// Returns the bar of a device; a warning replaces it if the reading failed or is old.
fn device_bar(ps: &Ps, index: usize, chosen: Option<&ProcessRow>, width: u16, look: Look) -> Line<'static> {
    let device = &ps.devices[index];
    if let Some(warning) = ps::reading_warning(device) {
        return Line::styled(warning, BOLD.fg(YELLOW));
    }
    match device.total_bytes.filter(|_| device.used_bytes.is_some()) {
        Some(total) => bar(width, signed(total), &parts(ps, index, device, chosen), look),
        None => Line::styled("unknown", DIM),
    }
}

/// Returns the cells of a device for [`DEVICE_HEADS`]; empty where NVML has no figure.
pub(crate) fn device_cells(ps: &Ps, index: usize, unit: Unit) -> [String; 7] {
    let device = &ps.devices[index];
    let amount = |bytes: Option<u64>| bytes.map_or("-".to_owned(), |bytes| unit.amount(signed(bytes)));
    let free = DeviceAmounts::of(ps, index, unit).free.map_or("-".to_owned(), |steps| unit.print(steps));
    let model = escape(&device.model).replace("NVIDIA ", "");
    [
        device.index.to_string(),
        if device.unified { format!("unified, {model}") } else { model },
        device.utilization_percent.map(|percent| format!("{percent} %")).unwrap_or_default(),
        device.power_w.map(|watts| format!("{watts} W")).unwrap_or_default(),
        amount(device.used_bytes),
        free,
        amount(device.total_bytes),
    ]
}

/// Returns a bar whose width stands for `whole` bytes: the bytes of the [`PARTS`] from the left.
fn bar(width: u16, whole: i64, parts: &[i64; 5], look: Look) -> Line<'static> {
    let columns = part_columns(width, whole, parts);
    let span =
        |((_, glyphs, style), columns)| Span::styled(look.glyph(glyphs).to_string().repeat(columns), style);
    PARTS.into_iter().zip(columns).map(span).collect()
}

/// Returns the number of columns of each part of a bar. Processes get at least one if there is room, so that each is visible; the
/// other parts have their share, since a column of a few MiB would look like much memory.
fn part_columns(width: u16, whole: i64, parts: &[i64; 5]) -> [usize; 5] {
    let width = usize::from(width);
    let columns = |bytes: i64| (bytes as f64 / whole.max(1) as f64 * width as f64).round() as usize;
    let (mut sum, mut at) = (0_i64, 0);
    std::array::from_fn(|part| {
        sum = sum.saturating_add(parts[part].max(0));
        let least = usize::from(part < PROCESS_PARTS && parts[part] > 0);
        let from = at;
        at = columns(sum).max(from + least).min(width);
        at - from
    })
}

/// Returns the [`PARTS`] of a device's bar. Processes have the bytes that NVML charges; unknown ones are in the unaccounted part.
fn parts(ps: &Ps, index: usize, device: &DeviceRow, chosen: Option<&ProcessRow>) -> [i64; 5] {
    let processes = ps.processes.iter().filter(|process| process.device == index);
    let (mut own, mut others) = (0_i64, 0_i64);
    for process in processes {
        let is_chosen = chosen.is_some_and(|chosen| std::ptr::eq(chosen, process));
        let sum = if is_chosen { &mut own } else { &mut others };
        *sum = sum.saturating_add(process.used_bytes.map_or(0, signed));
    }
    let left = device.used_bytes.map_or(0, signed).saturating_sub(own).saturating_sub(others);
    let left = device.unaccounted_bytes.unwrap_or(left);
    // Unified memory that the rest of the host uses counts as the system's.
    let (unaccounted, rest_of_host) = if device.unified { (0, left) } else { (left, 0) };
    let system = device.system_bytes.map_or(rest_of_host, signed);
    [own, others, unaccounted, system, device.free_bytes.map_or(0, signed)]
}

fn processes(ps: &Ps, list: &mut List, unit: Unit, area: Rect, frame: &mut Buffer, look: Look) {
    let indices = list.located(ps);
    let visible = list.scroll.visible_rows(indices.len(), usize::from(area.height).saturating_sub(1));
    let area = list.scroll.draw_bar(area, frame, look);
    let lines = lines(ps, unit);
    let (has_age, has_spark) = (area.width >= WIDE, look.is_live && area.width >= WIDE);
    let cells: Vec<&[String; 8]> = lines.iter().flatten().map(|line| &line.cells).collect();
    let (columns, mut widths) = PROCESSES.columns(&cells, area.width);
    let ages = lines.iter().flatten().map(|line| line.age.len()).chain([AGE.len()]);
    widths.extend(has_age.then(|| length(ages.max().unwrap_or(0))));
    widths.extend(has_spark.then_some(length(HISTORY)));
    widths.push(Constraint::Fill(1));
    let of_command = last_width(&widths, area);
    let head = |column: &usize| {
        let is_order = *column == list.order as usize;
        PROCESSES.cell(*column, ps::HEADS[*column], if is_order { SELECTED } else { PLAIN })
    };
    let mut command = Line::from("COMMAND");
    let text = format!("  ({} to {} of {})", visible.start + 1, visible.end, indices.len());
    if visible.len() < indices.len() && command.width() + text.len() <= of_command.into() {
        command.push_span(Span::styled(text, DIM));
    }
    let spark_head = has_spark.then(|| Cell::from("USED, LATELY"));
    let age = |text: &str| Cell::from(Line::from(text.to_owned()).right_aligned());
    let age_head = has_age.then(|| age(AGE));
    let header = Row::new(columns.iter().map(head).chain(age_head).chain(spark_head).chain([command.into()]))
        .style(BOLD);
    let row = |index: &usize| {
        let (Some(Some(line)), Some(process)) = (lines.get(*index), ps.processes.get(*index)) else {
            return Row::default();
        };
        let cell = |column: &usize| {
            let is_unusual = *column == STATE && process.flags != ["covered"];
            PROCESSES.cell(*column, &line.cells[*column], if is_unusual { PLAIN.fg(YELLOW) } else { PLAIN })
        };
        let spark = has_spark.then(|| Line::styled(list.sparkline(ps, process, look.unicode), BLUE).into());
        let owner = owner(process).map(|owner| Span::styled(format!("  {owner}"), DIM));
        let command = Line::from_iter([Span::from(line.note(of_command.into()))].into_iter().chain(owner));
        let age = has_age.then(|| age(&line.age));
        Row::new(columns.iter().map(cell).chain(age).chain(spark).chain([command.into()]))
    };
    let mut rows: Vec<Row> = indices.get(visible.clone()).unwrap_or_default().iter().map(row).collect();
    let selected =
        list.scroll.position.checked_sub(visible.start).filter(|_| look.is_live && !rows.is_empty());
    if rows.is_empty() {
        let is_empty = ps.processes.is_empty();
        let why = if is_empty { "no process uses a GPU" } else { "no process has these words (Esc)" };
        let all = u16::try_from(widths.len()).unwrap_or(u16::MAX);
        rows.push(Row::new([Cell::from(why).column_span(all)]).style(DIM));
    }
    let table = Table::new(rows, widths).header(header).row_highlight_style(SELECTED);
    StatefulWidget::render(table, area, frame, &mut TableState::new().with_selected(selected));
}

/// Returns the pod, Slurm job or job of a process.
fn owner(process: &ProcessRow) -> Option<String> {
    let name = |kind: &str| process.who.get(kind).map(|name| escape(name));
    if let Some(pod) = name("pod") {
        let space = name("namespace").map(|space| space + "/").unwrap_or_default();
        return Some(format!("pod {space}{pod}"));
    }
    let slurm = name("slurm_job").map(|job| format!("slurm {job}"));
    slurm.or_else(|| name("job").map(|job| format!("job {job}")))
}

/// Returns a row for each process of the reply, in the same order; `None` for one whose device is not in the reply.
fn lines(ps: &Ps, unit: Unit) -> Vec<Option<ps::Line>> {
    let mut lines: Vec<Option<ps::Line>> = ps.processes.iter().map(|_| None).collect();
    for (index, device) in ps.devices.iter().enumerate() {
        for (row, used) in DeviceAmounts::of(ps, index, unit).processes {
            lines[row] = Some(ps::process_line(device, &ps.processes[row], used, unit));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_shows_every_process_other_parts_by_their_share_and_no_more_than_its_room() {
        let look = Look { unicode: false, colors: false, is_live: false };
        let drawn = |whole, parts| bar(10, whole, &parts, look).to_string();
        assert_eq!(drawn(100, [50, 30, 0, 0, 20]), "#####===..");
        assert_eq!(drawn(100, [50, 1, 0, 0, 0]), "#####=");
        assert_eq!(drawn(100, [-5, 0, 10, 0, 0]), "?");
        assert_eq!(drawn(100, [50, 0, 2, 2, 46]), "#####.....");
        assert_eq!(drawn(0, [i64::MAX, i64::MAX, 1, 1, 1]), "##########", "more than there is");
    }

    #[test]
    fn a_narrow_terminal_omits_columns_in_their_order_and_cuts_no_figure() {
        let cells =
            ["0", "H100 80GB HBM3", "100 %", "700 W", "70,112", "10,824", "81,559"].map(str::to_owned);
        let columns = |width| DEVICES.columns(&[&cells], width).0;
        assert_eq!(columns(80), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(columns(55), [0, 1, 2, 4, 5, 6]);
        assert_eq!(columns(40), [0, 2, 4, 5, 6]);
        assert_eq!(columns(25), [0, 4, 5, 6]);
        assert_eq!(columns(20), [0, 4, 5]);
        assert_eq!(columns(12), [0, 4]);
        let unknown = cells.clone().map(|cell| if cell.ends_with(['%', 'W']) { String::new() } else { cell });
        assert_eq!(DEVICES.columns(&[&unknown], 80).0, [0, 1, 4, 5, 6]);
    }
}
