//! docs/reference-config.md: every key with its text in config/gpumemd.toml and its type and bounds in the program.
//!
//! Text, default and section are those of the shipped file. Type and bounds come from the program's error messages for invalid
//! values. Whether a change takes effect at once comes from `Keys`.

use crate::common::parse;
use gpumemd::config::{Config, Keys};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const HEAD: &str = "# Every key of the configuration

<!-- made by daemon/tests/suite/config.rs from config/gpumemd.toml and the program: UPDATE_GOLDEN=1 -->

gpumemd reads `/etc/gpumemd/gpumemd.toml`, or the file after `--config`: TOML, and every key may be left out. `config/gpumemd.toml` is
a file with every key and its default. An unknown key or value is refused with file, line and the allowed values:

```sh
gpumemd --check --config config/gpumemd.toml
```

A changed file is read again at `SIGHUP` (`systemctl reload gpumemd`). The log lists changed keys that need a
restart; the column `reload` has `restart` for them.

Amounts in keys that end in `_s` are seconds, `_hz` times a second, `_mib` MiB, `_days` days. In the column `takes`, bounds are inclusive.
";

/// A key of the shipped file.
struct Key {
    section: String,
    name: String,
    default: Option<String>,
    about: String,
}

impl Key {
    fn full(&self) -> String {
        if self.section.is_empty() { self.name.clone() } else { format!("{}.{}", self.section, self.name) }
    }

    /// Returns a file with this value for the key and nothing else.
    fn with(&self, value: &str) -> String {
        let section = if self.section.is_empty() { String::new() } else { format!("[{}]\n", self.section) };
        format!("{section}{} = {value}\n", self.name)
    }

    /// Returns the program's error for `value`; `None` if it accepts it.
    fn refusal(&self, value: &str) -> Option<String> {
        parse(&self.with(value)).err().map(|error| error.lines().last().unwrap_or_default().to_owned())
    }

    /// Returns type and bounds, from the errors for invalid values.
    fn takes(&self) -> String {
        let expected = self.refusal("{}").unwrap_or_else(|| panic!("{} takes a table", self.full()));
        let kind = expected.rsplit("expected ").next().unwrap_or_default();
        let bounds = |value: &str| {
            let refusal = self.refusal(value)?;
            refusal.split_once("out of range: ").map(|(_, allowed)| allowed.replace(" are allowed", ""))
        };
        match kind {
            "usize" | "u64" | "u32" => {
                let allowed = bounds("4000000000").unwrap_or_else(|| "at least 0".into());
                format!("whole number: {allowed}").replace("number: whole numbers", "number")
            }
            "f64" => format!("number: {}", bounds("-1.0").unwrap_or_else(|| "any".into())),
            "a boolean" => "`true` or `false`".into(),
            "path string" => "path".into(),
            "a sequence" => "list of texts".into(),
            // A text, or one of several words: an unknown word causes an error that lists them.
            _ => match self.refusal("\"no such word\"") {
                None => "text".into(),
                Some(refusal) if refusal.contains("a sequence") => "list of texts".into(),
                Some(refusal) => {
                    let (_, allowed) =
                        refusal.split_once("expected ").or(refusal.split_once(": ")).expect(&refusal);
                    allowed.replace('"', "`")
                }
            },
        }
    }

    /// Returns whether a reload applies a changed value.
    fn at_once(&self) -> bool {
        let default = parse("").expect("nothing is right");
        let others = [
            "\"off\"",
            "[\"a.example\"]",
            "\"127.0.0.1:1\"",
            "\"tags\"",
            "\"anonymous\"",
            "\"/elsewhere\"",
            "true",
            "1.5",
            "777",
            "1000",
            "1",
            "0.5",
            "[\"gpu.example.com\"]",
        ];
        let other =
            others.iter().filter_map(|value| parse(&self.with(value)).ok()).find(|config| *config != default);
        let other: Config = other.unwrap_or_else(|| panic!("{}: no other value is known", self.full()));
        let changes = Keys::of(&default).take(&Keys::of(&other));
        assert_eq!(changes.len(), 1, "{}: {changes:?}", self.full());
        changes[0].at_once
    }
}

/// Returns the sections with their comments, and the keys in order.
fn read(file: &str) -> (Vec<(String, String)>, Vec<Key>) {
    let (mut sections, mut keys) = (vec![(String::new(), String::new())], Vec::<Key>::new());
    let mut about = Vec::new();
    for line in file.lines() {
        let open = line.strip_prefix("# ");
        let assigned = |line: &str| {
            let (key, value) = line.split_once(" = ")?;
            key.bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
                .then(|| (key.to_owned(), value.to_owned()))
        };
        if let Some(section) = line.strip_prefix('[') {
            sections.push((section.trim_end_matches(']').to_owned(), about.join(" ")));
            about.clear();
        } else if let Some((name, value)) = assigned(open.unwrap_or(line)) {
            let section = sections.last().expect("one").0.clone();
            let default = open.is_none().then(|| value.clone());
            if about.is_empty() {
                // It shares the comment of the previous key.
                let before = keys.last().filter(|key| key.section == section);
                let before = before.unwrap_or_else(|| panic!("{section}.{name}: no comment before it"));
                about.push(format!("See `{}`.", before.name));
            }
            keys.push(Key { section, name, default, about: about.join(" ") });
            about.clear();
        } else if let Some(comment) = open {
            about.push(comment.to_owned());
        } else {
            about.clear();
        }
    }
    (sections, keys)
}

fn fresh(shipped: &str) -> String {
    let (sections, keys) = read(shipped);
    let mut text = HEAD.to_owned();
    for (section, about) in sections {
        let title =
            if section.is_empty() { "Before any section".to_owned() } else { format!("`[{section}]`") };
        write!(text, "\n## {title}\n\n").expect("a String");
        if !about.is_empty() {
            write!(text, "{about}\n\n").expect("a String");
        }
        text += "| key | takes | default | reload | |\n|---|---|---|---|---|\n";
        for key in keys.iter().filter(|key| key.section == section) {
            let default = key.default.as_ref().map_or("see there".to_owned(), |value| format!("`{value}`"));
            let reload = if key.at_once() { "yes" } else { "restart" };
            let about = key.about.replace('|', "\\|");
            writeln!(text, "| `{}` | {} | {default} | {reload} | {about} |", key.name, key.takes())
                .expect("a String");
        }
    }
    let help = Command::new(env!("CARGO_BIN_EXE_gpumemd"))
        .arg("--help")
        .env_remove("COLUMNS")
        .output()
        .expect("gpumemd runs");
    let help = String::from_utf8(help.stdout).expect("UTF-8");
    let help: String = help.lines().map(|line| line.trim_end().to_owned() + "\n").collect();
    text + "\n" + ENVIRONMENT + "\n## The program\n\n```text\n" + help.trim_end() + "\n```\n"
}

const ENVIRONMENT: &str = "## From the environment

No key is set by a variable. What the file leaves open is decided by these:

| variable | decides |
|---|---|
| `RUNTIME_DIRECTORY`, `STATE_DIRECTORY` | of systemd's: `runtime_dir`, and the folder of `runs.store` |
| `XDG_RUNTIME_DIR` | `runtime_dir` of a daemon that is not root's, or is private: `gpumem` in it; without it `/tmp/gpumem-UID` |
| `GPUMEM_STORE` | `runs.store` |
| `XDG_STATE_HOME`, `HOME` | `runs.store` of a daemon that is not root's, or is private: `gpumem/runs.sqlite` in the first, or below `.local/state` of the second |
| `NOTIFY_SOCKET`, `WATCHDOG_USEC`, `LISTEN_FDS`, `LISTEN_FDNAMES` | of systemd's: docs/systemd.md |
| `JOURNAL_STREAM` | where it is set, the log's lines have no times, because journald adds them |

Variables of the agent and of gpumemctl: [reference-environment.md](reference-environment.md).
";

/// # Panics
/// When the page differs from the program.
pub fn check(shipped: &str) {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference-config.md");
    let fresh = fresh(shipped);
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        std::fs::write(&path, &fresh).expect("written");
    }
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let stale = text.lines().zip(fresh.lines()).find(|(old, new)| old != new);
    assert!(
        text == fresh,
        "UPDATE_GOLDEN=1 writes docs/reference-config.md anew; the first difference: {stale:#?}"
    );
}
