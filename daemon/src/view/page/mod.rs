//! Serves the live page, which shows devices with their processes, and details of one process, in a browser.
//!
//! ```text
//! GET /, /process/PID.START        the page: one file, which sends requests only to this listener
//! GET /api/devices                 devices
//! GET /api/processes               devices and processes at the same time
//! GET /api/process/PID.START       the report of a process (docs/report-json.md)
//! GET /api/process/PID.START/page  data of the report as the page draws it
//!
//! response_cache  makes each answer once for all clients, and limits the time for making answers
//! node            devices and processes as JSON
//! process         data of one process
//! ```
//!
//! All users of the machine can connect to a loopback port. So the page shows no more than the metrics: categories instead of
//! tags, and no command line, unless the configuration allows it (`metrics.page`).

mod node;
mod process;
mod response_cache;

use super::http::{full, plain};
use super::{Refused, ViewContext};
use crate::config::Page;
use gpumem_ledger::ProcessKey;
use gpumem_report::html::{self, Shell};
use gpumem_runs::export::fnv1a;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    CACHE_CONTROL, CONNECTION, CONTENT_SECURITY_POLICY, ETAG, HOST, HeaderName, HeaderValue, IF_NONE_MATCH,
    REFERRER_POLICY, RETRY_AFTER, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use hyper::{Request, Response, StatusCode, Version};
use response_cache::PageData;
pub(crate) use response_cache::ResponseCache;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

const JSON: &str = "application/json";
const STYLE: &str = include_str!("live.css");
const SCRIPT: &str = concat!(include_str!("live.js"), include_str!("node.js"), include_str!("start.js"));
/// Response header with the version of the page. If it changes, because the daemon was replaced, an open page reloads itself.
const PAGE: HeaderName = HeaderName::from_static("gpumemd-page");

struct Document {
    page: Bytes,
    policy: HeaderValue,
    tag: HeaderValue,
}

/// Returns the page, which is the same for all clients.
fn document() -> &'static Document {
    static DOCUMENT: OnceLock<Document> = OnceLock::new();
    DOCUMENT.get_or_init(|| {
        let words = "This page needs JavaScript. Without it, use gpumemctl ps and gpumemctl report PID.";
        let Shell { page, policy } = html::shell("GPU memory", STYLE, SCRIPT, words);
        // The tag of the page is also valid for the policy, which changes only with the page.
        let tag = format!("\"{}-{:x}\"", env!("CARGO_PKG_VERSION"), fnv1a(page.as_bytes()));
        let policy = format!("{policy}; frame-ancestors 'none'");
        let value = |text: &str| HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""));
        Document { policy: value(&policy), tag: value(&tag), page: page.into() }
    })
}

#[derive(Debug, PartialEq, Eq)]
enum PageRequest {
    Page,
    Data(PageData),
}

impl PageRequest {
    fn of(path: &str) -> Option<Self> {
        let key = |text: &str| {
            let (pid, start) = text.split_once('.')?;
            Some(ProcessKey { pid: pid.parse().ok()?, start_ticks: start.parse().ok()? })
        };
        if let Some(process) = path.strip_prefix("/api/process/") {
            return Some(PageRequest::Data(match process.strip_suffix("/page") {
                Some(process) => PageData::Drawn(key(process)?),
                None => PageData::Report(key(process)?),
            }));
        }
        match path {
            "/" => Some(PageRequest::Page),
            "/api/devices" => Some(PageRequest::Data(PageData::Devices)),
            "/api/processes" => Some(PageRequest::Data(PageData::Processes)),
            path => key(path.strip_prefix("/process/")?).map(|_| PageRequest::Page),
        }
    }
}

/// For fuzz/: returns whether the page has this path, and whether the value of a `Host` header names this machine.
#[doc(hidden)]
pub fn fuzz_request(path: &str, host: &str, own: &str, hosts: &[String]) -> (bool, bool) {
    (PageRequest::of(path).is_some(), is_own_name(host, own, hosts))
}

/// Returns the answer to a GET; `None` if the page has no such path.
pub(super) async fn answer(
    context: &Arc<ViewContext>,
    cache: &ResponseCache,
    request: &Request<Incoming>,
) -> Option<Response<Full<Bytes>>> {
    let page_request = PageRequest::of(request.uri().path())?;
    let mut response = if context.shown().page == Page::Off {
        plain(StatusCode::NOT_FOUND, "there is no page here: metrics.page is \"off\" in the configuration\n")
    } else {
        match page_request {
            PageRequest::Page => unless_cached(request, &document().tag, || {
                let mut page = full(StatusCode::OK, "text/html; charset=utf-8", document().page.clone());
                page.headers_mut().insert(CONTENT_SECURITY_POLICY, document().policy.clone());
                page
            }),
            PageRequest::Data(what) => match cache.get(context, what).await {
                Ok(made) => {
                    unless_cached(request, &made.tag, || full(StatusCode::OK, JSON, made.body.clone()))
                }
                Err(refused) => refusal(refused),
            },
        }
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        // A page sends its next request one or two seconds later. Until then, other clients may use the slot of this connection.
        (CONNECTION, "close"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert(PAGE, document().tag.clone());
    Some(response)
}

/// Returns the response 304 without a body if the client already has the version `tag`, else `whole`.
fn unless_cached(
    request: &Request<Incoming>,
    tag: &HeaderValue,
    whole: impl FnOnce() -> Response<Full<Bytes>>,
) -> Response<Full<Bytes>> {
    let mut response = if request.headers().get(IF_NONE_MATCH) == Some(tag) {
        let mut response = Response::new(Full::default());
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response
    } else {
        whole()
    };
    response.headers_mut().insert(ETAG, tag.clone());
    response
}

fn refusal(Refused(status, error): Refused) -> Response<Full<Bytes>> {
    let mut response = full(status, JSON, serde_json::json!({ "error": error }).to_string());
    if status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("2"));
    }
    response
}

/// Returns whether a request names this machine in its only `Host` header, and in its target if that is an absolute URI.
///
/// A foreign website could resolve its own name to this address (DNS rebinding) to read data here. But it cannot make a browser
/// send another name than its own. HTTP/1.0 has no `Host`, and browsers do not use it.
pub(super) fn is_for_this_machine<B>(request: &Request<B>, hosts: &[String]) -> bool {
    let own = rustix::system::uname();
    let own = own.nodename().to_string_lossy();
    let in_target = request.uri().authority().map(|authority| authority.as_str());
    let is_absolute = request.uri().scheme().is_some() || in_target.is_some();
    let mut named = request.headers().get_all(HOST).iter();
    let host = match (named.next(), named.next()) {
        (Some(host), None) => host.to_str().ok(),
        (None, _) if request.version() == Version::HTTP_10 => Some("localhost"),
        _ => None,
    };
    let target = if is_absolute { in_target } else { host };
    // A target with a user name before the host is refused, because that is not a name of this machine.
    [host, target].iter().all(|name| name.is_some_and(|name| is_own_name(name, &own, hosts)))
}

fn is_own_name(host: &str, own: &str, hosts: &[String]) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split(':').next().unwrap_or(host),
    };
    // Other names that begin with this machine's name are not accepted, because they could be foreign domains.
    let short = own.split('.').next().unwrap_or(own);
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || !own.is_empty() && (name.eq_ignore_ascii_case(own) || name.eq_ignore_ascii_case(short))
        || hosts.iter().any(|allowed| is_allowed(allowed, name))
}

/// Returns whether the configured name `allowed` matches `name`. `*.` with a suffix matches all longer names with the suffix.
fn is_allowed(allowed: &str, name: &str) -> bool {
    match allowed.strip_prefix('*') {
        Some(end) => {
            let begins = name.len().checked_sub(end.len()).filter(|&begins| begins > 0);
            begins.and_then(|at| name.get(at..)).is_some_and(|of_name| of_name.eq_ignore_ascii_case(end))
        }
        None => allowed.eq_ignore_ascii_case(name),
    }
}

#[cfg(test)]
pub(super) fn of_processes(
    published: &crate::aggregator::Published,
    health: &super::Health,
    shown: &super::ViewSettings,
) -> serde_json::Value {
    node::node(published, health, shown, &crate::run_writer::LiveFindings::default(), true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_names_this_machine_once_and_everywhere() {
        let ask = |target: &str, hosts: &[&str], version: Version| {
            let mut request = Request::builder().uri(target).version(version);
            for host in hosts {
                request = request.header(HOST, *host);
            }
            is_for_this_machine(&request.body(()).expect("a request"), &[])
        };
        let (one, old) = (Version::HTTP_11, Version::HTTP_10);
        assert!(ask("/metrics", &["localhost:9837"], one));
        assert!(ask("/metrics", &[], old), "HTTP/1.0 has no Host");
        assert!(ask("http://127.0.0.1:9837/metrics", &["127.0.0.1:9837"], one));
        for (target, hosts, version) in [
            ("/metrics", &["rebound.example"][..], one),
            ("/metrics", &["rebound.example"], old),
            ("/metrics", &[], one),
            ("/metrics", &["localhost", "rebound.example"], one),
            ("/metrics", &["localhost", "localhost"], one),
            ("http://rebound.example/metrics", &["localhost"], one),
            ("http://localhost/metrics", &["rebound.example"], one),
            ("http://rebound.example/metrics", &[], old),
            ("http://localhost@rebound.example/metrics", &["localhost"], one),
        ] {
            assert!(!ask(target, hosts, version), "{target} {hosts:?} {version:?}");
        }
    }

    #[test]
    fn paths() {
        let key = ProcessKey { pid: 12, start_ticks: 345 };
        for (path, asked) in [
            ("/", Some(PageRequest::Page)),
            ("/process/12.345", Some(PageRequest::Page)),
            ("/process/12", None),
            ("/process/../etc/passwd", None),
            ("/api/devices", Some(PageRequest::Data(PageData::Devices))),
            ("/api/process/12.345", Some(PageRequest::Data(PageData::Report(key)))),
            ("/api/process/12.345/page", Some(PageRequest::Data(PageData::Drawn(key)))),
            ("/api/process/12.345/other", None),
            ("/api/process/-1.5", None),
            ("/api", None),
            ("/favicon.ico", None),
        ] {
            assert_eq!(PageRequest::of(path), asked, "{path}");
        }
    }

    #[test]
    fn who_asks_for_this_machine() {
        for (host, ours) in [
            ("127.0.0.1:9837", true),
            ("[::1]:9837", true),
            ("localhost", true),
            ("LOCALHOST:80", true),
            ("page.localhost:9837", true),
            ("node7:9837", true),
            ("node7.cluster.example:9837", true),
            ("NODE7.cluster.example", true),
            ("node7.evil.example:9837", false),
            ("node77:9837", false),
            ("rebound.example:9837", false),
            ("127.0.0.1.example", false),
            ("", false),
            ("gpumemd.monitoring.svc:9837", true),
            ("GPUMEMD.monitoring.SVC", true),
            ("gpumemd.monitoring.svc.evil.example", false),
            ("evil-gpumemd.monitoring.svc", false),
            ("a.gpu.example.com", true),
            ("gpu.example.com", false),
            (".gpu.example.com", false),
            ("a.gpu.example.com.evil.example", false),
            ("\u{e9}.gpu.example.com", true),
        ] {
            let hosts = ["gpumemd.monitoring.svc".to_owned(), "*.gpu.example.com".to_owned()];
            assert_eq!(is_own_name(host, "node7.cluster.example", &hosts), ours, "{host}");
        }
    }

    #[test]
    fn the_page_is_small_and_names_its_parts() {
        let Document { page, policy, .. } = document();
        assert!(page.len() < 200_000, "{}", page.len());
        let policy = policy.to_str().expect("a policy");
        for part in
            ["default-src 'none'", "script-src 'sha256-", "connect-src 'self'", "frame-ancestors 'none'"]
        {
            assert!(policy.contains(part), "{policy}");
        }
        for part in [SCRIPT, STYLE] {
            let part = part.to_ascii_lowercase();
            for word in
                ["</script", "</style", "<!--", "http:", "https:", "innerhtml", "eval(", "url(", "import("]
            {
                assert!(!part.contains(word), "{word}");
            }
        }
    }
}
