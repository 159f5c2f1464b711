//! Splits a run into small parts, of which few change from one checkpoint to the next. The delta log stores the changed parts.
//!
//! ```text
//! part         device   seq       bytes
//! run          -        0         JSON of Run without the lists below
//! cells        -        0, 1, ... 64 each, JSON
//! device       device   0         JSON of Device without the lists below
//! last, peak   device   cell / 32 amounts, one part for each 32 cells, packed
//! series       device   0, 1, ... 64 buckets each, packed
//! rest ... ooms     device        as in table `detail`, but growth is whole
//! rest ... spans    -1            as in table `own`
//! ```
//!
//! A cell is one kind of memory of a run (one tag, role, phase, ...). An amount is the bytes of one cell at one time. `packed`
//! describes the packed form.
//!
//! Later versions only add fields, so they can read the parts that an earlier version wrote.

use super::details::{self, NAMES, Rows, Stored};
use super::packed;
use super::tables::{damaged, json};
use gpumem_model::growth::Growth;
use gpumem_model::run::{Amounts, Device, Moment, ProgramData, Run};
use gpumem_model::series::Series;
use gpumem_model::timeline::Point;
use rusqlite::Result;
use rusqlite::types::Value;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::hash::BuildHasher;

/// Number of cells or buckets in a part.
const CHUNK: usize = 64;
/// Number of cells whose amounts are in one part of a moment.
const CELLS: u32 = 32;
/// In place of a device's number: the part is program data.
const OWN: i64 = -1;

/// Identifies a part: index of its name in [`NAMES`], number of the device, and `seq`, the number among parts of this name.
pub(super) type Key = (u8, i64, i64);
pub(super) type Parts = BTreeMap<Key, Vec<u8>>;

fn key(name: &str, device: i64, seq: i64) -> Key {
    let at = NAMES.iter().position(|known| *known == name);
    (at.unwrap_or(NAMES.len()) as u8, device, seq)
}

pub(super) fn parts(run: &Run) -> Result<Parts> {
    let mut parts = Parts::new();
    let head = Run {
        source: run.source.clone(),
        clock: run.clock,
        process: run.process.clone(),
        state: run.state,
        coverage: run.coverage.clone(),
        caveats: run.caveats.clone(),
        cells: Vec::new(),
        devices: Vec::new(),
        own: ProgramData::default(),
    };
    parts.insert(key("run", 0, 0), json(&head)?.into());
    for (seq, cells) in (0..).zip(run.cells.chunks(CHUNK)) {
        parts.insert(key("cells", 0, seq), json(&cells)?.into());
    }
    for (at, device) in (0..).zip(&run.devices) {
        put_device(&mut parts, at, device)?;
    }
    put_rows(&mut parts, OWN, details::own_rows(&run.own)?);
    Ok(parts)
}

fn put_device(parts: &mut Parts, at: i64, device: &Device) -> Result<()> {
    let without_amounts = |moment: &Moment| Moment { amounts: Amounts::default(), ..moment.clone() };
    let head = Device {
        name: device.name.clone(),
        ordinal: device.ordinal,
        model: device.model.clone(),
        total_bytes: device.total_bytes,
        last: without_amounts(&device.last),
        peak: without_amounts(&device.peak),
        peak_used: device.peak_used,
        beside: device.beside,
        reading: device.reading,
        unaccounted_bytes: device.unaccounted_bytes,
        tenants: device.tenants.clone(),
        other_tenants: device.other_tenants,
        series: Series { width_ns: device.series.width_ns, buckets: Vec::new() },
        details: Default::default(),
    };
    parts.insert(key("device", at, 0), json(&head)?.into());
    for (name, moment) in [("last", &device.last), ("peak", &device.peak)] {
        for amounts in moment.amounts.chunk_by(|(one, _), (other, _)| one / CELLS == other / CELLS) {
            let seq = amounts.first().map_or(0, |(cell, _)| cell / CELLS);
            let point = Point { amounts: amounts.to_vec().into(), ..Point::default() };
            parts.insert(key(name, at, seq.into()), packed::pack_points(&[point]));
        }
    }
    for (seq, buckets) in (0..).zip(device.series.buckets.chunks(CHUNK)) {
        parts.insert(key("series", at, seq), packed::pack_buckets(buckets));
    }
    let mut rows = details::rows(&device.details)?;
    // The columns are not packed, because then a new point would change all bytes. In JSON it changes few bytes of each column.
    rows.remove(&("columns", 0));
    if device.details.growth != Growth::default() {
        rows.insert(("growth", 0), Value::Text(json(&device.details.growth)?));
    }
    put_rows(parts, at, rows);
    Ok(())
}

fn put_rows(parts: &mut Parts, device: i64, rows: Rows) {
    parts.extend(rows.into_iter().filter_map(|((name, seq), body)| match body {
        Value::Text(text) => Some((key(name, device, seq), text.into_bytes())),
        Value::Blob(bytes) => Some((key(name, device, seq), bytes)),
        _ => None,
    }));
}

pub(super) fn run(parts: &Parts) -> Result<Run> {
    let bad = || damaged("a part of a run cannot be read".into());
    let mut run: Run = from_json(parts.get(&key("run", 0, 0)).ok_or_else(bad)?)?;
    let (mut own, mut stored) = (Stored::new("the run itself"), Vec::<Stored>::new());
    for (&(name, at, _), bytes) in parts {
        let name = *NAMES.get(usize::from(name)).ok_or_else(bad)?;
        let rows = if at == OWN { Some(&mut own) } else { stored.get_mut(at as usize) };
        let device = run.devices.get_mut(at as usize);
        match (name, device, rows) {
            ("run", ..) => {}
            ("cells", ..) => run.cells.extend(from_json::<Vec<_>>(bytes)?),
            ("device", ..) => {
                run.devices.push(from_json(bytes)?);
                stored.push(Stored::new("a device"));
            }
            ("last" | "peak", Some(device), _) => {
                let moment = if name == "last" { &mut device.last } else { &mut device.peak };
                let points = packed::unpack_points(bytes).ok_or_else(bad)?;
                moment.amounts.extend(points.iter().flat_map(|point| point.amounts.iter().copied()));
            }
            ("series", Some(device), _) => {
                device.series.buckets.extend(packed::unpack_buckets(bytes).ok_or_else(bad)?);
            }
            ("timeline", _, Some(rows)) => rows.push(name, Value::Blob(bytes.clone())),
            (_, _, Some(rows)) => {
                rows.push(name, Value::Text(String::from_utf8(bytes.clone()).map_err(|_| bad())?));
            }
            _ => return Err(bad()),
        }
    }
    run.own = own.own()?;
    for (device, stored) in run.devices.iter_mut().zip(stored) {
        device.details = stored.details()?;
    }
    let known = run.cells.len() as u32;
    let amounts = run.devices.iter().flat_map(|device| {
        let points = device.details.timeline.points.iter().map(|point| &point.amounts);
        points.chain([&device.last.amounts, &device.peak.amounts]).flatten()
    });
    if amounts.into_iter().any(|(cell, _)| *cell >= known) {
        return Err(bad());
    }
    Ok(run)
}

/// Returns a hash of the fields by which queries select runs. If it changes, a checkpoint writes the run to the database.
pub(super) fn identity(run: &Run) -> Result<u64> {
    let devices: Vec<_> =
        run.devices.iter().map(|device| (&device.name, device.ordinal, &device.details.ooms)).collect();
    let identity = json(&(&run.source, &run.clock, &run.process, &run.state, devices))?;
    Ok(hash(identity.as_bytes()))
}

/// Newer figures of a run for lists, if the delta log has them.
#[derive(Debug, Default)]
pub(super) struct Figures {
    pub events: Option<u64>,
    pub last_ns: Option<u64>,
    pub peak_tracked_bytes: Option<i64>,
    pub peak_used_bytes: Option<i64>,
}

pub(super) fn figures(parts: &Parts) -> Result<Figures> {
    let mut figures = Figures::default();
    for (&(name, ..), bytes) in parts.iter().filter(|(_, bytes)| !bytes.is_empty()) {
        match NAMES.get(usize::from(name)) {
            Some(&"run") => figures.events = Some(from_json::<Run>(bytes)?.coverage.events),
            Some(&"device") => {
                let device: Device = from_json(bytes)?;
                let last_ns = device.last.time_ns.max(device.peak.time_ns);
                let used = device.peak_used.and_then(|(used, _)| i64::try_from(used).ok());
                figures.last_ns = figures.last_ns.max(Some(last_ns));
                figures.peak_tracked_bytes = figures.peak_tracked_bytes.max(device.peak.tracked_bytes);
                figures.peak_used_bytes = figures.peak_used_bytes.max(used);
            }
            _ => {}
        }
    }
    Ok(figures)
}

fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| damaged(format!("a part of a run: {error}")))
}

/// Returns a hash, which is only valid within this process.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    foldhash::quality::FixedState::default().hash_one(bytes)
}
