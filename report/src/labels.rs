//! Names of runs and devices as printed, and texts for exit statuses.

use crate::table::{cut, shorten_middle, width};
use gpumem_model::escape::escape;
use gpumem_model::run::{Clock, Device, Run, State};

/// Prefix of the names of devices in a run that combines the ranks of a job; names from drivers and logs never have it.
pub(crate) const RANK: &str = "rank ";
/// The same for a process without a rank.
pub(crate) const PROCESS: &str = "process ";

/// Returns the command without the directories of its program and script, else the program's name, else the run's origin. For
/// runs of a daemon the origin is the machine, so `(unknown command)` is used instead.
pub fn label(run: &Run) -> String {
    let facts = &run.process.facts;
    match facts.get("command") {
        Some(command) => short_command(command),
        None if run.source.is_watched() => {
            escape(facts.get("comm").map_or("(unknown command)", String::as_str))
        }
        None => escape(&run.source.origin),
    }
}

/// Maximum width of a command in headings, in columns of the terminal.
pub(crate) const COMMAND: usize = 72;

/// Returns the command of a run with its arguments, and its pid, if known.
pub(crate) fn label_with_pid(run: &Run) -> String {
    let (command, pid) = (command_line_of(run, COMMAND), pid(run));
    if pid.is_empty() { command } else { format!("{command} {pid}") }
}

/// Returns the pid of a run after a blank, such as ` pid 4711`; empty if it is unknown.
pub(crate) fn pid(run: &Run) -> String {
    let pid = run.process.pid;
    if pid == 0 { String::new() } else { format!(" pid {pid}") }
}

/// Returns where a run comes from: `on MACHINE`, or `from FORMAT FILE`.
pub(crate) fn source(run: &Run) -> String {
    match run.source.kind.as_str() {
        _ if run.source.is_watched() => format!("on {}", run.source.origin),
        kind => format!("from {kind} {}", run.source.origin),
    }
}

/// Returns the rank that a process reports for itself in its job; `None` if it reports none.
pub(crate) fn rank(run: &Run) -> Option<u64> {
    run.process.claims.get("rank")?.parse().ok()
}

/// Splits a command line into its first word and the rest. Words with spaces are in single quotes.
fn first_word(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start_matches(' ');
    let quoted = line.strip_prefix('\'').and_then(|rest| rest.split_once('\''));
    let word = quoted.or_else(|| line.split_once(' ')).unwrap_or((line, ""));
    (!word.0.is_empty()).then_some(word)
}

/// Returns the short form of a command: program and script, without directories and arguments of the script.
fn short_command(command: &str) -> String {
    program_and_arguments(command).0
}

/// Splits a command into its short form and its arguments.
fn program_and_arguments(command: &str) -> (String, &str) {
    let base = |word: &str| word.rsplit('/').next().unwrap_or(word).to_owned();
    let Some((program, mut arguments)) = first_word(command) else { return Default::default() };
    let mut name = base(program);
    let is_interpreter = name.starts_with("python") || name == "bash" || name == "sh";
    let mut before = "";
    // Options of the interpreter are before the script; after `-c` there is code. `-` stands for a script at standard input.
    let is_code = |word: &str| word.starts_with('-') && !word.starts_with("--") && word.ends_with('c');
    while let Some((word, rest)) = first_word(arguments).filter(|_| is_interpreter && !is_code(before)) {
        let is_module = before == "-m" || word.len() > 2 && word.starts_with("-m");
        let is_script = is_module || word == "-" || !word.starts_with('-') && !matches!(before, "-W" | "-X");
        name = format!("{name} {}", if is_script { base(word) } else { word.to_owned() });
        (arguments, before) = (rest, word);
        if is_script {
            break;
        }
    }
    (escape(&name), arguments.trim_start_matches(' '))
}

/// Returns a command with its arguments, without the directories of its program and script. A long one is shortened in the
/// middle to `columns`, or cut at its end if the middle is in the name of the script.
pub fn command_line(command: &str, columns: usize) -> String {
    let (name, arguments) = program_and_arguments(command);
    let line = format!("{name} {}", escape(arguments));
    match columns / 2 < width(&name) {
        true => cut(&line, columns).to_owned(),
        false => shorten_middle(line.trim_end(), columns),
    }
}

/// Returns the command of a run as [`command_line`] does, else its label.
pub(crate) fn command_line_of(run: &Run, columns: usize) -> String {
    let command = run.process.facts.get("command");
    command.map_or_else(|| label(run), |command| command_line(command, columns))
}

/// Returns the time at which the run ended, else the time of its last moment, in ns of the run's clock; 0 if it has neither.
pub(crate) fn end_ns(run: &Run) -> u64 {
    match run.state {
        State::Closed { time_ns, .. } | State::Rolled { time_ns } => time_ns,
        State::Open | State::Interrupted => {
            run.devices.iter().map(|device| device.last.time_ns).max().unwrap_or(0)
        }
    }
}

/// Returns the time from the first to the last moment of the run in ns; `None` if it is unknown.
pub fn length_ns(run: &Run) -> Option<u64> {
    let from = run.devices.iter().filter_map(|device| Some(device.series.buckets.first()?.time_ns)).min()?;
    let length_ns = end_ns(run).saturating_sub(from);
    (run.clock != Clock::Lines && length_ns > 0).then_some(length_ns)
}

/// Returns the name of a device with its product name.
pub(crate) fn device_title(device: &Device) -> String {
    let model = if device.model.is_empty() { String::new() } else { format!(" {}", device.model) };
    titled(device, &model)
}

/// Returns the name of a device without its product name.
pub(crate) fn device_name(device: &Device) -> String {
    titled(device, "")
}

fn titled(device: &Device, model: &str) -> String {
    if device.name.starts_with(RANK) {
        return escape(&device.name);
    }
    if device.name.starts_with("unnamed-") {
        return format!("GPU {}", escape(&device.name));
    }
    // The beginning of the UUID, which nvidia-smi accepts as an identifier.
    let name = match device.name.get(..12) {
        Some(name) if !device.name.starts_with("ordinal-") => format!(" ({name})"),
        _ => String::new(),
    };
    escape(&format!("GPU {}{model}{name}", device.ordinal))
}

/// Returns the text for an exit status, in the encoding of waitpid.
pub fn exit(status: u64) -> String {
    match status & 0x7f {
        0 => format!("exit {}", status >> 8 & 0xff),
        signal => format!("signal {signal}"),
    }
}

/// Returns the name of device memory that belongs to no process.
pub(crate) fn rest_name(is_unified: bool) -> &'static str {
    if is_unified { "rest of the host" } else { "unaccounted" }
}

/// Returns the name of free device memory, or of available host memory if the device has no own memory.
pub(crate) fn free_name(is_unified: bool) -> &'static str {
    if is_unified { "available" } else { "free" }
}

#[cfg(test)]
mod tests {
    use super::{program_and_arguments, short_command};

    #[test]
    fn command_is_shortened_to_program_and_script() {
        for (command, short) in [
            ("/usr/bin/python3.11 /home/ana/train.py --steps 3", "python3.11 train.py"),
            ("'/home/ana/my env/bin/python' '/home/ana/my code/train.py' -v", "python train.py"),
            ("'/tmp/gpumem space/mixer'", "mixer"),
            ("/usr/bin/python -u -W ignore /home/ana/train.py -v", "python -u -W ignore train.py"),
            ("python -m torch.distributed.run --nproc_per_node 4 a.py", "python -m torch.distributed.run"),
            ("python -c 'import a/b'", "python -c"),
            ("bash -lc 'cd /home/ana'", "bash -lc"),
            ("python -", "python -"),
            ("python - --token=secret", "python -"),
            ("python -mpytest tests/", "python -mpytest"),
            ("postgres: ana idle", "postgres:"),
            ("'/tmp/not closed", "not"),
            ("", ""),
        ] {
            assert_eq!(short_command(command), short, "{command}");
        }
    }

    #[test]
    fn command_line_keeps_all_arguments_of_a_script_whose_name_has_a_blank() {
        let command = "/usr/bin/python3 '/home/ana/my train.py' --steps 3 --lr 0.1";
        let (name, arguments) = program_and_arguments(command);
        assert_eq!((name.as_str(), arguments), ("python3 my train.py", "--steps 3 --lr 0.1"));
        assert_eq!(program_and_arguments("mixer  --big"), ("mixer".to_owned(), "--big"));
        assert_eq!(program_and_arguments("python"), ("python".to_owned(), ""));
    }
}
