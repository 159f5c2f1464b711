//! Individual parameters and gradients in each iteration.

use crate::common::{KEY, NOTHING, Script};
use gpumem_ledger::Origin;
use gpumem_model::iterations::{Iteration, Iterations, MAX_ROWS};
use gpumem_model::parameters::{MAX_COLUMNS, Parameters};
use gpumem_model::run::Named;
use gpumem_wire::{Body, Phase, PoolOwner, Record, Role, Stamp};
use std::collections::BTreeMap;

const POOL: u64 = 3;
const BASE: u64 = 0x1000_0000;

struct Training(Script);

impl Training {
    fn new() -> Self {
        let mut script = Script::new();
        script.alloc(BASE, 1 << 30);
        script.pool(POOL, 0, true, PoolOwner::Framework);
        script.segment(BASE, 1 << 30, POOL);
        Training(script)
    }

    /// A block with a reported role.
    fn holds(&mut self, place: u64, bytes: u64, name: &str, role: Role) {
        let (address, use_as) = (BASE + place * 4096, (role, Phase::Unknown));
        self.0.tag(name).say(Body::BlockAlloc { address, bytes, pool: POOL, use_as });
    }

    /// A block of the backward pass.
    fn makes(&mut self, place: u64, bytes: u64, name: &str) -> u64 {
        let (address, use_as) = (BASE + place * 4096, (Role::Unknown, Phase::Backward));
        self.0.tag(name).say(Body::BlockAlloc { address, bytes, pool: POOL, use_as })
    }

    fn frees(&mut self, place: u64) {
        self.0.unblock(BASE + place * 4096, POOL);
    }

    /// (Without checking every sum.)
    fn step(&mut self, number: u64) {
        (self.0.seq, self.0.time_ns) = (self.0.seq + 1, self.0.time_ns + 10);
        let stamp = Stamp { seq: self.0.seq, time_ns: self.0.time_ns, ..self.0.stamp };
        let record = Record { stamp, body: Body::Step { number } };
        self.0.ledger.observe(Origin::Process(KEY), &record);
    }

    fn phase(&mut self, phase: Phase) {
        self.0.say(Body::PhaseBegin { phase });
    }

    fn view(&self) -> Iterations {
        self.0.ledger.iterations(KEY, 0)
    }

    fn parameters(&self) -> Parameters {
        self.0.ledger.parameters(KEY, 0)
    }

    /// Returns the bytes of each finished iteration by role and name; checks them against its sums.
    fn told(&self) -> Vec<BTreeMap<(Role, String), i64>> {
        let parameters = self.parameters();
        let mut changes = parameters.changes.iter().peekable();
        let mut held = vec![0; parameters.columns.len()];
        let of_row = |row: &Iteration| {
            while let Some((_, differs)) = changes.next_if(|(time_ns, _)| *time_ns < row.end_ns) {
                differs.iter().for_each(|(column, bytes)| held[*column as usize] = *bytes);
            }
            let mut by_name = BTreeMap::new();
            for (column, bytes) in parameters.columns.iter().zip(&held) {
                let role = Role::from_name(&column.role).expect("a role");
                *by_name.entry((role, column.tag.clone().unwrap_or_default())).or_insert(0) += bytes;
            }
            by_name.retain(|_, bytes| *bytes != 0);
            let sum = |role: Role| -> i64 {
                by_name.iter().filter(|((of, _), _)| *of == role).map(|(_, bytes)| bytes).sum()
            };
            assert_eq!(sum(Role::Parameter), row.parameters.last_bytes);
            assert_eq!(sum(Role::Gradient), row.gradients.peak_bytes);
            by_name
        };
        self.view().rows.iter().map(of_row).collect()
    }
}

fn of(amounts: &[(Role, &str, i64)]) -> BTreeMap<(Role, String), i64> {
    amounts.iter().map(|&(role, name, bytes)| ((role, name.to_owned()), bytes)).collect()
}

#[test]
fn gradients_have_the_names_that_come_after_them() {
    use Role::{Gradient, Parameter};
    let mut training = Training::new();
    training.holds(1, 100, "fc/weight", Parameter);
    training.holds(2, 10, "fc/bias", Parameter);
    for number in 1..=4 {
        training.step(number);
        training.phase(Phase::Backward);
        let weight = training.makes(3, 100, "fc");
        let bias = training.makes(4, 10, "fc");
        training.makes(5, 50, "fc");
        training.frees(5); // a temporary block
        training.phase(Phase::Optimizer);
        if number % 2 == 0 {
            for (place, seq, name) in [(3, weight, "fc/weight"), (4, bias, "fc/bias")] {
                training.0.tag(name).retag(BASE + place * 4096, POOL, seq, Gradient);
            }
        }
        training.phase(Phase::Forward);
        training.frees(3);
        training.frees(4);
    }
    training.frees(2);
    training.step(5);
    let weights = [(Parameter, "fc/weight", 100), (Parameter, "fc/bias", 10)];
    let plain = of(&[&weights[..], &[(Gradient, "fc", 110)]].concat());
    let named = of(&[&weights[..], &[(Gradient, "fc/weight", 100), (Gradient, "fc/bias", 10)]].concat());
    let last = of(&[(Parameter, "fc/weight", 100), (Gradient, "fc/weight", 100), (Gradient, "fc/bias", 10)]);
    assert_eq!(training.told(), [plain.clone(), named, plain, last]);
}

#[test]
fn what_does_not_change_is_told_once_and_the_oldest_go() {
    let mut training = Training::new();
    for name in 0..100 {
        training.holds(name, 64, &format!("p{name}"), Role::Parameter);
    }
    for number in 1..=50 {
        training.step(number);
    }
    assert_eq!(training.parameters().changes.len(), 1);
    // Every parameter changes in each iteration, for more iterations than there is room.
    for number in 51..=250 {
        for name in 0..100 {
            training.frees(name);
            training.holds(name, 64 + number % 2, &format!("p{name}"), Role::Parameter);
        }
        training.step(number);
    }
    let view = training.parameters();
    let amounts: usize = view.changes.iter().map(|(_, differs)| differs.len()).sum();
    assert!(amounts <= 16_384 + 100 && amounts > 8_000, "{amounts}");
    assert_eq!(view.changes[0].1.len(), 100, "the first has everything");
    assert!(view.changes.len() < 190, "{}", view.changes.len());
}

#[test]
fn there_are_so_many_columns_and_epochs_stay_apart() {
    let mut training = Training::new();
    for name in 0..MAX_COLUMNS as u64 + 2 {
        training.holds(name, 1, &format!("p{name}"), Role::Parameter);
    }
    let mut last = 0;
    for epoch in 1..=5 {
        training.0.say(Body::Epoch { number: epoch });
        for number in 1..=300 {
            training.step(number);
            last = number;
        }
    }
    let view = training.view();
    assert_eq!((training.parameters().columns.len(), training.parameters().is_cut), (MAX_COLUMNS, true));
    assert!(view.rows.len() <= MAX_ROWS);
    for row in &view.rows {
        assert!(row.first <= row.last && row.count == row.last - row.first + 1, "of one epoch: {row:?}");
    }
    assert_eq!(view.rows.iter().map(|row| row.count).sum::<u64>(), 5 * 300 - 1);
    assert_eq!(view.open.map(|open| (open.epoch, open.first)), Some((5, last)));
    // More epochs than rows.
    for epoch in 6..=1000 {
        training.0.say(Body::Epoch { number: epoch });
        training.step(1);
    }
    assert!(training.view().rows.len() <= MAX_ROWS);
}

#[test]
fn a_new_part_begins_with_what_is_held() {
    let mut training = Training::new();
    training.holds(1, 100, "a", Role::Parameter);
    training.step(1);
    training.step(2);
    training.0.ledger.begin_part(KEY, training.0.time_ns);
    let (began_ns, use_as) = (training.0.time_ns, NOTHING);
    training.0.say(Body::BlockAlloc { address: BASE + (9 << 12), bytes: 7, pool: POOL, use_as });
    training.step(3);
    assert_eq!(training.parameters().changes, [(began_ns, vec![(0, 100)])]);
}

/// The size of a library's workspace.
const SCRATCH: u64 = 8_519_680;
const LARGE: u64 = 50 << 20;

impl Training {
    /// A block of the forward pass.
    fn begins_forward(&mut self, place: u64) {
        let (address, use_as) = (BASE + place * 4096, (Role::Unknown, Phase::Forward));
        self.0.say(Body::BlockAlloc { address, bytes: 1, pool: POOL, use_as });
    }

    /// A parameter that a sweep reports.
    fn knows(&mut self, place: u64, bytes: u64, name: &str) {
        let (address, use_as) = (BASE + place * 4096, (Role::Unknown, Phase::Setup));
        let seq = self.0.say(Body::BlockAlloc { address, bytes, pool: POOL, use_as });
        self.0.tag(name).retag(address, POOL, seq, Role::Parameter);
    }

    fn highest_gradients(&self) -> Vec<i64> {
        let rows = self.view().rows;
        rows.iter().map(|row| row.gradients.peak_bytes).collect()
    }
}

/// Two backward passes in an iteration: a workspace allocated in the second one did not exist at the maximum of the gradients.
#[test]
fn a_workspace_is_taken_off_only_where_it_counted() {
    let mut training = Training::new();
    training.knows(1, 100, "fc/weight");
    training.step(1);
    training.begins_forward(10);
    training.makes(3, LARGE, "fc");
    training.begins_forward(11); // the first pass has ended
    training.frees(3);
    training.makes(4, 10, "fc");
    training.makes(5, SCRATCH, "scratch");
    training.phase(Phase::Optimizer);
    training.phase(Phase::Forward);
    training.frees(4);
    training.step(2);
    training.told();
    assert_eq!(training.highest_gradients(), [LARGE as i64]);
}

/// More blocks than there can be workspaces are gradients.
#[test]
fn what_is_no_workspace_after_all_counts_again() {
    let mut training = Training::new();
    training.knows(1, 100, "fc/weight");
    training.step(1);
    training.makes(3, LARGE, "fc");
    for place in 0..9 {
        training.makes(10 + place, SCRATCH, "fc/expert");
    }
    training.phase(Phase::Optimizer);
    training.phase(Phase::Forward);
    training.frees(3);
    training.step(2);
    training.told();
    assert_eq!(training.highest_gradients(), [(LARGE + 9 * SCRATCH) as i64]);
}
