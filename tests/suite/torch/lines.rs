//! Tensors that no module makes are named after the line of the program that makes them, in unmodified PyTorch wheels.
use gpumem_report::names::is_line;
use gpumem_tests::live::attribution::attribution;
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, until};
use serde_json::Value;
use std::collections::BTreeMap;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

/// Returns the names and current amounts of a report's table, in order.
fn rows(text: &str) -> Vec<(String, f64)> {
    let table = text.lines().skip_while(|line| !line.starts_with(" tracked")).skip(1);
    let row = |line: &str| {
        let cut = line.find("  ").filter(|cut| *cut > 0)?;
        let amount = line[cut..].split_whitespace().next()?.replace(',', "");
        Some((line[..cut].trim().to_owned(), amount.parse().ok()?))
    };
    let is_row = |line: &&str| line.starts_with("  ") && !line.starts_with("  Others");
    table.take_while(is_row).filter_map(|line| row(line.trim_start())).collect()
}

#[test]
fn tensors_outside_modules_have_their_source_line() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        if !torch::reads_frames(version) {
            continue; // reported by roles.rs
        }
        let machine = torch::machine(&[]);
        let mut daemon = Daemon::start(&machine, "daemon", FAST);
        let mut command = wheel.covered(&machine, &daemon.runtime, "lines.py", &[]);
        let mut job = Job::start(command.env_remove("GPUMEM_SITES"));
        job.wait_for("holding");
        let pid = job.pid().to_string();
        let printed: Vec<Value> =
            job.said.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let lines = printed.iter().find_map(|line| line["lines"].as_array()).expect("lines").clone();
        let held = printed.iter().find(|line| line["check"] == "held").expect("a check");
        let allocated = &held["devices"][0]["allocated"];
        let mut expected: BTreeMap<&str, i64> = BTreeMap::new();
        for line in &lines {
            let tag = line[2].as_str().expect("a tag");
            *expected.entry(tag).or_default() += line[1].as_i64().expect("bytes");
        }
        // All memory of a line, from the resent state.
        let report = until(20, "the report has all lines", || {
            let output = daemon.ctl(&machine, &["report", &pid, "--json"]).output().ok()?;
            let report: Value = serde_json::from_slice(&output.stdout).ok()?;
            let last = &report["devices"][0]["last"];
            let mut held: BTreeMap<&str, i64> = BTreeMap::new();
            for cell in last["cells"].as_array()? {
                let tag = cell["tag"].as_str().unwrap_or_default();
                if expected.contains_key(tag) {
                    *held.entry(tag).or_default() += cell["bytes"].as_i64()?;
                }
            }
            println!("torch {version}: {held:?}");
            (held == expected && last["nameable_bytes"] == *allocated).then(|| report.clone())
        });
        let last = &report["devices"][0]["last"];
        assert_eq!(last["named_bytes"], last["nameable_bytes"], "torch {version}: everything has a name");
        let text = daemon.ctl(&machine, &["report", "--verbose", &pid]).output().expect("a report").stdout;
        let text = String::from_utf8_lossy(&text).into_owned();
        let rows = rows(&text);
        let largest = expected.iter().max_by_key(|(_, bytes)| **bytes).expect("lines").0;
        assert_eq!(rows.first().map(|(name, _)| name.as_str()), Some(*largest), "torch {version}: {text}");
        // By the larger of the two columns.
        let of_lines: Vec<f64> = rows.iter().filter(|(name, _)| is_line(name)).map(|(_, now)| *now).collect();
        assert!(of_lines.len() >= 5 && of_lines.is_sorted_by(|a, b| a >= b), "torch {version}: {text}");
        let by_line: i64 = last["cells"]
            .as_array()
            .expect("cells")
            .iter()
            .map(|cell| {
                if cell["tag"].as_str().is_some_and(is_line) {
                    cell["bytes"].as_i64().unwrap_or(0)
                } else {
                    0
                }
            })
            .sum();
        let all = last["nameable_bytes"].as_i64().expect("bytes");
        let tenths = |part: i64| format!("{:.1}", (1000.0 * part as f64 / all as f64).floor() / 10.0);
        let share = format!(
            "names: module path ({} % of bytes) + lines ({} %)",
            tenths(all - by_line),
            tenths(by_line)
        );
        assert!(text.contains(&share), "torch {version}: {share}: {text}");
        job.enough();
        torch::finished(&mut job);
        daemon.wait_for_the_end_of(&machine, &[&job]);
        daemon.stop();
        let live = &attribution(&daemon.recording, job.pid()).live["held"];
        for line in &lines {
            let address = line[0].as_str().and_then(|text| u64::from_str_radix(&text[2..], 16).ok());
            let block = address.and_then(|address| live.get(&address));
            assert_eq!(block.map(|block| block.tag.as_str()), line[2].as_str(), "torch {version}: {line}");
        }
    }
}

/// Allocations of modules have lines on request: as frames of exports, and in a table of lines.
#[test]
fn allocations_of_modules_have_lines_on_demand() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        if !torch::reads_frames(version) {
            continue; // reported by roles.rs
        }
        let machine = torch::machine(&[]);
        let daemon = Daemon::start(&machine, "daemon", FAST);
        let mut command = wheel.covered(&machine, &daemon.runtime, "lines.py", &[]);
        let mut job = Job::start(command.env_remove("GPUMEM_SITES").env("GPUMEM_LINES", "1"));
        job.wait_for("holding");
        let pid = job.pid().to_string();
        let tell = |form: &[&str]| {
            let output =
                daemon.ctl(&machine, &[&["report", &pid][..], form].concat()).output().expect("a report");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        // Only this frame of the peak, because activations and workspaces depend on the release.
        let is_held = |line: &str| line.contains(";lines.py:31 make_buffer 100663296");
        let frames = until(20, "the peak of its frames", || {
            let text = tell(&["--collapsed"]);
            text.lines().any(|line| is_held(&format!(";{line}"))).then_some(text)
        });
        let is_in_module = |line: &str| {
            let frames: Vec<&str> = line.split(';').collect();
            frames.contains(&"GPT")
                && frames.iter().any(|frame| frame.starts_with("models.py:") && is_line(frame))
        };
        assert!(frames.lines().any(is_in_module), "torch {version}: {frames}");
        let text = tell(&["--by", "line", "--verbose"]);
        let names: Vec<String> = rows(&text).into_iter().map(|(name, _)| name).collect();
        let is_row = |name: &String| is_line(name) || name.starts_with('(') || name == "pool idle";
        assert!(names.len() > 4 && names.iter().all(is_row), "torch {version}: {text}");
        assert!(names[0].starts_with("lines.py:"), "torch {version}: {text}");
        job.enough();
        torch::finished(&mut job);
    }
}
