//! Unmodified PyTorch wheels that allocate and free at random, in several threads on two devices, with settings that change
//! how the allocator splits and returns memory. Blocks, segments and bytes waiting for a stream equal torch's own
//! figures to the byte, at each moment that the program marked.
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, replay};

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
const SETTINGS: [&str; 4] = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:64,roundup_power2_divisions:4,release_lock_on_cudamalloc:True",
    "garbage_collection_threshold:0.3,max_split_size_mb:40",
];

#[test]
fn random_allocations_with_all_threads_and_settings() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        for (seed, settings) in SETTINGS.iter().enumerate() {
            // Events stay pending until a caller waits for them.
            let machine = torch::machine(&["cuda.busy=1"]);
            let mut daemon = Daemon::start(&machine, "daemon", FAST);
            let seed = seed.to_string();
            let arguments = [settings, seed.as_str(), "12"];
            let mut command = wheel.covered(&machine, &daemon.runtime, "churn.py", &arguments);
            let mut job = Job::start(&mut command);
            let printed = torch::finished(&mut job);
            daemon.wait_for_the_end_of(&machine, &[&job]);
            daemon.stop();
            let seen = replay(&daemon.recording);
            let process = seen.process(job.pid());
            assert_eq!(process.odd, Default::default(), "nothing odd");
            let compared = seen.compare_sums(&machine.truth(), job.pid(), |_| true);
            let moments = torch::moments(&daemon.recording, job.pid());
            let (mut pending, mut checked) = (0, 0);
            for (moment, printed) in torch::beside(&moments, &printed) {
                for (ordinal, numbers) in printed["devices"].as_array().expect("devices").iter().enumerate() {
                    let of = |name: &str| numbers[name].as_i64().expect("a number");
                    let held = moment.devices[ordinal];
                    let what = format!("torch {version} {settings:?} {} {ordinal}: {held:?}", moment.name);
                    assert_eq!(held.unbooked, 0, "{what}");
                    assert_eq!(held.tracked, of("reserved"), "{what}, {numbers}");
                    assert_eq!(held.blocks + held.idle, of("reserved"), "{what}, {numbers}");
                    assert_eq!(held.blocks - held.pending, of("allocated"), "{what}, {numbers}");
                    assert_eq!(held.blocks, of("active"), "{what}, {numbers}");
                    (pending, checked) = (pending.max(held.pending), checked + 1);
                }
            }
            println!(
                "torch {version} {settings:?}: {checked} moments, pending up to {pending}, {compared:?}"
            );
            assert!(checked == 2 * 25 && pending > 0);
        }
    }
}
