//! `gpumemctl candidates -- WORDS...`: prints the words that can complete a command line: pids, runs, jobs, tags, and words of
//! `explain`. The command is hidden; the completion scripts of `gpumemctl generate` call it.
//!
//! Each line is a word, and optionally a tab and a description. Errors and slow replies end the list silently, because a shell
//! waits for it while a user types.

use super::explain::largest;
use crate::args::{self, Candidates};
use crate::client::Daemon;
use crate::output::print;
use anyhow::Result;
use clap::{Arg, Command};
use gpumem_model::time::date_minute;
use gpumem_report::table::shorten_middle;
use gpumem_report::text::{command_line, escape};
use gpumem_runs::store::{Filter, Store};
use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::Duration;

/// Time after which the list ends without the candidates that are not known yet.
const TIMEOUT: Duration = Duration::from_millis(500);
const MOST: usize = 200;
/// Maximum width of a description, in columns of the terminal.
const DESCRIPTION: usize = 60;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Pid,
    Run,
    Job,
    Word,
    Tag,
}

/// Prints the candidates for the last of the words.
pub(crate) fn run(args: &Candidates) -> Result<()> {
    let words: Vec<String> = args.words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let Some((current, before)) = words.split_last() else { return Ok(()) };
    let current = &without_backslashes(current);
    let mut parser = args::command();
    parser.build();
    let (send, receive) = mpsc::channel();
    for kind in kinds(&parser, before) {
        let send = send.clone();
        // A thread that is still waiting for a reply ends with the process.
        std::thread::spawn(move || send.send((kind as u8, candidates(kind))));
    }
    drop(send);
    let mut found = Vec::new();
    let end = std::time::Instant::now() + TIMEOUT;
    while let Ok(of_kind) = receive.recv_timeout(end.saturating_duration_since(std::time::Instant::now())) {
        found.push(of_kind);
    }
    found.sort_by_key(|(kind, _)| *kind);
    let candidates = found.into_iter().flat_map(|(_, candidates)| candidates);
    let lines = candidates.filter_map(|candidate| line(&candidate, current));
    print(&lines.take(MOST).collect::<String>())
}

/// Returns the text of a word as typed in a shell, where a backslash precedes blanks and special characters.
fn without_backslashes(typed: &str) -> String {
    let mut characters = typed.chars();
    let next = || match characters.next() {
        Some('\\') => characters.next(),
        other => other,
    };
    std::iter::from_fn(next).collect()
}

/// Returns the line of a candidate; `None` if it does not begin with the typed text, or if the shell would show other
/// characters than it has.
fn line((word, about): &(String, String), typed: &str) -> Option<String> {
    let is_clean = !word.is_empty() && escape(word) == *word;
    if !is_clean || !word.starts_with(typed) {
        return None;
    }
    let about = escape(&shorten_middle(about, DESCRIPTION));
    Some(if about.is_empty() { format!("{word}\n") } else { format!("{word}\t{about}\n") })
}

/// Returns what the word after `before` can be, according to the argument parser, which must be built.
fn kinds(parser: &Command, before: &[String]) -> Vec<Kind> {
    let Some((name, rest)) = before.split_first() else { return Vec::new() };
    let Some(command) = parser.find_subcommand(name) else { return Vec::new() };
    let takes_value = |word: &str| {
        let long = word.strip_prefix("--").filter(|name| !name.contains('='));
        let short = word.strip_prefix('-').and_then(|name| name.chars().next().filter(|_| name.len() == 1));
        command.get_opts().find(|arg| {
            long.is_some_and(|name| arg.get_long() == Some(name))
                || short.is_some() && arg.get_short() == short
        })
    };
    let mut positionals = 0;
    let mut words = rest.iter();
    while let Some(word) = words.next() {
        match takes_value(word) {
            Some(option) if words.len() == 0 => return kinds_of(name, option),
            Some(_) => _ = words.next(),
            None => positionals += usize::from(!word.starts_with('-')),
        }
    }
    let arg = command.get_positionals().nth(positionals).or(command.get_positionals().last());
    arg.map(|arg| kinds_of(name, arg)).unwrap_or_default()
}

/// Returns what the value of an argument can be. `command` is the name of its command.
fn kinds_of(command: &str, arg: &Arg) -> Vec<Kind> {
    let value = arg.get_value_names().and_then(|names| names.first()).map(|name| name.as_str());
    match (command, arg.get_id().as_str()) {
        (_, "job") | ("job", "id") if value == Some("ID") => vec![Kind::Job],
        ("diff", "of") => vec![Kind::Tag],
        ("explain", "word") => vec![Kind::Word, Kind::Tag],
        ("diff", "a" | "b") | ("report", "more") => vec![Kind::Pid, Kind::Run],
        _ => {
            let parts = value.unwrap_or_default().split('|');
            let kind = |part: &str| match part {
                "PID" => Some(Kind::Pid),
                "RUN" => Some(Kind::Run),
                _ => None,
            };
            parts.filter_map(kind).collect()
        }
    }
}

/// Returns the candidates of a kind, each with a description.
fn candidates(kind: Kind) -> Vec<(String, String)> {
    let described = |word: &str| (word.to_owned(), String::new());
    match kind {
        Kind::Pid => processes(|row| {
            let command = row.command.as_deref().map(|command| command_line(command, DESCRIPTION));
            (row.pid != 0).then(|| (row.pid.to_string(), command.unwrap_or_default()))
        }),
        Kind::Job => processes(|row| row.who.get("job").map(|job| described(job))),
        Kind::Run => runs().unwrap_or_default(),
        Kind::Word => gpumem_report::explain::titles().map(described).collect(),
        Kind::Tag => {
            let run = largest(&args::DataSource::default()).map(|(run, _)| run);
            let cells = run.into_iter().flat_map(|run| run.cells);
            let tags: BTreeSet<String> = cells.filter_map(|cell| cell.tag).collect();
            tags.iter().map(|tag| described(tag)).collect()
        }
    }
}

/// Returns what `candidate` makes of the rows of `ps`, each word once.
fn processes(
    candidate: impl Fn(&gpumem_model::control::ProcessRow) -> Option<(String, String)>,
) -> Vec<(String, String)> {
    let ps = Daemon::find(None).ok().and_then(|daemon| daemon.with_max_timeout(TIMEOUT).ps().ok());
    let rows = ps.map(|ps| ps.processes).unwrap_or_default();
    let mut seen = BTreeSet::new();
    let candidates = rows.iter().filter_map(candidate).filter(|(word, _)| seen.insert(word.clone()));
    candidates.collect()
}

/// Returns the newest runs of the store.
fn runs() -> Result<Vec<(String, String)>> {
    let store = Store::open_read_only(args::StorePath::default().readable()?)?;
    let runs = store.select(&Filter { limit: Some(MOST), ..Filter::default() })?;
    let described = runs.iter().map(|listed| {
        let command = command_line(&listed.run.label, DESCRIPTION);
        (listed.run.id.to_string(), format!("{}  {command}", date_minute(listed.run.stored_s)))
    });
    Ok(described.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds_after(words: &str) -> Vec<Kind> {
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        let mut parser = args::command();
        parser.build();
        kinds(&parser, &words)
    }

    #[test]
    fn parser_determines_what_a_word_can_be() {
        use Kind::{Job, Pid, Run, Tag, Word};
        for (before, kinds) in [
            ("report", vec![Pid, Run]),
            ("report r1", vec![Pid, Run]),
            ("report --job", vec![Job]),
            ("report --pid", vec![Pid]),
            ("report --since", vec![]),
            ("report --since 1h --json", vec![Pid, Run]),
            ("report --since=1h", vec![Pid, Run]),
            ("oom", vec![Pid, Run]),
            ("top", vec![Pid]),
            ("top -i 1", vec![Pid]),
            ("doctor", vec![Pid]),
            ("record", vec![Pid]),
            ("record 4711", vec![]),
            ("export", vec![Run, Pid]),
            ("diff r1", vec![Pid, Run]),
            ("diff r1 r2 --of", vec![Tag]),
            ("explain", vec![Word, Tag]),
            ("explain tracked", vec![Pid, Run]),
            ("job", vec![Job]),
            ("run --", vec![]),
            ("frobnicate", vec![]),
            ("", vec![]),
        ] {
            assert_eq!(kinds_after(before), kinds, "{before}");
        }
    }

    #[test]
    fn candidates_are_clean_and_begin_with_the_typed_text() {
        let candidate = |word: &str| (word.to_owned(), "python \u{1b}[2J".to_owned());
        assert_eq!(line(&candidate("4711"), "47").as_deref(), Some("4711\tpython \\u{1b}[2J\n"));
        assert_eq!(line(&candidate("4711"), "5"), None);
        assert_eq!(line(&candidate("a\nb"), ""), None);
        assert_eq!(line(&candidate("a\tb"), ""), None);
        assert!(candidates(Kind::Word).iter().any(|(word, _)| word == "pool idle"));
    }
}
