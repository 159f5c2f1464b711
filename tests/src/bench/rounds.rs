//! Contestants measured alternately, and the table of their results.

use std::time::{Duration, Instant};

/// Times of one contestant, one for each round, and their unit.
#[derive(Debug)]
pub struct Contestant {
    name: &'static str,
    events: u64,
    rounds: Vec<Duration>,
}

impl Contestant {
    /// Makes a contestant without rounds.
    pub fn new(name: &'static str) -> Self {
        Contestant { name, events: 0, rounds: Vec::new() }
    }

    /// Measures a round of `events` events.
    pub fn round(&mut self, events: usize, work: impl FnOnce()) {
        let start = Instant::now();
        work();
        self.rounds.push(start.elapsed());
        self.events = events as u64;
    }

    /// Adds a round that was timed elsewhere.
    pub fn took(&mut self, events: usize, time: Duration) {
        self.rounds.push(time);
        self.events = events as u64;
    }

    /// Drops the first round, which had cold caches and growing tables.
    pub fn forget_warm_up(&mut self) {
        self.rounds.remove(0);
    }

    fn nanoseconds(&self) -> Vec<f64> {
        self.rounds.iter().map(|time| time.as_nanos() as f64 / self.events as f64).collect()
    }
}

/// Returns the median.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Unit of printed times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Per {
    /// Time of an event, in ns.
    Event,
    /// Time of a whole round, in ms.
    Round,
}

/// Prints the contestants of one stream; the last one is the floor. The ratio is the median over rounds of a time
/// divided by the floor's in the same round; the spread is over rounds.
pub fn print_table(title: &str, per: Per, contestants: &[&Contestant]) {
    let (rate, time, spread, scale) = match per {
        Per::Event => ("million/s", "ns", "ns min .. max", 1.0),
        Per::Round => ("per second", "ms", "ms min .. max", 1e6),
    };
    println!("{title}");
    println!("{:<28} {rate:>12} {time:>10} {spread:>21} {:>11}", "", "x floor");
    let floor = contestants.last().map(|floor| floor.nanoseconds()).unwrap_or_default();
    for contestant in contestants {
        let times = contestant.nanoseconds();
        let ratio = median(times.iter().zip(&floor).map(|(time, floor)| time / floor).collect());
        let low = times.iter().copied().fold(f64::INFINITY, f64::min) / scale;
        let high = times.iter().copied().fold(0.0, f64::max) / scale;
        let typical = median(times) / scale;
        println!(
            "{:<28} {:>12.2} {typical:>10.1} {:>21} {ratio:>11.2}",
            contestant.name,
            1000.0 / typical,
            format!("{low:.1} .. {high:.1}"),
        );
    }
    println!();
}
