//! `gpumemctl job` with replies of a daemon and of a Prometheus.

use crate::common::{FakeDaemon, Folder, failure, run_of, stdout};
use gpumem_model::control::{DeviceRow, HiddenRun, ProcessRow, Ps};
use gpumem_model::run::{Clock, Moment, Run, State};
use gpumem_runs::store::Store;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};

pub fn rank(pid: u32, rank: u32, state: State) -> Run {
    let mut run = run_of(pid, "bert.18a2b3c4d5e6f70-1f3", Some(rank));
    run.process.claims.insert("world_size".into(), "4".into());
    run.state = state;
    run.devices[0].name = format!("GPU-{rank}");
    run.devices[0].ordinal = rank as u16;
    run
}

const ENDED: State = State::Closed { time_ns: 9, status: Some(9) };

#[test]
fn ranks_on_this_node_are_summed() {
    let folder = Folder::new("job");
    let daemon = FakeDaemon::at(&folder.path("gpumem/control.sock"));
    let mut other = rank(102, 1, State::Open);
    other.devices[0].last.amounts[0].1 += 64 << 20;
    other.devices[0].last.tracked_bytes =
        Some(other.devices[0].last.amounts.iter().map(|(_, bytes)| bytes).sum());
    other.devices[0].peak_used =
        other.devices[0].peak_used.map(|(bytes, time_ns)| (bytes + (64 << 20), time_ns));
    daemon.runs("?job=bert", &[&rank(101, 0, State::Open), &other, &rank(103, 2, ENDED)]);
    let text = stdout(&folder.run(&["job", "bert"]));
    assert!(text.starts_with("job bert"), "{text}");
    assert!(text.contains(": 2 processes, 2 of 4 ranks\n"), "{text}");
    assert!(text.contains("missing: rank 2-3: no running process here"), "{text}");
    assert!(text.contains("ended, and not in the sums: rank 2 (GPU 2) (signal 9)"), "{text}");
    let json: Value = serde_json::from_str(&stdout(&folder.run(&["job", "bert", "--json"]))).expect("JSON");
    let members = json["members"].as_array().expect("members");
    assert_eq!(members.len(), 3);
    let tracked: i64 = members.iter().take(2).filter_map(|member| member["tracked_bytes"].as_i64()).sum();
    assert_eq!(json["tracked_bytes"], tracked, "of those that run");
    assert_eq!((&json["is_over"], &members[0]["node"]), (&false.into(), &Value::Null));
}

#[test]
fn a_job_that_is_over_is_told_from_the_store() {
    let folder = Folder::new("job-over");
    let path = folder.path("runs.sqlite");
    let mut store = Store::open(&path).expect("a store");
    let mut former = rank(90, 0, ENDED);
    former.process.claims.insert("job".into(), "bert.18a2b3c4d5e0000-1f3".into());
    former.process.start_ticks -= 1000;
    // Rank 1 was restarted, on another device.
    let mut again = rank(103, 1, ENDED);
    again.process.start_ticks += 50;
    again.devices[0].name = "GPU-3".into();
    for (life, run) in [former, rank(101, 0, ENDED), rank(102, 1, ENDED), again].iter().enumerate() {
        store.insert(run, &format!("boot:{life}")).expect("saved");
    }
    drop(store);
    let text = stdout(&folder.run(&["job", "bert", "--store", &path.to_string_lossy()]));
    assert!(
        text.contains(": 2 processes, 2 of 4 ranks, all ended: amounts are the last ones of each\n"),
        "{text}"
    );
    assert!(!text.contains("  90  ") && !text.contains("  102  ") && text.contains("  103  "), "{text}");
    let (code, why) = failure(&folder.run(&["job", "ernie", "--store", &path.to_string_lossy()]));
    let searched = format!("no job ernie: searched {}; there are: bert", path.display());
    assert!(code == 3 && why.contains(&searched), "{why}");
}

#[test]
fn why_counts_idle_children_of_the_same_time_only() {
    let folder = Folder::new("job-why");
    let path = folder.path("runs.sqlite");
    let mut store = Store::open(&path).expect("a store");
    let run = |pid: u32, begun_s: i64, is_idle: bool| {
        let mut run = run_of(pid, "bert", None);
        run.clock = Clock::Monotonic { wall_offset_ns: Some(begun_s * 1_000_000_000) };
        (run.state, run.coverage.covered) = (ENDED, true);
        if is_idle {
            run.process.facts.insert("ancestors".into(), "7,1".into());
        }
        let device = &mut run.devices[0];
        if is_idle {
            let untrackable_bytes = Some(500 << 20);
            let (tracked_bytes, predates_bytes) = (Some(0), Some(0));
            let moment = Moment { tracked_bytes, predates_bytes, untrackable_bytes, ..Moment::default() };
            (device.peak, device.last) = (moment.clone(), moment);
        }
        run
    };
    for (life, run) in [run(7, 90_000, false), run(8, 90_000, true), run(9, 500, true)].iter().enumerate() {
        store.insert(run, &format!("boot:{life}")).expect("saved");
    }
    drop(store);
    let text = stdout(&folder.run(&["why", "r1", "--store", &path.to_string_lossy()]));
    assert!(text.contains("contexts of pid 8, which"), "{text}");
}

#[test]
fn jobs_are_listed_and_strangers_have_none() {
    let folder = Folder::new("jobs");
    let daemon = FakeDaemon::at(&folder.path("gpumem/control.sock"));
    let process = |pid: u32, who: &[(&str, &str)], used: u64, tracked: Option<i64>| ProcessRow {
        pid,
        used_bytes: Some(used << 20),
        tracked_bytes: tracked.map(|mib| mib << 20),
        untrackable_bytes: tracked.map(|mib| (used as i64 - mib) << 20),
        who: who.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        ..ProcessRow::default()
    };
    let bert = [("job", "bert"), ("user", "ana"), ("world_size", "2"), ("rank", "0")];
    let evil = [("job", "\u{1b}[2Jx"), ("user", "eve")];
    let processes = vec![
        process(1, &bert, 100, Some(60)),
        process(2, &evil, 50, Some(20)),
        process(3, &[("user", "bob")], 30, None),
    ];
    let ps = Ps { devices: vec![DeviceRow::default()], processes, ..Ps::default() };
    daemon.says("GET /v1/ps", 200, serde_json::to_string(&ps).expect("JSON"));
    let text = stdout(&folder.run(&["job"]));
    assert!(!text.contains('\u{1b}'), "{text}");
    let row = |start: &str| {
        text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {text}"))
    };
    assert!(row("bert ").contains(" ana ") && row("bert ").contains(" 1/2 "), "{text}");
    assert!(row("(no job)").contains("1 without an agent"), "{text}");
    assert!(row("sum").contains("180.0"), "{text}");
}

/// Starts a server that gives the same reply to every request, and returns its address.
fn server(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    url
}

#[test]
fn servers_that_are_no_prometheus_are_named() {
    let folder = Folder::new("no-prometheus");
    let answers = [
        ("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", 6, "not as a Prometheus does"),
        ("HTTP/1.1 302 Found\r\nLocation: https://x\r\nContent-Length: 0\r\n\r\n", 6, "redirects"),
        ("HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", 6, "wants a password"),
        ("SSH-2.0-OpenSSH_9.2\r\n", 6, "does not answer in HTTP"),
        (
            "HTTP/1.1 400 Bad Request\r\nContent-Length: 55\r\n\r\n{\"status\":\"error\",\"errorType\":\"x\",\"error\":\"\\u001bboom\"}  ",
            1,
            "refuses the query: \\u{1b}boom",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 63\r\n\r\n{\"status\":\"success\",\"data\":{\"resultType\":\"vector\",\"result\":[]}} ",
            3,
            "check that it scrapes gpumemd (port 9837)",
        ),
    ];
    for (answer, expected, words) in answers {
        let (code, why) = failure(&folder.run(&["job", "bert", "--prometheus", &server(answer)]));
        assert_eq!((code, why.contains(words)), (expected, true), "{words}: {why}");
    }
    let (code, why) = failure(&folder.run(&["job", "bert", "--prometheus", "http://x", "--socket", "/x"]));
    assert!(code == 2 && why.contains("cannot be used with"), "{why}");
}

/// Replies over TLS to every request with an empty result.
const HTTPS_SERVER: &str = r#"
import http.server, ssl, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"status":"success","data":{"resultType":"vector","result":[]}}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1], sys.argv[2])
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
"#;

#[test]
fn https_goes_through_curl_which_checks_the_certificate() {
    for tool in ["curl", "openssl"] {
        if Command::new(tool).arg("--version").output().is_err() {
            gpumem_test_support::skip(&format!("there is no {tool}"), &format!("apt-get install {tool}"));
            return;
        }
    }
    let folder = Folder::new("https");
    let (certificate, key) = (folder.text("certificate.pem"), folder.text("key.pem"));
    let make =
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1";
    let made =
        Command::new("openssl").args(make.split(' ')).args(["-keyout", &key, "-out", &certificate]).output();
    assert!(made.as_ref().is_ok_and(|made| made.status.success()), "{made:?}");
    let mut server = Command::new("python3");
    server.args(["-c", HTTPS_SERVER, &certificate, &key]).stdout(Stdio::piped());
    let mut server = server.spawn().expect("python3");
    let mut port = String::new();
    BufReader::new(server.stdout.take().expect("a pipe")).read_line(&mut port).expect("a port");
    let url = format!("https://127.0.0.1:{}", port.trim());
    let ask = |name: &str, value: &str| {
        let mut command = folder.command(&["job", "bert", "--prometheus", &url]);
        command.env_remove("SSL_CERT_FILE").env_remove("CURL_CA_BUNDLE").env("HOME", &folder.0);
        failure(&command.env(name, value).output().expect("gpumemctl"))
    };
    let accepted = ask("CURL_CA_BUNDLE", &certificate);
    let refused = ask("LC_ALL", "C");
    let no_curl = ask("PATH", "/nowhere");
    server.kill().expect("ended");
    server.wait().expect("ended");
    let ended = ask("CURL_CA_BUNDLE", &certificate);
    for ((code, why), (expected, words)) in [accepted, refused.clone(), no_curl, ended].iter().zip([
        (3, "check that it scrapes gpumemd (port 9837)"),
        (6, "the certificate is not accepted: curl (60)"),
        (6, "https needs the program curl"),
        (6, "curl (7)"),
    ]) {
        assert_eq!((*code, why.contains(words)), (expected, true), "{words}: {why}");
    }
    assert!(refused.1.contains("CURL_CA_BUNDLE=FILE"), "{}", refused.1);
}

#[test]
fn job_of_another_user_is_said_to_be_theirs() {
    let folder = Folder::new("others-job");
    let daemon = FakeDaemon::at(&folder.path("gpumem/control.sock"));
    daemon.runs("?job=bert", &[]);
    let hidden = |pid: u32| HiddenRun { pid, user: Some("alice".into()), ..HiddenRun::default() };
    daemon.says(
        "GET /v1/hidden?job=bert",
        200,
        serde_json::to_string(&[hidden(1), hidden(2)]).expect("JSON"),
    );
    let (code, why) = failure(&folder.run(&["job", "bert"]));
    assert_eq!(code, 3, "{why}");
    assert!(why.contains("job bert: 2 processes belong to alice; only that user and root see"), "{why}");
}
