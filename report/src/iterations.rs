//! `gpumemctl report --iterations`: a table with the memory of each training step, one row for each step. It has the columns of
//! the tbd suite's pytorch_mem_profiler; the JSON has bytes instead of rounded megabytes.

mod columns;
pub(crate) mod parts;

use super::Report;
use super::table::{Table, shorten};
use crate::encode::{csv_field, csv_number, object};
use crate::labels::{device_title, label_with_pid};
use crate::lines::clean_name;
use gpumem_model::escape::escape;
use gpumem_model::run::{Device, Iteration, Iterations};
use gpumem_model::units::{Unit, thousands};
use std::fmt::Write;

/// Maximum number of rows of a table; adjacent rows are merged if there are more.
const MOST_ROWS: usize = 40;
/// Maximum width of a heading, in columns of the terminal.
const HEADING: usize = 24;

pub(crate) type Column = (&'static str, fn(&Iteration) -> i64);

/// Columns of the page's table. Those for transient memory show the peak in the iteration; those for lasting memory show the last
/// value.
pub(crate) static COLUMNS: [Column; 12] = [
    ("peak", |row| row.tracked.peak_bytes),
    ("reserved", |row| row.pool_reserved.last_bytes),
    ("params", |row| row.parameters.last_bytes),
    ("grads", |row| row.gradients.peak_bytes),
    ("optimizer", |row| row.optimizer_state.last_bytes),
    ("activations", |row| row.activations.peak_bytes),
    ("grad temps", |row| row.intermediate_gradients.peak_bytes),
    ("temps", |row| row.temporaries.peak_bytes),
    ("inputs", |row| row.inputs.peak_bytes),
    ("workspace", |row| row.workspace.peak_bytes),
    ("kv cache", |row| row.kv_caches.peak_bytes),
    ("copies", |row| row.parameter_copies.last_bytes),
];

/// Columns of the text for memory that does not last: the highest value in the iteration.
pub(crate) static HIGHEST: [Column; 6] = [
    ("max activations", |row| row.activations.peak_bytes),
    ("max grads", |row| row.gradients.peak_bytes),
    ("max grad temps", |row| row.intermediate_gradients.peak_bytes),
    ("max temps", |row| row.temporaries.peak_bytes),
    ("max inputs", |row| row.inputs.peak_bytes),
    ("max workspace", |row| row.workspace.peak_bytes),
];

/// Which iterations and columns are shown. The default is all iterations, without columns for individual parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IterationFilter {
    /// Only iterations whose number is a multiple of this are shown, and merged rows that contain such an iteration; 0 and 1 show
    /// all.
    pub every: u64,
    /// Whether each parameter and each gradient is shown, too.
    pub columns: bool,
}

impl IterationFilter {
    fn has(self, row: &Iteration) -> bool {
        let every = self.every.max(1);
        row.first.is_multiple_of(every) || row.count > 1 && row.first / every != row.last / every
    }

    fn of(self, table: &Iterations) -> Iterations {
        let has = |row: &Iteration| self.has(row);
        Iterations { rows: table.rows.iter().copied().filter(has).collect(), open: table.open.filter(has) }
    }
}

/// Returns a table of iterations for each device.
pub fn text(report: &Report<'_>, choice: IterationFilter) -> String {
    let run = report.run;
    let mut out = String::new();
    for device in &run.devices {
        let table = choice.of(&device.details.iterations);
        let title = format!("{}  {}", label_with_pid(run), device_title(device));
        let _ = writeln!(out, "{}{}", if out.is_empty() { "" } else { "\n" }, escape(&title));
        out += &rows(report, device, &table);
        if choice.columns {
            out += &columns::text(device, &table);
        }
    }
    if out.is_empty() { "no GPU memory was observed\n".to_owned() } else { out }
}

/// Returns the table as text: the peak of each iteration and the parts that add up to it, then figures that are not parts.
fn rows(report: &Report<'_>, device: &Device, table: &Iterations) -> String {
    let (shown, _) = folded(table);
    if shown.is_empty() {
        return "no iteration was observed: gpumem.step() or an optimizer's step begins one\n".to_owned();
    }
    let unit = Unit::for_largest(shown.iter().map(|row| row.tracked.peak_bytes).max().unwrap_or(0));
    let (heads, parts) = parts::parts(report, device, &shown);
    let reserved: Column = ("reserved", |row| row.pool_reserved.last_bytes);
    let others = [reserved].into_iter().chain(HIGHEST);
    let others: Vec<Column> = others.filter(|(_, of)| shown.iter().any(|row| of(row) != 0)).collect();
    let mut printed = Table::of_numbers(0, 2 + heads.len() + others.len());
    let first = heads.first().cloned().unwrap_or_default();
    let heads = heads.iter().map(|name| shorten(&clean_name(name), HEADING, name.contains('/')));
    let heads = ["iteration", "peak"].map(str::to_owned).into_iter().chain(heads);
    printed.row(heads.chain(others.iter().map(|(name, _)| (*name).to_owned())));
    for (index, (row, parts)) in shown.iter().zip(&parts).enumerate() {
        let peak = unit.round(row.tracked.peak_bytes);
        let known: Vec<i64> = parts.iter().flatten().copied().collect();
        let is_whole = known.len() == parts.len();
        let mut steps = if is_whole {
            unit.apportion(peak, &known).into_iter()
        } else {
            known.iter().map(|bytes| unit.round(*bytes)).collect::<Vec<_>>().into_iter()
        };
        let parts = parts.iter().map(|part| part.and_then(|_| steps.next()));
        let parts = parts.map(|steps| steps.map_or("-".to_owned(), |steps| unit.print(steps)));
        let cells = [number(row), unit.print(peak)].into_iter().chain(parts);
        let is_open = table.open.is_some() && index + 1 == shown.len();
        let lost = if row.partial { "(records were lost)" } else { "" };
        let open = if is_open { "(in progress)" } else { "" };
        let cells = cells.chain(others.iter().map(|(_, of)| unit.amount(of(row))));
        printed.row_with_note(cells, &format!("{lost}{open}"));
    }
    let head = format!("the columns {first} to {} add up to the peak", parts::IN_STEP);
    let what = "in step: memory that the step did not keep, or that the allocator caches";
    format!("{}; {head}; {what}\n{}", unit.name, printed.text())
}

pub(super) fn number(row: &Iteration) -> String {
    let epoch = if row.epoch == 0 { String::new() } else { format!("{}:", thousands(row.epoch)) };
    match row.count {
        0 | 1 => epoch + &thousands(row.first),
        _ => format!("{epoch}{}-{}", thousands(row.first), thousands(row.last)),
    }
}

/// Returns the table as at most [`MOST_ROWS`] rows, and the columns that have a value other than zero.
pub(super) fn folded(table: &Iterations) -> (Vec<Iteration>, Vec<&'static Column>) {
    let all: Vec<Iteration> = table.rows.iter().chain(&table.open).copied().collect();
    // A merged row has the highest peaks and the last values of the rows that it replaces.
    let merged = |rows: &[Iteration]| {
        let mut sum = rows[0];
        rows[1..].iter().for_each(|row| sum.join(*row));
        sum
    };
    let rows: Vec<Iteration> = all.chunks(all.len().div_ceil(MOST_ROWS).max(1)).map(merged).collect();
    let columns = COLUMNS.iter().filter(|(_, of)| rows.iter().any(|row| of(row) != 0)).collect();
    (rows, columns)
}

/// First line of the CSV: process and device, then the columns that pytorch_mem_profiler has too, under its names, and then the
/// exact bytes of each amount.
const HEADER: &str = "pid,device,epoch,iteration,peak_cached,current_cached,total_feature_map_usage,\
total_weight_usage,total_layer_weight_gradient_usage,intermediate_gradients,count,partial,peak_tracked_bytes,\
peak_cached_bytes,current_cached_bytes,feature_map_bytes,weight_bytes,weight_gradient_bytes,\
intermediate_gradient_bytes,optimizer_state_bytes,temporary_bytes,input_bytes,workspace_bytes,buffer_bytes,\
kv_cache_bytes,parameter_copy_bytes";

/// Returns CSV with one line for each device and finished iteration. `epoch` is empty if the program reports none. The columns
/// with names of pytorch_mem_profiler are whole decimal megabytes, as in its files. Columns for parameters and gradients are
/// exact bytes, or empty if unknown.
pub fn csv(report: &Report<'_>, choice: IterationFilter) -> String {
    let names = if choice.columns { columns::names(report.run) } else { Vec::new() };
    let heads: String = names.iter().map(|name| format!(",{}", csv_field(&columns::title(name)))).collect();
    let mut out = format!("{HEADER}{heads}\n");
    for device in &report.run.devices {
        let table = choice.of(&device.details.iterations);
        let amounts = columns::amounts(device, &table.rows, &names);
        for (row, amounts) in table.rows.iter().zip(amounts) {
            let decimal = [
                row.pool_reserved.peak_bytes,
                row.pool_reserved.last_bytes,
                row.activations.peak_bytes,
                row.parameters.last_bytes,
                row.gradients.peak_bytes,
                row.intermediate_gradients.peak_bytes,
            ];
            let more = [
                row.optimizer_state.last_bytes,
                row.temporaries.peak_bytes,
                row.inputs.peak_bytes,
                row.workspace.peak_bytes,
                row.buffers.last_bytes,
                row.kv_caches.peak_bytes,
                row.parameter_copies.last_bytes,
            ];
            let epoch = if row.epoch == 0 { String::new() } else { row.epoch.to_string() };
            let (pid, name) = (report.run.process.pid, csv_field(&device.name));
            let _ = write!(out, "{pid},{name},{epoch},{}", row.first);
            for bytes in decimal {
                let _ = write!(out, ",{}", (i128::from(bytes) + 500_000).div_euclid(1_000_000));
            }
            let _ = write!(out, ",{},{}", row.count, u8::from(row.partial));
            for bytes in [row.tracked.peak_bytes].into_iter().chain(decimal).chain(more) {
                let _ = write!(out, ",{bytes}");
            }
            for bytes in amounts {
                let _ = write!(out, ",{}", csv_number(bytes));
            }
            out.push('\n');
        }
    }
    out
}

/// Returns the iterations of each device as JSON, in bytes.
pub fn json(report: &Report<'_>, choice: IterationFilter) -> String {
    let devices = report.run.devices.iter().map(|device| {
        let iterations = choice.of(&device.details.iterations);
        let parameters = choice.columns.then(|| columns::parameters(device, &iterations.rows));
        object! {
            name: &device.name,
            iterations,
            // Present only if `choice` requests columns for parameters.
            #[serde(flatten)]
            parameters: parameters.map(|parameters| object! { parameters }),
        }
    });
    gpumem_model::escape::json(&object! {
        schema: "gpumem.iterations",
        version: 1,
        run: report.id.as_deref(),
        pid: report.run.process.pid,
        devices: devices.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_model::growth::Growth;
    use gpumem_model::run::{Cell, Class, Level, Run};
    use std::path::Path;

    fn iteration(first: u64) -> Iteration {
        let level = |peak: i64, last: i64| Level { peak_bytes: peak << 20, last_bytes: last << 20 };
        Iteration {
            first,
            last: first,
            count: 1,
            end_ns: 10 * (first + 1),
            tracked: level(700 + first as i64, 600),
            pool_reserved: level(650, 640),
            parameters: level(100, 100),
            gradients: level(100, 0),
            activations: level(300, 0),
            ..Iteration::default()
        }
    }

    /// Returns a run whose first device has these iterations, and that after each iteration keeps 50 MiB more of memory without a
    /// role.
    fn run(table: Iterations) -> Run {
        let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
        let leak = Cell { class: Class::Block, tag: Some("model/leak".into()), ..Cell::default() };
        run.cells.push(leak);
        let cell = run.cells.len() as u32 - 1;
        let growth = &mut run.devices[0].details.growth;
        *growth = Growth::default();
        let mut leaked = Vec::new();
        for row in &table.rows {
            growth.points.push((row.first, row.end_ns));
            leaked.push(((row.first as i64 + 1) * 50) << 20);
            growth.named.push((130 << 20) + leaked[leaked.len() - 1]);
            growth.slack.push(0);
            growth.rest.push(0);
        }
        growth.cells.push((cell, leaked));
        run.devices[0].details.iterations = table;
        run
    }

    fn shown(table: Iterations) -> String {
        let run = run(table);
        let report = Report::new(&run, crate::rules::Groupings::preset(Some("torch")).clone(), None);
        text(&report, IterationFilter::default())
    }

    #[test]
    fn columns_show_what_grows_and_add_up_to_the_peak() {
        let mut table = Iterations { rows: (0..3).map(iteration).collect(), open: Some(iteration(3)) };
        table.rows[1].partial = true;
        assert_eq!(
            shown(table).split_once('\n').expect("a title").1,
            "\
MiB; the columns params to in step add up to the peak; in step: memory that the step did not keep, or that the allocator caches
iteration   peak  params  model/leak  others  in step  reserved  max activations  max grads
        0  700.0   100.0        50.0    30.0    520.0     640.0            300.0      100.0
        1  701.0   100.0       100.0    30.0    471.0     640.0            300.0      100.0  (records were lost)
        2  702.0   100.0       150.0    30.0    422.0     640.0            300.0      100.0
        3  703.0   100.0       150.0    30.0    423.0     640.0            300.0      100.0  (in progress)
"
        );
        let mut early = iteration(0);
        early.end_ns = 5;
        let text = shown(Iterations { rows: vec![iteration(1)], open: Some(early) });
        assert!(text.contains("\n        0  700.0   100.0       -        -     640.0 "), "{text}");
    }

    #[test]
    fn neighbours_are_merged_where_there_are_many() {
        let table = Iterations { rows: (0..200).map(iteration).collect(), open: None };
        let text = shown(table);
        assert!(text.lines().count() <= MOST_ROWS + 3, "{text}");
        assert!(text.contains("\n      0-4  704.0 "), "{text}");
        assert!(shown(Iterations::default()).contains("no iteration was observed"));
        // Numbers with epochs, and only every n-th iteration.
        let mut table = Iterations { rows: (0..6).map(iteration).collect(), open: None };
        table.rows[4..]
            .iter_mut()
            .for_each(|row| (row.epoch, row.first, row.last) = (2, row.first - 4, row.last - 4));
        table.rows[5] = Iteration { first: 1, last: 7, count: 7, ..table.rows[5] };
        let choice = IterationFilter { every: 3, columns: false };
        let chosen = choice.of(&table);
        assert_eq!(chosen.rows.iter().map(number).collect::<Vec<_>>(), ["0", "3", "2:0", "2:1-7"]);
    }
}
