//! Times as users type them.
//!
//! | typed | meaning |
//! |---|---|
//! | `90s`, `10m`, `1h30m`, `2d` | time before now, or before the end of a finished run |
//! | `10:30`, `10:30:15` | the latest such time of day, in the user's time zone; in UTC with a `Z` |
//! | `2026-11-20`, `2026-11-20T10:30[:15]`, with `Z`, `+01:00` or without a zone | that moment; without a zone, in the user's |
//! | `@1795170600` | seconds since 1970 |
//! | `+12.5s` | the form in which reports print times without a wall clock |
//! | `1234` | a line number, if times are lines of a log |
//! | `warm-up`, `mark:10:30` | a mark of that name |

use gpumem_model::run::{Clock, Run};
use jiff::Timestamp;
use jiff::civil::{Date, DateTime, Time};
use jiff::tz::TimeZone;

/// The accepted forms of times, for error messages.
pub(crate) const FORMS: &str =
    "90s, 10m, 1h30m or 2d ago, 10:30, 2026-11-20T10:30, @1795170600, or the name of a mark";

/// Error for a time in a run whose clock counts the lines of a log.
const LINES: &str = "times of this run are lines of its log: type the number of a line, as 1200";
const SECOND_NS: i128 = 1_000_000_000;
const DAY_NS: i128 = 86_400 * SECOND_NS;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum When {
    /// Nanoseconds before now or before the run's end.
    Ago(u64),
    /// The latest time in the past with this time of day.
    OfDay(Time, Zone),
    /// Nanoseconds since 1970.
    At(i64),
    /// Nanoseconds on the clock of a run that does not know the time of day.
    Record(u64),
    /// Number of a line in a log.
    Line(u64),
    Mark(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zone {
    Local,
    Utc,
}

impl std::fmt::Display for When {
    /// Formats the time so that it can be typed again. A time of day, or a mark's name, may mean a later moment then.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let decimal = |f: &mut std::fmt::Formatter<'_>, ns: u64, unit: &str| match ns % 1_000_000_000 {
            0 => write!(f, "{}{unit}", ns / 1_000_000_000),
            part => write!(f, "{}.{}{unit}", ns / 1_000_000_000, format!("{part:09}").trim_end_matches('0')),
        };
        match self {
            When::Ago(ago_ns) => decimal(f, *ago_ns, "s"),
            When::OfDay(time, Zone::Local) => write!(f, "{}", time.strftime("%H:%M:%S")),
            When::OfDay(time, Zone::Utc) => write!(f, "{}Z", time.strftime("%H:%M:%S")),
            When::At(at_ns) => {
                f.write_str("@")?;
                decimal(f, u64::try_from(*at_ns).unwrap_or(0), "")
            }
            When::Record(time_ns) => {
                f.write_str("+")?;
                decimal(f, *time_ns, "s")
            }
            When::Line(line) => write!(f, "{line}"),
            When::Mark(name) => match name.parse() {
                Ok(When::Mark(same)) if same == *name => f.write_str(name),
                _ => write!(f, "mark:{name}"),
            },
        }
    }
}

impl std::str::FromStr for When {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Some(name) = text.strip_prefix("mark:").filter(|name| !name.is_empty()) {
            return Ok(When::Mark(name.to_owned()));
        }
        let wrong = || format!("`{text}` is not a time: {FORMS}");
        if let Some(seconds) = text.strip_prefix('@') {
            let at = decimal_ns(seconds, SECOND_NS).and_then(|ns| i64::try_from(ns).ok());
            return at
                .map(When::At)
                .ok_or_else(|| format!("`{text}`: after @ come seconds since 1970, as @1795170600"));
        }
        if let Some(length) = text.strip_prefix('+') {
            return length_ns(length).map(When::Record).ok_or_else(wrong);
        }
        if !text.starts_with(|first: char| first.is_ascii_digit()) {
            let is_name = !text.is_empty() && !text.starts_with('-');
            return is_name.then(|| When::Mark(text.to_owned())).ok_or_else(wrong);
        }
        if let Ok(line) = text.parse() {
            return Ok(When::Line(line));
        }
        if let Some(length) = length_ns(text) {
            return Ok(When::Ago(length));
        }
        parse_time_of_day(text).or_else(|| parse_moment(text)).ok_or_else(wrong)
    }
}

/// Parses a duration such as `1h30m` to nanoseconds.
fn length_ns(text: &str) -> Option<u64> {
    let mut sum = 0_i128;
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let (number, after) = rest.split_at(rest.find(|c: char| c.is_ascii_alphabetic())?);
        let (unit, after) =
            after.split_at(after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len()));
        let scale = match unit {
            "ms" => SECOND_NS / 1000,
            "s" | "sec" => SECOND_NS,
            "m" | "min" => 60 * SECOND_NS,
            "h" => 3600 * SECOND_NS,
            "d" => DAY_NS,
            "w" => 7 * DAY_NS,
            _ => return None,
        };
        sum = sum.checked_add(decimal_ns(number.trim(), scale)?)?;
        rest = after.trim_start();
    }
    u64::try_from(sum).ok()
}

/// Parses a decimal number of units, each `unit_ns` long, to nanoseconds.
fn decimal_ns(text: &str, unit_ns: i128) -> Option<i128> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || part.len() > 9 || !is_digits(whole) || !is_digits(part) {
        return None;
    }
    let tenth = 10_i128.pow(part.len() as u32);
    let part = if part.is_empty() { 0 } else { part.parse::<i128>().ok()? };
    whole.parse::<i128>().ok()?.checked_mul(unit_ns)?.checked_add(part.checked_mul(unit_ns)? / tenth)
}

fn parse_time_of_day(text: &str) -> Option<When> {
    let (time, zone) = match text.strip_suffix(['Z', 'z']) {
        Some(time) => (time, Zone::Utc),
        None => (text, Zone::Local),
    };
    if !time.contains(':') || time.contains(['-', '+', 'T', 't', ' ']) {
        return None;
    }
    time.parse::<Time>().ok().map(|time| When::OfDay(time, zone))
}

fn parse_moment(text: &str) -> Option<When> {
    let at = |timestamp: Timestamp| i64::try_from(timestamp.as_nanosecond()).ok().map(When::At);
    if let Ok(timestamp) = text.parse::<Timestamp>() {
        return at(timestamp);
    }
    // The text has no offset from UTC: a date and time, or a date alone.
    let civil = match text.parse::<DateTime>() {
        Ok(civil) if !text.contains('[') => civil,
        _ => text.parse::<Date>().ok()?.at(0, 0, 0, 0),
    };
    let is_utc = text.ends_with(['Z', 'z']);
    let zone = if is_utc { TimeZone::UTC } else { TimeZone::system() };
    at(zone.to_timestamp(civil).ok()?)
}

impl When {
    /// Returns nanoseconds since 1970. Relative times and times of day are before `now_ns`. Fails for a line, a mark and a time
    /// on a run's own clock, because these exist only within a run.
    pub(crate) fn unix_ns(&self, now_ns: i64) -> Result<i64, String> {
        match self {
            When::Ago(ago_ns) => Ok(now_ns.saturating_sub_unsigned(*ago_ns)),
            When::At(at_ns) => Ok(*at_ns),
            When::OfDay(time, zone) => latest_with_time(*time, *zone, now_ns),
            When::Line(line) => Err(format!("`{line}` has no unit: {FORMS}")),
            When::Record(_) => {
                Err(format!("times that begin with + are for runs without a wall clock: {FORMS}"))
            }
            When::Mark(name) => Err(format!("`{name}` is not a time: {FORMS}")),
        }
    }

    /// Returns the time on a run's clock. Relative times and times of day are before `end_ns`, which is on that clock. `marks`
    /// are the run's marks: name and time, the oldest first.
    pub(crate) fn in_run(&self, run: &Run, end_ns: u64, marks: &[(String, u64)]) -> Result<u64, String> {
        if let When::Mark(name) = self {
            let mark = marks.iter().rev().find(|(known, _)| known == name);
            let lines = run.clock == Clock::Lines && marks.is_empty();
            let wrong = || if lines { LINES.to_owned() } else { no_mark(name, marks) };
            return mark.map(|(_, time_ns)| *time_ns).ok_or_else(wrong);
        }
        match (run.clock, self) {
            (Clock::Lines, When::Line(line)) => Ok(*line),
            (Clock::Lines, _) => Err(LINES.into()),
            (_, When::Ago(ago_ns)) => Ok(end_ns.saturating_sub(*ago_ns)),
            (Clock::Monotonic { wall_offset_ns: None }, When::Record(time_ns)) => Ok(*time_ns),
            (Clock::Monotonic { wall_offset_ns: None }, _) => Err(
                "this run has no time of day: type +12.5s as its report prints times, or 10m for 10 minutes \
                     before its end"
                    .into(),
            ),
            (Clock::Monotonic { wall_offset_ns: Some(offset) }, when) => {
                let end = i128::from(end_ns) + i128::from(offset);
                let end = end.clamp(i64::MIN.into(), i64::MAX.into()) as i64;
                let at = i128::from(when.unix_ns(end)?) - i128::from(offset);
                Ok(at.clamp(0, u64::MAX.into()) as u64)
            }
        }
    }
}

fn no_mark(name: &str, marks: &[(String, u64)]) -> String {
    let mut names: Vec<&str> = marks.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    match names.len() {
        0 => format!("`{name}` is not a time, and the run has no marks: {FORMS}"),
        count => {
            let shown = names.iter().rev().take(8).rev().copied().collect::<Vec<_>>().join(", ");
            let more = if count > 8 { ", ..." } else { "" };
            format!("`{name}` is neither a time nor a mark of the run; its marks: {shown}{more}")
        }
    }
}

/// Returns the latest moment with that time of day, in ns since 1970.
fn latest_with_time(time: Time, zone: Zone, now_ns: i64) -> Result<i64, String> {
    let zone = match zone {
        Zone::Local => TimeZone::system(),
        Zone::Utc => TimeZone::UTC,
    };
    let wrong = |error: jiff::Error| error.to_string();
    let now = Timestamp::from_nanosecond(now_ns.into()).map_err(wrong)?;
    let mut day = zone.to_datetime(now).date();
    loop {
        let at = zone.to_timestamp(day.to_datetime(time)).map_err(wrong)?;
        if at <= now {
            return i64::try_from(at.as_nanosecond()).map_err(|_| FORMS.to_owned());
        }
        day = day.yesterday().map_err(wrong)?;
    }
}

/// Parses two times with a comma between them.
pub(crate) fn two(text: &str) -> Result<(When, When), String> {
    let wrong = || format!("`{text}`: two times with a comma between them, as 10:30,10:45 or 2h,1h");
    let (from, to) = text.split_once(',').ok_or_else(wrong)?;
    Ok((from.parse()?, to.parse()?))
}

pub(crate) fn parse_unix_ns(text: &str) -> Result<i64, String> {
    text.parse::<When>()?.unix_ns(now_ns())
}

/// Returns the present time in ns since 1970.
pub(crate) fn now_ns() -> i64 {
    i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-20 10:30:00 UTC.
    const NOW: i64 = 1_795_170_600_000_000_000;
    const S: i64 = 1_000_000_000;

    fn unix(text: &str) -> Result<i64, String> {
        text.parse::<When>()?.unix_ns(NOW)
    }

    #[test]
    fn lengths_are_before_now() {
        let cases = [
            ("90s", 90 * S),
            ("10m", 600 * S),
            ("1h30m", 5400 * S),
            ("2d", 172_800 * S),
            ("1.5h", 5400 * S),
            ("500ms", S / 2),
            ("1w", 604_800 * S),
            ("1h 5min", 3900 * S),
            ("0s", 0),
        ];
        for (text, ago) in cases {
            assert_eq!(unix(text), Ok(NOW - ago), "{text}");
        }
    }

    #[test]
    fn what_was_typed_can_be_typed_again() {
        for text in [
            "90s",
            "1h30m",
            "1.5s",
            "10:30",
            "10:30:15Z",
            "2026-11-20T10:30Z",
            "@1795170600.25",
            "+12.5s",
            "1200",
            "warm up",
            "mark:10:30",
        ] {
            let when: When = text.parse().expect(text);
            assert_eq!(when.to_string().parse(), Ok(when.clone()), "{text}: {when}");
        }
    }

    #[test]
    fn moments_have_their_zone() {
        for text in [
            "2026-11-20T10:30:00Z",
            "2026-11-20T10:30Z",
            "2026-11-20T11:30+01:00",
            "2026-11-20 10:30:00Z",
            "@1795170600",
        ] {
            assert_eq!(unix(text), Ok(NOW), "{text}");
        }
        assert_eq!(unix("@1795170600.5"), Ok(NOW + S / 2));
        assert_eq!(unix("10:30Z"), Ok(NOW));
        assert_eq!(unix("10:30:01Z"), Ok(NOW + S - 86_400 * S), "that of today is to come");
        assert_eq!(unix("00:00Z"), Ok(NOW - 37_800 * S));
    }

    #[test]
    fn without_a_zone_it_is_the_users() {
        let zone = TimeZone::system();
        let local = zone.to_datetime(Timestamp::from_nanosecond(NOW.into()).expect("a time"));
        let text = local.strftime("%Y-%m-%dT%H:%M").to_string();
        assert_eq!(unix(&text), Ok(NOW), "{text}");
        assert_eq!(unix(&local.strftime("%H:%M").to_string()), Ok(NOW));
        let midnight = zone.to_timestamp(local.date().at(0, 0, 0, 0)).expect("a midnight");
        assert_eq!(
            unix(&local.strftime("%Y-%m-%d").to_string()).map(i128::from),
            Ok(midnight.as_nanosecond())
        );
    }

    #[test]
    fn what_is_no_time_says_what_would_be() {
        for text in [
            "",
            "-5m",
            "5x",
            "10:61",
            "25:00",
            "2026-13-01",
            "2026-11-20T",
            "@",
            "@x",
            "+",
            "1h30",
            "7",
            "99999999999999999999d",
            "morning",
            "1..5h",
        ] {
            let error = unix(text).expect_err(text);
            assert!(error.contains("10:30") || error.contains("@1795170600"), "{text}: {error}");
        }
        assert!(two("1h").is_err() && two("1h,x,").is_ok_and(|(_, to)| to == When::Mark("x,".into())));
    }

    #[test]
    fn runs_have_clocks_and_marks_of_their_own() {
        let run = |clock| Run { clock, ..crate::when::tests::run() };
        let at = |text: &str, clock| {
            text.parse::<When>()?.in_run(
                &run(clock),
                100 * S as u64,
                &[("warm".into(), 7), ("warm".into(), 9), ("10:30".into(), 11)],
            )
        };
        let lines = Clock::Lines;
        assert_eq!(at("12", lines), Ok(12));
        assert!(at("10m", lines).is_err_and(|error| error.contains("lines of its log")));
        let bare = Clock::Monotonic { wall_offset_ns: None };
        assert_eq!([at("10s", bare), at("+12.5s", bare)], [Ok(90 * S as u64), Ok(12_500_000_000)]);
        assert!(at("10:30", bare).is_err_and(|error| error.contains("+12.5s")));
        let wall = Clock::Monotonic { wall_offset_ns: Some(NOW - 100 * S) };
        assert_eq!(at("10:29:50Z", wall), Ok(90 * S as u64));
        assert_eq!(at("2020-01-01", wall), Ok(0), "before the clock began");
        for clock in [lines, bare, wall] {
            assert_eq!([at("warm", clock), at("mark:10:30", clock)], [Ok(9), Ok(11)]);
            assert!(at("cold", clock).is_err_and(|error| error.contains("warm")));
        }
    }

    fn run() -> Run {
        use gpumem_model::run::{Coverage, Process, ProgramData, Source, State};
        Run {
            source: Source { kind: "daemon".into(), origin: String::new(), preset: None },
            clock: Clock::Lines,
            process: Process::default(),
            state: State::Open,
            coverage: Coverage::default(),
            caveats: Vec::new(),
            cells: Vec::new(),
            devices: Vec::new(),
            own: ProgramData::default(),
        }
    }
}
