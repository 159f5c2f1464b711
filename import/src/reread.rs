//! Returns a run's state in a time window. Reads the run's file again up to the window's end, so that all sums are exact.

use crate::{Format, observe_file};
use gpumem_ledger::{Origin, ProcessKey, ProcessView};
use gpumem_model::program_data::SnapshotFigures;
use gpumem_model::run::{Device, Moment, Run};
use gpumem_model::window::{Window, WindowKind};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_runs::input::Error;
use gpumem_wire::{Body, Record};
use std::path::Path;

/// Passes the records up to the window's end to `builder`. At the window's begin, has the builder begin a new part of the run,
/// whose peaks and counts start again.
struct WindowSink<'b> {
    builder: &'b mut RunBuilder,
    from_ns: Option<u64>,
    to_ns: u64,
    /// Processes that had a record after the window. All their later records are skipped, also those with earlier times: the
    /// records of several threads are not exactly sorted, and skipping only some of them would look like lost records.
    ended: Vec<Origin>,
}

impl WindowSink<'_> {
    fn begin(&mut self, time_ns: u64) {
        if self.from_ns.is_some_and(|from_ns| time_ns > from_ns)
            && let Some(from_ns) = self.from_ns.take()
        {
            let keys: Vec<ProcessKey> = self.builder.ledger().processes().map(|(key, _)| key).collect();
            self.builder.roll(&keys, from_ns);
        }
    }
}

impl Sink for WindowSink<'_> {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        let time_ns = record.stamp.time_ns;
        // Records that define names (such as tags) may follow the window although records within it need them.
        let is_name = matches!(
            record.body,
            Body::Tag { .. }
                | Body::Module { .. }
                | Body::Stack { .. }
                | Body::Device { .. }
                | Body::ProcessFacts { .. }
                | Body::ClockAnchor { .. }
        );
        if is_name {
            self.builder.observe(origin, record);
        } else if time_ns > self.to_ns {
            if origin != Origin::Host && !self.ended.contains(&origin) {
                self.ended.push(origin);
            }
        } else if self.ended.is_empty() || !self.ended.contains(&origin) {
            self.begin(time_ns);
            self.builder.observe(origin, record);
        }
    }

    fn caveat(&mut self, code: &str, text: String) {
        self.builder.caveat(code, text);
    }

    fn figures(&mut self, figures: SnapshotFigures) {
        self.builder.figures(figures);
    }

    fn reject(&mut self, count: u64) {
        self.builder.reject(count);
    }
}

/// Returns the window of a run that was read from the file `path`; `None` if the file no longer contains the process. Only pages show
/// the single blocks of the window: others leave out `with_blocks`.
pub fn reread(
    path: &Path,
    format: Option<&'static Format>,
    run: &Run,
    window: &Window,
    with_blocks: bool,
) -> Result<Option<Run>, Error> {
    let builder = RunBuilder::new(run.source.clone());
    let mut builder = if with_blocks { builder.with_blocks() } else { builder };
    let from_ns = (window.part != WindowKind::At).then_some(window.from_ns);
    let mut sink = WindowSink { builder: &mut builder, from_ns, to_ns: window.to_ns, ended: Vec::new() };
    observe_file(path, format, &mut sink)?;
    sink.begin(u64::MAX);
    let is_same = |other: &Run| {
        other.process.pid == run.process.pid && other.process.start_ticks == run.process.start_ticks
    };
    let Some(then) = builder.runs(false).into_iter().find(is_same) else { return Ok(None) };
    let snapshot = builder.ledger().snapshot();
    let key = |process: &ProcessView| process.key.start_ticks == run.process.start_ticks;
    let own = snapshot.processes.iter().filter(|process| key(process));
    let process = own.min_by_key(|process| process.key.pid != run.process.pid);
    let held = |device: &Device| -> Moment {
        let account = process.and_then(|process| {
            let mut accounts = process.accounts.iter().enumerate();
            let name = |device: Option<usize>, at: usize| match device
                .and_then(|device| snapshot.devices.get(device))
            {
                Some(known) => known.name.to_string(),
                None => format!("unnamed-{at}"),
            };
            accounts
                .find(|(at, account)| name(account.device, *at) == device.name)
                .map(|(_, account)| account)
        });
        let last = &device.last;
        let Some(account) = account.filter(|_| then.coverage.covered && last.time_ns != window.to_ns) else {
            return last.clone();
        };
        let away = i128::from(last.time_ns) - i128::from(window.to_ns);
        let is_same = last.tracked_bytes == Some(account.tracked_bytes) && last.torn.is_none();
        let has_gap = last.untrackable_bytes.is_some() && !is_same;
        Moment {
            time_ns: window.to_ns,
            tracked_bytes: Some(account.tracked_bytes),
            amounts: gpumem_ledger::sparse(&account.amounts),
            torn: None,
            gap_distance_ns: if has_gap { i64::try_from(away).unwrap_or(i64::MIN) } else { 0 },
            ..last.clone()
        }
    };
    let mut windowed = match window.part {
        WindowKind::At => run.clone(),
        WindowKind::Since | WindowKind::Between => then.clone(),
    };
    // Because of the window's begin, the builder made a part of a run. The result must not look like one.
    windowed.caveats.retain(|caveat| caveat.code != "part");
    windowed.coverage.part = None;
    windowed.state = run.state;
    for device in &mut windowed.devices {
        let Some(then) = then.devices.iter().find(|then| then.name == device.name) else { continue };
        match window.part {
            // Cells are only appended, so the indices of cells in `then` are valid in the whole run too.
            WindowKind::At => {
                device.peak = held(then);
                device.details.blocks = then.details.blocks.clone();
            }
            WindowKind::Between => device.last = held(then),
            WindowKind::Since => {}
        }
        if window.part != WindowKind::At {
            device.details.blocks.clip(window);
        }
    }
    Ok(Some(windowed))
}
