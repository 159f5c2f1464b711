//! A package's list of components, checked against the real schema and against its files.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A library that has CycloneDX's own schemas.
const VALIDATOR: &str = "cyclonedx-python-lib[json-validation]==11.12.0";
const VALIDATE: &str = "
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read())
sys.exit(str(wrong)[:2000] if wrong else 0)";

/// Checks one list; `files` are the programs of the package by name.
///
/// # Panics
/// If it is invalid, or does not match the files.
pub fn check(sbom: &[u8], purl: &str, files: &[(&str, &Path)]) {
    let document: Value = serde_json::from_slice(sbom).expect("JSON");
    let top = document["metadata"]["component"]["purl"].as_str().expect("a purl");
    assert_eq!(top, format!("{purl}@{}", env!("CARGO_PKG_VERSION")));
    let components = document["components"].as_array().expect("components");
    let component = |reference: &str| {
        let found = components.iter().find(|component| component["bom-ref"] == reference);
        found.unwrap_or_else(|| panic!("no {reference}"))
    };
    for (name, path) in files {
        let output = Command::new("sha256sum").arg(path).output().expect("sha256sum");
        let sum = String::from_utf8_lossy(&output.stdout).split(' ').next().map(str::to_owned);
        assert_eq!(
            component(&format!("file:{name}"))["hashes"][0]["content"].as_str(),
            sum.as_deref(),
            "{name}"
        );
    }
    // Every crate of others has a licence and the checksum that cargo holds it to; the C library and the standard library are named.
    let lock = std::fs::read_to_string(super::root::project().join("Cargo.lock")).expect("Cargo.lock");
    let crates = components.iter().filter(|component| {
        let reference = component["bom-ref"].as_str().unwrap_or_default();
        reference.starts_with("pkg:cargo/")
            && !["gpumem", "cupti"].iter().any(|ours| reference.contains(ours))
    });
    let mut count = 0;
    for stranger in crates {
        let sum = stranger["hashes"][0]["content"].as_str().unwrap_or_default();
        assert!(sum.len() == 64 && lock.contains(sum), "{stranger}");
        assert!(
            stranger["licenses"][0]["expression"].as_str().is_some_and(|licence| !licence.contains('/')),
            "{stranger}"
        );
        count += 1;
    }
    assert!(count > 40, "{count}");
    let names: BTreeSet<&str> =
        components.iter().filter_map(|component| component["name"].as_str()).collect();
    assert!(
        names.contains("sqlite")
            && names.contains("std")
            && !names.contains("proptest")
            && !names.contains("syn")
    );
    // Every dependency is listed as a component.
    for entry in document["dependencies"].as_array().expect("dependencies") {
        for needed in entry["dependsOn"].as_array().expect("a list") {
            component(needed.as_str().expect("a reference"));
        }
    }
    if let Some(python) = validator() {
        use std::io::Write;
        let mut child = Command::new(python);
        let mut child = child
            .args(["-c", VALIDATE])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("python");
        child.stdin.take().expect("piped").write_all(sbom).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// A Python that has it; `None`, with a word why, where it cannot be had.
fn validator() -> Option<PathBuf> {
    let place = std::env::current_exe().ok()?.ancestors().nth(3)?.join("tools/cyclonedx");
    let python = place.join("bin/python");
    let works = || {
        let import =
            Command::new(&python).args(["-c", "import cyclonedx.validation.json, jsonschema"]).output();
        import.is_ok_and(|output| output.status.success())
    };
    if !works() {
        let quiet =
            |command: &mut Command| drop(command.stdout(Stdio::null()).stderr(Stdio::null()).status());
        quiet(Command::new("python3").args(["-m", "venv"]).arg(&place));
        quiet(Command::new(&python).args(["-m", "pip", "install", "-q", VALIDATOR]));
    }
    let works = works();
    if !works {
        gpumem_test_support::skip(
            &format!("{VALIDATOR} cannot be had with python3 -m pip"),
            "apt-get install python3-pip",
        );
    }
    works.then_some(python)
}
