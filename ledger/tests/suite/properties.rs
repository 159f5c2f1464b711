//! Compares the ledger with a naive model of the same process, and feeds it arbitrary records.
//!
//! PROPTEST_CASES sets the number of cases of each property; 20,000 take a minute in a release build.

use crate::arbitrary;
use crate::oracle::drive::{Drive, KINDS, Op};
use proptest::prelude::*;

fn ops(most: usize) -> impl Strategy<Value = Vec<Op>> {
    let op = (0..KINDS, any::<u16>(), any::<u16>()).prop_map(|(what, a, b)| Op { what, a, b });
    proptest::collection::vec(op, 1..most)
}

fn run(ops: &[Op], losses: bool) -> Drive {
    let mut drive = Drive::new(losses);
    ops.iter().for_each(|op| drive.run(*op));
    drive
}

fn config() -> ProptestConfig {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 600; // about 20 s of one core in a debug build
    }
    config
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn process_without_losses_is_booked_exactly(ops in ops(150)) {
        run(&ops, false);
    }

    #[test]
    fn state_is_exact_again_after_losses_and_restarts(ops in ops(150)) {
        run(&ops, true);
    }

    #[test]
    fn any_records_at_all_keep_the_sums(said in arbitrary::said(200)) {
        arbitrary::run(&said);
    }
}

/// The properties would be trivially true if the driver did nothing.
#[test]
fn driver_reaches_every_kind_of_call_and_closes_samples() {
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    for losses in [false, true] {
        let ops: Vec<Op> = (0..1500)
            .map(|_| Op { what: (next() % u64::from(KINDS)) as u8, a: next() as u16, b: next() as u16 })
            .collect();
        let drive = run(&ops, losses);
        assert!(drive.seq > 500, "{}", drive.seq);
        assert!(drive.samples_checked > 3, "{}", drive.samples_checked);
        assert!(drive.world.peak.bytes > 0 && drive.world.dead.len() > 50);
    }
}

/// Two readings with one number, of which the first is not closed when the second ends: each has its own end.
#[test]
fn a_number_that_comes_again_does_not_move_the_end_of_an_older_reading() {
    let ops = [
        (37, 0, 0),
        (4, 0, 0),
        (39, 0, 0),
        (37, 26690, 0),
        (27, 0, 0),
        (37, 11775, 55333),
        (0, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
        (37, 46046, 0),
        (37, 31167, 11156),
        (15, 0, 0),
        (37, 28430, 0),
        (39, 0, 0),
    ];
    run(&ops.map(|(what, a, b)| Op { what, a, b }), false);
}

/// The begin of a free is lost, a role is reported meanwhile, and the free fails: the restored row does not have the role.
#[test]
fn a_role_that_never_reached_its_row_is_forgotten() {
    let ops = [
        (15, 0, 0),
        (15, 0, 0),
        (15, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
        (19, 0, 0),
        (8, 615, 0),
        (15, 0, 0),
        (15, 0, 0),
        (6, 0, 0),
        (4, 0, 0),
        (8, 16708, 0),
        (8, 819, 0),
        (35, 11654, 13260),
        (8, 36812, 0),
        (15, 0, 22193),
        (27, 0, 0),
        (5, 0, 0),
        (32, 31805, 392),
        (11, 5319, 780),
        (0, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
        (36, 41, 0),
    ];
    run(&ops.map(|(what, a, b)| Op { what, a, b }), true);
}
