//! `gpumemctl top` on its own terminal. The tests read the screen from its output, as a terminal would.

use crate::common::{FakeDaemon, Folder, failure, run_of, stdout, until};
use gpumem_model::control::{ClaimRow, DeviceRow, ProcessFinding, ProcessRow, Ps};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

const MIB: u64 = 1 << 20;

fn device(index: u32, used: u64, unaccounted: i64) -> DeviceRow {
    DeviceRow {
        index,
        uuid: format!("GPU-5f1c000{index}-aaaa"),
        model: "NVIDIA H100 80GB HBM3".into(),
        total_bytes: Some(81_559 * MIB),
        unified: false,
        used_bytes: Some(used * MIB),
        free_bytes: Some((81_559 - 623 - used) * MIB),
        system_bytes: Some(623 * MIB),
        unaccounted_bytes: Some(unaccounted * MIB as i64),
        age_ms: Some(400),
        ..DeviceRow::default()
    }
}

fn process(pid: u32, device: usize, user: &str, command: &str, amounts: [Option<u64>; 3]) -> ProcessRow {
    let [used, tracked, idle] = amounts.map(|bytes| bytes.map(|bytes| bytes * MIB));
    ProcessRow {
        pid,
        device,
        user: Some(user.into()),
        flags: vec![if tracked.is_some() { "covered" } else { "uncovered" }.into()],
        used_bytes: used,
        tracked_bytes: tracked.map(|bytes| bytes as i64),
        idle_bytes: idle.map(|bytes| bytes as i64),
        command: Some(command.into()),
        ..ProcessRow::default()
    }
}

fn machine() -> Ps {
    let mut ps = Ps {
        devices: vec![device(0, 70_112, 0), device(3, 74_578, 64)],
        processes: vec![
            process(60021, 0, "svc-llm", "vllm", [Some(70_112), Some(68_790), Some(0)]),
            process(
                41873,
                1,
                "alice",
                "/usr/bin/python train.py rank 3",
                [Some(71_204), Some(69_918), Some(8_648)],
            ),
            process(52110, 1, "bob", "python", [Some(3_310), None, None]),
        ],
        ..Ps::default()
    };
    ps.processes[1].who.insert("job".into(), "night".into());
    ps
}

/// As many processes as a node may have.
fn node(round: u64) -> Ps {
    let devices = (0..8).map(|index| device(index, 16 * 4_000, 0)).collect();
    let row = |at: usize| {
        let amounts = [Some(3_000 + round * 7), (at % 16 < 3).then_some(2_000 + round * 3), Some(at as u64)];
        process(10_000 + at as u32, at / 16, "alice", "python train.py", amounts)
    };
    Ps { devices, processes: (0..128).map(row).collect(), ..Ps::default() }
}

struct Site {
    folder: Folder,
    daemon: FakeDaemon,
    socket: PathBuf,
}

impl Site {
    fn new(name: &str) -> Self {
        let folder = Folder::new(name);
        let socket = folder.path("gpumem/control.sock");
        let daemon = FakeDaemon::at(&socket);
        let site = Site { folder, daemon, socket };
        site.tells(&machine());
        site
    }

    fn tells(&self, ps: &Ps) {
        self.daemon.says("GET /v1/ps", 200, serde_json::to_string(ps).expect("JSON"));
    }

    fn top(&self, size: (u16, u16), args: &[&str]) -> Terminal {
        let mut words = vec!["top", "--interval", "0.1"];
        words.extend(args);
        let mut command = self.folder.command(&words);
        command.env("LANG", "C.UTF-8").env_remove("LC_ALL").env_remove("NO_COLOR").env("TERM", "xterm");
        Terminal::new(command, size)
    }
}

/// A terminal with a program as session leader.
struct Terminal {
    master: File,
    slave: File,
    child: Child,
    parser: Arc<Mutex<vt100::Parser>>,
    written: Arc<Mutex<Vec<u8>>>,
    over: Arc<AtomicBool>,
}

impl Terminal {
    fn new(command: Command, (columns, rows): (u16, u16)) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
        grantpt(&master).expect("ours");
        unlockpt(&master).expect("open");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let path = Path::new(std::ffi::OsStr::from_bytes(name.as_bytes()));
        let slave = File::options().read(true).write(true).open(path).expect("its other end");
        let master = File::from(master);
        let end = || slave.try_clone().expect("a copy");
        let mut leader = Command::new("setsid");
        leader.arg("--ctty").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => leader.env(name, value),
                None => leader.env_remove(name),
            };
        }
        let parser = Arc::new(Mutex::new(vt100::Parser::new(cells(rows), cells(columns), 0)));
        let written = Arc::default();
        let mut terminal = Terminal {
            child: {
                resize(&master, columns, rows);
                leader.stdin(end()).stdout(end()).stderr(end()).spawn().expect("setsid")
            },
            master: master.try_clone().expect("a copy"),
            slave,
            parser,
            written,
            over: Arc::default(),
        };
        terminal.listen(master);
        terminal
    }

    fn listen(&mut self, mut master: File) {
        let (parser, written) = (Arc::clone(&self.parser), Arc::clone(&self.written));
        let over = Arc::clone(&self.over);
        std::thread::spawn(move || {
            let mut buffer = [0; 65536];
            while !over.load(Ordering::Relaxed) {
                let wait = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                if poll(&mut [PollFd::new(&master, PollFlags::IN)], Some(&wait)).is_ok_and(|ready| ready == 0)
                {
                    continue;
                }
                let Ok(read @ 1..) = master.read(&mut buffer) else { break };
                written.lock().expect("bytes").extend_from_slice(&buffer[..read]);
                parser.lock().expect("a screen").process(&buffer[..read]);
            }
        });
    }

    fn types(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).expect("typed");
    }

    fn resize(&self, columns: u16, rows: u16) {
        self.parser.lock().expect("a screen").screen_mut().set_size(cells(rows), cells(columns));
        resize(&self.master, columns, rows);
    }

    fn lines(&self) -> Vec<String> {
        let parser = self.parser.lock().expect("a screen");
        let (_, columns) = parser.screen().size();
        parser.screen().rows(0, columns.into()).map(|line| line.trim_end().to_owned()).collect()
    }

    fn text(&self) -> String {
        self.lines().join("\n")
    }

    /// Waits for the shell's prompt, because earlier input may be lost.
    fn prompts(&self) {
        self.until("the shell's prompt", |text| text.trim_end().ends_with('>'));
    }

    /// Waits until the screen contains these words.
    fn shows(&self, words: &str) -> String {
        self.until(words, |text| text.contains(words))
    }

    fn until(&self, what: &str, is: impl Fn(&str) -> bool) -> String {
        let since = std::time::Instant::now();
        loop {
            let text = self.text();
            if is(&text) {
                return text;
            }
            assert!(since.elapsed() < gpumem_test_support::DEADLINE, "{what:?} is not seen:\n{text}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    fn bytes(&self) -> usize {
        self.written.lock().expect("bytes").len()
    }

    /// Returns whether the terminal's modes are restored.
    fn is_given_back(&self) -> bool {
        let modes = tcgetattr(&self.slave).expect("modes").local_modes;
        let parser = self.parser.lock().expect("a screen");
        let screen = parser.screen();
        modes.contains(LocalModes::ICANON | LocalModes::ECHO)
            && !screen.alternate_screen()
            && !screen.hide_cursor()
    }

    /// Returns how often these words were written.
    fn written(&self, words: &str) -> usize {
        String::from_utf8_lossy(&self.written.lock().expect("bytes")).matches(words).count()
    }

    /// Signals the program, which has replaced setsid(1).
    fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).expect("a pid");
        rustix::process::kill_process(pid, signal).expect("sent");
    }

    fn end(mut self) -> i32 {
        let status = until("an end", || self.child.try_wait().expect("a child"));
        until("the terminal given back", || self.is_given_back().then_some(()));
        status.code().or(status.signal().map(|signal| 128 + signal)).expect("a status")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.over.store(true, Ordering::Relaxed);
    }
}

fn cells(number: u16) -> std::num::NonZero<u16> {
    std::num::NonZero::new(number).expect("a size")
}

fn resize(master: &File, columns: u16, rows: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(master, size).expect("a size");
}

#[test]
fn a_machine_is_seen_in_every_size() {
    let site = Site::new("top-sizes");
    let mut top = site.top((80, 24), &[]);
    let text = top.shows("python train.py rank 3");
    golden("machine-80x24", &text);
    top.resize(60, 15);
    golden(
        "machine-60x15",
        &top.until("the clock at the end of 60", |text| {
            let title = text.lines().next().unwrap_or_default();
            title.ends_with("every 0.1 s") && title.chars().count() == 60 && text.contains("q leave")
        }),
    );
    top.resize(130, 30);
    let wide = top.shows("USED, LATELY");
    assert!(wide.contains("█") && !wide.contains("60x15"), "{wide}");
    for (columns, rows) in [(20, 5), (3, 2), (1, 1), (200, 60), (80, 24)] {
        top.resize(columns, rows);
    }
    top.shows("python train.py rank 3");
    top.types("q");
    assert_eq!(top.end(), 0);
}

#[test]
fn findings_come_first_in_at_most_a_quarter_of_the_rows() {
    let site = Site::new("top-findings");
    let mut ps = machine();
    let finding = |pid, severity: &str, text: &str| ProcessFinding {
        pid,
        device: Some(1),
        severity: severity.into(),
        text: text.into(),
        ..ProcessFinding::default()
    };
    let leak = "the GPU is full in 41 min: retained forward outputs of GPT/lm_head: +64.0 MiB per step over 1,120 steps, +69,900 MiB in total, 98 % of what the process used";
    ps.findings = vec![
        finding(41873, "warning", leak),
        finding(41873, "note", "8,648 MiB were cached by the allocator and not in use at the peak"),
    ];
    site.tells(&ps);
    let mut top = site.top((80, 24), &[]);
    golden("findings-80x24", &top.shows("cached by the allocator"));
    ps.findings = vec![ps.findings.remove(0); 9];
    site.tells(&ps);
    top.shows("7 more findings");
    top.resize(60, 15);
    top.until("60 columns", |text| text.contains("8 more findings") && text.contains("52110"));
    top.types("q");
    assert_eq!(top.end(), 0);
}

#[test]
fn rows_are_sorted_filtered_and_chosen() {
    let site = Site::new("top-keys");
    let mut top = site.top((80, 24), &[]);
    let pids = |text: &str| -> Vec<String> {
        let word = |line: &str| line.split_whitespace().nth(1).map(str::to_owned);
        let rows = text.lines().skip_while(|line| !line.contains("COMMAND")).skip(1);
        rows.filter_map(word)
            .filter(|word| word.len() == 5 && word.bytes().all(|byte| byte.is_ascii_digit()))
            .collect()
    };
    let order = |top: &Terminal, wanted: [&str; 3]| {
        top.until(&wanted.join(" "), |text| pids(text) == wanted);
    };
    order(&top, ["41873", "60021", "52110"]);
    top.types("ssssss"); // by device
    order(&top, ["60021", "41873", "52110"]);
    top.types("s"); // used
    order(&top, ["41873", "60021", "52110"]);
    top.types("r");
    order(&top, ["52110", "60021", "41873"]);
    top.types("/BOB\r");
    top.until("bob alone", |text| pids(text) == ["52110"]);
    top.types("\x1b/night\r");
    top.until("one of the job", |text| pids(text) == ["41873"] && text.contains("/night"));
    top.types("\x1b");
    order(&top, ["52110", "60021", "41873"]);
    top.types("/ nothing");
    top.shows("no process has these words");
    top.types("\x1b");
    order(&top, ["52110", "60021", "41873"]);
    top.types("?");
    top.shows("every name, however small");
    top.types("\x1b");
    order(&top, ["52110", "60021", "41873"]);
    top.types("p");
    top.shows("PAUSED");
    let mut fewer = machine();
    fewer.processes.truncate(1);
    site.tells(&fewer);
    order(&top, ["52110", "60021", "41873"]);
    top.types("p");
    top.until("what is now", |text| pids(text) == ["60021"]);
    top.types("q");
    assert_eq!(top.end(), 0);
}

#[test]
fn a_process_is_seen_in_depth() {
    let site = Site::new("top-depth");
    let run = run_of(41873, "night", Some(3));
    site.daemon.runs("?pid=41873", &[&run]);
    let mut top = site.top((80, 24), &["41873"]);
    let text = top.shows("Others");
    golden("process-80x24", &text);
    // Texts and amounts must equal those of the report.
    let report = stdout(&site.folder.run(&["report", "--verbose", "41873"]));
    for line in text.lines().filter(|line| line.contains("Untrackable") || line.contains("tracked  ")) {
        let amounts: Vec<&str> = line.split_whitespace().take(3).collect();
        let is_it = |told: &str| told.split_whitespace().take(3).eq(amounts.iter().copied());
        assert!(report.lines().any(is_it), "{line}\n{report}");
    }
    top.types("\t\t");
    top.shows("by tag");
    top.types("jj\r");
    top.shows("gpumemctl report --tags");
    top.types("\x1b");
    top.shows("by tag");
    top.types("\x1b[F");
    top.shows("next: gpumemctl report 41873");
    top.types("o");
    top.shows("memory");
    top.types("\x1b");
    top.types("w");
    top.shows("of 3600 s");
    top.resize(60, 15);
    top.until("60 columns", |text| {
        text.contains("Esc back") && text.lines().all(|line| line.chars().count() <= 60)
    });
    top.types("\x1b");
    top.shows("COMMAND");
    // There is no view of another user's process, nor of one that has ended.
    top.types("\r");
    top.resize(80, 24);
    top.until("whose it is", |text| text.contains("by structure") || text.contains("by layer"));
    top.types("\x1b[Djj\r");
    top.shows("the daemon has no run of pid 52110 that you may see");
    top.types("q");
    assert_eq!(top.end(), 0);
}

#[test]
fn a_daemon_that_is_gone_is_said_and_one_that_is_back_is_heard() {
    let site = Site::new("top-gone");
    // A wide terminal, because the message contains the socket's path, which may be long.
    let mut top = site.top((200, 24), &[]);
    top.shows("python train.py rank 3");
    let aside = site.folder.path("gpumem/aside");
    fs::rename(&site.socket, &aside).expect("gone");
    let text = top.shows("no answer for");
    assert!(text.contains("trying again") && text.contains("60021"), "what was known stays:\n{text}");
    fs::rename(&aside, &site.socket).expect("back");
    top.until("an answer", |text| !text.contains("no answer for"));
    site.daemon.says("GET /v1/ps", 500, r#"{"error":"on fire\u001b[2J"}"#);
    top.shows("on fire");
    site.daemon.says("GET /v1/ps", 0, "what is this");
    top.shows("does not answer in HTTP");
    site.tells(&machine());
    top.until("an answer", |text| !text.contains("no answer for"));
    top.types("\x03");
    assert_eq!(top.end(), 0, "Ctrl-C leaves");
}

#[test]
fn signals_end_it_and_the_terminal_is_given_back() {
    let site = Site::new("top-signals");
    for (signal, number) in [(Signal::TERM, 15), (Signal::QUIT, 3), (Signal::HUP, 1)] {
        let top = site.top((80, 24), &[]);
        top.shows("60021");
        top.signal(signal);
        assert_eq!(top.end(), 128 + number);
    }
    let mut top = site.top((80, 24), &[]);
    top.shows("60021");
    top.signal(Signal::STOP);
    top.signal(Signal::CONT);
    until("another whole frame", || (top.written("\x1b[2J") >= 2).then_some(()));
    top.types("\x0c");
    until("a third", || (top.written("\x1b[2J") >= 3).then_some(()));
    // The terminal is closed: its processes get a signal, or read end of file.
    let Terminal { child, .. } = &mut top;
    let mut child = std::mem::replace(child, Command::new("true").spawn().expect("true"));
    drop(top);
    until("an end", || child.try_wait().expect("a child"));
}

#[test]
fn a_shell_stops_it_and_lets_it_go_on() {
    let site = Site::new("top-jobs");
    let mut shell = site.folder.command(&[]);
    let gpumemctl = shell.get_program().to_string_lossy().into_owned();
    shell = Command::new("bash");
    site.folder.settle(&mut shell);
    shell.args(["--norc", "--noprofile", "-i"]).env("PS1", "> ").env("LANG", "C.UTF-8").env("TERM", "xterm");
    let mut top = Terminal::new(shell, (80, 24));
    top.types(&format!("'{gpumemctl}' top --interval 0.1\n"));
    top.shows("python train.py rank 3");
    top.types("\x1a");
    top.shows("Stopped");
    assert_eq!(top.written("\x1b[?1049l"), 1);
    top.prompts();
    top.types("echo shell$((1 + 1))\n");
    top.shows("shell2");
    top.prompts();
    top.types("fg\n");
    let text = top.shows("python train.py rank 3");
    assert!(!text.contains("shell2"), "{text}");
    top.types("q");
    until("the shell", || (top.written("\x1b[?1049l") == 2).then_some(()));
    top.prompts();
    top.types("echo code$?\n");
    top.shows("code0");
    top.prompts();
    top.types("exit 0\n");
    assert_eq!(top.end(), 0);
}

#[test]
fn strangers_names_do_nothing() {
    let site = Site::new("top-hostile");
    let mut ps = machine();
    let bad = "evil\u{1b}]0;title\u{7}\u{1b}[2J\u{202e}\u{9b}31m\r\n漢字 名前 x\u{301} end";
    ps.devices[0].model = bad.into();
    ps.devices[1].why = Some(bad.into());
    for process in &mut ps.processes {
        (process.user, process.command) = (Some(bad.into()), Some(bad.into()));
    }
    ps.processes[2].flags = vec![bad.into(); 9];
    site.tells(&ps);
    let mut run = run_of(41873, bad, Some(3));
    run.process.facts.insert("command".into(), bad.into());
    run.cells.iter_mut().for_each(|cell| cell.tag = Some(format!("{bad}/{bad}")));
    site.daemon.runs("?pid=41873", &[&run]);
    let mut top = site.top((130, 30), &[]);
    top.shows("漢字");
    top.types("/evil\r");
    top.shows("/evil");
    top.types("\r\t\t");
    top.shows("tracked over time");
    top.types("a\x1b[Fgoxi");
    top.types("q");
    top.signal(Signal::TERM);
    let written = Arc::clone(&top.written);
    top.end();
    let written = String::from_utf8(written.lock().expect("bytes").clone()).expect("UTF-8");
    for bad in ["\x1b]", "\u{7}", "\u{9b}", "\u{202e}"] {
        assert!(!written.contains(bad), "{bad:?}");
    }
}

#[test]
fn without_colours_and_without_unicode_it_is_plain() {
    let site = Site::new("top-plain");
    let mut command = site.folder.command(&["top", "--interval", "0.1"]);
    command.env("LC_ALL", "C").env("NO_COLOR", "1").env("TERM", "vt100");
    let mut top = Terminal::new(command, (80, 24));
    let text = top.shows("python train.py rank 3");
    golden("machine-plain", &text);
    top.types("j\r");
    top.types("q");
    let written = Arc::clone(&top.written);
    top.end();
    let written = written.lock().expect("bytes").clone();
    assert!(written.is_ascii());
    let text = String::from_utf8(written).expect("ASCII");
    let colours =
        text.split("\x1b[").filter_map(|rest| rest.split_once('m').map(|(codes, _)| codes.to_owned()));
    for codes in colours.filter(|codes| codes.bytes().all(|byte| byte.is_ascii_digit() || byte == b';')) {
        assert!(codes.split(';').all(|code| ["0", "1", "2", "7"].contains(&code)), "{codes}");
    }
}

#[test]
fn a_refresh_costs_few_bytes() {
    let site = Site::new("top-bytes");
    site.tells(&node(0));
    let top = site.top((80, 24), &[]);
    top.shows("(1 to 12 of 128)");
    let answers = |count: usize| {
        let asked = site.daemon.was_asked().len();
        until("answers", || (site.daemon.was_asked().len() > asked + count).then_some(()));
    };
    answers(3); // the first frame is complete
    let whole = top.bytes();
    assert!(whole < 6_000, "{whole} bytes for the first frame");
    // Only the clock changes.
    answers(10);
    let idle = top.bytes() - whole;
    assert!(idle < 10 * 30, "{idle} bytes for ten answers in which nothing changed");
    let before = top.bytes();
    site.tells(&node(1));
    top.shows("3,007");
    answers(2); // `top` has read the whole answer
    let changed = top.bytes() - before;
    assert!(changed < 900, "{changed} bytes where each of twelve rows has other amounts");
    println!(
        "bytes: first frame {whole}, ten without a change {idle}, one with all amounts changed {changed}"
    );
}

#[test]
fn a_pipe_gets_one_frame() {
    let site = Site::new("top-once");
    let mut command = site.folder.command(&["top"]);
    let text = stdout(&command.env("LC_ALL", "C.UTF-8").output().expect("gpumemctl"));
    assert!(text.lines().count() == 8 && !text.contains('\x1b'), "{text}");
    assert!(text.contains(" 71,204  69,918 8,648   1,286 python train.py rank 3  job night\n"), "{text}");
    let run = run_of(41873, "night", None);
    site.daemon.runs("?pid=41873", &[&run]);
    let mut command = site.folder.command(&["top", "41873", "--once"]);
    let text = stdout(&command.env("LC_ALL", "C").output().expect("gpumemctl"));
    assert!(text.contains("used (= nvidia-smi)") && text.contains("next: gpumemctl report 41873"), "{text}");
    assert!(text.is_ascii());
    let text = stdout(&site.folder.run(&["top", "--once", "--device", "3"]));
    assert!(text.contains("1 GPU, 2 processes") && !text.contains("60021"), "{text}");
    let (code, message) = failure(&site.folder.run(&["top", "--device", "9"]));
    assert!(code == 3 && message.contains("there are: 0"), "{message}");
    let (code, message) = failure(&site.folder.run(&["top", "--interval", "0"]));
    assert!(code == 2 && message.contains("0.1 to 3600 seconds"), "{message}");
    let (code, message) = failure(&site.folder.run(&["top", "--socket", "/nowhere"]));
    assert!(code == 6 && message.contains("no daemon answers"), "{message}");
}

#[test]
fn devices_that_nvml_does_not_have_are_one_line() {
    let site = Site::new("top-claims");
    let lines =
        || stdout(&site.folder.run(&["top", "--once"])).lines().map(str::to_owned).collect::<Vec<_>>();
    let before = lines();
    let claim = |pid| ClaimRow { pid, devices: 32, ..ClaimRow::default() };
    let mut ps = machine();
    ps.claims = (1..=400).map(claim).collect();
    site.tells(&ps);
    let mut after = lines();
    let text = "400 processes name 12,800 devices that NVML does not have (gpumemctl ps lists them)";
    assert_eq!(after.remove(4), text, "below the devices");
    assert_eq!(after[1..], before[1..], "devices and processes are the same");
    ps.claims = vec![ClaimRow { devices: 1, ..claim(7) }];
    ps.devices.clear();
    ps.processes.clear();
    site.tells(&ps);
    assert_eq!(lines()[2], "1 process names a device that NVML does not have (gpumemctl ps lists them)");
}

/// Compares the screen with a golden file, except for the time of day. UPDATE_GOLDEN=1 writes the file.
fn golden(name: &str, text: &str) {
    let is_time = |word: &str| word.len() == 8 && word.bytes().filter(|byte| *byte == b':').count() == 2;
    let words = text.split_inclusive([' ', '\n']);
    let timeless: String = words
        .map(|word| match is_time(word.trim_end()) {
            true => word.replace(|character: char| character.is_ascii_digit(), "0"),
            false => word.to_owned(),
        })
        .collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/golden/top/{name}.txt"));
    let text = timeless.trim_end().to_owned() + "\n";
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(&path, &text).expect("written");
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, expected, "\n{text}");
}
