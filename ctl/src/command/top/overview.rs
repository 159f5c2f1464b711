//! Draws the view of all devices and all processes, and the help.

use super::list::{HISTORY, List};
use super::screen::{BLUE, CYAN, GREY, Part, RED, Screen, Style, Written, YELLOW, bar, columns, spark};
use crate::command::node::{finding_line, is_problem};
use crate::command::ps::{self, DeviceAmounts};
use gpumem_model::control::{DeviceRow, ProcessRow, Ps};
use gpumem_model::units::{Unit, plural, signed};
use gpumem_report::text::escape;

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

/// Parts of a device's bar: meaning, character with and without Unicode, style.
const PARTS: [(&str, (char, char), Style); 5] = [
    ("chosen process", ('█', '#'), Style::of(CYAN)),
    ("other processes", ('▓', '='), Style::of(BLUE)),
    ("unaccounted", ('▒', '?'), Style::of(RED)),
    ("system", ('░', ':'), Style::of(GREY)),
    ("free", ('.', '.'), Style::DIM),
];

/// Draws the view in the rows from `row` to before `end`. Returns the number of processes for which there is room.
pub(crate) fn draw(
    screen: &mut Screen,
    ps: &Ps,
    list: &List,
    (mut row, end): (usize, usize),
    is_live: bool,
) -> usize {
    row = findings(screen, ps, (row, end));
    let claims = ps::claims_line(&ps.claims);
    let unit = ps::unit(ps);
    if ps.devices.is_empty() {
        screen.put(row, 0, ps::NO_DEVICE, Style::of(RED));
        row += 1;
    } else {
        let chosen = list.chosen_process(ps).filter(|_| is_live);
        let room = end.saturating_sub(row + usize::from(claims.is_some()));
        // At least half of the rows, and the row of their headings, are for processes.
        let limit = room.saturating_sub(2).saturating_sub(ps.processes.len().min(room / 2)).max(1);
        let shown = ps.devices.len().min(limit);
        let chosen_device = chosen.map_or(0, |process| process.device);
        let first = chosen_device.saturating_sub(shown - 1).min(ps.devices.len() - shown);
        row = devices(screen, ps, (first, shown), chosen, unit, row);
    }
    if let Some(text) = claims {
        screen.put(row, 0, &text, Style::of(YELLOW));
        row += 1;
    }
    if ps.devices.is_empty() { 0 } else { processes(screen, ps, list, unit, (row, end), is_live) }
}

/// Draws the most important findings in at most a quarter of the rows. Returns the next free row.
fn findings(screen: &mut Screen, ps: &Ps, (mut row, end): (usize, usize)) -> usize {
    let room = (end.saturating_sub(row) / 4 / FINDING_ROWS).clamp(1, FINDINGS);
    for finding in ps.findings.iter().take(room) {
        let style = if is_problem(finding) { Style::bold(YELLOW) } else { Style::PLAIN };
        screen.put_wrapped(&mut row, &finding_line(ps, finding), FINDING_ROWS, style);
    }
    if ps.findings.len() > room {
        screen.put(row, 0, &format!("{} more findings", ps.findings.len() - room), Style::DIM);
        row += 1;
    }
    row
}

/// Draws the rows of `shown` devices, from index `first` on. Returns the next free row.
fn devices(
    screen: &mut Screen,
    ps: &Ps,
    (first, shown): (usize, usize),
    chosen: Option<&ProcessRow>,
    unit: Unit,
    mut row: usize,
) -> usize {
    let lines: Vec<[String; 5]> = (0..ps.devices.len()).map(|index| device_cells(ps, index, unit)).collect();
    let heads = ["GPU", "", "USED", "FREE", "SIZE"].map(str::to_owned);
    let width =
        |column: usize| lines.iter().chain([&heads]).map(|cells| columns(&cells[column])).max().unwrap_or(0);
    let amounts = width(2) + width(3) + width(4) + 3;
    let names = width(1).min(screen.width.saturating_sub(width(0) + amounts + 22));
    let bar_from = width(0) + 1 + names + usize::from(names > 0);
    let bar_to = screen.width.saturating_sub(amounts).max(bar_from);
    let put = |screen: &mut Screen, row: usize, cells: &[String; 5], style: Style| {
        screen.put(row, 0, &cells[0], style);
        screen.put_within(row, width(0) + 1, width(0) + 1 + names, &cells[1], style);
        let mut at = bar_to;
        for (column, cell) in cells.iter().enumerate().skip(2) {
            at += 1 + width(column);
            screen.put_before(row, at, cell, style);
        }
    };
    put(screen, row, &heads, Style::BOLD);
    let more = match ps.devices.len() - shown {
        0 => unit.name.to_owned(),
        more => format!("{}; {} more", unit.name, plural(more as u64, "GPU")),
    };
    screen.put_within(row, bar_from, bar_to, &more, Style::DIM);
    row += 1;
    for (index, (device, cells)) in ps.devices.iter().zip(&lines).enumerate().skip(first).take(shown) {
        put(screen, row, cells, Style::PLAIN);
        match device.total_bytes.filter(|_| device.used_bytes.is_some()) {
            Some(total) => {
                bar(screen, row, (bar_from, bar_to), signed(total), &parts(ps, index, device, chosen))
            }
            None => _ = screen.put_within(row, bar_from, bar_to, "unknown", Style::DIM),
        }
        if let Some(warning) = ps::reading_warning(device) {
            screen.put_within(row, bar_from, bar_to, &format!(" {warning} "), Style::bold(YELLOW));
        }
        row += 1;
    }
    row
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

/// Draws the rows of processes. Returns the number for which there is room.
fn processes(
    screen: &mut Screen,
    ps: &Ps,
    list: &List,
    unit: Unit,
    (mut row, end): (usize, usize),
    is_live: bool,
) -> usize {
    let lines = lines(ps, unit);
    let heads = ps::HEADS.map(str::to_owned);
    let width = |column: usize| {
        let rows = lines.iter().flatten().map(|line| &line.cells).chain([&heads]);
        let widest = rows.map(|cells| columns(&cells[column])).max().unwrap_or(0);
        if column == STATE { widest.min(STATE_WIDTH) } else { widest }
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let has_spark = is_live && screen.width >= SPARK_FROM;
    let mut shown: Vec<usize> = (0..heads.len()).collect();
    for omitted in OMITTED_FIRST {
        let taken: usize = shown.iter().map(|column| widths[*column] + 1).sum();
        if taken + COMMAND_WIDTH <= screen.width {
            break;
        }
        shown.retain(|column| *column != omitted);
    }
    let put = |screen: &mut Screen, row: usize, cells: &[String; 8], style: &dyn Fn(usize) -> Style| {
        let mut at = 0;
        for &column in &shown {
            let (text, width) = (&cells[column], widths[column]);
            let shift = if ps::LEFT[column] { 0 } else { width.saturating_sub(columns(text)) };
            screen.put_within(row, at + shift, at + width, text, style(column));
            at += width + 1;
        }
        at
    };
    let order = list.order as usize;
    let head = |column: usize| match column == order {
        true => Style { reverse: true, ..Style::BOLD },
        false => Style::BOLD,
    };
    let mut at = put(screen, row, &heads, &head);
    if has_spark {
        screen.put(row, at, "USED, LATELY", Style::BOLD);
        at += HISTORY + 1;
    }
    let rows = list.rows(ps);
    let page = end.saturating_sub(row + 1);
    let chosen = list.chosen(ps, &rows);
    let first = chosen.saturating_sub(page.saturating_sub(1) / 2).min(rows.len().saturating_sub(page));
    let hidden = rows.len().saturating_sub(first + page);
    let after = screen.put(row, at, "COMMAND", Style::BOLD);
    if hidden > 0 || first > 0 {
        let text = format!("  ({} to {} of {})", first + 1, rows.len() - hidden, rows.len());
        screen.put(row, after, &text, Style::DIM);
    }
    row += 1;
    if rows.is_empty() {
        let is_empty = ps.processes.is_empty();
        let why = if is_empty { "no process uses a GPU" } else { "no process has these words (Esc)" };
        screen.put(row, 0, why, Style::DIM);
    }
    for (place, index) in rows.iter().enumerate().skip(first).take(page) {
        let (Some(Some(line)), Some(process)) = (lines.get(*index), ps.processes.get(*index)) else {
            continue;
        };
        let is_covered = process.flags == ["covered"];
        let style = |column: usize| match column {
            STATE if !is_covered => Style::of(YELLOW),
            _ => Style::PLAIN,
        };
        let mut at = put(screen, row, &line.cells, &style);
        if has_spark {
            screen.put(row, at, &spark(&list.history(ps, process), screen.unicode), Style::of(BLUE));
            at += HISTORY + 1;
        }
        let at = screen.put(row, at, &line.note(screen.width.saturating_sub(at)), Style::PLAIN);
        if let Some(owner) = owner(process) {
            screen.put(row, at, &format!("  {owner}"), Style::DIM);
        }
        if is_live && place == chosen {
            screen.highlight(row);
        }
        row += 1;
    }
    page
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

/// The help: keys with their effects, and signs.
const KEYS: [(&str, &str); 17] = [
    ("up down, j k", "choose a row; PgUp PgDn Home End"),
    ("Enter", "a process: details; a line: the explanation of its word"),
    ("Esc", "back"),
    ("s  r", "sort by the next column; the other way round"),
    ("/", "only processes with these words: user, command, pid, state, job, pod, gpu3"),
    ("Tab", "of a process: rows are layers, structures, tags"),
    ("d", "of a process on several devices: the next one"),
    ("w", "of a process: a shorter time"),
    ("a", "of a process: every name, however small"),
    ("o g x i", "of a process: when memory ran out, growth, changes of Untrackable, iterations"),
    ("e", "all words that are explained"),
    ("p", "pause: the screen stays as it is"),
    ("Ctrl-L", "draw everything again"),
    ("q, Ctrl-C", "leave"),
    ("", ""),
    ("-", "unknown, which is never zero; ~ measured at another moment"),
    ("", ""),
];

/// Draws the help: keys, signs, and the number of bytes written to the terminal.
pub(crate) fn draw_help(screen: &mut Screen, (mut row, end): (usize, usize), written: &Written) {
    for (key, what) in KEYS {
        if row < end {
            screen.put(row, 1, key, Style::BOLD);
            screen.put(row, 16, what, Style::PLAIN);
        }
        row += 1;
    }
    for (what, (unicode, ascii), style) in PARTS {
        if row < end {
            let glyph = if screen.unicode { unicode } else { ascii };
            let at = screen.put(row, 1, &glyph.to_string().repeat(2), style);
            screen.put(row, at.max(16), what, Style::PLAIN);
        }
        row += 1;
    }
    if row < end {
        let text = format!("written: {} bytes for the last change, {} in all", written.last, written.all);
        screen.put(row, 1, &text, Style::DIM);
    }
}
