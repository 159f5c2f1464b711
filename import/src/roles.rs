//! Roles of the blocks in a recording.

use gpumem_ledger::{Ledger, Origin, ProcessKey};
use gpumem_model::names::Named;
use gpumem_runs::builder::Sink;
use gpumem_wire::{Body, Record, Role};
use std::collections::HashMap;

/// Returns the role that a word names, in the singular or plural.
pub fn named(word: &str) -> Option<Role> {
    let word = word.to_lowercase().replace(['_', '-'], " ");
    let plural = |name: &str| match name.strip_suffix('y') {
        Some(stem) => format!("{stem}ies"),
        None => format!("{name}s"),
    };
    let is_named = |(name, _): &&(&str, Role)| word == *name || word == plural(name);
    Role::NAMES.iter().find(is_named).map(|(_, role)| *role)
}

/// Returns the names of all roles.
pub fn names() -> impl Iterator<Item = &'static str> {
    Role::NAMES.iter().map(|(name, _)| *name)
}

/// Collects the role with which each block of a process ended, or that it has at the end of the recording. Blocks are numbered by the
/// order of their `BlockAlloc` records.
#[derive(Default)]
pub(crate) struct RoleCollector {
    ledger: Ledger,
    of: HashMap<ProcessKey, OfProcess>,
}

#[derive(Default)]
struct OfProcess {
    instance: u16,
    /// Numbers of the live blocks, by the numbers of their records.
    live: HashMap<u64, usize>,
    roles: Vec<Role>,
}

impl RoleCollector {
    pub fn new() -> Self {
        let mut ledger = Ledger::default();
        ledger.keep_roles();
        RoleCollector { ledger, of: HashMap::new() }
    }

    /// Returns the roles of the blocks of a process.
    pub fn of(&mut self, key: ProcessKey) -> Vec<Role> {
        let mut of = self.of.remove(&key).unwrap_or_default();
        of.note(self.ledger.take_roles(key, true));
        of.roles
    }
}

impl OfProcess {
    fn note(&mut self, roles: Vec<(u64, Role)>) {
        for (seq, role) in roles {
            if let Some(number) = self.live.remove(&seq) {
                self.roles[number] = role;
            }
        }
    }
}

impl Sink for RoleCollector {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        self.ledger.observe(origin, record);
        let Origin::Process(key) = origin else { return };
        let of = self.of.entry(key).or_default();
        match record.body {
            Body::Hello { instance, .. } if instance != of.instance => {
                of.instance = instance;
                of.live.clear();
            }
            // A restated block keeps its number.
            Body::BlockAlloc { .. } => {
                of.live.entry(record.stamp.seq).or_insert(of.roles.len());
                of.roles.push(Role::Unknown);
            }
            _ => of.note(self.ledger.take_roles(key, false)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_have_a_singular_and_a_plural() {
        for word in ["activation", "activations", "Activations"] {
            assert_eq!(named(word), Some(Role::Activation), "{word}");
        }
        assert_eq!(named("optimizer_states"), Some(Role::OptimizerState));
        assert_eq!(named("temporaries"), Some(Role::Temporary));
        assert_eq!(named("parameter-copies"), Some(Role::ParameterCopy));
        assert_eq!(named("layer.activations"), None);
    }
}
