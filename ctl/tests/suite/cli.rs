//! Runs gpumemctl as a user would, and checks its output, its errors on bad input, and its exit codes.
use crate::common::quoted;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A temporary folder, deleted on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gpumemctl-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).expect("a file");
        path.to_string_lossy().into_owned()
    }
    fn path(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }
    fn run(&self, args: &[&str]) -> Output {
        command(args).env("GPUMEM_STORE", self.0.join("runs.sqlite")).output().expect("gpumemctl")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpumemctl"));
    // No daemon on this machine may be queried.
    command.args(args).env("GPUMEM_CONTROL", "/nonexistent/control.sock").stdin(Stdio::null());
    command
}

fn shipped() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    path.to_string_lossy().into_owned()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// Returns exit code and message of a command that must fail, with nothing on standard output and no panic.
fn failure(output: &Output) -> (i32, String) {
    let message = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(!message.contains("panicked"), "{message}");
    (output.status.code().expect("an exit, not a signal"), message)
}

#[test]
fn reports_a_log_without_a_store() {
    let folder = Folder::new("report-file");
    let text = stdout(&folder.run(&["report", &shipped()]));
    assert!(text.lines().count() <= 25, "{text}");
    assert!(text.contains("\ntotal = nvidia-smi ") && text.contains("\nUntrackable "), "{text}");
    let verbose = stdout(&folder.run(&["report", &shipped(), "--verbose"]));
    assert!(verbose.lines().count() <= 35 && verbose.contains("\nused (= nvidia-smi) "), "{verbose}");
    assert!(!folder.0.join("runs.sqlite").exists(), "a report stores nothing");
}

#[test]
fn imports_once_and_reports_by_name() {
    let folder = Folder::new("import");
    let first = stdout(&folder.run(&["import", "tbd-log", &shipped()]));
    assert!(
        first.starts_with("r1  train.py pid 20417: ")
            && first.contains(", 0 records rejected, 8 NVML samples"),
        "{first}"
    );
    let again = stdout(&folder.run(&["import", "tbd-log", &shipped()]));
    assert!(again.starts_with("r1 (already stored)"), "{again}");

    let stored = stdout(&folder.run(&["report", "--verbose", "r1"]));
    let direct = stdout(&folder.run(&["report", "--verbose", &shipped()]));
    let told = |text: &str| text.split("next: ").next().map(|text| text.replace("  run r1", ""));
    assert_eq!(told(&stored), told(&direct), "a stored run reads like its file");
    assert!(stored.contains("\nnext: gpumemctl report r1 --by structure | "), "{stored}");
    assert!(direct.contains(&format!("\nnext: gpumemctl report {} --by ", quoted(&shipped()))), "{direct}");
    assert_eq!(stdout(&folder.run(&["report", "--verbose", "r1", "--pid", "20417"])), stored);
    let (exit, message) = failure(&folder.run(&["report", "r1", "--pid", "999999"]));
    assert_eq!((exit, message.contains("run r1 is of pid 20417, not 999999")), (3, true), "{message}");
    assert_eq!(stdout(&folder.run(&["report", "--verbose"])), stored, "the latest run is the default");
    assert!(stdout(&folder.run(&["runs"])).contains("r1"));
    let listed: serde_json::Value =
        serde_json::from_str(&stdout(&folder.run(&["runs", "--json"]))).expect("JSON");
    assert_eq!(listed.as_array().map(Vec::len), Some(1));
}

/// Checks the sums of a JSON report, for each device and moment.
fn assert_json_adds_up(text: &str) {
    let report: serde_json::Value = serde_json::from_str(text).expect("JSON");
    assert_eq!((&report["schema"], &report["version"]), (&"gpumem.report".into(), &1.into()));
    for device in report["devices"].as_array().expect("devices") {
        for moment in [&device["last"], &device["peak"]] {
            let number = |name: &str| moment[name].as_i64().unwrap_or_else(|| panic!("{name} is an integer"));
            let sum = |name: &str| -> i64 {
                let list = moment[name].as_array().expect(name);
                list.iter().map(|entry| entry["bytes"].as_i64().expect("an integer")).sum()
            };
            let pools = number("pool_idle_bytes") + number("opaque_bytes");
            assert_eq!(sum("layers") + pools, number("tracked_bytes"));
            assert_eq!(sum("structures") + pools, number("tracked_bytes"));
            assert_eq!(sum("cells"), number("tracked_bytes"));
            assert_eq!(sum("untrackable"), number("untrackable_bytes"));
            let parts = number("predates_bytes") + number("tracked_bytes") + number("untrackable_bytes");
            assert_eq!(parts, number("used_bytes"));
        }
    }
}

#[test]
fn json_and_csv_add_up_to_what_nvml_charges() {
    let folder = Folder::new("json");
    let json = stdout(&folder.run(&["report", &shipped(), "--json"]));
    assert_json_adds_up(&json);
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let csv = stdout(&folder.run(&["report", &shipped(), "--csv"]));
    for moment in ["last", "peak"] {
        let rows = csv.lines().filter(|line| line.split(',').nth(1) == Some(moment));
        let sum: i64 =
            rows.map(|line| line.rsplit(',').next().expect("bytes").parse::<i64>().expect("bytes")).sum();
        assert_eq!(Some(sum), report["devices"][0][moment]["used_bytes"].as_i64());
    }
}

#[test]
fn every_printed_column_adds_up_as_it_is_shown() {
    let folder = Folder::new("columns");
    for by in ["layer", "structure", "tag"] {
        for form in ["--all", "--verbose"] {
            let text = stdout(&folder.run(&["report", &shipped(), "--by", by, form]));
            assert_columns_add_up(&text);
        }
    }
}

/// The indentation of each line shows which row it is a part of.
fn assert_columns_add_up(text: &str) {
    let table: Vec<(usize, [i64; 2])> = text
        .lines()
        .skip_while(|line| !line.starts_with("used"))
        .take_while(|line| !line.is_empty())
        .map(|line| {
            let depth = line.chars().take_while(|character| *character == ' ').count();
            let kinds = ["at least", "model", "measured", "upper bound"];
            let kind = kinds.into_iter().find(|kind| line.ends_with(kind)).unwrap_or("");
            let line = line.trim_end_matches(kind).trim_end();
            let mut words = line.rsplit(' ').filter(|word| !word.is_empty());
            let mut number = || -> i64 {
                let word = words.next().expect("a column");
                word.replace([',', '.', '~'], "").parse().unwrap_or_else(|_| panic!("{word} in {line}"))
            };
            let (peak, last) = (number(), number());
            (depth, [last, peak])
        })
        .collect();
    assert!(table.len() > 5, "{text}");
    for (index, (depth, amounts)) in table.iter().enumerate() {
        let inside = table[index + 1..].iter().take_while(|(other, _)| other > depth);
        let parts: Vec<_> = inside.filter(|(other, _)| *other == depth + 1).collect();
        for (column, amount) in amounts.iter().enumerate() {
            let sum: i64 = parts.iter().map(|(_, amounts)| amounts[column]).sum();
            assert!(parts.is_empty() || sum == *amount, "line {index} of\n{text}");
        }
    }
}

#[test]
fn bad_files_are_named_with_what_would_be_right() {
    let folder = Folder::new("bad");
    let cases: [(String, i32, &str); 11] = [
        (folder.path("no/such.log"), 3, "/no is not a folder; give a recording, log"),
        (folder.path("absent.log"), 3, "no such file in the folder "),
        (folder.0.to_string_lossy().into_owned(), 4, "is a directory"),
        (folder.file("empty", ""), 4, "is empty"),
        (folder.file("noise", [0x80, 0, 1, 2, 0xff]), 4, "binary data"),
        (folder.file("program", b"\x7fELF\x02\x01\x01\0"), 4, "ELF"),
        (folder.file("packed.gz", b"\x1f\x8b\x08\0\0\0"), 4, "unpack it first"),
        (folder.file("wide.log", b"\xff\xfe[\0m\0e\0m\0]\0"), 4, "iconv -f UTF-16"),
        (folder.file("wide2.log", b"[\0m\0e\0m\0]\0"), 4, "iconv -f UTF-16LE"),
        (folder.file("other.txt", "hello\nworld\n"), 4, "the known formats are: recording, "),
        (
            folder.file("future.gpumem", b"GPUMEMR\n\x09\0\0\0\0\0\0\0"),
            4,
            "format version 9; this program reads version 1",
        ),
    ];
    for (file, code, words) in &cases {
        let (exit, message) = failure(&folder.run(&["report", file]));
        assert_eq!((exit, message.contains(words), message.contains(file)), (*code, true, true), "{message}");
    }
    let (exit, message) =
        failure(&folder.run(&["report", &shipped(), "--html", "-o", &folder.path("no/page.html")]));
    assert_eq!((exit, message.contains("/no does not exist: make it, or name")), (1, true), "{message}");
    let (exit, message) = failure(&folder.run(&["import", "tbd-log", &folder.file("plain", "hello\n")]));
    assert_eq!(exit, 4);
    assert!(message.contains("[mem] Allocate 1024 bytes GPU memory"), "{message}");
}

#[test]
fn wrong_words_are_answered() {
    let folder = Folder::new("words");
    for (args, code, words) in [
        (&["report", "r99"][..], 3, "run store"),
        (&["report", "r0"][..], 3, "runs are named r1"),
        (
            &["explain", "Untrakable"][..],
            3,
            "no report has this word. Did you mean Untrackable? gpumemctl explain lists",
        ),
        (&["explain", "xyzzy"][..], 3, "no report has this word. gpumemctl explain lists all words"),
        (&["report", "train"][..], 3, "train: no such file, and neither a pid nor a run"),
        (&["top", "abc"][..], 2, "a pid is a number, as 4711; gpumemctl ps lists processes"),
        (&["report", "train", "--pid=-1"][..], 2, "a pid is a number"),
        (&["runs", "--limit", "x"][..], 2, "a count is 1 or more"),
        (&["whatif", "x", "--gpu", "x"][..], 2, "a GPU is its number in the program"),
        (&["report", "r99999999999999999999"][..], 3, "runs are named r1"),
        (&["report"][..], 3, "run store"),
        (&["whatif", "abc"][..], 3, "abc: no such file, and neither a pid nor a run: gpumemctl ps"),
        (&["whatif", "./abc"][..], 3, "./abc: no such file in the folder .; give a recording"),
        (&["import", "/nonexistent"][..], 3, "/nonexistent: no such file in the folder /; give"),
        (&["report", "r1", "--html", "out.html"][..], 1, "a file to write follows -o"),
        (&["import", "--format", "csv", "x"][..], 2, "possible values: recording, "),
        (&["import", "csv", "x"][..], 3, "csv: no such file in the folder .; give a recording, log"),
        (&["report", "--json", "--csv"][..], 2, "cannot be used with"),
        (&["frobnicate"][..], 2, "unrecognized subcommand"),
    ] {
        let (exit, message) = failure(&folder.run(args));
        assert_eq!(exit, code, "{message}");
        assert!(message.contains(words), "{args:?}: {message}");
    }
    let log = shipped();
    let rules = folder.file("rules.toml", "[[layer]]\nname = \"x\"\ntagg = [\"y\"]\n");
    let (exit, message) = failure(&folder.run(&["report", &log, "--rules", &rules]));
    assert_eq!(exit, 4);
    assert!(message.contains("line 3") && message.contains("tagg"), "{message}");
    let (exit, message) = failure(&folder.run(&["report", &log, "--rules", "tbdd"]));
    assert_eq!(exit, 3);
    assert!(message.contains("presets default, mxnet, tbd"), "{message}");
    let (exit, message) = failure(&folder.run(&["report", &log, "--pid", "1"]));
    assert_eq!(exit, 3);
    assert!(message.contains("has no pid 1; there are: 20417"), "{message}");

    stdout(&folder.run(&["import", "tbd-log", &log]));
    let (exit, message) = failure(&folder.run(&["report", "r99"]));
    assert_eq!(exit, 3);
    assert!(
        message.contains("there is no run r99: ") && message.contains("gpumemctl runs lists"),
        "{message}"
    );
}

#[test]
fn one_bad_line_in_a_good_file_is_counted_and_named() {
    let folder = Folder::new("one-bad");
    let good = fs::read_to_string(shipped()).expect("text");
    let mut lines: Vec<&str> = good.lines().collect();
    lines.insert(40, "[mem] Allocate many bytes GPU memory (in_arg:oops).");
    let log = folder.file("bad-line.log", lines.join("\n"));
    let text = stdout(&folder.run(&["report", "--verbose", &log]));
    assert!(text.contains("1 record rejected") && text.contains("(line 41)"), "{text}");
    assert_columns_add_up(&text);
}

#[test]
fn bad_bytes_and_terminal_escapes_in_a_good_file_do_no_harm() {
    let folder = Folder::new("escapes");
    let mut log = fs::read(shipped()).expect("bytes");
    log.extend_from_slice(b"[mem] Allocate 99999999 bytes GPU memory (evil\x1b[2J\xff=cmd).\n");
    let log = folder.file("evil.log", log);
    for args in [&["report", &log, "--verbose"][..], &["report", &log, "--by", "tag", "--all"][..]] {
        let text = stdout(&folder.run(args));
        assert!(!text.contains('\x1b'), "{text}");
        assert!(text.contains("not UTF-8"), "{text}");
        assert_columns_add_up(&text);
    }
    let text = stdout(&folder.run(&["report", &log, "--by", "tag", "--all"]));
    assert!(text.contains("\\xFF=cmd"), "bad bytes stay distinct: {text}");
    assert_json_adds_up(&stdout(&folder.run(&["report", &log, "--json"])));
}

#[test]
fn a_log_cut_anywhere_still_adds_up() {
    let folder = Folder::new("cut");
    let whole = fs::read(shipped()).expect("bytes");
    let step = whole.len() / 23;
    for end in (step..whole.len()).step_by(step) {
        let log = folder.file("cut.log", &whole[..end]);
        let output = folder.run(&["report", &log, "--json"]);
        let report: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        let last = &report["devices"][0]["last"];
        let sum: i64 =
            last["cells"].as_array().expect("cells").iter().filter_map(|cell| cell["bytes"].as_i64()).sum();
        assert_eq!(last["tracked_bytes"].as_i64(), Some(sum), "cut at {end}");
    }
}

#[test]
fn ten_gigabytes_of_nothing_cost_neither_time_nor_memory() {
    let folder = Folder::new("sparse");
    let hole = |name: &str, head: &[u8]| {
        let path = folder.path(name);
        let mut file = fs::File::create(&path).expect("a file");
        file.write_all(head).expect("a head");
        file.set_len(10 << 30).expect("a hole");
        path
    };
    let limited = |args: &[&str]| {
        // 300 MB of address space: enough for the program, but not for memory that grows with the file.
        let quoted: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
        let line =
            format!("ulimit -v 300000; exec '{}' {}", env!("CARGO_BIN_EXE_gpumemctl"), quoted.join(" "));
        Command::new("sh").args(["-c", &line]).stdin(Stdio::null()).output().expect("sh")
    };
    let (exit, message) = failure(&limited(&["report", &hole("empty.log", b"")]));
    assert_eq!(exit, 4);
    assert!(message.contains("only zero bytes"), "{message}");
    let text =
        stdout(&limited(&["report", "--verbose", &hole("tail.log", &fs::read(shipped()).expect("bytes"))]));
    assert!(
        text.contains("is longer than 256 MiB: nothing after it was read")
            && text.contains("1 record rejected"),
        "{text}"
    );
    assert_columns_add_up(&text);
    let (exit, message) = failure(&limited(&["report", &hole("r.gpumem", b"GPUMEMR\n\x01\0\0\0\0\0\0\0")]));
    assert_eq!(exit, 4);
    assert!(message.contains("a frame of 0 bytes is impossible"), "{message}");
}

#[test]
fn a_long_line_hides_nothing_after_it() {
    let folder = Folder::new("long-line");
    let mut log = fs::read(shipped()).expect("bytes");
    log.extend(vec![0; 3 << 20]);
    log.extend_from_slice(b"\n[mem] Allocate 1048576 bytes GPU memory (workspace:x).\n");
    let text = stdout(&folder.run(&["report", "--verbose", &folder.file("long.log", log)]));
    assert!(
        text.contains("262 allocations")
            && text.contains("was skipped")
            && text.contains("1 record rejected"),
        "{text}"
    );
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let folder = Folder::new("pipe");
    let mut child = command(&["report", &shipped(), "--csv"])
        .env("GPUMEM_STORE", folder.path("runs.sqlite"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("gpumemctl");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("an end");
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
}

#[test]
fn help_reads_as_it_was_approved() {
    let mut all = String::new();
    for args in [
        &[][..],
        &["run"],
        &["ps"],
        &["top"],
        &["report"],
        &["oom"],
        &["job"],
        &["doctor"],
        &["record"],
        &["nvml"],
        &["nvml", "release"],
        &["runs"],
        &["import"],
        &["export"],
        &["diff"],
        &["explain"],
        &["whatif"],
    ] {
        let help =
            command(&[args, &["--help"]].concat()).env_remove("COLUMNS").output().expect("help").stdout;
        let help = String::from_utf8(help).expect("UTF-8");
        all += &format!("$ gpumemctl {}\n{}\n", [args, &["--help"]].concat().join(" "), help.trim_end());
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/help/gpumemctl.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(&path, &all).expect("a golden file");
    }
    let golden = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(all, golden, "UPDATE_GOLDEN=1 writes it");
}

#[test]
fn help_names_every_exit_code() {
    let of = ["", "report", "import", "runs", "ps", "record"].map(|name| [name, "--help"]);
    for args in of {
        let args: Vec<&str> = args.into_iter().filter(|word| !word.is_empty()).collect();
        let help = String::from_utf8(command(&args).output().expect("help").stdout).expect("UTF-8");
        for code in 0..=7 {
            assert!(help.contains(&format!("{code} ")), "{help}");
        }
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
    }
}

#[test]
fn one_bad_file_or_a_closed_pipe_stops_no_import() {
    let folder = Folder::new("several");
    let good = fs::read_to_string(shipped()).expect("text");
    let other = folder.file("other.log", good.replace("Batch [400]", "Batch [401]"));
    let empty = folder.file("empty.log", "");
    let output = folder.run(&["import", "tbd-log", &shipped(), &empty, &other]);
    assert_eq!(output.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&output.stderr).contains("empty.log: is empty"));
    assert_eq!(String::from_utf8_lossy(&output.stdout).matches("allocations of").count(), 2);

    let store = folder.path("piped.sqlite");
    let mut child = command(&["import", "tbd-log", &shipped(), &other, "--store", &store])
        .stdout(Stdio::piped())
        .spawn()
        .expect("gpumemctl");
    drop(child.stdout.take());
    assert!(child.wait().expect("an end").success());
    assert_eq!(stdout(&folder.run(&["runs", "--store", &store])).matches("\nr").count(), 2);
}

#[test]
fn errors_are_said_once_and_name_no_escape() {
    let folder = Folder::new("said-once");
    let (_, message) = failure(&folder.run(&["report", &folder.path("absent\x1b[31m.log")]));
    assert_eq!(message.matches("no such file").count(), 1, "{message}");
    assert!(!message.contains('\x1b'), "{message}");
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let status = command(&["report", "absent"]).stderr(full).status().expect("gpumemctl");
    assert_eq!(status.code(), Some(3), "a full standard error is not a crash");
}

#[test]
fn the_process_of_a_log_is_the_one_that_holds_its_memory() {
    let folder = Folder::new("neighbours");
    let good = fs::read_to_string(shipped()).expect("text");
    let log = folder.file("desktop.log", good.replace("python3-pid_", "Xorg-pid_7=45\tpython3-pid_"));
    let text = stdout(&folder.run(&["report", "--verbose", &log]));
    assert!(text.contains("pid 20417 (python3)") && text.contains("several processes"), "{text}");
    assert!(text.contains("721.0"), "{text}");
    let broken = folder.file("na.log", good.replace("pid_20417=721", "pid_20417=N/A"));
    assert!(stdout(&folder.run(&["report", "--verbose", &broken])).contains("rejected"));
}

#[test]
fn progress_bars_hide_no_record() {
    let folder = Folder::new("progress");
    let good = fs::read_to_string(shipped()).expect("text");
    let bar =
        format!("{good}1%|#  | (a)\r[mem] Allocate 1048576 bytes GPU memory (workspace:x).\r2%|## | (b)\n");
    let before = stdout(&folder.run(&["import", "tbd-log", &shipped()]));
    let after = stdout(&folder.run(&["import", "tbd-log", &folder.file("bar.log", bar)]));
    assert!(before.contains("261 allocations of 313,034,400 bytes"), "{before}");
    assert!(after.contains("262 allocations of 314,082,976 bytes, 0 records rejected"), "{after}");
}

#[test]
fn a_page_is_written_whole_and_replaces_nothing_unasked() {
    let folder = Folder::new("page");
    let log = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/small-train.log");
    let page = folder.path("page.html");
    let written = folder.run(&["report", log, "--html", "-o", &page]);
    assert!(written.status.success() && written.stdout.is_empty(), "{written:?}");
    let html = fs::read_to_string(&page).expect("a page");
    assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>\n"));
    // The page contains the text, for browsers without scripts.
    let text = String::from_utf8(folder.run(&["report", "--verbose", log]).stdout).expect("UTF-8");
    let first = text.lines().nth(1).expect("a line");
    assert!(html.contains(first), "{first}");

    let refused = folder.run(&["report", log, "--html", "-o", &page]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("page.html") && said.contains("--force"), "{said}");
    assert!(folder.run(&["report", log, "--html", "-o", &page, "--force"]).status.success());
    assert_eq!(fs::read_to_string(&page).expect("a page"), html, "the same run is the same file");
    let piped = folder.run(&["report", log, "--html", "-o", "-"]);
    assert_eq!(String::from_utf8(piped.stdout).expect("UTF-8"), html);
    assert_eq!(folder.run(&["report", log, "--html", "--csv"]).status.code(), Some(2), "one form at a time");
}
