use super::*;
use crate::source::nvml::library::Device;
use gpumem_wire::frame::records;
use std::cell::RefCell;
use std::rc::Rc;

/// What a driver would answer, per device.
#[derive(Clone)]
pub(crate) struct Answers {
    pub memory: Result<Memory, Code>,
    pub lists: [Result<Vec<Charge>, Code>; 3],
}

/// A driver in a variable.
#[derive(Clone)]
pub(crate) struct FakeGpus {
    pub answers: Rc<RefCell<Vec<Answers>>>,
    pub pids: Pids,
    pub calls: Rc<RefCell<Vec<(usize, List)>>>,
    devices: Vec<Device>,
}

pub(crate) fn charge(pid: u32, bytes: u64) -> Charge {
    Charge { pid, bytes: Some(bytes), instance: None }
}

impl FakeGpus {
    pub fn new(count: u8) -> FakeGpus {
        let memory =
            Memory { total_bytes: 1000, free_bytes: 600, used_bytes: 300, reserved_bytes: Some(100) };
        let answers = Answers { memory: Ok(memory), lists: [Ok(Vec::new()), Ok(Vec::new()), Ok(Vec::new())] };
        let device = |index: u8| Device {
            name: DeviceName::Gpu([index; 16]),
            index: index.into(),
            model: "model".to_owned(),
        };
        FakeGpus {
            answers: Rc::new(RefCell::new(vec![answers; count.into()])),
            pids: Pids::Trusted,
            calls: Rc::default(),
            devices: (0..count).map(device).collect(),
        }
    }
}

impl Gpus for FakeGpus {
    fn devices(&self) -> &[Device] {
        &self.devices
    }
    fn memory(&mut self, device: usize) -> Result<Memory, Code> {
        self.answers.borrow()[device].memory
    }
    fn list(&mut self, device: usize, list: List, charges: &mut Vec<Charge>) -> Result<(), Code> {
        self.calls.borrow_mut().push((device, list));
        charges.extend(self.answers.borrow()[device].lists[list as usize].clone()?);
        Ok(())
    }
    fn pids(&self) -> Pids {
        self.pids
    }
    fn has_changed(&mut self, _enter: &mut dyn FnMut(u16)) -> bool {
        false
    }
    fn description(&self) -> &str {
        "a variable"
    }
}

struct Run {
    gpus: FakeGpus,
    session: Session,
    totals: Totals,
    out: Outlet,
}

fn run(gpus: &FakeGpus) -> Run {
    let mut out = Outlet::new(Box::new(io::sink()), None);
    let mut session = Session::begin(Box::new(gpus.clone()), &Settings::default(), &[], &mut out);
    session.seen.iter_mut().for_each(|seen| seen.told = Some(None));
    out.frames.clear();
    Run { gpus: gpus.clone(), session, totals: Totals::default(), out }
}

impl Run {
    /// One reading, as lines.
    fn reading(&mut self, device: usize) -> Vec<String> {
        // Nothing is flushed in the middle, so that the frames are here at the end.
        self.session.lanes.listed(device, 1, 1, 0, true);
        self.session.reading(device, &mut self.totals, &mut self.out).expect("written");
        said(&std::mem::take(&mut self.out.frames))
    }
    fn set(&self, device: usize, list: List, answer: Result<Vec<Charge>, Code>) {
        self.gpus.answers.borrow_mut()[device].lists[list as usize] = answer;
    }
}

/// Frames as short lines.
pub(crate) fn said(frames: &[u8]) -> Vec<String> {
    let line = |record: Record<'_>| match record.body {
        Body::SampleBegin { number } => format!("begin {number} on {}", record.stamp.device),
        Body::DeviceSample { used_bytes, free_bytes, reserved_bytes } => {
            format!("device {used_bytes} {free_bytes} {:?}", reserved_bytes.0)
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
    records(frames).map(|record| line(record.expect("a frame").expect("a record"))).collect()
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
    assert_eq!((run.totals.memory_calls, run.totals.list_calls), (2, 3));
}

#[test]
fn a_process_that_draws_and_computes_is_one() {
    let gpus = FakeGpus::new(1);
    let mut run = run(&gpus);
    run.set(0, List::Compute, Ok(vec![charge(10, 500), charge(11, 1)]));
    run.set(0, List::Graphics, Ok(vec![charge(10, 500), charge(12, 2)]));
    run.set(0, List::Mps, Ok(vec![Charge { pid: 11, bytes: None, instance: None }]));
    let rows: Vec<String> = run.reading(0).into_iter().filter(|line| line.starts_with("pid")).collect();
    assert_eq!(rows, ["pid 10 500 lists 3", "pid 11 1 lists 5", "pid 12 2 lists 2"]);
}

#[test]
fn what_is_not_available_is_absent_with_its_reason() {
    let mut gpus = FakeGpus::new(1);
    let row = vec![Charge { pid: 10, bytes: None, instance: None }, charge(0, 5)];
    for (pids, expected) in [
        (Pids::Trusted, "pid 10 NotAvailable lists 1"),
        (Pids::ForeignBytes, "pid 10 WrongNamespace lists 1"),
        (Pids::Foreign, "pid 10 WrongNamespace lists 1 stranger"),
    ] {
        gpus.pids = pids;
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
    // Said once.
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
    run.session.seen[0].extras.iter_mut().for_each(|extra| extra.looked_ns = Some(0)); // long ago
    assert_eq!(asked(&mut run), List::ALL);
    assert_eq!(asked(&mut run), [List::Compute, List::Graphics]);
    run.session.seen[0].extras.iter_mut().for_each(|extra| extra.looked_ns = Some(0));
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
        let answer = run.session.reading(0, &mut run.totals, &mut run.out).expect("written");
        assert_eq!(answer, Some(code));
    }
    run.set(0, List::Compute, Ok(Vec::new()));
    gpus.answers.borrow_mut()[0].memory = Err(Code::DRIVER_NOT_LOADED);
    run.session.lanes.set_devices(1, 0);
    assert_eq!(
        run.session.turn(&mut run.totals, &mut run.out).expect("written"),
        Next::Reopen(Some(Code::DRIVER_NOT_LOADED))
    );
}

#[test]
fn how_a_device_is_is_said_after_its_first_reading() {
    let gpus = FakeGpus::new(1);
    let mut run = run(&gpus);
    run.session.seen[0].told = None;
    run.session.memory_turn(&mut run.totals, &mut run.out);
    assert_eq!(said(&std::mem::take(&mut run.out.frames)), ["device 300 600 Some(100)"]);
    assert_eq!(run.reading(0).last().map(String::as_str), Some("source 0 true nvml: fine"));
    assert_eq!(run.reading(0).last().map(String::as_str), Some("end 2 0"));
}

#[test]
fn devices_to_be_avoided_are_named_and_not_called() {
    let gpus = FakeGpus::new(2);
    let mut out = Outlet::new(Box::new(io::sink()), None);
    let avoid = [(DeviceName::Gpu([0; 16]), now_ns() + 1_000_000_000_000)];
    let mut session = Session::begin(Box::new(gpus.clone()), &Settings::default(), &avoid, &mut out);
    assert_eq!(said(&std::mem::take(&mut out.frames)), ["gpu 0 model None", "gpu 1 model Some(1000)"]);
    let mut totals = Totals::default();
    while session.turn(&mut totals, &mut out).expect("written") == Next::Again {}
    assert!(gpus.calls.borrow().iter().all(|&(device, _)| device == 1));
    assert!(!gpus.calls.borrow().is_empty());
}
