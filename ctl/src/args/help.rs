//! Examples in `--help` of each command, and the list of commands in `gpumemctl --help`.

use super::Cli;
use crate::exit;
use clap::{Command, CommandFactory, FromArgMatches};

/// Commands that most users need. `gpumemctl --help` lists them first.
const COMMON: [&str; 5] = ["run", "report", "ps", "oom", "doctor"];

/// Examples for the help of each command: a command line and its purpose.
const EXAMPLES: &[(&str, &str)] = &[
    ("gpumemctl run -- python train.py", "run a program and report on it at the end"),
    ("gpumemctl run --name bert -- torchrun --nproc-per-node 4 train.py", "all ranks as one job"),
    ("gpumemctl run --record run.gpumem -- ./train", "record to a file, without a daemon"),
    ("gpumemctl ps", "all processes that use GPU memory"),
    ("gpumemctl ps --device 0 --json", "one device, for scripts"),
    ("gpumemctl top", "all devices"),
    ("gpumemctl top 4711 -i 1", "one process, every second"),
    ("gpumemctl report", "your latest run"),
    ("gpumemctl report 4711 --growth", "what grows in a live process"),
    ("gpumemctl report r7 --at 10:30", "a stored run at a given time"),
    ("gpumemctl report r7 --html -o report.html", "a page to send to a colleague"),
    ("gpumemctl report ./snapshot.pickle", "a PyTorch memory snapshot"),
    ("gpumemctl oom", "your newest out-of-memory error"),
    ("gpumemctl oom r7 --all", "all errors of a stored run"),
    ("gpumemctl oom --at 03:12 --gpu 0", "who ran out of memory around 03:12"),
    ("gpumemctl why", "what to change in your latest run"),
    ("gpumemctl why r7", "in a stored run"),
    ("gpumemctl why ./run.gpumem", "in a recording, with replayed allocator settings"),
    ("gpumemctl job", "list the jobs on this node"),
    ("gpumemctl job 8812 --prometheus http://prom:9090", "a job on all nodes"),
    ("gpumemctl explain Untrackable", "a word, with the numbers of a run"),
    ("gpumemctl explain \"pool idle\" r7", "with the numbers of run r7"),
    ("gpumemctl diff r7 r9", "what r9 uses more than r7"),
    ("gpumemctl diff main.gpumem pr.gpumem --fail-above 2%", "a gate for CI"),
    ("gpumemctl whatif ./run.gpumem", "which allocator settings would have reserved less"),
    ("gpumemctl whatif ./run.gpumem --set expandable_segments:True", "one setting"),
    ("gpumemctl whatif ./snapshot.pickle", "a PyTorch memory snapshot"),
    ("gpumemctl whatif r7", "a stored run, with runs.keep_requests = true"),
    ("gpumemctl mcp", "as the command of a client, which talks to it"),
    ("gpumemctl doctor", "check the installation"),
    ("gpumemctl doctor 4711", "why is a process not covered?"),
    ("gpumemctl doctor --bundle", "an archive for a support request"),
    ("gpumemctl runs --since 1d --sort peak", "largest runs of the last day"),
    ("gpumemctl runs --oom", "runs that ran out of memory"),
    ("gpumemctl import snapshot.pickle", "a PyTorch memory snapshot"),
    ("gpumemctl import --format nvidia-smi-csv log.csv", "with a given format"),
    ("gpumemctl export r7 -o r7.gpumem-run", "a run for another machine"),
    ("gpumemctl record 4711 start --for 30s", "record for 30 seconds"),
    ("gpumemctl record 4711 start --steps 100:110", "record training steps 100 to 110"),
    ("gpumemctl record 4711 stop", "stop the recording"),
    ("gpumemctl mark before-eval 4711", "then: gpumemctl report 4711 --since before-eval"),
    ("gpumemctl nvml release --for 2m", "while MIG mode is changed"),
];

/// Adds examples and exit codes to the help of a command, or to that of its subcommands.
fn with_examples(command: Command, parent: &str) -> Command {
    let name = format!("{parent} {}", command.get_name());
    if command.has_subcommands() {
        return command.mut_subcommands(|command| with_examples(command, &name));
    }
    if command.is_hide_set() {
        return command;
    }
    let codes = match command.get_name() {
        "run" => exit::RUN_HELP,
        "doctor" => exit::DOCTOR_HELP,
        "diff" => exit::DIFF_HELP,
        _ => exit::HELP,
    };
    let examples: Vec<_> = examples(&name).collect();
    let width = examples.iter().map(|(line, _)| line.len()).max().unwrap_or(0);
    let line = |(line, purpose): &(&str, &str)| format!("  {line:width$}  # {purpose}\n");
    command.after_help(format!("Examples:\n{}\n{codes}", examples.iter().map(line).collect::<String>()))
}

/// Returns the examples of a command: command line and purpose. `command` is a full name such as `gpumemctl nvml release`.
pub(crate) fn examples(command: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    EXAMPLES.iter().copied().filter(move |(line, _)| {
        line.strip_prefix(command).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    })
}

/// Returns the parser, with a help that lists the common commands first.
pub(crate) fn command() -> Command {
    let command = Cli::command().mut_subcommands(|command| with_examples(command, "gpumemctl"));
    let shown = || command.get_subcommands().filter(|command| !command.is_hide_set());
    let width = shown().map(|command| command.get_name().len()).max().unwrap_or(0);
    let line = |command: &Command| {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        format!("  {:width$}  {about}\n", command.get_name())
    };
    let common = COMMON.iter().filter_map(|name| command.find_subcommand(name)).map(line).collect::<String>();
    let more = shown().filter(|command| !COMMON.contains(&command.get_name())).map(line).collect::<String>();
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\nCommon commands:\n{common}\nMore commands:\n{more}\n\
         gpumemctl COMMAND --help shows options and examples of a command.\n\nOptions:\n{{options}}{{after-help}}"
    );
    command.disable_help_subcommand(true).help_template(template)
}

impl Cli {
    /// Parses the arguments of the process. Requests for help or the version are returned as errors too.
    pub(crate) fn from_process() -> Result<Self, clap::Error> {
        let mut parser = command();
        let matches = parser.try_get_matches_from_mut(std::env::args_os())?;
        Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut parser))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    /// Splits a line as a shell would; examples quote with double quotes only.
    fn words(line: &str) -> Vec<String> {
        let parts = line.split('"').enumerate();
        parts
            .flat_map(|(index, part)| match index % 2 {
                0 => part.split_whitespace().map(str::to_owned).collect(),
                _ => vec![part.to_owned()],
            })
            .collect()
    }

    #[test]
    fn each_command_has_examples_that_its_parser_accepts() {
        let command = command();
        for shown in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            assert!(
                examples(&format!("gpumemctl {}", shown.get_name())).next().is_some(),
                "{}",
                shown.get_name()
            );
        }
        for (line, _) in EXAMPLES {
            Cli::try_parse_from(words(line)).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn help_lists_each_command_once_and_the_common_ones_first() {
        let help = command().render_help().to_string();
        let (common, more) = help.split_once("More commands:").expect("two lists");
        for name in COMMON {
            assert!(common.contains(&format!("\n  {name} ")), "{name}: {help}");
        }
        for shown in command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let is_common = COMMON.contains(&shown.get_name());
            assert_eq!(!is_common, more.contains(&format!("\n  {} ", shown.get_name())), "{help}");
        }
    }
}
