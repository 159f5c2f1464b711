//! What the poller is told at its start.

use super::super::library::parse_uuid;
use super::super::session::Totals;
use crate::config::NvmlSettings;
use gpumem_ledger::DeviceName;
use std::ffi::{OsStr, OsString};
use std::time::Duration;

/// What the child is told at its start, as arguments.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Arguments {
    /// How to read.
    pub settings: NvmlSettings,
    /// Descriptor of the beacon.
    pub beacon: Option<i32>,
    /// Devices to be left alone, and for how many seconds.
    pub skip: Vec<(DeviceName, u64)>,
    /// Devices whose lists are to be left alone.
    pub skip_lists: Vec<(DeviceName, u64)>,
    /// NVML indices not to be touched at all, and for how many seconds.
    pub skip_index: Vec<(u16, u64)>,
    /// Closed for so many seconds at first.
    pub released_s: u64,
    /// Events are not asked for: a call for them did not return.
    pub no_events: bool,
    /// What the same process, executing itself anew, has counted before, and how long it waits after a failure.
    pub totals: Totals,
    pub wait_ms: u64,
    /// Only see whether this one answers, then end.
    pub probe: Option<Target>,
}

/// What is looked at to see whether it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// A device.
    Name(DeviceName),
    /// Whatever is at this NVML index.
    Index(u16),
}

impl Arguments {
    /// As they are handed to the child, `nvml-poller` first.
    pub(crate) fn to_args(&self) -> Vec<OsString> {
        let settings = &self.settings;
        let mut args: Vec<OsString> = vec!["nvml-poller".into()];
        let mut add = |name: &str, value: &OsStr| args.extend([name.into(), value.to_owned()]);
        if let Some(library) = &settings.library {
            add("--library", library.as_os_str());
        }
        let numbers = [
            ("--memory-hz", settings.memory_hz.to_string()),
            ("--list-interval-ms", settings.list_interval.as_millis().to_string()),
            ("--list-budget", settings.list_budget.to_string()),
            ("--list-threshold", settings.list_threshold_bytes.to_string()),
            ("--extra-interval-ms", settings.extra_interval.as_millis().to_string()),
            ("--trust-pids", u8::from(settings.trust_pids).to_string()),
            ("--released", self.released_s.to_string()),
        ];
        for (name, value) in &numbers {
            add(name, value.as_ref());
        }
        if self.no_events {
            add("--no-events", "1".as_ref());
        }
        if self.totals != Totals::default() {
            add("--totals", self.totals.values().map(|value| value.to_string()).join(",").as_ref());
        }
        if self.wait_ms != 0 {
            add("--wait-ms", self.wait_ms.to_string().as_ref());
        }
        for (name, seconds) in &self.skip {
            add("--skip", format!("{name}={seconds}").as_ref());
        }
        for (name, seconds) in &self.skip_lists {
            add("--skip-lists", format!("{name}={seconds}").as_ref());
        }
        match self.probe {
            Some(Target::Name(name)) => add("--probe", name.to_string().as_ref()),
            Some(Target::Index(index)) => add("--probe-index", index.to_string().as_ref()),
            None => {}
        }
        for (index, seconds) in &self.skip_index {
            add("--skip-index", format!("{index}={seconds}").as_ref());
        }
        if let Some(beacon) = self.beacon {
            add("--beacon", beacon.to_string().as_ref());
        }
        args
    }

    /// Reads what [`Arguments::to_args`] wrote, without the first word. `None`: not understood.
    pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Option<Arguments> {
        let mut parsed = Arguments::default();
        let mut args = args.into_iter();
        while let Some(name) = args.next() {
            let value = args.next()?;
            if name == "--library" {
                parsed.settings.library = Some(value.into());
                continue;
            }
            let value = value.to_str()?;
            let milliseconds = || value.parse().ok().map(Duration::from_millis);
            let settings = &mut parsed.settings;
            match name.to_str()? {
                "--memory-hz" => settings.memory_hz = value.parse().ok()?,
                "--list-interval-ms" => settings.list_interval = milliseconds()?,
                "--list-budget" => settings.list_budget = value.parse().ok()?,
                "--list-threshold" => settings.list_threshold_bytes = value.parse().ok()?,
                "--extra-interval-ms" => settings.extra_interval = milliseconds()?,
                "--trust-pids" => settings.trust_pids = value == "1",
                "--released" => parsed.released_s = value.parse().ok()?,
                "--no-events" => parsed.no_events = value == "1",
                "--totals" => {
                    for (place, value) in value.split(',').enumerate() {
                        *parsed.totals.place(place as u32 + 1)? = value.parse().ok()?;
                    }
                }
                "--wait-ms" => parsed.wait_ms = value.parse().ok()?,
                "--beacon" => parsed.beacon = Some(value.parse().ok()?),
                "--skip" => {
                    let (name, seconds) = value.split_once('=')?;
                    parsed.skip.push((parse_uuid(name)?, seconds.parse().ok()?));
                }
                "--skip-lists" => {
                    let (name, seconds) = value.split_once('=')?;
                    parsed.skip_lists.push((parse_uuid(name)?, seconds.parse().ok()?));
                }
                "--probe" => parsed.probe = Some(Target::Name(parse_uuid(value)?)),
                "--probe-index" => parsed.probe = Some(Target::Index(value.parse().ok()?)),
                "--skip-index" => {
                    let (index, seconds) = value.split_once('=')?;
                    parsed.skip_index.push((index.parse().ok()?, seconds.parse().ok()?));
                }
                _ => return None,
            }
        }
        Some(parsed)
    }
}
