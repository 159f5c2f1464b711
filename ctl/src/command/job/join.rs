//! Joins samples of a Prometheus to members of a job. Samples with one node, pid and start time belong to one process.

use super::member::{FAILED_ALLOCATIONS, Member, rank};
use crate::client::prometheus::Sample;
use gpumem_model::owner::{CLAIMED, NAMES};
use std::collections::BTreeMap;

/// Identifies a process: node, pid and start time in clock ticks.
type Key = (String, u32, u64);

/// Joins samples of `gpumem_process_info`, whose labels name the owners of processes, with the numbers of these processes.
pub(crate) fn join(infos: &[Sample], numbers: &[Sample]) -> Vec<Member> {
    // If two scrape jobs in the configuration of Prometheus read the same node, each sample of the node occurs twice and counts
    // once.
    let owners: BTreeMap<Key, &Sample> =
        infos.iter().filter_map(|sample| Some((key(sample)?, sample))).collect();
    let mut members: BTreeMap<(Key, String), Member> = BTreeMap::new();
    let mut failures: BTreeMap<Key, Option<u64>> = BTreeMap::new();
    for sample in numbers {
        let Some(key) = key(sample) else { continue };
        let Some(info) = owners.get(&key) else { continue };
        let name = sample.label("__name__").unwrap_or_default();
        let Some(uuid) = sample.label("uuid") else {
            if name == FAILED_ALLOCATIONS {
                failures.insert(key, sample.number().and_then(|number| u64::try_from(number).ok()));
            }
            continue;
        };
        let member =
            members.entry((key.clone(), uuid.to_owned())).or_insert_with(|| member(&key, info, sample));
        let number = sample.number();
        match name {
            "gpumem_process_used_bytes" => member.used_bytes = number,
            "gpumem_process_predates_bytes" => member.predates_bytes = number,
            "gpumem_process_tracked_bytes" => member.tracked_bytes = number,
            "gpumem_process_untrackable_bytes" => member.untrackable_bytes = number,
            "gpumem_process_used_peak_bytes" => member.peak_used_bytes = number,
            "gpumem_process_category_bytes" => member.idle_bytes = number,
            "gpumem_process_flag" => {
                let flag = sample.label("flag").unwrap_or_default().to_owned();
                if !member.flags.contains(&flag) {
                    member.flags.push(flag);
                }
            }
            _ => {}
        }
    }
    for ((key, _), member) in &mut members {
        member.failed_allocations = failures.get(key).copied().flatten();
        // A process with an agent has no series for a category without bytes, so its idle bytes are 0.
        member.idle_bytes = member.idle_bytes.or(member.tracked_bytes.map(|_| 0));
    }
    members.into_values().collect()
}

fn key(sample: &Sample) -> Option<Key> {
    let number = |label| sample.label(label).and_then(|text| text.parse::<u64>().ok());
    let pid = u32::try_from(number("pid")?).ok()?;
    Some((sample.label("instance").unwrap_or_default().to_owned(), pid, number("start")?))
}

fn member(key: &Key, info: &Sample, sample: &Sample) -> Member {
    let name_of_owner = |name: &'static str| {
        let label = if name == "job" { "job_name" } else { name };
        // A Prometheus that adds a label of the same name renames ours with the prefix `exported_`.
        let value =
            info.label(label).or_else(|| info.label(&format!("exported_{label}")).filter(|_| name != "job"));
        value.map(|value| (name.to_owned(), value.to_owned()))
    };
    let who: BTreeMap<String, String> =
        NAMES.into_iter().chain([CLAIMED]).filter_map(name_of_owner).collect();
    Member {
        rank: rank(&who),
        node: Some(key.0.clone()),
        pid: key.1,
        start_ticks: key.2,
        gpu: sample.label("gpu").map(str::to_owned),
        uuid: sample.label("uuid").map(str::to_owned),
        state: "running",
        who,
        ..Member::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(text: &str) -> Vec<Sample> {
        serde_json::from_str(text).expect("samples")
    }

    #[test]
    fn numbers_are_joined_with_their_process() {
        let infos = samples(
            r#"[{"metric":{"instance":"n1:9837","pid":"7","start":"9","job_name":"a","rank":"3","exported_pod":"p","pod":""},"value":[1,"1"]},
                {"metric":{"instance":"n1:9837","job":"again","pid":"7","start":"9","job_name":"a","rank":"3","exported_pod":"p"},"value":[1,"1"]},
                {"metric":{"instance":"n2:9837","pid":"7","start":"9","job_name":"a","rank":"4"},"value":[1,"1"]}]"#,
        );
        let of = |node: &str, name: &str, rest: &str, value: &str| {
            format!(
                r#"{{"metric":{{"__name__":"gpumem_process_{name}","instance":"{node}:9837","pid":"7","start":"9"{rest}}},"value":[1,"{value}"]}}"#
            )
        };
        let device = r#","gpu":"0","uuid":"GPU-1""#;
        let other = r#","gpu":"1","uuid":"GPU-2""#;
        let numbers = [
            of("n1", "used_bytes", device, "100"),
            of("n1", "tracked_bytes", device, "60"),
            of("n1", "used_bytes", other, "5"),
            of("n1", "allocation_failures_total", "", "2"),
            of("n2", "used_bytes", device, "NaN"),
            of("n3", "used_bytes", device, "7"),
            of("n1", "flag", &format!(r#"{device},"flag":"covered""#), "1"),
            r#"{"metric":{"__name__":"gpumem_process_used_bytes","pid":"x"},"value":[1,"1"]}"#.to_owned(),
        ];
        let members = join(&infos, &samples(&format!("[{}]", numbers.join(","))));
        assert_eq!(members.len(), 3);
        assert_eq!(
            (members[0].used_bytes, members[0].tracked_bytes, members[0].idle_bytes),
            (Some(100), Some(60), Some(0))
        );
        assert_eq!(
            (members[0].rank, members[0].failed_allocations, &*members[0].flags),
            (Some(3), Some(2), &["covered".to_owned()][..])
        );
        assert_eq!(members[0].who.get("pod").map(String::as_str), Some("p"));
        assert_eq!(
            (members[1].used_bytes, members[1].tracked_bytes, members[1].idle_bytes),
            (Some(5), None, None)
        );
        assert_eq!(
            (members[2].node.as_deref(), members[2].used_bytes),
            (Some("n2:9837"), None),
            "unknown is never zero"
        );
    }
}
