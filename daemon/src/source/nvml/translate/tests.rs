use super::*;
use gpumem_wire::DeviceIdKind;
use std::process::{Child, Command};

/// A translator with one device, and processes that its poller lists.
struct Scene {
    translator: Translator,
    processes: Processes,
    children: Vec<Child>,
    number: u64,
}

impl Scene {
    fn new() -> Self {
        let child = |_| Command::new("sleep").arg("1000").spawn().expect("a process");
        let mut scene = Scene {
            translator: Translator::default(),
            processes: Processes::new(),
            children: (0..3).map(child).collect(),
            number: 0,
        };
        scene.children.sort_by_key(Child::id);
        scene.begin_poller();
        scene
    }

    fn begin_poller(&mut self) -> PollerState {
        let earlier = self.translator.begin_poller();
        let (id, name) = (DeviceIdKind::Gpu, "GPU");
        let device =
            Body::Device { uuid_high: 1, uuid_low: 2, total_bytes: Reading::of(1000), ordinal: 0, id, name };
        self.say(0, device);
        self.said();
        earlier
    }

    fn say(&mut self, pid: u32, body: Body<'_>) {
        let stamp = Stamp { time_ns: now_ns(), thread: pid, device: 0, ..Stamp::default() };
        let mut frame = Vec::new();
        Record { stamp, body }.append_frame(&mut frame);
        self.processes.sweep();
        assert_eq!(self.translator.translate(&frame, &self.processes), Some(frame.len()));
    }

    /// Returns the place and the bytes of each process in the translated frames; `None` stands for the other processes.
    fn said(&mut self) -> Vec<Option<(usize, u64)>> {
        let frames = self.translator.take_frames(&self.processes);
        let place = |pid| self.children.iter().position(|child| child.id() == pid).expect("a child");
        let row = |record: Record<'_>| match record.body {
            Body::ProcessSample { used_bytes, .. } => {
                Some(Some((place(record.stamp.thread), used_bytes.0.unwrap_or(0))))
            }
            Body::SameProcesses {} => Some(None),
            _ => None,
        };
        frame::records(&frames).filter_map(|record| row(record.ok()?.ok()?)).collect()
    }

    /// Translates a reading that names these processes, and whether the others are as before.
    fn reading(&mut self, named: &[(usize, u64)], is_same: bool) -> Vec<Option<(usize, u64)>> {
        self.number += 1;
        let number = self.number;
        self.say(0, Body::SampleBegin { number });
        for &(place, used) in named {
            let (used_bytes, absence) = (Reading::of(used), Absence::Unknown);
            let body = Body::ProcessSample { start_ticks: 0, used_bytes, absence, lists: 1 };
            self.say(self.children[place].id(), body);
        }
        if is_same {
            self.say(0, Body::SameProcesses {});
        }
        self.say(0, Body::SampleEnd { number, result: 0 });
        self.said()
    }

    fn end(&mut self, place: usize) {
        let child = &mut self.children[place];
        child.kill().and_then(|()| child.wait()).expect("ended");
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        (0..self.children.len()).for_each(|place| self.end(place));
    }
}

const ALL: [(usize, u64); 3] = [(0, 10), (1, 20), (2, 30)];

#[test]
fn short_reading_is_passed_on_while_its_processes_run() {
    let mut scene = Scene::new();
    assert_eq!(scene.reading(&ALL, false), ALL.map(Some));
    assert_eq!(scene.reading(&[], true), [None]);
    assert_eq!(scene.reading(&[(1, 21)], true), [Some((1, 21)), None]);
    assert_eq!(scene.reading(&[], true), [None]);
    scene.end(0);
    let all = [Some((0, 10)), Some((1, 21)), Some((2, 30))];
    assert_eq!(scene.reading(&[], true), all, "another process may have the pid now");
    assert_eq!(scene.reading(&[], true), all, "and later too");
    assert_eq!(scene.reading(&[(1, 22), (2, 30)], false), [Some((1, 22)), Some((2, 30))]);
    assert_eq!(scene.reading(&[], true), [None]);
}

#[test]
fn short_reading_refers_to_a_reading_of_the_same_poller() {
    let mut scene = Scene::new();
    scene.reading(&ALL, false);
    let first = scene.begin_poller();
    assert_eq!(scene.reading(&[(0, 1), (1, 1)], false), [Some((0, 1)), Some((1, 1))]);
    assert_eq!(scene.reading(&[], true), [None]);
    scene.translator.resume_poller(first);
    assert_eq!(scene.reading(&[], true), ALL.map(Some));
    assert_eq!(scene.reading(&[], true), [None]);
    scene.translator.end_readings(&[]);
    assert_eq!(scene.reading(&[], true), [None], "no reading was open");
    scene.say(0, Body::SampleBegin { number: 99 });
    scene.translator.end_readings(&[]);
    scene.said();
    assert_eq!(scene.reading(&[], true), ALL.map(Some), "the ledger has no whole reading before it");
}

/// A poller that hangs in the middle of a reading is replaced; the rest of the reading arrives after it is back.
#[test]
fn reading_that_was_ended_in_its_middle_proves_nothing() {
    let mut scene = Scene::new();
    scene.reading(&ALL, false);
    let row = |scene: &mut Scene, (place, used): (usize, u64)| {
        let (used_bytes, absence) = (Reading::of(used), Absence::Unknown);
        let body = Body::ProcessSample { start_ticks: 0, used_bytes, absence, lists: 1 };
        scene.say(scene.children[place].id(), body);
    };
    scene.say(0, Body::SampleBegin { number: 98 });
    row(&mut scene, (0, 11));
    let first = scene.begin_poller();
    scene.translator.end_readings(&[]);
    scene.translator.resume_poller(first);
    row(&mut scene, (1, 21));
    row(&mut scene, (2, 31));
    scene.say(0, Body::SampleEnd { number: 98, result: 0 });
    scene.said();
    assert_eq!(
        scene.reading(&[], true),
        [(0, 11), (1, 21), (2, 31)].map(Some),
        "the ledger has a part of the reading"
    );
    assert_eq!(scene.reading(&[], true), [None]);
}
