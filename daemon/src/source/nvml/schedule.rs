//! Decides which NVML call is made when. Pure: it takes the time as an argument, and other code makes the calls.
//!
//! A memory call takes microseconds and locks one GPU. A process list takes milliseconds and locks the driver for all GPUs. So both
//! have their own schedule ("lane"). **Memory** of all devices is read at a constant rate. **Lists** are read for one device at a
//! time, when its list is due and lock time is left. It is due after the interval, or earlier if the memory use of the device has
//! changed or a list was requested.
//!
//! Lock time is a token bucket that fills at `list_budget` of wall time. A list may be read while the bucket is not empty. Its
//! real cost is then taken from the bucket, which may become negative. Expensive lists therefore become rarer, and lists that
//! cost almost nothing can all be read together.
//!
//! A list requested because of an agent's event is most useful at once, because it separates the changes around the event. So it
//! may be read on credit, up to `BORROW_NS`. Then the bucket must fill again, and the device that has waited longest is next.
//!
//! A wake-up costs more than a cheap list. So a list that is due shortly after a memory tick is read at the tick.

use crate::config::NvmlSettings;
use serde::{Deserialize, Serialize};

const SECOND: u64 = 1_000_000_000;
/// Capacity of the bucket in ns of lock time. It limits the cost of a burst of lists, without the last list.
const BURST_NS: i64 = 1_000_000;
/// Minimum interval between two lists of a device if its memory use has changed (ns).
const CHANGED_GAP_NS: u64 = 200_000_000;
/// Minimum interval between two lists of a device if they are requested (ns). It is short, because the creation of a context
/// requests one list before and one after it.
const REQUESTED_GAP_NS: u64 = 10_000_000;
/// Maximum lock time that requested lists may borrow (ns): what a budget of 2 % adds to the bucket in a second.
const BORROW_NS: i64 = 20_000_000;
/// At a memory tick, a list may be read early: by up to its regular interval divided by this number.
const EARLY_SHARE: u64 = 8;
/// The memory lane takes at most this fraction of wall time: one divided by this number.
const MEMORY_SHARE: u64 = 5;
/// First interval before a failed call is retried, and the maximum (ns); doubled each time.
const RETRY_NS: u64 = SECOND;
const RETRY_MOST_NS: u64 = 60 * SECOND;

/// Calls of a device that are skipped, because they hang.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) enum Skip {
    #[default]
    Nothing,
    /// Calls for process lists; the device's memory is read.
    Lists,
    All,
}

/// The next action of the poller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextRead {
    /// Read the memory of each device for which [`Schedule::wants_memory`] is true.
    Memory,
    /// Make a reading with process lists of the device with this index.
    List(usize),
    /// Do nothing until this time (ns).
    Wait(u64),
}

/// Failures of one kind of call on one device.
#[derive(Debug, Clone, Copy, Default)]
struct Retries {
    /// Number of failures since the last success.
    failures: u32,
    retry_ns: u64,
}

impl Retries {
    /// Stores the result of a call that ended at `now_ns`.
    fn ended(&mut self, now_ns: u64, ok: bool) {
        if ok {
            *self = Retries::default();
        } else {
            let wait = RETRY_NS.checked_shl(self.failures).unwrap_or(RETRY_MOST_NS).min(RETRY_MOST_NS);
            self.failures = (self.failures + 1).min(16);
            self.retry_ns = now_ns + wait;
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Device {
    skip: Skip,
    memory: Retries,
    list: Retries,
    /// Time at which the device's last list began (ns); 0 if none was read so far.
    listed_ns: u64,
    /// Used bytes of the device at the time of its last list.
    listed_used: Option<u64>,
    /// Used bytes of the device in its latest memory reading.
    used: Option<u64>,
    /// Time of the latest memory reading (ns).
    used_ns: u64,
    /// Time of the first request for a list since the last list (ns).
    requested_ns: Option<u64>,
    /// Time at which the used bytes had first changed by the threshold since the last list (ns).
    changed_ns: Option<u64>,
    /// Whether a list is due but waits for lock time. Each wait is counted once.
    is_deferred: bool,
    /// Duration of the list calls in the device's last reading (ns).
    cost_ns: u64,
}

#[derive(Debug)]
pub(crate) struct Schedule {
    memory_period_ns: u64,
    list_interval_ns: u64,
    /// Change of a device's used bytes after which its list is due early.
    threshold_bytes: u64,
    /// Share of wall time that lists may take, 0 to 1.
    budget: f64,
    /// Time (ns) for which process lists may hold the driver's lock now; negative after expensive lists.
    bucket_ns: i64,
    /// Whether requested lists have used the whole credit. Then none is read on credit until the bucket is positive again.
    is_in_debt: bool,
    /// Time up to which the bucket has been filled (ns).
    filled_ns: u64,
    next_memory_ns: u64,
    devices: Vec<Device>,
    /// Number of lists that have had to wait for lock time.
    pub deferred: u64,
}

pub(super) fn ns(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Schedule {
    /// Returns a schedule for `count` devices, which are all due at once.
    pub(crate) fn new(settings: &NvmlSettings, count: usize, now_ns: u64) -> Schedule {
        Schedule {
            memory_period_ns: SECOND / u64::from(settings.memory_hz.clamp(1, 100)),
            list_interval_ns: ns(settings.list_interval).max(1),
            threshold_bytes: settings.list_threshold_bytes.max(1),
            budget: settings.list_budget.clamp(0.0001, 1.0),
            bucket_ns: BURST_NS,
            is_in_debt: false,
            filled_ns: now_ns,
            next_memory_ns: now_ns,
            devices: vec![Device::default(); count],
            deferred: 0,
        }
    }

    /// Adds the lock time earned since the last call to the bucket.
    fn fill(&mut self, now_ns: u64) {
        let income = (now_ns.saturating_sub(self.filled_ns) as f64 * self.budget) as i64;
        // Time too short to add a whole nanosecond is counted in a later call.
        if income > 0 {
            self.bucket_ns = self.bucket_ns.saturating_add(income).min(BURST_NS);
            self.filled_ns = now_ns;
        }
        self.is_in_debt = self.bucket_ns <= 0 && (self.is_in_debt || self.bucket_ns <= -BORROW_NS);
    }

    /// Returns when the device's next list is due. Its regular interval is shortened by `early_ns`.
    fn due_ns(&self, device: &Device, early_ns: u64) -> u64 {
        let not_before = if device.skip == Skip::Nothing { device.list.retry_ns } else { u64::MAX };
        if device.listed_ns == 0 {
            return not_before;
        }
        let after = |gap: u64| device.listed_ns.saturating_add(gap);
        let mut due = after(self.list_interval_ns - early_ns);
        for (reason_ns, gap) in [(device.changed_ns, CHANGED_GAP_NS), (device.requested_ns, REQUESTED_GAP_NS)]
        {
            if let Some(reason_ns) = reason_ns {
                due = due.min(reason_ns.max(after(gap.min(self.list_interval_ns))));
            }
        }
        due.max(not_before)
    }

    /// Returns the next action. A due list goes first, because a reading with a list includes the device's memory. It is read only
    /// while the bucket is positive; a requested list is also read on credit.
    pub(crate) fn next(&mut self, now_ns: u64) -> NextRead {
        self.fill(now_ns);
        let is_tick = now_ns >= self.next_memory_ns;
        let most_early_ns = (self.memory_period_ns / 2).min(self.list_interval_ns / EARLY_SHARE);
        let early_ns = if is_tick { most_early_ns } else { 0 };
        let due = |device| self.due_ns(device, early_ns);
        let may_list =
            |device: &Device| self.bucket_ns > 0 || device.requested_ns.is_some() && !self.is_in_debt;
        let all = || self.devices.iter().enumerate().map(|(index, device)| (due(device), index));
        let first = all().filter(|&(due, index)| due <= now_ns && may_list(&self.devices[index])).min();
        if let Some((_, index)) = first {
            return NextRead::List(index);
        }
        let filled_ns = now_ns.saturating_add(((1 - self.bucket_ns) as f64 / self.budget).ceil() as u64);
        let waits = all().map(|(due, _)| if due <= now_ns { filled_ns } else { due });
        let (list_ns, late) =
            (waits.min().unwrap_or(u64::MAX), all().filter(|(due, _)| *due <= now_ns).min());
        if let Some((_, index)) = late
            && !std::mem::replace(&mut self.devices[index].is_deferred, true)
        {
            self.deferred += 1;
        }
        if is_tick {
            let next = self.next_memory_ns + self.memory_period_ns;
            // Skip missed ticks.
            self.next_memory_ns = if next > now_ns { next } else { now_ns + self.memory_period_ns };
            return NextRead::Memory;
        }
        NextRead::Wait(list_ns.min(self.next_memory_ns))
    }

    pub(crate) fn wants_memory(&self, index: usize, now_ns: u64) -> bool {
        let device = &self.devices[index];
        let is_fresh = device.used_ns.saturating_add(self.memory_period_ns / 2) > now_ns;
        device.skip != Skip::All && now_ns >= device.memory.retry_ns && !is_fresh
    }

    /// Stores the result of a memory call: the used bytes, or `None` if it failed.
    pub(crate) fn memory_read(&mut self, index: usize, now_ns: u64, used: Option<u64>) {
        let device = &mut self.devices[index];
        device.memory.ended(now_ns, used.is_some());
        let Some(used) = used else { return };
        (device.used, device.used_ns) = (Some(used), now_ns);
        if device.listed_used.is_some_and(|listed| listed.abs_diff(used) >= self.threshold_bytes) {
            device.changed_ns.get_or_insert(now_ns);
        }
    }

    /// Ends [`NextRead::Memory`]. `took_ns` is the time that the calls took.
    pub(crate) fn memory_turn_ended(&mut self, now_ns: u64, took_ns: u64) {
        let earliest = now_ns.saturating_add(took_ns.saturating_mul(MEMORY_SHARE - 1));
        self.next_memory_ns = self.next_memory_ns.max(earliest);
    }

    /// Stores the result of a reading with lists, which began at `began_ns` and took `cost_ns` in list calls.
    pub(crate) fn listed(&mut self, index: usize, began_ns: u64, ended_ns: u64, cost_ns: u64, ok: bool) {
        self.fill(ended_ns);
        self.bucket_ns = self.bucket_ns.saturating_sub(i64::try_from(cost_ns).unwrap_or(i64::MAX));
        let device = &mut self.devices[index];
        device.list.ended(ended_ns, ok);
        device.listed_ns = began_ns.max(1);
        device.listed_used = device.used;
        (device.requested_ns, device.changed_ns, device.is_deferred) = (None, None, false);
        device.cost_ns = cost_ns;
    }

    /// Returns the duration of list calls in the device's last reading (ns); `None` if there was none.
    pub(crate) fn last_cost_ns(&self, index: usize) -> Option<u64> {
        let device = &self.devices[index];
        (device.listed_ns != 0).then_some(device.cost_ns)
    }

    /// Requests that the device's process list is read soon.
    pub(crate) fn request(&mut self, index: usize, now_ns: u64) {
        self.devices[index].requested_ns.get_or_insert(now_ns);
    }

    /// Skips these calls of the device until the next call of this function.
    pub(crate) fn set_skip(&mut self, index: usize, skip: Skip) {
        self.devices[index].skip = skip;
    }

    /// Returns whether calls of any device are skipped.
    pub(crate) fn skips_any(&self) -> bool {
        self.devices.iter().any(|device| device.skip != Skip::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const MS: u64 = 1_000_000;
    const US: u64 = 1_000;

    /// Runs the schedule against a driver whose calls take a given time.
    struct Machine {
        schedule: Schedule,
        now: u64,
        memory_ns: u64,
        list_ns: u64,
        used: Vec<u64>,
        listed: Vec<Vec<u64>>,
        memory_turns: Vec<u64>,
        waits: usize,
    }

    fn machine(devices: usize, settings: &NvmlSettings, memory_ns: u64, list_ns: u64) -> Machine {
        let now = 1_000 * SECOND;
        let schedule = Schedule::new(settings, devices, now);
        let listed = vec![Vec::new(); devices];
        let (used, memory_turns) = (vec![0; devices], Vec::new());
        Machine { schedule, now, memory_ns, list_ns, used, listed, memory_turns, waits: 0 }
    }

    impl Machine {
        fn run(&mut self, for_ns: u64) {
            let end = self.now + for_ns;
            while self.now < end {
                match self.schedule.next(self.now) {
                    NextRead::Wait(until) => {
                        assert!(until > self.now, "a wait has an end in the future");
                        self.now = until.min(end);
                        self.waits += 1;
                    }
                    NextRead::Memory => {
                        self.memory_turns.push(self.now);
                        let began = self.now;
                        for index in 0..self.used.len() {
                            if self.schedule.wants_memory(index, self.now) {
                                self.now += self.memory_ns;
                                self.schedule.memory_read(index, self.now, Some(self.used[index]));
                            }
                        }
                        self.schedule.memory_turn_ended(self.now, self.now - began);
                    }
                    NextRead::List(index) => {
                        let began = self.now;
                        self.listed[index].push(began);
                        self.schedule.memory_read(index, self.now, Some(self.used[index]));
                        self.now += self.list_ns;
                        self.schedule.listed(index, began, self.now, self.list_ns, true);
                    }
                }
            }
        }

        fn lists(&self) -> usize {
            self.listed.iter().map(Vec::len).sum()
        }
    }

    #[test]
    fn memory_comes_at_its_rate_and_lists_each_second() {
        for hz in [1, 10, 100] {
            let settings = NvmlSettings { memory_hz: hz, ..NvmlSettings::default() };
            let mut machine = machine(8, &settings, 12 * US, 100 * US);
            machine.run(20 * SECOND);
            assert!(machine.memory_turns.len().abs_diff(20 * hz as usize) <= 1, "{hz}");
            for listed in &machine.listed {
                assert!((20..=21).contains(&listed.len()), "{hz}: {listed:?}");
            }
        }
    }

    #[test]
    fn cheap_lists_of_all_devices_come_in_one_go() {
        let mut machine = machine(8, &NvmlSettings::default(), US, 5 * US);
        machine.run(10 * MS);
        assert_eq!(machine.lists(), 8);
        let last = machine.listed.iter().flatten().max().copied().expect("eight");
        assert!(last - 1_000 * SECOND < MS);
    }

    #[test]
    fn lists_that_cost_little_cost_no_wake_up_of_their_own() {
        for (hz, interval_ms) in [(10, 100), (10, 1000), (100, 1000), (7, 1000)] {
            let settings = NvmlSettings {
                memory_hz: hz,
                list_interval: Duration::from_millis(interval_ms),
                list_budget: 1.0,
                ..NvmlSettings::default()
            };
            let mut machine = machine(8, &settings, US, 5 * US);
            machine.run(20 * SECOND);
            assert!(machine.waits.abs_diff(20 * hz as usize) <= 2, "{hz}, {interval_ms}: {}", machine.waits);
            let expected = 20_000 / interval_ms as usize;
            for listed in &machine.listed {
                assert!(listed.len() >= expected && listed.len() <= expected * 8 / 7 + 1, "{listed:?}");
            }
        }
    }

    #[test]
    fn dear_lists_keep_to_the_budget_and_every_device_gets_its_turn() {
        for list_ns in [2 * MS, 4 * MS + 500 * US, 20 * MS, 200 * MS] {
            let mut machine = machine(8, &NvmlSettings::default(), 12 * US, list_ns);
            let seconds = 100;
            machine.run(seconds * SECOND);
            let share = (machine.lists() as u64 * list_ns) as f64 / (seconds * SECOND) as f64;
            assert!(share <= 0.02 + (list_ns + MS) as f64 / (seconds * SECOND) as f64, "{list_ns}: {share}");
            assert!(share >= 0.015, "{list_ns}: the budget is there to be used: {share}");
            let (least, most) = machine.listed.iter().fold((usize::MAX, 0), |(least, most), listed| {
                (least.min(listed.len()), most.max(listed.len()))
            });
            assert!(most - least <= 1, "{list_ns}: {least} to {most}");
            assert!(list_ns == 2 * MS || machine.schedule.deferred > 0);
            // At most one list directly follows another one.
            let mut all: Vec<u64> = machine.listed.concat();
            all.sort_unstable();
            let close = all.windows(2).filter(|pair| pair[1] - pair[0] < 2 * list_ns).count();
            assert!(close <= 1, "{list_ns}: {close}");
        }
    }

    #[test]
    fn a_device_that_moves_is_listed_sooner_within_the_budget() {
        let mut machine = machine(2, &NvmlSettings::default(), 12 * US, MS);
        machine.run(3 * SECOND);
        let before = machine.listed[0].len();
        machine.used[0] += 1 << 20;
        machine.run(500 * MS);
        assert!(machine.listed[0].len() - before <= 1, "less than the threshold");
        machine.used[0] += 8 << 20;
        let moved = machine.now;
        machine.run(350 * MS);
        let listed = machine.listed[0].iter().find(|&&time| time >= moved).expect("listed");
        assert!(listed - moved <= 310 * MS, "{}", listed - moved);
        // A device whose memory always changes does not starve the other.
        let (mut first, second) = (machine.listed[0].len(), machine.listed[1].len());
        for _ in 0..100 {
            machine.used[0] += 8 << 20;
            machine.run(100 * MS);
        }
        first = machine.listed[0].len() - first;
        assert!((30..=51).contains(&first), "{first}");
        assert!(machine.listed[1].len() - second >= 9);
    }

    #[test]
    fn who_asks_is_served_soon() {
        let mut machine = machine(8, &NvmlSettings::default(), 12 * US, MS);
        machine.run(5 * SECOND + 500 * MS);
        let asked = machine.now;
        machine.schedule.request(3, asked);
        machine.run(100 * MS);
        let listed = machine.listed[3].iter().find(|&&time| time >= asked).expect("listed");
        assert!(listed - asked <= 60 * MS, "{}", listed - asked);
    }

    #[test]
    fn a_context_that_is_made_has_a_list_before_and_after_it() {
        for list_ns in [50 * US, MS, 4 * MS + 500 * US] {
            let mut machine = machine(8, &NvmlSettings::default(), 12 * US, list_ns);
            machine.run(20 * SECOND);
            for made_ns in [2 * MS, 15 * MS, 150 * MS] {
                let creating = machine.now;
                machine.schedule.request(3, creating);
                machine.run(made_ns);
                let created = machine.now;
                machine.schedule.request(3, created);
                machine.run(600 * MS);
                let soon = |asked: u64| {
                    let listed = machine.listed[3].iter().find(|&&time| time >= asked).expect("listed");
                    listed - asked
                };
                assert!(soon(creating) <= 8 * list_ns + MS, "{list_ns}, {made_ns}: {}", soon(creating));
                assert!(soon(created) <= 20 * MS, "{list_ns}, {made_ns}: {}", soon(created));
                let both =
                    machine.listed[3].iter().filter(|&&time| time >= creating && time <= created + 20 * MS);
                assert!(both.count() >= 2, "{list_ns}, {made_ns}");
                machine.run(10 * SECOND);
            }
        }
    }

    #[test]
    fn who_asks_all_the_time_stays_within_the_budget_and_starves_nobody() {
        let mut machine = machine(4, &NvmlSettings::default(), 12 * US, 2 * MS);
        let seconds = 100;
        for _ in 0..seconds * 50 {
            machine.schedule.request(0, machine.now);
            machine.run(20 * MS);
        }
        let share = (machine.lists() as u64 * 2 * MS) as f64 / (seconds * SECOND) as f64;
        assert!(share <= 0.021, "{share}");
        for listed in &machine.listed {
            let longest = listed.windows(2).map(|pair| pair[1] - pair[0]).max().expect("many");
            assert!(listed.len() >= 15 && longest <= 8 * SECOND, "{} {longest}", listed.len());
        }
    }

    #[test]
    fn failing_calls_are_tried_more_and_more_slowly_and_others_go_on() {
        let mut schedule = Schedule::new(&NvmlSettings::default(), 2, SECOND);
        let (mut now, mut failed, mut fine, mut lists) = (SECOND, 0, 0, 0);
        while now < 301 * SECOND {
            match schedule.next(now) {
                NextRead::Wait(until) => now = until,
                NextRead::Memory => {
                    for index in 0..2 {
                        if schedule.wants_memory(index, now) {
                            schedule.memory_read(index, now, (index == 1).then_some(5));
                            (failed, fine) = (failed + u32::from(index == 0), fine + u32::from(index == 1));
                        }
                    }
                }
                NextRead::List(index) => {
                    lists += u32::from(index == 0);
                    schedule.listed(index, now, now + US, US, index == 1);
                    now += US;
                }
            }
        }
        assert!((9..=12).contains(&failed), "1, 2, 4 ... 60 s: {failed}");
        assert!((9..=12).contains(&lists), "{lists}");
        assert!(fine >= 2990, "{fine}");
    }

    #[test]
    fn suspended_devices_are_left_alone() {
        let mut machine = machine(2, &NvmlSettings::default(), US, US);
        machine.schedule.set_skip(0, Skip::All);
        machine.run(29 * SECOND);
        assert_eq!((machine.listed[0].len(), machine.listed[1].len()), (0, 29));
        assert!(!machine.schedule.wants_memory(0, machine.now));
        machine.schedule.set_skip(0, Skip::Nothing);
        machine.run(3 * SECOND);
        assert!(!machine.listed[0].is_empty());
        let listed = machine.listed[0].len();
        machine.schedule.set_skip(0, Skip::Lists);
        machine.run(10 * SECOND);
        assert_eq!(machine.listed[0].len(), listed);
        machine.now += SECOND;
        assert!(machine.schedule.wants_memory(0, machine.now), "its memory goes on");
        machine.schedule.set_skip(0, Skip::Nothing);
        machine.run(2 * SECOND);
        assert!(machine.listed[0].len() > listed);
    }

    #[test]
    fn slow_memory_calls_do_not_take_all_the_time() {
        let settings = NvmlSettings { memory_hz: 100, ..NvmlSettings::default() };
        let mut machine = machine(8, &settings, 8 * MS, US);
        machine.run(10 * SECOND);
        let busy = machine.memory_turns.len() as u64 * 8 * 8 * MS;
        assert!(busy <= 22 * SECOND / 10, "{busy}");
        let interval = Duration::from_nanos(machine.memory_turns[5] - machine.memory_turns[4]);
        assert!(interval >= Duration::from_millis(310), "{interval:?}");
    }
}
