//! Rules of the structure that no compiler checks.
mod figures;
mod parsing;

use gpumem_tests::golden;
use gpumem_tests::structure::{product_crates, root};
use std::fs;
use std::path::{Path, PathBuf};

fn files(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, ending, found);
        } else if path.extension().is_some_and(|extension| extension == ending) {
            found.push(path);
        }
    }
}

fn sources(krate: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    files(&root().join(krate).join("src"), "rs", &mut found);
    found.into_iter().map(|path| (path.clone(), fs::read_to_string(path).expect("text"))).collect()
}

#[test]
fn the_ledger_does_no_io_and_reads_no_clock() {
    for (path, text) in sources("ledger") {
        let words = [
            "std::fs",
            "std::io",
            "std::net",
            "std::time",
            "std::env",
            "std::thread",
            "println!",
            "Instant:",
        ];
        for word in words {
            assert!(!text.contains(word), "{} uses {word}", path.display());
        }
    }
}

fn dependencies(krate: &str) -> Vec<String> {
    let manifest = fs::read_to_string(root().join(krate).join("Cargo.toml")).expect("a manifest");
    let part =
        manifest.split("[dependencies]").nth(1).unwrap_or("").split("\n[").next().unwrap_or("").to_owned();
    let name = |line: &str| line.split(['.', '=', ' ']).next().unwrap_or("").to_owned();
    part.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).map(name).collect()
}

#[test]
fn dependencies_flow_one_way() {
    let ours = [
        "gpumem-wire",
        "cupti-sys",
        "gpumem-agent",
        "gpumem-model",
        "gpumem-ledger",
        "gpumem-runs",
        "gpumem-report",
        "gpumem-import",
        "gpumem-replay",
        "gpumemd",
        "gpumemctl",
        "gpumem-mcp",
    ];
    const LOW: [&str; 3] = ["gpumem-wire", "gpumem-model", "gpumem-ledger"];
    let with_low = |more: &[&'static str]| [&LOW, more].concat();
    let allowed = [
        ("wire", vec![]),
        ("cupti-sys", vec![]),
        ("agent-lib", vec!["gpumem-wire", "cupti-sys"]),
        ("model", vec!["gpumem-wire"]),
        ("ledger", vec!["gpumem-wire", "gpumem-model"]),
        ("runs", with_low(&[])),
        ("report", vec!["gpumem-wire", "gpumem-model"]),
        ("replay", vec![]),
        ("import", with_low(&["gpumem-runs", "gpumem-report", "gpumem-replay"])),
        ("daemon", with_low(&["gpumem-runs", "gpumem-report"])),
        ("ctl", with_low(&["gpumem-runs", "gpumem-report", "gpumem-import", "gpumem-replay"])),
        ("ctl/mcp", vec![]),
    ];
    for (krate, allowed) in allowed {
        for dependency in dependencies(krate).iter().filter(|name| ours.contains(&name.as_str())) {
            assert!(allowed.contains(&dependency.as_str()), "{krate} depends on {dependency}");
        }
    }
}

#[test]
fn agent_has_few_dependencies() {
    for krate in ["agent-lib", "cupti-sys"] {
        for dependency in dependencies(krate) {
            let few = ["gpumem-wire", "cupti-sys", "libc"];
            assert!(few.contains(&dependency.as_str()), "{krate} depends on {dependency}");
        }
    }
}

#[test]
fn sources_do_not_name_the_ledger_or_views() {
    for (path, text) in sources("daemon") {
        if path.components().any(|part| part.as_os_str() == "source") {
            for word in ["crate::view", "gpumem_ledger::Ledger", "RunBuilder", "prometheus", "hyper"] {
                assert!(!text.contains(word), "{} names {word}", path.display());
            }
        }
    }
}

#[test]
fn unsafe_code_is_where_it_must_be() {
    for krate in ["wire", "model", "ledger", "runs", "report", "import", "replay"] {
        let text = fs::read_to_string(root().join(krate).join("src/lib.rs")).expect("lib.rs");
        assert!(text.contains("#![forbid(unsafe_code)]"), "{krate}");
    }
    let ctl = fs::read_to_string(root().join("ctl/src/main.rs")).expect("main.rs");
    assert!(ctl.contains("#![forbid(unsafe_code)]"));
    for (path, text) in sources("daemon") {
        // What the safe crates lack: calls of NVML, two for pidfds, owning what systemd passed, and asking malloc.
        let may = ["source/nvml/raw.rs", "descriptors.rs", "os.rs"];
        let may = may.iter().any(|file| path.ends_with(file));
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let words = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern", "allow(unsafe_code)"];
        let is_unsafe = |line: &&str| words.iter().any(|word| line.contains(word));
        assert!(may || code.filter(is_unsafe).count() == 0, "{} has unsafe code", path.display());
    }
}

#[test]
fn library_code_denies_panics() {
    for krate in product_crates() {
        for (path, text) in sources(&krate) {
            let code = text.split("#[cfg(test)]").next().expect("a first part");
            for word in [".unwrap()", "panic!(", "unreachable!(", "todo!("] {
                assert!(!code.contains(word), "{} has {word}", path.display());
            }
        }
    }
}

#[test]
fn files_are_short() {
    for krate in product_crates().into_iter().chain(["tests".to_owned()]) {
        for (path, text) in sources(&krate) {
            let lines = text.lines().count();
            assert!(lines <= 600, "{} has {lines} lines: look for a seam", path.display());
        }
    }
}

#[test]
fn the_documents_show_what_the_program_prints() {
    let path = root().join("docs/reading-a-report.md");
    for (form, name) in [("", "short"), (" --verbose", "layer")] {
        let page = fs::read_to_string(&path).expect("docs/reading-a-report.md");
        let report =
            fs::read_to_string(golden::path(&format!("reports/small-train.{name}.txt"))).expect("golden");
        let report = report.replace("gpumemctl report --", "gpumemctl report tests/data/small-train.log --");
        let begin = format!("$ gpumemctl report tests/data/small-train.log{form}\n");
        let (before, rest) = page.split_once(&begin).expect("the report's place");
        let (shown, after) = rest.split_once("```").expect("its end");
        if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
            fs::write(&path, format!("{before}{begin}{report}```{after}")).expect("written");
        } else {
            assert_eq!(shown, report, "UPDATE_GOLDEN=1 writes the reports in docs/reading-a-report.md anew");
        }
    }
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    assert!(readme.contains("make demo"));
}

#[test]
fn documents_and_presets_are_what_the_program_has() {
    let names = fs::read_to_string(root().join("docs/names.md")).expect("docs/names.md");
    for (preset, _) in gpumem_report::rules::PRESETS {
        assert!(names.contains(&format!("`{preset}`")), "docs/names.md does not name the preset {preset}");
    }
    let imports = fs::read_to_string(root().join("docs/imports.md")).expect("docs/imports.md");
    for format in gpumem_import::FORMATS.iter().filter(|format| format.name != "recording") {
        let row = format!("| `{}` |", format.name);
        assert!(imports.contains(&row), "docs/imports.md does not name {}", format.name);
    }
}
