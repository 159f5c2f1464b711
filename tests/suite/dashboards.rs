//! config/grafana and config/prometheus as files: made by their script, of Grafana's own schema, with what makes a dashboard
//! usable elsewhere, and rules that promtool likes. That the queries find something is in operators.rs.
use gpumem_tests::live::prometheus::tool;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const BOARDS: [&str; 4] = ["node", "process", "fleet", "health"];

fn config(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../config").join(name)
}

fn text(name: &str) -> String {
    std::fs::read_to_string(config("grafana").join(format!("{name}.json"))).expect("a dashboard")
}

fn board(name: &str) -> Value {
    serde_json::from_str(&text(name)).expect("JSON")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A build folder for downloads.
fn tools(name: &str) -> PathBuf {
    let this = std::env::current_exe().expect("this program");
    let dir = this.ancestors().nth(3).expect("target").join("tools").join(name);
    std::fs::create_dir_all(&dir).expect("a folder");
    dir
}

fn output_of(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = [output.stdout, output.stderr].map(|printed| String::from_utf8_lossy(&printed).into_owned());
    (output.status.success(), text.concat())
}

#[test]
fn dashboards_are_generated_by_the_script() {
    let dir = std::env::temp_dir().join(format!("gpumem-grafana-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let (well, text_of_it) = output_of(Command::new("python3").arg(config("grafana/build.py")).arg(&dir));
    assert!(well, "{text_of_it}");
    for name in BOARDS {
        let made = std::fs::read_to_string(dir.join(format!("{name}.json"))).expect("written");
        assert!(made == text(name), "python3 config/grafana/build.py writes {name}.json anew");
    }
    std::fs::remove_dir_all(dir).expect("removed");
}

/// Returns the selectors of a query: metric name and label matchers.
fn selectors(expr: &str) -> Vec<(String, String)> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    let mut rest = expr;
    while let Some(at) = rest.find('{') {
        let before = &rest[..at];
        let name: String = before.chars().rev().take_while(|c| is_part(*c)).collect();
        let inside = rest[at + 1..].split('}').next().unwrap_or_default();
        found.push((name.chars().rev().collect(), inside.to_owned()));
        rest = &rest[at + 1 + inside.len()..];
    }
    found
}

#[test]
fn dashboards_import_into_any_grafana() {
    let mut uids = BTreeSet::new();
    for name in BOARDS {
        let board = board(name);
        assert!(uids.insert(word(&board["uid"]).to_owned()) && word(&board["uid"]).starts_with("gpumem-"));
        assert!(board["id"].is_null(), "an id is one installation's");
        assert!(!word(&board["title"]).is_empty() && list(&board["tags"]).contains(&"gpumem".into()));
        assert_eq!(list(&board["links"])[0]["tags"][0], "gpumem", "the others are one click away");
        let variables = list(&board["templating"]["list"]);
        let names: Vec<_> = variables.iter().map(|variable| word(&variable["name"])).collect();
        assert_eq!(names[..3], ["datasource", "job", "instance"], "{name}");
        assert!(variables.iter().skip(1).all(|variable| variable["datasource"]["uid"] == "${datasource}"));
        let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
        for panel in list(&board["panels"]) {
            let title = word(&panel["title"]);
            let what = format!("{name}: {title}");
            assert!(ids.insert(panel["id"].as_u64()), "{what}: its id is taken");
            assert!(!title.is_empty() && word(&panel["description"]).ends_with('.'), "{what}");
            assert!(!word(&panel["fieldConfig"]["defaults"]["unit"]).is_empty(), "{what}: no unit");
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{what}");
            let [x, y, w, h] =
                ["x", "y", "w", "h"].map(|of| panel["gridPos"][of].as_u64().expect("a number"));
            assert!(x + w <= 24, "{what}: too wide");
            for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
                assert!(cells.insert(cell), "{what} lies over another");
            }
            let targets = list(&panel["targets"]);
            assert!(!targets.is_empty(), "{what}");
            for target in targets {
                let expr = word(&target["expr"]);
                assert_eq!(target["datasource"]["uid"], "${datasource}", "{what}");
                for (of, inside) in selectors(expr) {
                    assert!(inside.contains("job=\"$job\""), "{what}: {of} of any job");
                    // Sums over all nodes have none.
                    let is_of_all = of.starts_with("user:") || of.starts_with("job_name:");
                    assert!(
                        is_of_all || inside.contains("instance=~\"$instance\""),
                        "{what}: {of} of any node"
                    );
                }
                for range in expr.split('[').skip(1) {
                    let range = range.split(']').next().unwrap_or_default();
                    assert!(["$__rate_interval", "$__range"].contains(&range), "{what}: [{range}]");
                }
                let of_metric = expr.matches("gpumem").count();
                let named = selectors(expr).iter().filter(|(of, _)| of.contains("gpumem")).count();
                assert_eq!(of_metric, named, "{what}: a metric without a selector in {expr}");
            }
        }
        assert!(ids.len() >= 8, "{name}");
    }
}

/// Lane `prometheus`.
mod prometheus {
    use super::*;

    #[test]
    fn promtool_accepts_every_metric() {
        let Some(promtool) = tool("promtool") else { return };
        let text = std::fs::read_to_string(gpumem_tests::golden::path("metrics/node.prom")).expect("metrics");
        assert_eq!(gpumem_tests::live::prometheus::check_metrics(&promtool, &text), "");
    }

    #[test]
    fn dashboards_match_grafanas_schema() {
        let dir = tools("grafana");
        let compiler = dir.join("node_modules/.bin/tsc");
        if !compiler.exists() {
            // A registry that does not answer would hold everything up: npm's own limits are minutes for each request.
            let fetch = || {
                let mut npm = Command::new("timeout");
                npm.args([
                    "100",
                    "npm",
                    "install",
                    "--no-fund",
                    "--no-audit",
                    "--silent",
                    "--prefer-offline",
                ]);
                npm.args([
                    "--fetch-timeout=15000",
                    "--fetch-retries=4",
                    "--fetch-retry-mintimeout=1000",
                    "--prefix",
                ]);
                npm.arg(&dir);
                let fetched = npm.args(["@grafana/schema@13.2.3", "typescript@7.0.2"]).status();
                fetched.is_ok_and(|status| status.success())
            };
            if !(0..4).any(|_| fetch()) {
                gpumem_test_support::skip("npm cannot fetch Grafana's schema", "apt-get install npm");
                return;
            }
        }
        let check = |name: &str, json: &str| {
            let typed = format!(
                "import type {{ Dashboard }} from '@grafana/schema';\nexport const it = {} satisfies Dashboard;\n",
                json.trim_end()
            );
            let file = dir.join(format!("{name}.ts"));
            std::fs::write(&file, typed).expect("written");
            let mut tsc = Command::new(&compiler);
            tsc.args([
                "--noEmit",
                "--strict",
                "--skipLibCheck",
                "--module",
                "esnext",
                "--moduleResolution",
                "bundler",
            ]);
            output_of(tsc.arg(&file).current_dir(&dir))
        };
        for name in BOARDS {
            let (well, errors) = check(name, &text(name));
            assert!(well, "{errors}");
        }
        // It would see a key that is none.
        let (well, errors) = check("misspelt", &text("node").replacen("\"gridPos\"", "\"gridpos\"", 1));
        assert!(!well && errors.contains("gridpos"), "{errors}");
    }

    #[test]
    fn promtool_accepts_the_rules_and_each_alert_is_tested() {
        let Some(promtool) = tool("promtool") else { return };
        let dir = config("prometheus");
        for (verb, file) in [("check", "gpumemd.rules.yml"), ("test", "gpumemd.rules.test.yml")] {
            let (well, text) =
                output_of(Command::new(&promtool).args([verb, "rules", file]).current_dir(&dir));
            assert!(well && text.contains("SUCCESS"), "{text}");
        }
        let rules = std::fs::read_to_string(dir.join("gpumemd.rules.yml")).expect("rules");
        let tests = std::fs::read_to_string(dir.join("gpumemd.rules.test.yml")).expect("tests");
        let reference = std::fs::read_to_string(config("../docs/metrics.md")).expect("the reference");
        let alerts: Vec<&str> = rules.split("- alert: ").skip(1).collect();
        assert!(alerts.len() >= 12);
        for alert in alerts {
            let alert = alert.split("\n\n").next().expect("text");
            let name = alert.lines().next().expect("a name").trim();
            assert!(tests.contains(name), "no test lets {name} fire");
            assert!(reference.contains(&format!("| `{name}` |")), "docs/metrics.md lacks {name}");
            for key in ["severity:", "summary:", "description:", "runbook:"] {
                assert!(alert.contains(key), "{name} has no {key}");
            }
            assert!(alert.contains("for: ") || alert.contains("increase("), "{name} fires at once");
        }
    }
}
