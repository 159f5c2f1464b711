//! The GPU suite on the simulated GPU: the suite works without a GPU, and its checks pass there.

use crate::gpu_replay;
use gpumem_tests::live::programs::programs;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Questions without an answer on a simulated GPU. All others must be answered, or have a reason here.
const NEEDS_HARDWARE: [&str; 5] = ["torch.", "libs.", "attach.runtime", "gap.explained_", "cost.launch"];
/// Checks that the test's machine may not permit.
const NEEDS_NAMESPACES: [&str; 2] = ["processes.namespace", "processes.user_namespace"];

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gpumem-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("kept: {}", self.0.display());
        } else {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

fn suite() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu")
}

fn text<'a>(result: &'a Value, key: &str) -> &'a str {
    result[key].as_str().unwrap_or_default()
}

#[test]
fn the_suites_own_tests_pass() {
    let output = Command::new("python3")
        .args(["-m", "unittest", "discover", "-s"])
        .arg(suite())
        .env("GPU_SUITE_FAKE", &programs().fake)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("python3 is needed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Lane `gpu`.
mod gpu {
    use super::*;

    #[test]
    fn the_suite_passes_on_the_simulated_gpu() {
        let folder = Folder::new("dry-run");
        let out = folder.0.join("out");
        let built = programs();
        let output = Command::new("python3")
            .arg(suite().join("run.py"))
            .arg("--dry-run")
            .arg("--bin")
            .arg(&built.ours)
            .arg("--fake")
            .arg(&built.fake)
            .arg("--out")
            .arg(&out)
            .env("TMPDIR", &folder.0)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .output()
            .expect("python3 is needed");
        let printed = String::from_utf8_lossy(&output.stdout);
        let results = std::fs::read_to_string(out.join("results.json"))
            .unwrap_or_else(|error| panic!("{error}\n{printed}{}", String::from_utf8_lossy(&output.stderr)));
        let results: Value = serde_json::from_str(&results).expect("JSON");
        let results = results["results"].as_array().expect("a list");
        assert!(results.len() >= 90, "{} checks", results.len());
        for plan in 1..=3 {
            assert!(printed.contains(&format!("\nplan {plan}: ")), "the time of plan {plan}: {printed}");
        }

        let of =
            |verdict: &'static str| results.iter().filter(move |result| text(result, "verdict") == verdict);
        let failed: Vec<String> = of("fail")
            .map(|result| format!("{}: {}", text(result, "name"), text(result, "reason")))
            .collect();
        assert!(failed.is_empty(), "{failed:#?}\n{printed}");
        assert!(output.status.success(), "{printed}");
        for skipped in of("skip") {
            let (name, reason) = (text(skipped, "name"), text(skipped, "reason"));
            let hardware = NEEDS_HARDWARE.iter().any(|known| name.starts_with(known));
            let namespaces = NEEDS_NAMESPACES.contains(&name) && reason.starts_with("unshare");
            assert!(hardware || namespaces, "{name} was skipped: {reason}");
            if namespaces {
                eprintln!("{name} was skipped: {reason}");
            }
        }

        // Recordings made on the way are replayed as recordings of hardware will be.
        let recordings = folder.0.join("recordings");
        std::fs::create_dir(&recordings).expect("a folder");
        let pack = out.join("recordings-1.tar.gz");
        let unpacked =
            Command::new("tar").arg("-xzf").arg(&pack).arg("-C").arg(&recordings).status().expect("tar");
        assert!(unpacked.success(), "{}", pack.display());
        let seen = gpu_replay::verify(&recordings);
        assert!(seen.recordings >= 8 && seen.expectations >= 8 && seen.samples > 0, "{seen:?}");

        // The files to commit replay equally, without names of people and places.
        let repository = folder.0.join("repository");
        for part in ["tests/gpu/recordings", "tests/fake-gpu"] {
            std::fs::create_dir_all(repository.join(part)).expect("a folder");
        }
        let accepted = Command::new("python3")
            .arg(suite().join("accept.py"))
            .arg(&out)
            .arg("--into")
            .arg(&repository)
            .arg("--dry-run-too")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .output()
            .expect("python3 is needed");
        assert!(accepted.status.success(), "{}", String::from_utf8_lossy(&accepted.stderr));
        let kept = gpu_replay::verify(&repository.join("tests/gpu/recordings"));
        assert!(kept.recordings >= 6 && kept.expectations >= 6, "{kept:?}");
        let costs =
            std::fs::read_to_string(repository.join("tests/fake-gpu/costs.txt")).expect("the table of costs");
        assert!(costs.lines().filter(|line| line.contains("# simulated: ")).count() >= 20, "{costs}");
    }
}
