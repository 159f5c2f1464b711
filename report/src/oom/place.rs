//! The place of a failed request: the module, the phase, the training step, and the line of the program.

use crate::names::{is_line, library};
use gpumem_model::names::Named;
use gpumem_model::run::Oom;
use gpumem_model::units::thousands;
use gpumem_wire::Phase;

/// Returns the place as words of a sentence, such as ` in backward of GPT/h.1 (train.py:91 in train), step 18,221`; empty if it
/// is unknown.
pub(crate) fn place(oom: &Oom) -> String {
    let phase = oom.phase.as_deref().filter(|phase| *phase != "between");
    // A tag that is a line of the program repeats the line.
    let tag = oom.tag.as_ref().filter(|tag| oom.stack.is_none() || !is_line(tag));
    let work = match (phase, tag) {
        (Some(phase), Some(tag)) => format!(" in {phase} of {tag}"),
        (Some(phase), None) => format!(" in {phase}"),
        (None, Some(tag)) => format!(" by {tag}"),
        (None, None) => String::new(),
    };
    let line = oom.stack.as_deref().and_then(frame).map(|(line, function)| match function {
        Some(function) => format!(" ({line} in {function})"),
        None => format!(" ({line})"),
    });
    // An evaluation follows the steps that were counted.
    let step = if phase == Phase::Evaluation.name() { "after step" } else { "step" };
    let step = oom.step.map(|number| format!(", {step} {}", thousands(number)));
    [Some(work), line, step].into_iter().flatten().collect()
}

/// Returns the place as a list of words.
pub(super) fn parts(oom: &Oom) -> Vec<String> {
    let mut place: Vec<String> = oom.tag.iter().cloned().collect();
    place.extend(oom.phase.clone());
    place.extend(oom.step.map(|step| format!("step {}", thousands(step))));
    place.extend(oom.stack.as_deref().and_then(frame).map(|(line, _)| line));
    if oom.tag.is_none() {
        place.extend(oom.library.as_deref().map(|path| format!("by {}", library(path))));
    }
    place
}

/// Returns the innermost line of the program's own code, such as `train.py:212`, and its function. Without own code, returns the
/// innermost line of an installed package other than PyTorch, else the innermost line.
fn frame(stack: &str) -> Option<(String, Option<String>)> {
    let frames: Vec<Vec<&str>> = stack.lines().map(|line| line.split('\t').collect()).collect();
    let find =
        |is_it: fn(&str) -> bool| frames.iter().find(|frame| frame.get(1).is_some_and(|file| is_it(file)));
    let is_package = |file: &str| !is_standard(file) && !file.contains("-packages/torch/");
    let frame = find(is_own).or_else(|| find(is_package)).or(frames.first())?;
    let file = frame.get(1).map(|file| file.rsplit('/').next().unwrap_or(file));
    let function = frame.first().map(|name| (*name).to_owned()).filter(|name| !name.is_empty());
    match (file, frame.get(2)) {
        (Some(file), Some(line)) => {
            Some((format!("{file}:{line}"), function.filter(|name| name != "<module>")))
        }
        _ => Some((function?, None)),
    }
}

fn is_own(file: &str) -> bool {
    !is_standard(file) && !file.contains("-packages/")
}

/// Returns whether a file belongs to Python's standard library, or is not a file, such as `<string>`.
fn is_standard(file: &str) -> bool {
    let is_version =
        |rest: &str| rest.split('/').next().is_some_and(|version| !version.is_empty() && rest.contains('/'));
    let is_library = file.split("/lib/python3.").nth(1).is_some_and(is_version);
    file.starts_with('<') && file != "<stdin>" || is_library && !file.contains("-packages/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluation_is_no_step() {
        let at = |phase: Phase| {
            let phase = phase.name().map(str::to_owned);
            place(&Oom { phase, step: Some(12), tag: Some("Net/head".into()), ..Oom::default() })
        };
        assert_eq!(at(Phase::Evaluation), " in evaluation of Net/head, after step 12");
        assert_eq!(at(Phase::Forward), " in forward of Net/head, step 12");
    }

    #[test]
    fn line_is_that_of_the_program() {
        let venv = "/home/u/venv/lib/python3.11";
        let torch = format!("Adam.step\t{venv}/site-packages/torch/optim/adam.py\t223");
        let copy = format!("deepcopy\t{venv}/copy.py\t172");
        let trainer = format!("Trainer.train\t{venv}/site-packages/transformers/trainer.py\t2245");
        let stack = |frames: &[&str]| frame(&frames.join("\n")).map(|(line, _)| line);
        let main = "<module>\t/home/u/train.py\t9";
        let train = "train\t/home/u/train.py\t7";
        assert_eq!(stack(&[&torch, &copy, &trainer, train, main]).as_deref(), Some("train.py:7"));
        assert_eq!(stack(&[&torch, &copy, &trainer]).as_deref(), Some("trainer.py:2245"));
        assert_eq!(stack(&[&torch, &copy]).as_deref(), Some("adam.py:223"));
        assert_eq!(stack(&["f\t<frozen runpy>\t3", "g\t<stdin>\t1"]).as_deref(), Some("<stdin>:1"));
        assert_eq!(frame(main), Some(("train.py:9".to_owned(), None)));
        assert_eq!(frame(train), Some(("train.py:7".to_owned(), Some("train".to_owned()))));
        assert_eq!(frame("forward"), Some(("forward".to_owned(), None)));
        assert_eq!(frame(""), None);
    }
}
