//! `/metrics`: which series exist, which do not, and how requests are checked.

use crate::common::node::{MIB, Node, batch, key};
use crate::common::{Scratch, http, metric, start, wait_for};
use gpumem_ledger::Origin;
use gpumem_ledger::ProcessKey;
use gpumem_wire::{Absence, Body, Reading, Stamp};
use gpumemd::stats::Family;
use gpumemd::view::ViewSettings;
use gpumemd::view::prometheus::{self, scrape};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

const T: u64 = 500_000_000;

/// Returns a node with an idle GPU, and a GPU with three processes: covered, uncovered, and one whose bytes NVML does not report.
fn node(scratch: &Scratch, max_series: usize) -> Node {
    let mut node = Node::new(scratch.join("runs.sqlite"), 2, max_series);
    node.covered(0, 0, 3);
    let uncovered = key(0, 1);
    let facts = "comm=b\"a\\d\nuser=bo\u{202e}b";
    let facts = Body::ProcessFacts { start_ticks: 7, uid: Reading::of(1001), parent_pid: 1, facts };
    let stamp = Stamp { thread: uncovered.pid, time_ns: 3, ..Stamp::default() };
    node.core.take(batch(Origin::Host, &[(stamp, facts)]));
    let listed =
        [(key(0, 0), Ok(500 * MIB)), (uncovered, Ok(300 * MIB)), (key(0, 2), Err(Absence::NotAvailable))];
    node.sample(0, T, &listed);
    node.sample(1, T, &[]);
    node.core.publish(T + 2_001_000_000);
    node
}

/// Removes the fraction of an age, which changes with each run.
fn whole_seconds(line: &str) -> &str {
    if !line.starts_with('#') && line.contains("_age_seconds{") {
        line.rsplit_once('.').map_or(line, |(whole, _)| whole)
    } else {
        line
    }
}

/// Returns the families about GPUs; those about the daemon change with each run.
fn facts(text: &str) -> String {
    let own = ["gpumemd_", "process_"];
    let is_own = |line: &str| {
        let name = line.strip_prefix("# HELP ").or(line.strip_prefix("# TYPE ")).unwrap_or(line);
        own.iter().any(|own| name.starts_with(own))
    };
    let lines = text.lines().filter(|line| !is_own(line));
    lines.map(|line| format!("{}\n", whole_seconds(line))).collect()
}

#[test]
fn samples_age_while_nothing_is_published() {
    let scratch = Scratch::new();
    let node = node(&scratch, 10_000);
    let ages = |family: &str| -> Vec<f64> {
        let text = scrape(&node.context);
        let lines = text.lines().filter(|line| line.starts_with(family));
        lines.map(|line| line.rsplit_once(' ').expect("a value").1.parse().expect("a number")).collect()
    };
    for family in ["gpumem_device_sample_age_seconds", "gpumem_process_sample_age_seconds"] {
        let first = ages(family);
        assert!(!first.is_empty(), "{family}");
        wait_for("every age to grow", || {
            ages(family).iter().zip(&first).all(|(now, before)| now > before).then_some(())
        });
    }
}

#[test]
fn the_whole_text() {
    let scratch = Scratch::new();
    let node = node(&scratch, 10_000);
    let text = facts(&scrape(&node.context));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/metrics/node.prom");
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(&path, &text).expect("written");
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, golden, "UPDATE_GOLDEN=1 writes it anew, if that is meant");
}

#[test]
fn nothing_unknown_is_zero() {
    let scratch = Scratch::new();
    let node = node(&scratch, 10_000);
    let text = scrape(&node.context);
    let of =
        |pid: u32| text.lines().filter(|line| line.contains(&format!("pid=\"{pid}\""))).collect::<Vec<_>>();
    let unknown = of(key(0, 2).pid);
    assert!(
        unknown
            .iter()
            .any(|line| line.contains("used_unavailable") && line.contains("reason=\"not available\""))
    );
    assert!(!unknown.iter().any(|line| line.starts_with("gpumem_process_used_bytes")), "{unknown:?}");
    let uncovered = of(key(0, 1).pid);
    for absent in ["tracked", "untrackable", "category", "events"] {
        assert!(!uncovered.iter().any(|line| line.contains(absent)), "{absent}: {uncovered:?}");
    }
    assert!(!text.lines().any(|line| line.starts_with("gpumem_") && line.ends_with(" NaN")));
}

#[test]
fn the_identity_adds_up() {
    let scratch = Scratch::new();
    let node = node(&scratch, 10_000);
    let text = scrape(&node.context);
    let pid = format!("pid=\"{}\"", key(0, 0).pid);
    let sum = |name: &str| -> i64 {
        let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(&pid));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<i64>().unwrap()).sum()
    };
    let used = sum("gpumem_process_used_bytes{");
    let tracked = sum("gpumem_process_tracked_bytes{");
    assert_eq!(used, 500 << 20);
    assert_eq!(
        used,
        sum("gpumem_process_predates_bytes{") + tracked + sum("gpumem_process_untrackable_bytes{")
    );
    assert_eq!(tracked, sum("gpumem_process_category_bytes{"));
}

/// Returns the sum of a family's series.
fn sum(text: &str, name: &str) -> i64 {
    let lines = text.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<i64>().unwrap()).sum()
}

const ADD_UP: [&str; 7] = [
    "gpumem_process_used_bytes",
    "gpumem_process_tracked_bytes",
    "gpumem_process_predates_bytes",
    "gpumem_process_untrackable_bytes",
    "gpumem_process_untrackable_part_bytes",
    "gpumem_process_category_bytes",
    "gpumem_process_tag_bytes",
];

/// Returns a node where every process has an agent and this number of tags.
fn full(scratch: &Scratch, devices: usize, processes: usize, tags: u64, shown: ViewSettings) -> Node {
    let mut node = Node::new(scratch.join("runs.sqlite"), devices, shown.max_series);
    node.context.show(shown);
    for device in 0..devices {
        (0..processes).for_each(|process| node.covered(device, process, tags));
        let listed: Vec<_> =
            (0..processes).map(|process| (key(device, process), Ok((500 + process as u64) * MIB))).collect();
        node.sample(device, T, &listed);
    }
    node.core.publish(T + 2_001_000_000);
    node
}

fn count(text: &str) -> usize {
    text.lines().filter(|line| !line.starts_with('#')).count()
}

#[test]
fn what_is_folded_adds_up() {
    let scratch = Scratch::new();
    let shown = |max_series| ViewSettings { max_series, tags: 3, ..ViewSettings::default() };
    let mut node = full(&scratch, 2, 6, 5, shown(10_000));
    let whole = scrape(&node.context);
    assert!(!whole.contains("pid=\"(other)\""));
    assert_eq!(metric(&whole, "gpumemd_processes_folded{reason=\"room\"}"), Some(0.0));
    // Processes are folded one after the other, until all are.
    let mut rooms = Vec::new();
    for max_series in [400, 300, 200, 100] {
        node.context.show(shown(max_series));
        let text = scrape(&node.context);
        for name in ADD_UP {
            assert_eq!(sum(&text, name), sum(&whole, name), "{name} with {max_series}");
        }
        let used = sum(&text, "gpumem_process_used_bytes");
        let parts = ["predates", "tracked", "untrackable"]
            .map(|of| sum(&text, &format!("gpumem_process_{of}_bytes")));
        assert_eq!(used, parts.iter().sum::<i64>());
        assert!(count(&facts(&text)) <= max_series, "{max_series}");
        assert_eq!(metric(&text, "gpumemd_series_folded_total"), Some(0.0), "everything is in a sum");
        let info = text.lines().filter(|line| line.starts_with("gpumem_process_info{")).count() as f64;
        let folded = metric(&text, "gpumemd_processes_folded{reason=\"room\"}").expect("a count");
        let other = f64::from(u8::from(folded > 0.0));
        assert_eq!(info + folded, 12.0 + other, "(other) has a line too");
        assert_eq!(sum(&text, "gpumem_device_processes"), 12);
        rooms.push(folded as u64);
    }
    assert!(rooms.windows(2).all(|pair| pair[0] < pair[1]) && rooms[3] == 12, "{rooms:?}");
    // A young process: it starts now.
    let up = std::fs::read_to_string("/proc/uptime").expect("uptime");
    let up = up.split('.').next().and_then(|seconds| seconds.parse::<u64>().ok()).expect("seconds");
    let young = ProcessKey { pid: 77, start_ticks: up * 100 };
    node.sample(1, T + 3_000_000_000, &[(young, Ok(70 * MIB))]);
    node.core.publish(T + 4_000_000_000);
    // The other processes began with the machine, which may have booted a minute ago.
    node.context.show(ViewSettings { young: Duration::from_secs(up / 2), ..shown(10_000) });
    let text = scrape(&node.context);
    assert!(!text.contains("pid=\"77\""), "it is folded");
    let other = text
        .lines()
        .find(|line| line.starts_with("gpumem_process_used_bytes") && line.contains("pid=\"(other)\""));
    assert!(
        other.is_some_and(|line| line.contains("gpu=\"1\"") && line.ends_with(&format!(" {}", 70 * MIB))),
        "{other:?}"
    );
    assert_eq!(metric(&text, "gpumemd_processes_folded{reason=\"young\"}"), Some(1.0));
    node.context.show(ViewSettings { young: Duration::ZERO, ..shown(10_000) });
    assert!(scrape(&node.context).contains("pid=\"77\""), "with 0 nothing is too young");
}

#[test]
fn tags_are_few_on_request_and_add_up() {
    let scratch = Scratch::new();
    let node = full(&scratch, 1, 1, 8, ViewSettings::default());
    assert!(!scrape(&node.context).contains("gpumem_process_tag_bytes"), "off unless asked for");
    node.context.show(ViewSettings { tags: 3, ..ViewSettings::default() });
    let text = scrape(&node.context);
    let tags: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("gpumem_process_tag_bytes"))
        .map(|line| {
            (
                line.split("tag=\"").nth(1).unwrap().split('"').next().unwrap(),
                line.rsplit(' ').next().unwrap(),
            )
        })
        .collect();
    let mib = |mib: u64| (mib * MIB).to_string();
    let expected = [
        ("(other)", mib(15)),
        ("model/layers.6/weight", mib(6)),
        ("model/layers.7/weight", mib(7)),
        ("model/layers.8/weight", mib(8)),
    ];
    assert_eq!(tags, expected.each_ref().map(|(tag, bytes)| (*tag, bytes.as_str())));
    assert_eq!(sum(&text, "gpumem_process_tag_bytes"), sum(&text, "gpumem_process_tracked_bytes"));
}

#[test]
fn every_series_is_of_a_family_that_is_known_and_has_its_labels() {
    let scratch = Scratch::new();
    let node = full(&scratch, 2, 2, 2, ViewSettings { tags: 2, ..ViewSettings::default() });
    let text = scrape(&node.context);
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().expect("a name");
        let of_histogram = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part));
        let is_it = |family: &Family| match family.kind {
            "histogram" => Some(family.name) == of_histogram,
            _ => family.name == name,
        };
        let family = prometheus::families().find(is_it);
        let family = family.unwrap_or_else(|| panic!("{name} is in no table"));
        let is_total = name.ends_with("_total");
        assert_eq!(is_total, family.kind == "counter", "{name}");
        let labels = line
            .split_once('{')
            .and_then(|(_, rest)| rest.rsplit_once("} "))
            .map_or("", |(labels, _)| labels);
        for label in labels.split("\",").filter(|label| !label.is_empty()) {
            let label = label.split('=').next().expect("a name");
            let is_bucket = family.kind == "histogram" && label == "le";
            assert!(is_bucket || family.labels.contains(&label), "{label} is not a label of {name}");
        }
    }
}

/// Returns the most series of a node with these covered and uncovered processes on each device, without the daemon's own.
fn most(shown: &ViewSettings, devices: usize, covered: usize, uncovered: usize) -> usize {
    // Information, used with its peak and age, one flag.
    const UNCOVERED: usize = 5;
    let of_processes = covered * prometheus::max_series_per_process(shown, 1) + uncovered * UNCOVERED;
    devices * (prometheus::MAX_SERIES_PER_DEVICE + of_processes)
}

/// Returns the number of series about the daemon itself.
fn own(text: &str) -> usize {
    count(text) - count(&facts(text))
}

#[test]
fn a_full_node_stays_below_what_is_stated() {
    let scratch = Scratch::new();
    let node = full(&scratch, 8, 16, 20, ViewSettings::default());
    for tags in [0, 10] {
        let shown = ViewSettings { tags, ..ViewSettings::default() };
        let stated = most(&shown, 8, 16, 0);
        assert!(stated < shown.max_series, "nothing is folded on a usual node: {stated}");
        node.context.show(shown);
        let text = scrape(&node.context);
        let series = count(&facts(&text));
        println!("{tags} tags: {series} of at most {stated}, {} bytes", text.len());
        assert!(series <= stated && series > stated / 4, "{series} of {stated}");
        assert_eq!(metric(&text, "gpumemd_processes_folded{reason=\"room\"}"), Some(0.0));
    }
}

/// Returns the tables of docs/metrics.md that are generated from the source.
fn reference() -> String {
    let mut text = String::from("| metric | type | labels | |\n|---|---|---|---|\n");
    for Family { name, help, kind, labels } in prometheus::families() {
        text += &format!("| `{name}` | {kind} | {} | {help} |\n", labels.join(" "));
    }
    text
}

fn cardinality() -> String {
    let scratch = Scratch::new();
    // Rounded up, so that a new counter does not change the table.
    let own = own(&scrape(&node(&scratch, 10_000).context)).next_multiple_of(100);
    let mut text = String::from("| a node | series, at most | 200 such nodes |\n|---|---|---|\n");
    let mut row = |what: &str, most: usize| {
        text += &format!("| {what} | {most} | {} |\n", most * 200);
    };
    let shown = ViewSettings::default();
    row("8 GPUs without processes", own + most(&shown, 8, 0, 0));
    row("8 GPUs with 16 processes each, none with an agent", own + most(&shown, 8, 0, 16));
    row("8 GPUs with 1 process each, with an agent", own + most(&shown, 8, 1, 0));
    row("8 GPUs with 16 processes each, 3 with an agent", own + most(&shown, 8, 3, 13));
    row("8 GPUs with 16 processes each, all with an agent", own + most(&shown, 8, 16, 0));
    let tags = ViewSettings { tags: 10, ..ViewSettings::default() };
    row("the same with `tags = 10`", own + most(&tags, 8, 16, 0));
    row("whatever it does, with `max_series = 10000`", own + shown.max_series);
    text
}

#[test]
fn the_reference_is_what_the_source_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let text = std::fs::read_to_string(&path).expect("docs/metrics.md");
    let mut fresh = text.clone();
    for (name, table) in [("reference", reference()), ("cardinality", cardinality())] {
        let (begin, end) =
            (format!("<!-- {name}: made by daemon/tests/suite/metrics.rs -->\n"), "<!-- end -->");
        let at = fresh.find(&begin).unwrap_or_else(|| panic!("{begin:?} is not there")) + begin.len();
        let length = fresh[at..].find(end).expect("an end");
        fresh.replace_range(at..at + length, &table);
    }
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        std::fs::write(&path, &fresh).expect("written");
    } else {
        let stale = text.lines().zip(fresh.lines()).find(|(old, new)| old != new);
        assert!(
            text == fresh,
            "UPDATE_GOLDEN=1 writes docs/metrics.md anew; the first difference: {stale:#?}"
        );
    }
    // Metrics named in the text and the examples must exist.
    let names: Vec<_> = prometheus::families().map(|family| family.name).collect();
    let is_known = |word: &str| names.contains(&word);
    let is_part = |c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':';
    for word in
        fresh.split(is_part).filter(|word| word.starts_with("gpumem_") || word.starts_with("gpumemd_"))
    {
        assert!(word.ends_with('_') || is_known(word), "{word} is not a metric");
    }
}

#[test]
fn running_out_is_remembered_when_the_process_is_gone() {
    let scratch = Scratch::new();
    let mut node = node(&scratch, 10_000);
    let ooms = |node: &Node, kind: &str| {
        let text = scrape(&node.context);
        let series = format!("kind=\"{kind}\"}}");
        let of_kind = text
            .lines()
            .find(|line| line.contains("gpumem_device_ooms_total{gpu=\"0\"") && line.contains(&series));
        of_kind.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
    };
    assert_eq!(ooms(&node, "device"), Some(0), "there from the beginning");
    let victim = key(0, 0);
    let at = |time_ns| Stamp { device: 0, thread: 1, time_ns, ..Stamp::default() };
    let gave_up = |result| Body::Oom {
        bytes: 2 << 30,
        pool_used_bytes: Reading::ABSENT,
        pool_reserved_bytes: Reading::ABSENT,
        outcome: gpumem_wire::OomOutcome::Fatal,
        result,
    };
    node.core.take(batch(Origin::Process(victim), &[(at(T + 2_100_000_000), gave_up(2))]));
    node.core.publish(T + 2_200_000_000);
    assert_eq!((ooms(&node, "device"), ooms(&node, "pool")), (Some(1), Some(0)));
    node.core.publish(T + 2_300_000_000);
    assert_eq!(ooms(&node, "device"), Some(1), "counted once");
    // The next event is its last record: nothing reads the state before the process is gone.
    node.core.take(batch(Origin::Process(victim), &[(at(T + 2_400_000_000), gave_up(0))]));
    let stamp = Stamp { thread: victim.pid, time_ns: T + 3_000_000_000, ..Stamp::default() };
    let body = Body::ProcessGone { start_ticks: 7, status: Reading::of(9) };
    node.core.take(batch(Origin::Host, &[(stamp, body)]));
    node.core.tick(T + 3_300_000_000);
    node.core.publish(T + 3_300_000_000);
    assert_eq!((ooms(&node, "device"), ooms(&node, "pool")), (Some(1), Some(1)));
    assert!(!scrape(&node.context).contains(&format!("pid=\"{}\"", victim.pid)));
}

#[test]
fn devices_that_nvml_does_not_have_are_one_count_of_the_process() {
    let scratch = Scratch::new();
    let mut node = Node::new(scratch.join("runs.sqlite"), 1, 10_000);
    node.core.publish(1);
    let before = scrape(&node.context);
    // A device of this machine, and 20 that do not exist, the first of which claims number 0.
    let key = key(0, 1);
    let at = Stamp { time_ns: 2, ..Stamp::default() };
    let hello = Body::Hello { start_ticks: 7, versions: 1 << 16, capabilities: 0, instance: 1, claims: "" };
    let mut records = vec![(at, hello)];
    for slot in 0..21_u8 {
        let at = Stamp { device: slot, seq: 0, ..at };
        let device = Body::Device {
            uuid_high: if slot == 0 { 1 } else { 99 },
            uuid_low: u64::from(slot),
            total_bytes: Reading::of(80 << 30),
            ordinal: u16::from(slot.saturating_sub(1)),
            id: gpumem_wire::DeviceIdKind::Gpu,
            name: "invented",
        };
        let memory = gpumem_wire::MemoryKind::Device;
        let seq = u64::from(slot) + 1;
        let alloc = Body::AllocEnd { address: seq << 32, bytes: 4096, pool: 0, took_us: 1, memory };
        records.extend([(at, device), (Stamp { seq, ..at }, alloc)]);
    }
    node.core.take(batch(Origin::Process(key), &records));
    node.core.publish(T);
    let text = scrape(&node.context);
    let devices = |text: &str| text.lines().filter(|line| line.starts_with("gpumem_device_info{")).count();
    assert_eq!((devices(&before), devices(&text)), (1, 1), "{text}");
    let phantom = |line: &&str| line.contains("-0063-") || line.contains("invented");
    assert_eq!(text.lines().find(phantom), None, "no series has such a device");
    let own = format!("pid=\"{}\",start=\"7\"", key.pid);
    assert_eq!(metric(&text, &format!("gpumem_process_claimed_devices{{{own}}}")), Some(20.0), "{text}");
    let uuid = "gpu=\"0\",uuid=\"GPU-00000000-0000-0001-0000-000000000000\"";
    assert_eq!(
        metric(&text, &format!("gpumem_process_tracked_bytes{{{uuid},{own}}}")),
        Some(4096.0),
        "{text}"
    );
}

#[test]
fn series_vanish_with_their_process() {
    let scratch = Scratch::new();
    let mut node = node(&scratch, 10_000);
    let gone = key(0, 0);
    let stamp = Stamp { thread: gone.pid, time_ns: T + 3_000_000_000, ..Stamp::default() };
    let body = Body::ProcessGone { start_ticks: 7, status: Reading::ABSENT };
    node.core.take(batch(Origin::Host, &[(stamp, body)]));
    // Without an agent, the daemon waits for a hello that may still arrive.
    node.core.tick(T + 3_300_000_000);
    node.core.publish(T + 3_300_000_000);
    let pid = format!("pid=\"{}\"", gone.pid);
    assert!(!scrape(&node.context).contains(&pid));
}

#[test]
fn only_get_is_answered() {
    let daemon = start("");
    let ask = |method, path| http(TcpStream::connect(daemon.metrics).expect("a daemon"), method, path);
    assert_eq!(ask("GET", "/healthz"), (200, "ok\n".into()));
    assert_eq!(ask("GET", "/nothing").0, 404);
    for method in ["POST", "PUT", "DELETE", "BREW"] {
        assert_eq!(ask(method, "/metrics").0, 405);
    }
}

#[test]
fn only_requests_that_name_this_machine_are_answered() {
    let daemon = start("");
    let ask = |target: &str, version: &str, hosts: &[&str]| -> u16 {
        let mut stream = TcpStream::connect(daemon.metrics).expect("a connection");
        let hosts: String = hosts.iter().map(|host| format!("Host: {host}\r\n")).collect();
        let request = format!("GET {target} HTTP/{version}\r\n{hosts}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status")
    };
    for path in ["/metrics", "/", "/api/processes"] {
        assert_eq!(ask(path, "1.1", &["127.0.0.1:9837"]), 200, "{path}");
        assert_eq!(ask(path, "1.0", &[]), 200, "{path}: HTTP/1.0 has no Host");
        // A website whose name resolves to this address, and requests that no browser sends.
        for (target, version, hosts) in [
            (path, "1.1", &["rebound.example"][..]),
            (path, "1.0", &["rebound.example"]),
            (path, "1.1", &[]),
            (path, "1.1", &["localhost", "rebound.example"]),
            (&format!("http://rebound.example{path}"), "1.1", &["localhost"]),
            (&format!("http://localhost{path}"), "1.1", &["rebound.example"]),
        ] {
            let status = ask(target, version, hosts);
            assert!(status == 421 || status == 400, "{target} {version} {hosts:?}: {status}");
        }
    }
    assert_eq!(ask("/healthz", "1.1", &["rebound.example"]), 200, "a probe is told nothing");
}

#[test]
fn clients_that_do_nothing_do_not_stop_a_scrape() {
    let daemon = start("[metrics]\nconnections = 8\n");
    // Half a request head on each slot and beyond.
    let mut slow: Vec<_> = (0..24).filter_map(|_| TcpStream::connect(daemon.metrics).ok()).collect();
    for stream in &mut slow {
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHos");
    }
    let started = Instant::now();
    let answered = wait_for("an answer", || {
        let mut stream = TcpStream::connect(daemon.metrics).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        text.starts_with("HTTP/1.1 200").then(|| started.elapsed())
    });
    gpumem_test_support::bar("a scrape beside silent clients", answered, Duration::from_secs(3));
    drop(slow);
}
