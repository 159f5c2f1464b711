//! Names of enum values in stored runs, JSON, metrics and rules.

use gpumem_wire::{Absence, Layer, LayerState, Phase, Role};

/// An enum whose values have names (texts). If it has a value `Unknown`, that one has no name.
pub trait Named: Copy + PartialEq + 'static {
    const NAMES: &'static [(&'static str, Self)];

    /// Returns the name of a value; `None` for `Unknown`.
    fn name(self) -> Option<&'static str> {
        Self::NAMES.iter().find(|(_, value)| *value == self).map(|(name, _)| *name)
    }

    /// Returns the name of a value; the text `unknown` for `Unknown`.
    fn name_or_unknown(self) -> &'static str {
        self.name().unwrap_or("unknown")
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }
}

/// Declares an enum with the names of its values.
macro_rules! named {
    ($(#[$meta:meta])* pub enum $name:ident { $( $(#[$item_meta:meta])* $item:ident = $text:literal, )* }) => {
        $(#[$meta])*
        pub enum $name { $( $(#[$item_meta])* $item, )* }

        impl $crate::names::Named for $name {
            const NAMES: &'static [(&'static str, Self)] = &[$( ($text, $name::$item) ),*];
        }
    };
}
pub(crate) use named;

impl Named for Role {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("parameter", Role::Parameter),
        ("gradient", Role::Gradient),
        ("optimizer state", Role::OptimizerState),
        ("activation", Role::Activation),
        ("input", Role::Input),
        ("temporary", Role::Temporary),
        ("workspace", Role::Workspace),
        ("buffer", Role::Buffer),
        ("kv cache", Role::KvCache),
        ("parameter copy", Role::ParameterCopy),
    ];
}

impl Named for Phase {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("setup", Phase::Setup),
        ("forward", Phase::Forward),
        ("backward", Phase::Backward),
        ("optimizer", Phase::Optimizer),
        ("evaluation", Phase::Evaluation),
        ("between", Phase::Between),
    ];
}

/// Returns the names of phases that a block may have. `between` is excluded: it only describes what a process was doing.
pub fn phases_of_blocks() -> impl Iterator<Item = &'static str> {
    Phase::NAMES.iter().filter(|(_, phase)| *phase != Phase::Between).map(|(name, _)| *name)
}

impl Named for Layer {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("blocks", Layer::Blocks),
        ("out_of_memory", Layer::OutOfMemory),
        ("scopes", Layer::Scopes),
        ("nvtx", Layer::Nvtx),
        ("module_path", Layer::ModulePath),
        ("autograd", Layer::Autograd),
        ("roles", Layer::Roles),
        ("stacks", Layer::Stacks),
    ];
}

impl Named for LayerState {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("active", LayerState::Active),
        ("degraded", LayerState::Degraded),
        ("absent", LayerState::Absent),
        ("off", LayerState::Off),
        ("failed", LayerState::Failed),
    ];
}

/// Returns why a sample has no used bytes, in words.
pub fn absence_name(absence: Absence, list_failed: bool) -> &'static str {
    match absence {
        Absence::NotAvailable => "not available",
        Absence::NoPermission => "no permission",
        Absence::NotListed => "not listed",
        Absence::GpuLost => "gpu lost",
        Absence::Timeout => "timeout",
        Absence::NotSupported => "not supported",
        Absence::WrongNamespace => "wrong namespace",
        Absence::Impossible => "impossible value",
        _ if list_failed => "list failed",
        _ => "unknown",
    }
}
