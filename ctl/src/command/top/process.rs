//! The view of one process: a chart of its memory over time, a table of its memory by category, and sentences of its report.

use super::history::{self, History, Layer, LayerKind};
use super::keys::Key;
use super::screen::{BLUE, RED, Screen, Style, YELLOW, amount_bar, columns, spark};
use crate::client::RunReply;
use gpumem_model::run::{Clock, Run, State};
use gpumem_model::units::Unit;
use gpumem_report::explain::{self, explain, is_known};
use gpumem_report::panel::{Panel, Table, course, panel};
use gpumem_report::rules::Groupings;
use gpumem_report::table::shorten;
use gpumem_report::text::{escape, wrapped};
use gpumem_report::{Composition, GroupBy, Part, Report, growth, iterations, oom, steps};

/// Times in seconds that the chart shows, up to now; `None` is the whole run. The key `w` cycles through them.
const WINDOWS_S: [Option<u64>; 5] = [None, Some(3600), Some(600), Some(120), Some(30)];
/// Groupings of the table's rows, through which the Tab key cycles.
const GROUPINGS: [GroupBy; 3] = [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag];
/// Maximum number of categories in the table.
const CATEGORIES: usize = 12;
/// Maximum height of the chart in rows.
const CHART_ROWS: usize = 10;
/// Rows below which there is no room for the chart; a sparkline takes its place.
const CHART_FROM: usize = 16;

/// A line of the view below the chart.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Line {
    Blank,
    Head,
    /// The row with this index in the table.
    Row(usize),
    /// A line of a sentence, and the word that `explain` explains for it.
    Sentence(String, Style, Option<String>),
}

#[derive(Default)]
pub(crate) struct Process {
    pub pid: u32,
    run: Option<Run>,
    /// The run's id in the daemon's store.
    id: Option<String>,
    /// Reason why the latest reply has no run.
    error: Option<String>,
    /// Grouping that the user has chosen; `None` for the report's own.
    by: Option<GroupBy>,
    /// Grouping of the rows in `panel` (the parts of the report as shown).
    shown_by: Option<GroupBy>,
    /// Index of the shown device.
    device: usize,
    /// Whether all categories are shown.
    all: bool,
    /// Index in [`WINDOWS_S`].
    window: usize,
    panel: Panel,
    layers: Vec<Layer>,
    history: History,
    /// Indices of the selected line and of the first visible line.
    selected: usize,
    first: usize,
    width: usize,
    /// Number of lines below the chart that fit on the screen.
    page: usize,
    /// A text that is shown in place of the view, and the index of its first visible line.
    text: Option<(String, usize)>,
}

impl Process {
    pub(crate) fn new(pid: u32) -> Self {
        Process { pid, selected: 1, width: 80, page: 1, ..Process::default() }
    }

    /// Updates the view from a reply of the daemon.
    pub(crate) fn update(&mut self, reply: Result<Option<RunReply>, String>) {
        let pid = self.pid;
        self.error = match reply {
            Ok(Some(RunReply { id, run })) => {
                (self.run, self.id) = (Some(run), id);
                self.refresh();
                None
            }
            Ok(None) => {
                Some(format!("the daemon has no run of pid {pid} that you may see (gpumemctl doctor {pid})"))
            }
            Err(error) => Some(error),
        };
    }

    /// Computes table, sentences and chart from the run.
    fn refresh(&mut self) {
        let Some(run) = &self.run else { return };
        let report = report(run, self.id.as_ref(), self.by);
        if Some(report.by) != self.shown_by {
            self.history = History::default();
        }
        self.shown_by = Some(report.by);
        self.device = self.device.min(run.devices.len().saturating_sub(1));
        self.panel = panel(&report, if self.all { usize::MAX } else { CATEGORIES });
        let table = self.panel.devices.get(self.device);
        let named = table.into_iter().flat_map(|table| &table.rows).filter(|row| row.part == Part::Category);
        // The row for several smaller categories has no layer.
        let is_one = |name: &String| !(name.starts_with('(') && name.ends_with(" smaller)"));
        self.layers = history::layers(named.map(|row| row.name.clone()).filter(is_one));
        if let Some(device) = run.devices.get(self.device) {
            self.history.update(course(&report, device, report.by));
        }
    }

    /// Handles a key. Returns whether the key has an effect in this view.
    pub(crate) fn key(&mut self, key: Key) -> bool {
        if let Some((text, first)) = &mut self.text {
            let last = text.lines().count().saturating_sub(self.page);
            match key.step(self.page) {
                Some(by) => *first = first.saturating_add_signed(by).min(last),
                None if matches!(key, Key::Escape | Key::Enter | Key::Left) => self.text = None,
                None => return false,
            }
            return true;
        }
        let Some(by) = key.step(self.page) else { return self.command(key) };
        let last = self.lines(self.width).len().saturating_sub(1);
        self.selected = self.selected.saturating_add_signed(by).min(last);
        true
    }

    fn command(&mut self, key: Key) -> bool {
        match key {
            Key::Tab => {
                let at = GROUPINGS.iter().position(|by| Some(*by) == self.shown_by).unwrap_or(0);
                self.by = GROUPINGS.get((at + 1) % GROUPINGS.len()).copied();
                self.refresh();
            }
            Key::Char('d') => {
                self.device = (self.device + 1) % self.panel.devices.len().max(1);
                self.history = History::default();
                self.refresh();
            }
            Key::Char('a') => {
                self.all = !self.all;
                self.refresh();
            }
            Key::Char('w') => self.window = (self.window + 1) % WINDOWS_S.len(),
            Key::Char('o') => self.show(|report| oom::text(report, oom::OomOptions::default())),
            Key::Char('g') => self.show(|report| growth::table(report, false)),
            Key::Char('x') => self.show(steps::text),
            Key::Char('i') => {
                self.show(|report| iterations::text(report, iterations::IterationFilter::default()))
            }
            Key::Char('e') => self.show(|_| explain::list(None)),
            Key::Enter | Key::Right => {
                let Some(word) = self.word() else { return true };
                self.show(|report| explain(&word, Some(report), None).unwrap_or_default());
            }
            _ => return false,
        }
        true
    }

    /// Returns the word to explain for the selected line.
    fn word(&self) -> Option<String> {
        match self.lines(self.width).get(self.selected)? {
            Line::Row(number) => {
                let row = self.table()?.rows.get(*number)?;
                Some(if row.part == Part::Used { "used".to_owned() } else { row.name.clone() })
            }
            Line::Sentence(_, _, word) => word.clone(),
            Line::Blank | Line::Head => None,
        }
    }

    /// Shows a text in place of the view, unless the text is empty.
    fn show(&mut self, text: impl Fn(&Report<'_>) -> String) {
        let Some(run) = &self.run else { return };
        let text = text(&report(run, self.id.as_ref(), self.by));
        self.text = (!text.is_empty()).then_some((text, 0));
    }

    /// Returns the number of rows that the whole view needs.
    pub(crate) fn height(&self, width: usize) -> usize {
        3 + CHART_ROWS + self.panel.warnings.len() * 2 + self.lines(width).len()
    }

    fn table(&self) -> Option<&Table> {
        self.panel.devices.get(self.device)
    }

    /// Returns all lines below the chart.
    fn lines(&self, width: usize) -> Vec<Line> {
        let mut lines = Vec::new();
        let mut sentences: Vec<(&String, Style)> = Vec::new();
        if let Some(table) = self.table() {
            lines.push(Line::Head);
            lines.extend((0..table.rows.len()).map(Line::Row));
            lines.push(Line::Blank);
            sentences.extend(table.facts.iter().map(|text| (text, Style::PLAIN)));
        }
        sentences.extend(self.panel.coverage.iter().map(|text| (text, Style::PLAIN)));
        sentences.extend(self.panel.tail.iter().map(|text| (text, Style::DIM)));
        for (text, style) in sentences {
            let word = text.split(':').next().filter(|word| text.len() > word.len() && is_known(word));
            let line = |line| Line::Sentence(line, style, word.map(str::to_owned));
            lines.extend(wrapped(text, Some(width)).into_iter().map(line));
        }
        lines
    }

    /// Draws the view in the rows from `row` to before `end`.
    pub(crate) fn draw(&mut self, screen: &mut Screen, (mut row, end): (usize, usize), is_live: bool) {
        if let Some((text, first)) = &self.text {
            self.page = end.saturating_sub(row).max(1);
            let width = screen.width;
            let lines = text.lines().flat_map(|line| wrap_line(line, width));
            for line in lines.skip(*first).take(end.saturating_sub(row)) {
                screen.put(row, 0, &line, Style::PLAIN);
                row += 1;
            }
            return;
        }
        if let Some(error) = &self.error {
            screen.put_wrapped(&mut row, error, usize::MAX, Style::bold(RED));
        }
        let Some(run) = &self.run else {
            if self.error.is_none() {
                screen.put(row, 0, "asking ...", Style::DIM);
            }
            return;
        };
        screen.put_wrapped(&mut row, &self.panel.heading, 2, Style::BOLD);
        for warning in &self.panel.warnings {
            screen.put_wrapped(&mut row, warning, 2, Style::bold(YELLOW));
        }
        if run.state != State::Open {
            let text = "the process has ended: these are its last numbers";
            screen.put_wrapped(&mut row, text, 2, Style::bold(YELLOW));
        }
        if self.panel.devices.len() > 1 {
            let title = self.table().map_or("", |table| table.title.as_str());
            let (number, count) = (self.device + 1, self.panel.devices.len());
            let text = format!("device {number} of {count} (d: the next): {title}");
            screen.put_wrapped(&mut row, &text, 2, Style::PLAIN);
        }
        row = self.draw_chart(screen, (row, end), run.clock);
        let lines = self.lines(screen.width);
        let page = end.saturating_sub(row);
        let selected = self.selected.min(lines.len().saturating_sub(1));
        let first = self.first.min(selected).max((selected + 1).saturating_sub(page));
        let signs = self.signs(screen);
        for (index, line) in lines.iter().enumerate().skip(first).take(page) {
            let place = row + index - first;
            match (line, self.table()) {
                (Line::Sentence(text, style, _), _) => _ = screen.put(place, 0, text, *style),
                (Line::Head, Some(table)) => self.draw_row(screen, place, table, None, &signs),
                (Line::Row(row), Some(table)) => self.draw_row(screen, place, table, Some(*row), &signs),
                _ => {}
            }
            if is_live && index == selected {
                screen.highlight(place);
            }
        }
        let below = lines.len().saturating_sub(first + page);
        if is_live && below > 0 {
            let text = format!(" {below} more lines ");
            screen.put_before(end.saturating_sub(1), screen.width, &text, Style::REVERSE);
        }
        (self.page, self.first, self.width, self.selected) = (page.max(1), first, screen.width, selected);
    }

    /// Draws the chart, as high as there is room for. Returns the next free row.
    fn draw_chart(&self, screen: &mut Screen, (row, end): (usize, usize), clock: Clock) -> usize {
        let room = end.saturating_sub(row);
        let window = WINDOWS_S.get(self.window).copied().flatten();
        let Some((from, to)) = self.history.span(window.map(|seconds| seconds * 1_000_000_000)) else {
            return row;
        };
        let drawn = self.history.columns((from, to), screen.width);
        let highest = drawn.iter().flatten().map(|composition| composition.total()).max().unwrap_or(0);
        let unit = Unit::for_largest(highest);
        let window = window.map(|seconds| format!(" of {seconds} s")).unwrap_or_default();
        let (top, unit, from, to) = (unit.amount(highest), unit.name, clock.time(from), clock.time(to));
        let text = format!("tracked over time, 0 to {top} {unit}, {from} to {to}{window}");
        screen.put(row, 0, &text, Style::DIM);
        if room < CHART_FROM {
            let value = |composition: &Composition| u64::try_from(composition.total()).unwrap_or(0);
            let values: Vec<Option<u64>> = drawn.iter().map(|point| point.map(value)).collect();
            screen.put(row + 1, 0, &spark(&values, screen.unicode), Style::of(BLUE));
            return row + 2;
        }
        let height = (room / 4).clamp(3, CHART_ROWS);
        history::draw(screen, (row + 1, 0), height, &drawn, &self.layers, highest);
        row + 1 + height
    }

    /// Returns for each row of the table the character and style of its layer in the chart, if it has one.
    fn signs(&self, screen: &Screen) -> Vec<Option<(String, Style)>> {
        let Some(table) = self.table() else { return Vec::new() };
        let find = |kind: LayerKind| self.layers.iter().find(|layer| layer.kind == kind);
        let layer = |row: &gpumem_report::panel::Row| match row.part {
            Part::Category => find(LayerKind::Category(row.name.clone())).or_else(|| find(LayerKind::Rest)),
            Part::Others => find(LayerKind::Rest),
            Part::PoolIdle => find(LayerKind::PoolIdle),
            Part::Opaque => find(LayerKind::Opaque),
            _ => None,
        };
        table.rows.iter().map(|row| layer(row).map(|layer| layer.sign(screen))).collect()
    }

    /// Draws a row of the table, or its headings if `number` is `None`.
    fn draw_row(
        &self,
        screen: &mut Screen,
        place: usize,
        table: &Table,
        number: Option<usize>,
        signs: &[Option<(String, Style)>],
    ) {
        let width = |column: usize| {
            let cells = table.rows.iter().map(|row| columns(&row.cells[column]));
            cells.chain([columns(&table.heads[0][column])]).max().unwrap_or(0)
        };
        let widths = [width(0), width(1)];
        let notes = table.rows.iter().map(|row| columns(&row.note)).max().unwrap_or(0).min(16);
        let amounts = widths[0] + widths[1] + 4;
        let longest = table.rows.iter().map(|row| row.depth + columns(&row.name)).max().unwrap_or(0) + 2;
        let names = longest.clamp(14, 14.max(screen.width.saturating_sub(amounts + notes + 18).min(60)));
        let put = |screen: &mut Screen, cells: &[String; 2], style: Style| {
            let first = names + 2 + widths[0];
            let second = first + 2 + widths[1];
            screen.put_before(place, first, &cells[0], style);
            screen.put_before(place, second, &cells[1], style);
            second + 1
        };
        let Some((row, sign)) = number.and_then(|number| Some((table.rows.get(number)?, signs.get(number)?)))
        else {
            let by = match self.shown_by {
                Some(GroupBy::Structure) => "by structure",
                Some(GroupBy::Tag) => "by tag",
                Some(GroupBy::Layer) | None => "by layer",
            };
            screen.put_within(place, 0, names, &format!("{}, {by}", table.unit), Style::BOLD);
            let at = put(screen, &table.heads[0], Style::BOLD);
            screen.put(place, at + 1, "share of used", Style::DIM);
            return;
        };
        if let Some((sign, style)) = sign {
            screen.put(place, 0, sign, *style);
        }
        let style = if row.depth == 0 { Style::BOLD } else { Style::PLAIN };
        let from = 1 + row.depth;
        let room = names.saturating_sub(from);
        // If a path is too long, its end is kept, which is more specific.
        let name = if row.name.contains('/') { shorten(&row.name, room, true) } else { row.name.clone() };
        screen.put_within(place, from, names, &name, style);
        let at = put(screen, &row.cells, style) + 1;
        let bars_end = screen.width.saturating_sub(notes + 1);
        let whole = table.rows.iter().filter_map(|row| row.bytes[0]).max().unwrap_or(0);
        if let Some(bytes) = row.bytes[0].filter(|_| bars_end > at + 4) {
            let style = sign.as_ref().map_or(Style::DIM, |(_, style)| *style);
            screen.put(place, at, &amount_bar(bytes, whole, bars_end - at, screen.unicode), style);
        }
        screen.put(place, bars_end.max(at) + 1, &row.note, Style::DIM);
    }
}

fn report<'r>(run: &'r Run, id: Option<&String>, by: Option<GroupBy>) -> Report<'r> {
    let mut report = Report::new(run, Groupings::of_run(run), by);
    report.id = id.cloned();
    report.command = format!("gpumemctl report {}", run.process.pid);
    report
}

/// Wraps a line of text. A line of a table, which has two blanks between columns, is not wrapped; the screen cuts it.
fn wrap_line(line: &str, width: usize) -> Vec<String> {
    let words = line.trim_start();
    let inset = &line[..line.len() - words.len()];
    if columns(line) <= width || words.contains("  ") {
        return vec![escape(line)];
    }
    let lines = wrapped(words, Some(width.saturating_sub(inset.len())));
    lines.into_iter().map(|line| format!("{inset}{line}")).collect()
}
