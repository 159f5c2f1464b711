//! The owner of a process, from control group paths, facts and claims.
#![no_main]

use gpumem_model::owner::cgroup::CgroupOwner;
use gpumem_model::owner::{NAMES, Owner, is_of_job};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let place = CgroupOwner::of_file(&text);
    let hex = |id: &String| id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    assert!(place.container.iter().all(hex));
    assert!(place.short_container().is_none_or(|id| id.len() == 12));
    let plain = |id: &String| {
        !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-+".contains(&byte))
    };
    assert!([&place.pod_uid, &place.slurm_job, &place.slurm_step].into_iter().flatten().all(plain));

    // Lines `name=value`; a leading `?` marks a claim.
    let (mut facts, mut claims) = (BTreeMap::new(), BTreeMap::new());
    for (name, value) in text.lines().filter_map(|line| line.split_once('=')) {
        match name.strip_prefix('?') {
            Some(name) => claims.insert(name.to_owned(), value.to_owned()),
            None => facts.insert(name.to_owned(), value.to_owned()),
        };
    }
    let who = Owner::of(&facts, &claims, Some(7));
    for said in who.iter() {
        assert!(NAMES.contains(&said.name));
        let own = facts.get(said.name).map(|value| value.trim()).filter(|value| !value.is_empty());
        if let Some(own) = own.filter(|_| !matches!(said.name, "job" | "rank" | "world_size")) {
            assert!(!said.is_claim && said.value == own, "a fact wins: {}", said.name);
        }
        if matches!(said.name, "user" | "comm" | "container") {
            assert!(!said.is_claim, "{} cannot be claimed", said.name);
        }
    }
    assert_eq!(who.map().len(), who.iter().count() + usize::from(who.claimed().is_some()));
    let _ = (who.words(), is_of_job(&facts, &claims, "a"));
});
