//! `gpumemctl record PID start|stop|pause|resume|dump`

use crate::args::{Record, Verb};
use crate::client::Daemon;
use crate::output::print;
use anyhow::Result;
use gpumem_runs::harmless::{clean, quoted};

/// Has the daemon tell the agent of a process.
pub fn run(args: &Record) -> Result<()> {
    let daemon = Daemon::find(args.socket.as_deref())?;
    let output = args.output.as_deref().map(std::path::absolute).transpose()?;
    let mut limits = String::new();
    if let Some((first, last)) = args.steps {
        limits += &format!("&steps={first}:{last}");
    }
    if let Some(seconds) = args.for_s {
        limits += &format!("&for={seconds}");
    }
    if let Some(bytes) = args.max_size {
        limits += &format!("&max_size={bytes}");
    }
    let recorded = daemon.record(args.pid, args.verb.name(), output.as_deref(), &limits)?;
    let pid = recorded.pid;
    let file = recorded.file.as_deref().map(|file| clean(&quoted(file)));
    let told = match (args.verb, file) {
        (Verb::Start, Some(file)) => match args.steps {
            Some((first, last)) => {
                format!("pid {pid} records its steps {first} to {last} to {file}, when they come")
            }
            None => format!("pid {pid} records to {file}"),
        },
        (Verb::Stop, Some(file)) => format!("pid {pid} has recorded to {file}: gpumemctl report {file}"),
        (Verb::Stop, None) => format!("pid {pid} was not recording"),
        (Verb::Dump, Some(file)) => {
            format!("pid {pid} has written what it holds to {file}: gpumemctl report {file}")
        }
        (Verb::Pause, _) => {
            format!("pid {pid} keeps its history back; its sums stay as they are until resume")
        }
        (Verb::Resume, _) => format!("pid {pid} tells its history again"),
        (verb, None) => format!("pid {pid}: {} is done", verb.name()),
    };
    print(&format!("{told}\n"))
}

/// `100:110`.
pub fn steps(text: &str) -> Result<(u64, u64), String> {
    let steps =
        text.split_once(':').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    steps
        .filter(|(first, last)| first <= last)
        .ok_or_else(|| "steps are the first and the last, as 100:110".into())
}

/// `500M` in bytes.
pub fn size(text: &str) -> Result<u64, String> {
    let (number, unit) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    let shift = match unit.trim_end_matches("iB") {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err("a size is 500M or 2G (KiB, MiB, GiB)".into()),
    };
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| "a size is 500M or 2G (KiB, MiB, GiB)".into())
}

#[cfg(test)]
mod tests {
    use super::{size, steps};

    #[test]
    fn steps_and_sizes_are_typed_as_people_do() {
        assert_eq!(steps("100:110"), Ok((100, 110)));
        assert_eq!(
            ["1", "2K", "500M", "2GiB"].map(|text| size(text).ok()),
            [Some(1), Some(2048), Some(500 << 20), Some(2 << 30)]
        );
        for bad in ["", "110:100", "1", "a:b", "1:2:3"] {
            assert!(steps(bad).is_err(), "{bad}");
        }
        for bad in ["", "0", "M", "-1", "1X", "99999999999T"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
