use super::*;
use crate::config::NvmlSettings;
use crate::source::nvml::schedule::Skip;
use crate::source::nvml::session::tests::{FakeGpus, said};
use gpumem_ledger::DeviceName;
use std::cell::RefCell;
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

/// A sink whose content can be read.
#[derive(Clone, Default)]
struct Pipe(Rc<RefCell<Vec<u8>>>);

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Pipe {
    fn said(&self) -> Vec<String> {
        said(&std::mem::take(&mut *self.0.borrow_mut()))
    }
}

/// Returns a poller whose library opens according to `opens`.
fn poller(opens: &Rc<RefCell<Result<FakeGpus, String>>>, arguments: Arguments) -> (Poller, Pipe) {
    let pipe = Pipe::default();
    let opens = Rc::clone(opens);
    let open = move |_: &Arguments, _: &mut dyn FnMut(u16)| {
        let opened = opens.borrow().clone();
        opened.map(|gpus| Box::new(gpus) as Box<dyn Gpus>).map_err(|reason| (reason, 9))
    };
    (Poller::new(arguments, Box::new(open), FrameWriter::new(Box::new(pipe.clone()), None)), pipe)
}

fn wait_is_over(poller: &mut Poller) {
    match &mut poller.state {
        LibraryState::Closed { retry_ns, .. } => *retry_ns = 0,
        LibraryState::Released { until_ns } => *until_ns = 0,
        LibraryState::Open(_) => {}
    }
}

#[test]
fn arguments_are_read_as_they_were_written() {
    let settings = NvmlSettings {
        library: Some(PathBuf::from("/opt/a b/libnvidia-ml.so.1")),
        memory_hz: 100,
        list_interval: Duration::from_millis(250),
        list_budget: 0.05,
        list_threshold_bytes: 77,
        extra_interval: Duration::from_secs(3),
        trust_pids: true,
        ..NvmlSettings::default()
    };
    let name = DeviceName::Mig([7; 16]);
    let arguments = Arguments {
        settings,
        call_state: Some(5),
        skip: vec![(Uuid(name), Skip::Lists)],
        probe: Some(Target { name: Some(Uuid(name)), index: 1 }),
        skip_index: vec![3],
        released_s: 4,
        no_events: true,
        totals: NvmlCalls { list_calls: 5, deferred: 7, ..NvmlCalls::default() },
        wait_ms: 2000,
    };
    let words = arguments.to_args();
    assert_eq!(words[0], "nvml-poller");
    assert_eq!(Arguments::parse(words.into_iter().skip(1)), Some(arguments));
    assert_eq!(Arguments::parse([OsString::from("{}")]), None);
    assert_eq!(Arguments::parse([OsString::from("--memory-hz"), OsString::from("1")]), None);
}

#[test]
fn orders_are_lines_and_nothing_else() {
    let name = Uuid(DeviceName::Gpu([0x11; 16]));
    let mut orders = CommandReader::default();
    assert_eq!(orders.take(b"{\"Rele"), []);
    assert_eq!(orders.take(b"ase\":60}\n{\"List\":\"GPU-1"), [Command::Release(60)]);
    let rest = &name.0.to_string()["GPU-1".len()..];
    let rest = format!("{rest}\"}}\n\"Quit\"\n{{\"List\":\"nonsense\"}}\n\"Release\"\n\"Resume\" now\n\n");
    assert_eq!(orders.take(rest.as_bytes()), [Command::List(name), Command::Quit]);
    orders.take(&[b'x'; 10_000]);
    assert!(orders.pending.len() <= 4096);
}

#[test]
fn a_driver_that_is_absent_is_waited_for() {
    let opens = Rc::new(RefCell::new(Err("no driver".to_owned())));
    let (mut poller, pipe) = poller(&opens, Arguments::default());
    poller.step().expect("written");
    assert_eq!(pipe.said(), ["source 255 false nvml: no driver"]);
    // Opening the library is retried after 1, 2, 4 ... 30 s, and the failure is reported once.
    for wait in [1, 2, 4, 8, 16, 30, 30] {
        let retry_ns = if let LibraryState::Closed { retry_ns, .. } = poller.state { retry_ns } else { 0 };
        let left = retry_ns.saturating_sub(now_ns());
        assert!(left <= wait * SECOND && left > wait * SECOND - SECOND, "{wait}: {left}");
        wait_is_over(&mut poller);
        poller.step().expect("written");
        assert_eq!(pipe.said(), Vec::<String>::new());
    }
    *opens.borrow_mut() = Ok(FakeGpus::new(1));
    wait_is_over(&mut poller);
    poller.step().expect("written");
    let said = pipe.said();
    assert_eq!(said[..2], ["gpu 0 model Some(1000)", "source 255 true nvml: a variable, 1 device"]);
    assert!(said.contains(&"end 1 0".to_owned()));
}

#[test]
fn a_driver_that_goes_is_waited_for_too() {
    let gpus = FakeGpus::new(1);
    let opens = Rc::new(RefCell::new(Ok(gpus.clone())));
    let (mut poller, pipe) = poller(&opens, Arguments::default());
    poller.step().expect("written");
    pipe.said();
    gpus.answers.borrow_mut()[0].memory = Err(crate::source::nvml::answer::Code::DRIVER_NOT_LOADED);
    let deadline = now_ns() + 10 * SECOND;
    while matches!(poller.state, LibraryState::Open(_)) && now_ns() < deadline {
        let until = poller.step().expect("written");
        std::thread::sleep(Duration::from_nanos(until.saturating_sub(now_ns())));
    }
    assert!(matches!(poller.state, LibraryState::Closed { .. }));
    let said = pipe.said();
    assert_eq!(
        said.last().map(String::as_str),
        Some("source 255 false nvml: the driver is not loaded"),
        "{said:?}"
    );
}

#[test]
fn released_is_closed_until_the_time_is_over_or_somebody_resumes() {
    let gpus = FakeGpus::new(1);
    let opens = Rc::new(RefCell::new(Ok(gpus.clone())));
    let (mut poller, pipe) = poller(&opens, Arguments::default());
    poller.step().expect("written");
    assert!(matches!(poller.state, LibraryState::Open(_)));
    let held = Rc::strong_count(&gpus.answers);
    assert!(poller.execute(Command::Release(60)));
    assert_eq!(Rc::strong_count(&gpus.answers), held - 1, "the library is closed at once");
    pipe.said();
    poller.step().expect("written");
    assert_eq!(pipe.said(), ["source 255 false nvml: released for 60 s: on request"]);
    poller.step().expect("written");
    assert!(matches!(poller.state, LibraryState::Released { .. }));
    assert!(poller.execute(Command::Resume));
    poller.step().expect("written");
    assert!(matches!(poller.state, LibraryState::Open(_)));
    assert!(!poller.execute(Command::Quit));
    // NVML is also closed without a command, because unbinding a GPU from the driver waits until NVML is closed.
    pipe.said();
    gpus.unbinding.set(Some(0x100));
    while !matches!(poller.state, LibraryState::Released { .. }) {
        poller.step().expect("written");
    }
    let said = pipe.said();
    let last = "source 255 false nvml: released for 60 s: the driver is being unbound from GPU 0x100";
    assert_eq!(said.last().map(String::as_str), Some(last), "{said:?}");
    // A replacement of a released poller is released too.
    let (mut next, _) = self::poller(&opens, Arguments { released_s: 30, ..Arguments::default() });
    next.step().expect("written");
    assert!(matches!(next.state, LibraryState::Released { .. }));
}

#[test]
fn totals_are_told_as_they_grow() {
    let opens = Rc::new(RefCell::new(Ok(FakeGpus::new(1))));
    let (mut poller, pipe) = poller(&opens, Arguments::default());
    while poller.step().expect("written") <= now_ns() {}
    poller.pulse_ns = 0;
    poller.step().expect("written");
    let said = pipe.said();
    assert!(said.iter().any(|line| line.starts_with("Counter")), "{said:?}");
    let told = poller.written_totals;
    assert!(told.memory_calls >= 2 && told.list_calls >= 3 && told.failed_calls == 0, "{told:?}");
}
