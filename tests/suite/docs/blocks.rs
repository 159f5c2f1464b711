//! Every block of code in README.md and docs/ is run, parsed, or has a stated reason for neither.
//!
//! ```text
//! ```sh               run; `<!-- on: oom -->` before it sets where, `<!-- ends with: 8 -->` its exit code
//! ```console          each `$ ` line is run, and the text that follows is compared with its output
//! ```text             after a block of commands: compared with their output; elsewhere plain text
//! <!-- not run: why --> <!-- shown only: why -->     reason why a block is not run, or not compared
//! <!-- file: NAME -->   the block is a file for later commands
//! ```c ```python ```toml ```yaml ```promql ```json ```conf ```ini    compiled, run, or parsed
//! ```

use super::stage::Stage;
use super::{checks, root};
use gpumem_tests::markdown::{self, Block};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Results of the blocks.
#[derive(Default)]
pub struct Totals {
    run: usize,
    compared: usize,
    parsed: usize,
    /// The reason, and the lines.
    not_run: BTreeMap<String, Vec<String>>,
    wrong: Vec<String>,
    fragments: Vec<(String, String)>,
}

pub fn all() {
    let stage = Stage::new();
    let mut totals = Totals::default();
    for name in documents() {
        let text = fs::read_to_string(root().join(&name)).expect("a document");
        document(&stage, &name, &text, &mut totals);
    }
    if let Err(why) = checks::compile_c(&stage, &totals.fragments) {
        totals.wrong.push(why);
    }
    let not_run: usize = totals.not_run.values().map(Vec::len).sum();
    println!(
        "{} command lines run, {} shown outputs compared, {} other blocks parsed",
        totals.run, totals.compared, totals.parsed
    );
    println!("{not_run} command lines not run, looked at only:");
    for (why, lines) in &totals.not_run {
        println!("  {why}");
        lines.iter().for_each(|line| println!("    {line}"));
    }
    assert!(totals.wrong.is_empty(), "{}", totals.wrong.join("\n"));
    assert!(totals.run >= 75 && not_run * 2 <= totals.run, "{} run, {not_run} not run", totals.run);
}

/// Blocks of PromQL and of Prometheus's configuration, as promtool reads them.
pub fn of_prometheus(promtool: &Path) {
    let stage = Stage::new();
    let (mut wrong, mut count) = (Vec::new(), 0);
    for name in documents() {
        let text = fs::read_to_string(root().join(&name)).expect("a document");
        for block in markdown::blocks(&text) {
            let checked = match block.language.as_str() {
                "promql" => checks::promql(promtool, &stage, &block.text),
                "yaml" => checks::scraped(promtool, &stage, &block.text),
                _ => continue,
            };
            count += 1;
            wrong.extend(checked.err().map(|why| format!("{name}:{}: {why}", block.line)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 0, "no page shows any");
}

/// Each page has a line in docs/README.md, and each link has an existing target.
pub fn links() {
    let index = fs::read_to_string(root().join("docs/README.md")).expect("an index");
    let mut wrong = Vec::new();
    for name in documents() {
        let text = fs::read_to_string(root().join(&name)).expect("a document");
        let page = name.strip_prefix("docs/").unwrap_or("README.md");
        if page != "README.md" && !index.contains(&format!("]({page})")) {
            wrong.push(format!("docs/README.md has no line for {page}"));
        }
        let folder = root().join(&name).parent().expect("a folder").to_owned();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or_default();
            if !link.contains("://") && !file.is_empty() && !folder.join(file).exists() {
                wrong.push(format!("{name}: there is no {link}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn documents() -> Vec<String> {
    let mut found = vec!["README.md".to_owned()];
    let docs = fs::read_dir(root().join("docs")).expect("docs").flatten();
    let names = docs.map(|entry| entry.file_name().to_string_lossy().into_owned());
    found.extend(names.filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}")));
    found.sort();
    found
}

fn document(stage: &Stage, name: &str, text: &str, totals: &mut Totals) {
    let mut before = None::<Printed>;
    for block in markdown::blocks(text) {
        let place = format!("{name}:{}", block.line);
        let printed = before.take().filter(|printed| printed.ends_at + 6 >= block.line);
        if let Err(why) = one(stage, &place, &block, printed, totals, &mut before) {
            totals.wrong.push(format!("{place}: {why}"));
        }
    }
}

/// Output of a block of commands, and the line of its end.
struct Printed {
    output: String,
    ends_at: usize,
}

fn one(
    stage: &Stage,
    place: &str,
    block: &Block,
    printed: Option<Printed>,
    totals: &mut Totals,
    next: &mut Option<Printed>,
) -> Result<(), String> {
    if let Some(file) = block.mark("file") {
        fs::write(stage.file(file), &block.text).map_err(|error| error.to_string())?;
    }
    let is_console = block.language == "console" || block.text.starts_with("$ ");
    let shown_only = block.mark("shown only").is_some();
    match block.language.as_str() {
        _ if is_console && !shown_only => console(stage, block, totals),
        "sh" => {
            *next = commands(stage, block, totals)?;
            Ok(())
        }
        "text" => match printed {
            Some(printed) if !shown_only => {
                totals.compared += 1;
                agree(&block.text.lines().map(str::to_owned).collect::<Vec<_>>(), &printed.output)
            }
            _ => Ok(()),
        },
        "c" => {
            let is_whole = block.mark("file").is_some();
            totals.parsed += 1;
            if !is_whole {
                totals.fragments.push((place.to_owned(), block.text.clone()));
            }
            Ok(())
        }
        language => {
            totals.parsed += 1;
            checks::parse(stage, language, block)
        }
    }
}

fn commands(stage: &Stage, block: &Block, totals: &mut Totals) -> Result<Option<Printed>, String> {
    let lines = markdown::commands(block);
    if let Some(why) = block.mark("not run") {
        let all = totals.not_run.entry(why.to_owned()).or_default();
        all.extend(lines.iter().map(|line| line.command.clone()));
        lines.iter().try_for_each(|line| checks::known(&line.command))?;
        return Ok(None);
    }
    totals.run += lines.len();
    let output = stage.run(block.mark("on").unwrap_or("node"), &block.text);
    let output = ended(&block.text, &output, block)?;
    Ok(Some(Printed { output, ends_at: block.line + block.text.lines().count() }))
}

fn console(stage: &Stage, block: &Block, totals: &mut Totals) -> Result<(), String> {
    for shown in markdown::commands(block) {
        totals.run += 1;
        let output = stage.run(block.mark("on").unwrap_or("node"), &shown.command);
        let output = ended(&shown.command, &output, block)?;
        if !shown.output.is_empty() {
            totals.compared += 1;
            agree(&shown.output, &output)?;
        }
    }
    Ok(())
}

/// Returns the output if the exit status is as expected.
fn ended(what: &str, output: &Output, block: &Block) -> Result<String, String> {
    let wanted = block.mark("ends with").map_or(0, |code| code.parse().unwrap_or(-1));
    let printed = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    let printed = printed.concat();
    match output.status.code() == Some(wanted) {
        true => Ok(printed),
        false => Err(format!("{what}ended with {} and not {wanted}:\n{printed}", output.status)),
    }
}

/// Compares loosely: each shown line must begin like one of the output, with the same two words (one, if it ends in a
/// colon) before any number. `...` matches anything, and user names in documents match the current user.
fn agree(shown: &[String], printed: &str) -> Result<(), String> {
    let user = Command::new("id").arg("-un").output().map(|output| output.stdout).unwrap_or_default();
    let user = String::from_utf8_lossy(&user).trim().to_owned();
    let begins = |line: &str| {
        let words = line.split(|letter: char| letter.is_ascii_digit() || "~$".contains(letter)).next();
        let mut begin = String::new();
        for word in words.unwrap_or_default().split_whitespace().filter(|word| *word != "-").take(2) {
            let is_user = ["ana", "alice", "bob"].contains(&word);
            if is_user && user.starts_with(|letter: char| letter.is_ascii_digit()) {
                break; // a user without a name is shown by number
            }
            let word = if is_user { &user } else { word };
            begin = format!("{begin} {word}");
            if word.ends_with(':') {
                break;
            }
        }
        begin
    };
    let known: Vec<String> = printed.lines().map(begins).collect();
    for line in shown {
        let begin = begins(line);
        if !begin.is_empty() && begin != " ..." && !known.contains(&begin) {
            return Err(format!("no line of the output begins with{begin}, as shown: {line:?}\n{printed}"));
        }
    }
    Ok(())
}
