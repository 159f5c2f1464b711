//! `gpumemctl top` on its own terminal.

mod life;
mod terminal;

use crate::common::{FakeDaemon, Folder, failure, run_of, stdout, until};
use gpumem_model::control::{ClaimRow, DeviceRow, ProcessFinding, ProcessRow, Ps};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terminal::Terminal;

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
    let idle = idle.filter(|_| tracked.is_some());
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
        let amounts = [
            Some(3_000 + round * 7),
            (at % 16 < 3).then_some(2_000 + round * 3),
            (at % 16 < 3).then_some(at as u64),
        ];
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
    // The bar of the selected row is a bar, and not the rest of its column.
    let selected = top.selected();
    assert!(selected.contains("used") && !selected.contains('█'), "{selected}");
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
    let (code, message) = failure(&site.folder.run(&["top", "52110"]));
    assert!(
        code == 3 && message.contains("no run of pid 52110") && message.contains("doctor 52110"),
        "{message}"
    );
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

/// A node with eight devices and 64 processes. Some names have characters that are two columns wide.
fn large_node() -> Ps {
    let mut ps = node(0);
    ps.processes.retain(|process| process.pid % 2 == 0);
    for (device, load) in ps.devices.iter_mut().zip([100, 98, 0, 7, 100, 100, 55, 100]) {
        (device.utilization_percent, device.power_w) = (Some(load), Some(90 + load * 6));
    }
    for process in ps.processes.iter_mut().filter(|process| process.pid % 3 == 0) {
        (process.user, process.command) =
            (Some("王小明".into()), Some("python 训练/模型.py --名字 漢字".into()));
    }
    let text = "the GPU is full in 41 min: activations of 模型/解码器: +64.0 MiB per step".to_owned();
    let pid = ps.processes[0].pid;
    ps.findings =
        vec![ProcessFinding { pid, device: Some(0), severity: "warning".into(), text, ..Default::default() }];
    ps
}

#[test]
fn a_large_node_fits_every_size() {
    let site = Site::new("top-large");
    site.tells(&large_node());
    for (columns, rows) in [(40, 24), (80, 24), (120, 40), (200, 50)] {
        let mut top = site.top((columns, rows), &[]);
        top.shows("10000");
        top.types("\x1b[F");
        // The last cell of a frame is the scroll bar's; a sparkline is complete after 24 replies.
        let is_complete = |line: &str| columns < 110 || line.contains(&"█".repeat(24));
        let text = top.until("the last process", |text| {
            let mut rows = text.lines().rev().skip(1).take_while(|line| !line.contains("COMMAND")).peekable();
            let is_last = rows.peek().is_some_and(|last| last.contains("10126") && last.ends_with('█'));
            is_last && rows.all(is_complete)
        });
        golden(&format!("node-{columns}x{rows}"), &text);
        // Amounts are not cut.
        assert!(text.contains("64,000 16,936 81,559"), "{text}");
        top.types("q");
        assert_eq!(top.end(), 0);
    }
}

#[test]
fn one_frame_on_a_terminal_is_printed_line_by_line() {
    let site = Site::new("top-once-terminal");
    site.tells(&large_node());
    let top = site.top((120, 100), &["--once"]);
    let text = top.until("the last process", |text| text.contains("王小明"));
    let written = Arc::clone(&top.written);
    top.end();
    let written = String::from_utf8(written.lock().expect("bytes").clone()).expect("UTF-8");
    let is_style = |rest: &str| rest.chars().find(char::is_ascii_alphabetic).is_none_or(|kind| kind == 'm');
    assert!(written.split("\x1b[").skip(1).all(is_style), "the cursor is not moved: {text}");
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
