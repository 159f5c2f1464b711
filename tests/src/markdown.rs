//! Code in a document: its blocks, inline code, and the commands in both. Uses only std, because the tests of gpumemctl, which
//! have its parser, include this file.

/// A block of code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Number of its first line of code, from 1.
    pub line: usize,
    /// Language after the fence; `indented` for a block without a fence.
    pub language: String,
    /// The code.
    pub text: String,
    /// Comments directly before it: `<!-- not run: why -->` is `not run: why`.
    pub marks: Vec<String>,
}

impl Block {
    /// Returns the value after `word:` in a comment before the block.
    pub fn mark(&self, word: &str) -> Option<&str> {
        let said = |mark: &'_ String| mark.strip_prefix(word).is_some_and(|rest| rest.starts_with(':'));
        self.marks.iter().find(|mark| said(mark)).map(|mark| mark[word.len() + 1..].trim())
    }
}

/// Returns the blocks of a document.
pub fn blocks(text: &str) -> Vec<Block> {
    let (mut found, mut marks) = (Vec::<Block>::new(), Vec::new());
    let mut lines = text.lines().enumerate().peekable();
    let mut after_blank = true;
    while let Some((at, line)) = lines.next() {
        let indent = line.len() - line.trim_start().len();
        let inner = line.trim_start();
        if let Some(language) = inner.strip_prefix("```") {
            let block = lines.by_ref().map(|(_, line)| line).take_while(|line| line.trim_start() != "```");
            let text = block.map(|line| line.get(indent..).unwrap_or_default().to_owned() + "\n").collect();
            let (language, marks) = (language.to_owned(), std::mem::take(&mut marks));
            found.push(Block { line: at + 2, language, text, marks });
            after_blank = true;
        } else if after_blank && line.starts_with("    ") {
            let mut text = line[4..].to_owned() + "\n";
            while let Some((_, line)) = lines.next_if(|(_, line)| line.starts_with("    ") || line.is_empty())
            {
                text += line.get(4..).unwrap_or_default();
                text.push('\n');
            }
            let marks = std::mem::take(&mut marks);
            found.push(Block {
                line: at + 1,
                language: "indented".into(),
                text: text.trim_end().to_owned() + "\n",
                marks,
            });
            after_blank = true;
        } else if let Some(mark) = inner.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->")) {
            marks.push(mark.to_owned());
            after_blank = true;
        } else {
            after_blank = line.is_empty();
            if !after_blank {
                marks.clear();
            }
        }
    }
    found
}

/// Returns inline code of a document with its line number. Escaped bars in tables are unescaped.
pub fn inline(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut fenced) = (Vec::new(), false);
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced && !line.starts_with("    ") {
            let code = line.split('`').skip(1).step_by(2);
            found.extend(code.map(|code| (at + 1, code.replace("\\|", "|"))));
        }
    }
    found
}

/// A command line of a block, with the shown part of its output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// Number of its line in the document.
    pub line: usize,
    /// The command.
    pub command: String,
    /// Lines of output that follow it.
    pub output: Vec<String>,
}

/// Returns the command lines of a block: all lines of a shell's block, or those after `$ ` in a `console` block. A backslash at
/// the end continues a line.
pub fn commands(block: &Block) -> Vec<Shown> {
    let is_console = block.language == "console" || block.text.starts_with("$ ");
    let mut found = Vec::<Shown>::new();
    let mut is_open = false;
    for (at, line) in block.text.lines().enumerate() {
        let typed = if is_console && !is_open { line.strip_prefix("$ ") } else { Some(line) };
        match (typed, found.last_mut()) {
            (Some(typed), Some(last)) if is_open => {
                last.command.truncate(last.command.len() - 1);
                last.command += typed.trim_start();
            }
            (Some(typed), _) if typed.trim().is_empty() || typed.starts_with('#') => continue,
            (Some(typed), _) => {
                let command = typed.trim_end().to_owned();
                found.push(Shown { line: block.line + at, command, output: Vec::new() });
            }
            (None, Some(last)) => last.output.push(line.to_owned()),
            (None, None) => {}
        }
        is_open = typed.is_some_and(|typed| typed.ends_with('\\'));
    }
    found
}

/// Splits a command line into simple commands, as words. Redirections, comments, and assignments before a command are dropped.
/// Quotes are removed; `$(...)` is kept.
pub fn simple(line: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word) = (Vec::new(), Vec::new(), None::<String>);
    let mut letters = line.chars().peekable();
    let mut quote = None;
    let mut depth = 0;
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (Some(open), letter) if letter == open => quote = None,
            (Some(_), letter) => word.get_or_insert_default().push(letter),
            (None, '\'' | '"') if depth == 0 => {
                word.get_or_insert_default();
                quote = Some(letter);
            }
            (None, '$') if letters.peek() == Some(&'(') => {
                depth += 1;
                letters.next();
                word.get_or_insert_default().push_str("$(");
            }
            (None, ')') if depth > 0 => {
                depth -= 1;
                word.get_or_insert_default().push(')');
            }
            (None, letter) if depth > 0 => word.get_or_insert_default().push(letter),
            (None, '#') if word.is_none() => break,
            (None, ' ' | '\t') => words.extend(word.take()),
            (None, '|' | '&' | ';' | '(' | ')' | '{' | '}')
                if word.is_none() || matches!(letter, '&' | ';' | ')') =>
            {
                words.extend(word.take());
                commands.push(std::mem::take(&mut words));
            }
            (None, letter) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    commands.push(words);
    let is_assignment = |word: &String| {
        let name = word.split('=').next().unwrap_or_default();
        word.contains('=')
            && !name.is_empty()
            && name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_' || b.is_ascii_digit())
    };
    for words in &mut commands {
        while words.first().is_some_and(is_assignment) {
            words.remove(0);
        }
        while let Some(at) =
            words.iter().position(|word| [">", "<", ">>", "2>", "2>&1"].contains(&word.as_str()))
        {
            words.drain(at..(at + 2).min(words.len()));
        }
    }
    commands.retain(|words| !words.is_empty());
    commands
}

/// Returns the words after `program` where a simple command calls it, directly or through another one (`sudo`, `srun`,
/// `kubectl exec ... --`).
pub fn called<'a>(words: &'a [String], program: &str) -> Option<&'a [String]> {
    let is_it = |word: &String| word == program || word.ends_with(&format!("/{program}"));
    let at = words.iter().position(is_it)?;
    let before = words.get(at.wrapping_sub(1)).map_or("", String::as_str);
    let is_call =
        at == 0 || ["sudo", "srun", "--", "exec", "time"].contains(&before) || before.starts_with('-');
    is_call.then(|| words.get(at + 1..).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_commands_are_parsed() {
        let text = "words\n\n<!-- not run: no -->\n```sh\na b \\\n  c   # why\n\nX=1 d 'e f' > g && h $(i | j)\n```\n\n    plain\n\ncall `k l`\n";
        let found = blocks(text);
        assert_eq!((found[0].line, found[0].mark("not run")), (5, Some("no")));
        assert_eq!((found[1].language.as_str(), found[1].text.as_str()), ("indented", "plain\n"));
        let lines = commands(&found[0]);
        assert_eq!((lines[0].command.as_str(), lines[1].line), ("a b c   # why", 8));
        assert_eq!(simple(&lines[0].command), [["a", "b", "c"]]);
        assert_eq!(simple(&lines[1].command), [vec!["d", "e f"], vec!["h", "$(i | j)"]]);
        assert_eq!(inline(text), [(13, "k l".to_owned())]);
        let block =
            Block { line: 1, language: "console".into(), text: "$ a\nx\n$ b\n".into(), marks: vec![] };
        assert_eq!(commands(&block)[0].output, ["x"]);
        let words = |line: &str| simple(line).remove(0);
        assert_eq!(called(&words("sudo gpumemctl run -- x"), "gpumemctl").expect("a call").len(), 3);
        assert_eq!(called(&words("man gpumemctl"), "gpumemctl"), None);
    }
}
