//! Selection of runs in a store.
use gpumem_import::read_file;
use gpumem_model::run::{Clock, Fate, Oom, OomKind, Run, State};
use gpumem_runs::store::{Filter, Sort, Store};
use std::path::{Path, PathBuf};

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const SECOND: i64 = 1_000_000_000;

/// Run number `n` began `n` hundred seconds after 1970 and lasted fifty.
fn run(n: u64, command: &str, user: &str, job: Option<&str>, device: &str) -> Run {
    let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
    let mut run = read_file(&log, None).expect("a log").remove(0);
    run.source.kind = "daemon".into();
    run.source.origin = "node7".into();
    run.clock = Clock::Monotonic { wall_offset_ns: Some(n as i64 * 100 * SECOND) };
    run.process.uid = Some(1000 + n);
    run.process.facts.insert("command".into(), command.into());
    run.process.facts.insert("user".into(), user.into());
    if let Some(job) = job {
        run.process.claims.insert("job".into(), job.into());
    }
    let device_of = &mut run.devices[0];
    device_of.name = device.into();
    device_of.ordinal = n as u16;
    device_of.series.buckets.truncate(1);
    device_of.series.buckets[0].time_ns = 0;
    for moment in [&mut device_of.last, &mut device_of.peak] {
        moment.time_ns = 50 * SECOND as u64;
        moment.amounts[0].1 += n as i64;
        moment.tracked_bytes = Some(moment.amounts.iter().map(|(_, bytes)| bytes).sum());
    }
    run.state = State::Closed { time_ns: 50 * SECOND as u64, status: Some(0) };
    run
}

fn store(name: &str) -> (Folder, Store) {
    let folder = Folder(std::env::temp_dir().join(format!("gpumem-select-{}-{name}", std::process::id())));
    let mut store = Store::open(folder.0.join("runs.sqlite")).expect("a store");
    let oom = |kind: OomKind, is_unheard: bool, fate: Fate| Oom {
        kind,
        is_unheard,
        fate,
        count: 1,
        ..Oom::default()
    };
    let fatal = || Fate::Fatal { after_ns: 1, status: None };
    let mut runs = [
        run(1, "/usr/bin/python train.py --lr 1", "alice", Some("nightly.8812"), "GPU-aaaa-1"),
        run(2, "vllm serve", "bob", None, "GPU-bbbb-2"),
        run(3, "python eval.py", "alice", Some("8812"), "GPU-aaaa-1"),
        run(4, "python TRAIN_it.py", "o'hara; DROP", Some("nightly.8812.5"), "GPU-cccc-4"),
    ];
    runs[1].devices[0].details.ooms = vec![oom(OomKind::Pressure, false, Fate::Survived)];
    runs[2].devices[0].details.ooms = vec![
        oom(OomKind::Pressure, true, fatal()),
        oom(OomKind::Device, false, fatal()),
        oom(OomKind::Pressure, true, Fate::Survived),
    ];
    runs[3].state = State::Interrupted;
    let second = &mut runs[1].process;
    for (name, value) in [("slurm_job", "77"), ("pod", "train-0"), ("ancestors", "123,45,1")] {
        second.facts.insert(name.into(), value.into());
    }
    second.claims.insert("slurm_job".into(), "78".into());
    for (number, run) in runs.iter().enumerate() {
        store.insert(run, &format!("boot:{number}")).expect("stored");
    }
    (folder, store)
}

fn ids(store: &Store, filter: Filter) -> Vec<i64> {
    store.select(&filter).expect("a list").iter().map(|listed| listed.run.id.0).collect()
}

#[test]
fn each_filter_leaves_what_is_meant() {
    let (_folder, store) = store("filters");
    let all = Filter::default;
    let text = |text: &str| Some(text.to_owned());
    let at = |hundreds: i64| Some(hundreds * 100 * SECOND);
    let cases: Vec<(&str, Filter, Vec<i64>)> = vec![
        ("nothing asked", all(), vec![4, 3, 2, 1]),
        ("user", Filter { user: text("alice"), ..all() }, vec![3, 1]),
        ("uid", Filter { user: text("1002"), ..all() }, vec![2]),
        ("a name of SQL", Filter { user: text("o'hara; DROP"), ..all() }, vec![4]),
        ("job by its id", Filter { job: text("8812"), ..all() }, vec![3]),
        ("job by its name", Filter { job: text("nightly"), ..all() }, vec![1]),
        ("job by both", Filter { job: text("nightly.8812"), ..all() }, vec![4, 1]),
        ("job by Slurm's number", Filter { job: text("77"), ..all() }, vec![2]),
        ("job by a claim that is known better", Filter { job: text("78"), ..all() }, vec![]),
        ("job by its pod", Filter { job: text("train-0"), ..all() }, vec![2]),
        ("children of a process", Filter { ancestor: Some(123), ..all() }, vec![2]),
        ("descendants of a process", Filter { ancestor: Some(45), ..all() }, vec![2]),
        ("a part of a pid", Filter { ancestor: Some(23), ..all() }, vec![]),
        ("no such job", Filter { job: text("night"), ..all() }, vec![]),
        ("device by number", Filter { device: text("2"), ..all() }, vec![2]),
        ("device by UUID", Filter { device: text("gpu-AAAA"), ..all() }, vec![3, 1]),
        ("not ended before", Filter { since_ns: at(3), ..all() }, vec![4, 3]),
        ("begun by", Filter { until_ns: at(2), ..all() }, vec![2, 1]),
        ("between", Filter { since_ns: at(2), until_ns: at(3), ..all() }, vec![3, 2]),
        ("state", Filter { state: Some("interrupted"), ..all() }, vec![4]),
        ("out of memory", Filter { oom: true, ..all() }, vec![3]),
        ("part of the command", Filter { label: text("train"), ..all() }, vec![4, 1]),
        ("of the job", Filter { label: text("NIGHTLY"), ..all() }, vec![4, 1]),
        ("all of it", Filter { label: text("python *.py"), ..all() }, vec![4, 3]),
        ("by peak", Filter { sort: Sort::Peak, limit: Some(2), ..all() }, vec![4, 3]),
        ("by label", Filter { sort: Sort::Label, limit: Some(1), ..all() }, vec![1]),
        (
            "by beginning",
            Filter { sort: Sort::Started, state: Some("ended"), limit: Some(1), ..all() },
            vec![3],
        ),
        ("several", Filter { user: text("alice"), oom: true, label: text("eval"), ..all() }, vec![3]),
    ];
    for (what, filter, expected) in cases {
        assert_eq!(ids(&store, filter), expected, "{what}");
    }
}

#[test]
fn what_is_listed_is_what_is_stored() {
    let (_folder, store) = store("listed");
    let listed = store.select(&Filter::default()).expect("a list");
    let plain = store.list().expect("a list");
    assert_eq!(listed.iter().map(|listed| listed.run.clone()).collect::<Vec<_>>(), plain);
    let third = &listed[1];
    assert_eq!(
        (third.user.as_deref(), third.uid, third.job.as_deref()),
        (Some("alice"), Some(1003), Some("8812"))
    );
    assert_eq!((third.devices.as_slice(), third.ooms), (&["GPU-aaaa-1".to_owned()][..], 2));
    for listed in &listed {
        let run = store.load(listed.run.id).expect("a run");
        let ooms = run
            .devices
            .iter()
            .flat_map(|device| &device.details.ooms)
            .filter(|oom| oom.is_out_of_memory())
            .count();
        assert_eq!(listed.ooms, ooms as u64);
        assert_eq!(listed.run.peak_tracked_bytes, run.devices[0].peak.tracked_bytes);
    }
}
