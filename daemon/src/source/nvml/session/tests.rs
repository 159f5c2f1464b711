use super::*;
use crate::config::NvmlSettings;
use crate::source::nvml::answer::{EventKind, MemoryLimit};
use crate::source::nvml::library::{Device, Inventory};
use gpumem_wire::Record;
use gpumem_wire::frame::records;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Answers of a driver for one device.
#[derive(Clone)]
pub(crate) struct Answers {
    pub memory: Result<Memory, Code>,
    pub lists: [Result<Vec<Charge>, Code>; 3],
}

/// Pids and bytes.
type Peaks = Vec<(u32, u64)>;

/// A simulated driver.
#[derive(Clone)]
pub(crate) struct FakeGpus {
    pub answers: Rc<RefCell<Vec<Answers>>>,
    pub calls: Rc<RefCell<Vec<(usize, List)>>>,
    /// Accounted peaks by pid; `None`: accounting is off.
    pub accounted: Rc<RefCell<Option<Peaks>>>,
    pub slow_accounting: Rc<std::cell::Cell<Duration>>,
    pub events: Rc<RefCell<Vec<(u16, Event)>>>,
    pub unbinding: Rc<Cell<Option<u32>>>,
    inventory: Inventory,
}

pub(crate) fn charge(pid: u32, bytes: u64) -> Charge {
    Charge { pid, bytes: Some(bytes), instance: None, protected_bytes: None }
}

impl FakeGpus {
    pub(crate) fn new(count: u8) -> FakeGpus {
        let memory = Memory {
            total_bytes: 1000,
            free_bytes: 600,
            used_bytes: 300,
            reserved_bytes: Some(100),
            is_unified: false,
        };
        let answers = Answers { memory: Ok(memory), lists: [Ok(Vec::new()), Ok(Vec::new()), Ok(Vec::new())] };
        let device = |index: u8| Device {
            name: DeviceName::Gpu([index; 16]),
            index: index.into(),
            model: "model".to_owned(),
            instance: None,
            hides_instances: false,
            facts: Vec::new(),
        };
        FakeGpus {
            answers: Rc::new(RefCell::new(vec![answers; count.into()])),
            calls: Rc::default(),
            accounted: Rc::default(),
            slow_accounting: Rc::default(),
            events: Rc::default(),
            unbinding: Rc::default(),
            inventory: Inventory {
                devices: (0..count).map(device).collect(),
                unnamed: Vec::new(),
                pids: Pids::Trusted,
                facts: Vec::new(),
                description: "a variable".to_owned(),
            },
        }
    }
}

impl Gpus for FakeGpus {
    fn inventory(&self) -> &Inventory {
        &self.inventory
    }
    fn memory(&mut self, device: usize) -> Result<Memory, Code> {
        self.answers.borrow()[device].memory
    }
    fn list(&mut self, device: usize, list: List, charges: &mut Vec<Charge>) -> Result<(), Code> {
        self.calls.borrow_mut().push((device, list));
        charges.extend(self.answers.borrow()[device].lists[list as usize].clone()?);
        Ok(())
    }
    fn accounted_peak(&mut self, _device: usize, pid: u32) -> Result<u64, Code> {
        std::thread::sleep(self.slow_accounting.get());
        let accounted = self.accounted.borrow();
        let found = accounted.iter().flatten().find(|(of, _)| *of == pid);
        found.map(|&(_, peak)| peak).ok_or(Code::NOT_FOUND)
    }
    fn is_accounting(&mut self, _device: usize) -> bool {
        self.accounted.borrow().is_some()
    }
    fn events(&mut self, found: &mut Vec<(u16, Event)>) {
        found.append(&mut self.events.borrow_mut());
    }
    fn unbinding(&mut self) -> Option<u32> {
        self.unbinding.take()
    }
    fn memory_limit(&mut self, _device: usize, _group: &str) -> Result<MemoryLimit, Code> {
        Err(Code::FUNCTION_NOT_FOUND)
    }
    fn load(&mut self, _device: usize) -> [Option<u32>; 2] {
        [None; 2]
    }
    fn has_changed(&mut self, _enter: &mut dyn FnMut(u16)) -> bool {
        false
    }
}

struct Run {
    gpus: FakeGpus,
    session: Session,
    out: FrameWriter,
}

fn run(gpus: &FakeGpus) -> Run {
    let mut out = FrameWriter::new(Box::new(io::sink()), None);
    let mut session = Session::begin(Box::new(gpus.clone()), &Arguments::default(), &mut out);
    session.devices.iter_mut().for_each(|device| device.written = Some(None));
    out.frames.clear();
    Run { gpus: gpus.clone(), session, out }
}

impl Run {
    /// Makes one reading and returns its frames as lines.
    fn reading(&mut self, device: usize) -> Vec<String> {
        // Prevents a flush during the reading, so that all frames are here at the end.
        self.session.schedule.listed(device, 1, 1, 0, true);
        self.session.read_device(device, &mut self.out).expect("written");
        said(&std::mem::take(&mut self.out.frames))
    }
    fn set(&self, device: usize, list: List, answer: Result<Vec<Charge>, Code>) {
        self.gpus.answers.borrow_mut()[device].lists[list as usize] = answer;
    }
}

/// Returns frames as short lines.
pub(crate) fn said(frames: &[u8]) -> Vec<String> {
    let line = |record: Record<'_>| match record.body {
        Body::SampleBegin { number } => format!("begin {number} on {}", record.stamp.device),
        Body::DeviceSample { used_bytes, free_bytes, reserved_bytes, unified } => {
            let unified = if unified { " unified" } else { "" };
            format!("device {used_bytes} {free_bytes} {:?}{unified}", reserved_bytes.0)
        }
        Body::ProcessSample { used_bytes: Reading(Some(bytes)), lists, .. } => {
            format!("pid {} {bytes} lists {lists}", record.stamp.thread)
        }
        Body::ProcessSample { absence, lists, start_ticks, .. } => {
            let stranger = if start_ticks == NOT_OUR_PID { " stranger" } else { "" };
            format!("pid {} {absence:?} lists {lists}{stranger}", record.stamp.thread)
        }
        Body::SampleEnd { number, result } => format!("end {number} {result}"),
        Body::Source { up, reason } => format!("source {} {up} {reason}", record.stamp.device),
        Body::Device { ordinal, name, total_bytes, .. } => {
            format!("gpu {ordinal} {name} {:?}", total_bytes.0)
        }
        other => format!("{other:?}"),
    };
    let lines = records(frames).map(|record| line(record.expect("a frame").expect("a record")));
    lines.filter(|line| !line.starts_with("ProcessFacts")).collect()
}

#[test]
fn a_reading_is_memory_lists_memory() {
    let gpus = FakeGpus::new(1);
    let mut run = run(&gpus);
    run.set(0, List::Compute, Ok(vec![charge(20, 7), charge(10, 5)]));
    assert_eq!(
        run.reading(0),
        [
            "begin 1 on 0",
            "device 300 600 Some(100)",
            "pid 10 5 lists 1",
            "pid 20 7 lists 1",
            "device 300 600 Some(100)",
            "end 1 0"
        ]
    );
    assert_eq!((run.out.totals.memory_calls, run.out.totals.list_calls), (2, 3));
}

#[test]
fn a_reading_names_the_processes_that_have_changed() {
    let gpus = FakeGpus::new(1);
    let mut run = run(&gpus);
    let mut rows = |list: Result<&[(u32, u64)], Code>| -> Vec<String> {
        let list = list.map(|list| list.iter().map(|&(pid, bytes)| charge(pid, bytes)).collect());
        run.set(0, List::Compute, list);
        let lines = run.reading(0).into_iter();
        lines.filter(|line| line.starts_with("pid") || line.starts_with("Same")).collect()
    };
    let all = ["pid 10 1 lists 1", "pid 11 2 lists 1", "pid 12 3 lists 1"];
    let same = "SameProcesses";
    assert_eq!(rows(Ok(&[(10, 1), (11, 2), (12, 3)])), all);
    assert_eq!(rows(Ok(&[(12, 3), (11, 2), (10, 1)])), [same]);
    assert_eq!(rows(Ok(&[(10, 1), (11, 9), (12, 3)])), ["pid 11 9 lists 1", same]);
    assert_eq!(rows(Ok(&[(10, 1), (11, 9), (12, 3)])), [same]);
    assert_eq!(rows(Ok(&[(10, 1), (11, 2), (13, 3)])), [all[0], all[1], "pid 13 3 lists 1"]);
    assert_eq!(rows(Ok(&[(10, 1), (11, 2)])), all[..2], "a process has left");
    assert_eq!(rows(Err(Code::UNKNOWN)), ["pid 10 Unknown lists 0", "pid 11 Unknown lists 0"]);
    assert_eq!(rows(Ok(&[(10, 1), (11, 2)])), all[..2], "the list before could not be read");
    assert_eq!(rows(Ok(&[(10, 1), (11, 5000)])), ["pid 10 1 lists 1", "pid 11 Impossible lists 1"]);
    assert_eq!(rows(Ok(&[(10, 1), (11, 5000)])), ["pid 10 1 lists 1", "pid 11 Impossible lists 1"]);
}

#[test]
fn a_process_that_draws_and_computes_is_one() {
    let gpus = FakeGpus::new(1);
    let mut run = run(&gpus);
    run.set(0, List::Compute, Ok(vec![charge(10, 500), charge(11, 1)]));
    run.set(0, List::Graphics, Ok(vec![charge(10, 500), charge(12, 2)]));
    run.set(0, List::Mps, Ok(vec![Charge { pid: 11, bytes: None, instance: None, protected_bytes: None }]));
    let rows: Vec<String> = run.reading(0).into_iter().filter(|line| line.starts_with("pid")).collect();
    assert_eq!(rows, ["pid 10 500 lists 3", "pid 11 1 lists 5", "pid 12 2 lists 2"]);
}

#[test]
fn what_is_not_available_is_absent_with_its_reason() {
    let mut gpus = FakeGpus::new(1);
    let row = vec![Charge { pid: 10, bytes: None, instance: None, protected_bytes: None }, charge(0, 5)];
    for (pids, expected) in [
        (Pids::Trusted, "pid 10 NotAvailable lists 1"),
        (Pids::ForeignBytes, "pid 10 WrongNamespace lists 1"),
        (Pids::Foreign, "pid 10 WrongNamespace lists 1 stranger"),
    ] {
        gpus.inventory.pids = pids;
        let mut run = run(&gpus);
        run.set(0, List::Compute, Ok(row.clone()));
        let rows: Vec<String> = run.reading(0).into_iter().filter(|line| line.starts_with("pid")).collect();
        assert_eq!(rows, [expected]);
    }
}

#[test]
fn a_list_that_is_refused_leaves_its_reason_on_every_process() {
    let gpus = FakeGpus::new(1);
    let mut run = run(&gpus);
    run.set(0, List::Compute, Ok(vec![charge(10, 5), charge(11, 6)]));
    run.reading(0);
    run.set(0, List::Compute, Err(Code::NO_PERMISSION));
    assert_eq!(
        run.reading(0),
        [
            "begin 2 on 0",
            "device 300 600 Some(100)",
            "pid 10 NoPermission lists 0",
            "pid 11 NoPermission lists 0",
            "device 300 600 Some(100)",
            "end 2 4",
            "source 0 false nvml: process list: no permission"
        ]
    );
    run.set(0, List::Compute, Ok(vec![charge(10, 5)]));
    let last = run.reading(0);
    assert_eq!(last.last().map(String::as_str), Some("source 0 true nvml: fine"));
    assert_eq!(last.len(), 6);
}

#[test]
fn a_lost_gpu_has_no_numbers_and_the_other_has() {
    let gpus = FakeGpus::new(2);
    let mut run = run(&gpus);
    run.set(0, List::Compute, Ok(vec![charge(10, 5)]));
    run.set(1, List::Compute, Ok(vec![charge(10, 7)]));
    run.reading(0);
    gpus.answers.borrow_mut()[0].memory = Err(Code::GPU_IS_LOST);
    run.set(0, List::Compute, Err(Code::GPU_IS_LOST));
    assert_eq!(
        run.reading(0),
        ["begin 2 on 0", "pid 10 GpuLost lists 0", "end 2 15", "source 0 false nvml: the GPU is lost"]
    );
    assert!(run.reading(1).contains(&"pid 10 7 lists 1".to_owned()));
    // The next reading does not report the same problem again.
    assert_eq!(run.reading(0).len(), 3);
}

#[test]
fn graphics_and_mps_lists_are_read_when_there_is_somebody_in_them() {
    let gpus = FakeGpus::new(1);
    let mut run = run(&gpus);
    let asked = |run: &mut Run| {
        gpus.calls.borrow_mut().clear();
        run.reading(0);
        gpus.calls.borrow().iter().map(|&(_, list)| list).collect::<Vec<_>>()
    };
    assert_eq!(asked(&mut run), List::ALL);
    assert_eq!(asked(&mut run), [List::Compute]);
    run.set(0, List::Graphics, Ok(vec![charge(10, 5)]));
    run.set(0, List::Mps, Err(Code::NOT_SUPPORTED));
    run.session.devices[0].lists.iter_mut().for_each(|list| list.read_ns = Some(0)); // long ago
    assert_eq!(asked(&mut run), List::ALL);
    assert_eq!(asked(&mut run), [List::Compute, List::Graphics]);
    run.session.devices[0].lists.iter_mut().for_each(|list| list.read_ns = Some(0));
    assert_eq!(asked(&mut run), [List::Compute, List::Graphics], "not supported stays so");
    run.set(0, List::Graphics, Ok(Vec::new()));
    asked(&mut run);
    assert_eq!(asked(&mut run), [List::Compute]);
}

#[test]
fn lists_go_on_where_device_memory_is_not_supported() {
    let gpus = FakeGpus::new(1);
    gpus.answers.borrow_mut()[0].memory = Err(Code::NOT_SUPPORTED);
    let mut run = run(&gpus);
    run.set(0, List::Compute, Ok(vec![charge(10, 5)]));
    assert_eq!(
        run.reading(0),
        ["begin 1 on 0", "pid 10 5 lists 1", "end 1 0", "source 0 false nvml: memory: not supported"]
    );
}

#[test]
fn a_driver_that_is_gone_ends_the_session() {
    let gpus = FakeGpus::new(1);
    let mut run = run(&gpus);
    for code in [Code::UNINITIALIZED, Code::DRIVER_NOT_LOADED, Code::LIB_RM_VERSION_MISMATCH] {
        run.set(0, List::Compute, Err(code));
        let answer = run.session.read_device(0, &mut run.out).expect("written");
        assert_eq!(answer, Some(code));
    }
    run.set(0, List::Compute, Ok(Vec::new()));
    gpus.answers.borrow_mut()[0].memory = Err(Code::DRIVER_NOT_LOADED);
    run.session.schedule = Schedule::new(&NvmlSettings::default(), 1, 0);
    assert_eq!(run.session.act(&mut run.out).expect("written"), Next::Reopen(Some(Code::DRIVER_NOT_LOADED)));
}

#[test]
fn how_a_device_is_is_said_after_its_first_reading() {
    let gpus = FakeGpus::new(1);
    let mut run = run(&gpus);
    run.session.devices[0].written = None;
    run.session.read_due_memory(&mut run.out);
    assert_eq!(said(&std::mem::take(&mut run.out.frames)), ["device 300 600 Some(100)"]);
    assert_eq!(run.reading(0).last().map(String::as_str), Some("source 0 true nvml: fine"));
    assert_eq!(run.reading(0).last().map(String::as_str), Some("end 2 0"));
}

#[test]
fn devices_to_be_avoided_are_named_and_not_called() {
    let gpus = FakeGpus::new(2);
    let mut out = FrameWriter::new(Box::new(io::sink()), None);
    let skip = vec![(Uuid(DeviceName::Gpu([0; 16])), Skip::All)];
    let arguments = Arguments { skip, ..Arguments::default() };
    let mut session = Session::begin(Box::new(gpus.clone()), &arguments, &mut out);
    assert_eq!(said(&std::mem::take(&mut out.frames)), ["gpu 0 model None", "gpu 1 model Some(1000)"]);
    while session.act(&mut out).expect("written") == Next::Again {}
    assert!(gpus.calls.borrow().iter().all(|&(device, _)| device == 1));
    assert!(!gpus.calls.borrow().is_empty());
}

#[test]
fn accounted_peaks_are_said_as_they_grow_and_once_after_the_end() {
    let gpus = FakeGpus::new(1);
    *gpus.accounted.borrow_mut() = Some(vec![(10, 500), (11, 70), (12, 9)]);
    let mut run = run(&gpus);
    run.set(0, List::Compute, Ok(vec![charge(10, 400), charge(11, 70), charge(13, 1)]));
    let peaks = |run: &mut Run| -> Vec<String> {
        run.session.schedule.listed(0, 1, 1, 0, true);
        run.session.read_device(0, &mut run.out).expect("written");
        let frames = std::mem::take(&mut run.out.frames);
        let peak = |record: Record<'_>| match record.body {
            Body::AccountedPeak { peak_bytes, .. } => Some(format!("{} {peak_bytes}", record.stamp.thread)),
            _ => None,
        };
        records(&frames).filter_map(|record| peak(record.expect("a frame").expect("a record"))).collect()
    };
    assert_eq!(peaks(&mut run), ["10 500", "11 70"], "12 is nobody here, 13 is not accounted");
    assert_eq!(peaks(&mut run), Vec::<String>::new(), "nothing has grown");
    *gpus.accounted.borrow_mut() = Some(vec![(10, 501), (11, 70)]);
    run.set(0, List::Compute, Ok(vec![charge(10, 400)]));
    assert_eq!(peaks(&mut run), ["10 501", "11 70"], "11 has ended: its last word");
    assert_eq!(peaks(&mut run), Vec::<String>::new(), "said once");
}

#[test]
fn time_in_accounting_calls_is_lock_time() {
    let gpus = FakeGpus::new(1);
    *gpus.accounted.borrow_mut() = Some(vec![(10, 500)]);
    gpus.slow_accounting.set(Duration::from_millis(3));
    let mut run = run(&gpus);
    run.set(0, List::Compute, Ok(vec![charge(10, 400)]));
    run.reading(0);
    let cost = run.session.schedule.last_cost_ns(0).expect("read");
    assert!(cost >= 3_000_000, "{cost}");
}

#[test]
fn faults_are_those_of_the_instance_that_the_driver_names() {
    let mut gpus = FakeGpus::new(3);
    gpus.inventory.devices[0].index = 0;
    gpus.inventory.devices[1].index = 0;
    gpus.inventory.devices[2].index = 1;
    (gpus.inventory.devices[0].instance, gpus.inventory.devices[1].instance) = (Some((1, 0)), Some((2, 0)));
    let mut run = run(&gpus);
    let xid = |number, instance| Event { kind: EventKind::Xid(number), instance };
    gpus.events.borrow_mut().extend([(0, xid(31, Some((2, 0)))), (0, xid(79, None)), (1, xid(13, None))]);
    assert_eq!(run.session.read_events(5, &mut run.out), None);
    let said: Vec<(u8, u64)> = records(&run.out.frames)
        .filter_map(|record| match record.expect("a frame").expect("a record") {
            Record { stamp, body: Body::DeviceFault { xid } } => Some((stamp.device, xid)),
            _ => None,
        })
        .collect();
    assert_eq!(said, [(1, 31), (0, 79), (1, 79), (2, 13)]);
    gpus.events.borrow_mut().push((0, Event { kind: EventKind::Partitioned, instance: None }));
    assert_eq!(
        run.session.read_events(6, &mut run.out),
        Some(Next::Reopen(None)),
        "the devices are others now"
    );
    gpus.unbinding.set(Some(0x100));
    assert_eq!(run.session.read_events(7, &mut run.out), Some(Next::Release(0x100)));
}

#[test]
fn an_instance_is_found_by_its_uuid_alone() {
    let mut gpus = FakeGpus::new(2);
    gpus.inventory.devices[1].name = DeviceName::Mig([7; 16]);
    let run = run(&gpus);
    assert_eq!(run.session.index(DeviceName::Gpu([7; 16])), Some(1));
    assert_eq!(run.session.index(DeviceName::Gpu([8; 16])), None);
}

#[test]
fn values_above_the_size_of_the_device_are_refused_and_named() {
    let gpus = FakeGpus::new(1);
    let mut run = run(&gpus);
    let good = vec![charge(10, 200), charge(12, 30)];
    run.set(0, List::Compute, Ok(good.clone()));
    run.reading(0);
    // One process with too many bytes, one with an impossible pid, one that is missing.
    run.set(0, List::Compute, Ok(vec![charge(10, 200), charge(11, 1001), charge(u32::MAX, 7)]));
    let whole = "device 300 600 Some(100)";
    let list =
        "source 0 false nvml: process list: impossible values were refused (pid 11: 1001 of 1000 bytes)";
    let lines = [
        "begin 2 on 0",
        whole,
        "pid 10 200 lists 1",
        "pid 11 Impossible lists 1",
        "pid 12 Impossible lists 0",
        whole,
        "end 2 999",
        list,
    ];
    assert_eq!(run.reading(0), lines);
    assert_eq!(run.out.totals.refused, 2);

    run.set(0, List::Compute, Ok(good));
    let memory = run.gpus.answers.borrow()[0].memory;
    let sick = memory.map(|memory| Memory { used_bytes: u64::MAX - 7, ..memory });
    run.gpus.answers.borrow_mut()[0].memory = sick;
    let told = "source 0 false nvml: memory: impossible values were refused (used 18446744073709551608 of 1000 bytes)";
    assert_eq!(run.reading(0), ["begin 3 on 0", "pid 10 200 lists 1", "pid 12 30 lists 1", "end 3 0", told]);

    run.gpus.answers.borrow_mut()[0].memory = memory;
    assert_eq!(run.reading(0).last().map(String::as_str), Some("source 0 true nvml: fine"));
}

#[test]
fn accounted_peaks_above_the_size_of_the_device_are_refused_and_named() {
    let gpus = FakeGpus::new(1);
    *gpus.accounted.borrow_mut() = Some(vec![(10, 500), (11, 1001), (12, 7777)]);
    let mut run = run(&gpus);
    run.set(0, List::Compute, Ok(vec![charge(10, 400), charge(11, 70), charge(12, 5)]));
    let peaks = |run: &mut Run| -> (Vec<(u32, u64)>, Vec<String>) {
        run.session.schedule.listed(0, 1, 1, 0, true);
        run.session.read_device(0, &mut run.out).expect("written");
        let frames = std::mem::take(&mut run.out.frames);
        let peak = |record: Record<'_>| match record.body {
            Body::AccountedPeak { peak_bytes, .. } => Some((record.stamp.thread, peak_bytes)),
            _ => None,
        };
        let peaks =
            records(&frames).filter_map(|record| peak(record.expect("a frame").expect("a record"))).collect();
        let has_state = |line: &String| line.starts_with("source ");
        (peaks, said(&frames).into_iter().filter(has_state).collect())
    };
    let named =
        "source 0 false nvml: accounted peaks: impossible values were refused (pid 11: 1001 of 1000 bytes)";
    assert_eq!(peaks(&mut run), (vec![(10, 500)], vec![named.to_owned()]));
    assert_eq!(run.out.totals.refused, 2);
    assert_eq!(peaks(&mut run), (Vec::new(), Vec::new()), "the problem has not changed");
    assert_eq!(run.out.totals.refused, 4);

    *gpus.accounted.borrow_mut() = Some(vec![(10, 500), (11, 1000), (12, 5)]);
    let fine = "source 0 true nvml: fine".to_owned();
    assert_eq!(peaks(&mut run), (vec![(11, 1000), (12, 5)], vec![fine]), "the size itself is possible");
}

#[test]
fn control_group_of_a_process_is_read_less_and_less_often() {
    const SECOND: u64 = 1_000_000_000;
    let mut groups = extras::ControlGroups::default();
    let mut read_at = Vec::new();
    for at in (0..200).step_by(5) {
        let path = groups.of(10, (1000 + at) * SECOND, |_| {
            read_at.push(at);
            Some(format!("/job{at}"))
        });
        assert_eq!(path, Some(&*format!("/job{}", read_at.last().expect("read"))), "{at}");
    }
    assert_eq!(read_at, [0, 5, 15, 35, 75, 135, 195]);
    groups.forget(10);
    assert_eq!(groups.of(10, 1196 * SECOND, |_| None), None, "another process with that pid");
}

#[test]
fn group_of_a_process_that_is_no_longer_listed_is_forgotten() {
    let mut run = run(&FakeGpus::new(1));
    let group = |run: &mut Run, path: &str| {
        run.session.groups.of(10, u64::MAX, |_| Some(path.to_owned())).map(str::to_owned)
    };
    assert_eq!(group(&mut run, "/old").as_deref(), Some("/old"));
    for (listed, expected) in [([10, 11], "/old"), ([10, 12], "/old"), ([11, 12], "/new")] {
        run.set(0, List::Compute, Ok(listed.map(|pid| charge(pid, 5)).to_vec()));
        run.reading(0);
        assert_eq!(group(&mut run, "/new").as_deref(), Some(expected), "{listed:?}");
    }
}

#[test]
fn a_limit_that_cannot_be_read_is_not_called_absent() {
    let entry = |limit| extras::limit_entry(limit, "/job");
    let none = MemoryLimit { soft_bytes: u64::MAX, hard_bytes: u64::MAX, used_bytes: 3 };
    assert_eq!(entry(Ok(none)), None);
    assert_eq!(entry(Err(Code::NOT_SUPPORTED)), None);
    assert_eq!(entry(Ok(MemoryLimit { hard_bytes: 9, ..none })), Some(format!("3 {} 9 /job", u64::MAX)));
    assert_eq!(entry(Err(Code::NO_PERMISSION)).as_deref(), Some("unreadable /job: no permission"));
}
