//! The view of one process: a chart of its memory over time, a table of its memory by category, and sentences of its report.

use super::history::{self, Chart, History, Layer, LayerKind, UNTRACKABLE_SHADE};
use super::keys::Key;
use super::widgets::{
    BOLD, DIM, Look, PLAIN, RED, SELECTED, Scroll, YELLOW, amount_bar, draw_text, length, wrap,
};
use crate::client::RunReply;
use gpumem_model::run::{Clock, Run, State};
use gpumem_model::units::Unit;
use gpumem_report::explain::{self, explain, is_known};
use gpumem_report::panel::{self, Panel, course, panel};
use gpumem_report::rules::Groupings;
use gpumem_report::table::{shorten, width as width_of};
use gpumem_report::text::{escape, wrapped};
use gpumem_report::{GroupBy, Part, Report, growth, iterations, oom, steps};
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::{Constraint, Layout, Rect};
use ratatui_core::style::{Modifier, Style};
use ratatui_core::text::{Line, Span, Text};
use ratatui_core::widgets::{StatefulWidget, Widget};
use ratatui_widgets::table::{Cell, Row, Table, TableState};

/// Lengths in seconds of the last part of the run that the chart shows; `None` is the whole run. The key `w` cycles through them.
const WINDOWS_S: [Option<u64>; 5] = [None, Some(3600), Some(600), Some(120), Some(30)];
/// Groupings of the table's rows, through which the Tab key cycles.
const GROUPINGS: [GroupBy; 3] = [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag];
/// Maximum number of categories in the table.
const CATEGORIES: usize = 12;
/// Maximum number of findings above the chart.
const FINDINGS: usize = 3;
/// Maximum height of the chart in rows.
const CHART_ROWS: u16 = 10;
/// Minimum width of a name, and maximum width of a note.
const LEAST_NAME: usize = 14;
const NOTE_WIDTH: usize = 16;
/// Minimum width of a row's bar plus the blanks between all columns.
const LEAST_BAR: usize = 22;
/// Columns for name, bar and note below which there is no note, and only a short bar.
const NARROW: usize = 40;
/// Width of a short bar plus the blanks between all columns.
const SHORT_BAR: usize = 12;

/// A row below the chart.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Item {
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
    /// Grouping of the rows that `panel` holds now.
    shown_by: Option<GroupBy>,
    device: usize,
    /// Whether all categories are shown.
    all: bool,
    /// Index in [`WINDOWS_S`].
    window: usize,
    panel: Panel,
    layers: Vec<Layer>,
    history: History,
    /// Rows below the chart, for the width of the screen.
    items: Vec<Item>,
    scroll: Scroll,
    /// A text that is shown in place of the view, and the position in it.
    text: Option<(String, Scroll)>,
}

impl Process {
    pub(crate) fn new(pid: u32) -> Self {
        Process { pid, ..Process::default() }
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
            Ok(None) => Some(no_run(pid)),
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
        let Some((_, scroll)) = &mut self.text else {
            return self.scroll.key(key) || self.command(key);
        };
        if matches!(key, Key::Escape | Key::Enter | Key::Left) {
            self.text = None;
            return true;
        }
        scroll.key(key)
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

    /// Returns the word to explain for the selected row.
    fn word(&self) -> Option<String> {
        match self.items.get(self.scroll.position)? {
            Item::Row(number) => {
                let row = self.table()?.rows.get(*number)?;
                Some(if row.part == Part::Used { "used".to_owned() } else { row.name.clone() })
            }
            Item::Sentence(_, _, word) => word.clone(),
        }
    }

    /// Shows a text in place of the view, unless the text is empty.
    fn show(&mut self, text: impl Fn(&Report<'_>) -> String) {
        let Some(run) = &self.run else { return };
        let text = text(&report(run, self.id.as_ref(), self.by));
        self.text = (!text.is_empty()).then(|| (text, Scroll::default()));
    }

    fn table(&self) -> Option<&panel::Table> {
        self.panel.devices.get(self.device)
    }

    fn items(&self, area: Rect) -> Vec<Item> {
        let mut items = Vec::new();
        let mut sentences: Vec<(&str, Style)> = Vec::new();
        if let Some(table) = self.table() {
            items.extend((0..table.rows.len()).map(Item::Row));
            sentences.push(("", PLAIN));
            sentences.extend(table.facts.iter().map(|text| (text.as_str(), PLAIN)));
        }
        sentences.extend(self.panel.coverage.iter().map(|text| (text.as_str(), PLAIN)));
        sentences.extend(self.panel.tail.iter().map(|text| (text.as_str(), DIM)));
        for (text, style) in sentences {
            let word = text.split(':').next().filter(|word| text.len() > word.len() && is_known(word));
            let item = |line| Item::Sentence(line, style, word.map(str::to_owned));
            items.extend(wrapped(text, Some(area.width.into())).into_iter().map(item));
        }
        items
    }

    pub(crate) fn draw(&mut self, area: Rect, frame: &mut Buffer, look: Look) {
        // A scroll bar takes the last column.
        let inner = Rect { width: area.width.saturating_sub(1), ..area };
        if let Some((text, scroll)) = &mut self.text {
            let lines = text.lines().flat_map(|line| wrap_line(line, inner.width.into()));
            return draw_text(&lines.map(Line::from).collect::<Vec<_>>(), scroll, area, frame, look);
        }
        let heading = self.heading(area);
        let [of_heading, rest] = Layout::vertical([length(heading.len()), Constraint::Fill(1)]).areas(area);
        Text::from(heading).render(of_heading, frame);
        let Some(run) = &self.run else { return };
        let rest = self.draw_chart(rest, run.clock, frame, look);
        self.items = self.items(if look.is_live { inner } else { area });
        self.draw_items(rest, frame, look);
    }

    /// Returns the lines above the chart: the process, and what limits its numbers.
    fn heading(&self, area: Rect) -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        let mut add = |text: &str, limit: usize, style: Style| lines.extend(wrap(text, area, limit, style));
        if let Some(error) = &self.error {
            add(error, usize::MAX, BOLD.fg(RED));
        }
        let Some(run) = &self.run else {
            if self.error.is_none() {
                add("asking ...", 1, DIM);
            }
            return lines;
        };
        add(&self.panel.heading, 2, BOLD);
        self.panel.verdict.iter().take(FINDINGS).for_each(|finding| add(finding, 2, PLAIN));
        self.panel.warnings.iter().for_each(|warning| add(warning, 2, BOLD.fg(YELLOW)));
        if run.state != State::Open {
            add("the process has ended: these are its last numbers", 2, BOLD.fg(YELLOW));
        }
        if self.panel.devices.len() > 1 {
            let title = self.table().map_or("", |table| table.title.as_str());
            let (number, count) = (self.device + 1, self.panel.devices.len());
            add(&format!("device {number} of {count} (d: the next): {title}"), 2, PLAIN);
        }
        lines
    }

    /// Draws the chart, as high as there is room for. Returns the rest of the area.
    fn draw_chart(&self, area: Rect, clock: Clock, frame: &mut Buffer, look: Look) -> Rect {
        let window = WINDOWS_S.get(self.window).copied().flatten();
        let Some((from, to)) = self.history.span(window.map(|seconds| seconds * 1_000_000_000)) else {
            return area;
        };
        let heights = [
            Constraint::Length(1),
            Constraint::Length((area.height / 4).min(CHART_ROWS)),
            Constraint::Fill(1),
        ];
        let [of_caption, of_chart, rest] = Layout::vertical(heights).areas(area);
        let columns = self.history.columns((from, to), area.width.into());
        let max_bytes = columns.iter().flatten().map(|composition| composition.total()).max().unwrap_or(0);
        let unit = Unit::for_largest(max_bytes);
        let window = window.map(|seconds| format!(" of {seconds} s")).unwrap_or_default();
        let (top, unit, from, to) = (unit.amount(max_bytes), unit.name, clock.time(from), clock.time(to));
        let range = format!("0 to {top} {unit}, {from} to {to}{window}");
        let whole = format!("tracked over time, {range}");
        let fits = width_of(&whole) <= of_caption.width.into();
        Line::styled(if fits { whole } else { range }, DIM).render(of_caption, frame);
        Chart { columns: &columns, layers: &self.layers, max_bytes, look }.render(of_chart, frame);
        rest
    }

    /// Draws the table of the device and the sentences, with a selection.
    fn draw_items(&mut self, area: Rect, frame: &mut Buffer, look: Look) {
        let none = panel::Table::default();
        let table = self.panel.devices.get(self.device).unwrap_or(&none);
        let headed = usize::from(self.table().is_some());
        let visible =
            self.scroll.visible_rows(self.items.len(), usize::from(area.height).saturating_sub(headed));
        let area = self.scroll.draw_bar(area, frame, look);
        let widest = |of: &dyn Fn(&panel::Row) -> usize| table.rows.iter().map(of).max().unwrap_or(0);
        let amount = |column: usize| {
            widest(&|row| width_of(&row.cells[column])).max(width_of(&table.heads[0][column]))
        };
        let (last, peak) = (amount(0), amount(1));
        let room = usize::from(area.width).saturating_sub(last + peak);
        // A narrow terminal has no room for notes and bars beside whole names.
        let is_narrow = room < NARROW;
        let note = if is_narrow { 0 } else { widest(&|row| width_of(&row.note)).min(NOTE_WIDTH) };
        let names = room.saturating_sub(note + if is_narrow { SHORT_BAR } else { LEAST_BAR });
        let name =
            widest(&|row| 1 + row.depth + width_of(&row.name)).clamp(LEAST_NAME, names.clamp(LEAST_NAME, 60));
        let widths = [length(name), length(last), length(peak), Constraint::Fill(1), length(note)];
        let [.., of_bar, _] = Layout::horizontal(widths).spacing(2).areas::<5>(area);
        let whole = table.rows.iter().filter_map(|row| row.bytes[0]).max().unwrap_or(0);
        let row = |item: &Item| match item {
            Item::Sentence(text, style, _) => {
                Row::new([Cell::from(text.clone()).column_span(5)]).style(*style)
            }
            Item::Row(number) => {
                let Some(row) = table.rows.get(*number) else { return Row::default() };
                let layer = self.layer(row);
                let sign = layer.map(|layer| layer.sign(look));
                let bar_style = sign.as_ref().map_or(DIM, |sign| sign.style);
                let shade = match row.part {
                    Part::Untrackable
                    | Part::Context
                    | Part::Modules
                    | Part::LocalMemory
                    | Part::Heaps
                    | Part::Unexplained => UNTRACKABLE_SHADE,
                    _ => layer.map_or('█', Layer::shade),
                };
                let bar = row.bytes[0].map(|bytes| amount_bar(bytes, whole, of_bar.width, shade, look));
                let amount = |column: usize| Line::from(row.cells[column].clone()).right_aligned();
                let [last, peak] = [0, 1].map(amount);
                let cells = [
                    name_line(row, sign, name),
                    last,
                    peak,
                    Line::styled(bar.unwrap_or_default(), bar_style),
                    Line::styled(row.note.clone(), DIM),
                ];
                Row::new(cells).style(if row.depth == 0 { BOLD } else { PLAIN })
            }
        };
        let rows: Vec<Row> = self.items.get(visible.clone()).unwrap_or_default().iter().map(row).collect();
        let mut drawn = Table::new(rows, widths).column_spacing(2).row_highlight_style(SELECTED);
        if headed > 0 {
            drawn = drawn.header(self.header(table, of_bar.width));
        }
        let selected = self.scroll.position.checked_sub(visible.start).filter(|_| look.is_live);
        StatefulWidget::render(drawn, area, frame, &mut TableState::new().with_selected(selected));
        // A reversed bar would look like the rest of its column.
        let row = selected.and_then(|row| area.rows().nth(row + headed)).unwrap_or_default();
        for cell in of_bar.intersection(row).positions() {
            frame[cell].modifier.remove(Modifier::REVERSED);
        }
    }

    fn header(&self, table: &panel::Table, bar_width: u16) -> Row<'static> {
        let by = match self.shown_by {
            Some(GroupBy::Structure) => "by structure",
            Some(GroupBy::Tag) => "by tag",
            Some(GroupBy::Layer) | None => "by layer",
        };
        let [last, peak] = table.heads[0].clone().map(|head| Line::from(head).right_aligned());
        let unit = Line::from(format!("{}, {by}", table.unit));
        let share = ["share of used", "share", ""].into_iter().find(|head| head.len() <= bar_width.into());
        Row::new([unit, last, peak, Line::styled(share.unwrap_or_default(), DIM)]).style(BOLD)
    }

    /// Returns the layer of a row in the chart, if it has one.
    fn layer(&self, row: &panel::Row) -> Option<&Layer> {
        let find = |kind: LayerKind| self.layers.iter().find(|layer| layer.kind == kind);
        match row.part {
            Part::Category => find(LayerKind::Category(row.name.clone())).or_else(|| find(LayerKind::Rest)),
            Part::Others => find(LayerKind::Rest),
            Part::PoolIdle => find(LayerKind::PoolIdle),
            Part::Opaque => find(LayerKind::Opaque),
            _ => None,
        }
    }
}

/// Returns the sign of a row's layer and the row's name, indented. If a path is too long, its end is kept, which is more specific.
fn name_line(row: &panel::Row, sign: Option<Span<'static>>, columns: usize) -> Line<'static> {
    let room = columns.saturating_sub(1 + row.depth);
    let name = if row.name.contains('/') { shorten(&row.name, room, true) } else { row.name.clone() };
    Line::from_iter([sign.unwrap_or_else(|| " ".into()), Span::from(" ".repeat(row.depth) + &name)])
}

/// Returns the message on a process that the daemon does not know or does not show to this user.
pub(crate) fn no_run(pid: u32) -> String {
    format!("the daemon has no run of pid {pid} that you may see (gpumemctl doctor {pid})")
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
    if width_of(line) <= width || words.contains("  ") {
        return vec![escape(line)];
    }
    let lines = wrapped(words, Some(width.saturating_sub(inset.len())));
    lines.into_iter().map(|line| format!("{inset}{line}")).collect()
}
