//! The files of `gpumemctl generate`: manual pages, and completions with the words of the running system.

use crate::common::{FakeDaemon, Folder, stdout};
use gpumem_model::control::{DeviceRow, ProcessRow, Ps};
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// A folder with a daemon and an imported run. A process there has a job whose name a shell could execute.
fn site(name: &str) -> (Folder, FakeDaemon) {
    let folder = Folder::new(name);
    let daemon = FakeDaemon::at(&folder.path("gpumem/control.sock"));
    let process = ProcessRow {
        pid: 4711,
        used_bytes: Some(1 << 30),
        command: Some("python train.py --lr 1".into()),
        who: [("job".to_owned(), "$(touch evil) `touch evil`".to_owned())].into(),
        ..ProcessRow::default()
    };
    let ps = Ps { devices: vec![DeviceRow::default()], processes: vec![process], ..Ps::default() };
    daemon.says("GET /v1/ps", 200, serde_json::to_string(&ps).expect("JSON"));
    stdout(&folder.run(&["import", &crate::common::shipped().to_string_lossy()]));
    (folder, daemon)
}

#[test]
fn candidates_are_pids_runs_jobs_and_words() {
    let (folder, _daemon) = site("candidates");
    let candidates = |words: &[&str]| {
        let text = stdout(&folder.run(&[&["candidates", "--"], words].concat()));
        text.lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(candidates(&["report", ""]), ["4711", "r1"]);
    assert_eq!(candidates(&["top", "4"]), ["4711"]);
    assert_eq!(candidates(&["explain", "pool i"]), ["pool idle"]);
    assert!(candidates(&["explain", "in_arg/logits"]).contains(&"in_arg/logits_weight".to_owned()));
    assert_eq!(candidates(&["report", "--job", ""]), ["$(touch evil) `touch evil`"]);
    assert!(candidates(&["report", "--since", ""]).is_empty());
    let about = stdout(&folder.run(&["candidates", "--", "oom", "47"]));
    assert_eq!(about, "4711\tpython train.py --lr 1\n");
}

#[test]
fn candidates_are_silent_without_a_daemon_and_quick_with_one_that_hangs() {
    let folder = Folder::new("no-candidates");
    let output = folder.run(&["candidates", "--", "report", ""]);
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
    let _hangs = std::os::unix::net::UnixListener::bind({
        fs::create_dir_all(folder.path("gpumem")).expect("a folder");
        folder.path("gpumem/control.sock")
    })
    .expect("a socket");
    let begin = Instant::now();
    let output = folder.run(&["candidates", "--", "report", ""]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    // A request without the limit for candidates waits for five seconds.
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
}

#[test]
fn bash_offers_candidates_and_executes_none() {
    let (folder, _daemon) = site("bash");
    let share = folder.text("share");
    stdout(&folder.run(&["generate", &share]));
    let script = r#"
        PATH=$(dirname "$1"):$PATH; . "$2/bash-completion/completions/gpumemctl"; cd "$2"; shift 2
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
        _gpumemctl_live gpumemctl "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        [ ${#COMPREPLY[@]} -eq 0 ] || printf '%s\n' "${COMPREPLY[@]}""#;
    let offered = |words: &[&str]| {
        let mut bash = Command::new("bash");
        folder.settle(&mut bash);
        bash.args(["-c", script, "bash", env!("CARGO_BIN_EXE_gpumemctl"), &share, "gpumemctl"]).args(words);
        let text = stdout(&bash.output().expect("bash"));
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(offered(&["report", ""]), ["4711", "r1"]);
    assert_eq!(offered(&["explain", r"pool\ i"]), [r"pool\ idle"]);
    assert_eq!(offered(&["report", "--js"]), ["--json"]);
    assert_eq!(offered(&["rep"]), ["report"]);
    assert!(offered(&["report", "./no"]).is_empty(), "bash completes names of files");
    assert_eq!(offered(&["job", ""]), [r"\$\(touch\ evil\)\ \`touch\ evil\`"]);
    assert!(!fs::exists(folder.path("share/evil")).expect("readable"), "a name was executed");
}

/// Runs a script in a shell with its arguments; `None`, after printing the reason, if the shell is not installed.
fn lines_of(shell: &str, folder: &Folder, arguments: &[&str]) -> Option<Vec<String>> {
    let mut command = Command::new(shell);
    folder.settle(&mut command);
    match command.args(arguments).env("HOME", &folder.0).current_dir(folder.path("share")).output() {
        Ok(output) => Some(stdout(&output).lines().map(str::to_owned).collect()),
        Err(_) => {
            let remedy = format!("apt-get install {shell}");
            gpumem_test_support::skip("the shell of the completions is not here", &remedy);
            None
        }
    }
}

#[test]
fn zsh_offers_candidates_and_executes_none() {
    let (folder, _daemon) = site("zsh");
    stdout(&folder.run(&["generate", &folder.text("share")]));
    let script = r#"
        PATH=${1:h}:$PATH; compdef() {}; . zsh/site-functions/_gpumemctl; shift
        words=(gpumemctl "$@"); CURRENT=$#words
        # As zsh does for arguments of any number.
        _arguments() { words=("$words[-1]"); CURRENT=1; _gpumemctl_live }
        compadd() { print -rl -- "${values[@]}" }; _files() { print files }
        _gpumemctl; true"#;
    let offered = |words: &[&str]| {
        let arguments = [&["-fc", script, "zsh", env!("CARGO_BIN_EXE_gpumemctl")], words].concat();
        lines_of("zsh", &folder, &arguments)
    };
    let Some(values) = offered(&["report", ""]) else { return };
    assert_eq!(values, ["4711", "r1"]);
    assert_eq!(offered(&["explain", r"pool\ i"]).expect("zsh"), ["pool idle"]);
    assert_eq!(offered(&["job", ""]).expect("zsh"), ["$(touch evil) `touch evil`"]);
    assert_eq!(offered(&["report", "./no"]).expect("zsh"), ["files"]);
    assert!(!fs::exists(folder.path("share/evil")).expect("readable"), "a name was executed");
    let functions = fs::read_to_string(folder.path("share/zsh/site-functions/_gpumemctl")).expect("a script");
    assert!(functions.contains("'*::command -- Command and its arguments:_default'"), "programs of `run`");
}

#[test]
fn fish_offers_candidates_also_for_values_of_options() {
    let (folder, _daemon) = site("fish");
    stdout(&folder.run(&["generate", &folder.text("share")]));
    let script = r#"set PATH (dirname $argv[1]) $PATH; source fish/vendor_completions.d/gpumemctl.fish; complete -C $argv[2]"#;
    let offered = |line: &str| {
        let line = format!("gpumemctl {line}");
        let arguments = ["--no-config", "-c", script, env!("CARGO_BIN_EXE_gpumemctl"), &line];
        let lines = lines_of("fish", &folder, &arguments)?;
        let word = |line: String| line.split('\t').next().unwrap_or_default().to_owned();
        // Beside the words, fish offers the folders of share/.
        Some(lines.into_iter().map(word).filter(|word| !word.ends_with('/')).collect::<Vec<_>>())
    };
    let Some(words) = offered("report ") else { return };
    assert_eq!(words, ["4711", "r1"]);
    assert_eq!(offered(r"explain pool\ i").expect("fish"), ["pool idle"]);
    assert_eq!(offered("explain 'pool i").expect("fish"), ["pool idle"]);
    assert_eq!(offered("report --job ").expect("fish"), ["$(touch evil) `touch evil`"]);
    assert_eq!(offered("report --js").expect("fish"), ["--json"]);
    assert!(!fs::exists(folder.path("share/evil")).expect("readable"), "a name was executed");
}

#[test]
fn manual_pages_have_full_synopses_and_examples() {
    let folder = Folder::new("manuals");
    stdout(&folder.run(&["generate", &folder.text("share")]));
    let pages = fs::read_dir(folder.path("share/man/man1")).expect("pages").flatten();
    let pages: Vec<(String, String)> = pages
        .map(|page| {
            let text = fs::read_to_string(page.path()).expect("a page");
            (page.file_name().to_string_lossy().into_owned(), text.replace(r"\-", "-"))
        })
        .collect();
    for (name, text) in
        pages.iter().filter(|(name, _)| !["gpumemctl.1", "gpumemctl-nvml.1"].contains(&name.as_str()))
    {
        assert!(text.contains(".SH EXAMPLES\n"), "{name}");
        let synopsis =
            text.split(".SH SYNOPSIS\n").nth(1).and_then(|rest| rest.split(".SH").next()).expect(name);
        let options = text.split(".SH OPTIONS\n").nth(1).and_then(|rest| rest.split(".SH EXAMPLES").next());
        let options = options.unwrap_or_default().lines().filter(|line| line.contains(r"\fB--"));
        for option in options.filter(|line| !line.contains("--help")) {
            let long =
                option.split(r"\fB--").nth(1).and_then(|rest| rest.split(r"\fR").next()).expect(option);
            let takes_value = option.contains(r"\fI<");
            let shown = synopsis.split("--").find_map(|part| part.strip_prefix(long)).expect(option);
            assert_eq!(
                shown.starts_with(r"\fR \fI") || shown.starts_with(r"\fR [\fI"),
                takes_value,
                "{name}: {option}"
            );
        }
    }
    let oom = &pages.iter().find(|(name, _)| name == "gpumemctl-oom.1").expect("a page").1;
    assert!(oom.contains(r"[\fB--at\fR \fITIME\fR]") && oom.contains(r"[\fIPID|RUN|FILE\fR]"), "{oom}");
}
