//! Permissions to report, read, control and release (docs/access.md): tests each cell of that table as each of its users.
use gpumem_test_support::skip;
use gpumem_tests::live::hostile::{
    NOBODY, Peer, Shared, hello, part, record, say_and_stay, start_ticks, unordered,
};
use gpumem_tests::live::programs::{copy_program, programs};
use gpumem_tests::live::{Daemon, Job, Machine, Mixer, until};
use gpumem_wire::{AskKind, Body, frame};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Secrets in the command line, the environment and a tag of the observed program.
const SECRETS: [&str; 3] = ["hunter2-in-argv", "hunter2-in-environ", "hunter2-in-a-tag"];
/// A user and a group without an entry in the machine's user and group databases.
const STRANGER: u32 = 54_321;
const GROUP: u32 = 54_322;

/// Plays the parts; prints its results.
#[test]
fn as_another_user() {
    let Some(part) = part() else { return };
    let path = |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_default());
    match part.as_str() {
        // Sends the given requests and prints one reply for each line.
        "asks" => {
            for request in std::env::var("REQUESTS").unwrap_or_default().lines() {
                let (status, body) = send_request(&path("CONTROL"), request);
                println!("\nanswer {}", serde_json::json!([status, body]));
            }
        }
        // Reports, and asks about another process on the socket of the agents.
        "reports" => {
            let shared = Shared::small();
            let welcomed = Peer::welcomed(&path("SOCKET"), &shared).is_some();
            println!(
                "\nanswer {}",
                serde_json::json!([u16::from(welcomed), report_of_victim(&path("SOCKET"))])
            );
        }
        other => panic!("{other}"),
    }
    println!("\nover");
    if std::env::var_os("STAYS").is_some() {
        say_and_stay("stays");
    }
}

fn send_request(socket: &Path, request: &str) -> (u16, String) {
    let Ok(mut stream) = UnixStream::connect(socket) else { return (0, "no connection".into()) };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
    let answer = answer(&mut stream, request);
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

fn answer(stream: &mut (impl Read + Write), request: &str) -> String {
    let _ = write!(stream, "{request} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// Returns the reply to a report request for the victim on the agents' socket.
fn report_of_victim(socket: &Path) -> String {
    let victim = std::env::var("VICTIM").unwrap_or_default();
    let Some(peer) = Peer::connect(socket) else { return "no connection".into() };
    let options = format!("format=text\npid={victim}\nkey={victim}\n");
    peer.send(&record(unordered(), Body::Ask { what: AskKind::ReportJson, options: &options }));
    let mut text = Vec::new();
    while let Some(packet) = peer.hear(20).filter(|packet| !packet.is_empty()) {
        for record in frame::records(&packet).filter_map(|record| record.ok()?.ok()) {
            if let Body::Answer { text: piece, .. } = record.body {
                text.extend_from_slice(piece);
            }
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// User that sends requests.
#[derive(Clone, Copy)]
struct Who<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    /// Command that creates the namespace in which it runs.
    place: &'a [&'a str],
}

const ROOT: Who<'_> = Who { name: "root", uid: 0, gid: 0, place: &[] };
const OTHER: Who<'_> = Who { name: "another user", uid: NOBODY, gid: NOBODY, place: &[] };
const MADE_UP: Who<'_> = Who { name: "a user without a name", uid: STRANGER, gid: STRANGER, place: &[] };
const MEMBER: Who<'_> = Who { name: "a member of the group", uid: STRANGER, gid: GROUP, place: &[] };
const ROOT_IN_USER_NAMESPACE: Who<'_> = Who {
    name: "root in a user namespace",
    uid: NOBODY,
    gid: NOBODY,
    place: &["unshare", "--user", "--map-root-user"],
};
const ROOT_IN_PID_NAMESPACE: Who<'_> = Who {
    name: "root in a PID namespace",
    uid: 0,
    gid: 0,
    place: &["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
};

/// A machine, a daemon with a group in its /etc/group, and a user's program with secrets.
struct Scene {
    machine: Machine,
    daemon: Daemon,
    program: Mixer,
    test: PathBuf,
}

impl Scene {
    /// Creates a scene with a program of root.
    fn new(config: &str) -> Self {
        Scene::of(ROOT, config)
    }

    /// Creates a scene with a program of `owner`.
    fn of(owner: Who<'_>, config: &str) -> Self {
        let machine = Machine::new(&["devices=1", "memory=16G"]);
        let group = machine.dir.join("group");
        std::fs::write(&group, format!("root:x:0:\ngpumemd:x:{GROUP}:\n")).expect("written");
        let mount = format!("mount --bind {} /etc/group && exec \"$0\" \"$@\"", group.display());
        let daemon = Daemon::start_by(&machine, &["unshare", "--mount", "sh", "-c", &mount], config);
        let mut command = Mixer::command(&machine, &daemon);
        command.arg0(format!("mixer --password={}", SECRETS[0])).env("DB_PASSWORD", SECRETS[1]);
        if owner.uid != 0 {
            for path in [machine.sim(), machine.dir.join("truth")] {
                drop(File::options().append(true).create(true).open(&path).expect("a file"));
                std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).expect("root may");
            }
            command.uid(owner.uid).gid(owner.gid);
        }
        let mut program = Mixer::run(&mut command);
        program.ok(&format!("device 0; tag {}; alloc a 96M", SECRETS[2]));
        // Where another user can execute it, whatever lies above target/.
        let test = machine.dir.join("test");
        copy_program(std::env::current_exe().expect("a path"), &test);
        let scene = Scene { machine, daemon, program, test };
        until(30, "the program's run", || {
            let (_, runs) = scene.asks(ROOT, &["GET /v1/runs"]).into_iter().next()?;
            let ps = scene.daemon.asked("/v1/ps")?;
            // A sample that is as new as the memory: one of the context alone would have as much used.
            let row = &ps["processes"][0];
            let is_sampled = row["used_bytes"].is_u64() && row["tracked_bytes"] == 96 << 20;
            (is_sampled && runs.contains(SECRETS[0]) && runs.contains(SECRETS[2])).then_some(())
        });
        scene
    }

    fn control(&self) -> PathBuf {
        self.daemon.runtime.join("control.sock")
    }

    fn command(&self, who: Who<'_>, part: &str) -> Command {
        let words: Vec<&str> = who.place.iter().copied().chain([self.test.to_str().expect("text")]).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args([
            "--exact",
            "privileged::access::as_another_user",
            "--nocapture",
            "--test-threads=1",
        ]);
        command.env("GPUMEM_TEST_PART", part).env("CONTROL", self.control());
        command.env("SOCKET", self.daemon.runtime.join("agent.sock"));
        command.env("VICTIM", self.program.pid().to_string()).stdin(Stdio::null());
        if who.uid != 0 {
            command.uid(who.uid).gid(who.gid);
        }
        command
    }

    fn answers(mut command: Command, who: Who<'_>) -> Vec<(u16, String)> {
        let output = command.output().unwrap_or_else(|error| panic!("{}: {error}", who.name));
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            printed.contains("\nover"),
            "{}: {printed}{}",
            who.name,
            String::from_utf8_lossy(&output.stderr)
        );
        printed.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("answer ")?).ok()).collect()
    }

    fn asks(&self, who: Who<'_>, requests: &[&str]) -> Vec<(u16, String)> {
        let mut command = self.command(who, "asks");
        command.env("REQUESTS", requests.join("\n"));
        let answers = Scene::answers(command, who);
        assert_eq!(answers.len(), requests.len(), "{}", who.name);
        answers
    }
}

fn secrets_in(text: &str) -> Vec<&'static str> {
    SECRETS.into_iter().filter(|secret| text.contains(secret)).collect()
}

#[test]
fn each_cell_of_the_table() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can become another user", "sudo make test-all LANES=privileged");
        return;
    }
    let scene = Scene::new("[metrics]\nlisten = \"off\"\ntags = 10\n");
    let pid = scene.program.pid();
    let requests = [
        "GET /v1/ps".to_owned(),
        "GET /v1/runs".to_owned(),
        format!("GET /v1/runs?pid={pid}"),
        "GET /v1/doctor".to_owned(),
        format!("GET /v1/doctor?pid={pid}"),
        "GET /v1/metrics".to_owned(),
        format!("POST /v1/mark?name=mine&pid={pid}"),
        format!("POST /v1/record?pid={pid}&do=dump&output=/tmp/never-written"),
        "POST /v1/nvml/release?for_s=1".to_owned(),
    ];
    let requests: Vec<&str> = requests.iter().map(String::as_str).collect();
    // User, whether all users' data is visible, status of controlling root's process, status of closing NVML.
    let table = [
        (OTHER, false, 404, 403),
        (MADE_UP, false, 404, 403),
        (ROOT_IN_USER_NAMESPACE, false, 404, 403),
        (MEMBER, true, 403, 200),
        (ROOT, true, 409, 200),
        (ROOT_IN_PID_NAMESPACE, true, 409, 200),
    ];
    for (who, sees, controls, releases) in table {
        let name = who.name;
        // A file that exists: every user who may request the recording gets the error.
        let existing = scene.machine.dir.join("group");
        let requests: Vec<String> = requests
            .iter()
            .map(|text| text.replace("/tmp/never-written", &existing.to_string_lossy()))
            .collect();
        let answers = scene.asks(who, &requests.iter().map(String::as_str).collect::<Vec<_>>());
        let [ps, runs, run, doctor, process, metrics, mark, dump, release] =
            answers.try_into().expect("nine");
        let row = serde_json::from_str::<Value>(&ps.1).expect("JSON");
        let row =
            row["processes"].as_array().and_then(|rows| rows.iter().find(|row| row["pid"] == pid)).cloned();
        let row = row.unwrap_or_else(|| panic!("{name}: names and amounts are public"));
        assert_eq!((ps.0, row["used_bytes"].as_u64() > Some(96 << 20)), (200, true), "{name}: {row}");
        let command = if sees { vec![SECRETS[0]] } else { vec![] };
        assert_eq!(secrets_in(&ps.1), command, "{name}");
        for (status, text) in [&runs, &run] {
            assert_eq!((*status, text.contains(&format!("\"pid\":{pid}"))), (200, sees), "{name}");
            let seen = if sees { vec![SECRETS[0], SECRETS[2]] } else { vec![] };
            assert_eq!(secrets_in(text), seen, "{name}");
        }
        assert_eq!((doctor.0, secrets_in(&doctor.1)), (200, vec![]), "{name}");
        assert_eq!((process.0, secrets_in(&process.1)), (if sees { 200 } else { 404 }, vec![]), "{name}");
        // Public metrics are the same for all users; tags are included because of this configuration.
        assert_eq!((metrics.0, secrets_in(&metrics.1)), (200, vec![SECRETS[2]]), "{name}");
        assert_eq!(mark.0, if sees { 200 } else { 404 }, "{name}: {}", mark.1);
        assert_eq!(dump.0, controls, "{name}: {}", dump.1);
        assert_eq!(release.0, releases, "{name}: {}", release.1);
        until(20, "NVML to be open again", || {
            let (_, doctor) = scene.asks(ROOT, &["GET /v1/doctor"]).pop()?;
            (!doctor.contains("released for")).then_some(())
        });
    }
    assert!(
        scene.asks(ROOT, &["GET /v1/runs"])[0].1.matches("\"mine\"").count() >= 3,
        "those who may have marked it"
    );
}

/// The same cells, where the process is not root's: one user's own, and another user's.
#[test]
fn users_see_and_steer_their_own_processes_and_no_others() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can become another user", "sudo make test-all LANES=privileged");
        return;
    }
    let scene = Scene::of(OTHER, "[metrics]\nlisten = \"off\"\n");
    let pid = scene.program.pid();
    let folder = scene.machine.dir.join("theirs");
    std::fs::create_dir(&folder).expect("a folder");
    chown(&folder, Some(OTHER.uid), Some(OTHER.gid)).expect("root may");
    // The owner, and root in a user namespace of the owner: 200 for everything except root's and the group's. The group
    // reads and marks, and cannot make programs write files.
    let table = [
        (OTHER, 200, 200, 403),
        (ROOT_IN_USER_NAMESPACE, 200, 200, 403),
        (MADE_UP, 404, 404, 403),
        (MEMBER, 200, 403, 200),
        (ROOT, 200, 200, 200),
    ];
    let mut marks = Vec::new();
    for (number, (who, sees, steers, releases)) in table.into_iter().enumerate() {
        let (name, output) = (who.name, folder.join(format!("{number}.gpumem")));
        let output = output.to_str().expect("text");
        let of = |what: &str| format!("POST /v1/record?pid={pid}&do={what}");
        let requests = [
            "GET /v1/ps".to_owned(),
            "GET /v1/runs".to_owned(),
            format!("GET /v1/runs?pid={pid}"),
            format!("GET /v1/doctor?pid={pid}"),
            format!("POST /v1/mark?name=of-{number}&pid={pid}"),
            of(&format!("start&output={output}")),
            of("stop"),
            of("pause"),
            of("resume"),
            of(&format!("dump&output={output}.dump")),
            "POST /v1/nvml/release?for_s=1".to_owned(),
        ];
        let answers = scene.asks(who, &requests.each_ref().map(String::as_str));
        let [ps, all, one, doctor, mark, record @ .., release] = answers.as_slice() else { panic!("{name}") };
        let rows = serde_json::from_str::<Value>(&ps.1).expect("JSON")["processes"].clone();
        let row = rows.as_array().and_then(|rows| rows.iter().find(|row| row["pid"] == pid)).cloned();
        let row = row.unwrap_or_else(|| panic!("{name}: names and amounts are public"));
        assert_eq!((row["uid"].as_u64(), ps.0), (Some(OTHER.uid.into()), 200), "{name}");
        let seen = if sees == 200 { vec![SECRETS[0], SECRETS[2]] } else { vec![] };
        assert_eq!(secrets_in(&ps.1), seen.get(..1).unwrap_or_default(), "{name}");
        for (status, text) in [all, one] {
            assert_eq!((*status, secrets_in(text)), (200, seen.clone()), "{name}");
        }
        assert_eq!((doctor.0, mark.0), (sees, sees), "{name}: {} {}", doctor.1, mark.1);
        for (request, (status, text)) in requests[5..].iter().zip(record) {
            assert_eq!(*status, steers, "{name}: {request}: {text}");
        }
        assert_eq!((record.len(), release.0), (5, releases), "{name}");
        // The program wrote them, with its own rights.
        for file in [output.to_owned(), format!("{output}.dump")] {
            let owner = std::fs::metadata(&file).map(|about| about.uid()).ok();
            assert_eq!(owner, (steers == 200).then_some(OTHER.uid), "{name}: {file}");
        }
        if sees == 200 {
            marks.push(format!("\"of-{number}\""));
        }
        until(20, "NVML to be open again", || {
            let (_, doctor) = scene.asks(ROOT, &["GET /v1/doctor"]).pop()?;
            (!doctor.contains("released for")).then_some(())
        });
    }
    let (_, runs) = scene.asks(ROOT, &["GET /v1/runs"]).pop().expect("an answer");
    assert!(marks.iter().all(|mark| runs.contains(mark)) && !runs.contains("\"of-2\""), "{runs}");
}

/// The cells that `tenants = "anonymous"` changes: others see bytes, and not whose.
#[test]
fn every_cell_of_the_access_table_with_anonymous_tenants() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can become another user", "sudo make test-all LANES=privileged");
        return;
    }
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port");
    let config =
        format!("tenants = \"anonymous\"\n[metrics]\nlisten = \"{port}\"\ntags = 10\nfold_younger_s = 0.0\n");
    let scene = Scene::new(&config);
    let pid = scene.program.pid();
    let one = format!("GET /v1/doctor?pid={pid}");
    let requests = ["GET /v1/ps", "GET /v1/runs", &one, "GET /v1/doctor", "GET /v1/metrics"];
    for (who, sees) in [
        (OTHER, false),
        (MADE_UP, false),
        (ROOT_IN_USER_NAMESPACE, false),
        (MEMBER, true),
        (ROOT, true),
        (ROOT_IN_PID_NAMESPACE, true),
    ] {
        let name = who.name;
        let [ps, runs, process, doctor, metrics] =
            scene.asks(who, &requests).try_into().expect("five answers");
        let row = serde_json::from_str::<Value>(&ps.1).expect("JSON")["processes"][0].clone();
        assert!(row["used_bytes"].as_u64() > Some(96 << 20), "{name}: bytes are no secret: {row}");
        assert_eq!(row["pid"], if sees { pid } else { 0 }, "{name}: {row}");
        assert_eq!((row["uid"].is_null(), row["user"].is_null()), (!sees, !sees), "{name}: {row}");
        assert_eq!(secrets_in(&ps.1).is_empty(), !sees, "{name}");
        assert_eq!((runs.0, runs.1.contains(&format!("\"pid\":{pid}"))), (200, sees), "{name}");
        assert_eq!(process.0, if sees { 200 } else { 404 }, "{name}");
        assert_eq!((doctor.0, secrets_in(&doctor.1)), (200, vec![]), "{name}");
        let names = [format!("pid=\\\"{pid}\\\""), "user=\\\"root\\\"".to_owned(), SECRETS[2].to_owned()];
        let printed = names.map(|name| metrics.1.contains(&name));
        assert_eq!(printed, [sees; 3], "{name}: {}", metrics.1);
    }
    // Public metrics list each process without identifying it.
    let mut stream = TcpStream::connect(port).expect("it listens");
    let text = answer(&mut stream, "GET /metrics");
    let tracked =
        text.lines().find(|line| line.starts_with("gpumem_process_tracked_bytes{")).expect("a process");
    assert!(tracked.contains("pid=\"hidden-"), "{tracked}");
    assert!(tracked.ends_with(&format!(" {}", 96 << 20)), "{tracked}");
    for secret in [format!("\"{pid}\""), start_ticks(pid).to_string(), "user=".into(), SECRETS[2].into()] {
        assert!(!text.contains(&secret), "{secret}: {text}");
    }
    assert!(secrets_in(&text).is_empty());
}

#[test]
fn agents_report_only_about_their_own_process() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can become another user", "sudo make test-all LANES=privileged");
        return;
    }
    let scene = Scene::new("");
    let hidden = format!(
        "mount -t tmpfs none {0} && mkdir {0}/run && mount --bind \"$REAL\" {0}/run && exec \"$0\" \"$@\"",
        "/mnt"
    );
    let inside = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "sh", "-c", &hidden];
    let container = Who { name: "root in a container", uid: NOBODY, gid: NOBODY, place: &inside };
    let everywhere = [ROOT, OTHER, MADE_UP, MEMBER, ROOT_IN_USER_NAMESPACE, ROOT_IN_PID_NAMESPACE, container];
    for who in everywhere {
        let mut command = scene.command(who, "reports");
        if who.name == container.name {
            command.env("REAL", scene.daemon.runtime.join("agent")).env("SOCKET", "/mnt/run/agent.sock");
        }
        let (welcomed, told) = Scene::answers(command, who).pop().expect("an answer");
        assert_eq!(welcomed, 1, "{}: may report", who.name);
        assert!(
            secrets_in(&told).is_empty() && !told.contains(&scene.program.pid().to_string()),
            "{}: {told}",
            who.name
        );
    }
    // The directory contains only the agents' socket: nothing can be queried or written there.
    let directory = scene.daemon.runtime.join("agent");
    let names: Vec<_> = std::fs::read_dir(&directory).expect("a folder").filter_map(Result::ok).collect();
    assert_eq!(names.len(), 1, "{names:?}");
    let mode = std::fs::metadata(&directory).expect("a folder").permissions().mode();
    assert_eq!(mode & 0o022, 0);
}

#[test]
fn other_users_get_no_secrets_and_cannot_open_private_files() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can become another user", "sudo make test-all LANES=privileged");
        return;
    }
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port");
    let scene = Scene::new(&format!("[metrics]\nlisten = \"{port}\"\n"));
    let control = scene.control();
    // Metrics and the page are everybody's.
    let program = scene.program.pid();
    let page = format!("/api/process/{program}.{}", start_ticks(program));
    let paths = ["/metrics", "/", "/api/devices", "/api/processes", &page, &format!("{page}/page")];
    for path in paths {
        let mut stream = TcpStream::connect(port).expect("it listens");
        let text = answer(&mut stream, &format!("GET {path}"));
        assert!(text.starts_with("HTTP/1.1 200"), "{path}: {text}");
        assert!(secrets_in(&text).is_empty(), "{path}: {:?}", secrets_in(&text));
    }
    // Everything that gpumemctl prints to another user, a bundle too; where that user can execute it.
    let program = scene.machine.dir.join("gpumemctl");
    copy_program(programs().ours.join("gpumemctl"), &program);
    let bundle = Path::new("/tmp").join(format!("bundle-{}.tar.gz", scene.program.pid()));
    let pid = scene.program.pid().to_string();
    let bundled = bundle.to_string_lossy().into_owned();
    // Output of each command for a user without access; `runs` and `oom` read that user's own store.
    for (arguments, words) in [
        (vec!["ps"], "covered"),
        (vec!["ps", "--json"], "\"processes\""),
        (vec!["report", &pid], "no run of it"),
        (vec!["doctor"], "configuration"),
        (vec!["doctor", &pid], &pid),
        (vec!["runs"], "there is no run store yet"),
        (vec!["oom"], "there is no run store yet"),
        (vec!["doctor", "--bundle", &bundled], &bundled),
    ] {
        let mut command = Command::new(&program);
        command.args(&arguments).env("GPUMEM_CONTROL", &control).env("HOME", "/nonexistent");
        if arguments[0] != "runs" {
            command.args(["--socket", &control.to_string_lossy()]);
        }
        let output = command.uid(NOBODY).gid(NOBODY).output().expect("another user can execute it");
        let printed = [output.stdout, output.stderr].concat();
        let printed = String::from_utf8_lossy(&printed);
        assert!(printed.contains(words), "{arguments:?} {}: {printed}", output.status);
        assert!(secrets_in(&printed).is_empty(), "{arguments:?}: {printed}");
    }
    let unpacked = || Command::new("tar").arg("-xzOf").arg(&bundle).output().expect("tar").stdout;
    let text = String::from_utf8_lossy(&unpacked()).into_owned();
    assert!(text.contains("gpumemctl") && secrets_in(&text).is_empty(), "{text}");
    let _ = std::fs::remove_file(&bundle);
    // And root's bundle, which is made to be shared.
    let output =
        scene.daemon.ctl(&scene.machine, &["doctor", "--bundle", &bundled]).output().expect("it runs");
    assert!(bundle.exists(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(secrets_in(&String::from_utf8_lossy(&unpacked())).is_empty());
    let _ = std::fs::remove_file(&bundle);
    // What the daemon writes is its own.
    for file in ["runs.sqlite", "daemon.gpumem", "run/gpumemd.lock"] {
        let mode = std::fs::metadata(scene.machine.dir.join(file)).expect(file).permissions().mode();
        assert_eq!(mode & 0o077, 0, "{file}: {mode:o}");
    }
}

#[test]
fn the_server_is_looked_at_too() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can become another user", "sudo make test-all LANES=privileged");
        return;
    }
    let machine = Machine::new(&["devices=1"]);
    let place = machine.dir.join("place");
    std::fs::create_dir(&place).expect("a folder");
    let socket = place.join("control.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let client_error = |environment: &[(&str, &Path)], arguments: &[&str]| {
        let mut command = machine.command(programs().ours.join("gpumemctl"));
        command.arg("ps").args(arguments).envs(environment.iter().copied());
        let output = command.output().expect("it runs");
        String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let chown =
        |path: &Path, uid: u32| std::os::unix::fs::lchown(path, Some(uid), Some(uid)).expect("root may");
    let mode = |mode| std::fs::set_permissions(&place, PermissionsExt::from_mode(mode)).expect("a mode");
    // A socket of another user; another user's directory with root's socket; a world-writable directory.
    chown(&socket, NOBODY);
    let text = client_error(&[("GPUMEM_CONTROL", &socket)], &[]);
    assert!(text.contains("belongs to user 65534"), "{text}");
    chown(&socket, 0);
    chown(&place, NOBODY);
    let text = client_error(&[("GPUMEM_CONTROL", &socket)], &[]);
    assert!(text.contains("the socket's directory belongs to user 65534"), "{text}");
    chown(&place, 0);
    mode(0o777);
    let text = client_error(&[("GPUMEM_CONTROL", &socket)], &[]);
    assert!(text.contains("other users may write to the socket's directory"), "{text}");
    mode(0o755);
    // A link from a good place to a bad one.
    let bad = machine.dir.join("bad");
    std::fs::create_dir(&bad).expect("a folder");
    let real = std::os::unix::net::UnixListener::bind(bad.join("control.sock")).expect("a socket");
    chown(&bad, NOBODY);
    std::fs::remove_file(&socket).expect("removed");
    std::os::unix::fs::symlink(bad.join("control.sock"), &socket).expect("a link");
    let text = client_error(&[("GPUMEM_CONTROL", &socket)], &[]);
    assert!(text.contains("the socket's directory belongs to user 65534"), "{text}");
    // Another user created the socket: the path was root's a moment before.
    std::fs::remove_file(&socket).expect("removed");
    mode(0o777);
    let mut theirs = Command::new("python3");
    theirs.args(["-c", "import socket,sys,time\ns=socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\ns.listen()\nprint('up',flush=True)\ntime.sleep(60)"]);
    let mut theirs = Job::start(theirs.arg(&socket).uid(NOBODY).gid(NOBODY));
    theirs.wait_for("up");
    mode(0o755);
    chown(&socket, 0);
    let text = client_error(&[("GPUMEM_CONTROL", &socket)], &[]);
    assert!(text.contains("belongs to user 65534"), "{text}");
    // A name that begins with @ or NUL is a file's name, never an abstract socket's.
    use std::os::linux::net::SocketAddrExt;
    let address = std::os::unix::net::SocketAddr::from_abstract_name(b"gpumemd").expect("a name");
    let hidden = std::os::unix::net::UnixListener::bind_addr(&address).expect("an abstract socket");
    hidden.set_nonblocking(true).expect("set");
    for name in ["@gpumemd", "@/gpumemd"] {
        let text =
            client_error(&[("GPUMEM_CONTROL", Path::new(name)), ("GPUMEM_SOCKET", Path::new(name))], &[]);
        assert!(text.contains("is not there"), "{text}");
        let text = client_error(&[], &["--socket", name]);
        assert!(text.contains("is not there"), "{text}");
    }
    assert!(hidden.accept().is_err(), "nobody came");
    drop((listener, real));
}

#[test]
fn hello_for_another_process_is_refused() {
    let scene = Machine::new(&["devices=1"]);
    let daemon = Daemon::start(&scene, "daemon", "");
    let victim = Job::start(Command::new("sleep").arg("60"));
    std::thread::sleep(Duration::from_millis(20)); // another tick of the clock than this process's
    let peer = Peer::connect(&daemon.runtime.join("agent.sock")).expect("a daemon");
    let shared = Shared::small();
    peer.send_with(&hello(start_ticks(victim.pid())), &[shared.fd.as_fd()]);
    assert!(peer.is_closed(20));
    let text = daemon.asked("/v1/metrics").expect("metrics");
    assert!(text.as_str().expect("text").contains("gpumemd_agent_refused_total{reason=\"identity\"} 1"));
}
