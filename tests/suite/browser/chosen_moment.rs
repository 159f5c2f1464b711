//! The moment of a report page: which one the bar, the groupings, the paths and the tags show.
use super::html_report::{Opened, shown_part};
use gpumem_tests::pages::{Training, training};
use serde_json::json;

/// Caption of the bar, headings below it, and the sums of the two groupings, of the paths and of the bar's first part.
const SHOWN: &str = "[document.querySelector('#strip figcaption').textContent, ...['groupings', 'paths', 'entries'].map((id) => document.getElementById(id + '-h').textContent), ...['layer', 'structure'].map((name) => Number(document.querySelector('#grouping-' + name + ' tfoot td.n').dataset.bytes)), document.querySelector('#icicle [tabindex=\"0\"]').textContent, document.querySelector('input[name=moment]:checked').value]";

#[test]
fn bar_groupings_paths_and_tags_show_the_chosen_moment() {
    let run = training(Training::SMALL);
    let Some(mut page) = Opened::of("moment", &run) else { return };
    let points = &run.devices[0].details.timeline.points;
    let peak = page.eval(SHOWN);
    assert!(peak[0].as_str().is_some_and(|caption| caption.starts_with("at the peak, MiB:")), "{peak}");
    let tracked = |page: &mut Opened| {
        page.eval("here().device.detail.course.tracked[pointAt(here().device.detail, state.chosen.t)]")
    };
    let check = |page: &mut Opened, bytes: i64, caption: &str| {
        let shown = page.eval(SHOWN);
        assert_eq!(
            (&shown[4], &shown[5], tracked(page)),
            (&json!(bytes), &json!(bytes), json!(bytes)),
            "{shown}"
        );
        for text in &shown.as_array().expect("a list")[..4] {
            assert!(text.as_str().is_some_and(|text| text.contains(caption)), "{caption}: {shown}");
        }
        assert_eq!(shown[7], json!("2"));
        assert_eq!(
            page.eval("document.querySelector('#statement [data-part=tracked] .cursor').dataset.bytes"),
            json!(bytes.to_string())
        );
    };
    // The keyboard: a moment, then the fullest moment of the shown range.
    page.eval("document.getElementById('timeline').focus()");
    for key in ["Home", "ArrowRight", "ArrowRight", "ArrowRight", "Enter"] {
        page.browser.key(key);
    }
    let time = page.eval("time(here().process.clock, state.chosen.t)");
    check(&mut page, points[3].tracked_bytes(), &format!("at {}", time.as_str().expect("a time")));
    page.browser.key("+");
    page.browser.key("r");
    let (from, to) = shown_part(&mut page);
    assert!(to - from < 0.6, "{from} {to}");
    let range = page.eval("state.chosen.range.map((t) => pointAt(here().device.detail, t))");
    let [first, last]: [usize; 2] = serde_json::from_value(range).expect("two points");
    let fullest = points[first..=last].iter().map(|point| point.tracked_bytes()).max().expect("points");
    check(&mut page, fullest, "the fullest moment from");
    // Escape returns to the peak, from wherever the focus is.
    page.eval("document.querySelector('.pick').focus()");
    page.browser.key("Escape");
    assert_eq!(page.eval(SHOWN), peak);
    // The mouse: a click, and a drag with Alt.
    page.eval("document.getElementById('timeline').scrollIntoView({ block: 'center' })");
    page.browser.key("0");
    let mut mouse = |kind: &str, share: f64, modifiers: u8| {
        let [x, y]: [f64; 2] = serde_json::from_value(page.eval(&format!(
            "(() => {{ const box = document.getElementById('timeline').getBoundingClientRect(); return [box.left + MARGIN.left + {share} * (box.width - MARGIN.left - MARGIN.right), box.top + 150]; }})()"
        ))).expect("two numbers");
        page.browser.call("Input.dispatchMouseEvent", json!({"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1, "modifiers": modifiers}));
    };
    mouse("mousePressed", 0.3, 0);
    mouse("mouseReleased", 0.3, 0);
    mouse("mousePressed", 0.5, 1);
    mouse("mouseMoved", 0.6, 1);
    mouse("mouseReleased", 0.7, 1);
    let bytes = tracked(&mut page).as_i64().expect("bytes");
    check(&mut page, bytes, "the fullest moment from");
    page.eval("[...document.querySelectorAll('button')].find((made) => made.textContent === 'back to the peak').click()");
    assert_eq!(page.eval(SHOWN), peak);
    // The bytes of all holdings add up to the tracked bytes at every point.
    let wrong = "(() => { const { detail } = here().device; const all = detail.holdings.map((holding) => courseBytes(holding, detail.course.t.length)); return detail.course.tracked.filter((bytes, at) => sum(all.map((of) => of[at])) !== bytes).length; })()";
    assert_eq!(page.eval(wrong), json!(0));
    page.is_quiet();
}
