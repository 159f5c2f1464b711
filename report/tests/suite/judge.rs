//! Verdicts on generated points with a known truth.
use gpumem_report::judge::trend_test::{ALPHA, Judgement, Verdict, judge};

const MIB: f64 = 1_048_576.0;
const GIB: f64 = 1024.0 * MIB;

/// A deterministic generator, with the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ x >> 31) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns an approximately normal number (mean 0, deviation 1).
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() - 6.0
    }
}

/// Returns points for steps from 0.
fn points(count: usize, of: impl FnMut(f64) -> f64) -> Vec<(f64, f64)> {
    let mut of = of;
    (0..count).map(|step| (step as f64, of(step as f64))).collect()
}

fn verdict(points: &[(f64, f64)]) -> Judgement {
    let used = points.iter().map(|(_, y)| *y).fold(0.0, f64::max);
    judge(points, (used / 1000.0).max(MIB), ALPHA)
}

#[track_caller]
fn grows(points: &[(f64, f64)], rate: f64) {
    let found = verdict(points);
    let wanted = if rate > 0.0 { Verdict::Growing } else { Verdict::Shrinking };
    assert_eq!(found.verdict, wanted, "{found:?}");
    let told = found.bytes_per_unit.expect("a rate");
    assert!((told - rate).abs() <= 0.05 * rate.abs(), "{told} is not {rate}: {found:?}");
    let (low, high) = found.low_high.expect("bounds");
    assert!(low <= told && told <= high, "{found:?}");
    assert!(found.confidence.is_some_and(|sure| (0.99..1.0).contains(&sure)), "{found:?}");
}

#[track_caller]
fn is(points: &[(f64, f64)], wanted: Verdict) -> Judgement {
    let found = verdict(points);
    assert_eq!(found.verdict, wanted, "{found:?}");
    found
}

#[test]
fn too_few_points_are_no_evidence() {
    for count in 0..12 {
        let found = is(&points(count, |step| GIB + step * 100.0 * MIB), Verdict::NotEnoughData);
        assert!(found.bytes_per_unit.is_none() && found.confidence.is_none());
    }
    grows(&points(12, |step| GIB + step * 100.0 * MIB), 100.0 * MIB);
}

#[test]
fn what_stands_still_is_flat() {
    let found = is(&points(64, |_| 5.0 * GIB), Verdict::Flat);
    assert_eq!((found.bytes_per_unit, found.low_high), (Some(0.0), Some((0.0, 0.0))));
    assert!(found.confidence.is_some_and(|sure| sure > 0.99));
    is(&points(64, |_| 0.0), Verdict::Flat);
    // It grows by less than the minimum that counts.
    is(&points(64, |step| GIB + step * 100.0), Verdict::Flat);
}

#[test]
fn leaks_are_found_with_their_rate() {
    grows(&points(64, |step| 2.0 * GIB + step * 3.2 * MIB), 3.2 * MIB);
    grows(&points(64, |step| 2.0 * GIB - step * 3.2 * MIB), -3.2 * MIB);
    // Decimated: a point for each 512 steps.
    let far: Vec<(f64, f64)> = (0..40).map(|at| (f64::from(at) * 512.0, GIB + f64::from(at) * MIB)).collect();
    grows(&far, MIB / 512.0);
}

#[test]
fn a_tenth_of_a_percent_per_step_is_found_within_a_hundred_steps() {
    let mut random = Random(7);
    let leak = 2.0 * GIB / 1000.0;
    let all: Vec<(f64, f64)> = points(100, |step| 2.0 * GIB + step * leak + 3.0 * MIB * random.normal());
    grows(&all[..60], leak);
    // The ledger keeps a hundred steps in pairs.
    let pairs: Vec<(f64, f64)> = all.chunks(2).map(|pair| (pair[0].0, pair[0].1.min(pair[1].1))).collect();
    grows(&pairs, leak);
}

#[test]
fn a_slow_leak_is_found_under_a_large_sawtooth() {
    let mut random = Random(11);
    let sawtooth = |random: &mut Random| 4.0 * GIB * random.next();
    // 64 points, each the lowest of eight samples of a sawtooth of 4 GiB; 20 MiB leak from point to point.
    let all = points(64, |at| {
        let lowest = (0..8).map(|_| sawtooth(&mut random)).fold(f64::MAX, f64::min);
        8.0 * GIB + at * 20.0 * MIB + lowest
    });
    let found = is(&all, Verdict::Growing);
    let (low, high) = found.low_high.expect("bounds");
    assert!(low < 20.0 * MIB && 20.0 * MIB < high, "{found:?}");
    // Without the leak it is flat.
    let all = points(64, |_| 8.0 * GIB + (0..8).map(|_| sawtooth(&mut random)).fold(f64::MAX, f64::min));
    is(&all, Verdict::Flat);
    // The complete sawtooth, in phase.
    is(&points(64, |at| GIB + (at % 7.0) * 500.0 * MIB), Verdict::Flat);
}

#[test]
fn warm_up_that_ends_is_no_growth() {
    for end in [3.0, 6.0, 12.0, 25.0, 40.0] {
        let found = is(&points(64, |step| 4.0 * GIB + step.min(end) * 200.0 * MIB), Verdict::Flat);
        assert!(found.span.is_some_and(|(first, _)| first >= end - 2.0), "{found:?}");
    }
    // Growth that slows down, with noise.
    let mut random = Random(3);
    is(&points(64, |step| 4.0 * GIB * (1.0 - (-step / 4.0).exp()) + MIB * random.normal()), Verdict::Flat);
}

#[test]
fn memory_taken_once_and_for_all_is_one_jump() {
    for at in [12.0, 20.0, 32.0, 45.0, 53.0, 58.0] {
        let found = is(&points(64, |step| 4.0 * GIB + if step >= at { GIB } else { 0.0 }), Verdict::OneJump);
        assert_eq!(found.jump_bytes, Some(GIB as i64), "{found:?}");
        let mut random = Random(at as u64);
        let noisy =
            points(64, |step| 4.0 * GIB + if step >= at { GIB } else { 0.0 } + 8.0 * MIB * random.normal());
        is(&noisy, Verdict::OneJump);
    }
    // Two jumps.
    let twice = points(64, |step| {
        4.0 * GIB + if step >= 15.0 { GIB } else { 0.0 } + if step >= 35.0 { 2.0 * GIB } else { 0.0 }
    });
    is(&twice, Verdict::OneJump);
    // Freed memory.
    let found = is(&points(64, |step| 4.0 * GIB - if step >= 30.0 { GIB } else { 0.0 }), Verdict::OneJump);
    assert_eq!(found.jump_bytes, Some(-(GIB as i64)));
}

#[test]
fn a_leak_that_starts_late_or_after_a_jump_is_found_with_its_own_rate() {
    for begin in [20.0, 35.0, 45.0, 50.0] {
        grows(&points(64, |step| 4.0 * GIB + (step - begin).max(0.0) * 5.0 * MIB), 5.0 * MIB);
    }
    let after =
        points(64, |step| if step < 20.0 { 4.0 * GIB } else { 7.0 * GIB + (step - 20.0) * 5.0 * MIB });
    grows(&after, 5.0 * MIB);
}

#[test]
fn stairs_are_growth() {
    // 4 MiB more at each eighth step.
    let found = is(&points(64, |step| GIB + (step / 8.0).floor() * 4.0 * MIB), Verdict::Growing);
    let rate = found.bytes_per_unit.expect("a rate");
    assert!((0.4 * MIB..0.6 * MIB).contains(&rate), "{found:?}");
}

#[test]
fn a_pattern_on_a_clear_line_is_no_doubt() {
    // Points at intervals of about a minute, with a leak each second: each 16th interval is a second shorter.
    let all: Vec<(f64, f64)> = (0..37)
        .map(|at| (f64::from(at) * 1.067, GIB + (f64::from(at) * 64.0 - f64::from(at / 16)) * MIB / 4.0))
        .collect();
    let found = is(&all, Verdict::Growing);
    assert_eq!(found.points, 33, "{found:?}");
    for rate in [0.1, 0.3, 0.6, 1.0 / 3.0] {
        grows(&points(64, |step| GIB + (step * rate).floor() * 40.0 * MIB), rate * 40.0 * MIB);
    }
}

#[test]
fn wild_points_move_no_rate() {
    let wild = |step: f64| if step % 13.0 == 5.0 { 9.0 * GIB } else { 0.0 };
    grows(&points(64, |step| GIB + step * 3.0 * MIB + wild(step)), 3.0 * MIB);
    is(&points(64, |step| GIB + wild(step)), Verdict::Flat);
}

#[test]
fn one_of_two_leaks_and_the_other_is_flat() {
    let mut random = Random(5);
    let leaks = points(64, |step| GIB + step * MIB + MIB * random.normal());
    let still = points(64, |_| GIB + MIB * random.normal());
    grows(&leaks, MIB);
    is(&still, Verdict::Flat);
    let both: Vec<(f64, f64)> = leaks.iter().zip(&still).map(|(a, b)| (a.0, a.1 + b.1)).collect();
    grows(&both, MIB);
}

#[test]
fn noise_is_hardly_ever_taken_for_growth() {
    let mut random = Random(2026);
    let mut wrong = [0; 4];
    const TRIALS: usize = 2000;
    for trial in 0..TRIALS {
        let count = [12, 20, 40, 64][trial % 4];
        let loud = 200.0 * MIB;
        let white = points(count, |_| 4.0 * GIB + loud * random.normal());
        let mut state = 0.0;
        let slow = points(count, |_| {
            state = 0.7 * state + random.normal();
            4.0 * GIB + loud * state
        });
        // The lowest of many samples, mostly the floor.
        let floor = points(count, |_| GIB + loud * (random.next() - 0.8).max(0.0));
        let spikes =
            points(count, |_| GIB + if random.next() < 0.1 { loud * 10.0 * random.next() } else { 0.0 });
        for (at, noise) in [white, slow, floor, spikes].iter().enumerate() {
            let found = verdict(noise).verdict;
            wrong[at] += usize::from(matches!(found, Verdict::Growing | Verdict::Shrinking));
        }
    }
    println!("of {TRIALS}: {wrong:?}");
    assert!(wrong.iter().all(|&wrong| wrong <= TRIALS / 100), "of {TRIALS}: {wrong:?}");
}
