//! What all requests of the control API share: reading a query, and refusing a request.

use crate::config::Tenants;
use crate::view::ViewContext;
use crate::view::visibility::Viewer;
use gpumem_ledger::ProcessView;
use hyper::StatusCode;
use serde::Serialize;

/// Bytes of an answer that are sent at a time. A larger answer is serialized on another thread, and its user gets the next answer
/// when this one has been read.
pub(super) const SMALL: usize = 64 << 10;

/// Status and text of a request that is refused.
#[derive(Debug)]
pub(super) struct Refused(pub StatusCode, pub String);

impl Refused {
    pub(super) fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Refused(status, text.into())
    }
}

/// `pid 7 belongs to alice`, where the newest process of that pid is another user's and everybody may know whose: `ps` lists it, and to say that
/// it is no process would be wrong.
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

/// The value of a key in a query; what it is made of needs no unescaping.
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
        .map_err(|_| Refused::new(StatusCode::BAD_REQUEST, format!("{key}={text:?} is no number")))
}

/// A query may name these keys and no others: a filter that is not understood must not look like none.
pub(super) fn only(query: &str, keys: &[&str]) -> Result<(), Refused> {
    let names = query.split('&').filter(|pair| !pair.is_empty());
    for name in names.map(|pair| pair.split('=').next().unwrap_or(pair)) {
        if !keys.contains(&name) {
            let text = format!("there is no {name:?} here: {} are known", keys.join(", "));
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
    // Maps with keys that are no strings would be refused; there are none.
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
