//! docs/troubleshooting.md: its table of checks is the program's, and the ids that it names exist. Its commands run in docs.rs.
use gpumem_model::checks::Check;
use std::path::{Path, PathBuf};

const FROM: &str = "<!-- checks: UPDATE_GOLDEN=1 writes this table from model/src/checks.rs -->\n";
const TO: &str = "<!-- end -->";

fn document() -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/troubleshooting.md");
    let text = std::fs::read_to_string(&path).expect("docs/troubleshooting.md");
    (path, text)
}

#[test]
fn check_table_matches_the_program() {
    let (path, text) = document();
    let rows = Check::ALL.iter().map(|check| format!("| `{}` | {} |\n", check.id(), check.about()));
    let table = format!("| id | checks |\n|---|---|\n{}", rows.collect::<String>());
    let (before, rest) = text.split_once(FROM).expect("a place for the table");
    let (shown, after) = rest.split_once(TO).expect("its end");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, format!("{before}{FROM}{table}{TO}{after}")).expect("written");
        return;
    }
    assert_eq!(shown, table, "UPDATE_GOLDEN=1 writes it");
}

#[test]
fn named_check_ids_exist() {
    let (_, text) = document();
    let families = [
        "agent",
        "daemon",
        "driver",
        "gpu",
        "metrics",
        "namespace",
        "nvml",
        "process",
        "processes",
        "sockets",
        "store",
    ];
    // Keys of the configuration look alike.
    let config = ["metrics.listen", "agent.rows_per_process"];
    for word in text.split('`').skip(1).step_by(2).filter(|word| !config.contains(word)) {
        let is_id = word.split_once('.').is_some_and(|(family, rest)| {
            families.contains(&family) && rest.bytes().all(|byte| byte.is_ascii_lowercase())
        });
        assert!(!is_id || Check::ALL.iter().any(|check| check.id() == word), "there is no check {word}");
    }
}
