//! Start, reload and end of the daemon, and obstacles to them.

use crate::common;
use crate::common::peer::{
    Memory, Peer, VERSIONS, allocation, device, hello, now, own_start_ticks, record, resync, tag, watermark,
};
use crate::common::{Daemon, PATIENCE, Scratch, free_port, private, start, start_as, start_in, wait_for};
use gpumem_model::run::State;
use gpumem_runs::store::Store;
use gpumem_wire::{Body, Stamp};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Returns an agent with one allocation of 4 KiB.
fn agent(daemon: &Daemon) -> Peer {
    let (peer, epoch) = Peer::welcomed(&daemon.agent_socket(), &Memory::new());
    let (stamp, body) = allocation(1, 4096, 0);
    assert!(peer.send(&[device(), resync(epoch, 0, &[]), record(stamp, body), watermark(1)].concat()));
    wait_for("the allocation", || {
        let runs = daemon.runs(&format!("?pid={}", std::process::id()));
        (runs.first()?.devices.first()?.last.tracked_bytes == Some(4096)).then_some(())
    });
    peer
}

#[test]
fn at_the_end_runs_are_written_and_go_on_in_the_next_life() {
    let mut daemon = start("[runs]\ncheckpoint_every_s = 3600.0\n");
    let peer = agent(&daemon);
    let started = Instant::now();
    daemon.end().expect("a good end");
    gpumem_test_support::bar("the end of a daemon", started.elapsed(), Duration::from_secs(1));
    let stored = |daemon: &Daemon| {
        let store = Store::open_read_only(daemon.store()).expect("a store");
        let list = store.list().expect("a list");
        assert_eq!(list.len(), 1);
        list.into_iter().next().expect("a run")
    };
    let first = stored(&daemon);
    assert_eq!((first.events, first.state), (1, State::Interrupted));
    drop(peer);

    let scratch = Scratch(std::mem::take(&mut daemon.scratch.0));
    let mut daemon = start_in(scratch, "[runs]\ncheckpoint_every_s = 0.05\n");
    let _peer = agent(&daemon);
    wait_for("the run to go on", || (stored(&daemon).state == State::Open).then_some(()));
    let live = daemon.runs(&format!("?pid={}", std::process::id()));
    assert_eq!((live.len(), live[0].coverage.events), (1, 2), "with what the first life saw");
    daemon.end().expect("a good end");
    let last = stored(&daemon);
    assert_eq!((last.id, last.events), (first.id, 2), "the same run goes on");
}

#[test]
fn a_broken_store_stops_nothing_and_heals() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.join("runs.sqlite")).expect("a directory in the way");
    let daemon = start_in(scratch, "[runs]\ncheckpoint_every_s = 0.05\n");
    let peer = agent(&daemon);
    wait_for("the error", || daemon.metric("gpumemd_store_errors_total").filter(|count| *count > 0.0));
    assert_eq!(daemon.metric("gpumemd_source_up{source=\"store\"}"), Some(0.0));
    wait_for("the run to wait", || daemon.metric("gpumemd_store_waiting").filter(|count| *count == 1.0));
    let (_, doctor) = daemon.get("/v1/doctor");
    let findings = doctor["findings"].as_array().expect("findings");
    assert!(
        findings.iter().any(|finding| finding["subject"] == "store" && finding["state"] == "bad"),
        "{doctor}"
    );
    std::fs::remove_dir(daemon.store()).expect("the way is free");
    wait_for("the store", || daemon.metric("gpumemd_source_up{source=\"store\"}").filter(|up| *up == 1.0));
    let store = Store::open_read_only(daemon.store()).expect("a store");
    assert_eq!(store.list().expect("a list").len(), 1);
    drop(peer);
}

#[test]
fn a_damaged_store_is_put_aside() {
    let mut first = start("");
    drop(agent(&first));
    first.end().expect("a good end");
    let mut damaged = std::fs::read(first.store()).expect("a store");
    damaged.truncate(damaged.len() / 2 + 100);
    std::fs::write(first.store(), damaged).expect("written");
    let scratch = Scratch(std::mem::take(&mut first.scratch.0));
    let daemon = start_in(scratch, "[runs]\ncheckpoint_every_s = 0.05\n");
    let _peer = agent(&daemon);
    wait_for("a write", || daemon.metric("gpumemd_store_writes_total").filter(|count| *count > 0.0));
    let aside = std::fs::read_dir(&daemon.scratch.0).expect("a directory").filter_map(Result::ok);
    assert!(aside.into_iter().any(|entry| entry.file_name().to_string_lossy().contains(".damaged-")));
}

#[test]
fn a_changed_configuration_is_taken_and_a_wrong_one_is_not() {
    let mut daemon = start("[agent]\nconnections_per_uid = 1\n");
    let _one = Peer::welcomed(&daemon.agent_socket(), &Memory::new());
    Peer::connect(&daemon.agent_socket()).is_closed();
    let text = std::fs::read_to_string(daemon.config()).expect("a file");
    std::fs::write(daemon.config(), text.replace("connections_per_uid = 1", "connections_per_uid = 0"))
        .expect("a file");
    daemon.reload();
    wait_for("the refusal", || daemon.metric("gpumemd_reload_errors_total").filter(|count| *count == 1.0));
    Peer::connect(&daemon.agent_socket()).is_closed();
    std::fs::write(daemon.config(), text.replace("connections_per_uid = 1", "connections_per_uid = 9"))
        .expect("a file");
    daemon.reload();
    wait_for("the change", || daemon.metric("gpumemd_reloads_total").filter(|count| *count == 1.0));
    Peer::welcomed(&daemon.agent_socket(), &Memory::new());
}

#[test]
fn a_recording_replays_to_the_same_run() {
    let mut daemon = start("record = \"$DIR/recording\"\n");
    let peer = agent(&daemon);
    let live = wait_for("the run with its command line, which is read beside the records", || {
        let run = daemon.runs(&format!("?pid={}", std::process::id())).into_iter().next()?;
        run.process.facts.contains_key("command").then_some(run)
    });
    drop(peer);
    daemon.end().expect("a good end");
    let path = daemon.scratch.join("recording");
    let mut builder = gpumem_runs::builder::RunBuilder::new(live.source.clone());
    let input = gpumem_runs::input::Input::open(&path).expect("a recording");
    gpumem_runs::recording::read(input, &mut builder).expect("it is whole");
    let replayed = builder.runs(true).remove(0);
    assert_eq!(replayed.process, live.process);
    assert_eq!(replayed.coverage, live.coverage);
    assert_eq!(replayed.devices[0].peak, live.devices[0].peak);
    assert_eq!(replayed.caveats, []);
    // A second daemon must not overwrite the recording.
    let scratch = Scratch(std::mem::take(&mut daemon.scratch.0));
    let error = start_in(scratch, "record = \"$DIR/recording\"\n").result().expect_err("it is there");
    assert!(format!("{error:#}").contains("record ="), "{error:#}");
}

#[test]
fn a_private_daemon_ends_when_nobody_needs_it() {
    let scratch = Scratch::new();
    let setup = private(&scratch, 0.4);
    let mut daemon = start_as(scratch, free_port(), setup);
    let agent_socket = daemon.scratch.join("gpumem/agent.sock");
    let mode = daemon.scratch.join("gpumem").metadata().expect("a directory").permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let peer = wait_for("an agent", || Some(Peer::welcomed(&agent_socket, &Memory::new())));
    std::thread::sleep(Duration::from_millis(700));
    assert!(!daemon.is_over(), "an agent is there");
    drop(peer);
    let started = Instant::now();
    daemon.result().expect("a good end");
    assert!(started.elapsed() >= Duration::from_millis(200), "{:?}", started.elapsed());
}

#[test]
fn a_second_daemon_is_refused() {
    let daemon = start("");
    let second = start_in(Scratch(daemon.scratch.0.clone()), "").result().expect_err("there is one");
    std::fs::create_dir_all(&daemon.scratch.0).expect("kept");
    assert!(second.to_string().contains("another gpumemd"), "{second}");
}

#[test]
fn what_a_dead_daemon_left_is_replaced() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.join("run")).expect("a directory");
    for name in ["agent.sock", "control.sock"] {
        drop(UnixListener::bind(scratch.join("run").join(name)).expect("a socket"));
    }
    std::fs::create_dir(scratch.join("run/agent")).expect("a directory");
    drop(UnixListener::bind(scratch.join("run/agent/agent.sock")).expect("a socket"));
    let daemon = start_in(scratch, "");
    assert_eq!(daemon.get("/v1/ps").0, 200);
    let mode = |path: std::path::PathBuf| {
        let found = path.metadata().expect("a socket");
        assert!(found.file_type().is_socket());
        found.permissions().mode() & 0o777
    };
    assert_eq!((mode(daemon.agent_socket()), mode(daemon.control_socket())), (0o666, 0o666));
}

#[test]
fn the_directory_that_containers_are_given_holds_the_agents_socket_alone() {
    let daemon = start("");
    let names = |folder: &str| {
        let entries = std::fs::read_dir(daemon.scratch.join(folder)).expect("a directory");
        let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names("run/agent"), ["agent.sock"]);
    assert_eq!(names("run"), ["agent", "agent.sock", "control.sock", "gpumemd.lock"]);
    let link = std::fs::read_link(daemon.agent_socket()).expect("a link");
    assert_eq!(
        link.to_str(),
        Some("agent/agent.sock"),
        "also right where the directory is mounted elsewhere"
    );
    Peer::welcomed(&daemon.scratch.join("run/agent/agent.sock"), &Memory::new());
    // A killed daemon leaves its directory and the link.
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.join("run")).expect("a directory");
    symlink("agent/agent.sock", scratch.join("run/agent.sock")).expect("a link");
    let daemon = start_in(scratch, "");
    Peer::welcomed(&daemon.agent_socket(), &Memory::new());
}

#[test]
fn a_socket_in_use_and_a_file_in_the_way_are_not_touched() {
    for (name, in_use) in [("agent.sock", false), ("control.sock", true)] {
        let scratch = Scratch::new();
        std::fs::create_dir(scratch.join("run")).expect("a directory");
        let path = scratch.join("run").join(name);
        let listener = in_use.then(|| UnixListener::bind(&path).expect("a socket"));
        if !in_use {
            std::fs::write(&path, "precious").expect("a file");
        }
        let error = start_in(scratch, "").result().expect_err("something is in the way").to_string();
        assert!(error.contains(name), "{error}");
        drop(listener);
    }
}

#[test]
fn a_runtime_directory_that_others_could_write_to_is_refused() {
    let open = Scratch::new();
    std::fs::create_dir(open.join("run")).expect("a directory");
    std::fs::set_permissions(open.join("run"), PermissionsExt::from_mode(0o777)).expect("a mode");
    let error = start_in(open, "").result().expect_err("anybody could write").to_string();
    assert!(error.contains("0777"), "{error}");

    let linked = Scratch::new();
    std::fs::create_dir(linked.join("elsewhere")).expect("a directory");
    symlink(linked.join("elsewhere"), linked.join("run")).expect("a link");
    let error = start_in(linked, "").result().expect_err("a link").to_string();
    assert!(error.contains("it is not a directory"), "{error}");
}

#[test]
fn nothing_is_written_through_links_that_somebody_planted() {
    const PRECIOUS: &str = "root:x:0:0\n";
    let plant = |name: &str, config: &str, is_open: bool| {
        let scratch = Scratch::new();
        let victim = scratch.join("victim");
        std::fs::write(&victim, PRECIOUS).expect("a file");
        std::fs::create_dir(scratch.join("run")).expect("a directory");
        std::fs::set_permissions(scratch.join("run"), PermissionsExt::from_mode(0o755)).expect("a mode");
        std::fs::create_dir(scratch.join("open")).expect("a directory");
        let mode = if is_open { 0o777 } else { 0o755 };
        std::fs::set_permissions(scratch.join("open"), PermissionsExt::from_mode(mode)).expect("a mode");
        symlink(&victim, scratch.join(name)).expect("a link");
        let mut daemon = start_in(scratch, config);
        let reason = match daemon.is_over() {
            true => daemon.result().expect_err("it refuses").to_string(),
            false if name.starts_with("open/runs") => wait_for("what the store says", || {
                let text = daemon.get("/v1/doctor").1.to_string();
                text.contains("wait in memory").then_some(text)
            }),
            false => daemon.get("/v1/doctor").1.to_string(),
        };
        let victim = daemon.scratch.join("victim");
        assert_eq!(std::fs::read_to_string(victim).expect("a file"), PRECIOUS, "{name}");
        reason
    };
    let store = "[runs]\nstore = \"$DIR/open/runs.sqlite\"\n";
    for name in ["run/control.sock", "run/gpumemd.lock", "run/agent"] {
        let reason = plant(name, "", false);
        assert!(reason.contains(name), "{name}: {reason}");
    }
    // An existing link is replaced by one to the agents' socket.
    plant("run/agent.sock", "", false);
    let reason = plant("open/new.gpumem", "record = \"$DIR/open/new.gpumem\"\n", false);
    assert!(reason.contains("a new file cannot be created"), "{reason}");
    for name in
        ["runs.sqlite", "runs.sqlite-wal", "runs.sqlite-shm", "runs.sqlite-journal", "runs.sqlite-deltas"]
    {
        let name = &format!("open/{name}");
        let reason = plant(name, store, true);
        assert!(reason.contains("a link or another user's file"), "{name}: {reason}");
    }
}

/// The daemon as a program; killed when a test fails.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Program {
    fn start(scratch: &Scratch, arguments: &[&str]) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_gpumemd"))
            .args(arguments)
            .env("XDG_RUNTIME_DIR", &scratch.0)
            .env("XDG_STATE_HOME", &scratch.0)
            .env_remove("NOTIFY_SOCKET")
            .stderr(Stdio::piped())
            .spawn()
            .expect("a program");
        Program(child)
    }

    fn end(mut self) -> (Option<i32>, String) {
        let started = Instant::now();
        let status = wait_for("the program to end", || self.0.try_wait().expect("a child"));
        assert!(started.elapsed() < PATIENCE);
        let mut said = String::new();
        self.0.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
        (status.code(), said)
    }
}

#[test]
fn sigterm_ends_the_program_well_at_any_time() {
    for wait in [false, true] {
        let scratch = Scratch::new();
        let program = Program::start(&scratch, &["--private"]);
        if wait {
            wait_for("a daemon", || UnixStream::connect(scratch.join("gpumem/control.sock")).ok());
        } else {
            // The handlers are installed when /proc shows the signal as caught.
            let status = format!("/proc/{}/status", program.0.id());
            wait_for("the handlers", || {
                let text = std::fs::read_to_string(&status).ok()?;
                let caught = text.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
                (u64::from_str_radix(caught.trim(), 16).ok()? & 1 << 14 != 0).then_some(())
            });
        }
        let pid = rustix::process::Pid::from_child(&program.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("sent");
        let started = Instant::now();
        let (code, said) = program.end();
        assert_eq!(code, Some(0), "{said}");
        gpumem_test_support::bar("the end of the program", started.elapsed(), Duration::from_secs(1));
    }
}

#[test]
fn the_program_says_what_is_wrong() {
    let scratch = Scratch::new();
    let file = scratch.join("wrong.toml");
    std::fs::write(&file, "[metrics]\nport = 1\n").expect("a file");
    let file = file.display().to_string();
    let (code, said) = Program::start(&scratch, &["--check", "--config", &file]).end();
    assert_eq!(code, Some(1));
    assert!(said.contains("wrong.toml") && said.contains("line 2") && said.contains("port"), "{said}");
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/gpumemd.toml");
    assert_eq!(Program::start(&scratch, &["--check", "--config", shipped]).end().0, Some(0));
    for log in ["loud==", "foo=bar=baz", "info,gpumemd=loud"] {
        let (code, said) = Program::start(&scratch, &["--private", "--log", log]).end();
        assert_eq!(code, Some(1), "{log}");
        assert!(said.contains("--log"), "{said}");
    }
}

#[test]
fn systemd_is_told_and_its_sockets_are_taken() {
    use std::os::unix::net::UnixDatagram;
    let scratch = Scratch::new();
    let notify = UnixDatagram::bind(scratch.join("notify")).expect("a socket");
    notify.set_read_timeout(Some(PATIENCE)).expect("a limit");
    let mut program = Command::new("systemd-socket-activate");
    let agent = scratch.join("agent.sock");
    program.args(["--seqpacket", "--fdname=agent", "-E", "XDG_RUNTIME_DIR", "-E", "XDG_STATE_HOME"]);
    program.args(["-E", "NOTIFY_SOCKET", "-E", "WATCHDOG_USEC", "-l"]).arg(&agent);
    program.arg(env!("CARGO_BIN_EXE_gpumemd")).arg("--private");
    program.env("XDG_RUNTIME_DIR", &scratch.0).env("XDG_STATE_HOME", &scratch.0);
    program.env("NOTIFY_SOCKET", scratch.join("notify")).env("WATCHDOG_USEC", "300000");
    let Ok(child) = program.stderr(Stdio::piped()).spawn() else {
        gpumem_test_support::skip("there is no systemd-socket-activate", "apt-get install systemd");
        return;
    };
    let program = Program(child);
    // The first connection starts the daemon, which then serves it.
    let _peer = Peer::welcomed(&agent, &Memory::new());
    let mut seen = String::new();
    let mut hear = |word: &str| {
        while !seen.contains(word) {
            let mut said = [0; 512];
            let len =
                notify.recv(&mut said).unwrap_or_else(|error| panic!("no {word}: {error} after {seen}"));
            seen += &String::from_utf8_lossy(&said[..len]);
        }
        seen.clear();
    };
    hear("READY=1");
    hear("WATCHDOG=1");
    hear("STATUS=1 agents");
    let pid = rustix::process::Pid::from_child(&program.0);
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).expect("sent");
    hear("RELOADING=1");
    hear("READY=1");
    assert!(!scratch.join("gpumem/agent.sock").exists(), "the one that was handed over is used");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("sent");
    hear("STOPPING=1");
    let (code, said) = program.end();
    assert_eq!(code, Some(0), "{said}");
}

/// `prlimit --as`, as a batch system may set it for all its programs.
#[test]
fn a_gibibyte_of_addresses_is_enough() {
    let scratch = Scratch::new();
    let dir = scratch.0.display();
    let config = format!(
        "runtime_dir = \"{dir}/run\"\n[runs]\nstore = \"{dir}/runs.sqlite\"\ncheckpoint_every_s = 0.05\n\
         [metrics]\nlisten = \"off\"\n[nvml]\nlibrary = \"/nonexistent\"\n"
    );
    std::fs::write(scratch.join("gpumemd.toml"), config).expect("a file");
    let child = Command::new("prlimit")
        .args(["--as=1073741824", "--", env!("CARGO_BIN_EXE_gpumemd"), "--config"])
        .arg(scratch.join("gpumemd.toml"))
        .stderr(Stdio::piped())
        .spawn();
    let Ok(child) = child else {
        gpumem_test_support::skip("there is no prlimit", "apt-get install util-linux");
        return;
    };
    let program = Program(child);
    let socket = scratch.join("run/agent.sock");
    wait_for("the daemon", || UnixStream::connect(scratch.join("run/control.sock")).ok());
    let (peer, epoch) = Peer::welcomed(&socket, &Memory::new());
    assert!(peer.send(&[device(), resync(epoch, 0, &[])].concat()));
    // More than a small answer, so that another thread serializes it.
    for seq in 1..=2000 {
        let (stamp, body) = allocation(seq, 4096, seq as u32);
        assert!(peer.send(
            &[tag(seq as u32, &format!("a/long/name/{seq}")), record(stamp, body), watermark(seq)].concat()
        ));
    }
    let path = format!("/v1/runs?pid={}", std::process::id());
    wait_for("all of it", || asked(&scratch, &path).contains("\"events\":2000").then_some(()));
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| assert!(asked(&scratch, &path).len() > 100_000));
        }
    });
    wait_for("the run to be stored", || {
        let store = Store::open_read_only(scratch.join("runs.sqlite")).ok()?;
        (store.list().ok()?.first()?.events == 2000).then_some(())
    });
    drop(peer);
    ends_well(program);
}

/// Returns the resident memory of a process in MiB: `VmRSS` (now) or `VmHWM` (peak).
fn resident_mib(pid: u32, which: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix(which)?.strip_prefix(':')).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") >> 10
}

/// Starts the program with these `[agent]` keys and no NVML. Raises this process's limit of descriptors.
fn program_for_many(agent: &str) -> (Scratch, Program, std::path::PathBuf) {
    let scratch = Scratch::new();
    let dir = scratch.0.display();
    let config = format!(
        "runtime_dir = \"{dir}/run\"\n[agent]\nconnections = 1100\nconnections_per_uid = 1100\n{agent}\
         [runs]\nstore = \"{dir}/runs.sqlite\"\n[metrics]\nlisten = \"off\"\n[nvml]\nlibrary = \"/nonexistent\"\n"
    );
    std::fs::write(scratch.join("gpumemd.toml"), config).expect("a file");
    let program =
        Program::start(&scratch, &["--config", &scratch.join("gpumemd.toml").display().to_string()]);
    let socket = scratch.join("run/agent.sock");
    wait_for("the daemon", || UnixStream::connect(scratch.join("run/control.sock")).ok());
    // The daemon itself opens descriptors for the store and for the NVML poller; wait for them before counting.
    wait_for("a daemon that has all that it needs", || {
        let is_stored = scratch.join("runs.sqlite-shm").exists();
        (is_stored && asked(&scratch, "/v1/doctor").contains("/nonexistent")).then_some(())
    });
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).expect("more descriptors");
    (scratch, program, socket)
}

fn asked(scratch: &Scratch, path: &str) -> String {
    let stream = UnixStream::connect(scratch.join("run/control.sock")).expect("a daemon");
    common::http(stream, "GET", path).1
}

fn ends_well(program: Program) {
    let pid = rustix::process::Pid::from_child(&program.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("sent");
    assert_eq!(program.end().0, Some(0));
}

/// The kernel reports that a peer closed without reading its welcome before it returns the peer's earlier packets.
#[test]
fn packets_of_a_peer_that_never_read_its_welcome_are_read() {
    const EVENTS: u64 = 20;
    let (scratch, program, socket) = program_for_many("");
    let pid = rustix::process::Pid::from_child(&program.0);
    let memory = Memory::new();
    let peer = Peer::connect(&socket);
    peer.send_with(&hello(own_start_ticks(), VERSIONS), &[memory.fd.as_fd()]);
    wait_for("a welcome that stays unread", || {
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        rustix::net::recv(&peer.socket, &mut [0; 1][..], flags).ok()
    });
    // The daemon is stopped, so that all packets and the end of the connection are in its queue.
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("sent");
    wait_for("a stopped daemon", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", program.0.id())).ok()?;
        stat.rsplit_once(')')?.1.starts_with(" T").then_some(())
    });
    assert!(peer.send(&device()));
    for seq in 1..=EVENTS {
        let (stamp, body) = allocation(seq, 4096, 0);
        assert!(peer.send(&record(stamp, body)));
    }
    assert!(peer.send(&watermark(EVENTS)));
    drop(peer);
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("sent");
    let path = format!("/v1/runs?pid={}", std::process::id());
    wait_for("all of it", || asked(&scratch, &path).contains(&format!("\"events\":{EVENTS}")).then_some(()));
    ends_well(program);
}

#[test]
fn a_thousand_agents_cost_less_than_64_mib() {
    const AGENTS: usize = 1000;
    let (scratch, program, socket) = program_for_many("");
    let pid = program.0.id();
    let before = resident_mib(pid, "VmRSS");
    let memory = Memory::new();
    // Names of maximum length, rows at the same addresses for all agents, and invalid bytes at the end.
    let said = |agent: usize, epoch| {
        let mut said = vec![device()];
        said.extend(
            (1..9).map(|number| tag(number, &format!("{agent}/{}", "x".repeat(200 + number as usize)))),
        );
        said.push(resync(epoch, 0, &[]));
        said.extend((1..65).map(|seq| {
            let (stamp, body) = allocation(seq, 1 << 20, (seq % 8) as u32 + 1);
            record(stamp, body)
        }));
        said.push(watermark(64));
        said.concat()
    };
    let peers: Vec<Peer> = (0..AGENTS)
        .map(|agent| {
            let (peer, epoch) = Peer::welcomed(&socket, &memory);
            assert!(peer.send(&said(agent, epoch)), "{agent}");
            peer
        })
        .collect();
    let ask = |path: &str| asked(&scratch, path);
    wait_for("what they say", || {
        let text = ask("/v1/metrics");
        text.contains(&format!("gpumemd_agent_connections_total {AGENTS}")).then_some(())
    });
    // Invalid data ends only its own connection.
    for peer in peers.iter().take(AGENTS / 2) {
        peer.send(&[0xff; 60_000]);
    }
    wait_for("rubbish to be dropped", || {
        let text = ask("/v1/metrics");
        text.contains(&format!("dropped_total{{reason=\\\"framing\\\"}} {}", AGENTS / 2)).then_some(())
    });
    let (now, most) = (resident_mib(pid, "VmRSS"), resident_mib(pid, "VmHWM"));
    println!("{before} MiB without, {now} MiB with {AGENTS} agents, {most} MiB at most");
    assert!(most <= 64, "{most} MiB");
    drop(peers);
    ends_well(program);
}

#[test]
fn a_thousand_hostile_clients_cost_less_than_64_mib_and_give_everything_back() {
    const CLIENTS: usize = 1000;
    // All peers belong to one user, so the user's memory limit bounds the ledger.
    let limits = "connections_without_hello = 4400\nhello_timeout_s = 600.0\nmemory_mib = 24\nmemory_mib_per_uid = 24\n";
    let (scratch, program, socket) = program_for_many(limits);
    let pid = program.0.id();
    let fds = || std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it lives").count();
    let (fds_before, before) = (fds(), resident_mib(pid, "VmRSS"));
    let memory = Memory::new();
    let largest = |number: u32| {
        let module = Body::Module { path: &"m".repeat(50_000), base: 0, bytes: 1 };
        let stamp = Stamp { module: number as u16, time_ns: now(), ..Stamp::default() };
        [tag(number, &format!("{number}/{}", "t".repeat(200))), record(stamp, module)].concat()
    };
    let peers: Vec<Peer> = (0..CLIENTS)
        .map(|client| {
            let number = client as u32;
            match client % 8 {
                // Sends nothing, half a frame, or only a length, and stays connected.
                0 => Peer::connect(&socket),
                1 => {
                    let peer = Peer::connect(&socket);
                    // The connection is closed if the first packet has no hello, even if it is empty.
                    peer.send(&largest(number)[..100]);
                    peer
                }
                2 => {
                    let peer = Peer::connect(&socket);
                    peer.send(&[0xff; 64 << 10]);
                    peer
                }
                // Completes the hello and sends the largest packets without reading anything: endless names, half frames.
                3 | 4 => {
                    let (peer, _) = Peer::welcomed(&socket, &memory);
                    for at in 0..20 {
                        peer.send(&largest(number + 1000 * at));
                    }
                    peer
                }
                5 | 6 => {
                    let (peer, _) = Peer::welcomed(&socket, &memory);
                    for packet in 0..8 {
                        let names: Vec<_> = (0..200)
                            .map(|at| tag(packet * 200 + at, &format!("{client}/{at}/{}", "t".repeat(230))))
                            .collect();
                        peer.send(&names.concat());
                    }
                    peer
                }
                _ => {
                    let (peer, _) = Peer::welcomed(&socket, &memory);
                    let whole = largest(number);
                    peer.send(&whole[..whole.len() / 2]);
                    peer
                }
            }
        })
        .collect();
    // All have been served: another agent is accepted, and no packet of theirs is left unread.
    let (last, epoch) = Peer::welcomed(&socket, &memory);
    let (stamp, body) = allocation(1, 4096, 0);
    assert!(last.send(&[device(), resync(epoch, 0, &[]), record(stamp, body), watermark(1)].concat()));
    let dropped = |text: &str, reason: &str| {
        let series = format!("{reason}\\\"}} ");
        let (_, rest) = text.split_once(&series)?;
        rest.split("\\n").next()?.parse::<usize>().ok()
    };
    wait_for("half frames to be dropped", || {
        let text = asked(&scratch, "/v1/metrics");
        (dropped(&text, "dropped_total{reason=\\\"framing")? >= CLIENTS / 8
            && dropped(&text, "refused_total{reason=\\\"no_hello")? >= CLIENTS / 4)
            .then_some(())
    });
    let (now, most) = (resident_mib(pid, "VmRSS"), resident_mib(pid, "VmHWM"));
    println!(
        "{before} MiB without, {now} MiB with {CLIENTS} hostile clients, {most} MiB at most, {} descriptors",
        fds()
    );
    assert!(most <= 64, "{most} MiB");
    let text = asked(&scratch, "/v1/doctor");
    assert!(text.contains("agent.memory"), "who was refused is told: {text}");
    drop((peers, last));
    // The memory of one user's ended agents is read one after the other, and a user whose read is slow is paused. That takes
    // seconds, or minutes on a busy machine.
    let dropped = Instant::now();
    while fds() > fds_before + 2 {
        assert!(dropped.elapsed() < Duration::from_secs(300), "{} descriptors are held", fds());
        std::thread::sleep(Duration::from_millis(50));
    }
    ends_well(program);
}
