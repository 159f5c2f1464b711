//! The control API.

use crate::common::peer::{Memory, Peer, allocation, device, now, record, resync, watermark};
use crate::common::{Daemon, start, wait_for};
use gpumem_model::control::{Doctor, HiddenRun, Ps, State};
use gpumem_test_support::SharedCopy;
use gpumem_wire::{Body, MemoryKind, Reading, Stamp};
use rustix::process::Uid;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

fn covered(daemon: &Daemon) -> Peer {
    let (peer, epoch) = Peer::welcomed(&daemon.agent_socket(), &Memory::new());
    let (stamp, body) = allocation(1, 4096, 0);
    assert!(peer.send(&[device(), resync(epoch, 0, &[]), record(stamp, body), watermark(1)].concat()));
    wait_for("a row", || {
        let (_, ps) = daemon.get("/v1/ps");
        (ps["processes"][0]["tracked_bytes"] == 4096).then_some(())
    });
    peer
}

fn failed_allocation(seq: u64) -> (Stamp, Body<'static>) {
    let stamp = Stamp { seq, device: 0, time_ns: now(), ..Stamp::default() };
    let device_free_bytes = Reading::of(1 << 20);
    let memory = MemoryKind::Device;
    (stamp, Body::AllocFailed { bytes: 1 << 30, pool: 0, device_free_bytes, result: 2, memory })
}

#[test]
fn answers_are_what_the_types_say() {
    let daemon = start("");
    let _peer = covered(&daemon);
    let ps: Ps = serde_json::from_value(daemon.get("/v1/ps").1).expect("Ps");
    assert_eq!((ps.devices.len(), ps.processes.len()), (1, 1));
    assert_eq!(ps.devices[0].model, "Hand-made GPU");
    assert_eq!(ps.devices[0].used_bytes, None);
    assert!(
        ps.devices[0].why.as_ref().is_some_and(|why| why.contains("/nonexistent/")),
        "{:?}",
        ps.devices[0].why
    );
    let doctor: Doctor = serde_json::from_value(daemon.get("/v1/doctor").1).expect("Doctor");
    assert_eq!(doctor.pid, std::process::id());
    let nvml = doctor.findings.iter().find(|finding| finding.subject == "nvml").expect("nvml");
    assert_eq!(nvml.state, State::Bad);
    assert!(doctor.findings.is_sorted_by_key(|finding| finding.state), "worst first");
    let path = format!("/v1/doctor?pid={}", std::process::id());
    let doctor: Doctor = serde_json::from_value(daemon.get(&path).1).expect("Doctor");
    let own = format!("process {}", std::process::id());
    assert!(
        doctor.findings.iter().any(|finding| finding.subject == own && finding.state == State::Ok),
        "{doctor:?}"
    );
}

#[test]
fn a_mark_is_in_the_run_and_stays_there() {
    let daemon = start("[runs]\ncheckpoint_every_s = 0.05\n");
    let peer = covered(&daemon);
    let own = format!("pid={}", std::process::id());
    for (query, names) in
        [("name=warm%20up", 1), (&format!("name=x,y&{own}"), 2), (&format!("name=z&tree{}", &own[3..]), 3)]
    {
        let (status, marked) = daemon.ask("POST", &format!("/v1/mark?{query}"));
        assert_eq!((status, &marked["pids"]), (200, &serde_json::json!([std::process::id()])), "{marked}");
        let run = daemon.runs(&format!("?{own}")).remove(0);
        assert_eq!(run.coverage.marks.len(), names);
        let mark = run.coverage.marks.last().expect("a mark");
        assert_eq!(
            (mark.time_ns, mark.by.as_str()),
            (marked["time_ns"].as_u64().expect("a time"), "gpumemctl")
        );
    }
    let (status, refused) = daemon.ask("POST", "/v1/mark?name=x&pid=1");
    assert!(
        status == 404 && refused["error"].as_str().is_some_and(|error| error.contains("pid 1")),
        "{refused}"
    );
    for bad in ["", "?name=", "?name=%07", "?name=x&pid=y", "?name=x&device=1"] {
        assert_eq!(daemon.ask("POST", &format!("/v1/mark{bad}")).0, 400, "{bad}");
    }
    assert_eq!(daemon.get("/v1/mark?name=x").0, 405);
    drop(peer);
    wait_for("the stored run with its marks", || {
        let store = gpumem_runs::store::Store::open_read_only(daemon.store()).ok()?;
        let run = store.load(store.latest().ok()??).ok()?;
        let names: Vec<_> = run.coverage.marks.iter().filter_map(|mark| mark.name.as_deref()).collect();
        (names == ["warm up", "x,y", "z"]).then_some(())
    });
}

#[test]
fn refusals_say_what_would_be_right() {
    let daemon = start("");
    let cases = [
        ("GET", "/", 404, "/v1/ps"),
        ("GET", "/v2/ps", 404, "/v1/ps"),
        ("POST", "/v1/ps", 405, "GET"),
        ("GET", "/v1/nvml/release?for_s=1", 405, "POST"),
        ("POST", "/v1/nvml/release", 400, "for_s=N"),
        ("POST", "/v1/nvml/release?for_s=0", 400, "from 1 to"),
        ("POST", "/v1/nvml/release?for_s=x", 400, "not a number"),
        ("GET", "/v1/doctor?pid=4000000000", 404, "4000000000"),
        ("GET", "/v1/doctor?pid=x", 400, "not a number"),
        ("GET", "/v1/runs?user=bob", 400, "pid, tree, job"),
        ("GET", "/v1/runs?pid=1&job=2", 400, "at most one"),
    ];
    for (method, path, status, word) in cases {
        let (found, answer) = daemon.ask(method, path);
        assert_eq!(found, status, "{method} {path}: {answer}");
        assert!(
            answer["error"].as_str().is_some_and(|error| error.contains(word)),
            "{method} {path}: {answer}"
        );
    }
    assert_eq!(daemon.get("/v1/runs?pid=4000000000"), (200, serde_json::json!([])));
    assert_eq!(daemon.ask("POST", "/v1/nvml/release?for_s=2"), (200, serde_json::json!({"for_s": 2})));
}

/// Returns the answer to another user: this test program, run as that user, sends the request.
fn as_nobody(daemon: &Daemon, path: &str) -> String {
    // The directory of the test is root's; the sockets are accessible to all users.
    let program = SharedCopy::of_this_program();
    let output = Command::new(program.path())
        .args(["--exact", "control::as_another_user", "--nocapture", "--test-threads=1"])
        .env("GPUMEMD_TEST_ASK", path)
        .env("GPUMEMD_TEST_SOCKET", daemon.control_socket())
        .uid(65534)
        .gid(65534)
        .output()
        .expect("a process");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let answer = text.split_once("<<<").and_then(|(_, rest)| rest.split_once(">>>"));
    answer.unwrap_or_else(|| panic!("no answer: {text}")).0.to_owned()
}

#[test]
fn as_another_user() {
    let Ok(path) = std::env::var("GPUMEMD_TEST_ASK") else { return };
    let socket = std::env::var_os("GPUMEMD_TEST_SOCKET").expect("a socket");
    let mut stream = UnixStream::connect(socket).expect("a daemon");
    let request =
        format!("{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    println!("<<<{}>>>", answer.split_once("\r\n\r\n").expect("a body").1);
}

/// Tests of the lane `privileged`.
mod privileged {
    use super::*;

    #[test]
    fn other_users_see_bytes_and_no_more() {
        if rustix::process::geteuid() != Uid::ROOT {
            gpumem_test_support::skip(
                "only root can become another user",
                "sudo make test-all LANES=privileged",
            );
            return;
        }
        let daemon = start("");
        let peer = covered(&daemon);
        let ps: Ps = serde_json::from_str(&as_nobody(&daemon, "GET /v1/ps")).expect("Ps");
        let row = &ps.processes[0];
        assert_eq!(row.pid, std::process::id());
        assert_eq!((row.uid, row.user.as_deref()), (Some(0), Some("root")));
        assert_eq!((row.tracked_bytes, row.idle_bytes, row.untrackable_bytes), (None, None, None));
        assert_eq!(row.command, None);
        assert_eq!(as_nobody(&daemon, &format!("GET /v1/runs?pid={}", row.pid)), "[]");
        let refusal = as_nobody(&daemon, &format!("GET /v1/doctor?pid={}", row.pid));
        // `ps` lists the process, so the refusal names its user.
        let pid = row.pid;
        let belongs = format!("pid {pid} belongs to root");
        assert!(refusal.contains(&belongs), "{refusal}");
        for request in ["mark?name=x&pid=", "mark?name=x&tree=", "record?do=stop&pid="] {
            let refusal = as_nobody(&daemon, &format!("POST /v1/{request}{pid}"));
            assert!(refusal.contains(&belongs), "{request}: {refusal}");
        }
        assert!(as_nobody(&daemon, "POST /v1/mark?name=x&pid=1").contains("not a process of yours"));

        // Jobs and OOMs of other users: their owner, and nothing else.
        let hidden = |query: &str| {
            let reply = as_nobody(&daemon, &format!("GET /v1/hidden?{query}"));
            serde_json::from_str::<Vec<HiddenRun>>(&reply).unwrap_or_else(|error| panic!("{reply}: {error}"))
        };
        let roots =
            [HiddenRun { pid, user: Some("root".into()), devices: vec![(0, ps.devices[0].uuid.clone())] }];
        assert_eq!(hidden("job=test-job"), roots);
        assert_eq!(hidden("job=other"), []);
        let wall_ns = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos();
        let around = format!("around={wall_ns}&within=600000000000");
        assert_eq!(hidden(&around), [], "it runs, and no memory ran out");
        let (stamp, body) = failed_allocation(2);
        assert!(peer.send(&[record(stamp, body), watermark(2)].concat()));
        wait_for("the OOM", || (hidden(&around) == roots).then_some(()));
        assert_eq!(as_nobody(&daemon, &format!("GET /v1/runs?{around}")), "[]");
        let long_ago = "around=1000000000000000000&within=600000000000";
        assert_eq!(hidden(long_ago), []);
        for query in [around.as_str(), "job=test-job"] {
            assert_eq!(daemon.get(&format!("/v1/hidden?{query}")).1, serde_json::json!([]), "root sees all");
        }
        assert!(as_nobody(&daemon, "POST /v1/nvml/release?for_s=1").contains("root"));

        let hidden = start("tenants = \"anonymous\"\n");
        let _peer = covered(&hidden);
        let ps: Ps = serde_json::from_str(&as_nobody(&hidden, "GET /v1/ps")).expect("Ps");
        let row = &ps.processes[0];
        assert_eq!((row.pid, row.uid, row.user.as_deref()), (0, None, None));
        let refusal = as_nobody(&hidden, &format!("POST /v1/mark?name=x&pid={}", std::process::id()));
        assert!(refusal.contains("not a process of yours"), "nobody may know whose it is: {refusal}");
        for query in ["around=0&within=9000000000000000000", "job=test-job"] {
            assert_eq!(as_nobody(&hidden, &format!("GET /v1/hidden?{query}")), "[]");
        }
    }
}
