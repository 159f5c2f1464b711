//! Reference pages generated from the source: the C API from its header, Python's from its docstrings, variables from the
//! tables that the programs use. `UPDATE_GOLDEN=1` updates them.

use super::root;
use std::fmt::Write;
use std::process::Command;

/// Compares `docs/NAME` with its expected text, or updates it.
fn check(name: &str, fresh: &str) {
    let path = root().join("docs").join(name);
    if gpumem_tests::golden::update() {
        std::fs::write(&path, fresh).expect("written");
    }
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let stale = text.lines().zip(fresh.lines()).find(|(old, new)| old != new);
    assert!(text == fresh, "UPDATE_GOLDEN=1 writes docs/{name} anew; the first difference: {stale:#?}");
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

const C_HEAD: &str = "# Every call of the C API

<!-- made by tests/suite/docs/references.rs from agent-lib/include/gpumem.h: UPDATE_GOLDEN=1 -->

After this page you know every call with its units and errors. By task: [c-api.md](c-api.md); a complete program:
[guide-framework.md](guide-framework.md).
";
const LOCKS: &str = "Takes locks.";

/// The text of a C comment, with its indented lines as they are.
fn comment(text: &str) -> String {
    let lines = text.trim_start_matches("/*").trim_end_matches("*/").lines();
    let plain =
        lines.map(|line| line.strip_prefix(" * ").or(line.strip_prefix(" *")).unwrap_or(line).trim_end());
    let (mut out, mut in_code) = (String::new(), false);
    for line in plain {
        let line = if out.is_empty() { line.trim_start() } else { line };
        let is_code = line.starts_with("    ") || (in_code && line.starts_with("  "));
        if is_code != in_code {
            out += if is_code { "```text\n" } else { "```\n" };
            in_code = is_code;
        }
        out += line.strip_prefix("    ").unwrap_or(line);
        out.push('\n');
    }
    out.trim_end().to_owned() + if in_code { "\n```" } else { "" }
}

pub fn c_api() {
    let header = read("agent-lib/include/gpumem.h");
    let intro = header.split("*/").next().expect("an introduction");
    let mut text = C_HEAD.to_owned();
    let (mut enums, mut calls, mut table) = (String::new(), String::new(), String::new());
    let mut count = 0;
    for part in header.split("\n/* ").skip(1) {
        let Some((about, rest)) = part.split_once("*/\n") else { continue };
        if about.starts_with("Internal:") || rest.starts_with('#') {
            continue;
        }
        let about = comment(&format!("/* {about}*/"));
        if let Some(body) = rest.strip_prefix("enum ") {
            let (name, values) = body.split_once(" {").expect("values");
            let values = values
                .split('}')
                .next()
                .unwrap_or_default()
                .split(',')
                .map(str::trim)
                .filter(|one| !one.is_empty());
            let values: Vec<String> =
                values.map(|one| format!("`{}`", one.replace(" = ", "` ")).replace('`', "`")).collect();
            let values: Vec<String> = values.iter().map(|one| one.trim_end_matches('`').to_owned()).collect();
            write!(enums, "\n`enum {name}`: {about}\n{}\n", values.join(", ")).expect("a String");
        } else if let Some(body) = rest.strip_prefix("static inline ") {
            let signature = body.split(" {").next().expect("a signature");
            let name =
                signature.split('(').next().unwrap_or_default().rsplit([' ', '*']).next().unwrap_or_default();
            let safe = if about.replace('\n', " ").contains(LOCKS) { "no" } else { "yes" };
            writeln!(table, "| [`{name}`](#{name}) | {safe} | {} |", first_sentence(&about))
                .expect("a String");
            let about = about.replace('\n', " \n").replace(" \n", "\n");
            write!(calls, "\n### {name}\n\n```c\n{signature};\n```\n\n{about}\n").expect("a String");
            count += 1;
        } else if rest.starts_with("class scope") {
            write!(calls, "\n### gpumem::scope\n\nC++ alone. {about}\n").expect("a String");
        }
    }
    let declared = header.matches("\nstatic inline ").count() - 3; // the internal ones
    assert_eq!(count, declared, "a call without a comment before it");
    write!(text, "\n{}\n", comment(intro)).expect("a String");
    text += "\n## The calls\n\n| call | in a signal handler | |\n|---|---|---|\n";
    text += &table;
    text += &calls;
    text += "\n## Numbers\n";
    text += &enums;
    check("reference-c.md", &text);
}

fn first_sentence(about: &str) -> String {
    let line = about.split("\n```").next().unwrap_or_default().replace('\n', " ");
    let end = line
        .match_indices(['.', ';'])
        .map(|(at, _)| at)
        .find(|&at| line[at + 1..].is_empty() || line[at + 1..].starts_with(' '));
    line[..end.unwrap_or(line.len())].replace('|', "\\|")
}

pub fn python_api() {
    let script = root().join("tests/suite/docs/python_api.py");
    let output = Command::new("python3").arg(script).arg(root().join("agent-lib/python/gpumem")).output();
    let Ok(output) = output else {
        gpumem_test_support::skip("there is no python3 here", "apt-get install python3");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    check("reference-python.md", &String::from_utf8(output.stdout).expect("UTF-8"));
}

const ENVIRONMENT_HEAD: &str = "# Every environment variable

<!-- made by tests/suite/docs/references.rs from agent-lib/src/base/env.rs and ctl/src/command/generate.rs: UPDATE_GOLDEN=1 -->

After this page you know every variable of the agent, the programs and the Python package. An empty variable counts as unset. Keys of
the daemon: [reference-config.md](reference-config.md).
";

/// Text of `///` comments before constants, by constant, in order: `(constant, variable, text)`.
fn constants(source: &str) -> Vec<(String, String, String)> {
    let (mut found, mut about) = (Vec::new(), Vec::new());
    for line in source.lines() {
        if let Some(text) = line.strip_prefix("/// ") {
            about.push(text.to_owned());
        } else if let Some(rest) =
            line.strip_prefix("pub(crate) const ").filter(|rest| rest.contains(": &str = \""))
        {
            let (name, rest) = rest.split_once(':').expect("a name");
            let value = rest.split('"').nth(1).expect("a value");
            found.push((name.to_owned(), value.to_owned(), about.join(" ")));
            about.clear();
        } else {
            about.clear();
        }
    }
    found
}

/// Variables of tests and debug builds.
const ONLY_IN_TESTS: [&str; 2] = ["GPUMEM_FUZZ", "GPUMEM_FAULT"];

pub fn environment() {
    let agent = read("agent-lib/src/base/env.rs");
    let mut text = ENVIRONMENT_HEAD.to_owned();
    text += "\n## The agent\n\nRead once in each process, when CUDA is initialised.\n\n| variable | |\n|---|---|\n";
    for (name, variable, about) in constants(&agent) {
        let mut about = about.replace('|', "\\|");
        // `number(NAME, default, least, most)`
        if let Some((_, rest)) = agent.split_once(&format!("number({name}, ")) {
            let numbers: Vec<u64> =
                rest.split(')').next().unwrap_or_default().split(", ").map(amount).collect();
            write!(about, " Default: {}; from {} to {}", numbers[0], numbers[1], numbers[2])
                .expect("a String");
        }
        writeln!(text, "| `{variable}` | {about} |").expect("a String");
    }
    text += "\nWithout `GPUMEM_SOCKET` the agent tries `$XDG_RUNTIME_DIR/gpumem/agent.sock`, `/run/gpumemd/agent.sock` and \
             `/tmp/gpumem-UID/agent.sock`; without `GPUMEM_CUPTI_PATH` it also searches libcupti in `$CUDA_HOME`, `$CUDA_PATH`, \
             `$CUDA_ROOT` and `$CONDA_PREFIX`.\n\nClaims, sent to the daemon unchanged ([who.md](who.md)): ";
    let claims = agent.split("const CLAIMS").nth(1).and_then(|rest| rest.split("];").next()).expect("claims");
    let claims = claims.lines().filter_map(|line| line.trim().strip_suffix("\"),")?.rsplit('"').next());
    let ranks = agent.split("const RANKS").nth(1).and_then(|rest| rest.split("];").next()).expect("ranks");
    let ranks = ranks.split('"').skip(1).step_by(2);
    let names: Vec<String> = claims.chain(ranks).map(|name| format!("`{name}`")).collect();
    text += &names.join(", ");
    text += ".\n\n## gpumemctl\n\n| variable | |\n|---|---|\n";
    let generate = read("ctl/src/command/generate.rs");
    let table =
        generate.split("const ENVIRONMENT").nth(1).and_then(|rest| rest.split("];").next()).expect("a table");
    for row in table.split("(\"").skip(1) {
        let (name, rest) = row.split_once("\", \"").expect("a name");
        let about = rest.split("\")").next().unwrap_or_default();
        writeln!(text, "| `{name}` | {about} |").expect("a String");
    }
    text += "| `XDG_RUNTIME_DIR`, `XDG_STATE_HOME`, `HOME` | Places of the sockets and runs of a private daemon. |\n";
    text += "| `NO_COLOR`, `TERM`, `LANG`, `LC_ALL` | Display of `top`: docs/top.md. |\n";
    text += "| `TZ` | Time zone of typed and printed clock times. |\n";
    text += "\n## The Python package\n\nThe agent's variables, and `GPUMEM_LIBRARY`: the libgpumem.so to load in place of the wheel's.\n";
    for folder in [
        "agent-lib/src",
        "daemon/src",
        "ctl/src",
        "runs/src",
        "report/src",
        "import/src",
        "agent-lib/python/gpumem",
    ] {
        for name in used(&root().join(folder)) {
            assert!(
                text.contains(&format!("`{name}`")) || ONLY_IN_TESTS.contains(&name.as_str()),
                "{folder} reads {name}, which has no line"
            );
        }
    }
    check("reference-environment.md", &text);
}

fn amount(text: &str) -> u64 {
    let (base, shift) = text.split_once(" << ").unwrap_or((text, "0"));
    base.parse::<u64>().expect("a number") << shift.parse::<u32>().expect("a number")
}

/// Returns the GPUMEM_ variables that the sources in a folder use.
fn used(folder: &std::path::Path) -> Vec<String> {
    let mut found = Vec::new();
    for path in std::fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            found.extend(used(&path));
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            let names = text.split("\"GPUMEM_").skip(1).filter_map(|rest| rest.split('"').next());
            let is_name = |name: &&str| {
                name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
            };
            found.extend(names.filter(is_name).map(|name| format!("GPUMEM_{name}")));
        }
    }
    found
}
