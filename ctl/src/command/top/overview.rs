//! Draws the view of all devices and all processes.

use super::list::{HISTORY, List};
use super::widgets::{
    BLUE, BOLD, CYAN, DIM, GREY, Look, PLAIN, Part, RED, SELECTED, YELLOW, bar, length, spark, wrap,
};
use crate::command::node::{finding_line, is_problem};
use crate::command::ps::{self, DeviceAmounts};
use gpumem_model::control::{DeviceRow, ProcessRow, Ps};
use gpumem_model::units::{Unit, plural, signed};
use gpumem_report::table::width as width_of;
use gpumem_report::text::escape;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::{Constraint, Layout, Rect};
use ratatui_core::style::{Modifier, Style};
use ratatui_core::text::{Line, Span, Text};
use ratatui_core::widgets::{StatefulWidget, Widget};
use ratatui_widgets::table::{Cell, Row, Table, TableState};

/// Maximum number of findings, and of rows for each.
const FINDINGS: usize = 3;
const FINDING_ROWS: usize = 2;

/// Returns the number of rows for all devices and processes, two rows of headings, and rows for the findings and for devices that
/// only agents report.
pub(crate) fn height(ps: &Ps) -> usize {
    let findings = ps.findings.len().min(FINDINGS) * FINDING_ROWS + usize::from(ps.findings.len() > FINDINGS);
    findings + ps.devices.len() + ps.processes.len() + usize::from(!ps.claims.is_empty()) + 2
}

/// Columns (indices in [`ps::HEADS`]) that a narrow terminal omits, in this order.
const OMITTED_FIRST: [usize; 4] = [6, 2, 3, 7];
/// Index of the column with the state of a process; then the column's maximum width.
const STATE: usize = 3;
const STATE_WIDTH: usize = 14;
/// Minimum width that is left for commands.
const COMMAND_WIDTH: usize = 16;
/// Minimum width of a terminal at which each process has a sparkline of its used memory.
const SPARK_FROM: usize = 110;

/// Minimum width of a device's bar, with the blanks between columns.
const LEAST_BAR: usize = 25;

/// Parts of a device's bar: meaning, character with and without Unicode, style.
pub(super) const PARTS: [(&str, (char, char), Style); 5] = [
    ("chosen process", ('█', '#'), PLAIN.fg(CYAN)),
    ("other processes", ('▓', '='), PLAIN.fg(BLUE)),
    ("unaccounted", ('▒', '?'), PLAIN.fg(RED)),
    ("system", ('░', ':'), PLAIN.fg(GREY)),
    ("free", ('.', '.'), DIM),
];

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
        wrap(&finding_line(ps, finding), area, FINDING_ROWS, style)
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
    let heads = ["GPU", "", "USED", "FREE", "SIZE"].map(str::to_owned);
    let lines: Vec<[String; 5]> = (0..ps.devices.len()).map(|index| device_cells(ps, index, unit)).collect();
    let width = |column: usize| lines.iter().chain([&heads]).map(|cells| width_of(&cells[column])).max();
    let [index, model, used, free, size] = [0, 1, 2, 3, 4].map(|column| width(column).unwrap_or(0));
    // The model leaves at least this width for the bar, and for the blanks between columns.
    let model = model.min(usize::from(area.width).saturating_sub(index + used + free + size + LEAST_BAR));
    let widths =
        [length(index), length(model), Constraint::Fill(1), length(used), length(free), length(size)];
    let [_, _, of_bar, ..] = Layout::horizontal(widths).spacing(1).areas::<6>(area);
    let row = |[index, model, used, free, size]: [String; 5], bar: Line<'static>| {
        let [used, free, size] = [used, free, size].map(|amount| Line::from(amount).right_aligned());
        Row::new([index.into(), model.into(), bar, used, free, size])
    };
    let more = match ps.devices.len() - shown {
        0 => unit.name.to_owned(),
        more => format!("{}; {} more", unit.name, plural(more as u64, "GPU")),
    };
    let header = row(heads, Line::styled(more, DIM)).style(BOLD);
    let rows = lines.into_iter().enumerate().skip(first).take(shown);
    let rows = rows.map(|(index, cells)| row(cells, device_bar(ps, index, chosen, of_bar.width, look)));
    Widget::render(Table::new(rows, widths).header(header), area, frame);
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

/// Returns index, model with utilisation and power, used, free and size of a device.
pub(crate) fn device_cells(ps: &Ps, index: usize, unit: Unit) -> [String; 5] {
    let device = &ps.devices[index];
    let amount = |bytes: Option<u64>| bytes.map_or("-".to_owned(), |bytes| unit.amount(signed(bytes)));
    let free = DeviceAmounts::of(ps, index, unit).free.map_or("-".to_owned(), |steps| unit.print(steps));
    let mut model = escape(&device.model).replace("NVIDIA ", "");
    if device.unified {
        model = format!("unified, {model}");
    }
    let load = [
        device.utilization_percent.map(|percent| format!(" {percent} %")),
        device.power_w.map(|watts| format!(" {watts} W")),
    ];
    model.extend(load.into_iter().flatten());
    [device.index.to_string(), model, amount(device.used_bytes), free, amount(device.total_bytes)]
}

/// Returns the [`PARTS`] of a device's bar. Processes have the bytes that NVML charges; unknown ones are in the unaccounted part.
fn parts(ps: &Ps, index: usize, device: &DeviceRow, chosen: Option<&ProcessRow>) -> Vec<Part> {
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
    let bytes = [
        own,
        others,
        unaccounted,
        device.system_bytes.map_or(rest_of_host, signed),
        device.free_bytes.map_or(0, signed),
    ];
    let part = |(bytes, (_, glyphs, style))| Part { bytes, glyphs, style };
    bytes.into_iter().zip(PARTS).map(part).collect()
}

/// Draws the table of processes.
fn processes(ps: &Ps, list: &mut List, unit: Unit, area: Rect, frame: &mut Buffer, look: Look) {
    let indices = list.located(ps);
    let visible = list.scroll.visible_rows(indices.len(), usize::from(area.height).saturating_sub(1));
    let area = list.scroll.draw_bar(area, frame, look);
    let lines = lines(ps, unit);
    let has_spark = look.is_live && usize::from(area.width) >= SPARK_FROM;
    let (shown, mut widths) = columns(&lines, area.width.into());
    widths.extend(has_spark.then_some(length(HISTORY)));
    widths.push(Constraint::Fill(1));
    let of_command = Layout::horizontal(&widths).spacing(1).split(area).last().map_or(0, |place| place.width);
    let head = |column: &usize| {
        let style = if *column == list.order as usize { PLAIN.patch(Modifier::REVERSED) } else { PLAIN };
        aligned(*column, ps::HEADS[*column].into(), style)
    };
    let mut command = Line::from("COMMAND");
    if visible.len() < indices.len() {
        let text = format!("  ({} to {} of {})", visible.start + 1, visible.end, indices.len());
        command.push_span(Span::styled(text, DIM));
    }
    let spark_head = has_spark.then(|| Cell::from("USED, LATELY"));
    let header = Row::new(shown.iter().map(head).chain(spark_head).chain([command.into()])).style(BOLD);
    let row = |index: &usize| {
        let (Some(Some(line)), Some(process)) = (lines.get(*index), ps.processes.get(*index)) else {
            return Row::default();
        };
        let cell = |column: &usize| {
            let is_unusual = *column == STATE && process.flags != ["covered"];
            aligned(*column, line.cells[*column].clone(), if is_unusual { PLAIN.fg(YELLOW) } else { PLAIN })
        };
        let spark =
            has_spark.then(|| Cell::from(Line::styled(spark(&list.history(ps, process), look), BLUE)));
        let owner = owner(process).map(|owner| Span::styled(format!("  {owner}"), DIM));
        let command = Line::from_iter([Span::from(line.note(of_command.into()))].into_iter().chain(owner));
        Row::new(shown.iter().map(cell).chain(spark).chain([command.into()]))
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

/// Returns the columns (indices in [`ps::HEADS`]) that fit into `width` beside the commands, and their widths.
fn columns(lines: &[Option<ps::Line>], width: usize) -> (Vec<usize>, Vec<Constraint>) {
    let widest = |column: usize| {
        let cells = lines.iter().flatten().map(|line| width_of(&line.cells[column]));
        let widest = cells.max().unwrap_or(0).max(ps::HEADS[column].len());
        if column == STATE { widest.min(STATE_WIDTH) } else { widest }
    };
    let mut shown: Vec<(usize, usize)> =
        (0..ps::HEADS.len()).map(|column| (column, widest(column))).collect();
    for omitted in OMITTED_FIRST {
        if shown.iter().map(|(_, width)| width + 1).sum::<usize>() + COMMAND_WIDTH <= width {
            break;
        }
        shown.retain(|(column, _)| *column != omitted);
    }
    shown.into_iter().map(|(column, width)| (column, length(width))).unzip()
}

/// Returns a cell of a column (index in [`ps::HEADS`]); numbers are aligned to the right.
fn aligned(column: usize, text: String, style: Style) -> Cell<'static> {
    let line = Line::from(Span::styled(text, style));
    Cell::from(if ps::LEFT[column] { line } else { line.right_aligned() })
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
