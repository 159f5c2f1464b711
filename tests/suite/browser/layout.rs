//! Layout of the report page and the live pages in windows of three widths: nothing is cut, nothing overlaps, and each area of a
//! picture is in its legend.
use super::html_report::{Opened, report};
use super::live_page::{HOLDS, Place, wait};
use gpumem_model::run::{Cell, Class, Run};
use gpumem_report::html;
use gpumem_tests::browser::Browser;
use gpumem_tests::hostile;
use gpumem_tests::pages::{Training, training, with_blocks};
use serde_json::{Value, json};

/// Expression for the faults of the layout, which `make shots` evaluates too.
const FAULTS: &str = include_str!("../../tools/layout.js");

fn has_no_fault(browser: &mut Browser, name: &str) {
    for width in [360, 800, 1400] {
        browser.show(width, 800, false);
        browser.settle();
        assert_eq!(browser.eval(FAULTS), json!([]), "{name}, {width}");
    }
}

/// A training run that kept outputs until the device was full.
fn leaking() -> Run {
    let mut run = training(Training { has_oom: true, ..Training::SMALL });
    let tag = Some("GPT/lm_head".to_owned());
    run.cells.push(Cell { class: Class::Block, tag, phase: Some("forward".into()), ..Cell::default() });
    let cell = u32::try_from(run.cells.len()).expect("few cells") - 1;
    let device = &mut run.devices[0];
    let held = |number: usize| (number as i64 + 20) << 28;
    for (number, point) in device.details.timeline.points.iter_mut().enumerate() {
        point.amounts.push((cell, held(number)));
    }
    let most = held(device.details.timeline.points.len());
    for moment in [&mut device.last, &mut device.peak] {
        moment.amounts.push((cell, most));
        moment.tracked_bytes = moment.tracked_bytes.map(|bytes| bytes + most);
    }
    run
}

/// Returns report pages by name: a healthy run, a leak, memory that ran out, a process on 8 GPUs, a job of 64 processes, and names
/// that look like markup.
pub(super) fn report_pages() -> Vec<(&'static str, String)> {
    let rank = |rank: u32| {
        let mut run = training(Training { layers: 2, ..Training::SMALL });
        run.process.pid += rank;
        run.process.claims.insert("rank".into(), rank.to_string());
        run
    };
    let job: Vec<Run> = (0..64).map(rank).collect();
    let of_job: Vec<_> = job.iter().map(report).collect();
    let one = |run: &Run| html::html(&report(run));
    vec![
        ("healthy", one(&with_blocks(training(Training::SMALL)))),
        ("leak", one(&leaking())),
        ("oom", one(&training(Training { has_oom: true, ..Training::SMALL }))),
        ("eight", one(&training(Training::EIGHT))),
        ("processes", html::group("64 processes of job 8812", &of_job, "gpumemctl report --job 8812")),
        ("hostile", one(&hostile::run())),
    ]
}

#[test]
fn report_pages_have_no_fault_in_their_layout() {
    for (name, html) in report_pages() {
        let Some(mut page) = Opened::page(&format!("layout-{name}"), &html) else { return };
        has_no_fault(&mut page.browser, name);
        page.is_quiet();
    }
}

#[test]
fn live_pages_have_no_fault_in_their_layout() {
    let place = Place::new(&["devices=8", "memory=16G"]);
    let Some(mut browser) = place.browser() else { return };
    let leaking = place.trainer(&[HOLDS, &["--devices", "0,1", "--leak", "64"]], "holding");
    let key = place.key(leaking.pid(), 2);
    let _others = place.hold(62, 8);
    browser.visit(&place.url("/"));
    wait(&mut browser, "64 rows", "document.querySelectorAll('tr[data-pid]').length === 64");
    has_no_fault(&mut browser, "64 processes");
    browser.visit(&place.url(&format!("/process/{key}")));
    wait(&mut browser, "numbers", "document.querySelector('#statement') !== null");
    has_no_fault(&mut browser, "a process");
}

/// Names of the areas of the course, from the bottom.
const AREAS: &str = "courseOf(here().process, here().device).bands.map((band) => band.name)";

#[test]
fn what_grows_is_drawn_above_what_is_steady() {
    let Some(mut page) = Opened::of("order", &leaking()) else { return };
    page.eval("document.querySelector('input[name=by][value=\"1\"]').click()");
    let areas: Vec<String> = serde_json::from_value(page.eval(AREAS)).expect("names");
    let place = |name: &str| {
        areas.iter().position(|area| area == name).unwrap_or_else(|| panic!("{name} in {areas:?}"))
    };
    assert!(place("parameters") < place("activations"), "{areas:?}");
    assert!(place("optimizer state") < place("retained forward outputs"), "{areas:?}");
}

#[test]
fn composition_begins_with_the_largest_part_even_without_a_category() {
    let mut run = training(Training::SMALL);
    run.cells.push(Cell { class: Class::Block, tag: Some("history".into()), ..Cell::default() });
    let cell = u32::try_from(run.cells.len()).expect("few cells") - 1;
    let peak = &mut run.devices[0].peak;
    peak.amounts.push((cell, 1 << 36));
    peak.tracked_bytes = peak.tracked_bytes.map(|bytes| bytes + (1 << 36));
    let Some(mut page) = Opened::of("others", &run) else { return };
    let names: Value = page.eval(
        "[...document.querySelectorAll('#grouping-structure tbody .pick')].map((it) => it.textContent)",
    );
    assert_eq!((&names[0], &names[1]), (&json!("Others"), &json!("activations")), "{names}");
}

#[test]
fn each_kind_of_memory_without_a_category_has_its_own_pattern() {
    let Some(mut page) = Opened::of("patterns", &training(Training::SMALL)) else { return };
    page.eval("['untrackable', 'idle', 'free', 'others'].forEach((kind) => { const made = document.createElement('span'); made.className = kind; made.id = 'kind-' + kind; document.body.append(made); })");
    for dark in [false, true] {
        page.browser.show(1280, 800, dark);
        let ground = |page: &mut Opened, kind: &str| {
            page.eval(&format!("(() => {{ const style = getComputedStyle(document.getElementById('kind-{kind}')); return [style.backgroundImage, style.backgroundColor]; }})()"))
        };
        let patterns = ["untrackable", "idle", "free"].map(|kind| ground(&mut page, kind)[0].to_string());
        assert!(patterns.iter().all(|pattern| pattern.contains("gradient")), "{patterns:?}");
        assert!(patterns[0] != patterns[1] && patterns[1] != patterns[2], "{patterns:?}");
        let others = ground(&mut page, "others");
        assert!(others[0] == "none" && others[1] != "rgb(255, 255, 255)", "{others}");
    }
}

#[test]
fn a_job_lists_its_ranks_in_order_and_shows_the_process_with_a_problem() {
    let ranks: Vec<Run> = (0..12)
        .rev()
        .map(|rank| {
            let mut run = training(Training { has_oom: rank == 7, ..Training::SMALL });
            run.process.pid = 500 + rank;
            run.process.claims.insert("rank".into(), rank.to_string());
            run
        })
        .collect();
    let reports: Vec<_> = ranks.iter().map(report).collect();
    let html = html::group("12 processes", &reports, "gpumemctl report --job 8812");
    let Some(mut page) = Opened::page("ranks", &html) else { return };
    let shown = page.eval(
        "[...document.querySelectorAll('.overview tbody tr')].map((row) => Number(row.cells[0].textContent))",
    );
    assert_eq!(shown, json!((0..12).collect::<Vec<_>>()));
    let title = page.eval("document.getElementById('device-h').textContent").to_string();
    assert!(title.contains("pid 507"), "{title}");
    assert_eq!(page.eval("document.querySelector('#answer a').getAttribute('href')"), json!("#device-7"));
    page.is_quiet();
}

#[test]
fn a_long_overview_scrolls_in_a_box_and_shows_the_chosen_device() {
    let pages = report_pages();
    let (_, html) = pages.iter().find(|(name, _)| *name == "processes").expect("a job");
    let Some(mut page) = Opened::page("overview", html) else { return };
    let is_shown = "(() => { const [box, row] = ['.tall', 'tr.here'].map((part) => document.querySelector('#overview ' + part).getBoundingClientRect()); return row.top >= box.top && row.bottom <= box.bottom && box.height < innerHeight; })()";
    for place in [60, 3] {
        page.eval(&format!("location.hash = '#device-{place}'"));
        page.browser.settle();
        assert_eq!((page.eval("state.place"), page.eval(is_shown)), (json!(place), json!(true)));
    }
    // The reader's position stays when the page is drawn again.
    page.eval("document.querySelector('#overview .tall').scrollTop = 700");
    page.eval("document.querySelector('input[name=unit]:not(:checked)').click()");
    assert_eq!(page.eval("document.querySelector('#overview .tall').scrollTop"), json!(700));
    page.is_quiet();
}

#[test]
fn a_repeated_failure_has_two_marks_and_the_advice_follows_the_findings() {
    let mut run = leaking();
    let oom = run.devices[0].details.ooms.last_mut().expect("a failure");
    oom.last_ns = oom.time_ns + 5_000_000_000;
    let Some(mut page) = Opened::of("repeated", &run) else { return };
    let marks = "courseOf(here().process, here().device).events.filter(({ kind }) => kind === 'oom').map(({ t }) => t)";
    let marks: Vec<f64> = serde_json::from_value(page.eval(marks)).expect("times");
    assert!(marks.windows(2).any(|times| times[1] - times[0] == 5e9), "{marks:?}");
    page.eval("DATA.processes[0].advice = 'first change: <b>less</b>'; render({})");
    let is_next = "(() => { const lines = [...document.querySelectorAll('#answer > p')]; const at = lines.findIndex((line) => line.textContent === 'first change: <b>less</b>'); return at > 0 && lines.every((line, other) => line.matches('.alert') === other < at); })()";
    assert_eq!(page.eval(is_next), json!(true));
    page.is_quiet();
}

#[test]
fn stripes_of_patterns_are_whole_pixels_apart() {
    let Some(mut page) = Opened::of("stripes", &training(Training::SMALL)) else { return };
    let apart = page.eval("['untrackable', 'idle', 'opaque', 'predates'].map((kind) => { const made = document.createElement('span'); made.className = kind; document.body.append(made); const [, degrees, period] = /(-?\\d+)deg.* ([\\d.]+)px\\)$/.exec(getComputedStyle(made).backgroundImage); return Number(period) * (degrees % 90 ? Math.SQRT2 : 1); })");
    let apart: Vec<f64> = serde_json::from_value(apart).expect("numbers");
    assert!(apart.iter().all(|pixels| (pixels - pixels.round()).abs() < 0.01), "{apart:?}");
}
