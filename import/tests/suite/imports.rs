//! Importers on generated files: the runs that they read, their caveats about missing facts, and their handling of files
//! that are cut, damaged or of another format.
use gpumem_import::{FORMATS, format, read_file};
use gpumem_model::run::{Run, State};
use gpumem_report::rules::Groupings;
use gpumem_report::{GroupBy, Report, json};
use gpumem_runs::input::Error;
use proptest::prelude::*;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// Two GPUs, one with page-locked rows among its own, and names of every class.
const MXNET2: &str = r#""Attribute Name","Requested Size","Device","Actual Size","Reuse?"
"<unk>:in_arg:data0","100","0","4096","0"
"image_io:data","1000","0","1000","0"
"net0:dense0:in_arg:net0_dense0_weight","4000","0","4096","0"
"net0:dense0:arg_grad:net0_dense0_weight","4000","0","4096","0"
"net0:dense0:net0_dense0_fwd","5000","0","8192","1"
"net0:dense0:net0_dense0_fwd","5000","1","8192","1"
"resource:temp_space (dot, really.h +3)","1","0","4096","0"
"updated:optimizer_state:0f0f0f0f_1111_2222_3333_444444444444_zeros","4000","0","4096","0"
"updater:optimizer_state:_zeros","4000","1","4096","0"
"nvml_amend","1048576","0","1048576","0"
"nvml:amend","2097152","1","2097152","0"
"#;

/// A trace with unsorted events, ids above 2^53, an invalid event, and no end.
const TRACE: &str = r#"[
{"ph":"M","args":{"name":"cpu pinned/"},"pid":64,"name":"process_name"},
{"name":"Memory: gpu/0","cat":"Device Storage","ph":"C","ts":2000000000000300,"args":{"Memory: gpu/0":1000},"pid":11703719396432491370,"tid":1},
{"name":"Memory: gpu/0","cat":"Device Storage","ph":"C","ts":2000000000000100,"args":{"Memory: gpu/0":500},"pid":11703719396432491370,"tid":1},
{"name":"Memory: gpu/0","cat":"Device Storage","ph":"C","ts":2000000000000200,"args":{"Memory: gpu/0":4500},"pid":11703719396432491370,"tid":1},
{"name":"Memory: gpu/1","cat":"Device Storage","ph":"C","ts":2000000000000150,"args":{"Memory: gpu/1":-7},"pid":1,"tid":1},
{"name":"Memory: cpu pinned/","cat":"Device Storage","ph":"C","ts":2000000000000120,"args":{"Memory: cpu pinned/":64},"pid":1,"tid":1},
{"name":"operator","cat":"operator","ph":"B","ts":2000000000000130,"pid":1,"tid":1},
"#;

const TABLE: &str = "
Profile Statistics:
\tNote the difference in units for different entries.
Device Storage
=================
Name                          Total Count    Min Use (kB)    Max Use (kB)    Avg Use (kB)
----                          -----------    -------------    -------------    -------------
Memory: gpu/0                          12          0.5120        2048.0000        1023.7440
Memory: cpu pinned/                     2          0.0000           8.0000           4.0000
Memory: gpu/1                          12    2147484.6000     3000000.0000      426257.7000

Pool Memory
=================
Name                          Total Count    Min Use (kB)    Max Use (kB)    Avg Use (kB)
----                          -----------    -------------    -------------    -------------
GPU Pool Free                           4          0.0000         100.0000          50.0000
";

const TABLE_JSON: &str = r#"{"Time": {"operator": {"x": {"Count": 1, "Total": 1.0, "Min": 1.0, "Max": 1.0, "Avg": 1.0}}},
"Memory": {"Device Storage": {"Memory: gpu/0": {"Count": 12, "Min": 0.512, "Max": 2048.0, "Avg": 1023.744}}}, "Unit": {"Time": "ms", "Memory": "kB"}}"#;

const ANALYSIS: &str = r#"{"in_arg": [300.0, ["(in_arg:a).\n", "(in_arg:b).\n"]], ":_mul": [40.0, ["(forward_features:c_mul0).\n"]],
"att": [-1.0, ["(forward_features:att).\n"]]}"#;

/// Two ranks. The second row of the second rank claims more bytes than were ever cached.
const MEM: &str = "epoch,iteration,peak_cached,current_cached,total_feature_map_usage,total_weight_usage,a.weight,b.weight,\
total_layer_weight_gradient_usage,a.weight_grad,b.weight_grad,intermediate_gradients
0,10,8000,7000,5000,178,100,77,178,100,78,300
0,10,8259,7900,5000,178,100,77,178,100,78,300
0,20,8000,5000,5000,178,100,77,178,100,78,300
0,20,8259,7900,138730,178,100,77,178,100,78,300
";

const SMI: &str = "timestamp, gpu_uuid, gpu_name, pid, process_name, used_gpu_memory [MiB]
2018/11/26 05:28:41.251, GPU-00000000-0000-0000-0000-0000000000ff, Tesla V100, 12898, /usr/bin/python3, 4031 MiB
2018/11/26 05:28:41.251, GPU-00000000-0000-0000-0000-0000000000fe, Tesla V100, 12898, /usr/bin/python3, 45 MiB
2018/11/26 05:28:42.251, GPU-00000000-0000-0000-0000-0000000000ff, Tesla V100, 12898, /usr/bin/python3, 4375 MiB
2018/11/26 05:28:42.251, GPU-00000000-0000-0000-0000-0000000000ff, Tesla V100, 9, x, [N/A]
";

const SCALAR: &str =
    "Wall time,Step,Value\n1543210121.25,50,4031.0\n1543210122.25,100,4375.5\n1543210121.75,150,4000\n";

const TAGS: &str =
    "in_arg:fc_weight,3.814697\ndata_entry:conv_oedge0,100.5\nworkspace:a.cc+3:b.cc+7:Forward,0.25\n";

const LOG: &str = "[INFO] Command: /usr/bin/train.py --batch 3
[mem] Allocate 4096 bytes GPU memory (in_arg:w).
[mem] 1000 MB GPU global memory free, total 1200 MB.
x Allocate 3 MB GPU memory (proposal).
Batch [50] Memory Usage: python3-pid_12898=200 Xorg-pid_7=4
";

const ALL: [(&str, &str); 10] = [
    ("tbd-log", LOG),
    ("mxnet2-csv", MXNET2),
    ("mxnet1-trace", TRACE),
    ("mxnet1-table", TABLE),
    ("mxnet1-table", TABLE_JSON),
    ("tbd-analysis", ANALYSIS),
    ("tbd-mem-csv", MEM),
    ("nvidia-smi-csv", SMI),
    ("nvidia-smi-csv", SCALAR),
    ("mxnet1-csv", TAGS),
];

/// A temporary file, removed on drop.
struct File(PathBuf);

impl File {
    fn new(content: impl AsRef<[u8]>) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("gpumem-import-{}-{number}", std::process::id()));
        fs::write(&path, content).expect("a file");
        File(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn read(content: impl AsRef<[u8]>, forced: Option<&str>) -> Result<Vec<Run>, Error> {
    let file = File::new(content);
    read_file(&file.0, forced.map(|name| format(name).expect("a format")))
}

fn runs(content: &str) -> Vec<Run> {
    read(content, None).expect("a file")
}

/// Asserts that every sum of the runs adds up.
fn check(runs: &[Run]) {
    for run in runs {
        let groupings = Groupings::of_run(run);
        for by in [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag] {
            let report = Report::new(run, groupings.clone(), Some(by));
            for device in &run.devices {
                assert!(report.statement(device, 2, 0).adds_up(), "{device:?}");
                for moment in [&device.last, &device.peak] {
                    let sum: i64 = moment.amounts.iter().map(|(_, bytes)| bytes).sum();
                    assert_eq!(moment.tracked_bytes.unwrap_or(0), sum);
                    assert!(moment.amounts.iter().all(|(_, bytes)| *bytes > 0), "{moment:?}");
                }
            }
        }
        let report = Report::new(run, groupings, None);
        let _: serde_json::Value = serde_json::from_str(&json::json(&report)).expect("JSON");
        assert_eq!((run.coverage.odd, run.coverage.lost), (0, 0));
    }
}

fn caveat<'r>(run: &'r Run, code: &str) -> &'r str {
    let found = run.caveats.iter().find(|caveat| caveat.code == code);
    &found.unwrap_or_else(|| panic!("no {code} among {:?}", run.caveats)).text
}

fn by_structure(run: &Run, device: usize) -> Vec<(String, i64)> {
    let report = Report::new(run, Groupings::of_run(run), Some(GroupBy::Structure));
    report.composition(&run.devices[device].last, GroupBy::Structure).categories.into_iter().collect()
}

#[test]
fn each_file_is_known_by_its_content() {
    for (name, content) in ALL {
        let found = runs(content);
        assert_eq!(found[0].source.kind, name);
        check(&found);
        check(&read([b"\xef\xbb\xbf", content.as_bytes()].concat(), Some(name)).expect("with a mark"));
        check(&read(content.replace('\n', "\r\n"), None).expect("lines of Windows"));
    }
}

#[test]
fn page_locked_rows_lie_beside_the_device() {
    let run = runs(MXNET2).remove(0);
    let [first, second] = run.devices.as_slice() else { panic!("two devices: {:?}", run.devices) };
    assert_eq!((first.ordinal, second.ordinal), (0, 1));
    assert_eq!(first.last.tracked_bytes, Some(28_672));
    assert_eq!(first.beside.pinned_bytes, 1000);
    // The writer subtracted the pinned bytes from the untracked memory; the importer adds them again.
    assert_eq!(first.last.untrackable_bytes, Some(1_048_576 + 1000));
    assert_eq!(first.last.used_bytes(), Some(28_672 + 1_048_576 + 1000));
    assert_eq!(second.last.used_bytes(), Some(12_288 + 2_097_152));
    let structures: Vec<(String, i64)> = by_structure(&run, 0);
    let expected = [
        ("Feature Maps", 8192),
        ("Optimizer State", 4096),
        ("Unknown", 4096),
        ("Weight Gradients", 4096),
        ("Weights", 4096),
        ("Workspace", 4096),
    ];
    assert_eq!(structures, expected.map(|(name, bytes)| (name.to_owned(), bytes)));
    assert!(caveat(&run, "host_rows").contains(
        "device 0 (1,000 bytes); the row nvml_amend (NVML's number minus all sizes) has 1,048,576 bytes"
    ));
    let state = run.cells.iter().filter(|cell| cell.role.as_deref() == Some("optimizer state"));
    let state: Vec<_> = state.filter_map(|cell| cell.tag.as_deref()).collect();
    assert_eq!(
        state,
        ["updater/optimizer_state/zeros", "updater/optimizer_state/_zeros"],
        "no UUID, one spelling"
    );
}

#[test]
fn an_amendment_that_wrapped_is_negative_and_one_that_is_absent_is_unknown() {
    let wrapped = MXNET2.replace("\"1048576\",\"0\",\"1048576\"", "\"0\",\"0\",\"18446744073709547520\"");
    let run = runs(&wrapped).remove(0);
    assert_eq!(run.devices[0].last.untrackable_bytes, Some(-4096 + 1000));
    let without: String =
        MXNET2.lines().filter(|line| !line.contains("amend\"")).map(|line| format!("{line}\n")).collect();
    let run = runs(&without).remove(0);
    assert_eq!(run.devices[0].last.used_bytes(), None);
    assert!(caveat(&run, "no_amendment").contains("device 0, 1"));
    assert_eq!(
        runs(&MXNET2.replace('"', "")).remove(0).devices,
        runs(MXNET2).remove(0).devices,
        "quoted or not"
    );
}

#[test]
fn two_profiles_in_one_file_are_not_added_up() {
    let run = runs(&format!("{MXNET2}{MXNET2}")).remove(0);
    assert_eq!(run.devices[0].last.tracked_bytes, Some(28_672));
    assert!(caveat(&run, "second_profile").contains("line 13"));
}

#[test]
fn counters_are_told_in_the_order_of_time() {
    let run = runs(TRACE).remove(0);
    let device = &run.devices[0];
    assert_eq!((device.peak.tracked_bytes, device.last.tracked_bytes), (Some(4500), Some(1000)));
    assert_eq!(device.peak.time_ns, 100_000);
    assert_eq!(device.beside.pinned_bytes, 64);
    assert_eq!(
        caveat(&run, "means"),
        "gpu/0: peak 4,500 bytes, time-weighted mean 2,500 bytes over 200.0 µs, 3 readings"
    );
    assert!(caveat(&run, "rejected_lines").contains("1 event cannot be read (event 5)"));
    assert!(caveat(&run, "cut").contains("without its closing bracket, after 7 events"));
}

#[test]
fn a_trace_without_counters_says_what_is_missing() {
    let old = r#"{"traceEvents":[{"name":"cpu pinned/","cat":"category","ph":"B","ts":1,"pid":0,"tid":1}],"x":"cpu pinned/"}"#;
    let error = read(old.replace("\"x\":\"cpu", "\"x\": \"cpu"), None).expect_err("no memory").to_string();
    assert!(
        error.contains("none of its 1 event is a counter of memory") && error.contains("profile_memory"),
        "{error}"
    );
}

#[test]
fn tables_of_both_forms_are_one() {
    let (text, json) = (runs(TABLE).remove(0), runs(TABLE_JSON).remove(0));
    for run in [&text, &json] {
        assert_eq!(run.devices[0].peak.tracked_bytes, Some(2_048_000));
        assert!(caveat(run, "table").starts_with("gpu/0: max 2,048,000 bytes, min 512, 12 changes"));
    }
    assert!(
        caveat(&text, "table")
            .ends_with("gpu/1: max 3,000,000,000 bytes, no minimum below 2 GiB, 12 changes")
    );
    assert!(caveat(&text, "pool_memory").contains("GPU Pool Free: max 100,000 bytes"));
    assert!(caveat(&text, "host_memory").contains("cpu pinned: max 8,000 bytes"));
}

#[test]
fn sums_of_an_analysis_have_roles_and_counts() {
    let run = runs(ANALYSIS).remove(0);
    assert_eq!((run.coverage.allocations, run.coverage.rejected), (3, 1));
    assert_eq!(by_structure(&run, 0), [("Feature Maps".to_owned(), 40), ("Weights".to_owned(), 300)]);
    assert!(caveat(&run, "rejected_lines").contains("category 3"));
}

#[test]
fn claims_that_cannot_be_are_flagged_and_have_no_name() {
    let found = runs(MEM);
    assert_eq!(found.len(), 2, "two processes");
    const MB: i64 = 1_000_000;
    let [sane, odd] = found.as_slice() else { panic!("{found:?}") };
    let of = |run: &Run, moment: &gpumem_model::run::Moment| -> Vec<(Option<String>, i64)> {
        let named = moment.amounts.iter();
        named.map(|(cell, bytes)| (run.cells[*cell as usize].role.clone(), bytes / MB)).collect()
    };
    let sum = |amounts: &[(Option<String>, i64)], role: &str| -> i64 {
        amounts.iter().filter(|(of, _)| of.as_deref() == Some(role)).map(|(_, mb)| mb).sum()
    };
    // 5656 MB are claimed. They fit into the peak, but not into the 5000 MB of the second row.
    let peak = of(sane, &sane.devices[0].peak);
    assert_eq!(sane.devices[0].peak.tracked_bytes, Some(8000 * MB));
    assert_eq!(
        ["activation", "parameter", "gradient", "temporary"].map(|role| sum(&peak, role)),
        [5000, 178, 178, 300]
    );
    assert_eq!(of(sane, &sane.devices[0].last), [(None, 5000)]);
    let iterations = &sane.devices[0].details.iterations;
    assert_eq!(iterations.rows.first().map(|row| row.first), Some(10), "the first one too");
    assert!(caveat(sane, "claims_at_peak").starts_with("1 row claimed more"));
    assert_eq!(odd.devices[0].last.tracked_bytes, Some(7900 * MB));
    assert_eq!(of(odd, &odd.devices[0].last), [(None, 7900)], "nothing of an impossible row is used");
    let flagged = caveat(odd, "impossible_claims");
    assert!(
        flagged.starts_with("IMPOSSIBLE: 1 of 4 rows claimed") && flagged.contains("line 5"),
        "{flagged}"
    );
    assert!(flagged.contains("feature maps 138,730,000,000 + weights 178,000,000"), "{flagged}");
    assert!(flagged.contains("peak cached 8,259,000,000 bytes"), "{flagged}");
    // Amounts change in one step, without values in between that were never held.
    let lowest = odd.devices[0].series.buckets.iter().filter_map(|bucket| bucket.tracked).skip(1);
    assert!(
        lowest.clone().count() > 0 && lowest.clone().all(|extremes| extremes.min >= 7900 * MB),
        "{lowest:?}"
    );
}

#[test]
fn what_nvidia_smi_said_is_used_and_nothing_else() {
    let found = runs(SMI);
    let run = found.iter().find(|run| run.process.pid == 12898).expect("a process");
    assert!(!run.coverage.covered);
    assert_eq!(run.process.facts["comm"], "python3");
    let used: Vec<_> =
        run.devices.iter().map(|device| (device.last.used_bytes(), device.peak_used)).collect();
    assert_eq!(used[0], (Some(4375 << 20), Some((4375 << 20, 1_000_000_000))));
    assert_eq!(run.devices[0].name, "GPU-00000000-0000-0000-0000-0000000000ff");
    assert_eq!(
        (used[1].0, run.devices[1].last.used_absence.as_deref()),
        (Some(45 << 20), Some("not listed"))
    );
    let nameless = found.iter().find(|run| run.process.pid == 9).expect("a process");
    assert_eq!(nameless.devices[0].last.used_bytes(), None, "[N/A] is not zero");

    // A process that is missing for long has ended and uses no memory; its pid may be reused.
    let head = "pid, used_gpu_memory [MiB]\n";
    let crowd: String = (1..=900).map(|pid| format!("{pid}, 10 MiB\n")).collect();
    let found = runs(&format!("{head}{crowd}{}900, 20 MiB\n", "1, 11 MiB\n".repeat(500)));
    assert_eq!(found.len(), 901);
    let of_pid = found.iter().filter(|run| run.process.pid == 900);
    let used: Vec<_> =
        of_pid.map(|run| (run.devices[0].peak_used.map(|(bytes, _)| bytes >> 20), run.state)).collect();
    assert_eq!(used[0], (Some(10), State::Closed { time_ns: 909, status: None }));
    assert_eq!(used[1], (Some(20), State::Interrupted));

    let run = runs(SCALAR).remove(0);
    assert_eq!(run.devices[0].last.used_bytes(), Some(4000 << 20));
    assert!(caveat(&run, "late_readings").starts_with("1 reading out of order"));
    let devices = "timestamp, index, memory.used [MiB]\n2018/11/26 05:28:41.251, 0, 12 MiB\n";
    let error = read(devices, None).expect_err("no process").to_string();
    assert!(error.contains("--query-compute-apps="), "{error}");
}

#[test]
fn allocations_beyond_what_is_kept_are_summed() {
    let row = "net0:net0_fwd,4096,0,4096,0\n";
    let rows = 270_000;
    let file = format!("Attribute Name,Requested Size,Device,Actual Size,Reuse?\n{}", row.repeat(rows));
    let run = runs(&file).remove(0);
    assert_eq!(run.devices[0].last.tracked_bytes, Some(4096 * rows as i64));
    assert!(caveat(&run, "summed_rows").contains("7,856 rows beyond the first 262,144"));
    let names: String = (0..70_000).map(|name| format!("net0:{name},1,0,16,0\n")).collect();
    let run = read(names, Some("mxnet2-csv")).expect("rows").remove(0);
    assert_eq!(run.devices[0].last.tracked_bytes, Some(16 * 70_000));
    assert!(caveat(&run, "many_names").contains("65,536"));
}

/// Tags of MXNet 1.x with storage tags and scopes of 2.0, as in real files, each with its data structure.
#[test]
fn reserved_names_have_their_data_structure() {
    let names = [
        ("in_arg:fc_weight", "Weights"),
        ("arg_grad:fc_weight", "Weight Gradients"),
        ("optimizer_state:momentum", "Optimizer State"),
        ("updater:optimizer_state:_zeros", "Optimizer State"),
        ("aux_state:bn_moving_mean", "Auxiliary State"),
        ("data_entry:conv0_oedge0", "Feature Maps"),
        ("head_grad:data_entry:softmax_oedge0", "Feature Maps"),
        ("net0:conv0:net0_conv0_fwd", "Feature Maps"),
        ("net0:loss0_head_grad", "Feature Maps"),
        ("workspace:conv.cu+12:op.cc+7:Forward", "Workspace"),
        ("dropout0:dropout_state", "Workspace"),
        ("resource:temp_space (dot-inl.h +93)", "Workspace"),
        ("resource:cudnn_dropout_state (dropout-inl.h +9)", "Workspace"),
        ("cudnn_rnn:reserve_space", "Workspace"),
        ("<ephemeral>:conv_workspace", "Workspace"),
        ("net0:<ephemeral>:conv_workspace", "Workspace"),
        ("kvstore:push:w", "Communication"),
        ("kvstore:pull:w", "Communication"),
        ("kvstore:comm_dev:merge_buf_3", "Communication"),
        ("comm_dev:residual", "Communication"),
        ("comm_dev_tree:merge_buf_0", "Communication"),
        ("unknown_ndarray", "Unknown"),
        ("unknown:mkldnn", "Unknown"),
        ("symbol:arg_grad:unknown", "Unknown"),
        ("<unk>:argmax", "Unknown"),
        ("my_own_scope:something", "Others"),
    ];
    for (name, expected) in names {
        let run = read(format!("{name},64,0,64,0\n"), Some("mxnet2-csv")).expect("a row").remove(0);
        let of = by_structure(&run, 0);
        let found = of.first().map_or("Others", |(category, _)| category.as_str());
        assert_eq!(found, expected, "{name}");
    }
}

/// Asserts that a damaged file gives an error with the file's name, or a run whose sums add up.
fn survives(content: &[u8], forced: Option<&str>) {
    match read(content, forced) {
        Ok(runs) => check(&runs),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("gpumem-import-") && text.len() < 2000, "{text}");
        }
    }
}

#[test]
fn files_cut_at_every_byte() {
    for (name, content) in ALL {
        for end in 0..content.len() {
            let part = &content.as_bytes()[..end];
            // Every length is read. Reports take most of the time, so only every seventh is reported.
            if end % 7 == 0 { survives(part, Some(name)) } else { drop(read(part, Some(name))) }
        }
    }
}

#[test]
fn files_of_one_format_read_as_every_other() {
    for (_, content) in ALL {
        for format in FORMATS {
            survives(content.as_bytes(), Some(format.name));
        }
    }
}

#[test]
fn lines_without_end_and_numbers_without_sense() {
    let long = "x".repeat(3 << 20);
    for (name, content) in ALL {
        survives(format!("{content}{long}\n{content}").as_bytes(), Some(name));
        for number in [
            "-1",
            "99999999999999999999999",
            "18446744073709551615",
            "1e308",
            "NaN",
            "0x10",
            "",
            "281474976710656",
        ] {
            for digits in [
                "4096",
                "1000",
                "2048.0000",
                "300.0",
                "5000",
                "4031",
                "3.814697",
                "2000000000000200",
                "138730",
            ] {
                if content.contains(digits) {
                    survives(content.replace(digits, number).as_bytes(), Some(name));
                }
            }
        }
        survives(content.repeat(50).as_bytes(), None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..512), which in 0..FORMATS.len()) {
        survives(&bytes, Some(FORMATS[which].name));
        survives(&bytes, None);
    }

    #[test]
    fn damaged_files(
        which in 0..ALL.len(),
        damages in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>(), 0..3_u8), 1..8),
    ) {
        let (name, content) = ALL[which];
        let mut bytes = content.as_bytes().to_vec();
        for (at, byte, how) in damages {
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => drop(bytes.drain(at..(at + usize::from(byte)).min(bytes.len()))),
            }
            if bytes.is_empty() {
                break;
            }
        }
        survives(&bytes, Some(name));
        survives(&bytes, None);
    }
}
