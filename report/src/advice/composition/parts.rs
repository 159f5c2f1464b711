//! The memory of a process by its purpose: what advice on it is judged by.

use super::cells::{is_activation, is_data, is_inside, is_of_line, is_role, models, root, steps_through};
use super::graphs;
use super::not_updated::{self, NotUpdated, Tensors};
use crate::amounts::{is_about, sum};
use crate::autocast;
use crate::model_sizes::ModelSizes;
use crate::names;
use crate::{Report, held, most_used};
use gpumem_model::cell::without_sum;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device, Oom};
use gpumem_model::timeline::Point;
use gpumem_wire::{Phase, Role};
use std::collections::{BTreeMap, BTreeSet};

/// Minimum share of a part of the process's memory for advice on it.
const PART_SHARE: f64 = 0.2;
/// Two numbers of bytes are about the same if they differ by at most this share.
const SAME_SHARE: f64 = 0.05;
/// Minimum number of completed steps through which a checkpoint stays.
const KEPT_STEPS: u64 = 3;

/// Bytes of a process by their purpose.
pub(in crate::advice) struct Parts<'r> {
    /// Time at which the process held these bytes.
    pub time_ns: u64,
    pub parameters: i64,
    pub optimizer: i64,
    pub activations: i64,
    pub optimizer_temporaries: i64,
    /// Temporaries, and what the backward pass has made so far except gradients of parameters.
    pub short_lived: i64,
    /// Temporaries that the backward pass made outside of modules.
    pub backward_outside: i64,
    pub used: i64,
    /// Bytes that PyTorch's allocator holds, with those that it caches.
    pub allocator: i64,
    pub by_tag: BTreeMap<&'r str, i64>,
    /// Temporaries, by the modules and lines that made them.
    pub temporaries_by_tag: BTreeMap<&'r str, i64>,
    /// Parameters, by their paths in the model.
    pub parameters_by_tag: BTreeMap<&'r str, i64>,
    /// Gradients and optimizer state, by the paths of their parameters.
    pub gradients_by_tag: BTreeMap<&'r str, i64>,
    pub states_by_tag: BTreeMap<&'r str, i64>,
    /// Gradients with a parameter's path, of models that an optimizer updates.
    pub gradients: i64,
    /// Other gradients, such as buckets of DDP, which are never cleared.
    pub buckets: i64,
    /// Those of them that no backward pass made: the buckets of DDP.
    pub buckets_of_ddp: i64,
    /// Parameters that have optimizer state. State in float32 is at least as large.
    pub updated: i64,
    /// Parameters for which a first optimizer step makes state: at most as many bytes as there are gradients, because frozen
    /// parameters have none. All parameters if no gradients are known.
    pub trained: i64,
    /// Whether an optimizer with 8-bit state, by its name, made memory.
    pub has_small_state: bool,
    pub sizes: ModelSizes<'r>,
    /// Whether the failed request was made under `torch.no_grad()`, or the program never ran a backward pass.
    pub is_inference: bool,
    /// The module with most of the activations, if no optimizer updates it.
    pub not_updated: Option<NotUpdated<'r>>,
    /// Value of [`graphs::without_backward`].
    pub without_backward: Option<[i64; 2]>,
    /// Bytes of copies of float32 weights that autocast keeps, as far as they are known: in training, most are beside activations.
    pub autocast_copies: i64,
    /// Whether the program has had neither a backward pass nor an optimizer's step.
    pub is_evaluation: bool,
    /// Value of [`graphs::kept`].
    pub kept_graphs: Option<[i64; 2]>,
    /// The program's line with the most memory that has no role and was not made in a step, and its bytes.
    pub data: Option<(&'r str, i64)>,
    /// Value of [`checkpoint`].
    pub checkpoint: Option<(&'r str, i64)>,
}

/// Returns whether a tag is that of an optimizer such as `AdamW8bit.step`.
fn is_small_state(tag: &str) -> bool {
    tag.ends_with("bit.step")
}

/// Returns the program's line that has loaded as many bytes as a model's parameters have, and its bytes, if these stayed through the
/// last [`KEPT_STEPS`] steps. The agent gives the phase `Setup` to memory that `torch.load` makes; parameters have their role.
fn checkpoint<'r>(
    report: &'r Report<'_>,
    device: &Device,
    amounts: &Amounts,
    oom: Option<&Oom>,
) -> Option<(&'r str, i64)> {
    let is_loaded =
        |cell: &Cell| is_of_line(cell) && cell.role.is_none() && cell.phase.as_deref() == Phase::Setup.name();
    let loaded = |amounts: &Amounts| report.by_tag(amounts, is_loaded);
    let (line, bytes) = loaded(amounts).into_iter().max_by_key(|(_, bytes)| *bytes)?;
    let models = models(report, amounts, |cell| is_role(cell, Role::Parameter));
    let all = sum(models.values().copied());
    let is_copy = |of: &i64| is_about(bytes, *of, SAME_SHARE);
    let is_kept = |point: &Point| loaded(&point.amounts).get(line).is_some_and(|kept| *kept >= bytes);
    let rows = &device.details.iterations.rows;
    let until_ns = rows.last()?.end_ns;
    // A failed request may come before so many steps are over, and needs what is kept through all of them.
    let steps = rows.iter().map(|row| row.count).sum::<u64>();
    let least = if oom.is_some() { steps.min(KEPT_STEPS) } else { KEPT_STEPS };
    (models.values().chain([&all]).any(is_copy) && steps_through(device, until_ns, is_kept) >= least)
        .then_some((line, bytes))
}

impl<'r> Parts<'r> {
    pub fn of(report: &'r Report<'_>, device: &'r Device, oom: Option<&'r Oom>) -> Self {
        let run = report.run;
        let at_oom = oom.map(|oom| &oom.amounts).filter(|amounts| !amounts.is_empty());
        let amounts = at_oom.unwrap_or(&device.peak.amounts);
        let time_ns = oom.map_or(device.peak.time_ns, |oom| oom.time_ns);
        let bytes = |role: Role| held(run, amounts, |cell| is_role(cell, role));
        let is_of_optimizer = |cell: &Cell| cell.phase.as_deref() == Phase::Optimizer.name();
        let by_tag = |fits: &dyn Fn(&Cell) -> bool| report.by_tag(amounts, fits);
        let parameters_by_tag = by_tag(&|cell| is_role(cell, Role::Parameter));
        let sizes = ModelSizes::of(run);
        let gradients = by_tag(&|cell| is_role(cell, Role::Gradient));
        let states = by_tag(&|cell| is_role(cell, Role::OptimizerState));
        let tensors = Tensors { parameters: &parameters_by_tag, gradients: &gradients, states: &states };
        let not_updated = not_updated::find(report, device, amounts, time_ns, &tensors);
        let is_updated = |tag: &str| not_updated.is_none_or(|module| !is_inside(tag, module.path));
        let is_tensor = |tag: &str| parameters_by_tag.contains_key(tag) && is_updated(tag);
        let of_tensors = sum(gradients.iter().filter(|(tag, _)| is_tensor(tag)).map(|(_, bytes)| *bytes));
        let is_bucket = |cell: &Cell| {
            let is_of_backward = cell.phase.as_deref() == Phase::Backward.name();
            let is_tensor = cell.tag.as_deref().is_some_and(is_tensor);
            is_role(cell, Role::Gradient) && !is_of_backward && !is_tensor
        };
        let updated = parameters_by_tag.iter().filter(|(tag, _)| states.contains_key(*tag));
        let has_phase = |phase: Phase| run.cells.iter().any(|cell| cell.phase.as_deref() == phase.name());
        let is_evaluation = !has_phase(Phase::Backward) && !has_phase(Phase::Optimizer);
        let of_passes = by_tag(&|cell| {
            let is_of_pass = cell.phase.as_deref() == Phase::Forward.name();
            cell.class == Class::Block
                && is_of_pass
                && (cell.role.is_none() || is_role(cell, Role::Activation))
        });
        let copies = autocast::copies(&of_passes, &parameters_by_tag, &sizes);
        let data = by_tag(&is_data).into_iter().max_by_key(|(_, bytes)| *bytes);
        let autocast_copies = sum(copies.into_values());
        Parts {
            time_ns,
            autocast_copies,
            is_evaluation,
            parameters: bytes(Role::Parameter),
            optimizer: bytes(Role::OptimizerState),
            activations: held(run, amounts, is_activation),
            optimizer_temporaries: held(run, amounts, |cell| {
                is_role(cell, Role::Temporary) && is_of_optimizer(cell)
            }),
            short_lived: held(run, amounts, |cell| {
                let is_of_backward = cell.role.is_none() && cell.phase.as_deref() == Phase::Backward.name();
                is_role(cell, Role::Temporary) || cell.class == Class::Block && is_of_backward
            }),
            backward_outside: held(run, amounts, |cell| {
                is_role(cell, Role::Temporary)
                    && cell.phase.as_deref() == Phase::Backward.name()
                    && cell.tag.is_none()
            }),
            used: most_used(device).unwrap_or(0).max(oom.map_or(0, |oom| oom.tracked_bytes)).max(1),
            allocator: held(run, amounts, |cell| matches!(cell.class, Class::Block | Class::PoolIdle)),
            not_updated,
            without_backward: match oom {
                None => graphs::without_backward(report, device, &parameters_by_tag, &sizes),
                Some(_) => None,
            },
            kept_graphs: graphs::kept(report, device),
            data,
            checkpoint: checkpoint(report, device, amounts, oom),
            by_tag: by_tag(&is_activation),
            temporaries_by_tag: by_tag(&|cell| is_role(cell, Role::Temporary)),
            updated: sum(updated.map(|(_, bytes)| *bytes)),
            sizes,
            has_small_state: run.cells.iter().any(|cell| cell.tag.as_deref().is_some_and(is_small_state)),
            gradients: of_tensors,
            trained: match bytes(Role::Gradient) {
                1.. => bytes(Role::Gradient).min(bytes(Role::Parameter)),
                _ => bytes(Role::Parameter),
            },
            buckets: bytes(Role::Gradient).saturating_sub(of_tensors),
            buckets_of_ddp: held(run, amounts, is_bucket),
            parameters_by_tag,
            gradients_by_tag: gradients,
            states_by_tag: states,
            is_inference: match oom {
                Some(oom) => oom.phase.as_deref() == Phase::Evaluation.name(),
                None => is_evaluation,
            },
        }
    }

    /// Returns the bytes of parameters with the element type of most of them, and of the gradients and the part of this optimizer state
    /// that have it, too.
    pub fn of_main_kind(&self, state: i64) -> [i64; 2] {
        let [parameters, trained, others] = match self.sizes.parameter_kind() {
            Some(_) => self.sizes.of_other_kinds(),
            None => [0; 3],
        };
        // Gradients of another type are larger.
        let gradients = if self.gradients <= self.parameters { self.gradients - trained } else { 0 };
        let is_same = self.sizes.state_kind().is_none_or(|kind| Some(kind) == self.sizes.parameter_kind());
        let state = if is_same && !self.has_small_state { state - others } else { 0 };
        [(self.parameters - parameters).max(0), gradients.max(0).saturating_add(state.max(0))]
    }

    /// Returns the activations of the modules whose paths differ from `tag` in numbers only.
    pub fn of_like_modules(&self, tag: &str) -> i64 {
        let starred = |tag: &str| names::group(without_sum(tag), usize::MAX, true);
        let own = starred(tag);
        sum(self.by_tag.iter().filter(|(other, _)| starred(other) == own).map(|(_, bytes)| *bytes))
    }

    /// Returns the activations of models that have parameters, if all parameters have one element type; else 0.
    pub fn of_modules_of_one_kind(&self) -> i64 {
        let models: BTreeSet<&str> = self.parameters_by_tag.keys().map(|tag| root(tag)).collect();
        let has_one_kind = self.sizes.of_other_kinds()[0] == 0;
        let inside =
            self.by_tag.iter().filter(|(tag, _)| has_one_kind && models.contains(&root(without_sum(tag))));
        sum(inside.map(|(_, bytes)| *bytes))
    }

    pub fn is_large(&self, bytes: i64) -> bool {
        bytes as f64 >= self.used as f64 * PART_SHARE
    }
}
