//! `gpumemctl generate DIR`: writes manual pages and shell completions, made from the argument parser. The command is hidden; it
//! is for builders of packages and for users who have only the program.
//!
//! ```text
//! DIR/man/man1/gpumemctl.1, gpumemctl-COMMAND.1, ...
//! DIR/bash-completion/completions/gpumemctl
//! DIR/zsh/site-functions/_gpumemctl
//! DIR/fish/vendor_completions.d/gpumemctl.fish
//! ```

use crate::args::{Generate, examples};
use anyhow::{Context, Result};
use clap::{Arg, ArgAction, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};
use std::fs;
use std::path::Path;

const NAME: &str = "gpumemctl";

/// Folder and file of each shell's completions below DIR, which is a `share` folder.
const COMPLETIONS: &[(Shell, &str, &str)] = &[
    (Shell::Bash, "bash-completion/completions", "gpumemctl"),
    (Shell::Zsh, "zsh/site-functions", "_gpumemctl"),
    (Shell::Fish, "fish/vendor_completions.d", "gpumemctl.fish"),
];

const ENVIRONMENT: &[(&str, &str)] = &[
    ("GPUMEM_CONTROL", "The daemon's control socket, like --socket."),
    ("GPUMEM_STORE", "The run store, like --store."),
    ("GPUMEM_LIBRARY", "The libgpumem.so that run gives to the command, instead of the installed one."),
    ("GPUMEM_JOB", "Id of the job of a command that run starts; run sets it if it is unset."),
    ("CURL_CA_BUNDLE", "Certificate authorities for job --prometheus https://..., as in curl(1)."),
];

const FILES: &[(&str, &str)] = &[
    ("$XDG_RUNTIME_DIR/gpumem/", "Sockets of the user's private daemon."),
    ("/run/gpumemd/", "Sockets of the system's daemon."),
    ("$XDG_STATE_HOME/gpumem/runs.sqlite, ~/.local/state/gpumem/runs.sqlite", "The user's run store."),
    ("/var/lib/gpumemd/runs.sqlite", "The run store of the system's daemon."),
];

/// Additions to each shell's script: words of the running system, from `gpumemctl candidates`. The shell never evaluates these
/// words.
const BASH: &str = r#"
_gpumemctl_live() {
    _gpumemctl "$@"
    local cur="${COMP_WORDS[COMP_CWORD]}" line quoted
    local -a live=() kept=()
    while IFS= read -r line; do
        printf -v quoted %q "${line%%$'\t'*}"
        live+=("$quoted")
    done < <(gpumemctl candidates -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    # Names of arguments such as [PID] cannot be typed.
    for line in "${COMPREPLY[@]}"; do
        case "$line" in "["* | "<"*) ;; *) kept+=("$line") ;; esac
    done
    case "$cur" in -*) ;; *) [ ${#live[@]} -eq 0 ] || kept=("${live[@]}") ;; esac
    COMPREPLY=("${kept[@]}")
}
complete -F _gpumemctl_live -o bashdefault -o default gpumemctl
"#;
const ZSH: &str = r#"
_gpumemctl_live() {
    local line
    local -a values shown
    for line in "${(@f)$(gpumemctl candidates -- "${typed[@]}" 2>/dev/null)}"; do
        [[ -n $line ]] || continue
        values+=("${line%%$'\t'*}")
        shown+=("${line/$'\t'/  -- }")
    done
    (( $#values )) && compadd -l -d shown -a values || _files
}
"#;
const FISH: &str = r#"
function __gpumemctl_live
    gpumemctl candidates -- (commandline -opc)[2..-1] (string unescape -- (commandline -ct)) 2>/dev/null
end
complete -c gpumemctl -a "(__gpumemctl_live)"
"#;

/// Adds the words of the running system to a script that the argument parser made.
fn with_candidates(shell: Shell, script: &str) -> String {
    match shell {
        Shell::Zsh => {
            // The function is defined before the script's last lines, which call the main function of the script.
            // The command of `run` is any program, which zsh completes itself.
            let live = |line: &str| match line.strip_suffix(":_default' \\") {
                Some(argument) if !argument.starts_with("'*::command") => {
                    format!("{argument}:_gpumemctl_live' \\\n")
                }
                _ => format!("{line}\n"),
            };
            // For arguments of any number `words` has only these arguments.
            let all_words = "_gpumemctl() {\n    local -a typed=(\"${(@)words[2,CURRENT]}\")\n";
            let script: String = script.lines().map(live).collect();
            let script = script.replacen("_gpumemctl() {\n", all_words, 1);
            match script.split_once("\nif [ \"$funcstack") {
                Some((functions, end)) => format!("{functions}\n{ZSH}\nif [ \"$funcstack{end}"),
                None => script,
            }
        }
        Shell::Bash => script.to_owned() + BASH,
        Shell::Fish => {
            // An option with a value gets words of its own; fish offers those of the command only for arguments.
            let live = |line: &str| match line.ends_with(" -r") {
                true => format!("{line} -a \"(__gpumemctl_live)\"\n"),
                false => format!("{line}\n"),
            };
            script.lines().map(live).collect::<String>() + FISH
        }
        _ => script.to_owned(),
    }
}

/// Writes all files, and replaces existing ones.
pub(crate) fn run(args: &Generate) -> Result<()> {
    let mut cli = crate::args::command();
    // clap_complete would also complete hidden commands.
    let visible = cli.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let mut visible = Command::new(NAME)
        .version(env!("CARGO_PKG_VERSION"))
        .about(cli.get_about().cloned().unwrap_or_default())
        .disable_help_subcommand(true)
        .subcommands(visible);
    for (shell, folder, file) in COMPLETIONS {
        let mut script = Vec::new();
        clap_complete::generate(*shell, &mut visible, NAME, &mut script);
        let script = with_candidates(*shell, &String::from_utf8_lossy(&script));
        write(&args.dir.join(folder), file, script.as_bytes())?;
    }
    cli.build();
    pages(&cli, None, &args.dir.join("man/man1"))
}

/// Writes the manual pages of a command and of its subcommands.
fn pages(command: &Command, parent: Option<&str>, folder: &Path) -> Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let commands = || command.get_subcommands().filter(|command| !command.is_hide_set());
    // The page has no date, because it would be that of the build.
    let man = Man::new(command.clone())
        .title(name.to_uppercase())
        .source(format!("gpumemd {}", env!("CARGO_PKG_VERSION")))
        .manual("gpumemd")
        .date("");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    if commands().next().is_some() {
        man.render_synopsis_section(&mut page)?;
    } else {
        synopsis(command, &name.replace('-', " ")).to_writer(&mut page)?;
    }
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if commands().next().is_some() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut rest = Roff::new();
    if parent.is_none() {
        list_section(&mut rest, "ENVIRONMENT", ENVIRONMENT);
        list_section(&mut rest, "FILES", FILES);
    }
    if let Some(help) = command.get_after_help().map(ToString::to_string) {
        let codes = help.rsplit("\n\n").next().unwrap_or_default();
        rest.control("SH", ["EXIT STATUS"]);
        rest.text([roman(codes.strip_prefix("Exit codes: ").unwrap_or(codes))]);
    }
    if parent.is_some() && commands().next().is_none() {
        list_section(&mut rest, "EXAMPLES", &examples(&name.replace('-', " ")).collect::<Vec<_>>());
    }
    rest.control("SH", ["SEE ALSO"]);
    let parent_page = parent.into_iter().flat_map(|parent| [bold(parent), roman("(1), ")]);
    rest.text(parent_page.chain([bold("gpumemd"), roman("(8)")]).collect::<Vec<_>>());
    rest.to_writer(&mut page)?;
    write(folder, &format!("{name}.1"), &page)?;
    commands().try_for_each(|command| pages(command, Some(&name), folder))
}

/// Returns the section with every option and its value. `name` is the command as a user types it.
fn synopsis(command: &Command, name: &str) -> Roff {
    let mut words = vec![bold(name)];
    let is_shown = |arg: &&Arg| !arg.is_hide_set() && arg.get_id() != "help";
    for arg in command.get_arguments().filter(is_shown) {
        let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
        let value = arg.get_value_names().and_then(|names| names.first()).filter(|_| takes_value);
        let repeats = matches!(arg.get_action(), ArgAction::Append);
        let dots = if repeats { "..." } else { "" };
        let is_required = arg.is_required_set();
        words.push(roman(if is_required { " " } else { " [" }));
        let short = arg.get_short().map(|short| format!("-{short}"));
        let long = arg.get_long().map(|long| format!("--{long}"));
        let names: Vec<String> = short.into_iter().chain(long).collect();
        if !names.is_empty() {
            words.push(bold(names.join("|")));
        } else if arg.is_trailing_var_arg_set() {
            words.push(roman("-- "));
        }
        if let Some(value) = value {
            let is_optional = arg.get_num_args().is_some_and(|range| range.min_values() == 0);
            let (before, after) = if is_optional && !names.is_empty() { ("[", "]") } else { ("", "") };
            let blank = if names.is_empty() { "" } else { " " };
            words.extend([roman(format!("{blank}{before}")), italic(value.as_str()), roman(after)]);
        }
        words.push(roman(format!("{dots}{}", if is_required { "" } else { "]" })));
    }
    let mut section = Roff::new();
    section.control("SH", ["SYNOPSIS"]);
    section.text(words);
    section
}

fn list_section(roff: &mut Roff, heading: &str, rows: &[(&str, &str)]) {
    roff.control("SH", [heading]);
    for (name, about) in rows {
        roff.control("TP", []);
        roff.text([bold(*name)]);
        roff.text([roman(*about)]);
    }
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let path = folder.join(name);
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&path, bytes))
        .with_context(|| path.display().to_string())
}
