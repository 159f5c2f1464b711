//! Starts thousands of programs, for tests/suite/soak/crowd.rs.
//!
//! ```text
//! crowd run COUNT RATE COMMAND [ARG...]  starts COMMAND COUNT times, RATE a second, and waits for all
//! crowd short SOCKET                     one: sends hello, an allocation and its end to the daemon at SOCKET, without waiting for a reply
//! crowd live SOCKET                      one: the same after the welcome; prints `up`, or `down` if it was refused, and ends when
//!                                        standard input closes
//! ```
//!
//! `run` prints how many of the programs succeeded and for how many milliseconds they were started.

use gpumem_tests::bench::peer::Peer;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

const DEVICE: &str = "GPU-00000000-0000-0000-0000-00000000c04d";
const BYTES: u64 = 1 << 20;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["run", count, rate, ref command @ ..] if !command.is_empty() => {
            let (Ok(count), Ok(rate)) = (count.parse(), rate.parse()) else { return ExitCode::from(2) };
            run(count, rate, command);
        }
        ["short", socket] => {
            let peer = Peer::introduce(Path::new(socket));
            peer.describe(DEVICE, 1);
            peer.allocate(1, BYTES);
            peer.watermark(1);
        }
        ["live", socket] => {
            let peer = std::panic::catch_unwind(|| {
                let peer = Peer::connect(Path::new(socket), DEVICE, 1);
                peer.allocate(1, BYTES);
                peer.watermark(1);
                peer
            });
            println!("{}", if peer.is_ok() { "up" } else { "down" });
            let _ = std::io::stdin().read(&mut [0]);
        }
        _ => {
            eprintln!("usage: crowd run COUNT RATE COMMAND [ARG...] | short SOCKET | live SOCKET");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

fn run(count: u32, rate: f64, command: &[&str]) {
    let began = Instant::now();
    let (mut running, mut succeeded): (Vec<Child>, u32) = (Vec::new(), 0);
    let mut reap = |running: &mut Vec<Child>| {
        running.retain_mut(|child| match child.try_wait() {
            Ok(None) => true,
            ended => {
                succeeded +=
                    u32::from(ended.is_ok_and(|status| status.is_some_and(|status| status.success())));
                false
            }
        });
        succeeded
    };
    let mut reaped = Instant::now();
    for number in 0..count {
        let due = Duration::from_secs_f64(f64::from(number) / rate);
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        running.push(Command::new(command[0]).args(&command[1..]).spawn().expect("a process"));
        // Ended programs are reaped to free their pids, but thousands of living ones are not polled at each start.
        if running.len() < 64 || reaped.elapsed() > Duration::from_secs(1) {
            reap(&mut running);
            reaped = Instant::now();
        }
    }
    let started = began.elapsed();
    let succeeded = loop {
        let succeeded = reap(&mut running);
        if running.is_empty() {
            break succeeded;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    println!("{succeeded} of {count} succeeded, started within {} ms", started.as_millis());
}
