//! Time of a scrape over TCP and HTTP, including the connection. The floor is a bare server that sends the same bytes.

use super::cost::resident_mib;
use super::daemon::{GPUS, PROCESSES};
use super::node::{Node, get, machine, processes, uuids};
use super::player;
use crate::live::{Job, Machine, until};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

const TAGS: u32 = 20;
const SCRAPES: usize = 300;

/// Serves `body` on a new address until the program ends.
fn bare(body: &str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut request = [0; 1024];
            let mut have = 0;
            while !request[..have].ends_with(b"\r\n\r\n") {
                match stream.read(&mut request[have..]) {
                    Ok(more) if more > 0 => have += more,
                    _ => break,
                }
            }
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    address
}

/// Returns sorted times of scrapes in ms, from both servers alternately.
fn times(real: SocketAddr, floor: SocketAddr, count: usize) -> [Vec<f64>; 2] {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..count {
        for (address, times) in [real, floor].into_iter().zip(&mut times) {
            let start = Instant::now();
            std::hint::black_box(get(address, "/metrics"));
            times.push(start.elapsed().as_secs_f64() * 1e3);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    times
}

fn print(what: &str, times: &[f64]) {
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    let [p50, p95, p99, max] = [0.5, 0.95, 0.99, 1.0].map(at);
    println!("  {what:<34} {p50:>8.3} {p95:>8.3} {p99:>8.3} {max:>8.3}");
}

fn head(title: &str) {
    println!("{title}\n  {:<34} {:>8} {:>8} {:>8} {:>8}", "ms", "p50", "p95", "p99", "max");
}

fn series(text: &str) -> usize {
    text.lines().filter(|line| !line.starts_with('#')).count()
}

/// Starts agents with live memory, and waits until the daemon counts that memory.
fn agents(machine: &Machine, node: &Node, each: u32, rows: u64, tags: u32) -> Vec<Job> {
    let uuids = uuids(machine);
    let socket = node.runtime.join("agent.sock");
    let player = |device: u32| player::command(&socket, &uuids[device as usize], rows, tags);
    let mut jobs = processes(machine, GPUS, each, player);
    for job in &mut jobs {
        job.wait_for("said");
    }
    let all = (GPUS * each) as usize;
    let tracked = |text: &str| {
        let of_tracked = |line: &&str| line.starts_with("gpumem_process_tracked_bytes{");
        text.lines().filter(of_tracked).filter(|line| !line.ends_with(" 0")).count()
    };
    until(60, "all processes in a scrape", || (tracked(&node.scrape()) == all).then_some(()));
    jobs
}

fn full_node() {
    let machine = machine(GPUS);
    let node = Node::start(&machine, "[nvml]\ncall_timeout_s = 1.0");
    let _jobs = agents(&machine, &node, PROCESSES, 40, TAGS);
    let text = node.scrape();
    let floor = bare(&text);
    head(&format!(
        "{GPUS} GPUs x {PROCESSES} covered processes with {TAGS} tags: {} series, {} bytes",
        series(&text),
        text.len()
    ));
    let [ours, least] = times(node.http, floor, SCRAPES);
    print("gpumemd", &ours);
    print("bare server, the same bytes", &least);
    let hangs = || node.number("gpumemd_nvml_hangs_total");
    machine.set(&["gpu3.fault=hang"]);
    // Covers the hanging call, its timeout, and the time after it.
    let mut stuck = times(node.http, floor, SCRAPES)[0].clone();
    until(20, "a hang that is noticed", || {
        stuck.extend(&times(node.http, floor, 10)[0]);
        (hangs() > 0).then_some(())
    });
    stuck.sort_by(f64::total_cmp);
    print("gpumemd while GPU 3 hangs", &stuck);
    println!("  target: p50 0.4, p99 1.0, the same with a hung GPU");
    println!("  resident with {} runs: {:.1} MiB; target 16\n", GPUS * PROCESSES, resident_mib(node.pid()));
}

fn many_blocks() {
    let machine = machine(GPUS);
    let node = Node::start(&machine, "");
    let _jobs = agents(&machine, &node, 8, 1_000_000 / 64, 100);
    let text = node.scrape();
    let floor = bare(&text);
    head(&format!(
        "64 agents, 1 million live blocks, 100 tags each: {} series, {} bytes",
        series(&text),
        text.len()
    ));
    let [ours, least] = times(node.http, floor, SCRAPES);
    print("gpumemd", &ours);
    print("bare server, the same bytes", &least);
    println!("  resident: {:.0} MiB; target: 200 MiB, p99 10\n", resident_mib(node.pid()));
}

/// Runs the whole benchmark.
pub fn run() {
    full_node();
    many_blocks();
}
