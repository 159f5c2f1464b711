//! The hand-written lists that the tables of fields replace, against the generated operations.

#![allow(clippy::all)]
use super::round_trip::run;
use gpumem_model::fields::Field;
use gpumem_model::run::*;
use gpumem_model::series::Series;
use gpumem_model::timeline::Point;
use gpumem_model::window::{Window, WindowKind};
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::HashMap;

mod part {
    use super::*;
    /// What was counted before a part began.
    #[derive(Debug, Clone)]
    pub struct Before {
        part: Part,
        counts: Coverage,
    }

    impl Before {
        /// At the end of a part, which had this before itself and counted that.
        pub fn after(before: Option<&Before>, coverage: &Coverage, now_ns: u64) -> Self {
            let mut counts = coverage.clone();
            if let Some(before) = before {
                each(&mut counts, &before.counts, u64::saturating_add);
            }
            let part = Part {
                number: before.map_or(1, |before| before.part.number) + 1,
                began_ns: now_ns,
                events_before: counts.events.saturating_add(counts.lost),
            };
            Before { part, counts }
        }

        /// Makes the counts of a life those of the part.
        pub fn leave_out(&self, coverage: &mut Coverage) {
            each(coverage, &self.counts, u64::saturating_sub);
            coverage.blind.retain(|window| window.to_ns.is_none_or(|to_ns| to_ns > self.part.began_ns));
            // Its peak begins with what was known when it began.
            coverage.partial_history = coverage.lost > 0
                || coverage.partial_state
                || self.counts.partial_state
                || coverage.blind_doubt;
            coverage.part = Some(self.part);
        }
    }

    /// Adds the counts of another part of the same life, or of another process; sums saturate, because a stored run may be damaged.
    /// Marks stay as they are: their count belongs to their list.
    pub fn add_counts(this: &mut Coverage, other: &Coverage) {
        // Named one by one, so that a new field is a decision here.
        let Coverage {
            covered: _,
            late: _,
            blocked_by: _,
            blocked_code: _,
            blind: _,
            blind_count,
            blind_ns,
            blind_doubt: _,
            partial_state: _,
            partial_history: _,
            events,
            allocations,
            allocated_bytes,
            rejected,
            lost,
            withheld,
            complete: _,
            odd,
            samples,
            torn_samples,
            stale_samples,
            failed_allocations,
            steps,
            layers: _,
            ooms_dropped,
            marks: _,
            marks_dropped: _,
            programs: _,
            part: _,
        } = this;
        for (sum, more) in [
            (blind_count, other.blind_count),
            (blind_ns, other.blind_ns),
            (events, other.events),
            (allocations, other.allocations),
            (allocated_bytes, other.allocated_bytes),
            (rejected, other.rejected),
            (lost, other.lost),
            (withheld, other.withheld),
            (odd, other.odd),
            (samples, other.samples),
            (torn_samples, other.torn_samples),
            (stale_samples, other.stale_samples),
            (failed_allocations, other.failed_allocations),
            (steps, other.steps),
            (ooms_dropped, other.ooms_dropped),
        ] {
            *sum = sum.saturating_add(more);
        }
    }

    /// Every count of a life; samples begin anew with the series.
    pub fn each(counts: &mut Coverage, other: &Coverage, with: impl Fn(u64, u64) -> u64) {
        let pairs = [
            (&mut counts.blind_count, other.blind_count),
            (&mut counts.blind_ns, other.blind_ns),
            (&mut counts.events, other.events),
            (&mut counts.allocations, other.allocations),
            (&mut counts.allocated_bytes, other.allocated_bytes),
            (&mut counts.rejected, other.rejected),
            (&mut counts.lost, other.lost),
            (&mut counts.withheld, other.withheld),
            (&mut counts.odd, other.odd),
            (&mut counts.stale_samples, other.stale_samples),
            (&mut counts.failed_allocations, other.failed_allocations),
            (&mut counts.steps, other.steps),
        ];
        for (count, other) in pairs {
            *count = with(*count, other);
        }
    }
}

mod whole {
    use super::*;
    /// One run of these parts of a life, which are in the order of time; the last one says how it is. `None` of none.
    pub fn whole(parts: Vec<Run>) -> Option<Run> {
        let mut parts = parts.into_iter();
        let mut whole = parts.next()?;
        for part in parts {
            join(&mut whole, part);
        }
        Some(whole)
    }

    fn join(whole: &mut Run, mut part: Run) {
        let mut known: HashMap<Cell, u32> =
            whole.cells.iter().enumerate().map(|(index, cell)| (cell.clone(), index as u32)).collect();
        let places: Vec<u32> = part
            .cells
            .drain(..)
            .map(|cell| match known.get(&cell) {
                Some(place) => *place,
                None => {
                    let place = whole.cells.len() as u32;
                    whole.cells.push(cell.clone());
                    known.insert(cell, place);
                    place
                }
            })
            .collect();
        let mut own = std::mem::take(&mut whole.own);
        own.append(std::mem::take(&mut part.own));
        whole.own = own;
        for device in &mut part.devices {
            renumber(device, &places);
        }
        for device in part.devices {
            match whole.devices.iter_mut().find(|other| other.name == device.name) {
                Some(other) => follow(other, device),
                None => whole.devices.push(device),
            }
        }
        let before = std::mem::replace(&mut whole.coverage, part.coverage);
        go_on(&mut whole.coverage, before);
        // That a part has parts before it is true of the first of these alone; the driver's accounting is of the whole life.
        part.caveats.retain(|caveat| caveat.code != "part");
        let mut earlier = std::mem::replace(&mut whole.caveats, part.caveats);
        earlier.retain(|caveat| {
            caveat.code != "accounting_disagrees"
                && whole.caveats.iter().all(|other| other.code != caveat.code)
        });
        whole.caveats.splice(0..0, earlier);
        (whole.state, whole.process, whole.clock) = (part.state, part.process, part.clock);
    }

    /// Makes the coverage of a part that of the whole, of which `before` tells the parts before: how it is now, and all that was lost at any
    /// time, because the peak may be of any part.
    fn go_on(coverage: &mut Coverage, before: Coverage) {
        super::part::add_counts(coverage, &before);
        coverage.covered |= before.covered;
        coverage.late |= before.late;
        coverage.blind_doubt |= before.blind_doubt;
        coverage.partial_history |= before.partial_history || before.partial_state;
        // One that lasted when a part ended is in the next part, too.
        let is_new =
            |window: &BlindWindow| coverage.blind.iter().all(|other| other.from_ns != window.from_ns);
        let mut blind: Vec<BlindWindow> = before.blind.into_iter().filter(is_new).collect();
        blind.append(&mut coverage.blind);
        coverage.blind = blind;
        coverage.marks.splice(0..0, before.marks);
        coverage.marks_dropped = coverage.marks_dropped.saturating_add(before.marks_dropped);
        let mut programs = before.programs;
        programs.retain(|program| coverage.programs.iter().all(|other| other.instance != program.instance));
        programs.append(&mut coverage.programs);
        coverage.programs = programs;
        coverage.part = before.part;
    }

    /// Amounts of the part's cells are of the whole's.
    fn renumber(device: &mut Device, places: &[u32]) {
        let moment = |moment: &mut Moment| each(&mut moment.amounts, places);
        moment(&mut device.last);
        moment(&mut device.peak);
        device.details.timeline.points.iter_mut().for_each(|point| each(&mut point.amounts, places));
        device.details.ooms.iter_mut().for_each(|oom| each(&mut oom.amounts, places));
        device.details.growth.cells.iter_mut().for_each(|(cell, _)| *cell = place(places, *cell));
    }

    fn each(amounts: &mut [(u32, i64)], places: &[u32]) {
        amounts.iter_mut().for_each(|(cell, _)| *cell = place(places, *cell));
        amounts.sort_unstable_by_key(|(cell, _)| *cell);
    }

    fn place(places: &[u32], cell: u32) -> u32 {
        places.get(cell as usize).copied().unwrap_or(u32::MAX)
    }

    /// What is told of a device goes on.
    fn follow(whole: &mut Device, part: Device) {
        let mut part = part;
        let is_higher =
            |a: &Moment, b: &Moment| a.tracked_bytes.or(a.used_bytes()) > b.tracked_bytes.or(b.used_bytes());
        if is_higher(&whole.peak, &part.peak) {
            part.peak = whole.peak.clone();
        }
        part.peak_used = whole.peak_used.max(part.peak_used);
        let mut series = whole.series.clone();
        series.absorb(&part.series);
        part.series = series;
        let (before, after) = (&mut whole.details, &mut part.details);
        let timeline = &mut after.timeline;
        timeline.width_ns = timeline.width_ns.max(before.timeline.width_ns);
        timeline.points.splice(0..0, before.timeline.points.drain(..));
        after.iterations.rows.splice(0..0, before.iterations.rows.drain(..));
        let mut parameters = std::mem::take(&mut before.parameters);
        parameters.append(std::mem::take(&mut after.parameters));
        after.parameters = parameters;
        after.ooms.splice(0..0, before.ooms.drain(..));
        // The gap's steps and the points of growth are those of the whole life.
        *whole = part;
    }
}

mod lives {
    use super::*;
    const MAX_MARKS: usize = gpumem_ledger::MAX_MARKS;
    const MAX_ROWS: usize = gpumem_model::iterations::MAX_ROWS;
    const MAX_OOMS: usize = 32;
    pub fn same_part(before: &Run, now: &Run, known: u64) -> Run {
        let mut run = now.clone();
        let places = places(&before.cells, &mut run.cells);
        for old in &before.devices {
            match run.devices.iter_mut().find(|device| device.name == old.name) {
                Some(device) => {
                    device.series.absorb(&old.series);
                    if old.peak.tracked_bytes > device.peak.tracked_bytes {
                        device.peak = moved(&old.peak, &places);
                    }
                    device.peak_used = device.peak_used.max(old.peak_used);
                    let details = std::mem::take(&mut device.details);
                    device.details = joined_details(
                        moved_details(&old.details, &places),
                        details,
                        &mut run.coverage.ooms_dropped,
                    );
                }
                None => run.devices.push(Device {
                    last: moved(&old.last, &places),
                    peak: moved(&old.peak, &places),
                    details: moved_details(&old.details, &places),
                    ..old.clone()
                }),
            }
        }
        let (then, coverage) = (&before.coverage, &mut run.coverage);
        coverage.lost = coverage.lost.saturating_sub(known);
        coverage.partial_history = then.partial_history || coverage.partial_state || coverage.lost > 0;
        coverage.covered |= then.covered;
        coverage.late |= then.late;
        coverage.blind_doubt |= then.blind_doubt;
        let again = blind_again(then, coverage);
        super::part::add_counts(coverage, then);
        coverage.blind_count = coverage.blind_count.saturating_sub(again);
        coverage.marks.splice(0..0, then.marks.iter().cloned());
        let beyond = coverage.marks.len().saturating_sub(2 * MAX_MARKS);
        coverage.marks.drain(..beyond);
        coverage.marks_dropped =
            coverage.marks_dropped.saturating_add(then.marks_dropped).saturating_add(beyond as u64);
        coverage.part = then.part;
        let of_now = std::mem::replace(&mut run.own, before.own.clone());
        run.own.append(of_now);
        let of_now = std::mem::take(&mut run.caveats);
        run.caveats = before.caveats.iter().filter(|caveat| !is_in(&of_now, caveat)).cloned().collect();
        run.caveats.extend(of_now);
        for (key, value) in &before.process.facts {
            run.process.facts.entry(key.clone()).or_insert_with(|| value.clone());
        }
        run
    }

    /// Puts the times in which the earlier life's agent saw nothing before those of this life. Returns how many of them both have: an agent
    /// tells each daemon since when it sees nothing.
    fn blind_again(then: &Coverage, coverage: &mut Coverage) -> u64 {
        let is_in_both =
            |window: &BlindWindow| coverage.blind.iter().any(|now| now.from_ns == window.from_ns);
        let (both, mut blind): (Vec<_>, Vec<_>) = then.blind.iter().cloned().partition(is_in_both);
        blind.append(&mut coverage.blind);
        coverage.blind = blind;
        both.len() as u64
    }

    fn is_in(caveats: &[Caveat], caveat: &Caveat) -> bool {
        caveats.iter().any(|other| other == caveat)
    }

    /// What happened in both lives, of what tells when; the causes of the gap, growth and pools are those of now, because the
    /// ledger of this life found them for what is held now.
    fn joined_details(old: Details, mut now: Details, dropped: &mut u64) -> Details {
        now.accounted_peak_bytes = now.accounted_peak_bytes.max(old.accounted_peak_bytes);
        let later = std::mem::replace(&mut now.timeline, old.timeline);
        timeline_go_on(&mut now.timeline, later);
        let mut ooms = old.ooms;
        ooms.append(&mut now.ooms);
        while ooms.len() > MAX_OOMS {
            *dropped = dropped.saturating_add(ooms.remove(MAX_OOMS / 2).count.max(1));
        }
        now.ooms = ooms;
        let of_now = std::mem::replace(&mut now.parameters, old.parameters);
        now.parameters.append(of_now);
        let mut rows = old.iterations.rows;
        rows.append(&mut now.iterations.rows);
        now.iterations.rows = rows.split_off(rows.len().saturating_sub(MAX_ROWS));
        now
    }

    /// Where each old cell is among the new ones; those that are new there are added.
    fn places(old: &[Cell], new: &mut Vec<Cell>) -> Vec<u32> {
        let mut known: HashMap<Cell, u32> =
            (0..).zip(new.iter()).map(|(at, cell)| (cell.clone(), at)).collect();
        let place = |cell: &Cell| match known.get(cell) {
            Some(&at) => at,
            None => {
                let at = new.len() as u32;
                new.push(cell.clone());
                known.insert(cell.clone(), at);
                at
            }
        };
        old.iter().map(place).collect()
    }

    fn moved(moment: &Moment, places: &[u32]) -> Moment {
        Moment { amounts: moved_amounts(&moment.amounts, places).into(), ..moment.clone() }
    }

    fn moved_amounts(amounts: &[(u32, i64)], places: &[u32]) -> Vec<(u32, i64)> {
        let place = |&(cell, bytes): &(u32, i64)| Some((*places.get(cell as usize)?, bytes));
        let mut amounts: Vec<_> = amounts.iter().filter_map(place).collect();
        amounts.sort_unstable();
        amounts
    }

    fn moved_details(details: &Details, places: &[u32]) -> Details {
        let mut details = details.clone();
        details
            .timeline
            .points
            .iter_mut()
            .for_each(|point| point.amounts = moved_amounts(&point.amounts, places).into());
        details.ooms.iter_mut().for_each(|oom| oom.amounts = moved_amounts(&oom.amounts, places).into());
        details.growth.cells.retain_mut(|(cell, _)| {
            let place = places.get(*cell as usize);
            place.inspect(|place| *cell = **place).is_some()
        });
        details
    }

    fn timeline_go_on(this: &mut Timeline, later: Timeline) {
        let last_ns = this.points.last().map(|point| point.time_ns);
        this.points.extend(later.points.into_iter().filter(|point| Some(point.time_ns) > last_ns));
        this.width_ns = this.width_ns.max(later.width_ns).max(1);
        while this.points.len() > gpumem_model::timeline::MAX_POINTS {
            this.width_ns = this.width_ns.saturating_mul(2);
            let slot = |point: &Point| point.time_ns / this.width_ns;
            let slots = this.points.chunk_by(|one, other| slot(one) == slot(other)).collect::<Vec<_>>();
            let mut kept: Vec<Point> = Vec::new();
            for (at, points) in slots.iter().enumerate() {
                let Some(last) = points.last() else { continue };
                let fullest = points.iter().rev().max_by_key(|point| point.tracked_bytes()).unwrap_or(last);
                kept.push(fullest.clone());
                let next = slots.get(at + 1).and_then(|points| points.first());
                if fullest.time_ns < last.time_ns && next.is_none_or(|next| slot(next) > slot(last) + 1) {
                    kept.push(last.clone());
                }
            }
            this.points = kept;
        }
    }
}

mod window {
    use super::*;
    pub fn keep(device: &mut Device, window: &Window) {
        device.peak_used = None;
        let Series { width_ns, buckets } = &mut device.series;
        buckets.retain(|bucket| {
            bucket.time_ns.saturating_add(*width_ns) > window.from_ns && bucket.time_ns <= window.to_ns
        });
        let highest = buckets.iter().filter_map(|bucket| Some((bucket.used?.max, bucket.time_ns)));
        let highest = highest.max_by_key(|&(used, time_ns)| (used, Reverse(time_ns)));
        device.peak_used = highest.and_then(|(used, time_ns)| Some((u64::try_from(used).ok()?, time_ns)));
        let details = &mut device.details;
        details.accounted_peak_bytes = None;
        details.timeline.points.retain(|point| has(window, point.time_ns));
        details.steps.retain(|step| has(window, step.time_ns));
        details.ooms.retain(|oom| oom.last_ns >= window.from_ns && oom.time_ns <= window.to_ns);
        let open = details.iterations.open.take();
        details.iterations.open =
            open.filter(|row| row.start_ns <= window.to_ns && window.part == WindowKind::Since);
        details.iterations.rows.retain(|row| row.end_ns >= window.from_ns && row.start_ns <= window.to_ns);
        growth_keep(&mut details.growth, |time_ns| has(window, time_ns));
    }

    fn has(window: &Window, time_ns: u64) -> bool {
        (window.from_ns..=window.to_ns).contains(&time_ns)
    }
    fn growth_keep(this: &mut gpumem_model::growth::Growth, is_of: impl Fn(u64) -> bool) {
        let kept: Vec<bool> = this.points.iter().map(|(_, time_ns)| is_of(*time_ns)).collect();
        let columns = this.cells.iter_mut().map(|(_, column)| column);
        for column in columns.chain([&mut this.named, &mut this.slack, &mut this.rest]) {
            let mut is_kept = kept.iter();
            column.retain(|_| is_kept.next().copied().unwrap_or(false));
        }
        this.points.retain(|(_, time_ns)| is_of(*time_ns));
        this.gap.retain(|(time_ns, _)| is_of(*time_ns));
        this.used.retain(|(time_ns, _)| is_of(*time_ns));
    }
    pub fn own_keep(this: &mut Own, from_ns: u64, to_ns: u64) {
        this.spans.retain(|&gpumem_model::own::Span(_, _, begin_ns, end_ns)| {
            end_ns >= from_ns && begin_ns <= to_ns
        });
        for counter in &mut this.counters {
            // What it was when the time began is in it, too.
            let before = counter.points.iter().rposition(|(time_ns, _)| *time_ns <= from_ns).unwrap_or(0);
            counter.points.drain(..before);
            counter.points.retain(|(time_ns, _)| *time_ns <= to_ns);
        }
    }
}

mod job {
    use super::*;
    pub fn add_coverage(sum: &mut Coverage, of: &Coverage) {
        sum.covered |= of.covered;
        sum.late |= of.late;
        sum.blocked_by = sum.blocked_by.take().or_else(|| of.blocked_by.clone());
        sum.blind_doubt |= of.blind_doubt;
        sum.partial_state |= of.partial_state;
        sum.partial_history |= of.partial_history;
        super::part::add_counts(sum, of);
    }
    pub fn shifted_amounts(amounts: Vec<(u32, i64)>, offset: u32) -> Vec<(u32, i64)> {
        amounts.into_iter().map(|(cell, bytes)| (cell.saturating_add(offset), bytes)).collect()
    }
}

mod weight {
    use super::*;
    use std::mem::size_of;
    /// Texts in a line of a list that has few: a step of the gap, a pool, a caveat.
    const WORDS: usize = 128;

    fn list<T>(list: &[T]) -> usize {
        size_of_val(list)
    }

    fn cell(cell: &Cell) -> usize {
        let Cell { tag, origin, role, phase, library, pool, .. } = cell;
        let texts = [tag, origin, role, phase, library, pool].into_iter();
        size_of::<Cell>() + texts.flatten().map(String::len).sum::<usize>()
    }

    fn moment(moment: &Moment) -> usize {
        list(&moment.amounts)
    }

    fn details(details: &Details) -> usize {
        let points = &details.timeline.points;
        let growth = &details.growth;
        let lists = [
            list(points),
            points.iter().map(|point| list(&point.amounts)).sum(),
            list(&details.iterations.rows),
            parameters_weight(&details.parameters),
            list(&details.steps) + WORDS * details.steps.len(),
            list(&details.pools) + WORDS * details.pools.len(),
            list(&details.ooms),
            details.ooms.iter().map(|oom| list(&oom.amounts) + WORDS).sum(),
            list(&growth.points) + list(&growth.named) + list(&growth.slack) + list(&growth.rest),
            list(&growth.gap) + list(&growth.used),
            growth.cells.iter().map(|(_, values)| list(values) + size_of::<usize>()).sum(),
        ];
        lists.into_iter().sum()
    }

    fn device(device: &Device) -> usize {
        let lists = list(&device.series.buckets) + list(&device.tenants);
        size_of::<Device>() + lists + moment(&device.last) + moment(&device.peak) + details(&device.details)
    }

    /// Bytes that it takes in memory, about; in a store it takes less, by no more than users differ in.
    pub fn weight(this: &Run) -> usize {
        let facts = this.process.facts.iter().chain(&this.process.claims);
        let texts = facts.map(|(key, value)| 2 * size_of::<String>() + key.len() + value.len());
        let lines = this.caveats.len() + this.coverage.marks.len() + this.coverage.blind.len();
        let cells = this.cells.iter().map(cell).sum::<usize>();
        let devices = this.devices.iter().map(device).sum::<usize>();
        size_of::<Run>() + texts.sum::<usize>() + lines * 2 * WORDS + cells + devices + own_weight(&this.own)
    }
    fn own_weight(this: &Own) -> usize {
        let texts = this.counters.iter().map(|counter| &counter.name);
        let texts = texts.chain(this.ranges.iter().map(|range| &range.name));
        let points = this.counters.iter().map(|counter| size_of_val(counter.points.as_slice()));
        texts.flatten().map(String::len).sum::<usize>()
            + points.sum::<usize>()
            + size_of_val(this.counters.as_slice())
            + size_of_val(this.ranges.as_slice())
            + size_of_val(this.spans.as_slice())
    }
    fn parameters_weight(this: &Parameters) -> usize {
        let names = this.columns.iter().map(|column| column.tag.as_deref().map_or(0, str::len));
        let amounts = this.changes.iter().map(|(_, differs)| size_of_val(differs.as_slice()));
        names.sum::<usize>()
            + amounts.sum::<usize>()
            + size_of_val(this.columns.as_slice())
            + size_of_val(this.changes.as_slice())
    }
}

/// Amounts of cells that are there alone, without zeros, by index, as the ledger makes them.
fn tidy(mut run: Run, ticks: u64) -> Run {
    let cells = run.cells.len() as u32;
    run.cells.dedup();
    run.cells.iter_mut().enumerate().for_each(|(at, cell)| cell.tag = Some(format!("{}{at}", ticks % 2)));
    run.remap(&|cell| (cell < cells).then_some(cell));
    for (at, device) in run.devices.iter_mut().enumerate() {
        device.name = format!("GPU-{at}");
        device.series.width_ns = 1 + 7 * (ticks % 2);
        device.peak.predates_bytes = None;
        device.peak.uncovered_used_bytes = None;
        if device.peak.tracked_bytes.is_none() {
            device.peak.tracked_bytes = Some(0);
        }
        let points = &mut device.details.timeline.points;
        points.iter_mut().for_each(|point| point.time_ns /= 2);
        points.sort_by_key(|point| point.time_ns);
        points.dedup_by_key(|point| point.time_ns);
    }
    run
}

/// A later run begins after the earlier one.
fn later(mut run: Run) -> Run {
    for device in &mut run.devices {
        device.details.timeline.points.iter_mut().for_each(|point| point.time_ns += 1 << 63);
        device.series = Series::new(device.series.width_ns);
    }
    run
}
mod veil {
    use super::*;
    pub fn oom(oom: &Oom) -> Oom {
        Oom {
            kind: oom.kind,
            fate: oom.fate,
            time_ns: oom.time_ns,
            last_ns: oom.last_ns,
            count: oom.count,
            refusals: oom.refusals,
            asked_bytes: oom.asked_bytes,
            driver_asked_bytes: oom.driver_asked_bytes,
            device_free_bytes: oom.device_free_bytes,
            pool_used_bytes: oom.pool_used_bytes,
            pool_reserved_bytes: oom.pool_reserved_bytes,
            said: oom.said.clone().filter(|said| said == "fatal" || said == "survived"),
            result: oom.result,
            tag: None,
            library: None,
            stack: None,
            phase: oom.phase.as_deref().and_then(phase_of_name).and_then(phase_name).map(str::to_owned),
            step: oom.step,
            tracked_bytes: oom.tracked_bytes,
            amounts: oom.amounts.clone(),
            predates_bytes: oom.predates_bytes,
            untrackable_bytes: oom.untrackable_bytes,
            idle_bytes: oom.idle_bytes,
            idle_pieces: oom.idle_pieces,
            largest_idle_bytes: oom.largest_idle_bytes,
            is_expandable: oom.is_expandable,
            device: oom.device.clone(),
            is_unheard: oom.is_unheard,
        }
    }
    pub fn step(step: &Step) -> Step {
        Step {
            from_ns: step.from_ns,
            time_ns: step.time_ns,
            bytes: step.bytes,
            parts: step.parts,
            cause: step.cause.clone(),
            also: step.also.clone(),
            events: step.events,
            kind: step.kind.clone(),
            tag: None,
            library: None,
            expected_bytes: step.expected_bytes,
            note: step.note.clone(),
        }
    }

    pub fn pool(pool: &Pool) -> Pool {
        Pool { name: pool.name.clone().filter(|name| name == "torch"), ..pool.clone() }
    }

    pub fn coverage(coverage: &Coverage) -> Coverage {
        let blocked = |_| match coverage.blocked_code {
            None | Some(SUBSCRIPTION_HELD) => String::new(),
            Some(_) => "gpumemctl doctor says why".to_owned(),
        };
        let blind =
            |window: &BlindWindow| BlindWindow { why: "the agent saw nothing".to_owned(), ..window.clone() };
        let layer = |said: &LayerSaid| LayerSaid { reason: String::new(), ..said.clone() };
        Coverage {
            blocked_by: coverage.blocked_by.as_ref().map(blocked),
            blind: coverage.blind.iter().map(blind).collect(),
            layers: coverage.layers.iter().map(layer).collect(),
            marks: Vec::new(),
            marks_dropped: 0,
            ..coverage.clone()
        }
    }
    pub fn cell(cell: &Cell) -> Cell {
        let told =
            |tag: &String| if tag == "(smaller ones)" { "(smaller ones)" } else { "(not shown)" }.to_owned();
        let cell = Cell {
            class: cell.class,
            tag: cell.tag.as_ref().map(told),
            origin: None,
            role: cell.role.as_deref().and_then(role_of_name).and_then(role_name).map(str::to_owned),
            phase: cell.phase.as_deref().and_then(phase_of_name).and_then(phase_name).map(str::to_owned),
            library: None,
            pool: cell.pool.clone().filter(|pool| pool == "torch"),
            pending: cell.pending,
            inherited: cell.inherited,
        };
        cell
    }

    const CAVEATS: [&str; 4] = ["part", "unnamed_device", "devices_beyond", "accounting_disagrees"];
    const TOLD_TOO: [&str; 3] = [gpumem_model::who::MAPPED_JOB, "slurm_job_id", "slurm_step_id"];
    pub fn run(run: &Run) -> Run {
        let mut process = run.process.clone();
        let is_told = |name: &String| {
            gpumem_model::who::NAMES.contains(&name.as_str()) || TOLD_TOO.contains(&name.as_str())
        };
        process.facts.retain(|name, _| is_told(name));
        process.claims.retain(|name, _| is_told(name));
        let device = |device: &Device| Device {
            details: Details {
                steps: device.details.steps.iter().map(step).collect(),
                parameters: Parameters::default(),
                pools: device.details.pools.iter().map(pool).collect(),
                ooms: device.details.ooms.iter().map(|of| oom(of)).collect(),
                ..device.details.clone()
            },
            ..device.clone()
        };
        Run {
            process,
            coverage: coverage(&run.coverage),
            caveats: run.caveats.iter().filter(|of| CAVEATS.contains(&of.code.as_str())).cloned().collect(),
            devices: run.devices.iter().map(device).collect(),
            cells: run.cells.iter().map(cell).collect(),
            own: Own::default(),
            ..run.clone()
        }
    }
}

fn same(old: &Run, new: &Run) -> Result<(), TestCaseError> {
    let (old, new) = (format!("{old:#?}"), format!("{new:#?}"));
    let mut path: Vec<&str> = Vec::new();
    for (a, b) in old.lines().zip(new.lines()) {
        let depth = (a.len() - a.trim_start().len()) / 4;
        path.truncate(depth);
        path.push(a.trim());
        if a != b {
            return Err(TestCaseError::fail(format!("{path:?}: {a} | {b}")));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn parts_begin_as_before(a in run(), b in run(), c in run(), now_ns in any::<u64>()) {
        let old = part::Before::after(None, &a.coverage, 5);
        let new = gpumem_model::coverage::Before::after(None, &a.coverage, 5);
        let old = part::Before::after(Some(&old), &b.coverage, now_ns);
        let new = gpumem_model::coverage::Before::after(Some(&new), &b.coverage, now_ns);
        let (mut one, mut other) = (c.coverage.clone(), c.coverage);
        old.leave_out(&mut one);
        new.leave_out(&mut other);
        prop_assert_eq!(one, other);
    }

    #[test]
    fn parts_join_as_before(a in run(), b in run()) {
        let (a, b) = (tidy(a, 0), later(tidy(b, 1)));
        let old = whole::whole(vec![a.clone(), b.clone()]).unwrap();
        let new = gpumem_model::window::whole(vec![a, b]).unwrap();
        same(&old, &new)?;
    }

    #[test]
    fn lives_join_as_before(a in run(), b in run(), known in any::<u64>()) {
        let (a, b) = (tidy(a, 0), later(tidy(b, 1)));
        let old = lives::same_part(&a, &b, known);
        let new = lives_now::same_part(&a, &b, known);
        same(&old, &new)?;
    }

    #[test]
    fn windows_clip_as_before(a in run(), from_ns in any::<u64>(), to_ns in any::<u64>(), since in any::<bool>()) {
        let part = if since { WindowKind::Since } else { WindowKind::Between };
        let window = Window { part, from_ns: from_ns.min(to_ns), to_ns: from_ns.max(to_ns), exact: false };
        for device in a.devices {
            let (mut old, mut new) = (device.clone(), device);
            window::keep(&mut old, &window);
            new.details.clip(&window);
            prop_assert_eq!(old.details, new.details);
        }
        let (mut old, mut new) = (a.own.clone(), a.own);
        window::own_keep(&mut old, window.from_ns, window.to_ns);
        new.clip(&window);
        prop_assert_eq!(old, new);
    }

    #[test]
    fn jobs_add_as_before(a in run(), b in run()) {
        let (mut old, mut new) = (Coverage::default(), Coverage::default());
        for run in [&a, &b] {
            job::add_coverage(&mut old, &run.coverage);
            new.add(&run.coverage);
        }
        prop_assert_eq!(old, new);
        let mut b = tidy(b, 0);
        let before = b.clone();
        b.remap(&|cell| Some(cell.saturating_add(7)));
        for (old, new) in before.devices.into_iter().zip(&b.devices) {
            prop_assert_eq!(&Amounts::from(job::shifted_amounts(old.peak.amounts.to_vec(), 7)), &new.peak.amounts);
        }
    }

    #[test]
    fn names_are_hidden_as_before(mut a in run(), code in any::<bool>(), word in any::<bool>()) {
        if code {
            a.coverage.blocked_code = Some(39);
        }
        for cell in a.cells.iter_mut().step_by(2) {
            (cell.role, cell.phase) = (Some("kv cache".into()), Some(if word { "between" } else { "forward" }.into()));
            (cell.tag, cell.pool) = (Some("(smaller ones)".into()), Some("torch".into()));
        }
        a.caveats.push(Caveat { code: "part".into(), text: "x".into() });
        a.process.claims.insert("slurm_job_id".into(), "7".into());
        for device in &mut a.devices {
            device.details.ooms.iter_mut().for_each(|oom| oom.said = Some(if word { "fatal" } else { "x" }.into()));
        }
        let old = veil::run(&a);
        a.redact();
        same(&old, &a)?;
    }

    #[test]
    fn weight_is_about_the_same(a in run()) {
        let (old, new) = (weight::weight(&a) as f64, a.weight() as f64);
        prop_assert!(new < old * 1.5 + 3000.0 && old < new * 1.5 + 3000.0, "{old} {new}");
    }
}

mod lives_now {
    use super::*;
    use gpumem_ledger::MAX_MARKS;
    use gpumem_model::iterations::MAX_ROWS;
    const MAX_OOMS: usize = 32;
    pub fn same_part(before: &Run, now: &Run, known: u64) -> Run {
        let (mut then, mut run) = (before.clone(), now.clone());
        let cells = run.merge_cells(&before.cells);
        then.remap(&|cell| cells.get(cell as usize).copied());
        let mut dropped = 0_u64;
        for old in then.devices {
            match run.devices.iter_mut().find(|device| device.name == old.name) {
                Some(device) => dropped = dropped.saturating_add(join_device(old, device)),
                None => run.devices.push(old),
            }
        }
        run.coverage = joined_coverage(then.coverage, run.coverage, known);
        run.coverage.ooms_dropped = run.coverage.ooms_dropped.saturating_add(dropped);
        then.own.append(run.own);
        run.own = then.own;
        then.caveats.retain(|caveat| !run.caveats.contains(caveat));
        run.caveats.splice(0..0, then.caveats);
        for (key, value) in then.process.facts {
            run.process.facts.entry(key).or_insert(value);
        }
        run
    }

    /// Joins the coverage of both lives; `known` of the records that this life missed had been booked by the one before.
    fn joined_coverage(mut then: Coverage, mut now: Coverage, known: u64) -> Coverage {
        now.lost = now.lost.saturating_sub(known);
        now.partial_history = now.partial_state || now.lost > 0;
        // An agent tells each daemon since when it sees nothing.
        let is_in_both =
            |window: &&BlindWindow| now.blind.iter().any(|other| other.from_ns == window.from_ns);
        let again = then.blind.iter().filter(is_in_both).count() as u64;
        let programs = now.programs.clone();
        then.join(now);
        then.blind_count = then.blind_count.saturating_sub(again);
        then.programs = programs;
        let beyond = then.marks.len().saturating_sub(2 * MAX_MARKS);
        then.marks.drain(..beyond);
        then.marks_dropped = then.marks_dropped.saturating_add(beyond as u64);
        then
    }

    /// Joins what both lives have of a device, in as much room as a run has; returns how many reports of OOM had none.
    fn join_device(mut old: Device, device: &mut Device) -> u64 {
        let accounted_peaks = [old.details.accounted_peak_bytes, device.details.accounted_peak_bytes];
        old.join(std::mem::take(device));
        *device = old;
        let details = &mut device.details;
        details.accounted_peak_bytes = accounted_peaks.into_iter().max().flatten();
        details.timeline.thin();
        let rows = &mut details.iterations.rows;
        rows.drain(..rows.len().saturating_sub(MAX_ROWS));
        let mut dropped = 0_u64;
        while details.ooms.len() > MAX_OOMS {
            dropped = dropped.saturating_add(details.ooms.remove(MAX_OOMS / 2).count.max(1));
        }
        dropped
    }
}
