//! View of all devices and all processes.

use super::list::List;
use super::screen::{BLUE, CYAN, Cost, GREY, Part, RED, Screen, Style, YELLOW, bar, columns, spark};
use crate::command::ps::{self, Shown};
use gpumem_model::control::{DeviceRow, ProcessRow, Ps};
use gpumem_model::units::{Unit, plural, signed};
use gpumem_report::text::escape;

/// Returns the number of rows for all devices and processes, with the two rows of headings and that of claimed devices.
pub(crate) fn height(ps: &Ps) -> usize {
    ps.devices.len() + ps.processes.len() + usize::from(!ps.claims.is_empty()) + 2
}

/// Columns that a narrow terminal omits, in this order.
const LEAST_MISSED: [usize; 4] = [6, 2, 3, 7];
const COMMAND: usize = 16;
const STATE: usize = 14;
/// Minimum width of a terminal at which each process has a sparkline.
const WIDE: usize = 110;
const COURSE: usize = 24;

const GLYPHS: [(char, char); 5] = [('█', '#'), ('▓', '='), ('▒', '?'), ('░', ':'), ('.', '.')];
/// Meaning of the parts of a device's bar.
pub(crate) const LEGEND: [&str; 5] = ["chosen process", "other processes", "unaccounted", "system", "free"];

/// Returns the characters of a [`LEGEND`] entry.
pub(crate) fn legend(screen: &Screen, part: usize) -> (String, Style) {
    let (with, without) = GLYPHS.get(part).copied().unwrap_or((' ', ' '));
    let glyph = if screen.unicode { with } else { without };
    (glyph.to_string().repeat(2), style(part))
}

fn style(part: usize) -> Style {
    match part {
        0 => Style::of(CYAN),
        1 => Style::of(BLUE),
        2 => Style::of(RED),
        3 => Style::of(GREY),
        _ => Style::DIM,
    }
}

/// Draws the view from `row` to before `end`. Returns the number of processes for which there is room.
pub(crate) fn draw(
    screen: &mut Screen,
    ps: &Ps,
    list: &List,
    (mut row, end): (usize, usize),
    is_live: bool,
) -> usize {
    let claims = ps::claims_line(&ps.claims);
    let put_claims = |screen: &mut Screen, row: &mut usize| {
        if let Some(text) = &claims {
            screen.put(*row, 0, text, Style::of(YELLOW));
            *row += 1;
        }
    };
    if ps.devices.is_empty() {
        screen.put(row, 0, ps::NO_DEVICE, Style::of(RED));
        row += 1;
        put_claims(screen, &mut row);
        return 0;
    }
    let unit = ps::unit(ps);
    let chosen = list.process(ps).filter(|_| is_live);
    let room = end.saturating_sub(row + usize::from(claims.is_some()));
    // The processes get half of the rows, at least, and their heading.
    let most = room.saturating_sub(2).saturating_sub(ps.processes.len().min(room / 2)).max(1);
    let shown = ps.devices.len().min(most);
    let at = chosen.map_or(0, |process| process.device);
    let first = at.saturating_sub(shown - 1).min(ps.devices.len() - shown);
    row = devices(screen, ps, (first, shown), chosen, unit, row);
    put_claims(screen, &mut row);
    processes(screen, ps, list, unit, (row, end), is_live)
}

/// Draws the rows of devices. Returns the next row.
fn devices(
    screen: &mut Screen,
    ps: &Ps,
    (first, shown): (usize, usize),
    chosen: Option<&ProcessRow>,
    unit: Unit,
    mut row: usize,
) -> usize {
    let lines: Vec<[String; 5]> = ps.devices.iter().map(|device| device_cells(ps, device, unit)).collect();
    let heads = ["GPU", "", "USED", "FREE", "SIZE"];
    let width = |column: usize| {
        let cells = lines.iter().map(|cells| columns(&cells[column]));
        cells.max().unwrap_or(0).max(columns(heads[column]))
    };
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
    put(screen, row, &heads.map(str::to_owned), Style::BOLD);
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
        if let Some(doubt) = ps::doubt(device) {
            let doubt = format!(" {doubt} ");
            screen.put_within(row, bar_from, bar_to, &doubt, Style::bold(YELLOW));
        }
        row += 1;
    }
    row
}

fn device_cells(ps: &Ps, device: &DeviceRow, unit: Unit) -> [String; 5] {
    let amount = |bytes: Option<u64>| bytes.map_or("-".to_owned(), |bytes| unit.amount(signed(bytes)));
    let shown = Shown::of(device, &processes_of(ps, device), unit);
    let free = shown.free.map_or("-".to_owned(), |steps| unit.print(steps));
    let mut model = escape(&device.model).replace("NVIDIA ", "");
    if device.unified {
        model = format!("unified, {model}");
    }
    [device.index.to_string(), model, amount(device.used_bytes), free, amount(device.total_bytes)]
}

fn processes_of<'p>(ps: &'p Ps, device: &DeviceRow) -> Vec<&'p ProcessRow> {
    let is_on =
        |process: &&ProcessRow| ps.devices.get(process.device).is_some_and(|other| other.uuid == device.uuid);
    ps.processes.iter().filter(is_on).collect()
}

/// Returns the parts of a device's bar. The processes' parts are what NVML charges to them. Memory of a process whose amount is
/// unknown is in the unaccounted part.
fn parts(ps: &Ps, index: usize, device: &DeviceRow, chosen: Option<&ProcessRow>) -> Vec<Part> {
    let processes = ps.processes.iter().filter(|process| process.device == index);
    let sum = |own: bool| {
        let of = processes
            .clone()
            .filter(|process| chosen.is_some_and(|chosen| std::ptr::eq(chosen, *process)) == own);
        of.filter_map(|process| process.used_bytes).fold(0_i64, |sum, used| sum.saturating_add(signed(used)))
    };
    let (own, others) = (sum(true), sum(false));
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
    let part = |(at, bytes): (usize, i64)| Part { bytes, glyphs: GLYPHS[at], style: style(at) };
    bytes.into_iter().enumerate().map(part).collect()
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
    let width = |column: usize| {
        let cells = lines.iter().flatten().map(|line| columns(&line.cells[column]));
        let widest = cells.max().unwrap_or(0).max(columns(ps::HEADS[column]));
        if column == 3 { widest.min(STATE) } else { widest }
    };
    let widths: Vec<usize> = (0..ps::HEADS.len()).map(width).collect();
    let width = |column: usize| widths[column];
    let has_course = is_live && screen.width >= WIDE;
    let mut shown: Vec<usize> = (0..ps::HEADS.len()).collect();
    for missed in LEAST_MISSED {
        let taken: usize = shown.iter().map(|column| width(*column) + 1).sum();
        if taken + COMMAND <= screen.width {
            break;
        }
        shown.retain(|column| *column != missed);
    }
    let put = |screen: &mut Screen, row: usize, cells: &[String; 8], style: &dyn Fn(usize) -> Style| {
        let mut at = 0;
        for &column in &shown {
            let (text, width) = (&cells[column], width(column));
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
    let mut at = put(screen, row, &ps::HEADS.map(str::to_owned), &head);
    if has_course {
        screen.put(row, at, "USED, LATELY", Style::BOLD);
        at += COURSE + 1;
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
        let is_plain = process.flags == ["covered"];
        let look = |column: usize| match column {
            3 if !is_plain => Style::of(YELLOW),
            _ => Style::PLAIN,
        };
        let mut at = put(screen, row, &line.cells, &look);
        if has_course {
            let history = list.history(ps, process);
            let latest = history.get(history.len().saturating_sub(COURSE)..).unwrap_or_default();
            screen.put(row, at, &spark(latest, screen.unicode), Style::of(BLUE));
            at += COURSE + 1;
        }
        let at = screen.put(row, at, &line.note, Style::PLAIN);
        if let Some(whose) = whose(process) {
            screen.put(row, at, &format!("  {whose}"), Style::DIM);
        }
        if is_live && place == chosen {
            screen.mark(row);
        }
        row += 1;
    }
    page
}

fn whose(process: &ProcessRow) -> Option<String> {
    let of = |name: &str| process.who.get(name).map(|value| escape(value));
    if let Some(pod) = of("pod") {
        let space = of("namespace").map(|space| space + "/").unwrap_or_default();
        return Some(format!("pod {space}{pod}"));
    }
    of("slurm_job").map(|job| format!("slurm {job}")).or_else(|| of("job").map(|job| format!("job {job}")))
}

/// Returns the rows in the order of the reply, with amounts that add up by device.
fn lines(ps: &Ps, unit: Unit) -> Vec<Option<ps::Line>> {
    let mut lines: Vec<Option<ps::Line>> = ps.processes.iter().map(|_| None).collect();
    for (index, device) in ps.devices.iter().enumerate() {
        let on: Vec<usize> =
            (0..ps.processes.len()).filter(|row| ps.processes[*row].device == index).collect();
        let rows: Vec<&ProcessRow> = on.iter().map(|row| &ps.processes[*row]).collect();
        let shown = Shown::of(device, &rows, unit);
        for ((row, process), used) in on.iter().zip(rows).zip(shown.processes) {
            lines[*row] = Some(ps::process_line(device, process, used, unit));
        }
    }
    lines
}

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

/// Draws the help: keys, signs, and the number of bytes written.
pub(crate) fn draw_help(screen: &mut Screen, (mut row, end): (usize, usize), cost: &Cost) {
    for (key, what) in KEYS {
        if row < end {
            screen.put(row, 1, key, Style::BOLD);
            screen.put(row, 16, what, Style::PLAIN);
        }
        row += 1;
    }
    for (part, what) in LEGEND.iter().enumerate() {
        let (glyph, style) = legend(screen, part);
        if row < end {
            let at = screen.put(row, 1, &glyph, style);
            screen.put(row, at.max(16), what, Style::PLAIN);
        }
        row += 1;
    }
    if row < end {
        let text = format!("written: {} bytes for the last change, {} in all", cost.last, cost.all);
        screen.put(row, 1, &text, Style::DIM);
    }
}
