//! Asking a Prometheus, or what speaks its HTTP API (Thanos, Mimir, VictoriaMetrics): instant queries.
//!
//! There is no TLS in gpumemctl, and no password is ever sent: a server behind either is reached through a tunnel.

use super::http;
use crate::exit::{NoAnswer, Usage};
use anyhow::Result;
use gpumem_runs::report::text::clean;
use hyper::StatusCode;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Servers give up on a query after two minutes; people sooner.
const ANSWER: Duration = Duration::from_secs(30);

/// A server that was typed.
#[derive(Debug, Clone)]
pub struct Prometheus {
    /// As it was typed.
    url: String,
    /// `host:port`.
    authority: String,
    /// What stands before `/api`.
    prefix: String,
}

/// One sample of an answer.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Sample {
    /// Labels, the metric's name among them.
    pub metric: BTreeMap<String, String>,
    value: (f64, String),
}

impl Sample {
    /// A label.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.metric.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The value as a whole number: what has none is none.
    pub fn number(&self) -> Option<i64> {
        self.value.1.parse::<i64>().ok().or_else(|| {
            let value = self.value.1.parse::<f64>().ok()?;
            (value.is_finite() && value.abs() < 9.0e18).then_some(value as i64)
        })
    }

    /// The time for which the server answered: s since 1970.
    pub fn time(&self) -> f64 {
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

impl Prometheus {
    /// What an address means.
    ///
    /// # Errors
    /// [`Usage`]: it is none, or one that cannot be reached from here.
    pub fn of(url: &str) -> Result<Self, Usage> {
        let wrong = |why: &str| Usage(format!("--prometheus {}: {why}", clean(url)));
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some(("https", _)) => {
                return Err(wrong(
                    "gpumemctl has no TLS. Make a tunnel (ssh -L 9090:localhost:9090 HOST, or kubectl port-forward \
                     svc/prometheus 9090) and give http://localhost:9090",
                ));
            }
            Some(_) => return Err(wrong("is no address: http://HOST[:PORT][/PREFIX]")),
            None => url,
        };
        let (authority, prefix) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
        if authority.contains('@') {
            return Err(wrong("no password is sent over a connection without TLS; make a tunnel"));
        }
        let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"?#\"<>\\^`{|}%".contains(&byte);
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse::<u16>().ok()),
            _ => (authority, Some(80)),
        };
        let port = port.filter(|_| !host.is_empty() && rest.bytes().all(is_plain));
        let Some(port) = port else { return Err(wrong("is no address: http://HOST[:PORT][/PREFIX]")) };
        let prefix = prefix.trim_end_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("/{prefix}") };
        Ok(Prometheus { url: url.to_owned(), authority: format!("{host}:{port}"), prefix })
    }

    /// The samples of an instant query, at a time or now.
    ///
    /// # Errors
    /// Nobody answers, or not as Prometheus does, or the query is refused.
    pub fn query(&self, query: &str, time: Option<f64>) -> Result<Vec<Sample>> {
        let time = time.map(|time| format!("&time={time:.3}")).unwrap_or_default();
        let path = format!("{}/api/v1/query?query={}{time}", self.prefix, encoded(query));
        let told = http::ask(&self.authority, &path, ANSWER);
        let (status, body) = told.map_err(|why| self.silent(&why))?;
        let answer = serde_json::from_slice::<Answer>(&body).ok();
        if let Some(error) = answer.as_ref().and_then(|answer| answer.error.as_deref()) {
            return Err(anyhow::anyhow!("{} refuses the query: {}", clean(&self.url), clean(error)));
        }
        match (answer, status) {
            (Some(Answer { data: Some(data), status, .. }), StatusCode::OK) if status == "success" => {
                match data.result_type.as_str() {
                    "vector" => Ok(data.result),
                    other => Err(self.silent(&format!("answers with a {}, not a vector", clean(other))).into()),
                }
            }
            (_, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => Err(self
                .silent("wants a password, and none is sent over a connection without TLS: make a tunnel to the server itself")
                .into()),
            (_, status) if status.is_redirection() => {
                Err(self.silent("sends elsewhere (to a page for logging in, or to https): name the server itself").into())
            }
            (_, StatusCode::OK) => Err(self.silent("answers, but not as a Prometheus does").into()),
            (_, status) => Err(self
                .silent(&format!("answers {status}, not as a Prometheus does: is its path behind the address another one?"))
                .into()),
        }
    }

    fn silent(&self, why: &str) -> NoAnswer {
        NoAnswer(format!("the Prometheus at {}: {why}", clean(&self.url)))
    }
}

/// A text as a string of PromQL.
pub fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '\\' => quoted += "\\\\",
            '"' => quoted += "\\\"",
            '\n' => quoted += "\\n",
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

/// A blank is a plus for some servers, so everything that could be read in two ways is encoded.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let encode = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_taken_apart_or_refused() {
        let of = |url: &str| Prometheus::of(url).map(|server| (server.authority, server.prefix));
        let pair = |authority: &str, prefix: &str| (authority.to_owned(), prefix.to_owned());
        for (url, expected) in [
            ("http://prom:9090", pair("prom:9090", "")),
            ("http://prom:9090/", pair("prom:9090", "")),
            ("prom:9090", pair("prom:9090", "")),
            ("http://prom", pair("prom:80", "")),
            ("http://[::1]:9090/prometheus/", pair("[::1]:9090", "/prometheus")),
            ("http://[::1]", pair("[::1]:80", "")),
        ] {
            assert_eq!(of(url).expect(url), expected, "{url}");
        }
        for (url, why) in [
            ("https://prom", "no TLS"),
            ("http://u:p@prom", "no password"),
            ("ftp://prom", "is no address"),
            ("http://prom:port", "is no address"),
            ("http://:9090", "is no address"),
            ("http://prom:9090/?x=1", "is no address"),
            ("http://prom:9090/a b", "is no address"),
            ("http://prom:99999", "is no address"),
            ("", "is no address"),
        ] {
            let error = of(url).expect_err(url).0;
            assert!(error.contains(why), "{url}: {error}");
        }
    }

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
