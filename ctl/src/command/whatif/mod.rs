//! `gpumemctl whatif TARGET`: computes how much memory PyTorch's allocator would have reserved under other settings.

mod model;
mod show;
mod source;
mod trials;

use crate::args::{StorePath, WhatIf};
use crate::exit::Kind;
use crate::output::print;
use anyhow::Result;
use gpumem_import::roles;
use gpumem_import::torch_snapshot::Requests;
use gpumem_model::escape::escape;
use gpumem_replay::{Backend, Event, PoolId, Release, Settings};
use gpumem_report::advice;
use gpumem_report::explain::nearest;
use model::{Model, Scale};
pub(crate) use source::Target;
use std::collections::{BTreeMap, BTreeSet};
use trials::{Recorded, Trial};

/// Settings that are tried if the user names none. Each reduces fragmentation or suits sizes that change from step to step; one
/// text combines both kinds.
const SWEEP: [&str; 8] = [
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:4,expandable_segments:True",
    "large_segment_size_mb:64",
    "garbage_collection_threshold:0.8",
];

pub(crate) fn run(args: &WhatIf) -> Result<()> {
    let place = (args.pid, args.gpu);
    let changes: Vec<&String> = args.drop.iter().chain(args.scale.iter().map(|(name, _)| name)).collect();
    let has_roles = changes.iter().any(|name| roles::named(name).is_some());
    let (devices, release) =
        source::load(Target::Named(&args.target), place, args.torch, (&args.store, has_roles))?;
    let answers = devices.iter().map(|recorded| Answer::new(recorded, release, args));
    let answers = answers.collect::<Result<Vec<Answer<'_>>>>()?;
    for (number, name) in changes.into_iter().enumerate() {
        if answers.iter().all(|answer| answer.models[number].is_none()) {
            return Err(Kind::NotFound.error(unknown_name(name, &devices)));
        }
    }
    let shown: Vec<_> = answers
        .iter()
        .zip(&devices)
        .map(|(answer, recorded)| show::Shown {
            recorded,
            trials: &answer.trials,
            models: answer.models.iter().flatten().collect(),
            file: &args.target,
            release,
            is_release_known: args.torch.is_some(),
            names_gpu: args.gpu.is_some() || devices.len() > 1,
            memory: args.device_memory,
        })
        .collect();
    print(&if args.json { show::json(&shown) } else { show::text(&shown) })
}

/// Returns the message for a name that no memory has.
fn unknown_name(name: &str, devices: &[Recorded]) -> String {
    let requests = || devices.iter().map(|device| &device.requests);
    let text = format!("no memory of this program has a name or line of code with {name:?}");
    if roles::named(name).is_some() {
        if !requests().all(Requests::is_recording) {
            return format!(
                "{text}, and PyTorch's history has no roles: record them with gpumemctl run --record FILE -- COMMAND"
            );
        }
        let known: BTreeSet<&str> =
            requests().flat_map(|requests| requests.bytes_of_roles().into_keys()).collect();
        let known: Vec<&str> = known.into_iter().filter(|role| !role.is_empty()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        return format!("no memory of this program has the role {name:?}; its roles are: {known}");
    }
    let parts = |place: String| -> Vec<String> {
        place.split(['/', '.', ':', '(', ')', ' ']).map(str::to_owned).chain([place.clone()]).collect()
    };
    let known = requests().flat_map(Requests::places).flat_map(parts);
    let known: Vec<String> = known.chain(roles::names().map(str::to_owned)).collect();
    match nearest(name, &known) {
        near if near.is_empty() => text,
        near => format!("{text}. Did you mean {}?", escape(&near.join(", "))),
    }
}

/// Answer for one device.
struct Answer<'a> {
    /// Replays under other settings, the best first.
    trials: Vec<Trial>,
    /// Models of changed programs, as the arguments have them; `None` if no memory of this device has the name.
    models: Vec<Option<Model<'a>>>,
}

impl<'a> Answer<'a> {
    fn new(recorded: &Recorded, release: Release, args: &'a WhatIf) -> Result<Self> {
        let set = args.set.join(",");
        let base = merged(&recorded.own.text, &set);
        let fraction = args.memory_fraction;
        let settings =
            Settings::parse(&base, release).map_err(|error| Kind::Usage.error(format!("--set: {error}")))?;
        let name = if set.is_empty() { "recorded settings" } else { &set };
        let changed = Trial::new(name.to_owned(), base.clone(), settings).with_fraction(fraction);
        let dropped = args.drop.iter().map(|name| (name, 0.0));
        let scales = dropped.chain(args.scale.iter().map(|(name, factor)| (name, *factor)));
        let model = |(name, factor): (&'a String, f64)| {
            recorded.model(Scale { name, factor }, &changed, release, args.device_memory)
        };
        let models = scales.map(model).collect::<Result<Vec<_>>>()?;
        let mut trials = Vec::new();
        if !set.is_empty() || args.device_memory.is_some() {
            trials.push(changed);
        }
        if set.is_empty() || args.sweep {
            trials.extend(sweep(&base, &set, release, fraction));
        }
        recorded.replay(&mut trials, release, args.device_memory)?;
        trials.sort_by_key(Trial::rank);
        Ok(Answer { trials, models })
    }
}

/// Replays the requests of a run, recording or snapshot under the recorded and several other settings, for advice. Of several devices,
/// the one with the most requests counts.
pub(crate) fn replay(target: Target<'_>, pid: Option<u32>, store: &StorePath) -> Result<advice::Replay> {
    let (mut devices, release) = source::load(target, (pid, None), None, (store, false))?;
    let mut recorded = devices.swap_remove(0);
    let base = recorded.own.text.clone();
    let settings = Settings::parse(&base, release)?;
    let mut trials: Vec<Trial> = sweep(&base, "", release, None).collect();
    recorded.replay(&mut trials, release, None)?;
    trials.sort_by_key(Trial::rank);
    let one_pool = one_pool(&recorded.requests.events);
    let one_pool = one_pool.map(|mut events| -> Result<advice::Trial> {
        std::mem::swap(&mut recorded.requests.events, &mut events);
        let mut trial = [Trial::new(String::new(), base.clone(), settings.clone())];
        recorded.replay(&mut trial, release, None)?;
        recorded.requests.events = events;
        Ok(trial[0].advice())
    });
    let one_pool = one_pool.transpose()?;
    let mut streams = BTreeSet::new();
    for event in &mut recorded.requests.events {
        if let Event::Request { stream, .. } = event {
            streams.insert(std::mem::take(stream));
        }
    }
    let mut one_stream = Vec::new();
    if streams.len() > 1 {
        one_stream.push(Trial::new(String::new(), base, settings));
        recorded.replay(&mut one_stream, release, None)?;
    }
    Ok(advice::Replay {
        variable: variable(release),
        own: recorded.own.advice(),
        trials: trials.iter().map(Trial::advice).collect(),
        one_stream: one_stream.first().map(Trial::advice),
        one_pool,
        is_exact: recorded.is_exact,
        error_bytes: recorded.error_bytes(),
    })
}

/// Returns the events with all private pools replaced by one; `None` if the program has fewer than two. The one that ends last, or
/// never, is kept, because a shared pool lives as long as any of its graphs.
fn one_pool(events: &[Event]) -> Option<Vec<Event>> {
    let mut pools = BTreeSet::new();
    let mut ends: BTreeMap<PoolId, usize> = BTreeMap::new();
    for (at, event) in events.iter().enumerate() {
        match event {
            Event::Request { pool, .. } if *pool != 0 => _ = pools.insert(*pool),
            Event::PoolEnds { pool } => _ = ends.insert(*pool, at),
            _ => {}
        }
    }
    let last = pools.iter().copied().max_by_key(|pool| ends.get(pool).copied().unwrap_or(usize::MAX))?;
    let mut events = events.to_vec();
    for event in &mut events {
        match event {
            Event::Request { pool, .. } if *pool != 0 => *pool = last,
            Event::ScopeBegins { pool } | Event::ScopeEnds { pool } => *pool = last,
            _ => {}
        }
    }
    (pools.len() > 1).then_some(events)
}

/// Returns the variable that sets the allocator. Releases from 2.10 on read both variables, and prefer the new name.
fn variable(release: Release) -> &'static str {
    if release >= Release::new(10) { "PYTORCH_ALLOC_CONF" } else { "PYTORCH_CUDA_ALLOC_CONF" }
}

/// Returns the trials of a sweep. `set` are the user's settings, which `base` has, too. Settings that the release does not have are
/// not tried; neither are settings without effect.
fn sweep(base: &str, set: &str, release: Release, fraction: Option<f64>) -> impl Iterator<Item = Trial> {
    // The settings have no effect beside another backend.
    let native = |text: &str| {
        let parts = parts(text).into_iter().filter(|part| !part.trim_start().starts_with("backend:"));
        parts.collect::<Vec<_>>().join(",")
    };
    let (base, set) = (native(base), native(set));
    SWEEP.into_iter().filter_map(move |text| {
        let merged = merged(&base, text);
        let settings =
            Settings::parse(&merged, release).ok().filter(|settings| settings.backend == Backend::Native)?;
        let is_collected = settings.collection_threshold == 0.0 || fraction.or(settings.fraction).is_some();
        is_collected.then(|| Trial::new(join(&set, text), merged, settings).with_fraction(fraction))
    })
}

fn join(first: &str, second: &str) -> String {
    if first.is_empty() { second.to_owned() } else { format!("{first},{second}") }
}

/// Returns the recorded settings text, with the keys in `changes` replaced or added.
fn merged(recorded: &str, changes: &str) -> String {
    let key = |part: &str| part.split(':').next().unwrap_or("").trim().to_owned();
    let changed: Vec<String> = parts(changes).into_iter().map(key).collect();
    let kept = parts(recorded).into_iter().filter(|part| !changed.contains(&key(part)));
    kept.chain(parts(changes)).collect::<Vec<_>>().join(",")
}

/// Splits a settings text at commas outside brackets.
fn parts(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let ends = |letter: char| {
        depth += i32::from(letter == '[') - i32::from(letter == ']');
        letter == ',' && depth == 0
    };
    text.split(ends).map(str::trim).filter(|part| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(id: u64, pool: PoolId) -> Event {
        Event::Request { id, bytes: 512, stream: 0, pool, has_failed: false }
    }

    #[test]
    fn graphs_share_the_pool_that_ends_last() {
        let ends = |pool| Event::PoolEnds { pool };
        let events = |pools: [PoolId; 2]| {
            [request(1, 0), request(2, pools[0]), request(3, pools[1]), ends(1), ends(2)]
        };
        assert_eq!(one_pool(&events([1, 2])), Some(events([2, 2]).to_vec()));
        assert_eq!(one_pool(&events([2, 1])), Some(events([2, 2]).to_vec()));
        assert_eq!(one_pool(&events([1, 3])), Some(events([3, 3]).to_vec()), "the pool that never ends");
        assert_eq!(one_pool(&events([2, 2])), None, "one pool");
        assert_eq!(one_pool(&events([0, 0])), None, "no private pool");
    }

    #[test]
    fn changes_replace_the_recorded_keys() {
        let recorded = "max_split_size_mb:32, roundup_power2_divisions:[1:2,4:8,>:2]";
        assert_eq!(
            merged(recorded, "max_split_size_mb:64,expandable_segments:True"),
            "roundup_power2_divisions:[1:2,4:8,>:2],max_split_size_mb:64,expandable_segments:True"
        );
        assert_eq!(merged("", "a:1"), "a:1");
    }
}
