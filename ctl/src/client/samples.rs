//! Text of queries to a Prometheus and of its replies.

use gpumem_report::text::escape;
use serde::Deserialize;
use std::collections::BTreeMap;

/// A value of a series at a time, in a reply of Prometheus.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Sample {
    /// Labels, including the metric's name as `__name__`.
    pub metric: BTreeMap<String, String>,
    /// Time in s since 1970, and the value as text.
    value: (f64, String),
}

impl Sample {
    /// Returns a label; `None` if it is absent or empty.
    pub(crate) fn label(&self, name: &str) -> Option<&str> {
        self.metric.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns the value as an integer; `None` if it is not finite or too large.
    pub(crate) fn number(&self) -> Option<i64> {
        self.value.1.parse::<i64>().ok().or_else(|| {
            let value = self.value.1.parse::<f64>().ok()?;
            (value.is_finite() && value.abs() < 9.0e18).then_some(value as i64)
        })
    }

    /// Returns the time of the sample, in s since 1970.
    pub(crate) fn time(&self) -> f64 {
        self.value.0
    }
}

#[derive(Deserialize)]
struct Answer {
    status: String,
    error: Option<String>,
    data: Option<Data>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Data {
    result_type: String,
    result: Vec<Sample>,
}

/// Reasons why a reply has no samples. Their texts are escaped for a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// Prometheus refuses the query, with this message.
    Refused(String),
    /// The result has this type instead of `vector`.
    Kind(String),
    /// The reply is not from a Prometheus.
    Foreign,
}

/// Returns the samples of a reply to an instant query. `is_ok` is whether the HTTP status is 200.
pub(crate) fn read(body: &[u8], is_ok: bool) -> Result<Vec<Sample>, Wrong> {
    let answer: Answer = serde_json::from_slice(body).map_err(|_| Wrong::Foreign)?;
    if let Some(error) = answer.error {
        return Err(Wrong::Refused(escape(&error)));
    }
    match answer.data {
        Some(data) if is_ok && answer.status == "success" => match data.result_type.as_str() {
            "vector" => Ok(data.result),
            other => Err(Wrong::Kind(escape(other))),
        },
        _ => Err(Wrong::Foreign),
    }
}

/// Returns a text as a string literal of PromQL.
pub(crate) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

/// Percent-encodes all bytes that servers may treat differently, such as plus signs and blanks.
pub(crate) fn encoded(text: &str) -> String {
    percent_encoded(text, b"-._~")
}

/// Percent-encodes all bytes but ASCII letters, digits and those in `plain`.
pub(crate) fn percent_encoded(text: &str, plain: &[u8]) -> String {
    let encode = |byte: u8| match byte.is_ascii_alphanumeric() || plain.contains(&byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_leave_its_string() {
        assert_eq!(quoted("a\"} or vector(1) #\\\n"), "\"a\\\"} or vector(1) #\\\\\\n\"");
        assert_eq!(encoded("a{b=\"c d+\"}&time=1"), "a%7Bb%3D%22c%20d%2B%22%7D%26time%3D1");
    }

    #[test]
    fn bytes_are_whole_numbers() {
        let sample = |value: &str| Sample { metric: BTreeMap::new(), value: (0.0, value.to_owned()) };
        assert_eq!(sample("85899345921").number(), Some(85_899_345_921));
        assert_eq!(sample("-1.5e+10").number(), Some(-15_000_000_000));
        assert_eq!(
            (sample("NaN").number(), sample("+Inf").number(), sample("x").number()),
            (None, None, None)
        );
    }
}
