//! Queries to Prometheus and its answers: the samples or the error of an answer, and a job's members from the samples.
#![no_main]
#![allow(dead_code)]

mod client {
    pub mod prometheus {
        pub(crate) use crate::samples::Sample;
    }
}
#[path = "../../ctl/src/command/job/join.rs"]
mod join;
#[path = "../../ctl/src/command/job/member.rs"]
mod member;
#[path = "../../ctl/src/client/samples.rs"]
mod samples;

use gpumem_fuzz::{harmless, memory};
use libfuzzer_sys::fuzz_target;
use samples::{Sample, Wrong};
use std::collections::BTreeSet;

fuzz_target!(|bytes: &[u8]| {
    // Two answers, separated by a NUL byte, which JSON cannot contain.
    let (infos, numbers) = bytes.split_at(bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len()));
    memory::bounded(4096 + 400 * bytes.len(), || {
        let (Some(infos), Some(numbers)) = (answer(infos), answer(numbers.get(1..).unwrap_or_default()))
        else {
            return;
        };
        members(&infos, &numbers);
    });
    asked(&String::from_utf8_lossy(&bytes[..bytes.len().min(64)]));
});

fn answer(body: &[u8]) -> Option<Vec<Sample>> {
    match samples::read(body, true) {
        Ok(samples) => {
            assert!(samples::read(body, false).is_err(), "a rejected body has no samples");
            Some(samples)
        }
        Err(Wrong::Refused(text) | Wrong::Kind(text)) => {
            harmless(&text);
            None
        }
        Err(Wrong::Foreign) => None,
    }
}

fn members(infos: &[Sample], numbers: &[Sample]) {
    let mut members = join::join(infos, numbers);
    member::order(&mut members);
    let mut seen = BTreeSet::new();
    for member in &members {
        assert!(seen.insert((member.process(), &member.uuid)), "each process once on a device");
        let is_it = |sample: &&Sample| {
            let number = |name| sample.label(name).and_then(|text| text.parse::<u64>().ok());
            let node = sample.label("instance").unwrap_or_default();
            (number("pid"), number("start"), Some(node))
                == (Some(member.pid.into()), Some(member.start_ticks), member.node.as_deref())
        };
        assert!(infos.iter().any(|sample| is_it(&sample)), "the series has no info sample");
        // Every shown number comes from this process on this device.
        let of_it: Vec<i64> = numbers
            .iter()
            .filter(is_it)
            .filter(|sample| sample.label("uuid") == member.uuid.as_deref())
            .filter_map(Sample::number)
            .collect();
        let shown =
            [member.used_bytes, member.predates_bytes, member.tracked_bytes, member.untrackable_bytes];
        assert!(
            shown.into_iter().flatten().all(|number| of_it.contains(&number)),
            "a number from another series"
        );
    }
}

/// Asserts that any text is quoted into one string, and that its percent-encoding decodes to the text.
fn asked(text: &str) {
    let quoted = samples::quoted(text);
    let inside = quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).expect("quotes");
    let (mut said, mut rest) = (String::new(), inside.chars());
    while let Some(one) = rest.next() {
        assert!(one != '"' && one != '\n', "the string has ended");
        said.push(match (one, if one == '\\' { rest.next() } else { None }) {
            ('\\', Some('n')) => '\n',
            ('\\', Some(escaped @ ('"' | '\\'))) => escaped,
            ('\\', other) => panic!("no escape: {other:?}"),
            (plain, _) => plain,
        });
    }
    assert_eq!(said, text);
    let encoded = samples::encoded(text);
    let mut rest = encoded.bytes();
    let mut decoded = Vec::new();
    while let Some(byte) = rest.next() {
        assert!(byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte), "{encoded}");
        let mut digit =
            || rest.next().and_then(|byte| char::from(byte).to_digit(16)).expect("two digits") as u8;
        decoded.push(if byte == b'%' { digit() << 4 | digit() } else { byte });
    }
    assert_eq!(decoded, text.as_bytes());
}
