//! Parsers of argument values: sizes, times, steps, shares and names. Each error has an example of a valid value.

/// Parses a setting such as `max_split_size_mb=128`; returns it as PYTORCH_ALLOC_CONF has it, with a colon.
pub(crate) fn setting(text: &str) -> Result<String, String> {
    let end = text.find(['=', ':']).filter(|end| *end > 0);
    let end = end.ok_or_else(|| "a setting is KEY=VALUE, as expandable_segments=True".to_owned())?;
    Ok(format!("{}:{}", &text[..end], &text[end + 1..]))
}

/// Parses `NAME=FACTOR`, with a factor above 0 and up to 100.
pub(crate) fn scale(text: &str) -> Result<(String, f64), String> {
    let parsed =
        text.rsplit_once('=').and_then(|(name, factor)| Some((name.to_owned(), factor.parse().ok()?)));
    parsed
        .filter(|(name, factor)| !name.is_empty() && *factor > 0.0 && *factor <= 100.0)
        .ok_or_else(|| "a scale is NAME=FACTOR, as encoder=2 (at most 100)".to_owned())
}

/// Parses a fraction such as `0.5` or `50%`, above 0 and at most 1.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    let percent = text.strip_suffix('%').and_then(|percent| Some(percent.parse::<f64>().ok()? / 100.0));
    percent
        .or_else(|| text.parse().ok())
        .filter(|fraction| *fraction > 0.0 && *fraction <= 1.0)
        .ok_or_else(|| "a fraction is 0.5 or 50%".to_owned())
}

/// Parses a range of training steps such as `100:110`.
pub(crate) fn steps(text: &str) -> Result<(u64, u64), String> {
    let steps = text.split_once(':').and_then(|(first, last)| Some((number(first)?, number(last)?)));
    steps
        .filter(|(first, last)| first <= last && *last < u64::MAX)
        .ok_or_else(|| "steps are the first and the last, as 100:110".into())
}

/// Parses a size such as `500M` to bytes.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let scale = |unit: &str| {
        let letter = unit.strip_suffix("iB").filter(|letter| !letter.is_empty()).unwrap_or(unit);
        let power = ["", "K", "M", "G", "T"].iter().position(|known| *known == letter)?;
        Some(1 << (10 * power))
    };
    with_unit(text, scale).ok_or_else(|| "a size is 500M or 2G (KiB, MiB, GiB)".into())
}

/// Parses `60`, `60s`, `5m` or `1h` to seconds.
pub(crate) fn seconds(text: &str) -> Result<u64, String> {
    let scale = |unit: &str| match unit {
        "" | "s" => Some(1),
        "m" | "min" => Some(60),
        "h" => Some(3600),
        _ => None,
    };
    with_unit(text, scale).ok_or_else(|| "a time is 60s, 5m or 1h".into())
}

/// Parses digits and a unit to a number above 0. `scale` returns the value of a unit.
fn with_unit(text: &str, scale: impl Fn(&str) -> Option<u64>) -> Option<u64> {
    let (digits, unit) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    number(digits)?.checked_mul(scale(unit)?).filter(|number| *number > 0)
}

/// Parses `2`, `0.5` or `2%` to a number of percent.
pub(crate) fn percent(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.strip_suffix('%').unwrap_or(text).trim_end().parse().ok();
    number
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or_else(|| "a share is 0 to 100 percent".to_owned())
}

/// Returns the name of a job if it is usable in a table and in a file name.
pub(crate) fn job_name(name: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+@:".contains(&byte);
    if name.is_empty() || name.len() > 64 || !name.bytes().all(plain) {
        return Err("a name is 1 to 64 letters, digits and . _ - + @ :".into());
    }
    Ok(name.to_owned())
}

/// Parses a number of digits only, because `parse` would accept a plus sign too.
fn number(text: &str) -> Option<u64> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Parses the pid of a process.
pub(crate) fn pid(text: &str) -> Result<u32, String> {
    let pid = number(text).and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
    let is_positive = text.bytes().all(|byte| byte.is_ascii_digit()) && text.bytes().any(|byte| byte != b'0');
    let why = if is_positive { "this number is too large for a pid" } else { "a pid is a number, as 4711" };
    pid.ok_or_else(|| format!("{why}; gpumemctl ps lists processes, and gpumemctl runs stored runs"))
}

/// Parses a number from 1 on, as of rows or steps.
pub(crate) fn count(text: &str) -> Result<u64, String> {
    number(text).filter(|count| *count > 0).ok_or_else(|| "a count is 1 or more".into())
}

/// Parses the number of a GPU.
pub(crate) fn gpu(text: &str) -> Result<u8, String> {
    text.parse().map_err(|_| "a GPU is its number in the program, as 0".into())
}

/// The processes that get a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pid {
    /// The process with this pid, or else the processes that it started.
    One(u32),
    /// All live processes that the caller may see.
    All,
}

impl std::str::FromStr for Pid {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Pid::All),
            text => pid(text).map(Pid::One).map_err(|error| format!("{error}; all means every process")),
        }
    }
}

/// Returns whether the typed text names a device: by index, UUID, or the beginning of its UUID.
pub(crate) fn names_device(typed: &str, index: u32, uuid: &str) -> bool {
    match typed.parse::<u32>() {
        Ok(number) => index == number,
        Err(_) => {
            typed.len() >= 4
                && uuid.len() >= typed.len()
                && uuid.to_lowercase().starts_with(&typed.to_lowercase())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_sizes_are_typed_as_people_do() {
        assert_eq!(steps("100:110"), Ok((100, 110)));
        assert_eq!(
            ["1", "2K", "500M", "2GiB"].map(|text| size(text).ok()),
            [Some(1), Some(2048), Some(500 << 20), Some(2 << 30)]
        );
        // The agent uses the largest number to mean no end.
        for bad in ["", "110:100", "1", "a:b", "1:2:3", "+1:2", "0:18446744073709551615"] {
            assert!(steps(bad).is_err(), "{bad}");
        }
        for bad in ["", "0", "M", "-1", "+1", "1X", "5iB", "1KiBiB", "99999999999T"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn pids_and_counts_are_digits() {
        assert_eq!((pid("4711"), count("3"), gpu("0")), (Ok(4711), Ok(3), Ok(0)));
        for bad in ["", "0", "-1", "+1", "abc", "r1", "4294967296"] {
            assert!(pid(bad).is_err_and(|error| error.contains("gpumemctl ps")), "{bad}");
        }
        for (bad, is_too_large) in
            [("4294967296", true), ("99999999999999999999", true), ("0", false), ("", false)]
        {
            assert_eq!(pid(bad).unwrap_err().contains("too large"), is_too_large, "{bad}");
        }
        assert!(["0", "-1", "x"].iter().all(|bad| count(bad).is_err()));
        assert!(["256", "-1", "x"].iter().all(|bad| gpu(bad).is_err()));
    }

    #[test]
    fn times_and_shares_are_typed_as_people_do() {
        let good = ["60", "60s", "5m", "1h"].map(|text| seconds(text).ok());
        assert_eq!(good, [Some(60), Some(60), Some(300), Some(3600)]);
        for bad in ["", "0", "s", "-1s", "+1s", "1d", "1.5h", "99999999999999999999s", "9999999999999999h"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
        assert_eq!(["2", "0.5", "2 %"].map(|text| percent(text).ok()), [Some(2.0), Some(0.5), Some(2.0)]);
        for bad in ["", "%", "2%%", "101", "-1", "NaN", "inf"] {
            assert!(percent(bad).is_err(), "{bad}");
        }
        assert_eq!(["0.5", "50%", "1"].map(|text| fraction(text).ok()), [Some(0.5), Some(0.5), Some(1.0)]);
        for bad in ["", "0", "2", "50", "101%", "-1", "NaN"] {
            assert!(fraction(bad).is_err(), "{bad}");
        }
        assert_eq!(scale("a=b=2.5"), Ok(("a=b".to_owned(), 2.5)));
        for bad in ["", "a", "=2", "a=", "a=0", "a=NaN", "a=101"] {
            assert!(scale(bad).is_err(), "{bad}");
        }
    }
}
