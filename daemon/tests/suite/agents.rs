//! Agents and untrusted peers on the agent socket.

use crate::common;
use crate::common::peer::{
    Memory, Peer, VERSIONS, allocation, device, hello, now, own_start_ticks, record, resync, tag, watermark,
};
use crate::common::{Daemon, start, wait_for};
use gpumem_model::run::State;
use gpumem_runs::store::Store;
use gpumem_wire::{Body, FreeState, MAJOR, Reading, Stamp};
use rustix::fs::SealFlags;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Child, Command, Stdio};

/// Returns this process's row in `ps`.
fn row(daemon: &Daemon) -> Option<serde_json::Value> {
    let (status, ps) = daemon.get("/v1/ps");
    assert_eq!(status, 200);
    ps["processes"].as_array()?.iter().find(|row| row["pid"] == std::process::id()).cloned()
}

fn tracked(daemon: &Daemon, bytes: u64) {
    wait_for(&format!("{bytes} bytes tracked"), || {
        row(daemon).filter(|row| row["tracked_bytes"] == bytes).map(drop)
    });
}

fn refused(daemon: &Daemon, reason: &str) {
    let series = format!("gpumemd_agent_refused_total{{reason=\"{reason}\"}}");
    wait_for(&series, || daemon.metric(&series).filter(|count| *count > 0.0));
}

fn dropped(daemon: &Daemon, reason: &str) {
    let series = format!("gpumemd_agent_dropped_total{{reason=\"{reason}\"}}");
    wait_for(&series, || daemon.metric(&series).filter(|count| *count > 0.0));
}

#[test]
fn an_agent_is_welcomed_and_what_it_says_is_shown() {
    let daemon = start("");
    let memory = Memory::new();
    let (peer, epoch) = Peer::welcomed(&daemon.agent_socket(), &memory);
    let old = allocation(3, 1 << 20, 1);
    let packet = [device(), tag(1, "model/weights"), resync(epoch, 5, &[old])].concat();
    assert!(peer.send(&packet));
    let (stamp, body) = allocation(6, 2 << 20, 1);
    assert!(peer.send(&[record(stamp, body), watermark(6)].concat()));
    tracked(&daemon, 3 << 20);
    let row = row(&daemon).expect("a row");
    assert_eq!(row["flags"][0], "covered");
    assert_eq!(row["used_bytes"], serde_json::Value::Null, "unknown is not 0");
    assert_eq!(row["why"], "never sampled");
    assert!(row["command"].as_str().is_some_and(|command| command.ends_with(" rank 3")), "{row}");

    let own = format!("pid=\"{}\",start=\"{}\"", std::process::id(), own_start_ticks());
    let device = "gpu=\"0\",uuid=\"GPU-00000000-0000-0007-0000-000000000009\"";
    let scrape = daemon.scrape();
    let series = format!("gpumem_process_tracked_bytes{{{device},{own}}}");
    assert_eq!(common::metric(&scrape, &series), Some((3 << 20) as f64), "{scrape}");
    assert!(!scrape.contains("gpumem_process_used_bytes{"), "unknown has no series");
    assert!(
        scrape.contains(&format!(
            "gpumem_process_used_unavailable{{{device},{own},reason=\"never sampled\"}} 1"
        ))
    );
    let sum: f64 = scrape
        .lines()
        .filter(|line| line.starts_with("gpumem_process_category_bytes{"))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum();
    assert_eq!(sum, (3 << 20) as f64, "categories add up");

    let runs = daemon.runs(&format!("?pid={}", std::process::id()));
    assert_eq!((runs.len(), runs[0].state), (1, State::Open));
    assert_eq!(daemon.runs("?job=test-job").len(), 1);
    assert_eq!(daemon.runs("?job=another").len(), 0);
}

#[test]
fn strangers_are_refused_with_a_reason() {
    let daemon = start("[agent]\nhello_timeout_s = 0.2\n");
    let connect = || Peer::connect(&daemon.agent_socket());
    let memory = Memory::new();
    let fd = memory.fd.as_fd();
    let ticks = own_start_ticks();
    type Say<'a> = &'a dyn Fn(&Peer);
    let cases: [(&str, Say<'_>); 10] = [
        ("timeout", &|_| ()),
        ("no_hello", &|peer| assert!(peer.send(b"GET / HTTP/1.1\r\n\r\n"))),
        ("no_hello", &|peer| assert!(peer.send(&watermark(1)))),
        ("version", &|peer| peer.send_with(&hello(ticks, u64::from(MAJOR + 1) << 16), &[fd])),
        ("identity", &|peer| peer.send_with(&hello(ticks + 1, VERSIONS), &[fd])),
        ("descriptors", &|peer| peer.send_with(&hello(ticks, VERSIONS), &[])),
        ("descriptors", &|peer| peer.send_with(&hello(ticks, VERSIONS), &[fd, fd])),
        ("descriptors", &|peer| {
            let flood: Vec<BorrowedFd<'_>> = vec![fd; 253];
            peer.send_with(&hello(ticks, VERSIONS), &flood);
        }),
        ("memory", &|peer| {
            let unsealed = Memory::sealed(SealFlags::SHRINK);
            peer.send_with(&hello(ticks, VERSIONS), &[unsealed.fd.as_fd()]);
        }),
        ("memory", &|peer| {
            let mut lying = Memory::new();
            lying.header.ring_slots = 1 << 60;
            lying.write_header();
            peer.send_with(&hello(ticks, VERSIONS), &[lying.fd.as_fd()]);
        }),
    ];
    for (reason, say) in cases {
        let peer = connect();
        say(&peer);
        peer.is_closed();
        refused(&daemon, reason);
    }
    drop(connect());
    refused(&daemon, "ended");
    assert_eq!(row(&daemon), None, "nothing of them is used");
}

#[test]
fn descriptors_of_strangers_are_closed() {
    let daemon = start("");
    let open = || std::fs::read_dir("/proc/self/fd").expect("/proc").count();
    let memory = Memory::new();
    let (peer, _) = Peer::welcomed(&daemon.agent_socket(), &memory);
    let before = open();
    let flood: Vec<BorrowedFd<'_>> = vec![memory.fd.as_fd(); 200];
    for _ in 0..8 {
        let stranger = Peer::connect(&daemon.agent_socket());
        stranger.send_with(&hello(own_start_ticks(), VERSIONS), &flood);
        stranger.is_closed();
    }
    peer.send_with(&watermark(0), &flood);
    peer.is_closed();
    dropped(&daemon, "descriptors");
    // Other tests of this process open and close files too, but far fewer than 1,600.
    wait_for("the descriptors to be closed", || (open() < before + 100).then_some(()));
}

#[test]
fn rubbish_ends_its_connection_and_no_other() {
    let daemon = start("");
    let memory = Memory::new();
    let (good, _) = Peer::welcomed(&daemon.agent_socket(), &memory);
    assert!(good.send(&device()));
    let cut = watermark(1)[..20].to_vec();
    let long_tag = tag(1, &"x".repeat(300));
    let mut no_text = tag(1, "abc");
    *no_text.last_mut().unwrap() = 0xff;
    let future = record(Stamp { time_ns: now() + 3_600_000_000_000, ..Stamp::default() }, Body::Marker {});
    let oversize = watermark(1).repeat(1200);
    let cases = [
        ("framing", cut),
        ("framing", vec![0xff; 500]),
        ("payload", long_tag),
        ("payload", no_text),
        ("time", future),
        ("oversize", oversize),
    ];
    for (reason, packet) in cases {
        let (bad, _) = Peer::welcomed(&daemon.agent_socket(), &Memory::new());
        assert!(bad.send(&packet), "{reason}");
        bad.is_closed();
        dropped(&daemon, reason);
    }
    let (stamp, body) = allocation(1, 4096, 0);
    assert!(good.send(&[record(stamp, body), watermark(1)].concat()));
    tracked(&daemon, 4096);
}

#[test]
fn what_is_not_for_agents_is_left_out_and_counted() {
    let daemon = start("");
    let (peer, _) = Peer::welcomed(&daemon.agent_socket(), &Memory::new());
    let me = Stamp { thread: 1, time_ns: now(), ..Stamp::default() };
    let gone = record(me, Body::ProcessGone { start_ticks: 1, status: Reading::ABSENT });
    let mut unknown = record(me, Body::Marker {});
    unknown[4 + 60] = 251;
    let (stamp, body) = allocation(1, 4096, 0);
    let good = record(stamp, body);
    assert!(peer.send(&[device(), gone.clone(), unknown, good, gone, watermark(1)].concat()));
    tracked(&daemon, 4096);
    let count =
        |reason: &str| daemon.metric(&format!("gpumemd_agent_records_skipped_total{{reason=\"{reason}\"}}"));
    assert_eq!(count("not_for_agents"), Some(2.0));
    assert_eq!(count("unknown_kind"), Some(1.0));
}

#[test]
fn silent_peers_take_only_a_part_of_the_places() {
    let daemon = start("[agent]\nconnections_without_hello = 8\nhello_timeout_s = 30.0\n");
    let silent: Vec<_> = (0..5).map(|_| Peer::connect(&daemon.agent_socket())).collect();
    refused(&daemon, "connections_without_hello");
    let waiting = wait_for("the others to wait", || daemon.metric("gpumemd_agents_waiting"));
    assert_eq!(waiting, 2.0, "a quarter of eight for one user");
    drop(silent);
    wait_for("them to be gone", || daemon.metric("gpumemd_agents_waiting").filter(|count| *count == 0.0));
    Peer::welcomed(&daemon.agent_socket(), &Memory::new());
}

#[test]
fn one_user_cannot_take_all_connections() {
    let daemon = start("[agent]\nconnections_per_uid = 2\n");
    let one = Peer::welcomed(&daemon.agent_socket(), &Memory::new());
    let two = Peer::welcomed(&daemon.agent_socket(), &Memory::new());
    Peer::connect(&daemon.agent_socket()).is_closed();
    refused(&daemon, "connections_of_uid");
    drop(one);
    wait_for("a place", || daemon.metric("gpumemd_agents").filter(|count| *count == 1.0));
    Peer::welcomed(&daemon.agent_socket(), &Memory::new());
    drop(two);
}

/// Another process that is an agent: this test program, started again. `role` selects its behaviour.
struct OtherProcess(Child);

impl OtherProcess {
    fn start(daemon: &Daemon, role: &str) -> Self {
        let child = Command::new(std::env::current_exe().expect("a path"))
            .args(["--exact", "agents::as_another_process", "--nocapture", "--test-threads=1"])
            .env("GPUMEMD_TEST_ROLE", role)
            .env("GPUMEMD_TEST_SOCKET", daemon.agent_socket())
            .stdout(Stdio::null())
            .spawn()
            .expect("a process");
        OtherProcess(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn kill(&mut self) {
        self.0.kill().expect("it lives");
        self.0.wait().expect("it ends");
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn as_another_process() {
    let Ok(role) = std::env::var("GPUMEMD_TEST_ROLE") else { return };
    let socket = std::env::var_os("GPUMEMD_TEST_SOCKET").expect("a socket");
    let mut memory = Memory::new();
    memory.name(&device());
    memory.name(&tag(1, "from/the/memory"));
    let (peer, epoch) = Peer::welcomed(socket.as_ref(), &memory);
    assert!(peer.send(&[device(), resync(epoch, 0, &[])].concat()));
    match role.as_str() {
        // Two records are sent; three more are only in the ring.
        "unsent" => {
            for seq in 1..=5 {
                memory.ring(allocation(seq, seq << 20, 1));
                memory.live(seq, allocation(seq, seq << 20, 1));
            }
            let sent: Vec<u8> = (1..=2)
                .flat_map(|seq| {
                    let (stamp, body) = allocation(seq, seq << 20, 1);
                    record(stamp, body)
                })
                .collect();
            assert!(peer.send(&[sent, watermark(2)].concat()));
        }
        // The ring was full: records 2 to 4 are lost, but the live table has their rows.
        "holes" => {
            memory.ring(allocation(1, 1 << 20, 1));
            memory.ring(allocation(5, 5 << 20, 1));
            for seq in [1, 3, 5] {
                memory.live(seq, allocation(seq, seq << 20, 1));
            }
        }
        // A child process keeps the socket open when this process is killed.
        "forked" => {
            let (stamp, body) = allocation(1, 1 << 20, 1);
            assert!(peer.send(&[record(stamp, body), watermark(1)].concat()));
            let inherited = peer.socket.try_clone().expect("a descriptor");
            rustix::io::fcntl_setfd(&inherited, rustix::io::FdFlags::empty()).expect("inherited");
            let mut child = Command::new("sleep");
            let child = child.arg("30").stdin(Stdio::from(inherited)).stdout(Stdio::null()).spawn();
            // This process is killed before the child ends; the child's new parent waits for it.
            std::mem::forget(child.expect("sleep"));
        }
        other => panic!("{other}"),
    }
    let marker = record(
        Stamp { time_ns: now(), ..Stamp::default() },
        Body::BlockFree { address: 0, pool: 0, state: FreeState::Done },
    );
    assert!(peer.send(&marker));
    std::thread::sleep(common::PATIENCE * 2);
}

/// Returns the closed run of a killed process.
fn run_of_killed(daemon: &Daemon, role: &str) -> gpumem_model::run::Run {
    let mut other = OtherProcess::start(daemon, role);
    let pid = other.pid();
    let packets = || daemon.metric("gpumemd_agent_packets_total").filter(|count| *count >= 2.0);
    wait_for("the agent", packets);
    wait_for("its state", || {
        (daemon.runs(&format!("?pid={pid}")).len() == 1 || role == "holes").then_some(())
    });
    other.kill();
    wait_for("the run to be closed", || {
        let runs = daemon.runs(&format!("?pid={pid}"));
        runs.into_iter().find(|run| matches!(run.state, State::Closed { .. }))
    })
}

#[test]
fn what_a_killed_process_never_sent_is_in_its_run() {
    let daemon = start("");
    let run = run_of_killed(&daemon, "unsent");
    assert_eq!(run.coverage.events, 5);
    assert_eq!(run.coverage.lost, 0);
    assert!(!run.coverage.partial_history);
    assert_eq!(run.devices[0].peak.tracked_bytes, Some(15 << 20));
    assert!(run.cells.iter().any(|cell| cell.tag.as_deref() == Some("from/the/memory")));
    assert_eq!(daemon.metric("gpumemd_agent_recovered_records_total"), Some(3.0));
    wait_for("it to vanish", || {
        let (_, ps) = daemon.get("/v1/ps");
        ps["processes"].as_array().is_some_and(Vec::is_empty).then_some(())
    });
    assert!(!daemon.scrape().contains("gpumem_process_"), "its series vanish with it");
    // The stored run is closed too.
    let store = Store::open_read_only(daemon.store()).expect("a store");
    let stored = wait_for("the store", || store.list().expect("a list").into_iter().next());
    assert!(matches!(stored.state, State::Closed { .. }));
    assert_eq!(stored.events, 5);
}

#[test]
fn after_a_full_ring_the_live_table_tells_the_end() {
    let daemon = start("");
    let run = run_of_killed(&daemon, "holes");
    assert_eq!(run.coverage.lost, 3);
    assert!(run.coverage.partial_history && !run.coverage.partial_state);
    assert_eq!(run.devices[0].last.tracked_bytes, Some(9 << 20));
}

#[test]
fn a_child_that_holds_the_socket_does_not_keep_the_run_open() {
    let daemon = start("");
    let run = run_of_killed(&daemon, "forked");
    assert_eq!(run.coverage.events, 1);
}

#[test]
fn an_agent_that_comes_back_goes_on() {
    let daemon = start("");
    let (peer, _) = Peer::welcomed(&daemon.agent_socket(), &Memory::new());
    let (stamp, body) = allocation(1, 4096, 0);
    assert!(peer.send(&[device(), record(stamp, body), watermark(1)].concat()));
    tracked(&daemon, 4096);
    drop(peer);
    let (again, epoch) = Peer::welcomed(&daemon.agent_socket(), &Memory::new());
    let rows = [allocation(1, 4096, 0)];
    assert!(again.send(&[device(), resync(epoch, 1, &rows)].concat()));
    let (stamp, body) = allocation(2, 4096, 0);
    assert!(again.send(&[record(stamp, body), watermark(2)].concat()));
    tracked(&daemon, 8192);
}
