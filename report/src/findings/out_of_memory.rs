//! Finds why a request for memory failed: each cause without which the request would have fitted, with its bytes.

#[cfg(test)]
mod tests;

use super::finding::{Finding, KeptBy, Kind, Severity, mib, rank};
use super::{clues, growth};
use crate::amounts::{is_about, sum};
use crate::model_sizes::ModelSizes;
use crate::oom::{holder_name, holders_of};
use crate::place::{self, OF_PASSES};
use crate::{GroupBy, Report, held, names};
use gpumem_model::cell::HIDDEN_TAG;
use gpumem_model::escape::escape;
use gpumem_model::keeper::Keeper;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Device, Fate, Holder, Iteration, Moment, Oom, OomKind, Run};
use gpumem_model::units::signed;
use gpumem_wire::Role;

/// Maximum number of parts of the process's memory that a sentence names.
const NAMED: usize = 3;
/// Minimum size of a named part, as a share of the largest one.
const NAMED_SHARE: f64 = 0.02;
/// If activations of this many training steps exist after as many forward passes, no backward pass frees them.
const STEPS_AT_ONCE: i64 = 3;
/// Minimum number of completed steps from which their number of forward passes is known.
const LEAST_STEPS: u64 = 5;
/// Minimum unused memory, as a share of the process's memory, for a finding of fragmentation.
pub(crate) const FRAGMENTED_SHARE: f64 = 0.15;
/// Growth below this many times the unused memory of the pool is not the first cause of a failed request.
const SMALL_GROWTH: i64 = 2;
/// An out-of-memory record without amounts uses those of another record within this time before or after it, in nanoseconds.
const SAME_NS: u64 = 1_000_000_000;
/// Growth of another process below this number of bytes is not stated.
const LEAST_GROWTH: i64 = 1 << 20;

/// Minimum share of the activations of the only module that is named with all of them.
const WHOLE_SHARE: f64 = 0.8;
/// Minimum share of the process's memory for the name in the program that keeps it to be named, if it did not grow.
const KEPT_SHARE: f64 = 0.25;
/// A request and an output have the same size if they differ by at most this share.
const SAME_SIZE: f64 = 0.02;

/// Category of activations.
const ACTIVATIONS: &str = "activations";
/// Category of the optimizers' state.
const OPTIMIZER_STATE: &str = "optimizer state";
/// Activations are clearly more than in earlier steps above this factor.
const CLEARLY_MORE: f64 = 1.5;
/// Growth of the optimizers' state, as a factor of its level in earlier steps, from which a second optimizer is likely.
const SECOND_STATE: f64 = 1.2;

/// Data of a failed request, for finding its causes.
struct Request<'r> {
    device: &'r Device,
    oom: &'r Oom,
    /// Number of bytes that the failed request wanted from the driver.
    need: i64,
    /// Number of free bytes of the device.
    free: i64,
    /// Number of bytes that other processes used.
    others: i64,
    /// Number of bytes that the process used, at least 1.
    used: i64,
    /// Number of bytes of the device that processes can use.
    capacity: i64,
    severity: Severity,
}

/// Returns the largest number of bytes of optimizer state at the end of a step; 0 before the first step has ended.
pub(crate) fn state_of_earlier_steps(device: &Device) -> i64 {
    device
        .details
        .iterations
        .rows
        .iter()
        .map(|row: &Iteration| row.optimizer_state.last_bytes)
        .max()
        .unwrap_or(0)
}

/// Returns whether `bytes` of optimizer state are so many more than in earlier steps that a second optimizer is likely.
pub(crate) fn is_of_second_optimizer(bytes: i64, earlier: i64) -> bool {
    earlier > 0 && bytes as f64 > earlier as f64 * SECOND_STATE
}

/// Returns the setting that limits the pool of PyTorch: in the allocator's settings, or else by a call.
pub(crate) fn pool_limit_setting(run: &Run) -> &'static str {
    let settings =
        ["alloc_conf", "cuda_alloc_conf"].into_iter().filter_map(|name| run.process.claims.get(name));
    match settings.into_iter().any(|text| text.contains("per_process_memory_fraction")) {
        true => "per_process_memory_fraction in the allocator's settings",
        false => "torch.cuda.set_per_process_memory_fraction()",
    }
}

/// Returns the causes of a failed request, the most important first.
pub(crate) fn of_request(report: &Report<'_>, device: &Device, oom: &Oom) -> Vec<Finding> {
    let mut causes = causes(report, device, oom);
    rank(&mut causes);
    causes
}

/// Returns the causes of a failed request.
pub(super) fn causes(report: &Report<'_>, device: &Device, oom: &Oom) -> Vec<Finding> {
    let request = Request::of(device, oom);
    if let Some(finding) = request.pool_limit(report).or_else(|| request.too_large()) {
        return vec![finding];
    }
    let mut retained = request.retained(report);
    let is_kept = retained.is_some();
    let mut fragmentation = request.fragmentation(report);
    // The request fits without either. Growth that is not much larger than the unused memory had not filled the device yet.
    let unused = fragmentation.as_ref().map_or(0, |finding| finding.bytes);
    let is_small = |growth: &&mut Finding| growth.bytes < unused.saturating_mul(SMALL_GROWTH);
    let is_of_growing = retained.as_ref().is_some_and(|growth| request.is_of_growing(report, growth));
    if let Some(growth) = retained.as_mut().filter(|growth| growth.kind == Kind::Growth).filter(is_small) {
        let later = if is_of_growing { fragmentation.as_mut() } else { Some(growth) };
        later.into_iter().for_each(|finding| finding.severity = Severity::Warning);
    }
    let mut causes: Vec<Finding> = retained.into_iter().chain(request.other_processes()).collect();
    causes.extend(fragmentation);
    // Memory that the program needs is a cause only if three conditions hold. No memory grew or was kept by missing backward
    // passes. No other cause explains more bytes. The request would not have fitted before another process grew.
    if !is_kept && !request.fits_without_growth_of_others() {
        let most = causes.iter().map(|cause| cause.bytes).max().unwrap_or(0);
        causes.extend(request.largest(report).filter(|largest| largest.bytes > most));
    }
    causes
}

impl<'r> Request<'r> {
    fn of(device: &'r Device, oom: &'r Oom) -> Self {
        let (own, others) = holders_of(oom).split_first().unzip();
        let others = others.unwrap_or_default().iter().map(|holder| holder.used_bytes);
        let others = sum(others.chain(oom.device.as_ref().map(|device| device.others.1)));
        let parts = [Some(oom.tracked_bytes), oom.predates_bytes, oom.untrackable_bytes];
        let tracked = sum(parts.into_iter().flatten());
        let capacity = oom.device.as_ref().map(|device| {
            let reserved =
                signed(device.system_bytes.unwrap_or(0)).saturating_add(device.unaccounted_bytes.max(0));
            signed(device.total_bytes).saturating_sub(reserved)
        });
        Request {
            device,
            oom,
            need: signed(oom.driver_asked_bytes.unwrap_or(oom.asked_bytes)),
            free: oom.free_bytes().unwrap_or(0),
            others,
            used: own.map_or(tracked, |own| own.used_bytes).max(tracked).max(1),
            capacity: capacity.or(device.total_bytes.map(signed)).unwrap_or(i64::MAX),
            severity: match oom.fate {
                Fate::Fatal { .. } if oom.is_out_of_memory() => Severity::Critical,
                _ => Severity::Warning,
            },
        }
    }

    fn retained(&self, report: &Report<'_>) -> Option<Finding> {
        let no_backward = self.no_backward(report);
        let moment = self.moment().unwrap_or_else(|| self.device.peak.clone());
        let amounts = &moment.amounts;
        let growth = growth::growth(report, self.device, Some(self.oom));
        match growth.and_then(|growth| growth.still_held(report, amounts)) {
            // Missing backward passes explain growth in few forward passes.
            Some(grown) if self.would_fit(grown.bytes) && !(grown.is_short() && no_backward.is_some()) => {
                let spare_bytes = self.spare(grown.bytes);
                let advice = no_backward.and_then(|finding| finding.advice);
                let finding = grown.finding(report, (self.device, amounts), self.used, self.severity);
                let finding = clues::with_clues(report, (Some(self.oom), amounts), finding);
                Some(Finding { spare_bytes, advice: finding.advice.clone().or(advice), ..finding })
            }
            _ => no_backward,
        }
    }

    /// Returns whether the request would have fitted with `bytes` more free bytes.
    fn would_fit(&self, bytes: i64) -> bool {
        bytes > 0 && self.free.saturating_add(bytes) >= self.need
    }

    /// Returns how many bytes would have been free after the request with `bytes` more free bytes; `None` if it would not have
    /// fitted, or if its size is unknown.
    fn spare(&self, bytes: i64) -> Option<i64> {
        let left = self.free.saturating_add(bytes).saturating_sub(self.need);
        (!self.oom.is_suspected() && left >= 0).then_some(left)
    }

    fn finding(&self, kind: Kind, bytes: i64, what: String) -> Finding {
        let spare_bytes = self.spare(bytes);
        Finding {
            spare_bytes,
            ..Finding::new(kind, self.severity, Some(self.device), (bytes, self.used), what)
        }
    }

    fn pool_limit(&self, report: &Report<'_>) -> Option<Finding> {
        let asked = signed(self.oom.asked_bytes);
        let reserved = self.oom.pool_reserved_bytes.map(|reserved| {
            let total = self.device.total_bytes.filter(|total| *total > 0);
            let share = total
                .map(|total| format!(" ({:.0} % of the device)", 100.0 * reserved as f64 / total as f64));
            let share = share.unwrap_or_default();
            format!(" beyond the {} MiB{share} that it had reserved", mib(signed(reserved)))
        });
        (self.oom.kind == OomKind::Pool && self.free >= asked).then(|| Finding {
            advice: Some(format!("raise or remove {}", pool_limit_setting(report.run))),
            spare_bytes: Some(self.free.saturating_sub(asked)),
            ..self.finding(
                Kind::PoolLimit,
                asked,
                format!(
                    "a limit of the pool refused {} MiB{} while {} MiB of the device were free",
                    mib(asked),
                    reserved.unwrap_or_default(),
                    mib(self.free)
                ),
            )
        })
    }

    fn too_large(&self) -> Option<Finding> {
        (self.need > self.capacity).then(|| {
            let what = format!(
                "one request of {} MiB is more than the {} MiB that the device can give",
                mib(signed(self.oom.asked_bytes)),
                mib(self.capacity)
            );
            Finding { share: 1.0, spare_bytes: None, ..self.finding(Kind::LargeRequest, self.need, what) }
        })
    }

    fn fits_without_growth_of_others(&self) -> bool {
        let others = holders_of(self.oom).iter().skip(1);
        others.filter_map(|holder| holder.growth_bytes).any(|bytes| self.would_fit(bytes))
    }

    fn other_processes(&self) -> Option<Finding> {
        let share = self.others as f64 / self.capacity.max(1) as f64;
        let grown = |holder: &Holder| {
            let bytes = holder.growth_bytes.filter(|bytes| *bytes >= LEAST_GROWTH)?;
            Some((bytes, holder.growth_ns?, holder_name(holder)))
        };
        let grown = holders_of(self.oom).iter().skip(1).filter_map(grown).max_by_key(|(bytes, ..)| *bytes);
        let grown = grown.map(|(bytes, in_ns, name)| {
            format!("; {name} took {} MiB in the {} s before", mib(bytes), in_ns.div_ceil(1_000_000_000))
        });
        let largest = holders_of(self.oom).iter().skip(1).max_by_key(|holder| holder.used_bytes);
        let largest = largest.filter(|holder| holder.pid != 0 && grown.is_none());
        let largest = largest.map(|Holder { pid, user, .. }| {
            let of_user = user.as_deref().map(|user| format!(" of {}", escape(user))).unwrap_or_default();
            format!("; the largest is pid {pid}{of_user}")
        });
        let largest = largest.unwrap_or_default();
        self.would_fit(self.others).then(|| Finding {
            share,
            ..self.finding(
                Kind::OtherProcesses,
                self.others,
                format!(
                    "other processes hold {} MiB, {:.0} % of the device{largest}{}",
                    mib(self.others),
                    share * 100.0,
                    grown.unwrap_or_default()
                ),
            )
        })
    }

    fn fragmentation(&self, report: &Report<'_>) -> Option<Finding> {
        let (idle, largest) = self.oom.idle_bytes.zip(self.oom.largest_idle_bytes)?;
        let (idle, largest) = (signed(idle), signed(largest));
        let is_much = idle as f64 >= self.used as f64 * FRAGMENTED_SHARE;
        if !is_much || !self.would_fit(idle) {
            return None;
        }
        let asked = signed(self.oom.asked_bytes);
        let growth = growth::idle(report, self.device, Some(self.oom));
        let growth = growth.map(|growth| format!(": {}", growth.rate())).unwrap_or_default();
        if largest >= asked {
            // The allocator uses a large enough piece unless it belongs to another stream, a private pool or a size class.
            let pieces = clues::pieces_apart(self.device, super::has_graphs(self.device));
            let what = format!(
                "{} MiB of the pool are unused {pieces}, which the request cannot use{growth}",
                mib(idle)
            );
            return Some(self.finding(Kind::Fragmentation, idle, what));
        }
        let has_advice = names::has_torch(report.run) && !self.oom.is_expandable;
        let what = format!(
            "{} MiB of the pool are unused, and the largest piece of {} MiB is too small for {} MiB{growth}",
            mib(idle),
            mib(largest),
            mib(asked)
        );
        Some(Finding {
            advice: has_advice.then(|| match super::has_pools_of_graphs(self.device) {
                true => "capture the CUDA graphs into one pool: torch.cuda.graph(graph, pool=first.pool())"
                    .to_owned(),
                false => "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True".to_owned(),
            }),
            ..self.finding(Kind::Fragmentation, idle, what)
        })
    }

    /// Returns the process's memory by cell when the request failed. If the record of the failed request has no amounts, uses a
    /// record close in time.
    fn moment(&self) -> Option<Moment> {
        let of = |oom: &Oom| Moment { amounts: oom.amounts.clone(), ..Moment::default() };
        if self.oom.tracked_bytes != 0 {
            return Some(of(self.oom));
        }
        let near = |oom: &&Oom| oom.tracked_bytes != 0 && oom.time_ns.abs_diff(self.oom.time_ns) <= SAME_NS;
        self.device.details.ooms.iter().rev().find(near).map(of)
    }

    /// Returns the finding that activations of many steps are kept, because no backward pass frees them. Older runs lack the
    /// number of passes, so they have no such finding.
    fn no_backward(&self, report: &Report<'_>) -> Option<Finding> {
        let is_activation = |cell: &Cell| cell.role.as_deref() == Role::Activation.name();
        let bytes = held(report.run, &self.moment()?.amounts, is_activation);
        let rows = &self.device.details.iterations.rows;
        let of_a_step = rows.iter().map(|row: &Iteration| row.activations.peak_bytes).max()?;
        let passes = self.oom.passes_without_backward?;
        // A single pass more than in every earlier step is of an evaluation, too: it begins while the result of the last pass is kept.
        let usual = rows.iter().map(|row| row.passes_at_once).max().filter(|usual| *usual > 0);
        let steps = rows.iter().map(|row| row.count).sum::<u64>();
        // A pass whose request failed may be repeated with the same batch.
        let is_first_failure = gpumem_model::oom::times(&self.device.details.ooms) <= 1;
        let is_first_evaluation =
            steps >= LEAST_STEPS && usual.is_some_and(|usual| passes > usual) && is_first_failure;
        let is_in_many = passes >= STEPS_AT_ONCE as u64 || is_first_evaluation;
        let is_much = of_a_step > 0 && bytes / STEPS_AT_ONCE >= of_a_step && is_in_many;
        let keeper = clues::keeper(self.oom, bytes, true);
        let kept = keeper.map(|keeper| format!("; they are {}", clues::text_of(keeper))).unwrap_or_default();
        (is_much && self.would_fit(bytes)).then(|| Finding {
            keeper: keeper.cloned(),
            advice: Some("run passes that are not for training under torch.no_grad()".into()),
            ..self.finding(
                Kind::NoBackward,
                bytes,
                format!(
                    "{} MiB of activations are kept by {passes} forward passes without a backward pass; a training step kept {} MiB{kept}",
                    mib(bytes),
                    mib(of_a_step)
                ),
            )
        })
    }

    /// Returns the module that has most of the activations, alone or together with modules inside of it.
    fn activated_module(&self, report: &Report<'_>) -> Option<String> {
        let is_activation = |cell: &Cell| cell.role.as_deref() == Role::Activation.name();
        let tags = report.by_tag(&self.moment()?.amounts, is_activation).into_iter();
        let tags: Vec<(String, i64)> = tags.map(|(tag, bytes)| (tag.to_owned(), bytes)).collect();
        let bytes = sum(tags.iter().map(|(_, bytes)| *bytes));
        let mut named = growth::largest(tags, bytes).into_iter();
        // Else the place with most of them is named with its own bytes.
        let most = named.next().filter(|(_, most)| *most as f64 >= bytes as f64 * WHOLE_SHARE);
        most.filter(|_| named.next().is_none()).map(|(name, _)| name)
    }

    /// Returns whether the request is as large as a tensor that grows, with what one step adds: the program makes it anew, such as by
    /// `torch.cat`. No freed copy of it leaves a piece that is large enough, so the unused memory grows, too.
    fn is_of_growing(&self, report: &Report<'_>, growth: &Finding) -> bool {
        let asked = signed(self.oom.asked_bytes);
        let held = |name: &str| held(report.run, &self.oom.amounts, |cell| cell.tag.as_deref() == Some(name));
        growth.kind == Kind::Growth
            && growth
                .names
                .iter()
                .map(|(name, _)| held(name))
                .any(|bytes| bytes > growth.bytes / 2 && bytes <= asked && is_about(bytes, asked, SAME_SIZE))
    }

    /// Returns that the failed request is as large as all outputs of the place with most of them, if it is: a gradient or a
    /// temporary of them.
    fn request_clue(&self, report: &Report<'_>, amounts: &Amounts) -> String {
        let asked = signed(self.oom.asked_bytes);
        let is_same = |bytes: i64| is_about(bytes, asked, SAME_SIZE);
        let outputs = report.by_tag(amounts, |cell| cell.role.as_deref() == Role::Activation.name());
        let largest = outputs.into_iter().max_by_key(|(_, bytes)| *bytes);
        let same = largest.filter(|(tag, bytes)| is_same(*bytes) && *tag != HIDDEN_TAG);
        same.map(|(tag, _)| format!(", as much as the outputs of {} have", escape(tag))).unwrap_or_default()
    }

    /// Returns the activations of earlier steps in brackets, if `bytes` are clearly more.
    fn activations_of_earlier_steps(&self, bytes: i64) -> String {
        let earlier = clues::activations_of_earlier_steps(self.device);
        let earlier = earlier.filter(|earlier| bytes as f64 > *earlier as f64 * CLEARLY_MORE);
        earlier.map(|earlier| format!(" ({} in earlier steps)", mib(earlier))).unwrap_or_default()
    }

    /// Returns in brackets the bytes of an optimizer's state in earlier steps, if there is more of it now, or else those that the
    /// optimizer needs by its name.
    fn state_clue(&self, report: &Report<'_>, moment: &Moment, bytes: i64) -> String {
        let earlier = state_of_earlier_steps(self.device);
        if is_of_second_optimizer(bytes, earlier) {
            return format!(" ({} in earlier steps, so it is of a second optimizer)", mib(earlier));
        }
        let of = |role: Role| held(report.run, &moment.amounts, |cell| cell.role.as_deref() == role.name());
        // Frozen parameters have neither gradients nor state.
        let trained = of(Role::Gradient).min(of(Role::Parameter));
        let needed = clues::state_of_optimizer(self.oom, trained).filter(|_| earlier == 0);
        let needed = needed.map(|(name, needed)| match bytes > needed {
            true => format!(
                " (the state of {} has {}; the rest are temporaries of its first step, or more state, as of amsgrad)",
                escape(&name),
                mib(needed)
            ),
            false => format!(" (of {} that {} needs)", mib(needed), escape(&name)),
        });
        needed.unwrap_or_default()
    }

    /// Returns the finding that the memory that the process needs at one time does not fit, with its largest parts.
    fn largest(&self, report: &Report<'_>) -> Option<Finding> {
        if self.oom.is_suspected() {
            let share = 100.0 * self.used as f64 / self.capacity.max(1) as f64;
            let what = format!(
                "the process used {} MiB, {share:.0} % of the device; its parts are unknown without an agent",
                mib(self.used)
            );
            let advice = Some("start it with gpumemctl run -- COMMAND".into());
            return Some(Finding { advice, ..self.finding(Kind::TooLarge, self.used, what) });
        }
        let moment = self.moment()?;
        let mut parts = report.composition(&moment, GroupBy::Structure).ranked();
        parts.extend(report.others_by_name(&moment, GroupBy::Structure));
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let bytes = parts.first().map(|(_, bytes)| *bytes).filter(|bytes| *bytes > 0)?;
        parts.retain(|(_, part)| *part as f64 >= bytes as f64 * NAMED_SHARE);
        parts.truncate(NAMED);
        let module = self.activated_module(report).filter(|_| parts[0].0 == ACTIVATIONS);
        let place = |name: &str| {
            let place = place::of_category(report, &moment.amounts, name);
            place.map(|(tag, most)| format!(" ({} of {})", mib(most), escape(&tag))).unwrap_or_default()
        };
        let named = parts.iter().map(|(name, bytes)| match &module {
            Some(module) if name == ACTIVATIONS => {
                let earlier = self.activations_of_earlier_steps(*bytes);
                format!("{name} of {} {}{earlier}", escape(module), mib(*bytes))
            }
            _ if name == ACTIVATIONS => {
                let earlier = self.activations_of_earlier_steps(*bytes);
                let notes = format!("{}{earlier}", place(name)).replace(") (", "; ");
                format!("{name} {}{notes}", mib(*bytes))
            }
            _ if name == OPTIMIZER_STATE => {
                format!("{name} {}{}", mib(*bytes), self.state_clue(report, &moment, *bytes))
            }
            _ if OF_PASSES.contains(&name.as_str()) => format!("{name} {}{}", mib(*bytes), place(name)),
            _ => format!("{} {}", escape(name), mib(*bytes)),
        });
        let is_much = |keeper: &&Keeper| keeper.bytes as f64 >= self.used as f64 * KEPT_SHARE;
        let keeper = self.oom.keepers.first().filter(is_much).cloned();
        let kept = keeper.as_ref().map(|keeper| format!("; a part is {}", clues::text_of(keeper)));
        let has_graphs = keeper.is_none() && clues::retained_graphs(report, self.device, self.oom).is_some();
        let kept_by = has_graphs.then_some(KeptBy::RetainedGraphs);
        let graphs = kept_by.as_ref().and_then(clues::of_kept_by).map(|clue| format!("; {clue}"));
        let what = format!(
            "the memory that the program holds at one time does not fit: {} MiB; {} MiB more were requested{}{}{}",
            named.collect::<Vec<_>>().join(" + "),
            mib(signed(self.oom.asked_bytes)),
            self.request_clue(report, &moment.amounts),
            match ModelSizes::of(report.run).parameter_kind() {
                Some("float64") => "; the parameters are float64",
                _ => "",
            },
            kept.or(graphs).unwrap_or_default()
        );
        let finding = self.finding(Kind::TooLarge, bytes, what);
        Some(Finding { names: parts, keeper, kept_by, spare_bytes: None, ..finding })
    }
}
