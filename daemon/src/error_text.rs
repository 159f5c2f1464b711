//! Text of an error for users.

/// Returns the texts of an error and its causes. A cause is left out if the text before it contains its text.
pub fn error_chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        let cause = cause.trim_end();
        if text.is_empty() {
            cause.clone_into(&mut text);
        } else if !text.contains(cause) {
            text.push_str(": ");
            text.push_str(cause);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::error_chain;
    use anyhow::anyhow;

    #[test]
    fn each_cause_is_written_once() {
        let cause = anyhow!("no such file\n");
        assert_eq!(error_chain(&cause), "no such file");
        assert_eq!(
            error_chain(&anyhow!("no such file").context("a.toml: no such file, make one")),
            "a.toml: no such file, make one"
        );
        assert_eq!(error_chain(&anyhow!("no such file").context("opening")), "opening: no such file");
    }
}
