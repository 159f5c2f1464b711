//! Functions for all requests of the control API: parse a query, explain why a process is not visible.

use crate::config::Tenants;
use crate::view::{Refused, ViewContext, Viewer};
use gpumem_ledger::ProcessView;
use serde::Serialize;
use std::sync::Arc;

/// Maximum number of bytes of an answer that are sent at a time. A larger answer is serialized on another thread, and its user
/// gets no other answer until it has been read.
pub(super) const SMALL: usize = 64 << 10;

/// Returns `pid 7 belongs to alice: ...` if the newest process with the pid is another user's. Returns `None` if it is not, or if
/// users are anonymous. `ps` lists such a process, so an answer that it does not exist would be wrong.
pub(super) fn other_owner(context: &ViewContext, viewer: Viewer, pid: u32) -> Option<String> {
    if context.shown().tenants == Tenants::Anonymous {
        return None;
    }
    let published = context.reader.read();
    let uses = |process: &&Arc<ProcessView>| process.key.pid == pid && !process.accounts.is_empty();
    let process = published.snapshot.processes.iter().rfind(uses)?;
    let facts = &process.facts;
    let uid = facts.uid.filter(|_| !viewer.sees(facts.uid))?;
    let user = facts.seen.get("user").cloned().unwrap_or_else(|| format!("user {uid}"));
    Some(format!("pid {pid} belongs to {user}: ask as {user}, as root or as a member of the group gpumemd"))
}

/// Returns the value of a key in a query, with its percent escapes.
pub(super) fn query_value<'a>(query: &'a str, key: &str) -> Option<&'a str> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.find(|(name, _)| *name == key).map(|(_, value)| value)
}

pub(super) fn query_number(query: &str, key: &str) -> Result<Option<u64>, Refused> {
    let Some(text) = query_value(query, key) else { return Ok(None) };
    let number = text.parse().map(Some);
    number.map_err(|_| Refused::bad_request(format!("{key}={text:?} is not a number")))
}

/// Refuses a query that has other keys than `keys`, because an unknown filter must not be ignored.
pub(super) fn check_keys(query: &str, keys: &[&str]) -> Result<(), Refused> {
    let mut names = query.split('&').filter(|pair| !pair.is_empty());
    let unknown = names.find_map(|pair| pair.split('=').next().filter(|name| !keys.contains(name)));
    unknown.map_or(Ok(()), |name| {
        Err(Refused::bad_request(format!("unknown parameter {name:?}; known: {}", keys.join(", "))))
    })
}

/// Returns the text with its percent escapes decoded: `%2F` is `/`.
pub(super) fn unescape(text: &str) -> Result<String, Refused> {
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
        bytes.push(byte.ok_or_else(|| Refused::bad_request("a % must be followed by two digits"))?);
        rest = rest.get(2..).unwrap_or_default();
    }
    String::from_utf8(bytes).map_err(|_| Refused::bad_request("a value must be UTF-8"))
}

pub(super) fn json(value: impl Serialize) -> Vec<u8> {
    // Serialization fails only for maps whose keys are not strings, and there are none.
    serde_json::to_vec(&value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::unescape;

    #[test]
    fn paths_are_unescaped() {
        assert_eq!(unescape("/tmp/a%20b%25").ok().as_deref(), Some("/tmp/a b%"));
        for bad in ["%", "%2", "%zz", "%ff", "%+a"] {
            assert!(unescape(bad).is_err(), "{bad}");
        }
    }
}
