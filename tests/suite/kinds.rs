//! Every kind of driver memory on the simulated machine, through allocation, failure, free, failed free, reset, and the end of
//! the process. At every sample of the daemon, `tracked` equals the machine's own figure.
use gpumem_ledger::{ROUNDING_RULE, RoundingRule};
use gpumem_tests::live::scene::{Scene, between, inside};
use gpumem_tests::live::{Mixer, mixer};

const K: i64 = 1 << 10;
const M: i64 = 1 << 20;
const G: i64 = 1 << 30;

#[test]
fn direct_allocations_large_and_small() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    scene.look(&mut mixer, "before anything", 0);
    mixer.ok(
        "tag model/weight; alloc a 7340033; tag model/bias; alloc b 100; alloc c 512; tag rest; alloc d 1M",
    );
    let all = 7_340_033 + 100 + 512 + M;
    scene.look(&mut mixer, "with four", all);
    mixer.refused("alloc e 64G"); // more than there is
    mixer.refused("alloc e 0");
    mixer.refused("free 0x1234");
    mixer.refused("pinned-end a"); // it is none: a free that fails
    mixer.ok("free 0"); // succeeds, and frees nothing
    scene.look(&mut mixer, "after calls that failed", all);
    mixer.ok("retag a model/other; free b");
    scene.look(&mut mixer, "without b", all - 100);
    mixer.refused("free b");
    mixer.ok("free a; free d");
    scene.look(&mut mixer, "with c alone", 512);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn pitched_memory_costs_its_pitch() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    let pitch = mixer.ok("tag image; pitch a 1000 1000").number as i64;
    assert!(pitch >= 1000, "{pitch}");
    scene.look(&mut mixer, "with rows", pitch * 1000);
    mixer.refused("pitch b 1G 1G");
    scene.look(&mut mixer, "after a refusal", pitch * 1000);
    mixer.ok("free a");
    scene.look(&mut mixer, "after the free", 0);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn arrays_and_mipmaps() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    mixer.ok("tag texture; array a 1024 1024; array3d b 256 256 16 0");
    scene.look(&mut mixer, "with two arrays", 8 * M);
    mixer.ok("tag mips; mipmap c 512 512 6 4");
    let levels = [512 * 512 * 6, 256 * 256 * 3, 128 * 128, 64 * 64];
    let with_mips = 8 * M + levels.iter().sum::<i64>() * 4;
    scene.look(&mut mixer, "with a mipmap", with_mips);
    mixer.refused("array3d d 256 256 16 0x40"); // sparse: the simulated driver has none
    mixer.refused("array d 1M 1M");
    mixer.refused("array-end 0x77");
    mixer.refused("free a"); // not by address
    scene.look(&mut mixer, "after refusals", with_mips);
    mixer.ok("array-end a; mipmap-end c");
    scene.look(&mut mixer, "with one array", 4 * M);
    mixer.ok("array-end b");
    scene.look(&mut mixer, "with none", 0);
    scene.end(&mut [&mut mixer]);
}

/// The channels of most formats are part of the format; compressed ones come in blocks of 4 x 4.
#[test]
fn arrays_of_every_format() {
    const UNORM_8X4: &str = "0xc2 4";
    const SNORM_16X4: &str = "0xcb 4";
    const NV12: &str = "0xb0 3";
    const AYUV: &str = "0xa8 4";
    const BC1: &str = "0x91 4";
    const BC7: &str = "0x9d 4";
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    let mut all = 0;
    // Format, then half-bytes of a pixel.
    let formats = [(UNORM_8X4, 8), (SNORM_16X4, 16), (NV12, 3), (AYUV, 8), (BC1, 1), (BC7, 2)];
    for (at, (format, half_bytes)) in formats.into_iter().enumerate() {
        mixer.ok(&format!("array-of a{at} {format} 2048 2048"));
        all += 2048 * 2048 * half_bytes / 2;
    }
    scene.look(&mut mixer, "with one of each", all);
    for at in 0..formats.len() {
        mixer.ok(&format!("array-end a{at}"));
    }
    scene.look(&mut mixer, "with none", 0);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn managed_pinned_and_registered_memory_is_outside_the_sum() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    mixer.ok("alloc a 3M; managed b 5M; pinned c 3145729; pinned-flags d 4096; register e 64K");
    (mixer.beside.managed_bytes, mixer.beside.pinned_bytes, mixer.beside.registered_bytes) =
        (5 * M, 3_145_729 + 4096, 64 * K);
    scene.look(&mut mixer, "with every kind", 3 * M);
    mixer.refused("free c"); // pinned memory is not freed like that
    mixer.refused("register-end c");
    mixer.refused("pinned-end 0x10");
    scene.look(&mut mixer, "after refusals", 3 * M);
    mixer.ok("free b; pinned-end d; register-end e");
    (mixer.beside.managed_bytes, mixer.beside.pinned_bytes, mixer.beside.registered_bytes) =
        (0, 3_145_729, 0);
    scene.look(&mut mixer, "with one pinned", 3 * M);
    mixer.ok("pinned-end c; free a");
    mixer.beside.pinned_bytes = 0;
    scene.look(&mut mixer, "with nothing", 0);
    scene.end(&mut [&mut mixer]);
}

/// More managed memory than the device has.
#[test]
fn managed_memory_beyond_the_device_is_outside_the_sum() {
    let mut scene = Scene::new(&["memory=4G"]);
    let mut mixer = scene.mixer();
    mixer.ok("alloc a 1G; managed b 6G");
    mixer.beside.managed_bytes = 6 * G;
    scene.look(&mut mixer, "oversubscribed", G);
    mixer.ok("free b");
    mixer.beside.managed_bytes = 0;
    scene.look(&mut mixer, "afterwards", G);
    scene.end(&mut [&mut mixer]);
}

/// A pool counts with its reserved bytes; its live allocations have names, the rest is idle. The reserved bytes are queried at
/// calls, at most every 100 ms, and once a second for long-lived pools; the test waits for that.
#[test]
fn stream_ordered_memory_of_the_default_pool() {
    let mut scene = Scene::new(&["cuda.pool_step=32M"]);
    let mut mixer = scene.pooled();
    mixer.ok("pool-default p; pool-keeps p 0xffffffffffffffff; stream s; tag work; async a 3M; async b 100");
    scene.look(&mut mixer, "with two pieces", 32 * M);
    mixer.ok("async-end a");
    scene.look(&mut mixer, "with one piece", 32 * M);
    mixer.refused("async c 64G");
    mixer.refused("async-end 0x10");
    mixer.ok("free b"); // as good as the other
    scene.look(&mut mixer, "with none: all is idle", 32 * M);
    mixer.ok("pool-trim p 0");
    scene.look(&mut mixer, "trimmed", 0);
    mixer.ok("async d 40M; pool-keeps p 0; async-end d; synchronize"); // releases it without a call
    scene.look_settled(&mut mixer, "shrunk without a call", 0);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn stream_ordered_memory_of_a_separate_pool() {
    let mut scene = Scene::new(&["cuda.pool_step=32M"]);
    let mut mixer = scene.pooled();
    mixer.ok("stream s; pool p; pool-keeps p 0xffffffffffffffff; tag own; async-from a p 5M");
    scene.look(&mut mixer, "named in the call", 32 * M);
    mixer.ok("pool-use p; tag current; async b 7M");
    scene.look(&mut mixer, "as the current pool", 32 * M);
    mixer.refused("async-from c 0x10 1M");
    mixer.ok("async-end a; pool-end p"); // b keeps it
    scene.look(&mut mixer, "destroyed, with a piece that lives", 32 * M);
    mixer.refused("pool-end p");
    mixer.ok("async-end b");
    scene.look(&mut mixer, "gone with its last piece", 0);
    mixer.ok("tag default; async d 1M");
    scene.look(&mut mixer, "the default pool again", 32 * M);
    scene.end(&mut [&mut mixer]);
}

/// As RMM and CuPy use pools: the program's pool releases memory at a synchronisation, or is trimmed right after it was read.
#[test]
fn separate_pool_releases_memory() {
    let mut scene = Scene::new(&["cuda.pool_step=32M"]);
    let mut mixer = scene.pooled();
    mixer.ok(
        "stream s; pool p; pool-keeps p 0xffffffffffffffff; tag own; async-from a p 60M; async-from b p 20M",
    );
    scene.look(&mut mixer, "two pieces", 96 * M);
    mixer.ok("async-end a; pool-trim p 0");
    scene.look(&mut mixer, "trimmed at once", 32 * M);
    mixer.ok("async-from c p 400M; pool-keeps p 0; async-end b; async-end c; synchronize");
    scene.look_settled(&mut mixer, "shrunk by a synchronisation", 0);
    mixer.ok("async-from d p 40M; async-end d; synchronize; pool-end p; pool q; async-from e q 1M");
    scene.look_settled(&mut mixer, "another pool in its place", 32 * M);
    scene.end(&mut [&mut mixer]);
}

/// Two pieces at once: the second one makes the pool grow, and no later call reports by how much.
#[test]
fn pool_that_grows_twice_at_once() {
    let mut scene = Scene::new(&["cuda.pool_step=32M"]);
    let mut mixer = scene.pooled();
    mixer.ok("pool-default p; pool-keeps p 0xffffffffffffffff; stream s; tag work; async a 3M; async b 40M");
    scene.look_settled(&mut mixer, "of the device", 96 * M);
    mixer.ok("pool q; pool-keeps q 0xffffffffffffffff; async-from c q 3M; async-from d q 40M");
    scene.look_settled(&mut mixer, "of the program", 192 * M);
    scene.end(&mut [&mut mixer]);
}

/// A query of the pool after the allocation shows its growth, and one after the trim shows its shrinking. A reading in between
/// is torn, and its bounds include the difference.
#[test]
fn pool_with_slow_attribute_queries() {
    let mut scene = Scene::new(&["cuda.pool_step=32M", "latency=sleep"]);
    let mut mixer = scene.mixer();
    mixer.ok("pool-default p; pool-keeps p 0xffffffffffffffff; stream s; tag work");
    scene.machine.set(&["cuda.query_us=50000"]);
    let answer = mixer.ok("async a 3M; async b 40M; async c 70M; async d 33M; async e 1M");
    scene.machine.set(&["cuda.query_us=0"]);
    scene.look_settled(&mut mixer, "all five", 256 * M);
    mixer.ok("async-end b; async-end c; async-end d; synchronize");
    scene.machine.set(&["cuda.query_us=50000"]);
    let trims = ["200M", "120M", "64M", "0"].map(|keep| mixer.ok(&format!("pool-trim p {keep}")));
    scene.machine.set(&["cuda.query_us=0"]);
    scene.look(&mut mixer, "two, and the pool trimmed", 32 * M);
    let seen = scene.end(&mut [&mut mixer]);
    let torn = |answer| between(&seen, &mixer, answer).filter(|sample| sample.torn).count();
    assert!(torn(&answer) > 0, "no reading fell between growth and report");
    assert!(trims.iter().map(torn).sum::<usize>() > 0, "no reading fell between trim and report");
}

#[test]
fn handle_released_before_it_is_unmapped() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    mixer.ok("reserve r 64M");
    scene.look(&mut mixer, "addresses cost nothing", 0);
    mixer.ok("tag cache; create h 8M");
    scene.look(&mut mixer, "a handle costs", 8 * M);
    mixer.ok("map r 4M 8M h; release h");
    scene.look(&mut mixer, "its mapping keeps it", 8 * M);
    mixer.refused("release h");
    mixer.refused("unmap r 4M 4M"); // not in parts
    mixer.refused("reserve-end r 64M"); // not with something in it
    scene.look(&mut mixer, "after refusals", 8 * M);
    mixer.ok("unmap r 4M 8M");
    scene.look(&mut mixer, "unmapped", 0);
    mixer.refused("create i 64G");
    mixer.refused("create i 3M"); // no multiple of the granule
    mixer.ok("reserve-end r 64M");
    scene.look(&mut mixer, "at the end", 0);
    scene.end(&mut [&mut mixer]);
}

/// The driver keeps the memory until the descriptor is closed.
#[test]
fn handle_exported_and_released() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.pooled(); // a close is seen within a second
    mixer.ok("tag cache; create h 20M; create i 6M; reserve r 64M; map r 0 6M i");
    let (first, second) = (mixer.ok("export h").number, mixer.ok("export i").number);
    let third = mixer.ok("export h").number;
    mixer.ok("release h");
    scene.look(&mut mixer, "its descriptors keep it", 26 * M);
    mixer.ok(&format!("close {second}; release i; unmap r 0 6M"));
    scene.look(&mut mixer, "one that was closed keeps nothing", 20 * M);
    mixer.ok(&format!("close {first}; alloc a 2M"));
    scene.look_settled(&mut mixer, "its other descriptor keeps it", 22 * M);
    mixer.ok(&format!("close {third}; alloc b 2M"));
    scene.look_settled(&mut mixer, "closed", 4 * M);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn handle_unmapped_before_it_is_released() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    mixer.ok("tag cache; create h 8M; reserve r 64M; map r 0 8M h; map r 16M 8M h");
    scene.look(&mut mixer, "mapped twice counts once", 8 * M);
    mixer.ok("unmap r 0 8M");
    scene.look(&mut mixer, "mapped once", 8 * M);
    mixer.ok("unmap r 16M 8M");
    scene.look(&mut mixer, "a reference keeps it", 8 * M);
    mixer.ok("map r 32M 8M h");
    mixer.ok("unmap r 32M 8M; release h");
    scene.look(&mut mixer, "released", 0);
    mixer.ok("create a 2M; create b 4M; map r 0 2M a; map r 2M 4M b; release a; release b; unmap r 0 6M");
    scene.look(&mut mixer, "two by one unmap", 0);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn retained_handle_needs_one_more_release() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    mixer
        .ok("tag cache; create h 4M; reserve r 8M; map r 0 4M h; release h; retain again r 3M; unmap r 0 4M");
    scene.look(&mut mixer, "kept by the retained reference", 4 * M);
    mixer.ok("map r 4M 4M again; release again");
    scene.look(&mut mixer, "mapped elsewhere", 4 * M);
    mixer.refused("retain nothing 0x1000 0");
    mixer.ok("unmap r 4M 4M");
    scene.look(&mut mixer, "gone", 0);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn host_handle_is_outside_the_sum() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    mixer.ok("create-host h 8M; create d 2M");
    mixer.beside.host_vmm_bytes = 8 * M;
    scene.look(&mut mixer, "one of each", 2 * M);
    mixer.ok("release h; release d");
    mixer.beside.host_vmm_bytes = 0;
    scene.look(&mut mixer, "none", 0);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn graph_memory_equals_the_graphs_reservation() {
    let mut scene = Scene::new(&["cuda.pool_step=32M"]);
    let mut mixer = scene.pooled();
    mixer.ok("stream s; graph g; tag graph/one; graph-alloc a g 3M; tag graph/two; graph-node b g 5M");
    scene.look(&mut mixer, "nodes cost nothing", 0);
    mixer.ok("graph-make e g");
    scene.look(&mut mixer, "neither does an executable graph", 0);
    mixer.ok("graph-launch e");
    scene.look_settled(&mut mixer, "launched", 32 * M);
    mixer.ok("graph-free g a; graph-make f g; made-end e");
    scene.look_settled(&mut mixer, "the graph's memory stays the driver's", 32 * M);
    mixer.ok("graph-launch f; graph-launch f; made-end f; graph-end g; graph-trim");
    scene.look_settled(&mut mixer, "trimmed", 0);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn captured_allocations_belong_to_the_graph() {
    let mut scene = Scene::new(&["cuda.pool_step=32M"]);
    let mut mixer = scene.pooled();
    mixer.ok("stream s; tag graph/captured; capture; async a 5M; async b 1M; async-end a; capture-end g");
    scene.look(&mut mixer, "captured only", 0);
    mixer.ok("graph-make e g; graph-launch e");
    scene.look_settled(&mut mixer, "launched", 32 * M);
    mixer.ok("tag direct; async c 2M");
    scene.look_settled(&mut mixer, "beside memory that is not captured", 64 * M);
    mixer.ok("made-end e; graph-end g; graph-trim");
    scene.look_settled(&mut mixer, "trimmed", 32 * M);
    scene.end(&mut [&mut mixer]);
}

/// The ledger's rule is that of the simulated machine, whose costs tests/gpu measures.
#[test]
fn rounding_rule_equals_the_machines() {
    let costs = concat!(env!("CARGO_MANIFEST_DIR"), "/fake-gpu/costs.txt");
    let costs = std::fs::read_to_string(costs).expect("costs");
    let cost = |key: &str| -> u64 {
        let line = costs.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix('='));
        let value = line.and_then(|line| line.split_whitespace().next()).expect("a value");
        let digits = value.trim_end_matches(['K', 'M']);
        let unit = if value.ends_with('M') {
            20
        } else if value.ends_with('K') {
            10
        } else {
            0
        };
        digits.parse::<u64>().expect("a number") << unit
    };
    let RoundingRule { granule, shared_up_to } = ROUNDING_RULE;
    assert_eq!((cost("cost.granule"), cost("cost.small_limit")), (granule, shared_up_to + 1));
}

#[test]
fn requests_of_up_to_a_mebibyte_share_granules() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    for at in 0..64 {
        mixer.ok(&format!("alloc a{at} 1M"));
    }
    scene.look(&mut mixer, "64 of 1 MiB", 64 * M);
    mixer.ok("alloc b 1048577");
    scene.look(&mut mixer, "one that is larger by a byte", 65 * M + 1);
    let pid = mixer.pid();
    let seen = scene.end(&mut [&mut mixer]);
    let of_it = seen.samples.iter().filter(|(key, ..)| key.pid == pid);
    let rounding = |tracked: i64| {
        let mut parts = of_it.clone().filter(|(_, _, sample)| sample.tracked_bytes == Some(tracked));
        parts.find_map(|(_, _, sample)| sample.parts).map(|parts| parts.rounding_bytes)
    };
    assert_eq!(rounding(64 * M), Some(0), "two of 1 MiB fill a granule");
    assert_eq!(rounding(65 * M + 1), Some(M - 1));
}

/// Imports are reported with their size, outside of the sum. NVML may charge them to the importer as well.
#[test]
fn imported_memory_is_outside_the_sum() {
    imports(0);
}

#[test]
fn imports_that_nvml_charges_to_the_importer_too() {
    imports(100);
}

fn imports(percent: i64) {
    let charged = format!("cost.import_percent={percent}");
    let mut scene = Scene::new(&["cuda.pool_step=32M", &charged]);
    let (mut owner, mut guest) = (scene.pooled(), scene.pooled());
    owner.ok("tag shared; alloc a 7M; create h 4M; pool p; pool-keeps p 0xffffffffffffffff; stream s; async-from x p 1M");
    let ipc = owner.ok("ipc-get a").text;
    let fd = owner.ok("export h").number;
    let pool = owner.ok("export-pool p").number;
    let pointer = owner.ok("export-pointer x").text;
    let owned = 7 * M + 4 * M + 32 * M;
    scene.look(&mut owner, "the owner", owned);
    let pid = owner.pid();
    guest.ok(&format!("ipc-open a {ipc}; import-pool p {pool}; import-pointer x p {pointer}"));
    guest.ok(&format!("alloc own 1M; import h {pid} {fd}; reserve r 4M; map r 0 4M h"));
    guest.beside.imported_bytes = 7 * M + M + 4 * M;
    scene.look(&mut guest, "the guest", M);
    scene.look(&mut owner, "the owner, with a guest", owned);
    owner.refused(&format!("ipc-open b {ipc}")); // not its own handle
    guest.refused("ipc-close own");
    guest.refused("free a");
    guest.ok("ipc-close a; unmap r 0 4M; release h; async-end x");
    guest.beside.imported_bytes = 0;
    scene.look(&mut guest, "the guest, without", M);
    owner.ok(&format!("free a; close {fd}; release h; async-end x; pool-end p"));
    scene.look(&mut owner, "the owner, without", 0);
    let pid = guest.pid();
    let seen = scene.end(&mut [&mut owner, &mut guest]);
    let steps = &seen.process(pid).accounts[0].steps;
    let imported = steps.iter().filter(|step| step.cause == "memory imported");
    let bytes: i64 = imported.map(|step| step.bytes).sum();
    assert_eq!(bytes, 12 * M * percent / 100, "{steps:#?}");
}

#[test]
fn external_memory_belongs_to_its_exporter() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    mixer.ok("alloc a 1M; external m 6M; external-map b m 2M 4M");
    mixer.beside.imported_bytes = 6 * M;
    scene.look(&mut mixer, "imported", M);
    mixer.refused("external-end 0x10");
    scene.look(&mut mixer, "after a refusal", M);
    mixer.ok("external-end m");
    mixer.beside.imported_bytes = 0;
    scene.look(&mut mixer, "given back", M);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn multicast_objects_use_no_memory() {
    let mut scene = Scene::new(&["devices=2"]);
    let mut mixer = scene.mixer();
    mixer.ok("tag team; multicast t 4M; multicast-add t 0; create h 4M; multicast-bind t h 4M");
    scene.look(&mut mixer, "the bound handle alone", 4 * M);
    mixer.ok("reserve r 8M; map r 0 4M t; map r 4M 4M h");
    scene.look(&mut mixer, "both mapped", 4 * M);
    mixer.ok("unmap r 0 4M; multicast-unbind t 0 4M; release t");
    scene.look(&mut mixer, "without the object", 4 * M);
    mixer.ok("release h; unmap r 4M 4M");
    scene.look(&mut mixer, "without the handle", 0);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn destroyed_context_frees_its_allocations() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.pooled();
    mixer.ok(
        "tag first; alloc a 3M; device 0; context c; tag second; alloc b 5M; alloc s 1000; array t 1024 1024",
    );
    mixer.ok(
        "managed m 1M; pinned n 1M; create h 2M; pool-default p; pool-keeps p 0xffffffffffffffff; async x 1M",
    );
    (mixer.beside.managed_bytes, mixer.beside.pinned_bytes) = (M, M);
    let lasting = 3 * M + 2 * M + 32 * M;
    scene.look(&mut mixer, "in two contexts", lasting + 5 * M + 1000 + 4 * M);
    mixer.ok("context-end c");
    (mixer.beside.managed_bytes, mixer.beside.pinned_bytes) = (0, 0);
    scene.look(&mut mixer, "in one: handles and pools are the device's", lasting);
    mixer.refused("context-end c");
    mixer.refused("free b");
    mixer.ok("device 0; free a");
    scene.look(&mut mixer, "without the first", lasting - 3 * M);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn reset_frees_one_device_only() {
    let mut scene = Scene::new(&["devices=2"]);
    let mut mixer = scene.pooled();
    mixer.ok("tag one; alloc a 3M; alloc s 100; array t 1024 1024; create h 4M; reserve r 4M; map r 0 4M h");
    mixer.ok("managed m 1M; pinned n 1M; pool-default p; pool-keeps p 0xffffffffffffffff; async x 1M");
    mixer.ok("stream s; tag graph; graph g; graph-alloc y g 2M; graph-make e g; graph-launch e");
    mixer.ok("device 1; tag two; alloc b 5M");
    (mixer.beside.managed_bytes, mixer.beside.pinned_bytes) = (M, M);
    let on_first = 3 * M + 100 + 4 * M + 4 * M + 32 * M + 32 * M;
    mixer.settles(&scene.machine, &scene.daemon);
    mixer.holds(&scene.machine, &scene.daemon, "on both", &[on_first, 5 * M]);
    mixer.ok("device-reset 0; device 0");
    (mixer.beside.managed_bytes, mixer.beside.pinned_bytes) = (0, 0);
    mixer.settles(&scene.machine, &scene.daemon);
    mixer.holds(&scene.machine, &scene.daemon, "after the reset", &[0, 5 * M]);
    mixer.ok("tag three; alloc a 2M; async z 1M");
    mixer.settles(&scene.machine, &scene.daemon);
    mixer.holds(&scene.machine, &scene.daemon, "anew", &[34 * M, 5 * M]);
    mixer.ok("device-reset 1; device 1; device-reset 0; device 0");
    mixer.settles(&scene.machine, &scene.daemon);
    mixer.holds(&scene.machine, &scene.daemon, "after both", &[0, 0]);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn last_release_of_a_primary_context_frees_its_memory() {
    let mut scene = Scene::new(&["devices=2"]);
    let mut mixer = scene.mixer();
    mixer.ok("device 0; alloc a 3M; device 1; alloc b 1M; device-release 0");
    mixer.holds(&scene.machine, &scene.daemon, "with one reference left", &[3 * M, M]);
    mixer.ok("device-release 0; device 0");
    mixer.holds(&scene.machine, &scene.daemon, "without", &[0, M]);
    scene.end(&mut [&mut mixer]);
}

/// If cuptiGetContextId fails when a context is created, later callbacks still carry its number.
#[test]
fn context_with_a_late_number() {
    let mut scene = Scene::new(&["devices=2"]);
    let mut command = Mixer::command(&scene.machine, &scene.daemon);
    let mut mixer = Mixer::run(command.env("GPUMEM_SIM_CUPTI", "anonymous:1"));
    mixer.ok("device 1; alloc b 1M; device 0; alloc a 11M; device-release 0; device 0");
    mixer.holds(&scene.machine, &scene.daemon, "released", &[0, M]);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn green_context_is_a_part_of_the_primary_one() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    mixer.ok("alloc a 1M; green g; tag green; alloc b 3M; alloc s 200");
    scene.look(&mut mixer, "in both", 4 * M + 200);
    mixer.ok("free s; green-end g");
    scene.look(&mut mixer, "in the primary one", M);
    mixer.ok("device 0; free a");
    scene.look(&mut mixer, "in none", 0);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn modules_and_libraries_are_not_tracked() {
    let mut scene = Scene::new(&["cuda.module_bytes=6M"]);
    let mut mixer = scene.mixer();
    mixer.ok("alloc a 1M; module m; module n; library l; limit 0 4096; limit 2 64M");
    scene.look(&mut mixer, "loaded", M);
    mixer.ok("module-end m; library-end l");
    scene.look(&mut mixer, "unloaded", M);
    mixer.ok("module-end n; limit 0 1024");
    scene.look(&mut mixer, "all of them", M);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn blocking_free_keeps_its_bytes_until_it_returns() {
    let mut scene = Scene::new(&["latency=sleep"]);
    let mut mixer = scene.mixer();
    mixer.ok("tag slow; alloc a 8M; tag other; alloc b 1M");
    scene.look(&mut mixer, "both", 9 * M);
    scene.machine.set(&["cuda.free_us=1500000"]); // the machine itself takes the memory back half-way
    mixer.ok("later free a");
    let answer = mixer.say("join");
    scene.machine.set(&["cuda.free_us=0"]);
    assert_eq!(answer.result, 0);
    scene.look(&mut mixer, "one", M);
    let seen = scene.end(&mut [&mut mixer]);
    for sample in inside(&seen, &mixer, &answer) {
        assert!(sample.torn, "it was in flight: {sample:?}");
        assert_eq!(sample.tracked_bytes, Some(9 * M), "kept until it returns");
        assert_eq!(sample.tracked_range, Some((M, 9 * M)));
    }
}

#[test]
fn blocking_free_that_fails_keeps_its_bytes() {
    let mut scene = Scene::new(&["latency=sleep"]);
    let mut mixer = scene.mixer();
    mixer.ok("create h 4M; reserve r 4M; map r 0 4M h; release h; alloc a 2M");
    scene.machine.set(&["cuda.free_us=600000"]);
    mixer.ok("later array-end a"); // it is none
    assert_ne!(mixer.say("join").result, 0);
    mixer.ok("later release h"); // once too often
    assert_ne!(mixer.say("join").result, 0);
    scene.machine.set(&["cuda.free_us=0"]);
    scene.look(&mut mixer, "afterwards", 6 * M);
    mixer.ok("unmap r 0 4M");
    scene.look(&mut mixer, "unmapped", 2 * M);
    scene.end(&mut [&mut mixer]);
}

#[test]
fn blocking_allocation_counts_when_it_returns() {
    let mut scene = Scene::new(&["latency=sleep"]);
    let mut mixer = scene.mixer();
    mixer.ok("alloc a 1M");
    scene.look(&mut mixer, "one", M);
    scene.machine.set(&["cuda.alloc_us=1500000"]);
    mixer.ok("later alloc b 8M");
    let answer = mixer.say("join");
    scene.machine.set(&["cuda.alloc_us=0"]);
    assert_eq!(answer.result, 0);
    scene.look(&mut mixer, "both", 9 * M);
    mixer.ok("free b");
    scene.look(&mut mixer, "one again", M);
    let seen = scene.end(&mut [&mut mixer]);
    for sample in inside(&seen, &mixer, &answer) {
        assert!(sample.torn, "it was in flight: {sample:?}");
        assert_eq!(sample.tracked_bytes, Some(M), "not before it returns");
    }
}

#[test]
fn failed_allocation_counts_nothing() {
    let mut scene = Scene::new(&["memory=4G"]);
    let mut mixer = scene.pooled();
    mixer.ok("tag full; alloc a 2G");
    for kind in ["alloc x", "pitch x 1", "create x", "async x"] {
        mixer.refused(&format!("{kind} 2G"));
    }
    mixer.refused("array x 1M 512");
    scene.look(&mut mixer, "after failures of every kind", 2 * G);
    mixer.ok("free a; alloc b 2G");
    scene.look(&mut mixer, "with the place used again", 2 * G);
    scene.end(&mut [&mut mixer]);
}

/// Everything is live when it is killed: its memory stays known to the end.
#[test]
fn killed_process_keeps_its_last_amounts() {
    let mut scene = Scene::new(&["cuda.pool_step=32M"]);
    let mut mixer = scene.pooled();
    mixer.ok("tag all; alloc a 3M; alloc s 100; array t 1024 1024; create h 4M; reserve r 4M; map r 0 4M h; release h");
    mixer.ok("managed m 1M; pinned n 1M; pool-default p; pool-keeps p 0xffffffffffffffff; async x 1M; external y 1M");
    (mixer.beside.managed_bytes, mixer.beside.pinned_bytes, mixer.beside.imported_bytes) = (M, M, M);
    scene.look_settled(&mut mixer, "all of it", 3 * M + 100 + 4 * M + 4 * M + 32 * M);
    mixer.kill();
    scene.compare(&mut [&mut mixer]);
}

/// Segments and blocks explain memory, and add none.
#[test]
fn blocks_of_a_framework_add_nothing() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    mixer.ok("caching p; tag reserved; alloc a 20M; segment p a 20M; tag layer; block p a 0 5M");
    scene.look(&mut mixer, "a segment", 20 * M);
    mixer.ok("block p a 8M 512; create h 4M; reserve r 4M; map r 0 4M h; segment p r 4M");
    mixer.ok("tag cache; block p r 2M 1M");
    scene.look(&mut mixer, "blocks in memory of two kinds", 24 * M);
    mixer.ok("block-end p a 0; block-end p r 2M; segment-end p r 4M; unmap r 0 4M; release h");
    scene.look(&mut mixer, "one block", 20 * M);
    mixer.ok("block-end p a 8M; segment-end p a 20M; free a");
    scene.look(&mut mixer, "none", 0);
    scene.end(&mut [&mut mixer]);
}

/// The agent has its own clock, and samples are joined by time: each record must lie within its call.
#[test]
fn record_times_lie_within_their_calls() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    let mut calls = Vec::new();
    for bytes in 1..400_u64 {
        let answer = mixer.ok(&format!("alloc a{bytes} {bytes}"));
        calls.push((bytes, answer.began_ns, answer.ended_ns));
        if bytes % 100 == 0 {
            scene.look(&mut mixer, "on the way", (1..=bytes as i64).sum());
        }
    }
    scene.look(&mut mixer, "all of them", (1..400).sum());
    scene.end(&mut [&mut mixer]);
    let recorded = mixer::allocations(&scene.daemon.recording, mixer.pid());
    assert_eq!(recorded.len(), calls.len());
    let early = |(at, (_, began, _)): (&(u64, u64), &(u64, u64, u64))| began.saturating_sub(at.0);
    let late = |(at, (_, _, ended)): (&(u64, u64), &(u64, u64, u64))| at.0.saturating_sub(*ended);
    let earliest = recorded.iter().zip(&calls).map(early).max();
    let latest = recorded.iter().zip(&calls).map(late).max();
    for (i, (at, call)) in recorded.iter().zip(&calls).enumerate().filter(|(i, _)| i % 20 == 0) {
        println!("{i}: {} {}", at.0 as i64 - call.1 as i64, at.0 as i64 - call.2 as i64);
    }
    println!("at most {earliest:?} ns before the call and {latest:?} after it");
    assert!(recorded.iter().zip(&calls).all(|(at, call)| at.1 == call.0), "in order");
    assert!(earliest <= Some(50_000) && latest <= Some(50_000));
}

#[test]
fn reset_frees_segments_and_blocks() {
    let mut scene = Scene::new(&[]);
    let mut mixer = scene.mixer();
    mixer.ok("caching p; alloc a 4M; segment p a 4M; tag layer; block p a 0 1M; block p a 2M 512");
    mixer.ok("alloc b 2M; segment p b 2M; block p b 0 512K");
    scene.look(&mut mixer, "two segments", 6 * M);
    mixer.ok("device-reset 0; device 0");
    scene.look(&mut mixer, "none", 0);
    mixer.ok("tag anew; alloc a 2M; segment p a 2M; block p a 0 1M; block p a 1M 512");
    scene.look(&mut mixer, "one of another size at the same address", 2 * M);
    mixer.ok("alloc b 2M; segment p b 2M; block p b 0 512K; block p b 512K 1024");
    scene.look(&mut mixer, "and one behind it", 4 * M);
    mixer.ok("block-end p a 0; tag later; block p a 0 512");
    scene.look(&mut mixer, "a block less, a block more", 4 * M);
    scene.end(&mut [&mut mixer]);
}
