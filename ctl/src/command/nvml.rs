//! `gpumemctl nvml release`

use crate::args::{Nvml, NvmlCommand};
use crate::client::Daemon;
use crate::output::print;
use anyhow::Result;

/// Asks the daemon to close NVML, so that a GPU can be reset or its MIG mode changed.
pub fn run(args: &Nvml) -> Result<()> {
    let NvmlCommand::Release(release) = &args.command;
    let daemon = Daemon::find(release.socket.as_deref())?;
    let released = daemon.release(release.seconds)?;
    print(&format!(
        "NVML is closed for {} s: GPUs can be reset and MIG changed; used is not known until then\n",
        released.for_s
    ))
}

/// `60`, `60s`, `5m` or `1h` in seconds.
pub fn seconds(text: &str) -> Result<u64, String> {
    let (number, unit) = text.split_at(text.trim_end_matches(|end: char| end.is_ascii_alphabetic()).len());
    let scale = match unit {
        "" | "s" => 1,
        "m" | "min" => 60,
        "h" => 3600,
        _ => return Err("a time is 60s, 5m or 1h".into()),
    };
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(scale));
    seconds.filter(|seconds| *seconds > 0).ok_or_else(|| "a time is 60s, 5m or 1h".into())
}

#[cfg(test)]
mod tests {
    use super::seconds;

    #[test]
    fn times_are_typed_as_people_do() {
        let good = ["60", "60s", "5m", "1h"].map(|text| seconds(text).ok());
        assert_eq!(good, [Some(60), Some(60), Some(300), Some(3600)]);
        for bad in ["", "0", "s", "-1s", "1d", "1.5h", "99999999999999999999s", "9999999999999999h"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
