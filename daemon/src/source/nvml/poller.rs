//! The child that alone opens NVML: `gpumemd nvml-poller`. One thread; commands on standard input, frames on
//! standard output. It ends with its parent.
//!
//! ```text
//! list UUID                 a list of this device soon
//! skip UUID SECONDS         leave this device alone; 0: no longer
//! skip-lists UUID SECONDS   the same for its lists
//! skip-index N SECONDS      the same for the GPU with this NVML index
//! release SECONDS           close NVML, open it again after that
//! resume                    open it again now
//! quit                      end
//! ```

use super::Settings;
use super::beacon::{Doing, Lamp};
use super::library::{Avoid, Gpus, Library, parse_uuid};
use super::raw::List;
use super::session::{Next, Outlet, Session, Totals, now_ns};
use gpumem_ledger::DeviceName;
use gpumem_wire::{Body, Stamp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;
/// A library that cannot be opened is tried again after this, doubled each time.
const RETRY_NS: u64 = SECOND;
const RETRY_MOST_NS: u64 = 30 * SECOND;
/// Memory samples may wait for each other that long on their way out.
const FLUSH_NS: u64 = 50_000_000;
/// Things done before what was found is written and orders are read.
const ACTS_AT_ONCE: u32 = 64;
/// Longest sleep: so often totals are told, and the parent hears something.
const PULSE_NS: u64 = SECOND;

/// What the child is told at its start, as arguments.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Arguments {
    /// How to read.
    pub settings: Settings,
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
    /// Only see whether this one answers, then end.
    pub probe: Option<Target>,
}

/// What is looked at to see whether it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// A device.
    Name(DeviceName),
    /// Whatever is at this NVML index.
    Index(u16),
}

impl Arguments {
    /// As they are handed to the child, `nvml-poller` first.
    pub fn to_args(&self) -> Vec<OsString> {
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
    pub fn parse(args: impl IntoIterator<Item = OsString>) -> Option<Arguments> {
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

/// What a line on standard input asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    List(DeviceName),
    Skip(DeviceName, u64),
    SkipLists(DeviceName, u64),
    SkipIndex(u16, u64),
    Release(u64),
    Resume,
    Quit,
}

impl Order {
    fn parse(line: &str) -> Option<Order> {
        let mut words = line.split_ascii_whitespace();
        let order = match words.next()? {
            "list" => Order::List(parse_uuid(words.next()?)?),
            "skip" => Order::Skip(parse_uuid(words.next()?)?, words.next()?.parse().ok()?),
            "skip-lists" => Order::SkipLists(parse_uuid(words.next()?)?, words.next()?.parse().ok()?),
            "skip-index" => Order::SkipIndex(words.next()?.parse().ok()?, words.next()?.parse().ok()?),
            "release" => Order::Release(words.next()?.parse().ok()?),
            "resume" => Order::Resume,
            "quit" => Order::Quit,
            _ => return None,
        };
        words.next().is_none().then_some(order)
    }
}

/// Lines of standard input, as far as they have come.
#[derive(Debug, Default)]
struct Orders {
    pending: Vec<u8>,
}

impl Orders {
    /// Waits for a line until then. `Err`: there will be no more.
    fn wait(&mut self, until_ns: u64) -> io::Result<Vec<Order>> {
        let left = until_ns.saturating_sub(now_ns());
        let timeout = Timespec { tv_sec: (left / SECOND) as i64, tv_nsec: (left % SECOND) as i64 };
        let stdin = io::stdin();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let mut bytes = [0; 4096];
        match rustix::io::read(stdin.as_fd(), &mut bytes) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => Ok(self.take(&bytes[..count])),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }

    fn take(&mut self, bytes: &[u8]) -> Vec<Order> {
        self.pending.extend_from_slice(bytes);
        let Some(end) = self.pending.iter().rposition(|&byte| byte == b'\n') else {
            self.pending.truncate(4096); // no order is that long
            return Vec::new();
        };
        let lines: Vec<u8> = self.pending.drain(..=end).collect();
        lines
            .split(|&byte| byte == b'\n')
            .filter_map(|line| Order::parse(std::str::from_utf8(line).ok()?))
            .collect()
    }
}

/// Standard output without the buffer of the standard library, which would cut frames at newlines.
struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(io::stdout().as_fd(), bytes)?)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The library as it is now.
enum State {
    Closed { retry_ns: u64, wait_ns: u64 },
    Released { until_ns: u64 },
    Open(Box<Session>),
}

/// What opens a library: told what to avoid, and where to say what it touches.
pub type Open = dyn FnMut(&Avoid, &mut dyn FnMut(u16)) -> Result<Box<dyn Gpus>, String>;

/// The loop's state, apart from how it is driven.
struct Poller {
    arguments: Arguments,
    open: Box<Open>,
    state: State,
    out: Outlet,
    totals: Totals,
    told_totals: Totals,
    told: Option<(bool, String)>,
    avoid: Vec<(DeviceName, u64)>,
    avoid_lists: Vec<(DeviceName, u64)>,
    avoid_index: Vec<(u16, u64)>,
    flushed_ns: u64,
    pulse_ns: u64,
    /// There is something to say that must not wait.
    is_urgent: bool,
}

/// The subcommand: never returns before its parent is gone or says so.
pub fn poller_main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    // A parent that was killed cannot close anything; one that died before this line closed standard input.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let _ = rustix::thread::set_name(c"gpumemd-nvml");
    let Some(arguments) = Arguments::parse(args) else {
        eprintln!("gpumemd nvml-poller: started by gpumemd itself; the arguments are not for people");
        return ExitCode::from(2);
    };
    let beacon = arguments.beacon.and_then(|number| Lamp::inherited(number).ok());
    if let Some(target) = arguments.probe {
        return probe(&arguments, target, beacon);
    }
    let settings = arguments.settings.clone();
    let open = move |avoid: &Avoid, enter: &mut dyn FnMut(u16)| {
        Library::open(settings.library.as_deref(), settings.trust_pids, avoid, enter)
            .map(|library| Box::new(library) as Box<dyn Gpus>)
    };
    let mut poller = Poller::new(arguments, Box::new(open), Outlet::new(Box::new(Stdout), beacon));
    let mut orders = Orders::default();
    while let Ok(until) = poller.step() {
        match orders.wait(until) {
            Ok(orders) => {
                if !orders.into_iter().all(|order| poller.obey(order)) {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    poller.close();
    ExitCode::SUCCESS
}

/// Makes the calls that did not return for one device, and says by the beacon which one it is in. Ends well if all of
/// them return, whatever they say.
fn probe(arguments: &Arguments, target: Target, mut lamp: Option<Lamp>) -> ExitCode {
    let mut doing = |what| {
        if let Some(lamp) = &mut lamp {
            lamp.set(what);
        }
    };
    doing(Doing::Library);
    let avoid = Avoid { indices: arguments.skip_index.iter().map(|&(index, _)| index).collect() };
    let settings = &arguments.settings;
    let enter = &mut |index| doing(Doing::Index(index));
    let Ok(mut library) = Library::open(settings.library.as_deref(), settings.trust_pids, &avoid, enter)
    else {
        return ExitCode::FAILURE;
    };
    for place in 0..library.devices().len() {
        let device = &library.devices()[place];
        let is_meant = match target {
            Target::Name(name) => device.name == name,
            Target::Index(index) => device.index == index,
        };
        if is_meant {
            doing(Doing::Device(place as u8));
            let _ = library.memory(place);
            doing(Doing::Lists(place as u8));
            let mut charges = Vec::new();
            for list in List::ALL {
                let _ = library.list(place, list, &mut charges);
            }
        }
    }
    doing(Doing::Library);
    ExitCode::SUCCESS
}

impl Poller {
    fn new(arguments: Arguments, open: Box<Open>, out: Outlet) -> Poller {
        let now = now_ns();
        let until = |seconds: u64| now.saturating_add(seconds.saturating_mul(SECOND));
        let state = match arguments.released_s {
            0 => State::Closed { retry_ns: now, wait_ns: RETRY_NS },
            seconds => State::Released { until_ns: until(seconds) },
        };
        let avoid = arguments.skip.iter().map(|&(name, seconds)| (name, until(seconds))).collect();
        let avoid_lists =
            arguments.skip_lists.iter().map(|&(name, seconds)| (name, until(seconds))).collect();
        let avoid_index =
            arguments.skip_index.iter().map(|&(index, seconds)| (index, until(seconds))).collect();
        Poller {
            arguments,
            open,
            state,
            out,
            totals: Totals::default(),
            told_totals: Totals::default(),
            told: None,
            avoid,
            avoid_lists,
            avoid_index,
            flushed_ns: 0,
            pulse_ns: now,
            is_urgent: false,
        }
    }

    /// Does what is due, writes it, and returns until when there is nothing to do.
    fn step(&mut self) -> io::Result<u64> {
        let mut wait = self.act()?;
        // What is due together is written together; but somebody may be waiting to be heard.
        for _ in 0..ACTS_AT_ONCE {
            if wait > now_ns() {
                break;
            }
            wait = self.act()?;
        }
        let now = now_ns();
        if self.is_urgent || now.saturating_sub(self.flushed_ns) >= FLUSH_NS {
            self.out.flush()?;
            (self.flushed_ns, self.is_urgent) = (now, false);
        } else if wait > now {
            self.out.doing(Doing::Nothing);
            if !self.out.frames.is_empty() {
                wait = wait.min(self.flushed_ns + FLUSH_NS);
            }
        }
        Ok(wait.min(self.pulse_ns))
    }

    /// Does one thing and returns until when there is nothing to do.
    fn act(&mut self) -> io::Result<u64> {
        let now = now_ns();
        if now >= self.pulse_ns {
            self.pulse_ns = now + PULSE_NS;
            self.tell_totals(now);
            self.take_back_avoided(now);
            self.is_urgent = true;
        }
        match &mut self.state {
            State::Closed { retry_ns, .. } if *retry_ns > now => Ok(*retry_ns),
            State::Released { until_ns } if *until_ns > now => {
                let until = *until_ns;
                if self.told.as_ref().is_none_or(|(_, told)| !told.starts_with("nvml: released")) {
                    let seconds = (until - now).div_ceil(SECOND);
                    self.tell(false, format!("nvml: released for {seconds} s"));
                }
                Ok(until)
            }
            State::Closed { .. } | State::Released { .. } => {
                self.open();
                Ok(now)
            }
            State::Open(session) => {
                let before = (self.totals.list_calls, self.totals.failed_calls);
                let next = session.turn(&mut self.totals, &mut self.out)?;
                self.is_urgent |= before != (self.totals.list_calls, self.totals.failed_calls);
                match next {
                    Next::Again => Ok(now),
                    Next::Wait(until) => Ok(until),
                    Next::Reopen(code) => {
                        self.close();
                        if let Some(code) = code {
                            let retry_ns = now + RETRY_NS;
                            self.state = State::Closed { retry_ns, wait_ns: RETRY_NS };
                            self.tell(false, format!("nvml: {code}"));
                        }
                        Ok(now)
                    }
                }
            }
        }
    }

    fn open(&mut self) {
        let now = now_ns();
        let avoid = Avoid {
            indices: self
                .avoid_index
                .iter()
                .filter(|(_, until)| *until > now)
                .map(|&(index, _)| index)
                .collect(),
        };
        self.out.doing(Doing::Library);
        let out = &mut self.out;
        match (self.open)(&avoid, &mut |index| out.doing(Doing::Index(index))) {
            Ok(gpus) => {
                let mut session = Session::begin(gpus, &self.arguments.settings, &self.avoid, &mut self.out);
                for &(name, until) in &self.avoid_lists {
                    session.skip_lists(name, until);
                }
                session.stay_until(self.avoid_index.iter().map(|&(_, until)| until).max().unwrap_or(0));
                self.tell(true, format!("nvml: {}", session.description()));
                self.state = State::Open(Box::new(session));
            }
            Err(reason) => {
                self.tell(false, format!("nvml: {reason}"));
                let wait_ns = match self.state {
                    State::Closed { wait_ns, .. } => wait_ns,
                    _ => RETRY_NS,
                };
                self.state = State::Closed {
                    retry_ns: now.saturating_add(wait_ns),
                    wait_ns: wait_ns.saturating_mul(2).min(RETRY_MOST_NS),
                };
            }
        }
    }

    /// Shuts NVML down; the library is unloaded with it.
    fn close(&mut self) {
        self.out.doing(Doing::Library);
        self.state = State::Closed { retry_ns: now_ns(), wait_ns: RETRY_NS };
        self.out.doing(Doing::Nothing);
    }

    /// Devices that were not to be touched, and may be now: they are found by opening again.
    fn take_back_avoided(&mut self, now: u64) {
        let count = self.avoid_index.len();
        self.avoid_index.retain(|&(_, until)| until > now);
        self.avoid.retain(|&(_, until)| until > now);
        self.avoid_lists.retain(|&(_, until)| until > now);
        if self.avoid_index.len() < count && matches!(self.state, State::Open(_)) {
            self.close();
        }
    }

    /// Says how the source is, if that has changed.
    fn tell(&mut self, up: bool, reason: String) {
        let said = (up, reason);
        if self.told.as_ref() != Some(&said) {
            let stamp = Stamp { time_ns: now_ns(), ..Stamp::default() };
            self.out.say(stamp, Body::Source { up, reason: &said.1 });
            self.told = Some(said);
            self.is_urgent = true;
        }
    }

    fn tell_totals(&mut self, now: u64) {
        let told = self.told_totals.values();
        for (place, (value, told)) in self.totals.values().into_iter().zip(told).enumerate() {
            if value != told {
                let stamp = Stamp { time_ns: now, tag: place as u32 + 1, ..Stamp::default() };
                self.out.say(stamp, Body::Counter { value: value as i64 });
            }
        }
        self.told_totals = self.totals;
    }

    /// Whether to go on.
    fn obey(&mut self, order: Order) -> bool {
        let until = |seconds: u64| now_ns().saturating_add(seconds.saturating_mul(SECOND));
        match (order, &mut self.state) {
            (Order::Quit, _) => return false,
            (Order::List(name), State::Open(session)) => session.ask(name),
            (Order::SkipIndex(index, seconds), _) => {
                // Opened anew by the next pulse, when none of that is left.
                self.avoid_index
                    .iter_mut()
                    .filter(|(at, _)| *at == index)
                    .for_each(|at| at.1 = until(seconds));
            }
            (Order::SkipLists(name, seconds), state) => {
                self.avoid_lists.retain(|(avoided, _)| *avoided != name);
                self.avoid_lists.push((name, until(seconds)));
                if let State::Open(session) = state {
                    session.skip_lists(name, until(seconds));
                }
            }
            (Order::Skip(name, seconds), state) => {
                self.avoid.retain(|(avoided, _)| *avoided != name);
                self.avoid.push((name, until(seconds)));
                if let State::Open(session) = state {
                    session.skip(name, until(seconds));
                }
            }
            (Order::Release(seconds), _) => {
                self.close();
                self.told = None;
                self.state = State::Released { until_ns: until(seconds) };
            }
            (Order::Resume, State::Released { until_ns }) => *until_ns = 0,
            (Order::List(_) | Order::Resume, _) => {}
        }
        true
    }
}

#[cfg(test)]
mod tests;
