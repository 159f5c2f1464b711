//! Reads lines of text files, and the comma-separated values of a line.

use super::feed::Feed;
use gpumem_model::units::plural;
use gpumem_runs::input::{Error, Input, Line, Lines};
use std::borrow::Cow;

/// Calls `each` with the number (from 1) and text of each line of a file; returns the number of lines.
pub(super) fn lines(
    input: Input,
    feed: &mut Feed<'_>,
    mut each: impl FnMut(&mut Feed<'_>, u64, &str),
) -> Result<u64, Error> {
    let path = input.path.clone();
    let mut lines = Lines::new(input.into_reader());
    let (mut number, mut too_long, mut not_utf8) = (0, 0_u64, 0_u64);
    loop {
        let offset = lines.offset;
        let line = lines.next_line().map_err(|source| Error::Read { path: path.clone(), offset, source })?;
        number += 1;
        match line {
            None => break,
            Some(Line::Text(text)) => {
                not_utf8 += u64::from(matches!(text, Cow::Owned(_)));
                each(feed, number, &text);
            }
            Some(Line::Endless) => {
                feed.reject(number);
                let text = format!(
                    "line {number} (byte {offset}) is longer than 256 MiB: nothing after it was read"
                );
                feed.caveat("endless_line", text);
                break;
            }
            Some(Line::TooLong) => {
                feed.reject(number);
                if too_long == 0 {
                    let text = format!("line {number} (byte {offset}) is longer than 1 MiB and was skipped");
                    feed.caveat("long_lines", text);
                }
                too_long += 1;
            }
        }
    }
    if not_utf8 > 0 {
        let text = format!("{} are not UTF-8: their bytes are shown as \\x..", plural(not_utf8, "line"));
        feed.caveat("not_utf8", text);
    }
    Ok(number - 1)
}

/// Returns the comma-separated fields of a line, without quotes and surrounding blanks. `None` if a quote is not closed, or if
/// text follows a closing quote.
pub(super) fn fields(line: &str) -> Option<Vec<Cow<'_, str>>> {
    let mut fields = Vec::new();
    let mut rest = line.trim();
    loop {
        let field = match rest.strip_prefix('"') {
            Some(quoted) => {
                let (field, after) = unquote(quoted)?;
                rest = after.trim_start();
                if !rest.is_empty() && !rest.starts_with(',') {
                    return None;
                }
                field
            }
            None => {
                let (field, after) = rest.split_at(rest.find(',').unwrap_or(rest.len()));
                rest = after;
                Cow::Borrowed(field.trim_end())
            }
        };
        fields.push(field);
        match rest.strip_prefix(',') {
            Some(next) => rest = next.trim_start(),
            None => return Some(fields),
        }
    }
}

/// Splits `text`, which begins after an opening quote, at the closing quote. Two quotes in a row stand for one quote character.
fn unquote(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let mut from = 0;
    loop {
        let at = from + text.get(from..)?.find('"')?;
        let after = text.get(at + 1..)?;
        if !after.starts_with('"') {
            let field = text.get(..at)?;
            let field =
                if from == 0 { Cow::Borrowed(field) } else { Cow::Owned(field.replace("\"\"", "\"")) };
            return Some((field, after));
        }
        from = at + 2;
    }
}

pub(super) fn contains(head: &[u8], needle: &[u8]) -> bool {
    head.windows(needle.len()).any(|window| window == needle)
}

/// Returns the first line that is not blank; `None` if there is none, or if it is not UTF-8. `head` is the beginning of a file.
pub(super) fn first_line(head: &[u8]) -> Option<&str> {
    let start = head.iter().position(|byte| !byte.is_ascii_whitespace())?;
    let line = head.get(start..)?;
    let end = line.iter().position(|&byte| byte == b'\n' || byte == b'\r').unwrap_or(line.len());
    std::str::from_utf8(line.get(..end)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_every_kind_of_line() {
        let of = |line| fields(line).map(|fields| fields.join("|"));
        assert_eq!(of("a,b, c ").as_deref(), Some("a|b|c"));
        assert_eq!(of("\"a,b\",\"c\"\"d\" ,e").as_deref(), Some("a,b|c\"d|e"));
        assert_eq!(of("").as_deref(), Some(""));
        assert_eq!(of(",").as_deref(), Some("|"));
        assert_eq!(of("\"\",x").as_deref(), Some("|x"));
        for bad in ["\"a", "\"a\"b,c", "a,\"b", "\"\"\""] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }
}
