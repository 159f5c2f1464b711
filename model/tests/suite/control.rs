//! Answers of the control API: each survives a round trip, and answers of other versions are readable.
use gpumem_model::control::*;
use proptest::prelude::*;
use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Debug;

fn again<T: Serialize + DeserializeOwned + PartialEq + Debug>(said: &T) {
    let text = serde_json::to_string(said).expect("strings and numbers");
    assert!(!text.bytes().any(|byte| byte < 0x20), "what strangers say is escaped: {text}");
    assert_eq!(&serde_json::from_str::<T>(&text).expect("it was just written"), said);
}

fn few() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(any::<String>(), 0..3)
}

prop_compose! {
    fn device()(
        index: u32, uuid: String, model: String, total_bytes: Option<u64>, used_bytes: Option<u64>, free_bytes: Option<u64>,
        system_bytes: Option<u64>, unaccounted_bytes: Option<i64>, age_ms: Option<u64>, why: Option<String>,
        unified: bool,
    ) -> DeviceRow {
        DeviceRow {
            index, uuid, model, total_bytes, used_bytes, free_bytes, system_bytes, unaccounted_bytes, age_ms, why,
            unified, utilization_percent: None, power_w: None,
        }
    }
}

prop_compose! {
    fn process()(
        ids: (u32, usize, Option<u64>, Option<u64>), user: Option<String>, flags in few(), used_bytes: Option<u64>,
        protected_bytes: Option<u64>,
        signed: (Option<i64>, Option<i64>, Option<i64>), age_ms: Option<u64>, why: Option<String>, command: Option<String>,
        who in prop::collection::btree_map(any::<String>(), any::<String>(), 0..3),
    ) -> ProcessRow {
        let ((pid, device, start_ticks, uid), (tracked_bytes, idle_bytes, untrackable_bytes)) = (ids, signed);
        ProcessRow {
            pid, device, start_ticks, uid, user, flags, used_bytes, tracked_bytes, idle_bytes, untrackable_bytes, age_ms, why, command, who,
            protected_bytes,
        }
    }
}

prop_compose! {
    fn finding()(id: String, state in 0..4_usize, subject: String, text: String, fix: Option<String>) -> Finding {
        let state = [State::Bad, State::Warn, State::Unknown, State::Ok][state];
        Finding { id, state, subject, text, fix }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read_as_it_was(
        devices in prop::collection::vec(device(), 0..3), processes in prop::collection::vec(process(), 0..3),
        findings in prop::collection::vec(finding(), 0..3), names in few(), number: u64, pid: u32, word: String,
    ) {
        let facts = names.into_iter().map(|name| (name, word.clone())).collect();
        again(&Ps { devices, processes, ..Ps::default() });
        again(&Doctor { version: word.clone(), pid, uptime_s: number, facts, findings });
        again(&Released { for_s: number });
        again(&Recorded { pid, done: word.clone(), file: Some(word.clone()).filter(|word| !word.is_empty()) });
        again(&Marked { pids: vec![pid], time_ns: number });
        again(&Refusal { error: word });
    }
}

/// Answers as the first version wrote them, and with fields that a later version may add.
#[test]
fn other_versions_are_understood() {
    let row = r#"{"pid":7,"device":0,"uid":null,"user":"ana","flags":["uncovered"],"used_bytes":5,"tracked_bytes":null,
        "idle_bytes":null,"untrackable_bytes":-1,"age_ms":3,"why":null,"command":"python"}"#;
    let old: ProcessRow = serde_json::from_str(row).expect("without `who`");
    assert_eq!((old.pid, old.used_bytes, old.untrackable_bytes, old.who.len()), (7, Some(5), Some(-1), 0));
    let newer = row.replace("\"pid\"", "\"mood\":[{}],\"pid\"");
    assert_eq!(serde_json::from_str::<ProcessRow>(&newer).expect("with more"), old);
    let refusal = r#"{"error":"no","hint":{"a":1}}"#;
    assert_eq!(serde_json::from_str::<Refusal>(refusal).expect("with more").error, "no");
    // An invalid number is an error and not zero.
    assert!(
        serde_json::from_str::<ProcessRow>(&row.replace("\"used_bytes\":5", "\"used_bytes\":-5")).is_err()
    );
}
