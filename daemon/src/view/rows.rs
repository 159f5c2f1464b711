//! Makes the rows of devices and their processes that `ps` and the page show.

use crate::aggregator::Published;
use crate::config::Tenants;
use crate::run_writer::LiveFindings;
use crate::view::{Health, Viewer};
use gpumem_ledger::{AccountView, ClosedSample, DeviceView, ProcessView};
use gpumem_model::control::{ClaimRow, DeviceRow, ProcessFinding, ProcessRow};
use gpumem_model::owner::Owner;
use gpumem_model::run::absence_name;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Rows of devices and processes, each with the data from which it was made.
pub(super) struct Rows<'a> {
    /// Devices in NVML's order; devices that only agents report come last.
    pub devices: Vec<(DeviceRow, &'a DeviceView)>,
    /// Processes on devices, ordered by device; on each device the process with the most bytes is first.
    pub processes: Vec<(ProcessRow, &'a ProcessView, &'a AccountView)>,
    /// Processes that report memory on devices that this machine does not have.
    pub claims: Vec<ClaimRow>,
}

impl Rows<'_> {
    /// Returns the findings on the processes that have an agent and whose memory is shown, the most important first. With `names`,
    /// the texts have tags and names of processes.
    pub(super) fn findings(&self, live: &LiveFindings, names: bool) -> Vec<ProcessFinding> {
        let mut found = Vec::new();
        for (at, (row, process, _)) in self.processes.iter().enumerate() {
            let Some(findings) = live.of(process.key).filter(|_| row.tracked_bytes.is_some()) else {
                continue;
            };
            let is_first = || self.processes[..at].iter().all(|(_, other, _)| other.key != process.key);
            let uuid = self.devices.get(row.device).map(|(device, _)| device.uuid.as_str());
            for (of, finding) in findings.iter() {
                let (device, is_shown) = match of {
                    Some(of) => (Some(row.device), Some(of.as_str()) == uuid),
                    None => (None, is_first()),
                };
                if is_shown {
                    let shown = ProcessFinding {
                        pid: row.pid,
                        start_ticks: process.key.start_ticks,
                        device,
                        kind: finding.kind.name(),
                        severity: finding.severity.name(),
                        bytes: finding.bytes,
                        share: finding.share,
                        confidence: finding.confidence,
                        full_in_s: finding.full_in_s,
                        text: if names { finding.sentence() } else { finding.anonymous_sentence() },
                    };
                    found.push((finding.severity, shown));
                }
            }
        }
        found.sort_by_key(|(severity, shown)| (*severity, Reverse(shown.bytes)));
        found.into_iter().map(|(_, shown)| shown).collect()
    }
}

pub(super) struct RowMaker<'a> {
    pub published: &'a Published,
    pub health: &'a Health,
    pub viewer: Viewer,
    pub tenants: Tenants,
}

impl<'a> RowMaker<'a> {
    pub(super) fn rows(&self) -> Rows<'a> {
        let snapshot = &self.published.snapshot;
        let nvml_index = |at: usize| {
            self.health.nvml.devices.iter().position(|device| device.name == snapshot.devices[at].name)
        };
        // A device that only agents report is shown only while a process reports memory on it, because a forged agent could
        // report any number of devices.
        let living = || snapshot.running();
        let held = living().flat_map(|process| &process.accounts).filter(|account| holds(account));
        let held: BTreeSet<usize> = held.filter_map(|account| account.device).collect();
        let is_shown = |at: &usize| nvml_index(*at).is_some() || held.contains(at) && self.may_exist(*at);
        let mut order: Vec<usize> = (0..snapshot.devices.len()).filter(is_shown).collect();
        order.sort_by_key(|&at| (nvml_index(at).unwrap_or(usize::MAX), at));
        let devices = order.iter().map(|&at| &snapshot.devices[at]);
        let devices = devices.map(|view| (self.device(view), view)).collect();
        let mut processes = Vec::new();
        let mut claims = Vec::new();
        for process in living() {
            claims.extend(self.claim(process));
            for account in &process.accounts {
                let device = account.device.and_then(|device| order.iter().position(|&at| at == device));
                let row = device.and_then(|device| self.process(process, account, device));
                processes.extend(row.map(|row| (row, process, account)));
            }
        }
        let size =
            |row: &ProcessRow| row.used_bytes.or(row.tracked_bytes.and_then(|bytes| bytes.try_into().ok()));
        processes.sort_by_key(|(row, ..)| (row.device, Reverse(size(row)), row.pid));
        claims.sort_by_key(|claim| claim.pid);
        Rows { devices, processes, claims }
    }

    /// Returns a row if the process reports memory on devices that this machine does not have.
    fn claim(&self, process: &ProcessView) -> Option<ClaimRow> {
        let is_claimed = |account: &&AccountView| {
            let device = account.device.filter(|device| *device < self.published.snapshot.devices.len());
            holds(account) && device.is_some_and(|device| !self.may_exist(device))
        };
        let claimed: Vec<&AccountView> = process.accounts.iter().filter(is_claimed).collect();
        let first = *claimed.first()?;
        let row = self.process(process, first, 0)?;
        let tracked = claimed.iter().fold(0_i64, |sum, account| sum.saturating_add(account.tracked_bytes));
        Some(ClaimRow {
            pid: row.pid,
            uid: row.uid,
            user: row.user,
            devices: claimed.len(),
            tracked_bytes: row.tracked_bytes.map(|_| tracked),
            command: row.command,
        })
    }

    fn may_exist(&self, device: usize) -> bool {
        self.health.nvml.may_have(self.published.snapshot.devices[device].name)
    }

    fn device(&self, device: &DeviceView) -> DeviceRow {
        let known = self.health.nvml.device(device.name);
        let reading = device.latest;
        let why = known.and_then(|known| known.problem.clone());
        let load = |name| known.filter(|known| known.problem.is_none())?.facts.get(name)?.parse().ok();
        DeviceRow {
            index: known.map_or(device.ordinal, |known| known.index).into(),
            uuid: device.name.to_string(),
            model: device.model.clone(),
            total_bytes: device.total_bytes,
            unified: reading.is_some_and(|reading| reading.unified),
            used_bytes: reading.map(|reading| reading.used_bytes),
            free_bytes: reading.map(|reading| reading.free_bytes),
            system_bytes: reading.and_then(|reading| reading.system_reserved_bytes),
            unaccounted_bytes: device.agreed.map(|agreed| agreed.unaccounted_bytes),
            utilization_percent: load("utilization"),
            power_w: load("power"),
            age_ms: reading
                .map(|reading| self.published.now_ns().saturating_sub(reading.time_ns) / 1_000_000),
            why: why.or_else(|| self.health.nvml.problem().map(str::to_owned)),
        }
    }

    /// Returns the row of a process on a device; `None` if the process neither is listed there nor has tracked memory there.
    fn process(&self, process: &ProcessView, account: &AccountView, device: usize) -> Option<ProcessRow> {
        let facts = &process.facts;
        let coverage = &process.coverage;
        let own = self.viewer.sees(facts.uid);
        let named = own || self.tenants == Tenants::Named;
        let newest = account.latest.as_ref();
        let held = coverage.covered && holds(account);
        if !held && newest.is_some_and(|sample| sample.used_bytes == Err(gpumem_wire::Absence::NotListed)) {
            return None;
        }
        let consistent = ConsistentSample::of(account);
        let sample = consistent.sample;
        let idle = |amounts: &[i64]| {
            let cells = process.cells.iter().zip(amounts);
            cells.filter(|(cell, _)| cell.is_idle()).map(|(_, bytes)| *bytes).fold(0, i64::wrapping_add)
        };
        let tracked = (coverage.covered && own).then_some(consistent.tracked);
        let mut who = Owner::of(&facts.seen, &facts.claims, facts.uid).map();
        who.retain(|name, _| own || (named && name == "user"));
        let rank = who.get("rank").map(|rank| format!(" rank {rank}")).unwrap_or_default();
        let command = facts.seen.get("command").or(facts.seen.get("comm"));
        Some(ProcessRow {
            pid: if named { process.key.pid } else { 0 },
            device,
            start_ticks: own.then_some(process.key.start_ticks),
            uid: facts.uid.filter(|_| named),
            user: facts.seen.get("user").filter(|_| named).cloned(),
            flags: flags(process, account).into_iter().map(str::to_owned).collect(),
            used_bytes: consistent.used_bytes(),
            protected_bytes: account.protected_bytes.filter(|_| consistent.used_bytes().is_some()),
            tracked_bytes: tracked.map(|(tracked, _)| tracked),
            idle_bytes: tracked.map(|(_, amounts)| idle(amounts)),
            untrackable_bytes: sample.filter(|_| own).and_then(|sample| sample.untrackable_bytes()),
            age_ms: sample.map(|sample| {
                let read_ns = self.published.snapshot.read_ns(process, account, sample);
                self.published.now_ns().saturating_sub(read_ns) / 1_000_000
            }),
            why: consistent.absence.map(str::to_owned),
            command: command.filter(|_| own).map(|command| format!("{command}{rank}")),
            who,
        })
    }
}

/// Returns whether the process has tracked memory on the account's device, or had some.
fn holds(account: &AccountView) -> bool {
    account.tracked_bytes != 0 || account.peak.tracked_bytes != 0
}

/// Numbers of a process on a device that belong to the same time.
pub(super) struct ConsistentSample<'a> {
    /// Newest complete sample; `None` if a newer reading failed, or there was no sample.
    pub sample: Option<&'a ClosedSample>,
    pub absence: Option<&'static str>,
    /// Tracked bytes in total and of each cell (one tag, role and pool): at the sample if they were known then, else now.
    pub tracked: (i64, &'a [i64]),
}

impl<'a> ConsistentSample<'a> {
    /// Returns the numbers that all views show.
    pub(super) fn of(account: &'a AccountView) -> Self {
        let newest = account.latest.as_deref();
        let failed =
            newest.and_then(|sample| Some(absence_name(sample.used_bytes.err()?, sample.list_failed)));
        // If the newest reading failed, used bytes are unknown now, so an older sample is not shown.
        let sample = account.complete.as_deref().filter(|_| failed.is_none());
        let at_sample = sample.and_then(|sample| Some((sample.tracked_bytes?, &*sample.amounts)));
        ConsistentSample {
            sample,
            absence: failed.or(newest.is_none().then_some("never sampled")),
            tracked: at_sample.unwrap_or((account.tracked_bytes, &account.amounts)),
        }
    }

    pub(super) fn used_bytes(&self) -> Option<u64> {
        self.sample?.used_bytes.ok()
    }
}

/// Returns the conditions that apply to the numbers of a process, such as `partial`.
pub(super) fn flags(process: &ProcessView, account: &AccountView) -> Vec<&'static str> {
    let coverage = &process.coverage;
    let mut flags = vec![if coverage.covered { "covered" } else { "uncovered" }];
    let stale = account.latest.as_ref().is_some_and(|sample| sample.stale);
    for (holds, flag) in [
        (coverage.late, "late"),
        (coverage.blocked.is_some(), "blocked"),
        (coverage.paused, "paused"),
        (coverage.is_partial(), "partial"),
        (coverage.earlier.is_some(), "restarted"),
        (stale, "stale"),
    ] {
        if holds {
            flags.push(flag);
        }
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvml_status::{DeviceStatus, NvmlStatus};
    use crate::view::{ViewSettings, Viewer, page, prometheus};
    use gpumem_ledger::{Ledger, Origin, ProcessKey};
    use gpumem_wire::{Absence, Body, DeviceIdKind, MemoryKind, Reading, Record, Stamp};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    const MIB: u64 = 1 << 20;
    const KEY: ProcessKey = ProcessKey { pid: 7, start_ticks: 9 };

    /// A process that tracked 3 MiB when 10 MiB of the device were used, and tracks 4 MiB now.
    fn ledger() -> Ledger {
        let mut ledger = Ledger::new();
        let device = Body::Device {
            uuid_high: 1,
            uuid_low: 0,
            total_bytes: Reading::of(100 * MIB),
            ordinal: 0,
            id: DeviceIdKind::Gpu,
            name: "GPU",
        };
        let at = |time_ns| Stamp { time_ns, thread: KEY.pid, ..Stamp::default() };
        let mut say = |origin, stamp, body| ledger.observe(origin, &Record { stamp, body });
        let agent = Origin::Process(KEY);
        say(Origin::Host, at(1), device);
        let uid = Reading::of(1000);
        let facts = Body::ProcessFacts { start_ticks: 9, uid, parent_pid: 1, facts: "comm=python" };
        say(Origin::Host, at(1), facts);
        let hello =
            Body::Hello { start_ticks: 9, versions: 1 << 16, capabilities: 0, instance: 1, claims: "" };
        say(agent, at(2), hello);
        say(agent, at(2), device);
        let alloc = |address: u64, mib: u64| {
            let memory = MemoryKind::Device;
            Body::AllocEnd { address: address << 32, bytes: mib * MIB, pool: 0, took_us: 1, memory }
        };
        say(agent, Stamp { seq: 1, ..at(3) }, alloc(1, 3));
        say(agent, at(20), Body::Watermark { last_seq: 1, in_flight_since_ns: 0 });
        let memory = Body::DeviceSample {
            used_bytes: 12 * MIB,
            free_bytes: 88 * MIB,
            reserved_bytes: Reading::ABSENT,
            unified: false,
        };
        let used_bytes = Reading::of(10 * MIB);
        let (start_ticks, absence) = (9, Absence::default());
        for (time_ns, body) in [
            (10, Body::SampleBegin { number: 1 }),
            (10, memory),
            (10, Body::ProcessSample { start_ticks, used_bytes, absence, lists: 1 }),
            (11, memory),
            (11, Body::SampleEnd { number: 1, result: 0 }),
        ] {
            say(Origin::Host, at(time_ns), body);
        }
        say(agent, Stamp { seq: 2, ..at(30) }, alloc(2, 1));
        say(agent, at(40), Body::Watermark { last_seq: 2, in_flight_since_ns: 0 });
        ledger
    }

    /// Returns the values of a process in `ps`, page and metrics, depending on its newest sample, its agent and the process list.
    fn shown(failed: bool, stale: bool, covered: bool, listed: bool) -> [String; 3] {
        let mut snapshot = ledger().snapshot();
        let process = Arc::make_mut(&mut Arc::make_mut(&mut snapshot.processes)[0]);
        Arc::make_mut(&mut process.coverage).covered = covered;
        let account = &mut process.accounts[0];
        assert!(account.complete.is_some() && account.complete == account.latest, "{account:?}");
        let latest = Arc::make_mut(account.latest.as_mut().expect("a sample"));
        latest.stale = stale;
        latest.list_failed = failed && listed;
        if failed || !listed {
            latest.used_bytes = Err(if listed { Absence::Unknown } else { Absence::NotListed });
        }
        let published = Published {
            at_ns: 0,
            made: Instant::now(),
            snapshot,
            totals: Default::default(),
            remembered_bytes: 0,
        };
        let name = published.snapshot.devices[0].name;
        let nvml =
            NvmlStatus { up: true, devices: vec![DeviceStatus::new(name, 0, 0)], ..NvmlStatus::default() };
        let health = Health { nvml, ..Health::default() };
        let shown = ViewSettings { young: Duration::ZERO, ..ViewSettings::default() };
        let viewer = Viewer { uid: 1000, all: false };
        let rows =
            RowMaker { published: &published, health: &health, viewer, tenants: Tenants::Named }.rows();
        let mib = |bytes: i64| bytes / MIB as i64;
        let ps = rows.processes.iter().map(|(row, ..)| {
            format!(
                "used {:?} tracked {:?} idle {:?} untrackable {:?} aged {} why {:?} {:?}",
                row.used_bytes.map(|bytes| bytes / MIB),
                row.tracked_bytes.map(mib),
                row.idle_bytes.map(mib),
                row.untrackable_bytes.map(mib),
                row.age_ms.is_some(),
                row.why,
                row.flags
            )
        });
        let json = page::of_processes(&published, &health, &shown);
        let page = json["processes"].as_array().expect("rows").iter().map(|row| {
            let mib = |key: &str| row[key].as_i64().map(mib);
            format!(
                "used {:?} predates {:?} tracked {:?} untrackable {:?} time {} why {} {}",
                mib("used_bytes"),
                mib("predates_bytes"),
                mib("tracked_bytes"),
                mib("untrackable_bytes"),
                row["time_ns"],
                row["used_absence"],
                row["structures"].as_array().map_or(0, Vec::len)
            )
        });
        let text = prometheus::of_processes(&published, &health, &shown);
        let metrics = text.lines().filter_map(|line| {
            let (series, value) = line.strip_prefix("gpumem_process_")?.rsplit_once(' ')?;
            let (name, labels) = series.split_once('{')?;
            let label = |label: &str| Some(labels.split_once(label)?.1.split('"').next()?.to_owned());
            match name {
                "used_bytes" | "predates_bytes" | "tracked_bytes" | "untrackable_bytes" => {
                    Some(format!("{} {}", name.trim_end_matches("_bytes"), mib(value.parse().ok()?)))
                }
                "used_unavailable" => label("reason=\""),
                "sample_age_seconds" => Some("aged".to_owned()),
                "category_bytes" => Some(format!("{} {}", label("category=\"")?, mib(value.parse().ok()?))),
                _ => None,
            }
        });
        [
            ps.collect::<Vec<_>>().join("; "),
            page.collect::<Vec<_>>().join("; "),
            metrics.collect::<Vec<_>>().join(", "),
        ]
        .map(|text| if text.is_empty() { "-".to_owned() } else { text })
    }

    #[test]
    fn views_choose_the_same_sample() {
        let mut text = String::new();
        for case in 0..16 {
            let [failed, stale, covered, listed] = [8, 4, 2, 1].map(|bit| case & bit != 0);
            let [ps, page, metrics] = shown(failed, stale, covered, listed);
            let words = [(failed, "failed"), (stale, "stale"), (covered, "covered"), (listed, "listed")];
            let mut words: Vec<&str> = words.iter().filter(|(is, _)| *is).map(|(_, word)| *word).collect();
            if words.is_empty() {
                words.push("none of these");
            }
            text += &format!("{}:\n  ps      {ps}\n  page    {page}\n  metrics {metrics}\n", words.join(" "));
        }
        assert_eq!(text, TABLE);
    }

    /// A program may name any device, and each user may start some: 400 agents name 31 devices each.
    #[test]
    fn devices_that_only_agents_name_are_one_count_in_every_view() {
        const AGENTS: usize = 400;
        const INVENTED: usize = 31;
        let mut ledger = ledger();
        let known = ledger.snapshot().devices[0].name;
        for pid in (1..=AGENTS).map(|agent| 1000 + agent as u32) {
            let at = Stamp { time_ns: 30, thread: pid, ..Stamp::default() };
            let agent = Origin::Process(ProcessKey { pid, start_ticks: 9 });
            let mut say = |stamp, body| ledger.observe(agent, &Record { stamp, body });
            let hello =
                Body::Hello { start_ticks: 9, versions: 1 << 16, capabilities: 0, instance: 1, claims: "" };
            say(at, hello);
            for slot in 0..INVENTED as u8 {
                let at = Stamp { device: slot, ..at };
                let device = Body::Device {
                    uuid_high: 1000,
                    uuid_low: slot.into(),
                    total_bytes: Reading::of(100 * MIB),
                    ordinal: slot.into(),
                    id: DeviceIdKind::Gpu,
                    name: "invented",
                };
                let seq = u64::from(slot) + 1;
                let memory = MemoryKind::Device;
                let alloc = Body::AllocEnd { address: seq << 32, bytes: MIB, pool: 0, took_us: 1, memory };
                say(at, device);
                say(Stamp { seq, ..at }, alloc);
            }
        }
        let published = Published {
            at_ns: 0,
            made: Instant::now(),
            snapshot: ledger.snapshot(),
            totals: Default::default(),
            remembered_bytes: 0,
        };
        let status = DeviceStatus::new(known, 0, 0);
        let nvml = NvmlStatus { up: true, devices: vec![status], ..NvmlStatus::default() };
        let mut health = Health { nvml, ..Health::default() };
        let shown = ViewSettings { young: Duration::ZERO, ..ViewSettings::default() };
        let ps = |health: &Health| {
            let viewer = Viewer { uid: 0, all: true };
            let rows = RowMaker { published: &published, health, viewer, tenants: Tenants::Named }.rows();
            let claimed: usize = rows.claims.iter().map(|claim| claim.devices).sum();
            (rows.devices.len(), rows.processes.len(), rows.claims.len(), claimed)
        };
        assert_eq!(ps(&health), (1, 1, AGENTS, AGENTS * INVENTED), "one line for each process");
        let page = page::of_processes(&published, &health, &shown);
        let length = |list: &str| page[list].as_array().map_or(0, Vec::len);
        assert_eq!((length("devices"), length("processes")), (1, 1));
        assert_eq!(page["claims"]["processes"], AGENTS);
        assert_eq!(page["claims"]["devices"], AGENTS * INVENTED);
        let text = prometheus::of_processes(&published, &health, &shown);
        let claimed = text.lines().filter(|line| line.starts_with("gpumem_process_claimed_devices{"));
        let claimed: Vec<&str> = claimed.filter_map(|line| line.rsplit(' ').next()).collect();
        assert_eq!(claimed, vec!["31"; AGENTS]);
        let uuid = format!("uuid=\"{known}\"");
        let is_other = |line: &&str| line.contains("uuid=\"") && !line.contains(&uuid);
        assert_eq!(text.lines().find(is_other), None, "no series of another device");

        // A daemon that cannot see all MIG instances cannot tell which devices exist.
        health.nvml.devices[0].facts.insert("hidden_instances".to_owned(), "1".to_owned());
        assert_eq!(ps(&health), (1 + INVENTED, 1 + AGENTS * INVENTED, 0, 0));
    }

    const TABLE: &str = r#"none of these:
  ps      -
  page    -
  metrics not listed
listed:
  ps      used Some(10) tracked None idle None untrackable Some(7) aged true why None ["uncovered"]
  page    used Some(10) predates Some(0) tracked None untrackable Some(7) time 11 why null 0
  metrics used 10, predates 0, untrackable 7, aged
covered:
  ps      used None tracked Some(4) idle Some(0) untrackable None aged false why Some("not listed") ["covered"]
  page    used None predates None tracked Some(4) untrackable None time null why "not listed" 1
  metrics not listed, tracked 4, Others 4
covered listed:
  ps      used Some(10) tracked Some(3) idle Some(0) untrackable Some(7) aged true why None ["covered"]
  page    used Some(10) predates Some(0) tracked Some(3) untrackable Some(7) time 11 why null 1
  metrics used 10, predates 0, untrackable 7, tracked 3, Others 3, aged
stale:
  ps      -
  page    -
  metrics not listed
stale listed:
  ps      used Some(10) tracked None idle None untrackable Some(7) aged true why None ["uncovered", "stale"]
  page    used Some(10) predates Some(0) tracked None untrackable Some(7) time 11 why null 0
  metrics used 10, predates 0, untrackable 7, aged
stale covered:
  ps      used None tracked Some(4) idle Some(0) untrackable None aged false why Some("not listed") ["covered", "stale"]
  page    used None predates None tracked Some(4) untrackable None time null why "not listed" 1
  metrics not listed, tracked 4, Others 4
stale covered listed:
  ps      used Some(10) tracked Some(3) idle Some(0) untrackable Some(7) aged true why None ["covered", "stale"]
  page    used Some(10) predates Some(0) tracked Some(3) untrackable Some(7) time 11 why null 1
  metrics used 10, predates 0, untrackable 7, tracked 3, Others 3, aged
failed:
  ps      -
  page    -
  metrics not listed
failed listed:
  ps      used None tracked None idle None untrackable None aged false why Some("list failed") ["uncovered"]
  page    used None predates None tracked None untrackable None time null why "list failed" 0
  metrics list failed
failed covered:
  ps      used None tracked Some(4) idle Some(0) untrackable None aged false why Some("not listed") ["covered"]
  page    used None predates None tracked Some(4) untrackable None time null why "not listed" 1
  metrics not listed, tracked 4, Others 4
failed covered listed:
  ps      used None tracked Some(4) idle Some(0) untrackable None aged false why Some("list failed") ["covered"]
  page    used None predates None tracked Some(4) untrackable None time null why "list failed" 1
  metrics list failed, tracked 4, Others 4
failed stale:
  ps      -
  page    -
  metrics not listed
failed stale listed:
  ps      used None tracked None idle None untrackable None aged false why Some("list failed") ["uncovered", "stale"]
  page    used None predates None tracked None untrackable None time null why "list failed" 0
  metrics list failed
failed stale covered:
  ps      used None tracked Some(4) idle Some(0) untrackable None aged false why Some("not listed") ["covered", "stale"]
  page    used None predates None tracked Some(4) untrackable None time null why "not listed" 1
  metrics not listed, tracked 4, Others 4
failed stale covered listed:
  ps      used None tracked Some(4) idle Some(0) untrackable None aged false why Some("list failed") ["covered", "stale"]
  page    used None predates None tracked Some(4) untrackable None time null why "list failed" 1
  metrics list failed, tracked 4, Others 4
"#;
}
