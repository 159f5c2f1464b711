//! Removes personal data from the texts of the archive. User names are replaced, and values that look like secrets are removed.
//! Settings, and series of metrics, are kept only if their names are known.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

/// The example configuration, which has all settings of gpumemd.
const KNOWN: &str = include_str!("../../../../../config/gpumemd.toml");
/// Labels of metrics whose values are not chosen by users or programs.
const LABELS: [&str; 16] = [
    "gpu", "uuid", "pid", "start", "part", "flag", "reason", "source", "version", "kind", "lane", "state",
    "xid", "cause", "result", "model",
];
/// Parts of setting names, such as `password`, that mark the value as a secret.
const SECRETS: [&str; 9] = [
    "password",
    "passwd",
    "token",
    "secret",
    "api_key",
    "apikey",
    "access_key",
    "credential",
    "authorization",
];
const CUT: &str = "[secret]";

#[derive(Debug, Default)]
pub(super) struct Redactor {
    /// Words to replace, each with its replacement, the longest word first.
    words: Vec<(String, String)>,
}

impl Redactor {
    /// Makes a redactor that replaces the names in `users`, and secrets and home folder in `environment`.
    pub(crate) fn new(users: &[String], environment: impl Iterator<Item = (String, String)>) -> Redactor {
        // The hash key is random and never stored, so names cannot be recovered with a list of candidates.
        let key = RandomState::new();
        let mut words: BTreeMap<String, String> = BTreeMap::new();
        for user in users.iter().filter(|user| user.len() > 1 && *user != "root") {
            words.insert(user.clone(), format!("user-{:06x}", key.hash_one(user) & 0xff_ffff));
        }
        for (name, value) in environment {
            let name = name.to_ascii_lowercase();
            let is_secret = SECRETS.iter().any(|word| name.contains(word))
                || name.contains("pass")
                || name.ends_with("key");
            if is_secret && value.len() >= 4 {
                words.insert(value, CUT.to_owned());
            } else if name == "home" && value.len() > 1 && value != "/root" {
                words.insert(value, "~".to_owned());
            }
        }
        let mut words: Vec<_> = words.into_iter().collect();
        words.sort_by_key(|(word, _)| std::cmp::Reverse(word.len()));
        Redactor { words }
    }

    pub(crate) fn text(&self, text: &str) -> String {
        let mut out = text.to_owned();
        for (word, by) in &self.words {
            out = replaced(&out, word, by);
        }
        out.lines().map(|line| without_passwords(&without_secrets(line)) + "\n").collect()
    }
}

/// Replaces a word in a text, but not inside longer words.
fn replaced(text: &str, word: &str, by: &str) -> String {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(word) {
        let (before, from) = rest.split_at(at);
        let (found, after) = from.split_at(word.len());
        let is_inside = before.ends_with(is_part)
            || before.is_empty() && out.ends_with(is_part)
            || after.starts_with(is_part);
        out.push_str(before);
        out.push_str(if is_inside { found } else { by });
        rest = after;
    }
    out + rest
}

/// Removes values after `token=` and similar names.
fn without_secrets(line: &str) -> String {
    let lower = line.to_ascii_lowercase();
    let mut cuts: Vec<(usize, usize)> = Vec::new();
    for word in SECRETS {
        for (at, _) in lower.match_indices(word) {
            let rest = &lower[at + word.len()..];
            let name = rest.len()
                - rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_' || c == '"').len();
            let Some(value) = rest.get(name..).and_then(|rest| rest.trim_start().strip_prefix(['=', ':']))
            else {
                continue;
            };
            let value = value.trim_start_matches([' ', '"', '\'']);
            // In `Authorization: Bearer x` the secret is the second word.
            let value = value.strip_prefix("bearer ").or(value.strip_prefix("basic ")).unwrap_or(value);
            let from = line.len() - value.len();
            let length = value.find([' ', '"', '\'', ',', ';', '&']).unwrap_or(value.len());
            cuts.push((from, from + length));
        }
    }
    cuts.sort_unstable();
    let (mut out, mut done) = (String::new(), 0);
    for (from, to) in cuts {
        if from >= done && to > from {
            out.push_str(line.get(done..from).unwrap_or_default());
            out.push_str(CUT);
            done = to;
        }
    }
    out + line.get(done..).unwrap_or_default()
}

/// Removes the credentials in `scheme://user:password@host`.
fn without_passwords(line: &str) -> String {
    let (mut out, mut rest) = (String::new(), line);
    while let Some((before, after)) = rest.split_once("://") {
        out.push_str(before);
        out.push_str("://");
        let end = after.find(|c: char| c.is_whitespace() || c == '/' || c == '"').unwrap_or(after.len());
        rest = match after.get(..end).and_then(|host| host.rfind('@')) {
            Some(at) => {
                out.push_str(CUT);
                after.get(at..).unwrap_or_default()
            }
            None => after,
        };
    }
    out + rest
}

/// Returns key and value of a line of the configuration; `None` if the line sets nothing.
fn setting(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once('=')?;
    let key = key.trim();
    let is_key = !key.is_empty()
        && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
    let value = value.trim();
    let end = match value.as_bytes().first()? {
        quote @ (b'"' | b'\'') => value.get(1..)?.find(char::from(*quote))? + 2,
        _ => value.find('#').unwrap_or(value.len()),
    };
    is_key.then_some((key, value.get(..end)?.trim_end()))
}

fn section(line: &str) -> Option<&str> {
    line.trim().strip_prefix('[')?.strip_suffix(']')
}

/// Returns the settings that the daemon knows, without comments, and the number of other settings, which are left out.
pub(super) fn settings(text: &str) -> (String, usize) {
    let mut known: Vec<(&str, &str)> = Vec::new();
    let mut current = "";
    for line in KNOWN.lines() {
        current = section(line).unwrap_or(current);
        // Settings without a default are commented out in the example configuration.
        known.extend(setting(line.trim_start_matches("# ")).map(|(key, _)| (current, key)));
    }
    let (mut out, mut left_out, mut current) = (String::new(), 0, "");
    for line in text.lines() {
        if let Some(section) = section(line) {
            current = section;
            if known.iter().any(|(known, _)| *known == section) {
                out.push_str(&format!("[{section}]\n"));
            }
        } else if !line.trim().is_empty() && !line.trim_start().starts_with('#') {
            match setting(line).filter(|(key, _)| known.contains(&(current, key))) {
                Some((key, value)) => out.push_str(&format!("{key} = {value}\n")),
                None => left_out += 1,
            }
        }
    }
    (out, left_out)
}

/// Returns the series without values that users or programs choose, and the number of other series, which are left out.
pub(super) fn metrics(text: &str) -> (String, usize) {
    let (mut out, mut left_out) = (String::new(), 0);
    for line in text.lines() {
        if line.starts_with('#') || label_names(line).iter().all(|name| LABELS.contains(name)) {
            out.push_str(line);
            out.push('\n');
        } else {
            left_out += 1;
        }
    }
    (out, left_out)
}

fn label_names(series: &str) -> Vec<&str> {
    let Some((_, mut rest)) = series.split_once('{') else { return Vec::new() };
    let mut names = Vec::new();
    while let Some((name, value)) = rest.split_once("=\"") {
        names.push(name.trim_start_matches(','));
        let mut escaped = false;
        let end = value.find(|c| {
            let is_end = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            is_end
        });
        rest = end.and_then(|end| value.get(end + 1..)).unwrap_or_default();
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_names_do_not_leave() {
        let users = ["ann".to_owned(), "root".to_owned()];
        let environment =
            [("HF_TOKEN", "hf_abcdef"), ("HOME", "/home/ann"), ("PATH", "/bin"), ("DB_PASS", "x1y2z3")];
        let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
        let redactor = Redactor::new(&users, environment);
        let output = redactor.text("ann planned hf_abcdef in /home/ann/x by root with x1y2z3 and joanna");
        assert!(
            !output.contains("hf_abcdef") && !output.contains("x1y2z3") && !output.contains("/home/"),
            "{output}"
        );
        assert!(
            output.starts_with("user-") && output.contains("~/x by root") && output.contains("joanna"),
            "{output}"
        );
        let output = redactor.text("ann and ann");
        let (first, second) = output.trim().split_once(" and ").expect("two");
        assert_eq!(first, second, "one user is one name");
        for (line, words) in [
            ("url=https://me:pw@host/x", "url=https://[secret]@host/x"),
            ("password=hunter2 rest", "password=[secret] rest"),
            ("\"api_key\": \"abc\", more", "\"api_key\": \"[secret]\", more"),
            ("Authorization: Bearer abc.def x", "Authorization: Bearer [secret] x"),
            ("MY_TOKEN_NAME = 'abc'", "MY_TOKEN_NAME = '[secret]'"),
            ("no token here", "no token here"),
            ("ünï password=ß rest", "ünï password=[secret] rest"),
        ] {
            assert_eq!(Redactor::default().text(line).trim_end(), words);
        }
    }

    #[test]
    fn settings_are_those_that_are_known() {
        let text = "# my password is hunter2\ntenants = \"named\" # hunter2\nother = \"hunter2\"\n[nvml]\nlibrary = \"/a#b\" # x\n\
                    memory_hz = 50 # hunter2\n[mine]\ntenants = \"hunter2\"\nmemory_hz = 3\n";
        let (output, left_out) = settings(text);
        assert_eq!(output, "tenants = \"named\"\n[nvml]\nlibrary = \"/a#b\"\nmemory_hz = 50\n");
        assert_eq!(left_out, 3);
        assert_eq!(settings(KNOWN).1, 0, "all keys are known");
    }

    #[test]
    fn series_with_words_of_people_are_left_out() {
        let text = "# TYPE a gauge\na{gpu=\"0\",uuid=\"GPU-1\"} 1\nb{pid=\"7\",category=\"x, \\\"gpu=\\\" y\"} 2\nc 3\n\
                    gpumem_process_info{pid=\"7\",user=\"ann\"} 1\n";
        let (output, left_out) = metrics(text);
        assert_eq!((output.lines().count(), left_out), (3, 2), "{output}");
    }
}
