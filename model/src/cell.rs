//! Names of cells, and the roles and phases that they have.

use gpumem_wire::{Phase, Role};
use serde::{Deserialize, Serialize};

/// Name of a cell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cell {
    /// `direct`, `block`, `pool_idle` or `opaque`.
    pub class: Class,
    /// Tag path.
    pub tag: Option<String>,
    /// First tag, if a later one replaced it.
    pub origin: Option<String>,
    /// What for; absent where not known.
    pub role: Option<String>,
    /// When in a step; absent where not known.
    pub phase: Option<String>,
    /// Library that asked.
    pub library: Option<String>,
    /// Name of the framework's pool that the bytes are of.
    #[serde(default)]
    pub pool: Option<String>,
    /// Blocks that their owner has let go, which a stream may still use: of class `pool_idle`.
    #[serde(default)]
    pub pending: bool,
    /// The tag is that of the process: the thread that allocated had none.
    #[serde(default)]
    pub inherited: bool,
}

/// Part of the identity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    #[default]
    /// Driver allocations that no pool carves.
    Direct,
    /// What pools handed out.
    Block,
    /// Segments that no block covers.
    PoolIdle,
    /// Segments of pools that report no blocks.
    Opaque,
}

const ROLES: [(&str, Role); 10] = [
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
const PHASES: [(&str, Phase); 5] = [
    ("setup", Phase::Setup),
    ("forward", Phase::Forward),
    ("backward", Phase::Backward),
    ("optimizer", Phase::Optimizer),
    ("evaluation", Phase::Evaluation),
];
/// What a process was doing, but not what a block is named after: no rule matches it.
const BETWEEN: (&str, Phase) = ("between", Phase::Between);

/// How a role is written; `None` for unknown.
pub fn role_name(role: Role) -> Option<&'static str> {
    ROLES.iter().find(|(_, other)| *other == role).map(|(name, _)| *name)
}

/// The role of that name.
pub fn role_of_name(name: &str) -> Option<Role> {
    ROLES.iter().find(|(other, _)| *other == name).map(|(_, role)| *role)
}

/// All names of roles.
pub fn role_names() -> impl Iterator<Item = &'static str> {
    ROLES.iter().map(|(name, _)| *name)
}

/// How a phase is written; `None` for unknown.
pub fn phase_name(phase: Phase) -> Option<&'static str> {
    PHASES.iter().chain([&BETWEEN]).find(|(_, other)| *other == phase).map(|(name, _)| *name)
}

/// The phase of that name.
pub fn phase_of_name(name: &str) -> Option<Phase> {
    PHASES.iter().chain([&BETWEEN]).find(|(other, _)| *other == name).map(|(_, phase)| *phase)
}

/// All names of phases.
pub fn phase_names() -> impl Iterator<Item = &'static str> {
    PHASES.iter().map(|(name, _)| *name)
}
