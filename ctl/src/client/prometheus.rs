//! Instant queries to a Prometheus, or to a server with the same HTTP API (Thanos, Mimir, VictoriaMetrics).
//!
//! http is sent by hyper. For https the program `curl` is started, which has the system's certificates, proxies and passwords.

use super::http;
use super::samples::{Wrong, encoded, read};
use crate::exit::Kind;
use anyhow::Result;
use gpumem_report::text::escape;
use hyper::StatusCode;
use std::time::Duration;

pub(crate) use super::samples::{Sample, quoted};

/// Timeout for queries. Servers abort a query after two minutes, but users do not want to wait that long.
const ANSWER: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub(crate) struct Prometheus {
    /// The address as typed, for errors.
    url: String,
    is_https: bool,
    /// `host:port`.
    authority: String,
    /// Path before `/api`; empty, or with a slash at its start.
    prefix: String,
}

impl Prometheus {
    /// Parses an address. An address with a password is refused, because all users can see the arguments of a process.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let wrong = |why: &str| Kind::Usage.error(format!("--prometheus {}: {why}", escape(url)));
        let no_address = || wrong("is not an address: http://HOST[:PORT][/PREFIX] or https://...");
        let (is_https, rest) = match url.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some(_) => return Err(no_address()),
            None => (false, url),
        };
        let (authority, prefix) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
        if authority.contains('@') {
            return Err(wrong(
                "no password is taken from the address; with https:// it is read from ~/.netrc",
            ));
        }
        let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"?#\"<>\\^`{|}%".contains(&byte);
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse::<u16>().ok()),
            _ => (authority, Some(if is_https { 443 } else { 80 })),
        };
        let port = port.filter(|_| !host.is_empty() && rest.bytes().all(is_plain));
        let Some(port) = port else { return Err(no_address()) };
        let prefix = prefix.trim_end_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("/{prefix}") };
        Ok(Prometheus { url: url.to_owned(), is_https, authority: format!("{host}:{port}"), prefix })
    }

    /// Returns the samples of a query at one time, in s since 1970, or now if `time` is `None`. Fails if the server does not
    /// answer, is not a Prometheus, or refuses the query.
    pub(crate) fn query(&self, query: &str, time: Option<f64>) -> Result<Vec<Sample>> {
        let time = time.map(|time| format!("&time={time:.3}")).unwrap_or_default();
        let path = format!("{}/api/v1/query?query={}{time}", self.prefix, encoded(query));
        let reply = match self.is_https {
            true => http::get_by_curl(&format!("https://{}{path}", self.authority), ANSWER),
            false => http::get(&self.authority, &path, ANSWER),
        };
        let (status, body) = reply.map_err(|why| self.no_answer(&why))?;
        read(&body, status == StatusCode::OK).map_err(|why| match why {
            Wrong::Refused(error) => anyhow::anyhow!("{} refuses the query: {error}", escape(&self.url)),
            Wrong::Kind(kind) => self.no_answer(&format!("answers with a {kind}, not a vector")),
            Wrong::Foreign if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                self.no_answer(match self.is_https {
                    true => "wants a password: put it into ~/.netrc (machine HOST login USER password WORD)",
                    false => "wants a password, and none is sent without TLS: use https://, or a tunnel to the server",
                })
            }
            Wrong::Foreign if status.is_redirection() => {
                self.no_answer("redirects (to a login page, or to https): give the address of the server itself")
            }
            Wrong::Foreign if status == StatusCode::OK => self.no_answer("answers, but not as a Prometheus does"),
            Wrong::Foreign => self.no_answer(&format!(
                "answers {status}, not as a Prometheus does: does the address need another path?"
            )),
        })
    }

    fn no_answer(&self, why: &str) -> anyhow::Error {
        Kind::NoAnswer.error(format!("the Prometheus at {}: {why}", escape(&self.url)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_taken_apart_or_refused() {
        let of = |url: &str| Prometheus::parse(url).map(|server| (server.authority, server.prefix));
        let pair = |authority: &str, prefix: &str| (authority.to_owned(), prefix.to_owned());
        for (url, expected) in [
            ("http://prom:9090", pair("prom:9090", "")),
            ("http://prom:9090/", pair("prom:9090", "")),
            ("prom:9090", pair("prom:9090", "")),
            ("http://prom", pair("prom:80", "")),
            ("http://[::1]:9090/prometheus/", pair("[::1]:9090", "/prometheus")),
            ("http://[::1]", pair("[::1]:80", "")),
            ("https://prom/", pair("prom:443", "")),
            ("https://prom:9091/a", pair("prom:9091", "/a")),
        ] {
            assert_eq!(of(url).expect(url), expected, "{url}");
        }
        for (url, why) in [
            ("http://u:p@prom", "no password"),
            ("https://u:p@prom", "~/.netrc"),
            ("https://", "is not an address"),
            ("ftp://prom", "is not an address"),
            ("http://prom:port", "is not an address"),
            ("http://:9090", "is not an address"),
            ("http://prom:9090/?x=1", "is not an address"),
            ("http://prom:9090/a b", "is not an address"),
            ("http://prom:99999", "is not an address"),
            ("", "is not an address"),
        ] {
            let error = of(url).expect_err(url).to_string();
            assert!(error.contains(why), "{url}: {error}");
        }
    }
}
