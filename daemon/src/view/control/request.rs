//! Shared by all requests of the control API: parsing a query, refusing a request.

use crate::config::Tenants;
use crate::view::ViewContext;
use crate::view::visibility::Viewer;
use gpumem_ledger::ProcessView;
use hyper::StatusCode;
use serde::Serialize;

/// Bytes of an answer that are sent at a time. A larger answer is serialized on another thread, and its user gets the next answer
/// only after this one has been read.
pub(super) const SMALL: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Refused(pub StatusCode, pub String);

impl Refused {
    pub(super) fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Refused(status, text.into())
    }
}

/// Returns `pid 7 belongs to alice` if the newest process with that pid is another user's and users are not hidden. `ps` lists
/// that process, so a text that it does not exist would be wrong.
pub(super) fn of_another(context: &ViewContext, viewer: Viewer, pid: u32) -> Option<String> {
    if context.shown().tenants == Tenants::Anonymous {
        return None;
    }
    let published = context.board.read();
    let uses = |process: &&ProcessView| process.key.pid == pid && !process.accounts.is_empty();
    let process = published.snapshot.processes.iter().rfind(uses)?;
    let facts = &process.facts;
    let uid = facts.uid.filter(|_| !viewer.sees(facts.uid))?;
    let user = facts.seen.get("user").cloned().unwrap_or_else(|| format!("user {uid}"));
    Some(format!("pid {pid} belongs to {user}: ask as {user}, as root or as a member of the group gpumemd"))
}

/// Returns the value of a key in a query; the values of this API that are read with it need no unescaping.
pub(super) fn value<'a>(query: &'a str, key: &str) -> Option<&'a str> {
    query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value)
}

pub(super) fn number(query: &str, key: &str) -> Result<Option<u64>, Refused> {
    let Some(text) = value(query, key) else { return Ok(None) };
    text.parse()
        .map(Some)
        .map_err(|_| Refused::new(StatusCode::BAD_REQUEST, format!("{key}={text:?} is not a number")))
}

/// Refuses a query with other keys: an unknown filter must not be ignored.
pub(super) fn only(query: &str, keys: &[&str]) -> Result<(), Refused> {
    let names = query.split('&').filter(|pair| !pair.is_empty());
    for name in names.map(|pair| pair.split('=').next().unwrap_or(pair)) {
        if !keys.contains(&name) {
            let text = format!("unknown parameter {name:?}; known: {}", keys.join(", "));
            return Err(Refused::new(StatusCode::BAD_REQUEST, text));
        }
    }
    Ok(())
}

/// Decodes percent escapes: `%2F` is `/`.
pub(super) fn unescaped(text: &str) -> Result<String, Refused> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = rest.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit)); // no sign
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(
            byte.ok_or_else(|| Refused::new(StatusCode::BAD_REQUEST, "a % must be followed by two digits"))?,
        );
        rest = rest.get(2..).unwrap_or_default();
    }
    String::from_utf8(bytes).map_err(|_| Refused::new(StatusCode::BAD_REQUEST, "a value must be UTF-8"))
}

pub(super) fn json(value: &impl Serialize) -> Vec<u8> {
    // Only maps with other keys than strings could fail; there are none.
    serde_json::to_vec(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::unescaped;

    #[test]
    fn paths_are_unescaped() {
        assert_eq!(unescaped("/tmp/a%20b%25").ok().as_deref(), Some("/tmp/a b%"));
        for bad in ["%", "%2", "%zz", "%ff", "%+a"] {
            assert!(unescaped(bad).is_err(), "{bad}");
        }
    }
}
