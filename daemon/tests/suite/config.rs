//! The configuration: the shipped file, and refused values.
mod reference;

use crate::common::parse;
use gpumemd::config::{Config, Home, Settings};
use std::path::{Path, PathBuf};

fn shipped() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/gpumemd.toml");
    std::fs::read_to_string(path).expect("config/gpumemd.toml")
}

#[test]
fn the_shipped_file_is_the_default() {
    assert_eq!(parse(&shipped()), Ok(Config::default()));
    assert_eq!(parse(""), Ok(Config::default()));
}

#[test]
fn the_shipped_file_has_every_key() {
    // Commented-out keys are checked too.
    let all: String = shipped()
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(rest) if rest.split_once(" = ").is_some_and(|(key, _)| !key.contains(' ')) => rest,
            _ => line,
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let config = parse(&all).expect("it is right");
    assert!(config.runtime_dir.is_some() && config.record.is_some());
    assert!(config.nvml.library.is_some() && config.runs.store.is_some());
    // Each key has a comment before it, or shares that of the previous key.
    let debug = format!("{:?}", Config::default());
    let keys =
        debug.split([' ', '{']).filter_map(|word| word.strip_suffix(':')).filter(|key| !key.is_empty());
    for key in keys {
        let section = format!("[{key}]");
        let assigned = format!("{key} = ");
        assert!(
            all.lines().any(|line| line == section || line.starts_with(&assigned)),
            "config/gpumemd.toml does not name {key}"
        );
    }
}

#[test]
fn the_reference_is_what_the_program_takes() {
    reference::check(&shipped());
}

#[test]
fn what_is_wrong_is_named_with_line_key_and_what_is_allowed() {
    let cases: [(&str, &[&str]); 9] = [
        ("[nvml]\nmemory_hz = 1000\n", &["line 2", "memory_hz = 1000", "from 1 to 100"]),
        ("[nvml]\nmemory_hertz = 10\n", &["line 2", "memory_hertz", "memory_hz"]),
        ("tenants = \"none\"\n", &["line 1", "tenants", "named", "anonymous"]),
        ("[agents]\n", &["line 1", "agents", "agent"]),
        ("[metrics]\nlisten = \"9837\"\n", &["line 2", "listen", "127.0.0.1:9837", "off"]),
        ("[agent]\nhello_timeout_s = \"5\"\n", &["line 2", "hello_timeout_s", "f64"]),
        ("[private]\nidle_exit_s = 0.0\n", &["line 2", "idle_exit_s = 0.0", "from 0.01"]),
        ("record = \n", &["line 1", "record"]),
        ("[who]\njob_mapping = \"jobs\"\n", &["line 2", "job_mapping", "begins with /", "off"]),
    ];
    for (text, expected) in cases {
        let error = parse(text).expect_err(text);
        assert!(error.starts_with("test.toml: "), "{error}");
        for word in expected {
            assert!(error.contains(word), "{word:?} is not in:\n{error}");
        }
    }
}

#[test]
fn a_named_file_must_be_there() {
    let error = Config::load(Some(Path::new("/nonexistent/gpumemd.toml"))).expect_err("it is not there");
    assert!(error.to_string().contains("/nonexistent/gpumemd.toml"), "{error}");
}

#[test]
fn who_runs_it_decides_where_things_are() {
    let home = |uid: u32| Home {
        uid,
        runtime: Some("/run/user/1000".into()),
        state: None,
        home: Some("/home/ana".into()),
        store: None,
        service: (None, None),
    };
    let of = |private, home: &Home| {
        let settings = Settings::of(&Config::default(), private, home).expect("settings");
        (settings.runtime_dir, settings.store, settings.listen.is_some())
    };
    let path = PathBuf::from;
    let root = (path("/run/gpumemd"), path("/var/lib/gpumemd/runs.sqlite"), true);
    assert_eq!(of(false, &home(0)), root);
    let user = path("/home/ana/.local/state/gpumem/runs.sqlite");
    assert_eq!(of(false, &home(1000)), (path("/run/user/1000/gpumem"), user.clone(), true));
    assert_eq!(of(true, &home(1000)), (path("/run/user/1000/gpumem"), user.clone(), false));
    assert_eq!(of(true, &home(0)).0, path("/run/user/1000/gpumem"));
    let bare = Home { runtime: None, ..home(1000) };
    assert_eq!(of(true, &bare), (path("/tmp/gpumem-1000"), user, false));
    let service = (Some(path("/var/lib/gpumemd")), Some(path("/run/gpumemd")));
    assert_eq!(of(false, &Home { service, ..home(995) }), root);
    assert!(Settings::of(&Config::default(), true, &Home { home: None, ..bare }).is_err());
}
