use super::*;
use crate::base::row::mix;
use std::collections::HashMap;

fn table(rows: u64) -> Live {
    Live::new(anonymous::<Words>(rows_for(rows) as usize).expect("memory")).expect("memory")
}

fn row(seq: u64, address: u64) -> Row {
    [seq, 0, address, 0, 0, 0, 0, 0]
}

fn discard(live: &Live, key: Key) {
    live.discard_at(Live::spot_of(live.home(key.hash())));
}

#[test]
fn it_is_a_map() {
    let live = table(700);
    let mut model = HashMap::new();
    let mut random = 1_u64;
    for seq in 1..200_000 {
        random = mix(random, seq);
        let address = random % 900 * 512;
        let key = Key::Allocation(address);
        if random >> 40 & 1 == 0 && model.len() < 850 {
            assert!(live.insert(key, &row(seq, address), RowExtra::default()));
            model.insert(address, seq);
        } else {
            assert_eq!(live.remove(key).map(|taken| taken.seq()), model.remove(&address));
        }
    }
    let mut found: Vec<_> = live.scan().map(|taken| (taken.row[2], taken.seq())).collect();
    let mut expected: Vec<_> = model.into_iter().collect();
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected);
    for (address, _) in expected {
        live.remove(Key::Allocation(address)).expect("bound");
    }
    assert!(live.chunks.iter().all(|chunk| chunk.passed.load(Relaxed) == 0));
    assert_eq!(live.refused.load(Relaxed), 0);
}

#[test]
fn a_large_table_fills_to_nine_tenths() {
    let live = table(1 << 16);
    let most = live.rows.len() as u64 * 9 / 10;
    for seq in 1..=most {
        assert!(live.insert(Key::Allocation(seq << 9), &row(seq, seq << 9), RowExtra::default()), "{seq}");
    }
    assert_eq!(live.scan().count() as u64, most);
    for seq in 1..=most {
        assert_eq!(live.remove(Key::Allocation(seq << 9)).map(|taken| taken.seq()), Some(seq));
    }
    assert!(live.chunks.iter().all(|chunk| chunk.passed.load(Relaxed) == 0));
}

#[test]
fn a_full_table_refuses_and_recovers() {
    let live = table(1);
    for address in 1..=7 {
        assert!(live.insert(Key::Allocation(address), &row(address, address), RowExtra::default()));
    }
    assert!(!live.insert(Key::Allocation(8), &row(8, 8), RowExtra::default()));
    assert_eq!(live.refused.load(Relaxed), 1);
    assert_eq!(live.remove(Key::Allocation(3)).map(|taken| taken.seq()), Some(3));
    assert!(live.insert(Key::Allocation(8), &row(8, 8), RowExtra::default()));
    assert_eq!(live.scan().count(), 7);
}

#[test]
fn one_address_in_several_spaces() {
    let live = table(100);
    let keys = [
        Key::Allocation(5),
        Key::Handle(5),
        Key::Backing(5),
        Key::Mapping(5),
        Key::Pool(5),
        Key::Segment(1, 5),
        Key::Segment(2, 5),
        Key::Block(1, 5),
        Key::Block(2, 5),
    ];
    for (seq, key) in (1..).zip(keys) {
        assert!(live.insert(key, &row(seq, 5), RowExtra::default()));
    }
    for (seq, key) in (1..).zip(keys) {
        assert_eq!(live.remove(key).map(|taken| taken.seq()), Some(seq));
    }
    assert_eq!(live.scan().count(), 0);
}

#[test]
fn what_lies_beside_goes_with_its_row() {
    let live = table(10);
    let beside = RowExtra { references: 1, flags: RowExtra::RETAGGED, first_tag: 7, ..RowExtra::default() };
    assert!(live.insert(Key::Handle(1), &row(1, 1), beside));
    assert_eq!(live.count(Key::Handle(1), 1, 1).map(|row| row.beside.references), Some(2));
    assert_eq!(live.count(Key::Handle(1), -2, 0).map(|row| row.beside.mappings), Some(1));
    let taken = live.remove(Key::Handle(1)).expect("bound");
    assert_eq!(taken.beside, RowExtra { references: 0, mappings: 1, ..beside });
    assert!(live.insert(Key::Handle(1), &row(2, 1), RowExtra::default()));
    assert_eq!(live.get(Key::Handle(1)).map(|row| row.beside), Some(RowExtra::default()));
}

#[test]
fn threads_with_keys_of_their_own_do_not_disturb_each_other() {
    let live = table(4_000);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let live = &live;
            scope.spawn(move || {
                for round in 0..20_000_u64 {
                    let address = (thread << 32) | (round % 500);
                    let key = Key::Allocation(address);
                    let seq = 1 + (thread << 40) + round;
                    if let Some(old) = live.remove(key) {
                        assert_eq!(old.row[2], address);
                        assert_eq!(old.seq(), seq - 500);
                    }
                    assert!(live.insert(key, &row(seq, address), RowExtra::default()));
                }
            });
        }
    });
    assert_eq!(live.scan().count(), 2_000);
}

#[test]
fn what_is_discarded_is_gone_wherever_it_lay() {
    let live = table(4096);
    let key = |number: u64| Key::Block(7, number << 9);
    let count = 4000; // far more than fit into the first chunks
    for number in 1..=count {
        live.expect(key(number));
        let beside = if number % 3 == 0 {
            RowExtra { flags: RowExtra::RETAGGED, ..RowExtra::default() }
        } else {
            RowExtra::default()
        };
        assert!(live.insert(key(number), &row(number, number << 9), beside));
    }
    discard(&live, key(count + 1)); // was never there
    assert_eq!(live.scan().count() as u64, count);
    for number in 1..=count {
        discard(&live, key(number));
        assert!(live.get(key(number)).is_none());
        assert!(number == count || live.get(key(number + 1)).is_some(), "its neighbours stay");
    }
    assert_eq!(live.scan().count(), 0);
    assert!(live.chunks.iter().all(|chunk| chunk.passed.load(Relaxed) == 0), "nothing is left behind");
}

/// After a place was looked up, another thread may have taken it, or may have added the key at home again further away.
#[test]
fn a_place_that_was_looked_for_may_be_gone() {
    let live = table(7 * 16);
    let key = |number: u64| Key::Block(1, number << 9);
    let spots: Vec<_> =
        (1..=60).map(|number| (number, Live::spot_for(live.home(key(number).hash())))).collect();
    for &(number, spot) in &spots {
        assert!(live.insert_at(spot, &row(number, number << 9)), "{number}");
    }
    let found: Vec<_> = (1..=60).map(|number| live.get(key(number)).map(|taken| taken.seq())).collect();
    assert_eq!(found, (1..=60).map(Some).collect::<Vec<_>>());
    for number in 1..=60 {
        let spot = Live::spot_of(live.home(key(number).hash()));
        live.discard_at(spot);
        live.discard_at(spot); // two frees of one address: only one removes it
        assert!(live.get(key(number)).is_none(), "{number}");
    }
    assert_eq!(live.scan().count(), 0);
    assert!(live.chunks.iter().all(|chunk| chunk.passed.load(Relaxed) == 0));
    // The key was added again meanwhile, and another row has its old place.
    let bind = |number: u64| live.insert(key(number), &row(number, number << 9), RowExtra::default());
    assert!(bind(1));
    let spot = Live::spot_of(live.home(key(1).hash()));
    discard(&live, key(1));
    assert!((2..=80).all(bind) && bind(1));
    let number = |spot: RowSlot| spot.at_home.map(|place| place.number);
    assert_ne!(number(Live::spot_of(live.home(key(1).hash()))), number(spot), "or this says nothing");
    live.discard_at(spot);
    assert!(live.get(key(1)).is_none());
    assert_eq!(live.scan().count(), 79);
}

/// Eight words are compared at once, by halves. A word with only one equal half must not match, and neither must the eighth,
/// which is not a key.
#[test]
fn a_key_is_found_by_all_of_its_bits() {
    let chunk: Chunk = Chunk { keys: [const { AtomicU64::new(0) }; KEYS], passed: AtomicU64::new(0) };
    let (word, mut random) = (0x1234_5678_9abc_def0_u64, 1);
    let likenesses = [
        word,
        FREE,
        WRITING,
        word ^ 1,
        word ^ 1 << 63,
        word & !0 >> 32,
        word & !0 << 32,
        word.rotate_left(32),
    ];
    for round in 0..20_000 {
        let mut drawn = || {
            random = mix(random, round);
            likenesses[random as usize % likenesses.len()]
        };
        chunk.keys.iter().for_each(|key| key.store(drawn(), Relaxed));
        chunk.passed.store(drawn(), Relaxed);
        for looked_for in likenesses {
            let plain = chunk.keys.iter().position(|key| key.load(Relaxed) == looked_for);
            assert_eq!(chunk.place_of(looked_for), plain.unwrap_or(KEYS), "{looked_for:x} in {chunk:x?}");
            assert_eq!(chunk.equal(looked_for) != 0, plain.is_some());
        }
    }
}
