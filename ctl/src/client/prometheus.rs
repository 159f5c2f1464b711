//! Instant queries to a Prometheus, or to a server with the same HTTP API (Thanos, Mimir, VictoriaMetrics).
//!
//! gpumemctl has no TLS and never sends a password, so a server that needs either must be reached through a tunnel.

use super::http;
use super::samples::{self, Wrong, encoded};
use crate::exit::{NoAnswer, Usage};
use anyhow::Result;
use gpumem_report::text::clean;
use hyper::StatusCode;
use std::time::Duration;

pub(crate) use super::samples::{Sample, quoted};

/// Timeout for queries. Servers abort a query after two minutes, but users do not want to wait that long.
const ANSWER: Duration = Duration::from_secs(30);

/// A server, as named by the user.
#[derive(Debug, Clone)]
pub(crate) struct Prometheus {
    /// The address as typed.
    url: String,
    /// `host:port`.
    authority: String,
    /// Path before `/api`.
    prefix: String,
}

impl Prometheus {
    /// Parses an address.
    ///
    /// # Errors
    /// [`Usage`] if it is no address, or needs TLS or a password.
    pub(crate) fn of(url: &str) -> Result<Self, Usage> {
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

    /// Returns the samples of an instant query, at a time in s since 1970, or now.
    ///
    /// # Errors
    /// If the server does not answer, is no Prometheus, or refuses the query.
    pub(crate) fn query(&self, query: &str, time: Option<f64>) -> Result<Vec<Sample>> {
        let time = time.map(|time| format!("&time={time:.3}")).unwrap_or_default();
        let path = format!("{}/api/v1/query?query={}{time}", self.prefix, encoded(query));
        let told = http::ask(&self.authority, &path, ANSWER);
        let (status, body) = told.map_err(|why| self.silent(&why))?;
        samples::read(&body, status == StatusCode::OK).map_err(|why| match why {
            Wrong::Refused(error) => anyhow::anyhow!("{} refuses the query: {error}", clean(&self.url)),
            Wrong::Kind(kind) => self.silent(&format!("answers with a {kind}, not a vector")).into(),
            Wrong::Foreign if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => self
                .silent("wants a password, and none is sent over a connection without TLS: make a tunnel to the server itself")
                .into(),
            Wrong::Foreign if status.is_redirection() => {
                self.silent("sends elsewhere (to a page for logging in, or to https): name the server itself").into()
            }
            Wrong::Foreign if status == StatusCode::OK => {
                self.silent("answers, but not as a Prometheus does").into()
            }
            Wrong::Foreign => self
                .silent(&format!("answers {status}, not as a Prometheus does: is its path behind the address another one?"))
                .into(),
        })
    }

    fn silent(&self, why: &str) -> NoAnswer {
        NoAnswer(format!("the Prometheus at {}: {why}", clean(&self.url)))
    }
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
}
