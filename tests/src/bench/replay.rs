//! Speed of the model of PyTorch's allocator: the steps of a training with batches of changing length, under eight settings.

use gpumem_replay::{
    Device, Event, EventReturn, Options, PoolId, Release, Replay, RequestId, SegmentAddresses, Settings,
    StreamId,
};
use std::time::{Duration, Instant};

const EVENTS: usize = 10_000_000;
const LAYERS: u64 = 120;
/// Minimum number of events per second, on one core.
const RATE: f64 = 2e6;
/// Maximum time for the events under all settings, on two cores.
const SWEEP: Duration = Duration::from_secs(30);
const SETTINGS: [&str; 8] = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8,expandable_segments:True",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.5",
    "large_segment_size_mb:64",
    "max_split_size_mb:128,per_process_memory_fraction:0.5",
];

/// Makes the events of steps: activations that backward frees in the opposite order, and temporaries in between.
struct Steps {
    events: Vec<Event>,
    next: RequestId,
    random: u64,
}

impl Steps {
    fn request(&mut self, bytes: u64) -> RequestId {
        const DEFAULT: (StreamId, PoolId) = (0, 0);
        self.next += 1;
        let (id, (stream, pool)) = (self.next, DEFAULT);
        self.events.push(Event::Request { id, bytes, stream, pool, has_failed: false });
        id
    }

    fn free(&mut self, id: RequestId) {
        self.events.push(Event::Free { id, is_pending: false });
    }

    fn step(&mut self) {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let tokens = 64 + (self.random >> 33) % 2_000;
        let mut activations = Vec::new();
        for layer in 0..LAYERS {
            let temporary = self.request(tokens * 512);
            activations.push(self.request(tokens * 2_048));
            activations.push(self.request(512 + layer * 16));
            self.free(temporary);
        }
        while let Some(activation) = activations.pop() {
            let gradient = self.request(tokens * 1_024);
            self.free(activation);
            self.free(gradient);
        }
    }
}

/// Prints events a second under each setting, and the time of all on two threads.
///
/// # Panics
/// If a replay is slower than the limits above.
pub fn run() {
    let mut steps = Steps { events: Vec::new(), next: 0, random: 1 };
    while steps.events.len() < EVENTS {
        steps.step();
    }
    let events = &steps.events;
    let replayed = |text: &str| {
        let release = Release::LAST;
        let options = Options {
            release,
            settings: Settings::parse(text, release).expect("a valid text"),
            fraction: None,
            device: Device { total_bytes: 80 << 30, other_bytes: 0 },
            addresses: SegmentAddresses::default(),
            returns: EventReturn::default(),
        };
        let mut replay = Replay::new(options);
        let start = Instant::now();
        events.iter().for_each(|event| replay.apply(event).expect("a valid event"));
        assert!(!replay.has_ended() && replay.figures().allocated.now == 0);
        (start.elapsed(), replay.figures().reserved.peak)
    };
    for text in SETTINGS {
        let (took, reserved) = replayed(text);
        let rate = events.len() as f64 / took.as_secs_f64();
        println!("{:5.2} million events/s, {:5} MiB reserved  {text}", rate / 1e6, reserved >> 20);
        assert!(rate >= RATE, "below {:.0} million events/s", RATE / 1e6);
    }
    let start = Instant::now();
    std::thread::scope(|scope| {
        for half in SETTINGS.chunks(SETTINGS.len() / 2) {
            scope.spawn(move || half.iter().for_each(|text| _ = replayed(text)));
        }
    });
    println!(
        "{} events under {} settings, two threads: {:.1?}\n",
        events.len(),
        SETTINGS.len(),
        start.elapsed()
    );
    assert!(start.elapsed() < SWEEP);
}
