//! `gpumemctl whatif` on snapshots of PyTorch.
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;

/// A snapshot in a temporary file, deleted on drop.
pub struct Snapshot(pub PathBuf);

impl Drop for Snapshot {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A value in the text protocol of Python's pickle.
fn list(items: &[String]) -> String {
    format!("({}l", items.concat())
}

fn dict(fields: &[(&str, String)]) -> String {
    let fields: String = fields.iter().map(|(name, value)| format!("{}{value}", text(name))).collect();
    format!("({fields}d")
}

fn text(text: &str) -> String {
    format!("V{text}\n")
}

fn number(number: u64) -> String {
    format!("I{number}\n")
}

impl Snapshot {
    /// Writes a snapshot with the requests of each device, in bytes. No memory is freed. Each request has a segment of its own.
    pub fn new(name: &str, settings: &str, devices: &[&[u64]]) -> Self {
        let (mut traces, mut segments) = (Vec::new(), Vec::new());
        for (device, requests) in (0_u64..).zip(devices) {
            let mut trace = Vec::new();
            for (at, bytes) in (0_u64..).zip(*requests) {
                let address = (device << 45) + ((at + 1) << 30);
                let segment = bytes.next_multiple_of(2 * MIB);
                for (action, bytes) in [("segment_alloc", segment), ("alloc", *bytes)] {
                    let entry =
                        [("action", text(action)), ("addr", number(address)), ("size", number(bytes))];
                    let rest = [("stream", number(0)), ("time_us", number(1 + at)), ("frames", list(&[]))];
                    let pool = ("pool_id", format!("({}{}t", number(0), number(0)));
                    trace.push(dict(&[&entry[..], &rest, &[pool]].concat()));
                }
                let state = |state: &str, address: u64, bytes: u64| {
                    let state = [("state", text(state)), ("address", number(address))];
                    let bytes = [("size", number(bytes)), ("requested_size", number(bytes))];
                    dict(&[state, bytes].concat())
                };
                let mut blocks = vec![state("active_allocated", address, *bytes)];
                if segment > *bytes {
                    blocks.push(state("inactive", address + bytes, segment - bytes));
                }
                let place = [("device", number(device)), ("address", number(address)), ("stream", number(0))];
                let size = [("total_size", number(segment)), ("segment_type", text("large"))];
                segments.push(dict(&[&place[..], &size, &[("blocks", list(&blocks))]].concat()));
            }
            traces.push(list(&trace));
        }
        let settings = dict(&[("PYTORCH_CUDA_ALLOC_CONF", text(settings))]);
        let whole = [
            ("segments", list(&segments)),
            ("device_traces", list(&traces)),
            ("allocator_settings", settings),
        ];
        let path = std::env::temp_dir().join(format!("gpumemctl-{}-{name}.pickle", std::process::id()));
        std::fs::write(&path, dict(&whole) + ".").expect("a file");
        Snapshot(path)
    }

    fn whatif(&self, arguments: &[&str]) -> std::process::Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpumemctl"));
        command.arg("whatif").arg(&self.0).args(arguments).output().expect("gpumemctl")
    }

    fn text(&self, arguments: &[&str]) -> String {
        let output = self.whatif(arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.text(&[arguments, &["--json"]].concat())).expect("JSON")
    }

    fn error(&self, arguments: &[&str]) -> String {
        let output = self.whatif(arguments);
        assert!(!output.status.success() && output.stdout.is_empty());
        String::from_utf8(output.stderr).expect("UTF-8")
    }
}

pub const TWO_DEVICES: [&[u64]; 2] = [&[12 * MIB, 30 * MIB], &[14 * MIB, 40 * MIB, 64 * MIB]];

#[test]
fn each_gpu_of_a_process_has_its_answer() {
    let snapshot = Snapshot::new("devices", "", &TWO_DEVICES);
    let text = snapshot.text(&[]);
    let heads: Vec<&str> = text.lines().filter(|line| line.contains("would have reserved")).collect();
    assert_eq!(heads.len(), 2, "{text}");
    assert!(heads[0].contains("on GPU 0: ") && heads[0].ends_with("2 requests"), "{text}");
    assert!(heads[1].contains("on GPU 1: ") && heads[1].ends_with("3 requests"), "{text}");

    let told = snapshot.json(&["--set", "expandable_segments=True"]);
    let of = |told: &Value| {
        (
            told["gpu"].as_u64(),
            told["own"]["peak_reserved_bytes"].as_u64(),
            told["own"]["peak_segments"].as_u64(),
        )
    };
    assert_eq!(of(&told), (Some(1), Some(118 * MIB), Some(3)), "most requests first");
    let others = told["other_gpus"].as_array().expect("a list");
    assert_eq!(others.iter().map(of).collect::<Vec<_>>(), [(Some(0), Some(42 * MIB), Some(2))]);
    assert_eq!(others[0]["trials"].as_array().map(Vec::len), Some(1));
    let one = snapshot.json(&["--gpu", "0"]);
    assert_eq!((of(&one).0, one["other_gpus"].as_array().map(Vec::len)), (Some(0), Some(0)));
    assert!(snapshot.error(&["--gpu", "2"]).contains("no history of this GPU"));
}

#[test]
fn cuda_malloc_async_has_a_lower_bound_only() {
    let snapshot = Snapshot::new("bound", "", &[&[MIB + 1, 30 * MIB]]);
    let bound = ["--set", "backend=cudaMallocAsync"];
    let text = snapshot.text(&bound);
    assert!(
        text.contains(">= 31.0 MiB") && text.contains("CUDA does not document how its pool grows"),
        "{text}"
    );
    assert!(!text.contains("Least:"), "a bound is not a saving: {text}");
    let trial = &snapshot.json(&bound)["trials"][0];
    assert_eq!(trial["peak_reserved_range"], serde_json::json!([31 * MIB + 1, null]));
    assert!(trial["peak_reserved_bytes"].is_null() && trial["failure"].is_null(), "{trial}");
    let failing = snapshot.json(&[&bound[..], &["--device-memory", "16M"]].concat());
    assert_eq!(failing["trials"][0]["failure"]["event"], 1, "{failing}");
    let swept = snapshot.json(&[&bound[..], &["--sweep"]].concat());
    let others = swept["trials"]
        .as_array()
        .expect("trials")
        .iter()
        .filter(|trial| trial["peak_reserved_bytes"].is_u64());
    let settings: Vec<_> = others.map(|trial| trial["settings"].to_string()).collect();
    assert!(!settings.is_empty(), "{swept}");
    assert!(
        settings.iter().all(|text| !text.contains("backend")),
        "they need PyTorch's own backend: {settings:?}"
    );
    assert!(snapshot.error(&[&bound[..], &["--scale", "x=2"]].concat()).contains("need backend:native"));
    let recorded = Snapshot::new("async", "backend:cudaMallocAsync", &[&[MIB]]);
    assert!(recorded.error(&[]).contains("ran with backend:cudaMallocAsync"));
}

#[test]
fn garbage_collection_is_tried_below_a_fraction() {
    let snapshot = Snapshot::new("collection", "", &[&[12 * MIB]]);
    let settings = |arguments: &[&str]| {
        let told = snapshot.json(arguments);
        let trials = told["trials"].as_array().expect("trials").iter();
        trials.filter(|trial| trial["settings"] == "garbage_collection_threshold:0.8").count()
    };
    assert_eq!(settings(&[]), 0);
    assert_eq!(settings(&["--device-memory", "1G", "--memory-fraction", "0.5"]), 1);
}

#[test]
fn file_that_is_no_snapshot_is_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpumemctl"));
    let output = command.arg("whatif").arg(path).output().expect("gpumemctl");
    assert!(!output.status.success() && !String::from_utf8_lossy(&output.stderr).contains("panicked"));
}

/// The history of a snapshot with two requests is cut: it lacks the larger one, which was freed before the history began.
#[test]
fn setting_is_not_advised_if_the_error_of_the_replay_is_larger_than_the_saving() {
    let snapshot = Snapshot::new("cut", "", &[&[12 * MIB, 30 * MIB]]);
    let whole = std::fs::read_to_string(&snapshot.0).expect("text");
    assert!(snapshot.text(&[]).contains("None of these settings reserves less."));
    // The segment of 30 MiB has a free block, and no entry.
    let at = |text: &str| whole.find(text).unwrap_or_else(|| panic!("{text}"));
    let traces = at("Vdevice_traces");
    let history = &whole[traces..at("Vallocator_settings")];
    let second = history.match_indices("(Vaction\nVsegment_alloc").nth(1).expect("a second segment").0;
    let rest = history.rfind("all").map_or(history.len() - 2, |_| history.len() - 2);
    let cut = format!("{}{}{}", &whole[..traces], &history[..second], &history[rest..]);
    let cut = cut + &whole[at("Vallocator_settings")..];
    let cut = cut.replacen("Vactive_allocated\nVaddress\nI2147483648", "Vinactive\nVaddress\nI2147483648", 1);
    std::fs::write(&snapshot.0, cut).expect("written");
    let text = snapshot.text(&[]);
    assert!(text.contains("No setting is advised: the replay is off by 30.0 MiB"), "{text}");
}

#[test]
fn name_that_no_memory_has_is_refused_with_similar_words() {
    let snapshot = Snapshot::new("names", "", &[&[12 * MIB]]);
    let misspelt = snapshot.error(&["--scale", "actvations=2"]);
    assert!(misspelt.contains("\"actvations\". Did you mean activation?"), "{misspelt}");
    let role = snapshot.error(&["--drop", "activations"]);
    assert!(
        role.contains("PyTorch's history has no roles") && role.contains("gpumemctl run --record"),
        "{role}"
    );
}
