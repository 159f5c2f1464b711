//! `gpumemctl oom` and `report --iterations`, from a recording.

use crate::common::{FakeDaemon, Folder, stdout};
use gpumem_model::control::HiddenRun;
use gpumem_wire::*;

const MIB: u64 = 1 << 20;

/// A process whose pool fails twice: once after the driver refused memory, and once without asking the driver.
pub fn recording(folder: &Folder) -> String {
    let mut out = frame::header().to_vec();
    let mut seq = 0;
    let mut say = |tag: u32, time_s: u64, body: Body<'_>| {
        let is_name = matches!(body, Body::Tag { .. } | Body::Device { .. } | Body::Hello { .. });
        seq += u64::from(!is_name);
        let seq = if is_name { 0 } else { seq };
        let stamp =
            Stamp { seq, tag, time_ns: time_s * 1_000_000_000, device: 0, thread: 77, ..Stamp::default() };
        Record { stamp, body }.append_frame(&mut out);
    };
    say(0, 1, Body::Hello { start_ticks: 1, versions: 1 << 16, capabilities: 0, instance: 1, claims: "" });
    let id = DeviceIdKind::Gpu;
    let total_bytes = Reading::of(1000 * MIB);
    say(0, 1, Body::Device { uuid_high: 1, uuid_low: 2, total_bytes, ordinal: 0, id, name: "H100" });
    say(1, 1, Body::Tag { path: "torch" });
    say(2, 1, Body::Tag { path: "GPT/h.0/mlp" });
    let owner = PoolOwner::Framework;
    say(1, 1, Body::PoolCreate { pool: 9, parent: 0, reports_blocks: 1, owner });
    let memory = MemoryKind::Device;
    say(0, 1, Body::AllocEnd { address: 1 << 30, bytes: 600 * MIB, pool: 9, took_us: 0, memory });
    let use_as = (Role::Parameter, Phase::Setup);
    say(2, 1, Body::BlockAlloc { address: 1 << 30, bytes: 500 * MIB, pool: 9, use_as });
    let device_free_bytes = Reading::of(300 * MIB);
    say(2, 5, Body::AllocFailed { bytes: 400 * MIB, pool: 0, device_free_bytes, result: 2, memory });
    let (pool_used_bytes, pool_reserved_bytes) = (Reading::of(500 * MIB), Reading::of(600 * MIB));
    let outcome = OomOutcome::Fatal;
    say(2, 5, Body::Oom { bytes: 390 * MIB, pool_used_bytes, pool_reserved_bytes, outcome, result: 2 });
    say(2, 60, Body::Oom { bytes: 200 * MIB, pool_used_bytes, pool_reserved_bytes, outcome, result: 0 });
    let path = folder.path("run.gpumem");
    std::fs::write(&path, out).expect("a file");
    path.to_string_lossy().into_owned()
}

fn told(folder: &Folder, args: &[&str]) -> String {
    let output = folder.run(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn every_oom_of_a_recording_is_told_and_the_report_points_to_it() {
    let folder = Folder::new("oom");
    let file = recording(&folder);
    let text = told(&folder, &["oom", &file, "--verbose"]);
    for expected in [
        "OOM #1 +5.0 s GPU 0",
        "asked 390.0 (a segment of 400.0), free 300.0: 100.0 short\n",
        "at GPT/h.0/mlp\n",
        "you      parameters 500.0 + idle 100.0 = 600.0 tracked\n",
        "idle     100.0 in 1 piece, largest block 100.0 < 390.0\n",
        "OOM #2 +60.0 s GPU 0",
        "asked 200.0 of the pool, which failed without a request to the driver: it held 600.0, 500.0 handed out\n",
        "verdict  unknown: free memory was not reported\n",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    let short = told(&folder, &["oom", &file]);
    for expected in [
        "OUT OF MEMORY  +60.0 s",
        "\nAsked for 200 MiB by GPT/h.0/mlp; the free memory is unknown.\n",
        "\nOther processes: unknown, because NVML was not read.\n",
        "\ncaught: it ran out 1 time and continued, +5.0 s at GPT/h.0/mlp, asked 390.0 MiB (--all)\n",
    ] {
        assert!(short.contains(expected), "{expected}\n{short}");
    }
    let report = told(&folder, &["report", "--verbose", &file]);
    assert!(report.trim_end().ends_with(&format!("    oom: 2 (gpumemctl oom {file})")), "{report}");
    assert!(report.contains("  memory_allocated 500.0 + idle 100.0 = memory_reserved 600.0\n"), "{report}");
    let json: serde_json::Value =
        serde_json::from_str(&told(&folder, &["oom", &file, "--json"])).expect("JSON");
    assert_eq!(json["schema"], "gpumem.oom");
    let kinds: Vec<&str> =
        json["ooms"].as_array().expect("entries").iter().filter_map(|oom| oom["kind"].as_str()).collect();
    assert_eq!(kinds, ["device", "pool"]);
}

#[test]
fn iterations_are_told_in_three_forms_and_where_there_are_none_that_is_said() {
    let folder = Folder::new("iterations");
    let file = recording(&folder);
    let text = told(&folder, &["report", &file, "--iterations"]);
    assert!(text.contains("\nno iteration was observed: "), "{text}");
    let csv = told(&folder, &["report", &file, "--iterations", "--csv"]);
    assert!(csv.starts_with("pid,device,epoch,iteration,peak_cached,current_cached,"), "{csv}");
    let json = told(&folder, &["report", &file, "--iterations", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["devices"][0]["iterations"]["rows"], serde_json::json!([]));
    let tags = told(&folder, &["report", &file, "--tags"]);
    assert!(tags.contains("  GPT/h.0/mlp "), "{tags}");
}

#[test]
fn hidden_processes_around_a_time_are_counted_for_their_device() {
    let folder = Folder::new("oom-hidden");
    let daemon = FakeDaemon::at(&folder.path("gpumem/control.sock"));
    let devices = vec![(0, "GPU-5f1c0000-aaaa".to_owned())];
    let row = HiddenRun { pid: 7, user: Some("alice".into()), devices };
    daemon.says("GET /v1/hidden?*", 200, serde_json::to_string(&[row]).expect("JSON"));
    for device in ["0", "GPU-5f1c0000"] {
        let text = stdout(&folder.run(&["oom", "--at", "1m", "--gpu", device]));
        assert!(text.contains("no process of yours ended or ran out of memory"), "{text}");
        assert!(text.contains("1 hidden process belongs to alice: ask as alice, as root"), "{text}");
    }
    let json = stdout(&folder.run(&["oom", "--at", "1m", "--gpu", "0", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((&json["hidden"]["alice"], &json["processes"]), (&1.into(), &serde_json::json!([])));
    let text = stdout(&folder.run(&["oom", "--at", "1m", "--gpu", "1"]));
    assert!(
        text.contains(": no process ended or ran out of memory then") && !text.contains("alice"),
        "{text}"
    );
    let asked = daemon.was_asked();
    assert!(asked.iter().any(|path| path.starts_with("GET /v1/hidden?around=")), "{asked:?}");
    assert!(asked.iter().all(|path| !path.contains("around=") || path.ends_with("&within=60000000000")));
}
