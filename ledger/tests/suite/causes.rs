//! Parts of the gap and its steps, as short scripts.
use crate::common::gap::*;
use gpumem_wire::*;

#[test]
fn a_context_costs_what_is_left_of_its_step() {
    let steps = check_gap(
        |s| {
            s.context(100, "init", 1);
            s.used(200, 498);
        },
        &["parts 498 = context 498", "at 100: 498 = context 498, context created measured @init"],
    );
    assert_eq!(steps[0].library.as_deref(), Some("libcudart.so"));
    assert_eq!((steps[0].from_ns, steps[0].events), (0, 1));
}

#[test]
fn a_context_that_is_being_created_waits_for_its_end() {
    check_gap(
        |s| {
            s.creating(100);
            s.used(200, 300);
            s.context(300, "init", 1);
            s.used(400, 498);
        },
        &["parts 498 = context 498", "at 300: 498 = context 498, context created measured @init"],
    );
    let half = ["parts 300 = unexplained 300"];
    let half_way = |s: &mut Gap| {
        s.creating(100);
        s.used(200, 300);
    };
    check_gap(half_way, &half);
    check_gap(
        |s| {
            half_way(s);
            s.used(10_200, 300);
        },
        &["parts 300 = unexplained 300", "at 10200: 300 = unexplained 300, between events"],
    );
}

#[test]
fn modules_have_at_most_their_bytes_and_the_rest_is_not_explained() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.load(300, "model/net", 7, 5);
            s.used(400, 504);
            s.load(500, "model/head", 8, 3);
            s.used(600, 520);
        },
        &[
            "parts 520 = context 498 + modules 8 + unexplained 14",
            "at 100: 498 = context 498, context created measured",
            "at 300: 6 = modules 6, module loaded bound @model/net",
            "at 500: 16 = modules 2 + unexplained 14, module loaded bound @model/head, expected 2",
        ],
    );
}

#[test]
fn lazily_loaded_code_is_not_guessed() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.load(300, "net", 7, 100);
            s.used(400, 518);
            s.alloc(450, 0x1000, 2 << 20);
            s.used(500, 560);
        },
        &[
            "parts 558 = context 498 + modules 20 + unexplained 40",
            "at 100: 498 = context 498, context created measured",
            "at 300: 20 = modules 20, module loaded bound @net, expected 100",
            "at 500: 40 = unexplained 40, between events, unseen modules 80",
        ],
    );
}

#[test]
fn an_unloaded_module_gives_back_what_was_booked_for_it() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.load(110, "", 7, 10);
            s.load(120, "", 8, 4);
            s.used(200, 512);
            s.unload(300, 7);
            s.used(400, 502);
            s.unload(500, 8);
            s.used(600, 500);
        },
        &[
            "parts 500 = context 498 + unexplained 2",
            "at 100: 512 = context 498 + modules 14, context created measured",
            "at 300: -10 = modules -10, module unloaded bound",
            "at 500: -2 = modules -4 + unexplained 2, module unloaded bound, expected -4",
        ],
    );
}

#[test]
fn stacks_are_measured_where_the_model_agrees() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.stack(300, "net", 2048);
            s.used(400, 498 + 270);
            s.stack(500, "net", 1024);
            s.used(600, 498 + 270);
        },
        &[
            "parts 768 = context 498 + local 270",
            "at 100: 498 = context 498, context created measured",
            "at 300: 270 = local 270, stack limit measured @net, expected 264",
        ],
    );
}

#[test]
fn stacks_are_modelled_where_it_does_not() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.stack(300, "net", 2048);
            s.used(400, 498 + 400);
        },
        &[
            "parts 898 = context 498 + local 264 + unexplained 136",
            "at 100: 498 = context 498, context created measured",
            "at 300: 400 = local 264 + unexplained 136, stack limit model @net, expected 264",
        ],
    );
}

#[test]
fn stacks_that_come_with_a_later_kernel_are_known_by_their_size() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.stack(300, "net", 2048);
            s.used(400, 498);
            s.used(500, 518);
            s.used(600, 518 + 264);
            s.used(700, 518 + 264 + 264);
        },
        &[
            "parts 1046 = context 498 + local 264 + unexplained 284",
            "at 100: 498 = context 498, context created measured",
            "at 500: 20 = unexplained 20, between events @net",
            "at 600: 264 = local 264, stack limit measured @net",
            "at 700: 264 = unexplained 264, between events @net",
        ],
    );
}

#[test]
fn heaps_are_what_is_above_their_defaults() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.event(300, "a", 1, DriverEventKind::HeapLimit, 0, 72 << 20);
            s.used(400, 562);
            s.event(500, "b", 1, DriverEventKind::PrintfLimit, 0, 33 << 20);
            s.load(510, "c", 7, 2);
            s.used(600, 600);
        },
        &[
            "parts 600 = context 498 + modules 2 + heaps 96 + unexplained 4",
            "at 100: 498 = context 498, context created measured",
            "at 300: 64 = heaps 64, heap limit measured @a",
            "at 500: 38 = modules 2 + heaps 32 + unexplained 4, printf limit model @b, expected 32",
        ],
    );
}

#[test]
fn models_come_first_then_modules_then_the_context() {
    check_gap(
        |s| {
            s.creating(90);
            s.context(100, "init", 1);
            s.load(120, "net", 7, 100);
            s.stack(130, "net", 2048);
            s.used(200, 498 + 100 + 264);
        },
        &[
            "parts 862 = context 498 + modules 100 + local 264",
            "at 100: 862 = context 498 + modules 100 + local 264, context created measured @init",
        ],
    );
}

#[test]
fn several_contexts_share_and_each_gives_its_own_back() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.context(110, "", 2);
            s.used(200, 902);
            s.load(300, "", 7, 10);
            s.used(400, 912);
            s.end(500, 1, DestroyScope::Context);
            s.used(600, 900); // NVML's number changes late
            s.used(1100, 460);
            s.end(1200, 0, DestroyScope::Device);
            s.used(1300, 0);
        },
        &[
            "parts 0 = 0",
            "at 100: 902 = context 902, context created measured",
            "at 300: 10 = modules 10, module loaded bound",
            "at 500: -452 = context -451 + modules -10 + unexplained 9, context destroyed measured",
            "at 1200: -460 = context -451 + unexplained -9, context destroyed measured",
        ],
    );
}

#[test]
fn what_has_no_model_names_the_step_and_gets_nothing() {
    let steps = check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.event(300, "capture", 1, DriverEventKind::StreamCreated, 0, 0);
            s.event(310, "capture", 1, DriverEventKind::GraphInstantiated, 0, 0);
            s.used(400, 562);
            s.load(500, "net", 7, 2);
            s.event(510, "nccl", 1, DriverEventKind::PeerAccess, 0, 0);
            s.used(600, 600);
            s.event(700, "tail", 1, DriverEventKind::GraphDestroyed, 0, 0);
            s.used(800, 540);
        },
        &[
            "parts 540 = context 498 + modules 2 + unexplained 40",
            "at 100: 498 = context 498, context created measured",
            "at 310: 64 = unexplained 64, graph instantiated @capture",
            "at 510: 38 = modules 2 + unexplained 36, peer access @nccl",
            "at 700: -60 = unexplained -60, graph destroyed @tail",
        ],
    );
    assert_eq!(
        (steps[2].cause.as_str(), &steps[2].also[..]),
        ("peer access", &["module loaded".to_owned()][..])
    );
    assert_eq!(steps[2].events, 2);
}

#[test]
fn graphs_are_counted_without_a_sample() {
    let mut s = Gap::new();
    s.context(100, "", 1);
    let graphs = |s: &Gap| s.0.account().graphs;
    assert_eq!(graphs(&s), 0);
    s.event(300, "capture", 1, DriverEventKind::GraphInstantiated, 0, 0);
    s.event(310, "capture", 1, DriverEventKind::GraphInstantiated, 0, 0);
    s.event(320, "", 1, DriverEventKind::GraphDestroyed, 0, 0);
    assert_eq!(graphs(&s), 2);
    s.0.stamp.flags = Flags::RESTATED;
    s.event(400, "capture", 1, DriverEventKind::GraphInstantiated, 0, 0);
    assert_eq!(graphs(&s), 2, "a resync repeats it");
}

#[test]
fn rounding_is_no_step() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.alloc(300, 0x1000, (3 << 20) + 1);
            s.alloc(310, 0x9000, 100);
            s.used(400, 504);
        },
        &[
            "parts 525336475 bytes = context 498 + rounding 3145627 bytes",
            "at 100: 498 = context 498, context created measured",
        ],
    );
}

#[test]
fn a_reading_that_is_heard_of_late_has_the_rounding_of_its_own_time() {
    let mut s = Gap::new();
    s.0.control(Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance: 1, claims: "" });
    s.alloc(100, 0x1000, 3 << 20);
    s.0.watermark(0);
    s.alloc(200, 0x2000, 5 << 20);
    s.alloc(210, 0x9000, 100);
    s.0.free(0x1000);
    s.0.at(230 * MS).watermark(0);
    s.used(150, 4);
    let sample = s.0.account().latest.expect("a sample");
    let parts = sample.parts.expect("parts");
    assert!(!sample.torn);
    assert_eq!((parts.rounding_bytes, parts.unexplained_bytes), (1 << 20, 0));
}
