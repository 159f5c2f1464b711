//! Static checks of blocks without commands, and of commands that are not run.

use super::root;
use super::stage::Stage;
use gpumem_tests::markdown::{self, Block};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs a command that must succeed; returns its output as an error.
fn must(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err([output.stdout, output.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .concat()),
    }
}

pub fn parse(stage: &Stage, language: &str, block: &Block) -> Result<(), String> {
    let text = &block.text;
    match language {
        "toml" if text.contains("[[") => {
            fs::write(stage.file("block-rules.toml"), text).expect("written");
            let output = stage.run("node", "gpumemctl report FILE --rules block-rules.toml");
            if output.status.success() { Ok(()) } else { Err(format!("{output:?}")) }
        }
        "toml" => {
            fs::write(stage.file("block.toml"), text).expect("written");
            must(stage.gpumemd().args(["--check", "--config", "block.toml"]))
        }
        "python" => python(stage, block),
        "json" => text.lines().filter(|line| !line.trim().is_empty()).try_for_each(|line| {
            let parsed = serde_json::from_str::<serde_json::Value>(line).or(serde_json::from_str(text));
            parsed.map(drop).map_err(|error| error.to_string())
        }),
        // Lane `prometheus`: `promtool_accepts_queries_and_configurations`.
        "promql" | "yaml" => Ok(()),
        "conf" | "ini" => text.lines().try_for_each(installed),
        "indented" if block.marks.iter().any(|mark| mark.starts_with("promql: run by ")) => Ok(()),
        "indented" => Err("a block without a fence: name its language".into()),
        other => Err(format!("{other:?}: unsupported language of a block")),
    }
}

/// Compiles it, and runs it unless it has a reason not to, or is a file that a command runs.
fn python(stage: &Stage, block: &Block) -> Result<(), String> {
    let check = "import sys; compile(sys.stdin.read(), 'block', 'exec')";
    let is_run = block.mark("not run").is_none() && block.mark("file").is_none();
    if is_run {
        fs::write(stage.file("block.py"), &block.text).expect("written");
        let output = stage.run("node", "gpumemctl run --quiet -- python block.py");
        return if output.status.success() { Ok(()) } else { Err(format!("{output:?}")) };
    }
    let mut child =
        Command::new("python3").args(["-c", check]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.as_mut().map_err(|error| error.to_string())?;
    child.stdin.take().expect("piped").write_all(block.text.as_bytes()).map_err(|error| error.to_string())?;
    let status = child.wait().map_err(|error| error.to_string())?;
    if status.success() { Ok(()) } else { Err("Python does not take it".into()) }
}

/// Queries, as promtool reads them.
pub fn promql(promtool: &Path, stage: &Stage, text: &str) -> Result<(), String> {
    let mut rules = "groups:\n- name: documents\n  rules:\n".to_owned();
    for (at, query) in text.split("\n\n").enumerate() {
        let lines: Vec<&str> = query.lines().filter(|line| !line.starts_with('#')).map(str::trim).collect();
        rules += &format!("  - record: block:{at}\n    expr: {:?}\n", lines.join(" "));
    }
    fs::write(stage.file("block-rules.yml"), rules).expect("written");
    must(Command::new(promtool).args(["check", "rules"]).arg(stage.file("block-rules.yml")))
}

/// A part of Prometheus's configuration.
pub fn scraped(promtool: &Path, stage: &Stage, text: &str) -> Result<(), String> {
    let config = root().join("config");
    let text = text.replace("/usr/share/doc/gpumem", &config.to_string_lossy());
    let whole = match text.starts_with("metric_relabel_configs") {
        true => format!("scrape_configs:\n- job_name: a\n  {}", text.trim_end().replace('\n', "\n  ")),
        false => text,
    };
    fs::write(stage.file("block.yml"), whole).expect("written");
    must(Command::new(promtool).args(["check", "config"]).arg(stage.file("block.yml")))
}

/// `KEY=/etc/slurm/gpumem/FILE` names a file that is shipped.
fn installed(line: &str) -> Result<(), String> {
    let value = line.split('=').nth(1).unwrap_or_default().split_whitespace().next().unwrap_or_default();
    match value.strip_prefix("/etc/slurm/gpumem/") {
        Some(file) if !root().join("config/slurm").join(file).exists() => {
            Err(format!("config/slurm has no {file}"))
        }
        _ => Ok(()),
    }
}

/// Compiles all C fragments, each in its own function.
pub fn compile_c(stage: &Stage, fragments: &[(String, String)]) -> Result<(), String> {
    let mut text = "#include \"gpumem.h\"\n#include <stdio.h>\n".to_owned();
    for (at, (place, fragment)) in fragments.iter().enumerate() {
        let body = fragment.replace("...", "");
        let (file, line) = place.split_once(':').expect("a place");
        text += &format!(
            "void fragment_{at}(uint64_t address, uint64_t bytes, uint32_t stream) {{ (void)address; (void)bytes; (void)stream;\n#line {line} \"{file}\"\n{body}}}\n"
        );
    }
    fs::write(stage.file("fragments.c"), text).expect("written");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu99", "-Wall", "-Werror=implicit-function-declaration", "-fsyntax-only", "-I"])
        .arg(root().join("agent-lib/include"));
    must(cc.arg(stage.file("fragments.c")))
}

/// Checks a command that is not run: its names must exist.
pub fn known(line: &str) -> Result<(), String> {
    for words in markdown::simple(line) {
        let value = |flag: &str| words.iter().position(|word| word == flag).and_then(|at| words.get(at + 1));
        let program = words.iter().find(|word| *word != "sudo").map_or("", String::as_str);
        if program == "make" {
            let targets = words.iter().skip(1).filter(|word| !word.contains('=') && !word.starts_with('-'));
            let makefile = fs::read_to_string(root().join("Makefile")).expect("Makefile");
            for target in targets {
                let exists = makefile.lines().any(|line| line.starts_with(&format!("{target}:")));
                exists.then_some(()).ok_or(format!("make has no {target}"))?;
            }
        }
        if let (true, Some(folder)) = (program == "kubectl", value("-k")) {
            let file = root().join(folder).join("kustomization.yaml");
            file.exists().then_some(()).ok_or(format!("no {}", file.display()))?;
        }
        if let (true, Some(test)) = (program == "cargo", value("--test")) {
            (test == "suite").then_some(()).ok_or(format!("no test program {test}"))?;
        }
        if program == "systemctl" {
            let units = words.iter().skip(2).filter(|word| !word.starts_with('-'));
            for unit in units {
                let file = root().join(format!("systemd/{}.service", unit.trim_end_matches(".service")));
                file.exists().then_some(()).ok_or(format!("no {}", file.display()))?;
            }
        }
        for word in &words {
            path(word)?;
        }
    }
    Ok(())
}

/// Returns whether a path exists in the project or is installed by a package.
fn path(word: &str) -> Result<(), String> {
    let ours = ["config/", "docs/", "examples/", "packaging/", "systemd/", "tests/", "agent-lib/"];
    for part in word.split(['=', ',', ':', '@']) {
        let installed = part.strip_prefix("/usr/share/doc/gpumem/").map(|rest| format!("config/{rest}"));
        let named =
            installed.or_else(|| ours.iter().any(|folder| part.starts_with(folder)).then(|| part.to_owned()));
        let Some(named) = named else { continue };
        let exists = match named.split_once('*') {
            None => {
                root().join(&named).exists()
                    || root().join(named.replacen("config/systemd", "systemd/drop-ins", 1)).exists()
            }
            Some((before, after)) => {
                let (folder, _) = before.rsplit_once('/').expect("a folder");
                let mut files = fs::read_dir(root().join(folder)).into_iter().flatten().flatten();
                files.any(|file| file.file_name().to_string_lossy().ends_with(after))
            }
        };
        exists.then_some(()).ok_or(format!("there is no {named}"))?;
    }
    Ok(())
}
