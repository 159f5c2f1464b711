//! Tests that docs/reference-cli.md matches the argument parser, and that the parser accepts every `gpumemctl` command in the
//! documents.

#[path = "../../tests/src/markdown.rs"]
mod markdown;

use crate::args::Cli;
use clap::{Arg, ArgAction, Command, CommandFactory, Parser};
use std::fmt::Write;
use std::path::{Path, PathBuf};

const HEAD: &str = "# Every command of gpumemctl

<!-- made by ctl/src/reference.rs from the argument parser: UPDATE_GOLDEN=1 -->

The same is in `gpumemctl COMMAND --help` and in the manual pages of the package (`man gpumemctl-report`). `--help` and
`--version` work with every command. Options may stand before or after arguments; `--` ends them. A wrong command line ends with exit
code 2 and the reason. Environment variables: [reference-environment.md](reference-environment.md); the daemon's own options:
[reference-config.md](reference-config.md).
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// Returns an argument as the user types it.
fn typed(arg: &Arg) -> String {
    let values: String =
        arg.get_value_names().unwrap_or_default().iter().map(|name| name.to_string()).collect();
    let takes = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let is_optional = arg.get_num_args().is_some_and(|range| range.min_values() == 0);
    let value = match (takes, is_optional) {
        (false, _) => String::new(),
        (true, true) => format!(" [{values}]"),
        (true, false) => format!(" {values}"),
    };
    let names = arg.get_short().map(|short| format!("-{short}")).into_iter();
    let names = names.chain(arg.get_long().map(|long| format!("--{long}")));
    let names = names
        .chain(arg.get_visible_aliases().unwrap_or_default().into_iter().map(|alias| format!("--{alias}")));
    let names: Vec<String> = names.map(|name| format!("`{name}{value}`")).collect();
    match names.is_empty() {
        false => names.join(", "),
        true if arg.is_required_set() => format!("`{values}`"),
        true => format!("`[{values}]`"),
    }
}

fn cell(text: impl std::fmt::Display) -> String {
    text.to_string().replace('\n', " ").replace('|', "\\|")
}

fn row(command: &Command, arg: &Arg, out: &mut String) {
    let mut about = arg.get_help().map(|help| cell(help.to_string())).unwrap_or_default();
    let known: Vec<String> =
        arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    let takes = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    if takes && !known.is_empty() {
        write!(about, ". One of {}", known.join(", ")).expect("a String");
    }
    let default: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if takes && !default.is_empty() {
        write!(about, ". Default: `{}`", default.join(" ")).expect("a String");
    }
    let mut against: Vec<String> = command.get_arg_conflicts_with(arg).into_iter().map(typed_name).collect();
    against.sort();
    against.dedup();
    if !against.is_empty() {
        write!(about, ". Not with {}", against.join(", ")).expect("a String");
    }
    writeln!(out, "| {} | {about} |", cell(typed(arg))).expect("a String");
}

fn typed_name(arg: &Arg) -> String {
    match arg.get_long() {
        Some(long) => format!("`--{long}`"),
        None => typed(arg),
    }
}

fn section(command: &Command, name: &str, out: &mut String) {
    let commands: Vec<&Command> =
        command.get_subcommands().filter(|command| !command.is_hide_set()).collect();
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    if commands.is_empty() {
        write!(out, "\n## {name}\n\n{about}.\n\n").expect("a String");
        let usage = command.clone().render_usage().to_string();
        write!(out, "```text\n{}\n```\n\n", usage.trim_start_matches("Usage: ")).expect("a String");
        out.push_str("| | |\n|---|---|\n");
        let shown = |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version");
        let (options, words): (Vec<&Arg>, Vec<&Arg>) =
            command.get_arguments().filter(shown).partition(|arg| arg.get_long().is_some());
        words.into_iter().chain(options).for_each(|arg| row(command, arg, out));
        if let Some(help) = command.get_after_help().map(ToString::to_string) {
            let (examples, codes) = help.split_once("\n\n").expect("examples, then exit codes");
            let examples = examples.trim_start_matches("Examples:\n").replace("\n  ", "\n");
            write!(out, "\n```text\n{}\n```\n\n{codes}.\n", examples.trim()).expect("a String");
        }
    }
    for command in commands {
        section(command, &format!("{name} {}", command.get_name()), out);
    }
}

#[test]
fn the_page_is_what_the_parser_has() {
    let mut cli = crate::args::command();
    cli.build();
    let mut fresh = HEAD.to_owned();
    section(&cli, "gpumemctl", &mut fresh);
    let path = root().join("docs/reference-cli.md");
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        std::fs::write(&path, &fresh).expect("written");
    }
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let stale = text.lines().zip(fresh.lines()).find(|(old, new)| old != new);
    assert!(
        text == fresh,
        "UPDATE_GOLDEN=1 writes docs/reference-cli.md anew; the first difference: {stale:#?}"
    );
}

/// Replaces a placeholder in a document by a value.
fn meant(word: &str) -> String {
    let stands_for = [
        ("PID", "4711"),
        ("A", "r7"),
        ("B", "r9"),
        ("RUN", "r7"),
        ("FILE", "./file"),
        ("N", "1"),
        ("ID", "8812"),
        ("$SLURM_JOB_ID", "8812"),
        ("A:B", "100:110"),
        ("TIME", "1h"),
    ];
    stands_for.iter().find(|(name, _)| *name == word).map_or(word, |(_, typed)| typed).to_owned()
}

/// Returns the command lines that usage notation stands for: without and with `[X]`, for each word of `A|B`. Drops `...`.
fn usages(code: &str) -> Vec<String> {
    let code = code.replace(" ...", "").replace("...", "");
    let (Some(open), Some(close)) = (code.find(" ["), code.find(']')) else {
        let Some(at) = code.split(' ').position(|word| word.contains('|') && word != "|" && word != "||")
        else {
            return vec![code];
        };
        let words: Vec<&str> = code.split(' ').collect();
        let either = words[at].split('|').map(|word| {
            let mut words = words.clone();
            words[at] = word;
            words.join(" ")
        });
        return either.flat_map(|code| usages(&code)).collect();
    };
    let (before, inside, after) = (&code[..open], &code[open + 2..close], &code[close + 1..]);
    [format!("{before}{after}"), format!("{before} {inside}{after}")]
        .iter()
        .flat_map(|code| usages(code))
        .collect()
}

fn lacks_a_value(error: &clap::Error) -> bool {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let given =
        |value: Option<&ContextValue>| matches!(value, Some(ContextValue::String(text)) if !text.is_empty());
    match error.kind() {
        ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => true,
        ErrorKind::InvalidValue => !given(error.get(ContextKind::InvalidValue)),
        _ => false,
    }
}

/// Returns whether the command has every named option.
fn options_exist(arguments: &[String]) -> bool {
    let cli = Cli::command();
    let words = arguments.iter().take_while(|word| !word.starts_with('-'));
    let command = words.fold(&cli, |command, word| command.find_subcommand(word).unwrap_or(command));
    let options =
        arguments.iter().take_while(|word| *word != "--").filter_map(|word| word.strip_prefix("--"));
    { options }.all(|name| {
        command.get_arguments().any(|arg| {
            arg.get_long() == Some(name) || arg.get_visible_aliases().unwrap_or_default().contains(&name)
        })
    })
}

fn documents() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        ["README.md", "ARCHITECTURE.md", "SECURITY.md", "examples/README.md", "agent-lib/python/README.md"]
            .map(|name| root().join(name))
            .into();
    let docs = std::fs::read_dir(root().join("docs")).expect("docs").flatten().map(|entry| entry.path());
    found.extend(docs.filter(|path| path.extension().is_some_and(|ending| ending == "md")));
    found.sort();
    found
}

#[test]
fn every_command_line_of_the_documents_is_taken() {
    let (mut taken, mut wrong) = (0, Vec::new());
    // Inline code may be the name of an option instead of a whole command.
    let mut parse = |path: &Path, line: usize, code: &str, is_whole: bool| {
        for words in markdown::simple(code) {
            let Some(arguments) = markdown::called(&words, "gpumemctl") else { continue };
            if arguments.is_empty() || arguments.iter().any(|word| word == "COMMAND" && arguments.len() == 2)
            {
                continue; // only the program's name, or `gpumemctl COMMAND --help`
            }
            let typed =
                std::iter::once("gpumemctl".to_owned()).chain(arguments.iter().map(|word| meant(word)));
            match Cli::try_parse_from(typed) {
                Ok(_) => taken += 1,
                Err(error) if !error.use_stderr() => taken += 1, // --help
                Err(error) if !is_whole && lacks_a_value(&error) && options_exist(arguments) => taken += 1,
                Err(error) => {
                    let error = error.to_string();
                    let why = error.lines().next().unwrap_or_default().to_owned();
                    wrong.push(format!("{}:{line}: {code}\n    {why}", path.display()));
                }
            }
        }
    };
    for path in documents() {
        let text = std::fs::read_to_string(&path).expect("a document");
        for block in markdown::blocks(&text) {
            let is_text = block.language == "text" && block.text.starts_with("$ ");
            if is_text || ["sh", "console"].contains(&block.language.as_str()) {
                let lines = markdown::commands(&block);
                lines.iter().for_each(|shown| parse(&path, shown.line, &shown.command, true));
            }
        }
        for (line, code) in markdown::inline(&text) {
            usages(&code).iter().for_each(|code| parse(&path, line, code, false));
        }
    }
    println!("{taken} command lines");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(taken > 150, "only {taken} command lines were found");
}
