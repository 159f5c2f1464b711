//! Functions that read and check values of the configuration. For an error, the reader of the file adds file, line and key.

use serde::de::{Deserialize, Deserializer, Error};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

fn within<'de, D, T>(from: D, min: T, max: T, what: &str) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + PartialOrd + std::fmt::Display,
{
    let value = T::deserialize(from)?;
    if value >= min && value <= max {
        return Ok(value);
    }
    Err(D::Error::custom(format!("{value} is out of range: {what} from {min} to {max} are allowed")))
}

/// Makes functions that check numbers, from: name, type, smallest and largest value, and the word for such numbers in an error,
/// such as `seconds`.
macro_rules! ranges {
    ($($name:ident: $type:ty = $min:expr, $max:expr, $what:literal;)*) => {
        $(pub(super) fn $name<'de, D: Deserializer<'de>>(from: D) -> Result<$type, D::Error> {
            within(from, $min, $max, $what)
        })*
    };
}

ranges! {
    connections: usize = 1, 65_536, "counts";
    series: usize = 100, 1_000_000, "counts";
    tags: usize = 0, 100, "counts";
    age: f64 = 0.0, 3600.0, "seconds";
    rows: usize = 1000, 1 << 30, "counts";
    memory: usize = 1, 1 << 20, "MiB";
    whole: u64 = 0, 1 << 20, "whole numbers";
    hertz: u32 = 1, 100, "readings a second";
    seconds: f64 = 0.01, 86_400.0, "seconds";
    days: f64 = 0.0, 36_500.0, "days";
    share: f64 = 0.0001, 1.0, "shares";
}

pub(super) fn roll<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let value = f64::deserialize(from)?;
    if value == 0.0 || (1.0..=2_678_400.0).contains(&value) {
        return Ok(value);
    }
    Err(D::Error::custom(format!(
        "{value} is out of range: 0 (never), or seconds from 1 to 2678400 are allowed"
    )))
}

/// Reads a list of host names, or of `*.` with a suffix: the values of the HTTP header `Host` that are accepted in requests.
pub(super) fn hosts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let hosts = Vec::<String>::deserialize(from)?;
    for host in &hosts {
        let name = host.strip_prefix("*.").unwrap_or(host);
        let is_name = !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
            && (name.len() == host.len() || name.contains('.'));
        if !is_name {
            return Err(D::Error::custom(format!(
                "{host:?} is not a host name: without a port, such as \"gpu.example.com\", or \"*.example.com\" for all names with \
                 that end"
            )));
        }
    }
    Ok(hosts)
}

pub(super) fn address<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(from)?;
    if text == "off" {
        return Ok(None);
    }
    let parsed = text.parse().map(Some);
    parsed.map_err(|_| {
        D::Error::custom(format!(
            "{text:?} is not an address: ADDRESS:PORT such as \"127.0.0.1:9837\", or \"off\""
        ))
    })
}

/// Reads an absolute path, or `off`. A relative path is refused, because the daemon's working directory is `/`.
pub(super) fn folder<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PathBuf>, D::Error> {
    let text = String::deserialize(from)?;
    match Path::new(&text) {
        _ if text == "off" => Ok(None),
        path if path.is_absolute() => Ok(Some(path.to_owned())),
        _ => {
            Err(D::Error::custom(format!("{text:?} is not a folder: a path that begins with /, or \"off\"")))
        }
    }
}
