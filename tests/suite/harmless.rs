//! Hostile words (tests/src/hostile.rs) in every field that a user can set, through every view. The list of outputs
//! comes from gpumemctl's completions: a command or option that is missing here fails the test.
use gpumem_tests::browser::{Browser, chromium};
use gpumem_tests::hostile::{self, BYTES, WORDS};
use gpumem_tests::live::programs::{copy_program, programs};
use gpumem_tests::live::prometheus::{check_metrics, free_address, get, tool};
use gpumem_tests::live::{Daemon, Job, Machine, Mixer, until};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A command, its forms (`!`: it is refused), and its options that choose no form. `RUN`, `TAG`, `OUT` and `FILE` are filled in.
struct Views {
    command: &'static str,
    forms: &'static [&'static str],
    others: &'static [&'static str],
}

/// Exit codes of commands that found something: growth beyond `--fail-above`, an unknown result, or a problem.
const TOLD: [Option<i32>; 4] = [Some(0), Some(8), Some(9), Some(10)];

/// Views of a run in the store.
const STORED: &[Views] = &[
    Views {
        command: "report",
        forms: &[
            "RUN",
            "RUN --verbose",
            "RUN --all",
            "RUN --by layer",
            "RUN --by structure",
            "RUN --tags",
            "RUN --steps",
            "RUN --growth",
            "RUN --iterations",
            "RUN --json",
            "RUN --csv",
            "RUN --iterations --json",
            "RUN --iterations --csv",
            "RUN --iterations --columns --every 2",
            "RUN --iterations --columns --csv",
            "RUN --iterations --columns --json",
            "RUN --counters",
            "RUN --counters --json",
            "RUN --html -o OUT",
            "RUN --svg -o OUT",
            "RUN --pdf -o OUT",
            "RUN --png -o OUT",
            "RUN --plot peak --svg",
            "RUN --plot categories --svg",
            "RUN --plot timeline --svg",
            "RUN RUN2 --plot compare --svg",
            "RUN --title TAG --hide-below 0 --svg",
            "RUN --chrome-trace",
            "RUN --collapsed",
            "RUN --treemap",
            "RUN --since TAG",
            "RUN --at TAG",
            "RUN --between TAG,TAG",
            "RUN RUN2",
            "! RUN RUN2 --csv",
            "! RUN RUN2 --html",
            "RUN --rules TAG",
            "RUN --device TAG",
            "--job TAG",
            "RUN --format TAG",
            "FILE",
            "FILE --json",
            "FILE --pid 41873",
            "RUN --svg -o OUT --force",
            "TAG",
        ],
        others: &["store", "socket"],
    },
    Views {
        command: "oom",
        forms: &[
            "RUN",
            "RUN --json",
            "RUN --all",
            "RUN --verbose",
            "--at 2026-11-20",
            "--at TAG",
            "RUN --device TAG",
            "--job TAG",
            "TAG",
            "FILE --pid 41873",
        ],
        others: &["store", "socket", "for", "gpu"],
    },
    Views {
        command: "explain",
        forms: &["", "gap RUN", "TAG RUN", "TAG RUN --rules TAG", "gap FILE", "gap TAG"],
        others: &["store", "socket"],
    },
    Views {
        command: "diff",
        forms: &[
            "RUN RUN2",
            "RUN RUN2 --tags",
            "RUN RUN2 --all",
            "RUN RUN2 --now",
            "RUN RUN2 --by structure",
            "RUN RUN2 --json",
            "RUN RUN2 --csv",
            "RUN RUN2 --svg -o OUT",
            "RUN RUN2 --pdf -o OUT",
            "RUN RUN2 --png -o OUT --force",
            "RUN RUN2 --fail-above 2%",
            "RUN RUN2 --fail-above 2% --of TAG",
            "RUN RUN2 --device TAG",
            "--job TAG TAG",
            "--job TAG TAG --json",
            "RUN RUN2 --rules TAG",
            "RUN FILE",
            "RUN FILE --format TAG",
            "RUN TAG",
        ],
        others: &["store", "socket"],
    },
    Views {
        command: "runs",
        forms: &[
            "",
            "--json",
            "--user TAG",
            "--job TAG",
            "--label TAG",
            "--device TAG",
            "--since TAG",
            "--until TAG",
            "--state TAG",
            "--sort TAG",
        ],
        others: &["store", "oom", "limit"],
    },
    Views {
        command: "why",
        forms: &["RUN", "RUN --json", "RUN --device TAG", "TAG", "FILE --pid 41873"],
        others: &["store", "socket", "gpu"],
    },
    Views {
        command: "whatif",
        forms: &["! FILE", "! FILE --json", "! FILE --set TAG", "! FILE --torch TAG", "! TAG", "! RUN"],
        others: &["sweep", "device-memory", "gpu", "pid", "store", "memory-fraction", "drop", "scale"],
    },
    Views { command: "import", forms: &["FILE", "TAG", "--format TAG FILE"], others: &["store"] },
    Views {
        command: "export",
        forms: &["RUN -o OUT", "RUN -o -", "FILE -o OUT --force", "TAG -o OUT", "! RUN --pid 7"],
        others: &["store", "socket"],
    },
    Views { command: "generate", forms: &["OUT"], others: &[] },
];

/// Views of a running process.
const LIVE: &[Views] = &[
    Views { command: "ps", forms: &["", "--json", "--device TAG"], others: &["socket"] },
    Views { command: "top", forms: &["--once", "--once --device TAG"], others: &["socket", "interval"] },
    Views {
        command: "job",
        forms: &["", "--json", "TAG", "TAG --json", "TAG --prometheus TAG"],
        others: &["store", "socket"],
    },
    Views {
        command: "doctor",
        forms: &["", "PID", "--json", "PID --json", "PID --bundle OUT", "PID --bundle OUT --keep-names"],
        others: &["socket"],
    },
    Views { command: "mark", forms: &["TAG PID", "TAG", "TAG --job TAG"], others: &["socket"] },
    Views {
        command: "record",
        forms: &[
            "PID start -o OUT",
            "PID stop",
            "PID dump -o OUT",
            "PID pause",
            "PID resume",
            "PID start -o OUT --steps TAG",
        ],
        others: &["socket", "for", "max-size"],
    },
    Views { command: "nvml release", forms: &["--for 1s", "--for TAG"], others: &["socket"] },
    Views {
        command: "run",
        forms: &[
            "-- PROGRAM",
            "--quiet -- PROGRAM",
            "--record OUT -- PROGRAM",
            "--name TAG -- PROGRAM",
            "-- TAG",
        ],
        others: &["socket"],
    },
];

/// Its long options, by command: as `generate` writes them for a shell, from the parser.
fn options(of: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let text =
        std::fs::read_to_string(of.join("fish/vendor_completions.d/gpumemctl.fish")).expect("completions");
    let mut commands: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines() {
        let Some((_, rest)) = line.split_once("__fish_gpumemctl_using_subcommand ") else { continue };
        let Some((condition, rest)) = rest.split_once('"') else { continue };
        let named: Vec<&str> = condition.split(['"', ';', ' ']).filter(|word| !word.is_empty()).collect();
        let (command, nested) = (named[0], condition.contains("and __fish_seen_subcommand_from"));
        let command =
            if nested { format!("{command} {}", named[named.len() - 1]) } else { command.to_owned() };
        if command.starts_with("help") || command.contains(" help") {
            continue;
        }
        let known = commands.entry(command).or_default();
        let words: Vec<&str> = rest.split(" -d ").next().unwrap_or("").split_whitespace().collect();
        known.extend(words.windows(2).filter(|pair| pair[0] == "-l").map(|pair| pair[1].to_owned()));
    }
    commands
}

#[test]
fn no_command_and_no_option_is_forgotten() {
    let dir = std::env::temp_dir().join(format!("gpumem-harmless-{}", std::process::id()));
    let mut ctl = Command::new(programs().ours.join("gpumemctl"));
    assert!(ctl.arg("generate").arg(&dir).status().expect("gpumemctl runs").success());
    let mut commands = options(&dir);
    std::fs::remove_dir_all(&dir).expect("removed");
    // Excluded: one with sub-commands, whose output has no foreign text, a hidden one, and a server, which tests/suite/mcp.rs tests.
    commands.retain(|command, _| !["nvml", "detach", "mcp"].contains(&command.as_str()));
    let views: Vec<&Views> = STORED.iter().chain(LIVE).collect();
    let named: BTreeSet<&str> = views.iter().map(|views| views.command).collect();
    let unknown: Vec<&String> = commands.keys().filter(|command| !named.contains(command.as_str())).collect();
    assert!(unknown.is_empty() && commands.len() > 12, "commands that are in no list: {unknown:?}");
    for views in views {
        let tried =
            views.forms.iter().flat_map(|form| form.split(' ')).filter_map(|word| word.strip_prefix("--"));
        let mut known: BTreeSet<&str> = tried.chain(views.others.iter().copied()).collect();
        known.extend(["help", if views.forms.concat().contains("-o OUT") { "output" } else { "help" }]);
        let has = commands.get(views.command).cloned().unwrap_or_default();
        let forgotten: Vec<&String> = has.iter().filter(|option| !known.contains(option.as_str())).collect();
        assert!(forgotten.is_empty(), "{}: options that are in no list: {forgotten:?}", views.command);
    }
}

/// Returns the arguments of a form with its placeholders filled in.
fn words(form: &str, filled: &BTreeMap<&str, OsString>) -> Vec<OsString> {
    let fill = |word: &str| match word.split_once(',') {
        Some((one, two)) if filled.contains_key(one) => {
            let mut both = filled[one].clone();
            both.push(",");
            both.push(&filled[two]);
            both
        }
        _ => filled.get(word).cloned().unwrap_or_else(|| word.into()),
    };
    form.split(' ').filter(|word| !word.is_empty() && *word != "!").map(fill).collect()
}

/// Checks output according to its format; returns the document if it is JSON.
fn judge(what: &str, form: &str, output: &Output, file: &Path) -> Option<Value> {
    let complaints = hostile::lines(&format!("{what}, standard error"), &output.stderr);
    assert!(!complaints.iter().any(|line| line.contains("panicked")), "{what}: {complaints:?}");
    assert!(output.status.code().is_some_and(|code| code != 101), "{what}: {:?}", output.status);
    complaints.iter().for_each(|line| no_command_to_copy(what, line));
    let written = std::fs::read(file).ok().filter(|_| form.contains("OUT") && file.is_file());
    let shown = hostile_if_text(what, &output.stdout);
    if !output.status.success() {
        return None;
    }
    let has = |option: &str| form.split(' ').any(|word| word == option);
    let bytes = written.as_deref().unwrap_or(&output.stdout);
    if what.starts_with("export ") {
        let lines = hostile::lines(what, bytes);
        let documents = lines.iter().map(|line| serde_json::from_str::<Value>(line));
        let documents: Vec<Value> =
            documents.collect::<Result<_, _>>().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!((documents.len(), &documents[0]["format"]), (2, &"gpumem-run".into()), "{what}");
        return documents.into_iter().next_back();
    }
    if has("--json") || has("--chrome-trace") || has("--treemap") {
        hostile::lines(what, bytes);
        return Some(serde_json::from_slice(bytes).unwrap_or_else(|error| panic!("{what}: {error}")));
    }
    if has("--csv") {
        for table in String::from_utf8_lossy(bytes).split("\n\n") {
            hostile::csv(what, table.as_bytes());
        }
    } else if has("--html") {
        let page = String::from_utf8_lossy(bytes).to_lowercase();
        assert_eq!((page.matches("<script").count(), page.matches("<!--").count()), (2, 0), "{what}");
        hostile::lines(what, bytes);
    } else if has("--svg") {
        let text = hostile::lines(what, bytes).join("\n");
        assert!(!text.contains("<script") && !text.contains("<img") && !text.contains("<!"), "{what}");
        let mut parser = Command::new("python3");
        parser.args(["-c", "import sys, xml.dom.minidom as x; x.parseString(sys.stdin.buffer.read())"]);
        assert!(fed(&mut parser, bytes).status.success(), "{what}: no XML");
    } else if has("--pdf") {
        assert!(bytes.starts_with(b"%PDF-") && bytes.ends_with(b"%%EOF\n"), "{what}");
        // The one binary line is the comment that marks the file as binary.
        let text: Vec<u8> =
            bytes.iter().copied().filter(|byte| *byte == b'\n' || (b' '..=b'~').contains(byte)).collect();
        assert!(
            bytes.len() - text.len() <= 4 + 64,
            "{what}: {} bytes that are not text",
            bytes.len() - text.len()
        );
    } else if has("--png") {
        assert!(bytes.starts_with(b"\x89PNG"), "{what}");
    } else {
        shown.iter().for_each(|line| no_command_to_copy(what, line));
    }
    None
}

fn hostile_if_text<'t>(what: &str, bytes: &'t [u8]) -> Vec<&'t str> {
    if bytes.starts_with(b"%PDF") || bytes.starts_with(b"\x89PNG") {
        Vec::new()
    } else {
        hostile::lines(what, bytes)
    }
}

/// Users copy commands that start with `gpumemctl`: a shell must not find a foreign command in them.
fn no_command_to_copy(what: &str, line: &str) {
    let Some((_, typed)) = line.split_once("gpumemctl ") else { return };
    let unquoted: String = typed.split('\'').step_by(2).collect();
    assert!(!unquoted.contains("$(") && !unquoted.contains(";touch"), "{what}: {line:?}");
}

fn fed(command: &mut Command, bytes: &[u8]) -> Output {
    use std::io::Write;
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    child.stdin.take().expect("piped").write_all(bytes).expect("it reads");
    child.wait_with_output().expect("it ends")
}

/// Returns the longest prefix that is valid as an argument.
fn argument(word: &[u8]) -> OsString {
    OsStr::from_bytes(word.split(|byte| *byte == 0).next().unwrap_or_default()).to_owned()
}

/// Words for the arguments of a form.
fn tried(form: &str) -> Vec<&'static [u8]> {
    match form.contains("TAG") {
        true => vec![WORDS[6].as_bytes(), WORDS[41].as_bytes(), BYTES[2]],
        false => vec![b""],
    }
}

/// Every distinct text that the field has in a document.
fn texts<'v>(value: &'v Value, field: &str, found: &mut BTreeSet<&'v str>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| texts(item, field, found)),
        Value::Object(fields) => {
            found.extend(fields.get(field).and_then(Value::as_str));
            fields.values().for_each(|value| texts(value, field, found));
        }
        _ => {}
    }
}

#[test]
fn what_a_run_says_is_harmless_in_every_view() {
    let dir = std::env::temp_dir().join(format!("gpumem-harmless-run-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let run = hostile::run();
    let mut other = run.clone();
    other.process.pid += 1;
    other.cells.iter_mut().rev().take(3).for_each(|cell| cell.tag = Some("new\u{1b}[2J".into()));
    // Names of files are words too; the second has bytes that are not text.
    let files: Vec<PathBuf> = [&run, &other]
        .iter()
        .zip([&b"=1+1\x1b]0;t\x07\n<b>$(touch harm)\xe2\x80\xae"[..], BYTES[2]])
        .map(|(run, name)| {
            let file = dir.join(OsStr::from_bytes(name));
            std::fs::write(&file, hostile::exported(run, &format!("{} {}", WORDS[0], run.process.pid)))
                .expect("written");
            file
        })
        .collect();
    let ctl = |arguments: &[OsString]| {
        let mut ctl = Command::new(programs().ours.join("gpumemctl"));
        ctl.args(arguments)
            .env("GPUMEM_STORE", dir.join("runs.sqlite"))
            .env("GPUMEM_CONTROL", "/nonexistent/control.sock");
        ctl.env("TZ", "UTC").current_dir(&dir).stdin(Stdio::null()).output().expect("gpumemctl runs")
    };
    let mut import: Vec<OsString> = vec!["import".into()];
    import.extend(files.iter().map(|file| file.clone().into()));
    let output = ctl(&import);
    judge("import", "", &output, &dir);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let mut filled: BTreeMap<&str, OsString> = BTreeMap::from([
        ("RUN", "r1".into()),
        ("RUN2", "r2".into()),
        ("FILE", files[0].clone().into()),
        ("OUT", dir.join("out").into()),
    ]);
    let mut documents = 0;
    for views in STORED {
        for form in views.forms {
            for word in tried(form) {
                filled.insert("TAG", argument(word));
                let mut arguments: Vec<OsString> = vec![views.command.into()];
                arguments.extend(words(form, &filled));
                let what = format!("{} {form} {word:?}", views.command);
                let output = ctl(&arguments);
                documents += usize::from(judge(&what, form, &output, &dir.join("out")).is_some());
                let _ = std::fs::remove_file(dir.join("out"));
                let _ = std::fs::remove_dir_all(dir.join("out"));
                if !form.contains("TAG") {
                    assert_eq!(
                        TOLD.contains(&output.status.code()),
                        !form.starts_with('!'),
                        "{what}: {}",
                        String::from_utf8_lossy(&output.stderr)
                    );
                }
            }
        }
    }
    assert!(documents > 5, "{documents}");
    assert!(!dir.join("harm").exists() && !Path::new("/tmp/harm").exists());

    // Different names stay separate.
    let of = |arguments: &[&str]| {
        let arguments: Vec<OsString> = arguments.iter().map(Into::into).collect();
        ctl(&arguments).stdout
    };
    let known: BTreeSet<&str> = WORDS.iter().copied().collect();
    assert_eq!(known.len(), WORDS.len(), "a word is there twice");
    let document: Value = serde_json::from_slice(&of(&["report", "r1", "--json"])).expect("JSON");
    let mut tags = BTreeSet::new();
    texts(&document["devices"], "tag", &mut tags);
    let missing: Vec<&&str> = known.iter().filter(|word| !tags.contains(**word)).collect();
    assert!(missing.is_empty(), "not unchanged in JSON: {missing:?}");
    let table = hostile::csv("tags", &of(&["report", "r1", "--csv"]));
    let at = |name: &str| table[0].iter().position(|field| field == name).expect("a column");
    let fields: BTreeSet<&str> =
        table[1..].iter().map(|row| &*row[at("tag")]).filter(|tag| !tag.is_empty()).collect();
    assert!(fields.len() > WORDS.len(), "{} of {}: {fields:?}", fields.len(), WORDS.len());
    let collapsed = of(&["report", "r1", "--collapsed"]);
    let paths: Vec<&str> = hostile::lines("collapsed", &collapsed)
        .iter()
        .filter_map(|line| Some(line.rsplit_once(' ')?.0))
        .collect();
    let apart: BTreeSet<&&str> = paths.iter().collect();
    assert_eq!(apart.len(), paths.len(), "a path is there twice");
    assert!(collapsed.is_ascii() || paths.len() >= WORDS.len(), "{} of {}", paths.len(), WORDS.len());
    let shown = of(&["report", "r1", "--tags"]);
    let rows: BTreeSet<&str> = hostile::lines("tags", &shown).into_iter().collect();
    let alike = [
        "ab",
        "a\\u{200b}b",
        "a\\u{200c}b",
        "a\\u{ad}b",
        "a\\u{feff}b",
        "ab\\u{20}",
        "\\u{20}ab",
        "a\\u{e0041}b",
    ];
    for name in alike {
        assert!(rows.iter().any(|row| row.split_whitespace().next() == Some(name)), "{name}: {rows:#?}");
    }
    std::fs::remove_dir_all(&dir).expect("removed");
}

/// A program with this file name, another command name, and these words as its claims.
fn disguised(machine: &Machine, daemon: &Daemon, name: &[u8]) -> Command {
    let plain = Mixer::command(machine, daemon);
    let program = machine.dir.join(OsStr::from_bytes(name));
    copy_program(plain.get_program(), &program);
    let mut command = machine.command(&program);
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let claims = [
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "TORCHELASTIC_RUN_ID",
        "POD_NAME",
        "POD_NAMESPACE",
        "POD_UID",
        "RANK",
        "WORLD_SIZE",
    ];
    let words = WORDS.iter().filter(|word| !word.contains('\0'));
    command.envs(claims.iter().zip(words));
    command.arg0(argument(WORDS[16].as_bytes()));
    command
}

fn hex(word: &[u8]) -> String {
    word.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn what_a_process_says_is_harmless_while_it_runs() {
    while_it_runs(None, None);
}

/// Lane `browser`.
mod browser {
    use super::*;

    #[test]
    fn process_strings_are_harmless_in_promtool_and_a_browser() {
        if let (Some(promtool), Some(chromium)) = (tool("promtool"), chromium()) {
            while_it_runs(Some(promtool), Some(chromium));
        }
    }
}

fn while_it_runs(promtool: Option<PathBuf>, chromium: Option<PathBuf>) {
    let model = format!("gpu0.name={}", WORDS[0]);
    let machine = Machine::new(&["devices=2", "memory=16G", &model, "gpu1.name=\u{1b}[2J\u{202e}%s"]);
    let http = free_address();
    let config = format!(
        "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n[metrics]\nlisten = \"{http}\"\ntags = 100\npage = \"tags\"\n"
    );
    let loud = ["sh", "-c", "exec \"$@\" --log debug", "sh"];
    let daemon = Daemon::start_by(&machine, &loud, &config);

    let mut mixer = Mixer::run(&mut disguised(&machine, &daemon, b"\x1b]0;t\x07\n=1<b>\xff"));
    let pid = mixer.pid().to_string();
    mixer.ok("device 0");
    let tags: Vec<&[u8]> = WORDS
        .iter()
        .map(|word| word.as_bytes())
        .filter(|word| !word.contains(&0))
        .chain(BYTES.iter().copied())
        .collect();
    mixer.ok(&format!("process-tag %{}", hex(WORDS[40].as_bytes())));
    for (number, tag) in tags.iter().enumerate() {
        mixer.ok(&format!("tag %{}; alloc a{number} {}", hex(tag), (number + 1) << 10));
    }
    let _bare = Job::start(machine.bare_trainer(&["--hold", "600"]).arg0(argument(WORDS[6].as_bytes())));
    let ctl = |arguments: &[OsString]| {
        let mut ctl = daemon.ctl(&machine, &[]);
        ctl.args(arguments).current_dir(&machine.dir).stdin(Stdio::null()).output().expect("gpumemctl runs")
    };
    let report: Value = until(60, "all tags in its report", || {
        let output = ctl(&["report".into(), pid.clone().into(), "--json".into()]);
        let report: Value = serde_json::from_slice(&output.stdout).ok()?;
        let mut found = BTreeSet::new();
        texts(&report["devices"][0]["last"], "tag", &mut found);
        (found.len() >= tags.len()).then_some(report.clone())
    });
    let bytes: i64 = (1..=tags.len() as i64).map(|number| number << 10).sum();
    assert_eq!(report["devices"][0]["last"]["tracked_bytes"], bytes);

    // Every command that queries the daemon.
    let (out, program) = (
        machine.dir.join("out\u{1b}[2J$(touch harm)"),
        machine.dir.join(OsStr::from_bytes(b"\x9b2J;touch harm")),
    );
    copy_program(Mixer::command(&machine, &daemon).get_program(), &program);
    let mut filled: BTreeMap<&str, OsString> = BTreeMap::from([
        ("PID", pid.clone().into()),
        ("OUT", out.clone().into()),
        ("PROGRAM", program.into()),
    ]);
    let stored: Vec<Views> =
        ["PID", "PID --tags", "PID --json", "PID --csv", "PID --html", "PID --svg", "PID --treemap"]
            .map(|form| Views { command: "report", forms: vec![form].leak(), others: &[] })
            .into();
    for views in LIVE.iter().chain(&stored) {
        for form in views.forms {
            for word in tried(form) {
                filled.insert("TAG", argument(word));
                let mut arguments = words(views.command, &filled);
                arguments.extend(words(form, &filled));
                let what = format!("{} {form} {word:?}", views.command);
                let output = ctl(&arguments);
                if form.contains("--bundle") {
                    let parts = Command::new("tar").arg("-xzOf").arg(&out).output().expect("tar runs").stdout;
                    assert!(hostile::lines(&what, &parts).len() > 100, "{what}");
                }
                judge(&what, &form.replace("--bundle OUT", "--bundle"), &output, &out);
                let _ = std::fs::remove_file(&out);
                let reported = TOLD.contains(&output.status.code());
                assert!(
                    reported || form.contains("TAG"),
                    "{what}: {}",
                    String::from_utf8_lossy(&output.stderr)
                );
            }
        }
    }
    assert!(!machine.dir.join("harm").exists());

    // No byte makes a scrape fail, and no name is merged with another.
    let metrics = get(http, "/metrics").expect("metrics");
    let lines = hostile::lines("/metrics", metrics.as_bytes());
    let of = |family: &str| lines.iter().filter(|line| line.starts_with(family)).copied().collect::<Vec<_>>();
    assert_eq!(of("gpumem_device_used_bytes{").len(), 2, "no series is added");
    let own: Vec<&str> = of("gpumem_process_tag_bytes{")
        .into_iter()
        .filter(|line| line.contains(&format!("pid=\"{pid}\"")))
        .collect();
    let series: BTreeSet<&str> = own.iter().filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect();
    assert!(
        series.len() == own.len() && own.len() >= tags.len(),
        "{} series of {} tags",
        own.len(),
        tags.len()
    );
    let sum: i64 = own.iter().filter_map(|line| line.rsplit_once(' ')?.1.parse::<i64>().ok()).sum();
    assert_eq!(sum, bytes);
    if let Some(promtool) = promtool {
        assert_eq!(check_metrics(&promtool, &metrics), "");
    }
    if let Some(chromium) = chromium {
        let mut browser = Browser::start(&chromium, machine.dir.join("browser"));
        let key = format!("/process/{pid}.{}", report["process"]["start_ticks"]);
        for (path, has) in [("/", "tr[data-pid]"), (&key, "#statement")] {
            browser.visit(&format!("http://{http}{path}"));
            let shown = format!("document.querySelector('{has}') !== null");
            until(60, "the page", || (browser.eval(&shown) == Value::Bool(true)).then_some(()));
            let harm = "[typeof window.harm, document.querySelectorAll('img, iframe, object, embed, base, main script').length]";
            assert_eq!(browser.eval(harm), serde_json::json!(["undefined", 0]), "{path}");
            browser.settle();
            assert_eq!(browser.logged, Vec::<String>::new());
            assert!(
                browser.requests.iter().all(|request| request.starts_with(&format!("http://{http}/"))),
                "{:?}",
                browser.requests
            );
        }
    }

    // Records left after its end, and log lines.
    mixer.end();
    until(60, "its end", || (!daemon.pids(&machine).contains(&pid.parse().ok()?)).then_some(()));
    for form in ["", "--json", "--label a"] {
        let arguments: Vec<OsString> = [&[OsString::from("runs")], &words(form, &filled)[..]].concat();
        let output = ctl(&arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        judge(&format!("runs {form}"), form, &output, &out);
    }
    let log = std::fs::read(machine.dir.join("daemon.log")).expect("a log");
    for line in hostile::lines("the log", &log) {
        assert!(line.starts_with("20") && !line.starts_with('<'), "a line of somebody else's: {line:?}");
    }
}
