//! The list of processes on the live page: order, search, legend, narrow windows, and processes that have ended.
use super::live_page::{HOLDS, Place, WIDE, WRONG, is_quiet, wait};
use serde_json::json;

#[test]
fn processes_are_readable_sorted_and_found() {
    let place = Place::new(&["devices=1", "memory=16G"]);
    let Some(mut browser) = place.browser() else { return };
    let small = place.trainer(&[HOLDS], "holding");
    let mut large = place.trainer(&[HOLDS, &["--seed", "2", "--leak", "64"]], "holding");
    place.key(small.pid(), 1);
    place.key(large.pid(), 1);
    browser.visit(&place.url("/"));
    wait(&mut browser, "two rows", "document.querySelectorAll('tr[data-pid]').length === 2");
    let pids = "[...document.querySelectorAll('tr[data-pid]')].map((row) => Number(row.dataset.pid))";
    let largest_first = json!([large.pid(), small.pid()]);
    wait(&mut browser, "the largest first", &format!("JSON.stringify({pids}) === '{largest_first}'"));
    for width in [360, 800, 1400] {
        browser.show(width, 800, false);
        let narrowest = browser
            .eval("Math.min(...[...document.querySelectorAll('td.who')].map((cell) => cell.clientWidth))");
        assert!(narrowest.as_u64() >= Some(90), "{width}: {narrowest}");
        assert_eq!(
            (browser.eval(WIDE), browser.eval("document.documentElement.scrollWidth")),
            (json!([]), json!(width))
        );
    }
    // The legend has no kind of memory without bytes.
    let legend = browser.eval("document.querySelector('#devices .keys').textContent").to_string();
    assert!(legend.contains("Untrackable") && legend.contains("free"), "{legend}");
    for absent in ["rest of the host", "opaque pools", "predates", "without an agent"] {
        assert!(!legend.contains(absent), "{legend}");
    }
    let mut by_pid = [large.pid(), small.pid()];
    by_pid.sort_unstable();
    browser.eval("document.querySelector('input[name=sort][value=pid]').click()");
    assert_eq!(browser.eval(pids), json!(by_pid));
    // Rows without the word become one row, so the columns still add up.
    browser.eval(&format!("(() => {{ const find = document.getElementById('find'); find.value = '{}'; find.dispatchEvent(new Event('input')); }})()", small.pid()));
    assert_eq!(browser.eval(pids), json!([small.pid()]));
    wait(&mut browser, "sums", "document.querySelectorAll('tfoot tr.sum').length === 1");
    assert_eq!(browser.eval(WRONG), json!([]));
    assert_eq!(browser.eval("document.getElementById('ended')"), json!(null));
    large.signal("KILL");
    large.end();
    let command = "/^gpumemctl report r[12]$/.test(document.querySelector('#ended code')?.textContent)";
    wait(&mut browser, "the run of the ended process", command);
    // The link leads to its report, which is not requested again.
    let link = browser.eval("document.querySelector('#ended a').getAttribute('href')");
    browser.visit(&place.url(link.as_str().expect("a path")));
    wait(&mut browser, "its report", "document.querySelector('#statement [data-part=tracked]') !== null");
    let shown = browser.eval("document.querySelector('header').textContent");
    let shown = shown.to_string();
    assert!(
        shown.contains("ended; last numbers as of") && shown.contains(&large.pid().to_string()),
        "{shown}"
    );
    is_quiet(&mut browser, &place);
}
