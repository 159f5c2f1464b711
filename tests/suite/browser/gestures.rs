//! Unusual gestures on the timeline of a report page: tiny, reversed, interrupted and beside the picture.
use super::html_report::{Opened, shown_part};
use gpumem_tests::pages::{Training, training};
use serde_json::{Value, json};

/// A report page whose timeline is visible.
struct Timeline(Opened);

impl Timeline {
    fn open(name: &str) -> Option<Self> {
        let mut page = Opened::of(name, &training(Training::SMALL))?;
        page.eval("document.getElementById('timeline').scrollIntoView({ block: 'center' })");
        page.browser.settle();
        Some(Timeline(page))
    }

    /// Moves or presses the mouse at a share of the width in which points are drawn.
    fn mouse(&mut self, kind: &str, share: f64, modifiers: u8) {
        let at = self.0.eval(&format!("(() => {{ const box = document.getElementById('timeline').getBoundingClientRect(); return [box.left + MARGIN.left + {share} * (box.width - MARGIN.left - MARGIN.right), box.top + 150]; }})()"));
        let [x, y]: [f64; 2] = serde_json::from_value(at).expect("two numbers");
        let event = json!({"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1, "modifiers": modifiers});
        self.0.browser.call("Input.dispatchMouseEvent", event);
    }

    fn press_and_move(&mut self, from: f64, to: f64, modifiers: u8) {
        self.mouse("mousePressed", from, modifiers);
        self.mouse("mouseMoved", (from + to) / 2.0, modifiers);
        self.mouse("mouseMoved", to, modifiers);
    }

    fn drag(&mut self, from: f64, to: f64, modifiers: u8) {
        self.press_and_move(from, to, modifiers);
        self.mouse("mouseReleased", to, modifiers);
    }

    fn is_at(&mut self, from: f64, to: f64) {
        let part = shown_part(&mut self.0);
        let is_near = |one: f64, other: f64| (one - other).abs() < 0.01;
        assert!(is_near(part.0, from) && is_near(part.1, to), "{part:?}, not {from} to {to}");
    }

    fn text(&mut self, id: &str) -> String {
        let text = self.0.eval(&format!("document.getElementById('{id}').textContent"));
        text.as_str().expect("a text").to_owned()
    }
}

#[test]
fn drags_are_limited_to_the_shown_part_and_may_be_reversed() {
    let Some(mut timeline) = Timeline::open("beside") else { return };
    timeline.drag(0.75, 0.25, 0);
    timeline.is_at(0.25, 0.75);
    timeline.drag(0.5, 1.3, 0);
    timeline.is_at(0.5, 0.75);
    // The area that a drag marks is in the picture.
    timeline.press_and_move(0.5, 1.3, 0);
    let beyond = timeline.0.eval("[...document.querySelectorAll('#timeline .range')].filter((it) => Number(it.getAttribute('width')) > 0 && it.getBoundingClientRect().right > document.querySelector('#timeline svg').getBoundingClientRect().right - MARGIN.right + 1).length");
    assert_eq!(beyond, json!(0));
    timeline.mouse("mouseReleased", 0.5, 0);
    timeline.0.browser.key("0");
    // Nothing of this drag is in the picture.
    timeline.drag(-0.02, -0.06, 0);
    timeline.is_at(0.0, 1.0);
    timeline.0.is_quiet();
}

#[test]
fn escape_ends_a_drag_and_a_redraw_releases_the_pointer() {
    let Some(mut timeline) = Timeline::open("ended") else { return };
    timeline.press_and_move(0.25, 0.75, 0);
    timeline.0.browser.key("Escape");
    timeline.mouse("mouseReleased", 0.75, 0);
    timeline.is_at(0.0, 1.0);
    assert_eq!(timeline.0.eval("state.isHeld"), json!(false));
    // The keyboard changes the rows while the mouse drags.
    timeline.press_and_move(0.25, 0.75, 0);
    assert_eq!(timeline.0.eval("state.isHeld"), json!(true));
    timeline.0.eval("document.querySelector('input[name=by]:not(:checked)').click()");
    assert_eq!(timeline.0.eval("state.isHeld"), json!(false));
    timeline.mouse("mouseReleased", 0.75, 0);
    timeline.is_at(0.0, 1.0);
    timeline.drag(0.25, 0.75, 0);
    timeline.is_at(0.25, 0.75);
    timeline.0.is_quiet();
}

#[test]
fn times_within_a_second_differ_and_a_moment_has_its_label() {
    let Some(mut timeline) = Timeline::open("fine") else { return };
    for _ in 0..12 {
        timeline.drag(0.51, 0.5, 0);
    }
    let (from, to) = shown_part(&mut timeline.0);
    assert!(to - from >= 1.0 / 4097.0 && to - from < 1.0 / 4000.0, "{from} {to}");
    let shown = timeline.text("shown");
    let (from, to) =
        shown.strip_prefix("shown: ").and_then(|shown| shown.split_once(" to ")).expect("two times");
    assert!(from != to && from.contains('.'), "{shown}");
    // A range without a point of the course has the point that is valid at its begin.
    timeline.drag(0.4, 0.6, 1);
    let [t, from, to]: [f64; 3] =
        serde_json::from_value(timeline.0.eval("[state.chosen.t, ...state.chosen.range]"))
            .expect("three times");
    assert!(t <= to && from < to, "{t} {from} {to}");
    let caption = timeline.0.eval("document.querySelector('#strip figcaption').textContent").to_string();
    let (_, range) = caption.split_once("the fullest moment from ").expect("a range");
    let (from, to) = range.split_once(" to ").expect("two times");
    assert!(!to.starts_with(from), "{caption}");
    // The label of the chosen moment is on no other one, at each moment.
    timeline.0.browser.key("0");
    for at in 0..10 {
        let share = f64::from(at) / 10.0 + 0.02;
        timeline.mouse("mousePressed", share, 0);
        timeline.mouse("mouseReleased", share, 0);
        let on_others = timeline.0.eval("(() => { const own = document.querySelector('.chosenlabel'); const one = own.getBoundingClientRect(); return [own.textContent, ...[...document.querySelectorAll('#timeline text')].filter((it) => it !== own).filter((it) => { const other = it.getBoundingClientRect(); return one.left < other.right - 1 && other.left < one.right - 1 && one.top < other.bottom - 3 && other.top < one.bottom - 3; }).map((it) => it.textContent)]; })()");
        assert_eq!(on_others, json!(["shown below"]), "{share}");
    }
    timeline.0.is_quiet();
}

#[test]
fn a_window_and_a_theme_that_change_during_a_drag_do_not_disturb_it() {
    let Some(mut timeline) = Timeline::open("changed") else { return };
    timeline.press_and_move(0.25, 0.5, 0);
    timeline.0.browser.show(800, 800, true);
    timeline.0.eval("document.getElementById('timeline').scrollIntoView({ block: 'center' })");
    timeline.0.browser.settle();
    timeline.mouse("mouseMoved", 0.7, 0);
    timeline.mouse("mouseReleased", 0.7, 0);
    let (from, to) = shown_part(&mut timeline.0);
    assert!(from < to && to - from < 1.0, "{from} {to}");
    let wrong = timeline.0.eval("[...document.querySelectorAll('#timeline svg *')].filter((it) => [...it.attributes].some(({ value }) => /NaN|Infinity|undefined/.test(value))).map((it) => it.outerHTML)");
    assert_eq!(wrong, Value::Array(Vec::new()));
    timeline.0.is_quiet();
}
