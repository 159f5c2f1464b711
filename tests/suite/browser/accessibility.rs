//! The report page and the live page under axe-core, which finds elements that assistive technology cannot use.
use super::html_report::Opened;
use super::layout::report_pages;
use super::live_page::{HOLDS, Place, wait};
use gpumem_tests::browser::Browser;
use gpumem_tests::live::packages::npm;
use serde_json::json;

/// Returns the script of axe-core; `None` with a message if npm cannot fetch it.
fn axe() -> Option<String> {
    let dir = npm("axe", &["axe-core@4.14.1"], "node_modules/axe-core/axe.min.js")?;
    Some(std::fs::read_to_string(dir.join("node_modules/axe-core/axe.min.js")).expect("a script"))
}

/// Asserts that axe-core finds no violation in the page, with everything unfolded, in a wide and a narrow window and both themes.
fn is_accessible(browser: &mut Browser, axe: &str, name: &str) {
    browser.eval("document.querySelectorAll('details').forEach((details) => { details.open = true; })");
    browser.eval(&format!("{axe};0"));
    for (width, dark) in [(1280, false), (1280, true), (360, false)] {
        browser.show(width, 800, dark);
        let found = browser.eval("axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations.map(({ id, nodes }) => [id, ...nodes.slice(0, 3).map(({ html }) => html.slice(0, 200))]))");
        assert_eq!(found, json!([]), "{name}, {width}, dark: {dark}");
    }
    browser.show(1280, 800, false);
}

#[test]
fn report_pages_have_no_violation() {
    let Some(axe) = axe() else { return };
    for (name, html) in report_pages() {
        let Some(mut page) = Opened::page(&format!("axe-{name}"), &html) else { return };
        is_accessible(&mut page.browser, &axe, name);
    }
}

#[test]
fn live_pages_have_no_violation() {
    let Some(axe) = axe() else { return };
    let place = Place::new(&["devices=2", "memory=32G"]);
    let Some(mut browser) = place.browser() else { return };
    let trainer = place.trainer(&[HOLDS, &["--devices", "0,1"]], "holding");
    let key = place.key(trainer.pid(), 2);
    let _others = place.hold(62, 2);
    for (path, has) in [("/".to_owned(), "tr[data-pid]"), (format!("/process/{key}"), "#statement")] {
        browser.visit(&place.url(&path));
        wait(&mut browser, "numbers", &format!("document.querySelector('{has}') !== null"));
        is_accessible(&mut browser, &axe, &path);
    }
}
