//! Moments that somebody gave a name: the program (`gpumem_mark`), or a person (`gpumemctl mark`).

use std::collections::VecDeque;
use std::sync::Arc;

/// Marks that are kept of a process, of each origin. A program may make one per step: the newest are kept.
pub const MAX_MARKS: usize = 128;

/// A moment with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MarkView {
    /// When.
    pub time_ns: u64,
    /// Its name; `None` if a loss took it.
    pub name: Option<Arc<str>>,
    /// Somebody outside of the program made it.
    pub from_outside: bool,
}

/// Marks of a process.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// Of the program, and from outside: one that makes many must not take the other's room.
    kept: [VecDeque<MarkView>; 2],
    /// Of those that found no room, or gave it up.
    pub dropped: u64,
}

impl Marks {
    pub fn add(&mut self, mark: MarkView) {
        let kept = &mut self.kept[usize::from(mark.from_outside)];
        if kept.len() == MAX_MARKS {
            kept.pop_front();
            self.dropped += 1;
        }
        kept.push_back(mark);
    }

    /// By time.
    pub fn view(&self) -> Vec<MarkView> {
        let mut marks: Vec<MarkView> = self.kept.iter().flatten().cloned().collect();
        marks.sort_by_key(|mark| mark.time_ns);
        marks
    }
}
