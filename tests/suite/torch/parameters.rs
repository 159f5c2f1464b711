//! The table of iterations with a column for each parameter and gradient equals torch's own figures to the byte, in
//! every chosen iteration, across epochs whose step numbers restart.
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

const FAST: &str = "[nvml]\nlist_every_s = 0.02\nlist_budget = 1.0\n";

/// Cells of a line by the name of their column. No name in these models has a comma.
type Line = BTreeMap<String, String>;

fn lines(csv: &str) -> Vec<Line> {
    let mut lines = csv.lines();
    let names: Vec<&str> = lines.next().expect("a head").split(',').collect();
    let line = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        assert_eq!(cells.len(), names.len(), "{line}");
        names.iter().zip(cells).map(|(name, cell)| ((*name).to_owned(), cell.to_owned())).collect()
    };
    lines.map(line).collect()
}

fn number(line: &Line, name: &str) -> i64 {
    line[name].parse().unwrap_or_else(|_| panic!("{name} of {line:?}"))
}

/// Returns the bytes by name of a role's columns, without empty ones.
fn columns(line: &Line, role: &str) -> BTreeMap<String, i64> {
    let own =
        line.iter().filter_map(|(name, cell)| Some((name.strip_prefix(role)?.strip_prefix(' ')?, cell)));
    let bytes = own.map(|(name, cell)| (name.to_owned(), cell.parse().expect("bytes")));
    bytes.filter(|(_, bytes)| *bytes != 0).collect()
}

fn expected(printed: &Value, name: &str) -> BTreeMap<String, i64> {
    let map = printed[name].as_object().unwrap_or_else(|| panic!("{name} of {printed}"));
    map.iter().map(|(name, bytes)| (name.clone(), bytes.as_i64().expect("bytes"))).collect()
}

fn trains(version: &str, how: &str, every: u64) {
    let Some(wheel) = torch::wheel(version) else { return };
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut command = wheel.covered(&machine, &daemon.runtime, "parameters.py", &[how, &every.to_string()]);
    command.env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent-lib/python"));
    let mut job = Job::start(&mut command);
    let printed = torch::finished(&mut job);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let recording = daemon.recording.clone();
    let (recording, every_text) = (recording.to_str().expect("UTF-8"), every.to_string());
    let report = |form: &[&str]| {
        let pid = job.pid().to_string();
        let asked = ["report", recording, "--pid", &pid, "--iterations", "--every", &every_text];
        let output = daemon.ctl(&machine, &[&asked, form].concat()).output().expect("gpumemctl runs");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{form:?}: {error}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let table = lines(&report(&["--csv", "--columns"]));
    let rows: BTreeMap<(u64, u64), &Line> = table
        .iter()
        .filter(|line| !line["epoch"].is_empty())
        .map(|line| ((number(line, "epoch") as u64, number(line, "iteration") as u64), line))
        .collect();
    let mut compared = 0;
    for printed in printed.iter().filter(|printed| printed["iteration"].is_u64()) {
        let [epoch, iteration] = ["epoch", "iteration"].map(|name| printed[name].as_u64().expect("a number"));
        let what = format!("torch {version}, {how}, epoch {epoch}, iteration {iteration}");
        let line = rows.get(&(epoch, iteration));
        assert_eq!(line.is_some(), iteration % every == 0, "{what}: {:?}", rows.keys());
        let Some(line) = line else { continue };
        assert_eq!(columns(line, "parameter"), expected(printed, "parameters"), "{what}");
        assert_eq!(columns(line, "gradient"), expected(printed, "gradients"), "{what}");
        for (total, role) in [("weight_bytes", "parameter"), ("weight_gradient_bytes", "gradient")] {
            assert_eq!(number(line, total), columns(line, role).values().sum::<i64>(), "{what}: {total}");
        }
        assert_eq!(
            number(line, "current_cached_bytes"),
            printed["reserved"].as_i64().expect("bytes"),
            "{what}"
        );
        compared += 1;
    }
    assert_eq!(compared, rows.len(), "torch {version}: {:?}", rows.keys());
    assert!(compared >= 4, "torch {version}: {compared}");
    // Parameters frozen in the second epoch have no gradient any more, and unchanged weights.
    let of = |epoch: u64, role: &str| {
        let line = rows.iter().find(|((of, _), _)| *of == epoch).expect("a row").1;
        columns(line, role).keys().filter(|name| name.starts_with("GPT/h.0/")).count()
    };
    assert!(of(1, "gradient") > 0 && of(1, "gradient") == of(1, "parameter"));
    assert_eq!((of(2, "gradient"), of(2, "parameter")), (0, of(1, "parameter")));
    // The same in JSON and in the text; without the option there are no columns.
    let json: Value = serde_json::from_str(&report(&["--json", "--columns"])).expect("JSON");
    let device = &json["devices"][0];
    let (columns, amounts) = (&device["parameters"]["columns"], &device["parameters"]["amounts"]);
    let [columns, amounts] = [columns, amounts].map(|list| list.as_array().expect("a list"));
    assert_eq!(amounts.len(), table.len());
    assert!(amounts.iter().flat_map(Value::as_array).all(|row| row.len() == columns.len()), "{json}");
    let text = report(&["--columns"]);
    assert!(text.contains("each parameter and its gradient") && text.contains("GPT/h.1/"), "{text}");
    assert!(text.contains(" 2:"), "epochs are shown: {text}");
    let plain: Value = serde_json::from_str(&report(&["--json"])).expect("JSON");
    assert!(plain["devices"][0]["parameters"].is_null());
}

#[test]
fn parameters_equal_torchs_if_the_program_counts_steps() {
    torch::versions().iter().for_each(|version| trains(version, "steps", 1));
}

#[test]
fn parameters_equal_torchs_if_the_optimizer_counts_steps() {
    torch::versions().iter().for_each(|version| trains(version, "optimizer", 2));
}
