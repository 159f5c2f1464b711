//! Replies to gpumemctl: any bytes parse as a reply or fail, and a parsed reply serialises to the same value.
#![no_main]

use gpumem_fuzz::{shown, tamed};
use gpumem_model::control::{Doctor, Finding, Marked, Ps, Recorded, Refusal, Released};
use gpumem_model::run::Run;
use libfuzzer_sys::fuzz_target;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

fn again<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok(told) = serde_json::from_slice::<T>(bytes) {
        let text = serde_json::to_vec(&told).expect("strings and numbers");
        assert_eq!(serde_json::from_slice::<T>(&text).ok().as_ref(), Some(&told));
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, bytes)) = bytes.split_first() else { return };
    match which % 8 {
        0 => again::<Ps>(bytes),
        1 => again::<Doctor>(bytes),
        2 => again::<Finding>(bytes),
        3 => again::<Released>(bytes),
        4 => again::<Recorded>(bytes),
        5 => again::<Marked>(bytes),
        6 => again::<Refusal>(bytes),
        _ => {
            again::<Vec<Run>>(bytes);
            views(bytes);
        }
    }
});

/// A daemon may report inconsistent runs: displaying them must not panic.
fn views(bytes: &[u8]) {
    let Ok(told) = serde_json::from_slice::<Value>(bytes) else { return };
    let Ok(runs) = serde_json::from_value::<Vec<Run>>(tamed(told)) else { return };
    runs.iter().take(2).for_each(shown);
}
