//! Examples in `--help` of each command, and the list of commands in `gpumemctl --help`.

use super::Cli;
use clap::{Command, CommandFactory, FromArgMatches};
use std::fmt::Write;

/// Commands that most users need; they come first.
const COMMON: [&str; 5] = ["run", "report", "ps", "oom", "doctor"];

/// Command lines with their purpose, for each command.
const EXAMPLES: &[(&str, &[(&str, &str)])] = &[
    (
        "run",
        &[
            ("gpumemctl run -- python train.py", "run a program and report on it at the end"),
            ("gpumemctl run --name bert -- torchrun --nproc-per-node 4 train.py", "all ranks as one job"),
            ("gpumemctl run --record run.gpumem -- ./train", "record to a file, without a daemon"),
        ],
    ),
    (
        "ps",
        &[
            ("gpumemctl ps", "all processes that use GPU memory"),
            ("gpumemctl ps --device 0 --json", "one device, for scripts"),
        ],
    ),
    ("top", &[("gpumemctl top", "all devices"), ("gpumemctl top 4711 -i 1", "one process, every second")]),
    (
        "report",
        &[
            ("gpumemctl report", "your latest run"),
            ("gpumemctl report 4711 --growth", "what grows in a live process"),
            ("gpumemctl report r7 --at 10:30", "a stored run at a given time"),
            ("gpumemctl report r7 --html -o report.html", "a page to send to a colleague"),
            ("gpumemctl report ./snapshot.pickle", "a PyTorch memory snapshot"),
        ],
    ),
    (
        "oom",
        &[
            ("gpumemctl oom", "your newest out-of-memory error"),
            ("gpumemctl oom r7 --all", "all errors of a stored run"),
            ("gpumemctl oom --at 03:12 --gpu 0", "who ran out of memory around 03:12"),
        ],
    ),
    (
        "job",
        &[
            ("gpumemctl job", "list the jobs on this node"),
            ("gpumemctl job 8812 --prometheus http://prom:9090", "a job on all nodes"),
        ],
    ),
    (
        "explain",
        &[
            ("gpumemctl explain Untrackable", "a word, with the numbers of a run"),
            ("gpumemctl explain \"pool idle\" r7", "with the numbers of run r7"),
        ],
    ),
    (
        "diff",
        &[
            ("gpumemctl diff r7 r9", "what r9 uses more than r7"),
            ("gpumemctl diff main.gpumem pr.gpumem --fail-above 2%", "a gate for CI"),
        ],
    ),
    (
        "doctor",
        &[
            ("gpumemctl doctor", "check the installation"),
            ("gpumemctl doctor 4711", "why is a process not covered?"),
            ("gpumemctl doctor --bundle", "an archive for a support request"),
        ],
    ),
    (
        "runs",
        &[
            ("gpumemctl runs --since 1d --sort peak", "largest runs of the last day"),
            ("gpumemctl runs --oom", "runs that ran out of memory"),
        ],
    ),
    (
        "import",
        &[
            ("gpumemctl import snapshot.pickle", "a PyTorch memory snapshot"),
            ("gpumemctl import --format nvidia-smi-csv log.csv", "with a given format"),
        ],
    ),
    ("export", &[("gpumemctl export r7 -o r7.gpumem-run", "a run for another machine")]),
    (
        "record",
        &[
            ("gpumemctl record 4711 start --for 30s", "record for 30 seconds"),
            ("gpumemctl record 4711 start --steps 100:110", "record training steps 100 to 110"),
            ("gpumemctl record 4711 stop", "stop the recording"),
        ],
    ),
    ("mark", &[("gpumemctl mark before-eval 4711", "then: gpumemctl report 4711 --since before-eval")]),
    ("nvml release", &[("gpumemctl nvml release --for 2m", "while MIG mode is changed")]),
];

/// Returns the text below the options of `command`: its examples, then `codes`, its exit codes.
pub(super) fn after(command: &str, codes: &str) -> String {
    let (_, examples) = EXAMPLES.iter().find(|(name, _)| *name == command).unwrap_or(&("", &[]));
    let width = examples.iter().map(|(line, _)| line.len()).max().unwrap_or(0);
    let mut text = String::from("Examples:\n");
    for (line, purpose) in *examples {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  {line:width$}  # {purpose}");
    }
    text + "\n" + codes
}

/// Returns the parser, with a help that lists the common commands first.
pub(crate) fn command() -> Command {
    let command = Cli::command();
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
    /// Parses the arguments of the process.
    ///
    /// # Errors
    /// Wrong arguments; and help or version, if requested.
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
            let is_of = |name: &str| name.split(' ').next() == Some(shown.get_name());
            let examples: Vec<_> = EXAMPLES.iter().filter(|(name, _)| is_of(name)).collect();
            assert_eq!(examples.len(), 1, "{}", shown.get_name());
            for (line, _) in examples[0].1 {
                Cli::try_parse_from(words(line)).unwrap_or_else(|error| panic!("{line}: {error}"));
                assert!(line.starts_with(&format!("gpumemctl {}", examples[0].0)), "{line}");
            }
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
