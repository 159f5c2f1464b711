//! Reads the GPU memory profile of MXNet 2.0 (`gpu_memory_profile-pid_PID.csv`): the allocations that were live when MXNet wrote
//! the file.
//!
//! ```text
//! "Attribute Name","Requested Size","Device","Actual Size","Reuse?"     quoted or not
//! "SCOPE:...:NAME","BYTES","DEVICE","BYTES","0|1"                       one live allocation; many share a name
//! "nvml_amend","BYTES","DEVICE","BYTES","0"                             NVML's number minus all actual sizes
//! ```
//!
//! `Actual Size` is the size that MXNet's pool allocated. All actual sizes plus the amendment (`nvml_amend`) are the bytes that
//! NVML charged to the process. Rows of `image_io` are page-locked host memory, which MXNet counted as device memory. The
//! importer records them as host memory; they still count for the NVML charge. MXNet computes the amendment by unsigned
//! subtraction: if it is negative, the file has 2^64 plus its value.

use super::feed::{Feed, MAX_BYTES, Piece, ProcessFeed};
use super::lines::{fields, first_line, lines};
use gpumem_model::names::Named;
use gpumem_model::run::Cell;
use gpumem_model::units::{plural, thousands};
use gpumem_report::category::OTHERS;
use gpumem_report::rules::Groupings;
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_wire::{MemoryKind, Role};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

pub(super) const PRESET: &str = "mxnet";
const EXAMPLE: &str = "\"in_arg:fc_weight\",\"1000\",\"0\",\"4096\",\"0\"";
/// Components of names that mark host memory.
const HOST_SCOPES: [&str; 1] = ["image_io"];

pub(super) fn looks_like(head: &[u8]) -> bool {
    first_line(head).and_then(fields).is_some_and(|fields| is_header(&fields))
}

fn is_header(fields: &[Cow<'_, str>]) -> bool {
    let has = |name: &str| fields.iter().any(|field| field == name);
    has("Attribute Name") && has("Requested Size") && has("Actual Size")
}

/// One row of the file. The name may contain commas, also in a file without quotes.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    name: String,
    requested: u64,
    device: u8,
    /// Actual size in bytes. Only that of an amendment may be negative.
    actual: i64,
    /// Whether the pool reused the block for another allocation.
    reused: bool,
}

impl Row {
    /// Returns whether the row is the difference between NVML's charge and all other rows.
    fn is_amendment(&self) -> bool {
        self.name == "nvml_amend" || self.name == "nvml:amend"
    }

    fn parse(line: &str) -> Option<Row> {
        let mut fields = fields(line)?;
        let reused = match fields.pop()?.as_ref() {
            "0" => false,
            "1" => true,
            _ => return None,
        };
        let actual: u64 = fields.pop()?.parse().ok()?;
        let device = fields.pop()?.parse().ok()?;
        let requested = fields.pop()?.parse().ok()?;
        let row = Row { name: fields.join(","), requested, device, actual: actual as i64, reused };
        let is_possible = row.actual.unsigned_abs() <= MAX_BYTES
            && (row.is_amendment() || row.actual >= 0 && row.requested <= MAX_BYTES);
        (!fields.is_empty() && is_possible).then_some(row)
    }
}

/// Removes a UUID (8, 4, 4, 4 and 12 hexadecimal digits), which MXNet generates, from the beginning of a name.
fn named(name: &str) -> &str {
    const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
    let mut rest = name;
    for group in GROUPS {
        let digits = rest.get(..group).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        match digits.and(rest.get(group..)).and_then(|rest| rest.strip_prefix(['_', '-'])) {
            Some(after) => rest = after,
            None => return name,
        }
    }
    if rest.is_empty() { name } else { rest }
}

/// Returns the tag path for a name: its components, separated by slashes. Spellings of old versions of MXNet are replaced.
fn path(name: &str) -> String {
    let segments = name.split(':').map(named);
    let segments = segments.enumerate().map(|(index, segment)| match segment {
        "updated" if index == 0 => "updater", // files of 2020 have this spelling
        segment => segment,
    });
    segments.collect::<Vec<_>>().join("/")
}

fn role(path: &str) -> Role {
    let segments: Vec<&str> = path.split('/').collect();
    let has = |name: &str| segments.contains(&name);
    let [first, .., last] = segments.as_slice() else { return Role::Unknown };
    match *first {
        "<unk>" => return Role::Unknown,
        "resource" | "cudnn_rnn" | "<ephemeral>" => return Role::Workspace,
        "image_io" => return Role::Input,
        _ => {}
    }
    let classes = [
        ("in_arg", Role::Parameter),
        ("arg_grad", Role::Gradient),
        ("optimizer_state", Role::OptimizerState),
        ("aux_state", Role::Buffer),
        ("<ephemeral>", Role::Workspace),
    ];
    match classes.iter().find(|(class, _)| has(class)) {
        Some((_, role)) => *role,
        // MXNet names the output of a block's node, and its gradient, after the block.
        None if last.starts_with(first) => Role::Activation,
        None if ["_fwd", "_backward", "_head_grad"].iter().any(|end| last.ends_with(end)) => Role::Activation,
        None => Role::Unknown,
    }
}

#[derive(Debug, Default)]
struct Device {
    /// Sum of the column `Actual Size` (bytes allocated, after rounding) of all rows, including host memory.
    actual: i64,
    /// The same sum for host memory only.
    host: i64,
    /// Value of the row `nvml_amend`; `None` before it was read.
    amendment: Option<i64>,
}

/// Requested and allocated bytes of all allocations with one name.
#[derive(Debug, Default)]
struct Rounding {
    requested: u64,
    actual: u64,
    role: Role,
}

#[derive(Default)]
struct Profile {
    rows: u64,
    reused: u64,
    host_rows: u64,
    devices: BTreeMap<u8, Device>,
    rounding: HashMap<String, Rounding>,
}

/// Maximum number of names in `rounding`; further names share one entry.
const MAX_ROUNDED_NAMES: usize = 1 << 16;

impl Profile {
    fn add(&mut self, process: &mut ProcessFeed, feed: &mut Feed<'_>, row: &Row) {
        let device = self.devices.entry(row.device).or_default();
        if row.is_amendment() {
            device.amendment = Some(row.actual);
            return;
        }
        self.rows += 1;
        self.reused += u64::from(row.reused);
        let path = path(&row.name);
        let role = role(&path);
        let is_host = path.split('/').any(|segment| HOST_SCOPES.contains(&segment));
        device.actual = device.actual.saturating_add(row.actual);
        let tag = process.tag(feed, &path);
        let bytes = row.actual.unsigned_abs();
        let memory = if is_host { MemoryKind::Pinned } else { MemoryKind::Device };
        process.defer(Piece { memory, ..Piece::new(row.device, bytes, tag, role) });
        if is_host {
            device.host = device.host.saturating_add(row.actual);
            self.host_rows += 1;
            return;
        }
        let name = if self.rounding.len() < MAX_ROUNDED_NAMES { path } else { String::new() };
        let rounding = self.rounding.entry(name).or_default();
        rounding.role = role;
        rounding.requested = rounding.requested.saturating_add(row.requested);
        rounding.actual = rounding.actual.saturating_add(bytes);
    }

    /// Emits the NVML reading of each device: the sum of its rows plus the amendment.
    fn readings(&self, process: &mut ProcessFeed, feed: &mut Feed<'_>) {
        process.watermark(feed);
        for (&slot, device) in &self.devices {
            let used = device.amendment.map(|amendment| device.actual.saturating_add(amendment));
            if let Some(used) = used.and_then(|used| u64::try_from(used).ok()) {
                process.device(feed, slot);
                feed.reading(slot, &[(process.key, Ok(used))]);
            }
        }
    }

    fn caveats(&self, feed: &mut Feed<'_>) {
        let text = "the file lists memory that was live when it was written, which may be less than the peak; memory allocated \
                    before recording began, or cached by its pool, has no row and is part of Untrackable";
        feed.caveat("live_set", text);
        let without = self.devices.iter().filter(|(_, device)| device.amendment.is_none());
        let without = without.map(|(slot, _)| slot.to_string()).collect::<Vec<_>>().join(", ");
        let text = format!(
            "no nvml_amend row for device {without}: its writer did not find itself in NVML's list, so used memory is unknown"
        );
        feed.caveats([("no_amendment", !without.is_empty(), text)]);
        self.rounding(feed);
        for (slot, device) in self.devices.iter().filter(|(_, device)| device.host != 0) {
            let amended = device.amendment.map_or(String::new(), |amendment| {
                let (without, with) = (amendment.saturating_add(device.host), thousands(amendment));
                let without = thousands(without);
                format!("; the row nvml_amend (NVML's number minus all sizes) has {with} bytes, without these rows {without}")
            });
            let text = format!(
                "rows of image_io are page-locked host memory that the file counts on device {slot} ({} bytes){amended}",
                thousands(device.host)
            );
            feed.caveat("host_rows", text);
        }
        let (reused, rows) = (thousands(self.reused), plural(self.rows, "row"));
        let text =
            format!("{reused} of {rows} are blocks that the pool reused, under the name of their last user");
        feed.caveats([("reused", self.reused > 0, text)]);
    }

    /// Adds a caveat with the bytes allocated beyond those requested, for each category of memory.
    fn rounding(&self, feed: &mut Feed<'_>) {
        let groupings = Groupings::preset(Some(PRESET));
        let mut by_category: BTreeMap<String, u64> = BTreeMap::new();
        let (mut requested, mut actual) = (0_u64, 0_u64);
        for (path, rounding) in &self.rounding {
            requested = requested.saturating_add(rounding.requested);
            actual = actual.saturating_add(rounding.actual);
            let role = rounding.role.name().map(str::to_owned);
            let cell = Cell { tag: Some(path.clone()), role, ..Cell::default() };
            let category = groupings.structure.category(&cell).unwrap_or(OTHERS).to_owned();
            *by_category.entry(category).or_default() += rounding.actual.saturating_sub(rounding.requested);
        }
        let waste = actual.saturating_sub(requested);
        if waste == 0 {
            return;
        }
        let mut parts: Vec<(String, u64)> = by_category.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
        parts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let parts: Vec<String> =
            parts.iter().map(|(category, bytes)| format!("{category} {}", thousands(*bytes))).collect();
        let share = match requested {
            0 => String::new(),
            _ => format!(", {:.1} % more", waste as f64 * 100.0 / requested as f64),
        };
        let [actual, requested, waste] = [actual, requested, waste].map(thousands);
        let text = format!(
            "rounding: {actual} bytes were allocated for {requested} requested{share}; the difference of {waste} bytes: {}",
            parts.join(", ")
        );
        feed.caveat("rounding", text);
    }
}

/// Returns the pid in the file's name (`...-pid_PID.csv`).
fn pid(input: &Input) -> Option<u32> {
    let name = input.path.file_name()?.to_string_lossy().into_owned();
    let (_, pid) = name.rsplit_once("-pid_")?;
    let end = pid.find(|character: char| !character.is_ascii_digit()).unwrap_or(pid.len());
    pid.get(..end)?.parse().ok()
}

pub(super) fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let (file, pid) = (input.path.clone(), pid(&input));
    let mut feed = Feed::without_clock(sink);
    let mut process = ProcessFeed::default();
    let mut profile = Profile::default();
    // Line at which a second profile begins, which is not read.
    let mut second = None;
    let read = lines(input, &mut feed, |feed, number, line| {
        feed.time_ns = number;
        match line {
            _ if second.is_some() || line.trim().is_empty() => {}
            line => match Row::parse(line) {
                Some(row) => profile.add(&mut process, feed, &row),
                None if fields(line).is_some_and(|fields| is_header(&fields)) => {
                    second = (profile.rows > 0).then_some(number);
                }
                None => feed.reject(number),
            },
        }
    })?;
    if profile.devices.is_empty() {
        let format = "mxnet2-csv";
        return Err(Error::NothingFound { path: file, format, lines: read, example: EXAMPLE });
    }
    if let Some(pid) = pid {
        feed.fact(process.key, "pid", &pid.to_string());
    }
    profile.readings(&mut process, &mut feed);
    profile.caveats(&mut feed);
    feed.caveat_rejects("row", "line", EXAMPLE);
    if let Some(number) = second {
        feed.caveat("second_profile", format!("another profile begins at line {number}: it was not read"));
    }
    process.end(&mut feed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_quoted_or_not() {
        let row =
            |name: &str, reused| Row { name: name.into(), requested: 10, device: 1, actual: 4096, reused };
        assert_eq!(Row::parse("\"a:b\",\"10\",\"1\",\"4096\",\"1\""), Some(row("a:b", true)));
        assert_eq!(Row::parse("a:b (x, y),10,1,4096,0").map(|row| row.name), Some("a:b (x,y)".into()));
        assert_eq!(
            Row::parse("\"nvml:amend\",\"0\",\"0\",\"18446744073709547520\",\"0\"").map(|row| row.actual),
            Some(-4096)
        );
        for bad in [
            "a,10,0,-1,0",
            "a,10,0,4096,2",
            "10,0,4096,0",
            "a,10,256,4096,0",
            "a,10,0,18446744073709547520,0",
            "",
        ] {
            assert_eq!(Row::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn names_lose_what_a_machine_put_before_them() {
        assert_eq!(path("a:0123abcd_0123_0123_0123_0123456789ab_x"), "a/x");
        assert_eq!(path("0123abcd_0123_0123_0123_0123456789a_x"), "0123abcd_0123_0123_0123_0123456789a_x");
        assert_eq!(path("updated:optimizer_state:_zeros"), "updater/optimizer_state/_zeros");
    }
}
