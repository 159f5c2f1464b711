//! `gpumemctl ps`: current memory of all devices.
//!
//! The printed amounts of a device add up to its size: processes, unaccounted memory, system memory, and free memory. The amounts
//! of a row add up too: used is tracked plus Untrackable, and idle is a part of tracked.

use crate::args::{Ps as Args, names_device, no_device};
use crate::client::Daemon;
use crate::output::{print, width};
use crate::proc;
use anyhow::Result;
use gpumem_model::control::{ClaimRow, DeviceRow, EndedRow, ProcessRow, Ps};
use gpumem_model::time::duration;
use gpumem_model::units::{Unit, plural, signed, thousands};
use gpumem_report::table::{Align, Table, cut, pad, width as width_of};
use gpumem_report::text::{command_line, escape};

/// Age in ms from which a reading counts as old, and its age is printed. The daemon reads NVML at least once a second.
pub(super) const FRESH_MS: u64 = 3_000;

pub(crate) fn run(args: &Args) -> Result<()> {
    let daemon = Daemon::find(args.socket.as_deref())?;
    let mut ps = daemon.ps()?;
    if let Some(device) = &args.device {
        only(&mut ps, device)?;
    }
    print(&if args.json { gpumem_model::escape::json(&ps) } else { table(&ps, width()) })
}

/// Removes all devices but the named one. Fails if no device or more than one has this name.
pub(super) fn only(ps: &mut Ps, name: &str) -> Result<()> {
    let is_named = |device: &DeviceRow| names_device(name, device.index, &device.uuid);
    let found: Vec<usize> = (0..ps.devices.len()).filter(|&index| is_named(&ps.devices[index])).collect();
    let [index] = found[..] else {
        let what = if found.is_empty() { "is not a device" } else { "is more than one device" };
        let known = ps.devices.iter().map(|device| (device.index, device.uuid.clone()));
        return Err(no_device(name, what, known));
    };
    ps.processes.retain(|process| process.device == index);
    ps.processes.iter_mut().for_each(|process| process.device = 0);
    (ps.claims, ps.ended) = Default::default();
    ps.findings.retain(|finding| finding.device == Some(index));
    ps.findings.iter_mut().for_each(|finding| finding.device = Some(0));
    ps.devices = vec![ps.devices.swap_remove(index)];
    Ok(())
}

pub(super) const NO_DEVICE: &str = "no device: NVML does not answer or has none (why: gpumemctl doctor)";
pub(super) const HEADS: [&str; 8] = ["GPU", "PID", "USER", "STATE", "USED", "TRACKED", "IDLE", "UNTRACK"];
/// Whether each column is aligned to the left.
pub(super) const LEFT: [bool; 8] = [true, false, true, true, false, false, false, false];

/// Age in ms up to which an ended process is listed.
const RECENT_MS: u64 = 600_000;
/// Maximum number of ended processes that are listed.
const MOST_ENDED: usize = 4;

/// Minimum number of columns for a command. Hints after it that do not fit are left out.
const LEAST_COMMAND: usize = 12;

/// A row of the table: a cell for each of [`HEADS`], the process's age, its command, and hints.
#[derive(Default)]
pub(super) struct Line {
    pub(super) cells: [String; 8],
    pub(super) age: String,
    /// Command line as the daemon returned it; empty if the row has none.
    command: String,
    hints: Vec<String>,
}

impl Line {
    /// Returns the command with its arguments, and the first hints that fit whole into `columns`. The command is shortened for
    /// them, down to [`LEAST_COMMAND`] columns.
    pub(super) fn note(&self, columns: usize) -> String {
        if self.command.is_empty() {
            return self.hints.join(" ");
        }
        let all = (0..=self.hints.len()).rev().map(|count| in_parentheses(&self.hints[..count]));
        let hints = all.into_iter().find(|hints| LEAST_COMMAND + 1 + width_of(hints) <= columns);
        let hints = hints.filter(|hints| !hints.is_empty()).unwrap_or_default();
        let room = if hints.is_empty() { columns } else { columns - width_of(&hints) - 1 };
        format!("{} {hints}", command_line(&self.command, room)).trim_end().to_owned()
    }
}

/// Returns hints as text in parentheses; empty without hints.
fn in_parentheses(hints: &[String]) -> String {
    if hints.is_empty() { String::new() } else { format!("({})", hints.join(", ")) }
}

fn table(ps: &Ps, terminal: Option<usize>) -> String {
    if ps.devices.is_empty() && ps.claims.is_empty() {
        return NO_DEVICE.to_owned() + "\n";
    }
    let unit = unit(ps);
    let mut lines = Vec::new();
    for (index, device) in ps.devices.iter().enumerate() {
        device_lines(ps, index, device, unit, &mut lines);
    }
    lines.extend(ps.claims.iter().map(|claim| claim_line(claim, unit)));
    let align = |left| if left { Align::Left } else { Align::Right };
    let table = |columns: usize| {
        let aligns: Vec<Align> = LEFT.map(align).into_iter().chain([Align::Right]).take(columns).collect();
        let mut table = Table::new(aligns).with_gap(1);
        table.row(HEADS.into_iter().chain(["TIME"]));
        lines.iter().for_each(|line| table.row(line.cells.iter().chain([&line.age]).cloned()));
        table
    };
    let all = table(HEADS.len() + 1);
    let fits = terminal.is_none_or(|terminal| all.width() + LEAST_COMMAND <= terminal);
    let table = if fits { all } else { table(HEADS.len()) };
    // Only notes are shortened, never numbers.
    let columns = table.width();
    let room = terminal.map_or(usize::MAX, |terminal| terminal.saturating_sub(columns));
    let notes = ["COMMAND".to_owned()].into_iter().chain(lines.iter().map(|line| line.note(room)));
    let row = |(cells, note): (&String, String)| {
        let line = format!("{} {}", pad(cells, columns - 1, Align::Left), cut(&note, room));
        line.trim_end().to_owned() + "\n"
    };
    let mut out: String = table.lines().iter().zip(notes).map(row).collect();
    out += &format!("{}; next: gpumemctl report PID\n", unit.name);
    out += &ended_lines(&ps.ended, terminal.unwrap_or(usize::MAX));
    out
}

/// Returns the unit in which all amounts are printed.
pub(super) fn unit(ps: &Ps) -> Unit {
    let sizes = ps.devices.iter().filter_map(|device| device.total_bytes.or(device.used_bytes));
    let held = ps.processes.iter().filter_map(|process| process.used_bytes);
    Unit::for_largest(sizes.chain(held).map(signed).max().unwrap_or(0))
}

/// Adds the rows of a device's processes, and the row of its free memory.
fn device_lines(ps: &Ps, index: usize, device: &DeviceRow, unit: Unit, lines: &mut Vec<Line>) {
    let amounts = DeviceAmounts::of(ps, index, unit);
    let processes = amounts.processes.iter();
    lines.extend(processes.map(|(row, used)| process_line(device, &ps.processes[*row], *used, unit)));
    let mut parts = Vec::new();
    parts.extend(device.unified.then(|| "unified".to_owned()));
    parts.extend(device.system_bytes.map(|_| format!("system {}", amount(amounts.system, unit))));
    if device.unaccounted_bytes.is_some_and(|bytes| bytes != 0) {
        let what = if device.unified { "rest of the host" } else { "unaccounted" };
        parts.push(format!("{what} {}", amount(amounts.unaccounted, unit)));
    }
    let hints = [in_parentheses(&parts)].into_iter().chain(reading_warning(device));
    let hints: Vec<String> = hints.filter(|hint| !hint.is_empty()).collect();
    let mut cells = [const { String::new() }; 8];
    if amounts.processes.is_empty() {
        cells[0] = device.index.to_string();
    }
    cells[3] = if device.unified { "available" } else { "free" }.to_owned();
    cells[4] = amount(amounts.free, unit);
    lines.push(Line { cells, hints, ..Line::default() });
}

/// Returns a warning if NVML's latest reading of a device failed or is old.
pub(super) fn reading_warning(device: &DeviceRow) -> Option<String> {
    let old = device.age_ms.filter(|age| *age > FRESH_MS).map(|age| format!("read {} ago", seconds(age)));
    let why: Vec<String> = device.why.as_deref().map(escape).into_iter().chain(old).collect();
    (!why.is_empty()).then(|| format!("NOT FRESH: {}", why.join(", ")))
}

/// Formats an amount in steps of the last printed digit; unknown is `-`.
fn amount(steps: Option<i64>, unit: Unit) -> String {
    steps.map_or("-".to_owned(), |steps| unit.print(steps))
}

/// Returns the cells for pid and user. The daemon may hide processes of other users, whose pid is then 0.
fn owner(pid: u32, user: Option<&str>, uid: Option<u64>) -> [String; 2] {
    let dash = || "-".to_owned();
    let user = user.map(escape).or_else(|| uid.map(|uid| uid.to_string()));
    [if pid == 0 { dash() } else { pid.to_string() }, user.unwrap_or_else(dash)]
}

/// Makes the row of a process. `used` is the process's used memory in steps of the last printed digit.
pub(super) fn process_line(device: &DeviceRow, process: &ProcessRow, used: Option<i64>, unit: Unit) -> Line {
    let gap = process.used_bytes.zip(process.tracked_bytes).map(|(used, tracked)| signed(used) - tracked);
    let (tracked, gap) = match (used, process.tracked_bytes, gap) {
        (Some(used), Some(tracked), Some(gap)) => {
            let parts = unit.apportion(used, &[tracked, gap]);
            (Some(parts[0]), Some(parts[1]))
        }
        (_, tracked, gap) => (tracked.map(|bytes| unit.round(bytes)), gap.map(|bytes| unit.round(bytes))),
    };
    let idle = process.idle_bytes.map(|bytes| unit.round(bytes));
    let (state, is_normal) = state(&process.flags);
    let mut hints: Vec<String> = process.why.iter().map(|why| escape(why)).collect();
    hints.extend(process.protected_bytes.map(|bytes| format!("protected {}", unit.amount(signed(bytes)))));
    hints.extend(process.age_ms.filter(|age| *age > FRESH_MS).map(|age| format!("{} old", seconds(age))));
    if !is_normal && process.pid != 0 {
        hints.push(format!("why: doctor {}", process.pid));
    }
    let [pid, user] = owner(process.pid, process.user.as_deref(), process.uid);
    let [used, tracked, idle, gap] = [used, tracked, idle, gap].map(|steps| amount(steps, unit));
    let age = process.start_ticks.and_then(proc::age_ns).map(duration);
    Line {
        cells: [device.index.to_string(), pid, user, state, used, tracked, idle, gap],
        age: age.unwrap_or_else(|| "-".to_owned()),
        command: process.command.clone().unwrap_or_else(|| "-".to_owned()),
        hints,
    }
}

/// Makes one row for all devices of a process that only its agent reports, and NVML does not.
fn claim_line(claim: &ClaimRow, unit: Unit) -> Line {
    let dash = || "-".to_owned();
    let [pid, user] = owner(claim.pid, claim.user.as_deref(), claim.uid);
    let tracked = amount(claim.tracked_bytes.map(|bytes| unit.round(bytes)), unit);
    let devices = if claim.devices == 1 { "a device".into() } else { format!("{} devices", claim.devices) };
    Line {
        cells: [dash(), pid, user, "claimed".to_owned(), dash(), tracked, dash(), dash()],
        age: dash(),
        command: claim.command.clone().unwrap_or_else(dash),
        hints: vec![format!("reports {devices} that NVML does not have")],
    }
}

/// Returns a sentence on the devices that only agents report, and NVML does not; `None` if there are none.
pub(super) fn claims_line(claims: &[ClaimRow]) -> Option<String> {
    let devices = claims.iter().fold(0_u64, |sum, claim| sum.saturating_add(claim.devices as u64));
    let (who, verb) = match claims.len() {
        0 => return None,
        1 => ("1 process".to_owned(), "names"),
        count => (format!("{} processes", thousands(count as u64)), "name"),
    };
    let devices = if devices == 1 { "a device".into() } else { plural(devices, "device") };
    Some(format!("{who} {verb} {devices} that NVML does not have (gpumemctl ps lists them)"))
}

/// Returns a line for each process that ended a short time ago, with the command that shows its run.
fn ended_lines(ended: &[EndedRow], width: usize) -> String {
    let last = ended.iter().take_while(|row| row.age_ms < RECENT_MS).take(MOST_ENDED);
    last.map(|row| {
        let user = row.who.get("user").map(|user| format!(" {}", escape(user))).unwrap_or_default();
        let (pid, age) = (row.pid, duration(row.age_ms.saturating_mul(1_000_000)));
        let outcome =
            row.outcome.as_deref().map(|outcome| format!(", {}", escape(outcome))).unwrap_or_default();
        let head = format!("ended {age} ago{outcome}: pid {pid}{user}");
        let next = format!("(gpumemctl report {})", escape(&row.run));
        let room = width.saturating_sub(width_of(&head) + width_of(&next) + 2).max(LEAST_COMMAND);
        let command = row.command.as_deref().map(|command| command_line(command, room) + " ");
        format!("{head} {}{next}\n", command.unwrap_or_default())
    })
    .collect()
}

/// Returns the flags as text, and whether they are normal, so that the row needs no explanation.
fn state(flags: &[String]) -> (String, bool) {
    // `restarted` concerns only peaks, which the table does not have.
    let is_normal = |flag: &&String| *flag == "covered" || *flag == "restarted";
    let more: Vec<String> = flags.iter().filter(|flag| !is_normal(flag)).map(|flag| escape(flag)).collect();
    match (flags.iter().any(|flag| flag == "covered"), more.is_empty()) {
        (true, true) => ("covered".into(), true),
        (_, true) => ("-".into(), false),
        _ => (more.join(","), false),
    }
}

fn seconds(ms: u64) -> String {
    format!("{}.{} s", ms / 1000, ms / 100 % 10)
}

/// Amounts of a device, rounded to the last printed digit. If the exact amounts add up to the device's size, these do too.
pub(super) struct DeviceAmounts {
    /// Used memory of each process of the device, with the index of its row in [`Ps::processes`].
    pub(super) processes: Vec<(usize, Option<i64>)>,
    pub(super) unaccounted: Option<i64>,
    pub(super) system: Option<i64>,
    pub(super) free: Option<i64>,
}

impl DeviceAmounts {
    /// Computes the amounts of the device with this index in [`Ps::devices`].
    pub(super) fn of(ps: &Ps, index: usize, unit: Unit) -> Self {
        let device = &ps.devices[index];
        let on_device = ps.processes.iter().enumerate().filter(|(_, process)| process.device == index);
        let (rows, mut bytes): (Vec<usize>, Vec<Option<i64>>) =
            on_device.map(|(row, process)| (row, process.used_bytes.map(signed))).unzip();
        bytes.extend([
            device.unaccounted_bytes,
            device.system_bytes.map(signed),
            device.free_bytes.map(signed),
        ]);
        let known: Vec<i64> = bytes.iter().flatten().copied().collect();
        let sum = known.iter().fold(0_i64, |sum, bytes| sum.saturating_add(*bytes));
        let steps = match device.total_bytes.map(signed) == Some(sum) {
            true => unit.apportion(unit.round(sum), &known),
            false => known.iter().map(|bytes| unit.round(*bytes)).collect(),
        };
        let mut steps = steps.into_iter();
        let mut amounts = bytes.iter().map(|bytes| bytes.and_then(|_| steps.next()));
        let processes = rows.into_iter().zip(amounts.by_ref()).collect();
        let [unaccounted, system, free] = std::array::from_fn(|_| amounts.next().flatten());
        DeviceAmounts { processes, unaccounted, system, free }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn device(index: u32, free: u64, system: Option<u64>, unaccounted: Option<i64>) -> DeviceRow {
        DeviceRow {
            index,
            uuid: format!("GPU-5f1c000{index}-aaaa"),
            total_bytes: Some(81_559 * MIB),
            free_bytes: Some(free * MIB),
            system_bytes: system.map(|bytes| bytes * MIB),
            unaccounted_bytes: unaccounted.map(|bytes| bytes * MIB as i64),
            age_ms: Some(400),
            ..DeviceRow::default()
        }
    }

    fn process(pid: u32, device: usize, user: &str, flags: &[&str], amounts: [Option<i64>; 3]) -> ProcessRow {
        let [used, tracked, idle] = amounts.map(|bytes| bytes.map(|bytes| bytes * MIB as i64));
        ProcessRow {
            pid,
            device,
            user: Some(user.into()),
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            used_bytes: used.map(|bytes| bytes as u64),
            tracked_bytes: tracked,
            idle_bytes: idle,
            ..ProcessRow::default()
        }
    }

    /// A machine with two devices and three processes, of which one has no agent.
    fn machine() -> Ps {
        let command = |mut row: ProcessRow, command: &str| {
            row.command = Some(command.into());
            row
        };
        Ps {
            devices: vec![device(0, 10_824, Some(623), Some(0)), device(3, 6_358, Some(623), Some(64))],
            processes: vec![
                command(
                    process(60021, 0, "svc-llm", &["covered"], [Some(70_112), Some(68_790), Some(0)]),
                    "vllm",
                ),
                command(
                    process(41873, 1, "alice", &["covered"], [Some(71_204), Some(69_918), Some(8_648)]),
                    "/usr/bin/python /home/alice/train.py --lr 1 rank 3",
                ),
                process(52110, 1, "bob", &["uncovered"], [Some(3_310), None, None]),
            ],
            ..Ps::default()
        }
    }

    #[test]
    fn devices_that_only_a_process_names_are_one_line_of_it() {
        let mut ps = machine();
        ps.claims = vec![ClaimRow {
            pid: 777,
            user: Some("eve\u{1b}[2J".into()),
            devices: 64,
            tracked_bytes: Some(5 << 20),
            command: Some("./claimant".into()),
            ..ClaimRow::default()
        }];
        let text = table(&ps, None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), table(&machine(), None).lines().count() + 1, "{text}");
        let line = lines[lines.len() - 2].split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            line,
            r"- 777 eve\u{1b}[2J claimed - 5 - - - claimant (reports 64 devices that NVML does not have)"
        );
    }

    #[test]
    fn a_machine_reads_as_it_should() {
        assert_eq!(
            table(&machine(), None),
            "\
GPU   PID USER    STATE       USED TRACKED  IDLE UNTRACK TIME COMMAND
0   60021 svc-llm covered   70,112  68,790     0   1,322    - vllm
                  free      10,824                            (system 623)
3   41873 alice   covered   71,204  69,918 8,648   1,286    - python train.py --lr 1 rank 3
3   52110 bob     uncovered  3,310       -     -       -    - - (why: doctor 52110)
                  free       6,358                            (system 623, unaccounted 64)
MiB; next: gpumemctl report PID
"
        );
        let narrow = table(&machine(), Some(60));
        assert!(narrow.lines().all(|line| line.chars().count() <= 60), "{narrow}");
        assert!(table(&machine(), Some(10)).contains("8,648   1,286\n"), "numbers are not cut");
    }

    #[test]
    fn command_is_shortened_in_the_middle_and_hints_are_kept() {
        let mut ps = machine();
        let steps: String = (0..40).map(|step| format!("--模型 {step} ")).collect();
        ps.processes[1].command = Some(format!("python /home/alice/train.py {steps}rank 3"));
        ps.processes[1].flags = vec!["covered".into(), "late".into()];
        let text = table(&ps, Some(140));
        let line = text.lines().find(|line| line.contains("41873")).expect("a row");
        assert!(line.contains(" python train.py --模型 0"), "{text}");
        assert!(line.contains("...") && line.ends_with(" rank 3 (why: doctor 41873)"), "{text}");
        assert!(text.lines().all(|line| width_of(line) <= 140), "{text}");
        ps.processes[1].start_ticks = Some(0);
        assert!(!table(&ps, None).contains("alice   late      71,204  69,918 8,648   1,286    -"));
    }

    #[test]
    fn hints_that_do_not_fit_whole_are_left_out() {
        let line = Line {
            command: "/usr/bin/python train.py".into(),
            hints: vec!["12 s old".into(), "why: doctor 41873".into()],
            ..Line::default()
        };
        assert_eq!(line.note(50), "python train.py (12 s old, why: doctor 41873)");
        assert_eq!(line.note(40), "python train.py (12 s old)");
        assert_eq!(line.note(22), "python train.py");
    }

    #[test]
    fn rows_line_up_whatever_script_a_user_has() {
        let mut ps = machine();
        ps.processes[1].user = Some("王小明".into());
        let expected = table(&machine(), None).replace("alice  ", "王小明 ");
        assert_eq!(table(&ps, None), expected);
        let narrow = table(&ps, Some(60));
        assert!(narrow.lines().all(|line| width_of(line) <= 60), "{narrow}");
    }

    #[test]
    fn unified_memory_is_named_and_adds_up_to_the_host() {
        let mut ps = machine();
        (ps.devices[1].unified, ps.devices[1].system_bytes) = (true, None);
        ps.devices[1].unaccounted_bytes = Some(687 * MIB as i64);
        let text = table(&ps, None);
        let line =
            "                  available  6,358                            (unified, rest of the host 687)\n";
        assert!(text.contains(line), "{text}");
        assert!(
            text.contains("                  free      10,824                            (system 623)\n"),
            "{text}"
        );
    }

    #[test]
    fn what_is_not_known_is_said_and_never_zero() {
        let mut ps = machine();
        ps.processes[1].flags = vec!["covered".into(), "late".into(), "stale".into()];
        ps.processes[1].age_ms = Some(4_200);
        ps.processes[2].used_bytes = None;
        ps.processes[2].why = Some("no permission\u{1b}".into());
        ps.devices[1].why = Some("timeout".into());
        ps.devices[1].age_ms = Some(12_340);
        let text = table(&ps, None);
        assert!(text.contains(" late,stale 71,204 "), "{text}");
        assert!(text.contains("rank 3 (4.2 s old, why: doctor 41873)"), "{text}");
        assert!(
            text.contains(" uncovered       -       -     -       -    - - (no permission\\u{1b}, why: "),
            "{text}"
        );
        assert!(text.contains(" NOT FRESH: timeout, read 12.3 s ago\n"), "{text}");
        (ps.processes[2].pid, ps.processes[2].user) = (0, None);
        let text = table(&ps, None);
        assert!(
            text.contains("3       - -       uncovered       -       -     -       -    - - (no permission"),
            "{text}"
        );
        assert!(!text.contains("doctor 0"), "{text}");
    }

    #[test]
    fn a_device_adds_up_as_printed() {
        let odd = MIB as i64 / 3;
        let mut ps = machine();
        for process in &mut ps.processes {
            process.used_bytes = process.used_bytes.map(|bytes| bytes + odd as u64);
            process.tracked_bytes = process.tracked_bytes.map(|bytes| bytes + odd / 2);
        }
        ps.devices[1].free_bytes = ps.devices[1].free_bytes.map(|bytes| bytes - 2 * odd as u64);
        let text = table(&ps, None);
        let number = |word: &str| word.trim_end_matches([',', ')']).replace(',', "").parse::<i64>().ok();
        let rows: Vec<Vec<i64>> = text
            .lines()
            .skip(3)
            .take(3)
            .map(|line| line.split_whitespace().filter_map(number).collect())
            .collect();
        assert_eq!(rows[0][2], rows[0][3] + rows[0][5], "{text}");
        assert_eq!(rows[0][2] + rows[1][2] + rows[2].iter().sum::<i64>(), 81_559, "{text}");
    }

    #[test]
    fn ended_processes_name_their_runs() {
        let mut ps = machine();
        let ended = |pid, age_ms, command: &str| EndedRow {
            pid,
            run: format!("r{pid}"),
            age_ms,
            command: Some(command.into()),
            who: [("user".to_owned(), "ana".to_owned())].into(),
            ..EndedRow::default()
        };
        ps.ended = vec![ended(7, 42_000, "python train.py --lr 1"), ended(8, 3_600_000, "python old.py")];
        ps.ended[0].outcome = Some("out of memory".into());
        let lines = |width| table(&ps, width).strip_prefix(&table(&machine(), width)).map(str::to_owned);
        let line =
            "ended 42.0 s ago, out of memory: pid 7 ana python train.py --lr 1 (gpumemctl report r7)\n";
        assert_eq!(lines(None).as_deref(), Some(line));
        let narrow = lines(Some(80)).expect("a line after the table");
        assert!(
            narrow.trim_end().chars().count() <= 80 && narrow.ends_with("(gpumemctl report r7)\n"),
            "{narrow}"
        );
        only(&mut ps, "3").expect("a device");
        assert_eq!(ps.ended, []);
    }

    #[test]
    fn one_device_is_named_by_index_or_uuid() {
        for name in ["3", "GPU-5f1c0003", "gpu-5F1C0003-aaaa"] {
            let mut ps = machine();
            only(&mut ps, name).expect(name);
            let rows: Vec<u32> = ps.processes.iter().map(|process| process.pid).collect();
            assert_eq!((ps.devices[0].index, rows, ps.processes[0].device), (3, vec![41873, 52110], 0));
        }
        for (name, words) in
            [("1", "is not a device; there are: 0 (GPU-5f1c0000-aaaa), 3"), ("GPU-5f1c", "more than one")]
        {
            let error = only(&mut machine(), name).expect_err(name).to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
