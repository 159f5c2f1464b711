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
    let place = Place::new(&["devices=8", "memory=16G"]);
    let Some(mut browser) = place.browser() else { return };
    let full = place.trainer(&[&["--steps", "100000", "--step-ms", "1", "--leak", "64"]], "ready");
    // On a device of its own: the first process leaves it no memory on the same one.
    let leak = ["--devices", "1", "--steps", "100000", "--step-ms", "20", "--no-cache", "--leak", "1"];
    let leaking = place.trainer(&[&leak], "ready");
    let healthy = place.trainer(&[HOLDS, &["--devices", "0,1,2,3,4,5,6,7"]], "holding");
    let leak = place.key(leaking.pid(), 1);
    let eight = place.key(healthy.pid(), 8);
    let _others = place.hold(62, 8);
    browser.visit(&place.url("/"));
    wait(&mut browser, "64 processes", "document.querySelectorAll('tr[data-pid]').length >= 64");
    wait(&mut browser, "the leak", "document.querySelector('#findings .problem') !== null");
    let link = format!(
        "[...document.querySelectorAll('#ended a')].find((it) => it.textContent.includes('{}'))",
        full.pid()
    );
    wait(
        &mut browser,
        "the run without memory",
        &format!("{link}?.closest('li').textContent.includes('out of memory')"),
    );
    let oom = browser.eval(&format!("{link}.getAttribute('href')"));
    is_accessible(&mut browser, &axe, "/");
    for (path, has) in [
        (format!("/process/{leak}"), "#answer .alert"),
        (format!("/process/{eight}"), "#overview"),
        (oom.as_str().expect("a path").to_owned(), "#oom"),
    ] {
        browser.visit(&place.url(&path));
        wait(&mut browser, has, &format!("document.querySelector('{has}') !== null"));
        is_accessible(&mut browser, &axe, &path);
    }
}
