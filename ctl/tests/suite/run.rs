//! `gpumemctl run`: neither the command nor the process that waits for it must notice a difference.

use crate::common::site::{Site, is_ignored, program};
use crate::common::{FakeDaemon, run_of, stderr, until};
use gpumem_model::run::{Run, State};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

impl Started {
    /// Starts a script and waits until it prints `ready`.
    fn new(site: &Site, script: &str) -> Started {
        let mut command = site.command(&["--quiet", "--", "sh", "-c", script]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gpumemctl");
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words.first(), Some(&"ready"), "{line}");
        Started { command: words.get(1).and_then(|pid| pid.parse().ok()).unwrap_or(0), child, output }
    }
}

struct Started {
    child: Child,
    /// The command's pid, if it printed it.
    command: u32,
    output: BufReader<std::process::ChildStdout>,
}

impl Started {
    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("a pid")).expect("a pid")
    }
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }
    /// Returns the output up to its end, and the exit status.
    fn end(mut self) -> (String, std::process::ExitStatus) {
        let mut text = String::new();
        self.output.read_to_string(&mut text).expect("text");
        (text, self.child.wait().expect("an end"))
    }
    fn state(pid: u32) -> char {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('?')
    }
}

fn own_lines(output: &Output) -> Vec<String> {
    stderr(output).lines().filter_map(|line| line.strip_prefix("gpumemctl: ")).map(str::to_owned).collect()
}

#[test]
fn codes_are_those_of_the_command() {
    let site = Site::new("codes");
    for code in [0, 1, 2, 3, 42, 124, 125, 126, 127, 128, 255] {
        assert_eq!(site.sh(&format!("exit {code}")).status.code(), Some(code));
    }
    let script = site.folder.path("no-interpreter-line");
    fs::write(&script, "exit 9\n").expect("a script");
    let name = script.to_string_lossy().into_owned();
    let cannot = site.run(&["--", &name]);
    assert_eq!(cannot.status.code(), Some(126), "{cannot:?}");
    assert!(stderr(&cannot).contains("cannot execute: Permission denied"), "{cannot:?}");
    program(&script, "exit 9\n");
    assert_eq!(site.run(&["--quiet", &name]).status.code(), Some(9), "a script without #! is the shell's");
    for absent in ["no-such-command-anywhere", "/no/such/file"] {
        let output = site.run(&["--quiet", "--", absent]);
        assert_eq!(output.status.code(), Some(127), "{output:?}");
        assert_eq!(stderr(&output), format!("gpumemctl: {absent}: command not found\n"));
    }
    for wrong in [&[][..], &["--frobnicate", "--", "true"], &["--name", "two words", "--", "true"]] {
        assert_eq!(site.run(wrong).status.code(), Some(125), "a wrong command line is our own failure");
    }
}

#[test]
fn a_command_that_a_signal_ends_ends_us_by_the_same() {
    let site = Site::new("killed");
    for signal in [Signal::KILL, Signal::TERM, Signal::SEGV, Signal::ABORT, Signal::HUP, Signal::USR1] {
        if is_ignored(signal) {
            continue;
        }
        let output = site.sh(&format!("ulimit -c 0; kill -{} $$", signal.as_raw()));
        assert_eq!(output.status.signal(), Some(signal.as_raw()), "{output:?}");
    }
    // The status that a shell reports, and the code for a signal without a name.
    let gpumemctl = site.folder.text("bin/gpumemctl");
    let script = format!("'{gpumemctl}' run --quiet -- sh -c 'kill -9 $$' 2>/dev/null; echo $?");
    let mut shell = Command::new("sh");
    site.folder.settle(&mut shell);
    let output = shell.args(["-c", &script]).output().expect("sh");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "137");
    assert_eq!(site.sh("kill -40 $$").status.code(), Some(128 + 40));
}

#[test]
fn signals_that_are_sent_to_us_reach_the_command_once() {
    let site = Site::new("signals");
    let script = "for s in HUP INT QUIT TERM USR1 USR2 WINCH; do trap \"echo $s\" $s; done; \
                  trap 'echo CONT; exit 5' CONT; echo ready; while :; do sleep 0.02; done";
    let mut started = Started::new(&site, script);
    for (name, signal) in [
        ("HUP", Signal::HUP),
        ("INT", Signal::INT),
        ("QUIT", Signal::QUIT),
        ("TERM", Signal::TERM),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
        ("WINCH", Signal::WINCH),
    ] {
        if is_ignored(signal) {
            continue;
        }
        kill_process(started.pid(), signal).expect("a signal");
        assert_eq!(started.line(), name);
    }
    kill_process(started.pid(), Signal::CONT).expect("a signal");
    let (rest, status) = started.end();
    assert_eq!((rest.as_str(), status.code()), ("CONT\n", Some(5)));
}

#[test]
fn what_the_command_sends_to_its_group_does_not_come_back_to_it() {
    let site = Site::new("group");
    // The script gets its own signal once; it must not be forwarded to the script's children.
    let output = site.sh("trap 'echo got' TERM; kill -TERM 0; sleep 0.3; echo done");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "got\ndone\n");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn what_was_ignored_stays_ignored() {
    let site = Site::new("ignored");
    let gpumemctl = site.folder.text("bin/gpumemctl");
    let script = format!(
        "trap '' HUP INT; exec '{gpumemctl}' run --quiet -- sh -c 'kill -HUP $$; kill -INT $$; echo alive'"
    );
    let mut shell = Command::new("sh");
    site.folder.settle(&mut shell);
    let output = shell.args(["-c", &script]).output().expect("sh");
    assert_eq!((String::from_utf8_lossy(&output.stdout).trim(), output.status.code()), ("alive", Some(0)));
}

#[test]
fn a_stop_stops_both_and_both_go_on() {
    let site = Site::new("stop");
    for whole_group in [true, false] {
        // The script starts no process meanwhile: a parent between vfork and exec does not stop.
        let started = Started::new(
            &site,
            "sleep 60 & trap 'kill $!; exit 6' USR1; echo ready $$; while :; do wait; done",
        );
        let (ours, its) = (started.child.id(), started.command);
        let send = |signal| {
            let sent = if whole_group {
                kill_process_group(started.pid(), signal)
            } else {
                kill_process(started.pid(), signal)
            };
            sent.expect("a signal");
        };
        let state = |wanted: char| {
            until(&format!("state {wanted}"), || {
                let stopped = [ours, its].map(|pid| Started::state(pid) == 'T');
                (stopped == [wanted == 'T'; 2]).then_some(())
            });
        };
        send(Signal::TSTP);
        state('T');
        send(Signal::CONT);
        state('S');
        kill_process(started.pid(), Signal::USR1).expect("a signal");
        assert_eq!(started.end().1.code(), Some(6), "group {whole_group}");
    }
}

#[test]
fn input_and_output_are_the_commands_own() {
    let site = Site::new("stdio");
    let mut command = site.command(&["--", "sh", "-c", "cat; echo err >&2; exec 3<&0; echo fd"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("gpumemctl");
    let sent: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    let mut stdin = child.stdin.take().expect("a pipe");
    let written = sent.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&written).expect("a write"));
    let output = child.wait_with_output().expect("an end");
    writer.join().expect("a writer");
    assert_eq!(output.stdout.len(), sent.len() + 3);
    assert!(output.stdout.starts_with(&sent) && output.stdout.ends_with(b"fd\n"), "bytes pass unchanged");
    let said = stderr(&output);
    assert!(said.starts_with("err\n"), "{said}");
    assert!(said.lines().skip(1).all(|line| line.starts_with("gpumemctl: ")), "{said}");
    let closed = site.command(&["--quiet", "--", "true"]).stderr(Stdio::null()).status().expect("gpumemctl");
    assert!(closed.success());
}

fn variables(output: &Output) -> Vec<(String, String)> {
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    let ours = pairs.filter(|(name, _)| name.contains("GPUMEM") || name.contains("INJECTION"));
    ours.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn variable(output: &Output, name: &str) -> Option<String> {
    variables(output).into_iter().find(|(other, _)| other == name).map(|(_, value)| value)
}

#[test]
fn the_whole_tree_inherits_what_it_needs() {
    let site = Site::new("tree");
    let grandchild = site.sh("sh -c 'sh -c env'");
    let library = Some(site.library());
    assert_eq!(variable(&grandchild, "CUDA_INJECTION64_PATH"), library);
    assert_eq!(variable(&grandchild, "NVTX_INJECTION64_PATH"), library);
    assert_eq!(variable(&grandchild, "GPUMEM_SOCKET"), Some(site.folder.text("gpumem/agent.sock")));
    assert_eq!(variable(&grandchild, "GPUMEM_NEXT_INJECTION64_PATH"), None);
    let job = variable(&grandchild, "GPUMEM_JOB").expect("a job");
    assert_ne!(Some(job), variable(&site.sh("env"), "GPUMEM_JOB"), "each run is a job of its own");

    let env = |name: &str, value: &str, args: &[&str]| {
        site.command(&[&["--quiet"], args, &["--", "env"]].concat())
            .env(name, value)
            .output()
            .expect("gpumemctl")
    };
    let other = env("CUDA_INJECTION64_PATH", "/opt/other/inject.so", &[]);
    assert_eq!(variable(&other, "CUDA_INJECTION64_PATH"), library);
    assert_eq!(variable(&other, "GPUMEM_NEXT_INJECTION64_PATH"), Some("/opt/other/inject.so".into()));
    let nested = env("CUDA_INJECTION64_PATH", &site.library(), &[]);
    assert_eq!(variable(&nested, "GPUMEM_NEXT_INJECTION64_PATH"), None, "never after itself");
    let other = env("NVTX_INJECTION64_PATH", "/opt/other/nvtx.so", &[]);
    assert_eq!(
        variable(&other, "NVTX_INJECTION64_PATH"),
        Some("/opt/other/nvtx.so".into()),
        "left to its tool"
    );
    let nested = env("NVTX_INJECTION64_PATH", &site.library(), &[]);
    assert_eq!(variable(&nested, "NVTX_INJECTION64_PATH"), library);
    assert_eq!(variable(&env("GPUMEM_JOB", "outer", &[]), "GPUMEM_JOB"), Some("outer".into()));
    let named = variable(&env("GPUMEM_JOB", "outer", &["--name", "bert"]), "GPUMEM_JOB").expect("a job");
    assert!(named.starts_with("bert."), "{named}");
    let elsewhere = site.folder.text("gpumem");
    let socket = env("GPUMEM_SOCKET", "/nonexistent/agent.sock", &["--socket", &elsewhere]);
    assert_eq!(variable(&socket, "GPUMEM_SOCKET"), Some(site.folder.text("gpumem/agent.sock")));
    let chosen = env("GPUMEM_LIBRARY", "/bin/sh", &[]);
    assert_eq!(variable(&chosen, "CUDA_INJECTION64_PATH"), Some("/bin/sh".into()));
}

#[test]
fn a_summary_at_the_end_and_none_when_quiet() {
    let site = Site::new("farewell");
    let mut run = run_of(4711, "", None);
    run.state = State::Closed { time_ns: 600, status: Some(0) };
    site.daemon().runs("?*", &[&run]);
    let output = site.run(&["--", "sh", "-c", "exit 3"]);
    let lines = own_lines(&output);
    assert_eq!((output.status.code(), lines.len()), (Some(3), 5), "{lines:#?}");
    assert!(
        lines[0].starts_with("train.py --batch-size 64 --hidden 256 --layers 2:2  pid 4711  GPU 0  exit 0"),
        "{lines:#?}"
    );
    assert_eq!(lines[1], "no problem found; largest part at the peak: Untrackable 422.5 MiB, 59 %");
    assert!(lines[2].starts_with("peak of tracked 298.5 MiB at line 529: Logit 78.1 + "), "{lines:#?}");
    assert!(lines[3].starts_with("Untrackable 422.5 MiB; used (= nvidia-smi) 721.0 MiB"), "{lines:#?}");
    assert_eq!(lines[4], "next: gpumemctl report 4711");
    let quiet = site.run(&["--quiet", "--", "sh", "-c", "exit 3"]);
    assert_eq!((quiet.status.code(), stderr(&quiet).as_str(), quiet.stdout.len()), (Some(3), "", 0));

    let mut stored = serde_json::to_value(&run).expect("JSON");
    stored["id"] = "r12".into();
    site.daemon().says("GET /v1/runs?*", 200, format!("[{stored}]"));
    assert_eq!(own_lines(&site.run(&["--", "true"]))[4], "next: gpumemctl report r12");

    let ranks: Vec<Run> = (0..5).map(|rank| run_of(100 + rank, "", Some(rank))).collect();
    let closed: Vec<Run> = ranks
        .into_iter()
        .map(|mut run| {
            run.state = run_state();
            run
        })
        .collect();
    site.daemon().runs("?*", &closed.iter().collect::<Vec<_>>());
    let lines = own_lines(&site.run(&["--name", "many", "--", "true"]));
    assert_eq!(lines.len(), 5, "without an exit status there is no verdict: {lines:#?}");
    assert!(lines[0].starts_with("5 processes on 1 GPU, peaks of tracked in MiB; 2 smaller are not shown"));
    assert!(lines[1].starts_with("GPU 0 pid 100 rank 0  298.5: Logit 78.1 + "), "{lines:#?}");
    assert!(lines[4].starts_with("next: gpumemctl report --job many."), "{lines:#?}");
}

fn run_state() -> State {
    State::Closed { time_ns: 600, status: None }
}

#[test]
fn one_line_says_why_there_is_nothing_to_tell() {
    let site = Site::new("nothing");
    let lines = own_lines(&site.run(&["--", "true"]));
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].starts_with("no GPU memory: no process of the command initialised CUDA"), "{lines:#?}");
    let mut idle = run_of(5, "", None);
    idle.state = run_state();
    idle.devices.clear();
    site.daemon().runs("?*", &[&idle]);
    let lines = own_lines(&site.run(&["--", "true"]));
    assert!(lines[0].contains("CUDA was initialised, but nothing was allocated"), "{lines:#?}");
    let mut earlier = run_of(5, "", None);
    earlier.process.start_ticks = 1;
    site.daemon().runs("?*", &[&earlier]);
    let lines =
        own_lines(&site.command(&["--", "true"]).env("GPUMEM_JOB", "outer").output().expect("gpumemctl"));
    assert_eq!(lines.len(), 1, "runs of the job that were there before are not ours: {lines:#?}");
    site.daemon().says("GET /v1/runs?*", 500, "");
    let output = site.run(&["--", "sh", "-c", "exit 4"]);
    assert_eq!((output.status.code(), own_lines(&output).len()), (Some(4), 1), "{output:?}");
    fs::remove_file(site.library()).expect("removed");
    let lines = own_lines(&site.run(&["--", "true"]));
    assert!(lines[0].starts_with("libgpumem.so was not found (not in "), "{lines:#?}");
}

/// Creates a daemon program that reports its start; the test itself then listens in its place.
fn stub(site: &Site, script: &str) {
    let path = site.folder.path("bin/gpumemd");
    program(&path, &format!("#!/bin/sh\n{script}\n"));
}

#[test]
fn a_private_daemon_is_started_when_none_answers() {
    let site = Site::without_daemon("private");
    let started = site.folder.path("started");
    let flag = started.to_string_lossy().into_owned();
    stub(
        &site,
        &format!(
            "echo its words; sed 's/.*) //' /proc/$$/stat > '{flag}.stat'; \
             readlink /proc/$$/fd/9 > '{flag}.fd'; echo \"$NOTIFY_SOCKET\" > '{flag}.notify'; echo \"$@ $$\" > '{flag}.tmp'; \
             mv '{flag}.tmp' '{flag}'; while [ -e '{flag}' ]; do sleep 0.05; done"
        ),
    );
    let gpumemctl = site.folder.text("bin/gpumemctl");
    let lock = site.folder.text("lock");
    let line = format!(
        "exec 9>'{lock}'; exec '{gpumemctl}' run -- sh -c 'echo $GPUMEM_SOCKET; readlink /proc/$$/fd/9'"
    );
    let mut command = Command::new("sh");
    site.folder.settle(&mut command);
    command.args(["-c", &line]).env("NOTIFY_SOCKET", "/nonexistent");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gpumemctl");
    let words = until("the daemon", || fs::read_to_string(&started).ok());
    let (args, pid) = words.trim().rsplit_once(' ').expect("arguments and a pid");
    assert_eq!(args, "--private");
    let daemon = FakeDaemon::at(&site.folder.path("gpumem/control.sock"));
    daemon.says("GET /v1/doctor", 200, r#"{"version":"0","pid":1,"uptime_s":1,"facts":[],"findings":[]}"#);
    let output = child.wait_with_output().expect("an end");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = format!("{}\n{lock}\n", site.folder.text("gpumem/agent.sock"));
    assert_eq!((output.status.code(), said), (Some(0), expected), "the command has what it was given");
    let its = |what: &str| fs::read_to_string(format!("{flag}.{what}")).expect(what);
    assert_eq!((its("fd").as_str(), its("notify").as_str()), ("", "\n"), "the daemon has not");
    let directory = fs::metadata(site.folder.path("gpumem")).expect("a directory");
    assert_eq!(directory.permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::read_to_string(site.folder.path("gpumem/gpumemd.log")).expect("a log"), "its words\n");
    assert!(PathBuf::from(format!("/proc/{pid}")).exists(), "it stays when the command has ended");
    // Both values are from /proc, where a session that began outside this PID namespace is 0, which is not a valid pid.
    let session = |stat: &str| stat.split(' ').nth(3).map(str::to_owned).expect("a session");
    let own = fs::read_to_string("/proc/self/stat").expect("our own line");
    let own = own.rsplit_once(") ").expect("a name in parentheses").1;
    assert_ne!(session(&its("stat")), session(own), "a session of its own");
    fs::remove_file(&started).expect("its end");
    until("its end", || (!PathBuf::from(format!("/proc/{pid}")).exists()).then_some(()));
}

#[test]
fn the_command_runs_whatever_becomes_of_the_daemon() {
    let site = Site::without_daemon("hopeless");
    let runs = |why: &str| {
        let since = Instant::now();
        let output = site.run(&["--", "sh", "-c", "echo it ran; exit 8"]);
        assert_eq!(
            (output.stdout.as_slice(), output.status.code()),
            (&b"it ran\n"[..], Some(8)),
            "{output:?}"
        );
        let lines = own_lines(&output);
        assert_eq!((lines.len(), lines[0].contains(why)), (1, true), "{lines:#?}");
        since.elapsed()
    };
    stub(&site, "echo starting; echo nvml is broken; exit 1");
    let waited = runs("it ended at once: nvml is broken (log: ");
    gpumem_test_support::bar("a run whose daemon ended at once", waited, Duration::from_secs(4));
    stub(&site, "sleep 6");
    let waited = runs("it has not answered for 5 s");
    assert!(waited >= Duration::from_secs(5), "{waited:?}");
    gpumem_test_support::bar("a run whose daemon does not answer", waited, Duration::from_secs(9));
    fs::set_permissions(site.folder.path("gpumem"), fs::Permissions::from_mode(0o777)).expect("a mode");
    runs("is not a directory of yours alone");
    let named =
        site.command(&["--", "true"]).env("GPUMEM_CONTROL", "/nonexistent").output().expect("gpumemctl");
    assert!(own_lines(&named)[0].starts_with("no daemon answers at /nonexistent: is not there"), "{named:?}");
}

#[test]
fn in_a_container_the_agents_socket_is_enough() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let site = Site::without_daemon("container");
    stub(&site, "echo must not be started; exit 1");
    let path = site.folder.path("gpumem/agent.sock");
    fs::create_dir(path.parent().expect("a folder")).expect("a folder");
    let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    bind(&listener, &SocketAddrUnix::new(&path).expect("an address")).expect("bound");
    listen(&listener, 8).expect("listens");
    let output = site.run(&["--name", "bert", "--", "sh", "-c", "echo $GPUMEM_SOCKET"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), path.to_string_lossy());
    let lines = own_lines(&output);
    assert!(lines.len() == 1 && lines[0].contains("report --job bert."), "{lines:#?}");
}

#[test]
fn a_daemon_that_is_stopped_holds_nobody_up() {
    let site = Site::without_daemon("stopped");
    // The kernel accepts connections for it until its queue is full.
    let path = site.folder.path("gpumem/control.sock");
    fs::create_dir(path.parent().expect("a folder")).expect("a folder");
    let _stopped = UnixListener::bind(path).expect("a socket");
    let since = Instant::now();
    let output = site.run(&["--", "sh", "-c", "exit 3"]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    gpumem_test_support::bar("a run beside a stopped daemon", since.elapsed(), Duration::from_secs(4));
    let lines = own_lines(&output);
    let words = ["has not answered for 2 s: process ", "; ask later: gpumemctl report --job "];
    assert!(lines.len() == 1 && words.iter().all(|words| lines[0].contains(words)), "{lines:#?}");
}

#[test]
fn a_recording_needs_no_daemon() {
    let site = Site::without_daemon("record");
    let args = [
        "--record",
        "out-%p.gpumem",
        "--",
        "sh",
        "-c",
        "echo $GPUMEM_RECORD $GPUMEM_SOCKET; echo x > out-42.gpumem",
    ];
    let output = site.command(&args).current_dir(&site.folder.0).output().expect("gpumemctl");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), site.folder.text("out-%p.gpumem"));
    let file = site.folder.text("out-42.gpumem");
    assert_eq!(own_lines(&output), [format!("1 recording of 2 bytes; next: gpumemctl report {file}")]);
    let none = site.run(&["--record", &site.folder.text("none.gpumem"), "--", "true"]);
    assert!(own_lines(&none)[0].starts_with("no recording was written: no process"), "{none:?}");
}
