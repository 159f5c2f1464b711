use super::*;

fn pair(low: u32, high: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (low.to_ne_bytes(), high.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// Returns a buffer of `room` records into which a driver wrote `count` of `stride` bytes.
fn written(room: usize, count: usize, stride: usize) -> Vec<u64> {
    let mut buffer = vec![UNTOUCHED; room * RECORD_WORDS];
    for index in 0..count {
        let record = &mut buffer[index * stride / 8..(index + 1) * stride / 8];
        record.fill(0);
        record[0] = pair(100 + index as u32, 0);
        record[1] = 1 << 20;
        if stride > 16 {
            record[2] = pair(3, 1);
        }
    }
    buffer
}

#[test]
fn the_length_of_a_record_is_seen_from_what_was_written() {
    for count in [1, 2, 3, 4, 16, 47, 48, 63, 64] {
        for length in [24, 32] {
            let buffer = written(64, count, length);
            for symbols in [false, true] {
                assert_eq!(stride(&buffer, count, symbols), length, "{count} of {length}, {symbols}");
            }
            let mut charges = Vec::new();
            parse(&buffer, count, length, false, &mut charges);
            let pids: Vec<u32> = charges.iter().map(|charge| charge.pid).collect();
            assert_eq!(pids, (100..100 + count as u32).collect::<Vec<_>>());
            assert!(charges.iter().all(|charge| charge.bytes == Some(1 << 20)));
            assert!(charges.iter().all(|charge| charge.instance == Some((3, 1))));
        }
    }
    assert_eq!(stride(&written(64, 0, 24), 0, true), 24);
}

#[test]
fn a_wiped_array_is_read_by_the_symbols() {
    let mut buffer = written(64, 2, 24);
    buffer.iter_mut().filter(|word| **word == UNTOUCHED).for_each(|word| *word = 0);
    assert_eq!(stride(&buffer, 2, false), 24);
    assert_eq!(stride(&buffer, 2, true), 32);
}

#[test]
fn a_count_beyond_the_buffer_reads_nothing_beyond() {
    for length in [16, 24, 32] {
        let mut charges = Vec::new();
        parse(&written(64, 64, length), usize::MAX, length, false, &mut charges);
        assert_eq!(charges.len(), 64 * RECORD_WORDS * 8 / length);
    }
    assert_eq!(stride(&written(64, 64, 32), 1 << 40, true), 24);
}

#[test]
fn not_available_is_absent() {
    let mut buffer = written(64, 1, 24);
    buffer[1] = u64::MAX;
    buffer[2] = u64::MAX;
    let mut charges = Vec::new();
    parse(&buffer, 1, 24, false, &mut charges);
    assert_eq!(charges, [Charge { pid: 100, bytes: None, instance: None, protected_bytes: None }]);
}

#[test]
fn protected_bytes_are_those_of_detail_lists_only() {
    let mut buffer = vec![UNTOUCHED; 3 * RECORD_WORDS];
    buffer[..8].copy_from_slice(&[100, 9 << 20, u64::MAX, 4 << 20, 101, 5, u64::MAX, u64::MAX]);
    for (has_protected, expected) in [(true, [Some(4 << 20), None]), (false, [None, None])] {
        let mut charges = Vec::new();
        parse(&buffer, 2, 32, has_protected, &mut charges);
        assert_eq!(charges.iter().map(|charge| charge.protected_bytes).collect::<Vec<_>>(), expected);
        assert!(charges.iter().all(|charge| charge.instance.is_none()));
    }
}
