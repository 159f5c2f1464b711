//! Reads CSV of the GPU memory profiler that was proposed for MXNet 1.x (`mxnet_gpu_memory_profiler.csv`).
//!
//! ```text
//! TAG,MIB          one allocation; no header, no quotes, no time; a tag may have commas
//! ```
//!
//! The tag's prefix gives the kind of data (`in_arg:`, `data_entry:`, `workspace:FILE+LINE:...`). The file contains no frees. The
//! profiler writes the stacks of untagged allocations to another file, which is not read.

use super::feed::{Feed, MAX_BYTES, MIB, Piece, ProcessFeed};
use super::lines::{first_line, lines};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_wire::Role;

const FORMAT: &str = "mxnet1-csv";
const EXAMPLE: &str = "in_arg:fc_weight,3.814697";
/// Number of lines that are checked to recognise the format.
const HEAD_LINES: usize = 8;

const PREFIXES: [(&str, Role); 9] = [
    ("in_arg:", Role::Parameter),
    ("arg_grad:", Role::Gradient),
    ("optimizer_state:", Role::OptimizerState),
    ("aux_state:", Role::Buffer),
    ("data_entry:", Role::Activation),
    ("head_grad:", Role::Activation),
    ("workspace:", Role::Workspace),
    ("unknown:", Role::Unknown),
    ("unknown_", Role::Unknown),
];

/// Returns whether most of the first lines are a tag and a number of MiB, and at least one tag has a known prefix.
pub(super) fn looks_like(head: &[u8]) -> bool {
    if first_line(head).is_none() {
        return false;
    }
    let is_whole = head.len() < gpumem_runs::input::HEAD_BYTES;
    let mut lines: Vec<&[u8]> = head.split(|&byte| byte == b'\n').take(HEAD_LINES + 1).collect();
    if lines.len() > HEAD_LINES || !is_whole {
        lines.pop(); // the last line may be incomplete
    }
    let lines: Vec<&[u8]> = lines.into_iter().filter(|line| !line.trim_ascii().is_empty()).collect();
    let rows: Vec<_> = lines.iter().filter_map(|line| row(std::str::from_utf8(line).ok()?)).collect();
    let is_known = |(tag, _): &(&str, u64)| PREFIXES.iter().any(|(prefix, _)| tag.starts_with(prefix));
    rows.iter().any(is_known) && rows.len() * 2 > lines.len()
}

/// Parses a line as a tag and its bytes.
fn row(line: &str) -> Option<(&str, u64)> {
    let (tag, mib) = line.trim().rsplit_once(',')?;
    let mib: f64 = mib.trim().parse().ok()?;
    let bytes = (mib * MIB as f64).round();
    (!tag.is_empty() && (0.0..=MAX_BYTES as f64).contains(&bytes)).then_some((tag, bytes as u64))
}

fn role(tag: &str) -> Role {
    match PREFIXES.iter().find(|(prefix, _)| tag.starts_with(prefix)) {
        Some((_, role)) => *role,
        None if tag.ends_with(":dropout_state") => Role::Workspace,
        None => Role::Unknown,
    }
}

pub(super) fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let mut feed = Feed::without_clock(sink);
    let mut process = ProcessFeed::default();
    let mut rows = 0_u64;
    let read = lines(input, &mut feed, |feed, number, line| {
        feed.time_ns = number;
        match row(line) {
            _ if line.trim().is_empty() => {}
            Some((tag, bytes)) => {
                rows += 1;
                let role = role(tag);
                let tag = process.tag(feed, &tag.replace(':', "/"));
                process.allocate(feed, Piece { estimated: true, ..Piece::new(0, bytes, tag, role) });
            }
            None => feed.reject(number),
        }
    })?;
    if rows == 0 {
        return Err(Error::NothingFound { path, format: FORMAT, lines: read, example: EXAMPLE });
    }
    feed.caveat(
        "no_frees",
        "the file has allocations without frees and without their GPU: tracked only grows; it has no clock: times are line \
         numbers",
    );
    feed.caveat("estimated", "amounts are MiB with some decimals: bytes are rounded");
    feed.caveat_rejects("row", "line", EXAMPLE);
    process.end(&mut feed);
    Ok(())
}
