use super::*;
use gpumem_replay::Event;
use gpumem_wire::{Phase, Reading, Role};

const MIB: u64 = 1 << 20;
const BASE: u64 = 1 << 40;
const KEY: ProcessKey = ProcessKey { pid: 7, start_ticks: 1 };

/// Records of one process, with PyTorch's pool.
#[derive(Default)]
struct Recording {
    programs: Programs,
    seq: u64,
}

impl Recording {
    fn new() -> Self {
        let mut recording = Recording::default();
        let claims = "cuda_alloc_conf=max_split_size_mb:64\n";
        let versions = 1 << 16;
        let hello = Body::Hello { start_ticks: 1, versions, capabilities: 0, instance: 1, claims };
        recording.write(Stamp::default(), hello);
        recording.write(Stamp { tag: 1, ..Stamp::default() }, Body::Tag { path: POOL_NAME });
        let pool = Body::PoolCreate { pool: 3, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework };
        recording.say(Stamp { tag: 1, ..Stamp::default() }, pool);
        recording
    }

    fn write(&mut self, stamp: Stamp, body: Body<'_>) {
        self.programs.observe(Origin::Process(KEY), &Record { stamp, body });
    }

    fn say(&mut self, stamp: Stamp, body: Body<'_>) {
        self.seq += 1;
        self.write(Stamp { seq: self.seq, device: 0, ..stamp }, body);
    }

    /// Adds the pool of another device, and a request on it.
    fn other_device(&mut self, device: u8, bytes: u64) {
        let stamp = Stamp { device, tag: 1, flags: Flags::REQUEST, ..Stamp::default() };
        let (pool, address) = (100 + u64::from(device), BASE << device);
        let owner = PoolOwner::Framework;
        let records = [
            Body::PoolCreate { pool, parent: 0, reports_blocks: 1, owner },
            Body::SegmentAdd { address, bytes, pool },
            Body::BlockAlloc { address, bytes, pool, use_as: (Role::Unknown, Phase::Unknown) },
        ];
        for body in records {
            self.seq += 1;
            self.write(Stamp { seq: self.seq, ..stamp }, body);
        }
    }

    fn segment(&mut self, address: u64, bytes: u64) {
        self.say(Stamp::default(), Body::SegmentAdd { address, bytes, pool: 3 });
    }

    fn block(&mut self, address: u64, bytes: u64, request: Option<Request>) {
        let mut stamp = Stamp::default();
        if let Some(request) = request {
            let (stack, context) = (request.unused_bytes, request.context());
            stamp = Stamp { flags: Flags::REQUEST, stack, context, ..stamp };
        }
        let use_as = (Role::Unknown, Phase::Unknown);
        self.say(stamp, Body::BlockAlloc { address, bytes, pool: 3, use_as });
    }

    fn free(&mut self, address: u64) {
        self.say(Stamp::default(), Body::BlockFree { address, pool: 3, state: FreeState::Done });
    }

    fn release(&mut self, address: u64, bytes: u64) {
        self.say(Stamp::default(), Body::SegmentRemove { address, bytes, pool: 3 });
    }

    fn requests(self) -> Result<Requests, String> {
        Ok(self.programs.requests(None, None)?.remove(0))
    }
}

fn asked(unused_bytes: u32, stream: u16, pool: u16) -> Option<Request> {
    Some(Request { unused_bytes, stream, pool })
}

#[test]
fn requests_have_the_bytes_stream_and_pool_that_the_program_asked_for() {
    let mut recording = Recording::new();
    for round in 0..2_u64 {
        let address = BASE + round * 64 * MIB;
        recording.segment(address, 2 * MIB);
        recording.block(address, 512, asked(412, 2, 1));
        recording.free(address);
        recording.release(address, 2 * MIB);
    }
    let requests = recording.requests().expect("a recording");
    let asked: Vec<_> = requests
        .events
        .iter()
        .filter_map(|event| match *event {
            Event::Request { bytes, stream, pool, .. } => Some((bytes, stream, pool)),
            _ => None,
        })
        .collect();
    assert_eq!(asked, [(100, 2, 1), (100, 2, 2)], "the number of a pool is used again after its end");
    assert_eq!((requests.driver_calls, requests.reserved), ((2, 2), (2 * MIB, 0)));
    assert_eq!((requests.block_sizes, requests.settings.as_str()), (0, "max_split_size_mb:64"));
}

#[test]
fn each_device_has_its_own_requests() {
    let recording = || {
        let mut recording = Recording::new();
        recording.other_device(1, 4 * MIB);
        recording.other_device(2, 6 * MIB);
        recording.segment(BASE, 2 * MIB);
        recording.block(BASE, 512, asked(0, 0, 0));
        recording.block(BASE + 512, 512, asked(0, 0, 0));
        recording.programs
    };
    let found = |device| recording().requests(None, device);
    let devices: Vec<_> = found(None)
        .expect("a recording")
        .iter()
        .map(|requests| (requests.device, requests.count(), requests.reserved.0))
        .collect();
    assert_eq!(devices, [(0, 2, 2 * MIB), (1, 1, 4 * MIB), (2, 1, 6 * MIB)], "most requests first");
    let of_second = found(Some(1)).expect("a recording");
    assert_eq!(of_second.iter().map(|requests| requests.device).collect::<Vec<_>>(), [1]);
    assert!(found(Some(3)).is_err());
}

#[test]
fn release_for_a_refused_request_is_no_call_of_empty_cache() {
    let is_empty_cache = |event: &&Event| matches!(event, Event::EmptyCache { .. });
    for is_refused in [false, true] {
        let mut recording = Recording::new();
        recording.segment(BASE, 2 * MIB);
        recording.block(BASE, 512, asked(0, 0, 0));
        recording.free(BASE);
        if is_refused {
            let device_free_bytes = Reading::of(MIB);
            recording.say(Stamp::default(), Body::Pressure { bytes: 20 * MIB, device_free_bytes });
        }
        recording.release(BASE, 2 * MIB);
        recording.segment(BASE, 20 * MIB);
        recording.block(BASE, 20 * MIB, asked(0, 0, 0));
        let requests = recording.requests().expect("a recording").with_uncertain_releases();
        let calls = requests.events.iter().filter(is_empty_cache).count();
        assert_eq!(calls, usize::from(!is_refused));
    }
}

/// Up to PyTorch 2.12, empty_cache would keep the memory of the default pool during a capture.
#[test]
fn empty_cache_after_a_capture_is_not_part_of_it() {
    let mut recording = Recording::new();
    recording.segment(BASE, 20 * MIB);
    recording.block(BASE, 8 * MIB, asked(0, 0, 0));
    recording.free(BASE);
    recording.segment(BASE + 64 * MIB, 2 * MIB);
    recording.block(BASE + 64 * MIB, 512, asked(0, 1, 1));
    recording.release(BASE, 20 * MIB);
    let requests = recording.requests().expect("a recording");
    let ends = [Event::ScopeEnds { pool: 1 }, Event::EmptyCache { pool: None }];
    assert_eq!(requests.events[requests.events.len() - 2..], ends);
}

#[test]
fn end_of_a_private_pool_keeps_the_memory_of_the_default_pool() {
    let mut recording = Recording::new();
    recording.segment(BASE, 2 * MIB);
    recording.block(BASE, 512, asked(0, 0, 1));
    recording.free(BASE);
    recording.release(BASE, 2 * MIB);
    let requests = recording.requests().expect("a recording");
    let ends = [Event::PoolEnds { pool: 1 }, Event::EmptyCache { pool: Some(1) }];
    assert_eq!(requests.events[requests.events.len() - 2..], ends);
}

#[test]
fn requests_have_the_roles_of_their_blocks() {
    let mut recording = Recording::new();
    recording.programs.roles = Some(RoleCollector::new());
    let block = |recording: &mut Recording, address, use_as| {
        recording.say(Stamp::default(), Body::BlockAlloc { address, bytes: 512, pool: 3, use_as });
        recording.seq
    };
    recording.segment(BASE, 2 * MIB);
    let weight = block(&mut recording, BASE, (Role::Unknown, Phase::Setup));
    let use_as = (Role::Parameter, Phase::Unknown);
    recording.say(Stamp::default(), Body::Retag { address: BASE, block_seq: weight, pool: 3, use_as });
    // One block is freed within the forward pass, the other one after the begin of the backward pass.
    for address in [BASE + 512, BASE + 1024] {
        block(&mut recording, address, (Role::Unknown, Phase::Forward));
    }
    recording.free(BASE + 512);
    block(&mut recording, BASE + 1536, (Role::Unknown, Phase::Backward));
    recording.free(BASE + 1024);
    // The agent begins anew with the state.
    let stamp = Stamp { flags: Flags::RESTATED, seq: weight, ..Stamp::default() };
    let weight = Body::BlockAlloc { address: BASE, bytes: 512, pool: 3, use_as };
    recording.write(stamp, weight);
    let requests = recording.requests().expect("a recording");
    let of = |role| -> Vec<usize> {
        let is_request = |number: &usize| matches!(requests.events[*number], Event::Request { .. });
        let all = requests.of_role(role).into_iter().zip(0..);
        all.filter_map(|(is_it, number)| is_it.then_some(number)).filter(is_request).collect()
    };
    assert_eq!((of(Role::Parameter), of(Role::Activation)), (vec![0], vec![2]));
    assert_eq!(requests.bytes_of_roles()["parameter"], 512);
}

#[test]
fn missing_records_are_refused_and_missing_requests_are_counted() {
    let mut recording = Recording::new();
    recording.segment(BASE, 2 * MIB);
    recording.block(BASE, 512, None);
    recording.block(BASE + 512, 1024, asked(24, 0, 0));
    recording.programs.caveat("cut", "the recording ends at byte 9".into());
    let requests = recording.requests().expect("a recording");
    assert_eq!((requests.block_sizes, requests.names_pools), (1, false));
    assert_eq!(requests.caveats, ["the recording ends at byte 9"]);

    let mut recording = Recording::new();
    recording.segment(BASE, 2 * MIB);
    recording.seq += 5;
    recording.block(BASE, 512, asked(0, 0, 0));
    let error = recording.requests().expect_err("a hole");
    assert!(error.contains("lacks 5 records of process 7"), "{error}");
}
