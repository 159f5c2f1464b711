//! The page of a report, in a real browser: numbers, keys, hostile strings, no requests.
use gpumem_model::escape::escape;
use gpumem_model::run::{Mark, Run};
use gpumem_report::rules::Groupings;
use gpumem_report::text::{Layout, text};
use gpumem_report::{GroupBy, Report, html, json};
use gpumem_tests::browser::{Browser, chromium};
use gpumem_tests::hostile::{self, WORDS};
use gpumem_tests::pages::{Training, training};
use serde_json::{Value, json};
use std::path::PathBuf;

/// A page in a browser; its files are removed on drop.
pub(super) struct Opened {
    pub browser: Browser,
    file: PathBuf,
}

impl Opened {
    /// `None` where there is no browser.
    pub fn page(name: &str, page: &str) -> Option<Self> {
        let program = chromium()?;
        let dir = std::env::temp_dir().join(format!("gpumem-html-{}-{name}", std::process::id()));
        let mut browser = Browser::start(&program, dir.clone());
        let file = dir.join("page.html");
        std::fs::write(&file, page).expect("written");
        browser.show(1280, 800, false);
        browser.open(&file);
        let mut opened = Opened { browser, file };
        opened.is_quiet();
        Some(opened)
    }

    pub fn of(name: &str, run: &Run) -> Option<Self> {
        Opened::page(name, &html::html(&report(run)))
    }

    /// Asserts that the page logged nothing and requested only itself.
    pub fn is_quiet(&mut self) {
        self.browser.settle();
        assert_eq!(self.browser.logged, Vec::<String>::new());
        assert_eq!(self.browser.requests, [format!("file://{}", self.file.display())]);
    }

    pub fn eval(&mut self, expression: &str) -> Value {
        self.browser.eval(expression)
    }

    /// Bytes in the cells of a table: a list for each row, `null` for an empty cell.
    fn bytes(&mut self, table: &str, rows: &str) -> Vec<Vec<Option<i64>>> {
        let cells = format!(
            "[...document.querySelectorAll('{table} {rows} tr')].map((row) => [...row.querySelectorAll('td.n')].map((cell) => cell.dataset.bytes ?? null))"
        );
        let rows: Vec<Vec<Option<String>>> = serde_json::from_value(self.eval(&cells)).expect("a table");
        let number = |text: Option<String>| text.map(|text| text.parse().expect("a number"));
        rows.into_iter().map(|row| row.into_iter().map(number).collect()).collect()
    }
}

pub(super) fn report(run: &Run) -> Report<'_> {
    Report::new(run, Groupings::of_run(run), None)
}

/// First cell of each row of the statement, and its column values.
const STATEMENT: &str = "[...document.querySelectorAll('#statement tbody tr')].map((row) => [row.dataset.part, row.querySelector('th bdi').textContent, ...[...row.querySelectorAll('td')].map((cell) => cell.textContent)])";

#[test]
fn summary_equals_the_text_report() {
    let run = training(Training::SMALL);
    let Some(mut page) = Opened::of("summary", &run) else { return };
    let output_text: Vec<Vec<String>> = serde_json::from_value(page.eval(STATEMENT)).expect("rows");
    let words = text(&report(&run), Layout::default());
    let lines: Vec<Vec<&str>> = words.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(output_text.len() > 12, "{output_text:?}");
    for row in &output_text {
        let is_told = |line: &Vec<&str>| {
            let name: Vec<&str> = row[1].split_whitespace().collect();
            line.starts_with(&name) && line[name.len()..].starts_with(&[row[2].as_str(), row[3].as_str()])
        };
        assert!(lines.iter().any(is_told), "{row:?} is not in\n{words}");
    }
    assert_eq!(
        page.eval("document.querySelector('#text pre').textContent"),
        json!(words),
        "the text is there too"
    );
}

#[test]
fn marks_are_shown_on_the_timeline() {
    let mut run = training(Training::SMALL);
    let time_ns = run.devices[0].peak.time_ns;
    let name = Some("warm-up is over</script>".to_owned());
    run.coverage.marks = vec![Mark { time_ns, name, by: "gpumemctl".to_owned() }];
    let Some(mut page) = Opened::of("marks", &run) else { return };
    // To the peak, where it is.
    page.eval("document.getElementById('timeline').dispatchEvent(new KeyboardEvent('keydown', { key: 'p', bubbles: true }))");
    let reported =
        "document.getElementById('readout').textContent.includes('mark: warm-up is over</script>')";
    assert_eq!(page.eval(reported), json!(true));
}

#[test]
fn numbers_are_those_of_the_json_report() {
    for of in [Training::SMALL, Training { has_oom: true, ..Training::HUGE }] {
        let run = training(of);
        let Some(mut page) = Opened::of("numbers", &run) else { return };
        let document: Value = serde_json::from_str(&json::json(&report(&run))).expect("JSON");
        let device = &document["devices"][0];
        for (moment, choice) in [("peak", "1"), ("last", "0")] {
            page.eval(&format!("document.querySelector('input[name=moment][value=\"{choice}\"]').click()"));
            for (table, key) in [("layer", "layers"), ("structure", "structures")] {
                let shown = page.eval(&format!(
                    "Object.fromEntries([...document.querySelectorAll('#grouping-{table} tbody tr')].map((row) => [row.querySelector('.pick').textContent, Number(row.querySelector('td.n').dataset.bytes)]))"
                ));
                let categories = device[moment][key].as_array().expect("categories");
                let known = categories.iter().filter(|category| category["bytes"] != 0);
                let mut expected: serde_json::Map<String, Value> = known
                    .map(|category| {
                        (category["name"].as_str().expect("a name").to_owned(), category["bytes"].clone())
                    })
                    .collect();
                expected.insert("pool idle".into(), device[moment]["pool_idle_bytes"].clone());
                assert_eq!(shown, Value::Object(expected), "{moment} {table}");
                let total = page.bytes(&format!("#grouping-{table}"), "tfoot")[0][0];
                assert_eq!(total, device[moment]["tracked_bytes"].as_i64());
            }
        }
        for (part, key) in
            [("used", "used_bytes"), ("tracked", "tracked_bytes"), ("untrackable", "untrackable_bytes")]
        {
            let cells = format!(
                "[...document.querySelectorAll('#statement [data-part={part}] td.n')].slice(0, 2).map((cell) => Number(cell.dataset.bytes))"
            );
            assert_eq!(page.eval(&cells), json!([device["last"][key], device["peak"][key]]), "{part}");
        }
        let steps: i64 =
            device["steps"].as_array().expect("steps").iter().filter_map(|step| step["bytes"].as_i64()).sum();
        assert_eq!(page.bytes("#gap", "tfoot")[0][0], Some(steps));
        let bridge = &device["peak"]["bridge"];
        let reported = page.eval("[...document.querySelectorAll('#bridge tbody tr')].map((row) => Number([...row.querySelectorAll('td.n')].at(-1).dataset.bytes))");
        let keys = [
            "memory_allocated_bytes",
            "idle_bytes",
            "memory_reserved_bytes",
            "outside_bytes",
            "untrackable_bytes",
            "used_bytes",
        ];
        assert_eq!(reported, json!(keys.map(|key| &bridge[key])));
    }
}

#[test]
fn every_view_adds_up_as_printed_and_to_the_byte() {
    let Some(mut page) = Opened::of("sums", &training(Training { has_oom: true, ..Training::SMALL })) else {
        return;
    };
    // Steps of the last digit, as printed.
    let printed = "(text) => Number(text.replaceAll(/[~,.+]/g, ''))";
    for unit in ["", "bytes"] {
        page.eval(&format!("document.querySelector('input[name=unit][value=\"{unit}\"]').click()"));
        for by in ["0", "1", "2"] {
            page.eval(&format!("document.querySelector('input[name=by][value=\"{by}\"]').click()"));
            page.eval("document.querySelectorAll('#entries details').forEach((details) => { details.open = true; })");
            // At every point of the course.
            page.eval("document.getElementById('timeline').focus()");
            page.browser.key("Home");
            for _ in 0..40 {
                let rows: Vec<Vec<String>> = serde_json::from_value(page.eval(STATEMENT)).expect("rows");
                let number = |text: &str| text.replace(['~', ',', '.', '+'], "").parse::<i64>().ok();
                for column in 2..5 {
                    let of = |parts: &[&str]| -> Option<i64> {
                        let cells = rows.iter().filter(|row| parts.contains(&row[0].as_str()));
                        let known: Vec<i64> = cells.filter_map(|row| number(&row[column])).collect();
                        (!known.is_empty()).then(|| known.iter().sum())
                    };
                    let tracked = of(&["category", "smaller", "others", "idle", "opaque"]);
                    assert_eq!(of(&["tracked"]), tracked, "{by} {rows:?}");
                    assert_eq!(of(&["used"]), of(&["predates", "tracked", "untrackable"]), "{by} {rows:?}");
                }
                page.browser.key("ArrowRight");
            }
            let wrong = page.eval(&format!(
                "(() => {{ const printed = {printed}; return [...document.querySelectorAll('#groupings table, #entries table, #oom table')].filter((table) => {{
                    const sum = (rows) => [...rows].reduce(([steps, bytes], row) => {{ const cell = row.querySelector('td.n'); return [steps + printed(cell.textContent), bytes + Number(cell.dataset.bytes)]; }}, [0, 0]);
                    const [[steps, bytes], [total, all]] = [sum(table.tBodies[0].rows), sum(table.tFoot.rows)];
                    return steps !== total || bytes !== all; }}).map((table) => table.textContent); }})()"
            ));
            assert_eq!(wrong, json!([]), "{unit} {by}");
        }
    }
    page.is_quiet();
}

/// Times of the shown part of the timeline as shares of the whole: (0, 1) if all is shown.
pub(super) fn shown_part(page: &mut Opened) -> (f64, f64) {
    let shares = "(() => { const { whole } = courseOf(here().process, here().device); return shownOf(whole).map((t) => (t - whole[0]) / (whole[1] - whole[0])); })()";
    serde_json::from_value(page.eval(shares)).expect("two numbers")
}

#[test]
fn timeline_zooms_and_moves_with_mouse_wheel_fingers_and_keys() {
    let Some(mut page) = Opened::of("zoom", &training(Training::SMALL)) else { return };
    page.eval("document.getElementById('timeline').scrollIntoView({ block: 'center' })");
    page.browser.settle();
    // Left edge, width and middle of the area in which points are drawn.
    let [left, width, middle]: [f64; 3] = serde_json::from_value(page.eval(
        "(() => { const box = document.getElementById('timeline').getBoundingClientRect(); return [box.left + MARGIN.left, box.width - MARGIN.left - MARGIN.right, box.top + 150]; })()",
    ))
    .expect("three numbers");
    let near = |part: (f64, f64), expected: (f64, f64)| {
        assert!(
            (part.0 - expected.0).abs() < 0.01 && (part.1 - expected.1).abs() < 0.01,
            "{part:?} {expected:?}"
        );
    };
    let mouse = |page: &mut Opened, kind: &str, share: f64, more: Value| {
        let mut event = json!({"type": kind, "x": left + share * width, "y": middle, "button": "left", "buttons": 1, "clickCount": 1});
        event.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        page.browser.call("Input.dispatchMouseEvent", event);
    };
    let drag = |page: &mut Opened, from: f64, to: f64, modifiers: u8| {
        for (kind, share) in [
            ("mousePressed", from),
            ("mouseMoved", (from + to) / 2.0),
            ("mouseMoved", to),
            ("mouseReleased", to),
        ] {
            mouse(page, kind, share, json!({"modifiers": modifiers}));
        }
    };
    let key = |page: &mut Opened, key: &str| {
        page.eval(&format!("document.getElementById('timeline').dispatchEvent(new KeyboardEvent('keydown', {{ {key}, bubbles: true }}))"));
    };
    near(shown_part(&mut page), (0.0, 1.0));
    assert_eq!(page.eval("document.getElementById('shown').textContent"), json!(""));
    // A drag shows what it covers, and with Shift it moves the shown part.
    drag(&mut page, 0.25, 0.75, 0);
    near(shown_part(&mut page), (0.25, 0.75));
    assert!(page.eval("document.getElementById('shown').textContent").to_string().contains("shown: "));
    drag(&mut page, 0.5, 0.25, 8);
    near(shown_part(&mut page), (0.375, 0.875));
    // The cursor is at the time to which the pointer points.
    mouse(&mut page, "mouseMoved", 0.4, json!({"button": "none", "buttons": 0}));
    let at = page.eval("[state.cursor, ...shownOf(courseOf(here().process, here().device).whole)]");
    let [cursor, from, to]: [f64; 3] = serde_json::from_value(at).expect("three times");
    let slot = page.eval("Math.max(...courseOf(here().process, here().device).positions.map((at, index, all) => (all[index + 1] ?? at).t - at.t))");
    let pointed = from + 0.4 * (to - from);
    assert!(cursor <= pointed && pointed <= cursor + slot.as_f64().expect("ns"), "{cursor} {pointed}");
    // Two presses show all.
    for count in [1, 2] {
        mouse(&mut page, "mousePressed", 0.5, json!({"clickCount": count}));
        mouse(&mut page, "mouseReleased", 0.5, json!({"clickCount": count}));
    }
    near(shown_part(&mut page), (0.0, 1.0));
    // The wheel scrolls the page. With Ctrl, or while the timeline has the focus, it zooms at the pointer.
    page.eval("document.activeElement.blur()");
    mouse(&mut page, "mouseWheel", 0.2, json!({"deltaX": 0, "deltaY": -100}));
    near(shown_part(&mut page), (0.0, 1.0));
    mouse(&mut page, "mouseWheel", 0.2, json!({"deltaX": 0, "deltaY": -100, "modifiers": 2}));
    near(shown_part(&mut page), (0.04, 0.84));
    key(&mut page, "key: '0'");
    page.eval("document.getElementById('timeline').focus({ preventScroll: true })");
    mouse(&mut page, "mouseWheel", 0.2, json!({"deltaX": 0, "deltaY": -100}));
    near(shown_part(&mut page), (0.04, 0.84));
    key(&mut page, "key: '0'");
    // Two fingers zoom, one moves.
    let touch = |page: &mut Opened, kind: &str, shares: &[f64]| {
        let points: Vec<Value> = shares
            .iter()
            .enumerate()
            .map(|(id, share)| json!({"x": left + share * width, "y": middle, "id": id}))
            .collect();
        page.browser.call("Input.dispatchTouchEvent", json!({"type": kind, "touchPoints": points}));
    };
    touch(&mut page, "touchStart", &[0.4]);
    touch(&mut page, "touchStart", &[0.4, 0.6]);
    touch(&mut page, "touchMove", &[0.3, 0.7]);
    touch(&mut page, "touchEnd", &[]);
    near(shown_part(&mut page), (0.25, 0.75));
    // Keys: in, out, sideways; the shown part follows the cursor.
    key(&mut page, "key: '0'");
    near(shown_part(&mut page), (0.0, 1.0));
    key(&mut page, "key: 'Home'");
    key(&mut page, "key: '+'");
    key(&mut page, "key: '+'");
    near(shown_part(&mut page), (0.0, 0.25));
    key(&mut page, "key: 'ArrowRight', shiftKey: true");
    near(shown_part(&mut page), (0.0625, 0.3125));
    key(&mut page, "key: 'End'");
    let (from, to) = shown_part(&mut page);
    assert!(to > 0.99 && to - from < 0.26, "{from} {to}");
    key(&mut page, "key: '-'");
    let (from, to) = shown_part(&mut page);
    assert!((to - from - 0.5).abs() < 0.01, "{from} {to}");
    page.eval(
        "[...document.querySelectorAll('button')].find((made) => made.textContent === 'show all').click()",
    );
    near(shown_part(&mut page), (0.0, 1.0));
    page.is_quiet();
}

#[test]
fn page_is_usable_with_the_keyboard() {
    let Some(mut page) = Opened::of("keys", &training(Training::EIGHT)) else { return };
    let at = |page: &mut Opened| page.eval("document.activeElement.id || document.activeElement.textContent");
    page.browser.key("Tab");
    assert_eq!(at(&mut page), json!("to the report"), "what skips comes first");
    // Tab reaches every element in order, and no element traps the focus.
    let mut reached = Vec::new();
    for _ in 0..120 {
        page.browser.key("Tab");
        reached.push(page.eval("document.activeElement.id || document.activeElement.name || document.activeElement.className || document.activeElement.tagName").to_string());
        assert_ne!(page.eval("getComputedStyle(document.activeElement).display"), json!("none"));
    }
    for id in ["timeline", "pick-0-0", "search", "starred"] {
        assert!(reached.iter().any(|reached| reached.contains(id)), "{id} in {reached:?}");
    }
    assert!(page.eval("document.querySelector('#icicle [tabindex=\"0\"]') !== null") == true);
    // The cursor of the timeline reads its position aloud.
    page.eval("document.getElementById('timeline').focus()");
    for (key, expected) in [("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 255)]
    {
        page.browser.key(key);
        assert_eq!(
            page.eval("document.getElementById('timeline').getAttribute('aria-valuenow')"),
            json!(expected.to_string())
        );
    }
    page.browser.key("p");
    let output_text =
        page.eval("document.getElementById('timeline').getAttribute('aria-valuetext')").to_string();
    let peak = page.eval("document.querySelector('#statement [data-part=tracked]').cells[2].textContent");
    assert!(
        output_text.contains(&format!("tracked {} MiB", peak.as_str().expect("a text"))),
        "{output_text} {peak}"
    );
    page.browser.key("n");
    assert!(page.eval("document.getElementById('readout').textContent").to_string().contains("OOM #1"));
    // Paths: down, zoom, and back.
    page.eval("document.querySelector('#icicle [tabindex=\"0\"]').focus()");
    let node = "document.activeElement.getAttribute('aria-label')";
    page.browser.key("ArrowDown");
    page.browser.key("ArrowDown");
    let below = page.eval(node);
    page.browser.key("Enter");
    assert_eq!(page.eval(node), below, "the same, over the whole width");
    assert!(page.eval("document.activeElement.clientWidth > 1000") == true);
    page.browser.key("Escape");
    assert!(page.eval(node).to_string().contains("GPT:"), "{}", page.eval(node));
    // A search sums its matches.
    page.eval("(() => { const search = document.getElementById('search'); search.focus(); search.value = 'lm_head'; search.dispatchEvent(new Event('input')); })()");
    let found = page.eval("document.querySelector('.crumbs').textContent").to_string();
    assert!(found.contains("“lm_head” is in 300 MiB"), "{found}");
    assert!(page.eval("document.querySelectorAll('#icicle .dim').length > 5") == true);
    // Another device.
    page.eval("document.querySelector('.overview a[href=\"#device-5\"]').focus()");
    page.browser.key("Enter");
    page.browser.settle();
    assert!(at(&mut page).to_string().contains("device-h"));
    assert!(page.eval("document.getElementById('device-h').textContent").to_string().contains("GPU 5"));
    page.is_quiet();
}

#[test]
fn charts_have_a_role_a_name_and_a_table() {
    let Some(mut page) = Opened::of("roles", &training(Training { has_oom: true, ..Training::SMALL })) else {
        return;
    };
    let nameless = "[...document.querySelectorAll('[role=slider], [role=tree], [role=treeitem], [role=group], section, nav, input, button, a, summary')].filter((it) => !(it.getAttribute('aria-label') || it.getAttribute('aria-labelledby') || it.textContent.trim() || it.closest('label')?.textContent.trim() || it.querySelector('[aria-label]'))).map((it) => it.outerHTML)";
    assert_eq!(page.eval(nameless), json!([]));
    assert_eq!(page.eval("[...document.querySelectorAll('svg')].filter((svg) => svg.getAttribute('aria-hidden') !== 'true').length"), json!(0));
    assert_eq!(page.eval("[...document.querySelectorAll('#summary details, #paths details')].map((details) => { details.open = true; return 1; }).length"), json!(3));
    page.browser.settle();
    let rows = page.eval("[...document.querySelectorAll('#summary details table, #paths details table')].map((table) => table.tBodies[0].rows.length)");
    assert_eq!(rows[0], json!(120), "a row for each point");
    assert!(
        rows.as_array().is_some_and(|rows| rows.len() == 3 && rows.iter().all(|rows| *rows != 0)),
        "{rows}"
    );
    let ids = page.eval("(() => { const ids = [...document.querySelectorAll('[id]')].map((it) => it.id); return ids.filter((id, at) => ids.indexOf(id) !== at); })()");
    assert_eq!(ids, json!([]), "no id twice");
    page.is_quiet();
}

#[test]
fn strings_of_a_process_are_inert() {
    let run = hostile::run();
    let page = html::html(&report(&run));
    let scripts = page.to_ascii_lowercase().matches("<script").count();
    assert_eq!((scripts, page.matches("</script>").count(), page.matches("<!--").count()), (2, 2, 0));
    assert!(!page.contains(['\u{202e}', '\u{2066}', '\u{2028}', '\u{2029}', '\0', '\u{1b}', '\u{9b}']));
    let Some(mut opened) = Opened::page("hostile", &page) else { return };
    for by in ["2", "0", "1"] {
        opened.eval(&format!("document.querySelector('input[name=by][value=\"{by}\"]')?.click()"));
        opened.eval("document.querySelectorAll('details').forEach((details) => { details.open = true; })");
        opened.browser.settle();
        assert_eq!(opened.eval("[typeof window.harm, document.scripts.length, document.querySelectorAll('img, iframe, object, embed, link, base').length]"), json!(["undefined", 2, 0]));
        assert_eq!(opened.eval("[...document.querySelectorAll('*')].filter((it) => [...it.attributes].some(({ name }) => name.startsWith('on') || name === 'style' && it.getAttribute('style').includes('url'))).length"), json!(0));
    }
    let all = opened.eval("document.querySelector('main').textContent");
    let all = all.as_str().expect("text");
    // Printable text is shown as written, without interpreting it.
    for word in WORDS {
        // Leading and trailing blanks in names are shown by their number.
        let shown = escape(word.trim());
        let reported = shown.split('/').find(|part| !part.is_empty()).unwrap_or(&shown);
        assert!(all.contains(reported), "{word}: {reported}");
    }
    assert!(all.contains("line\\u{a}feed\\u{d}\\u{2028}\\u{2029}and \\u{0} zero"));
    opened.is_quiet();
}

#[test]
fn page_is_small_and_reproducible() {
    let run = training(Training::HUGE);
    let page = html::html(&report(&run));
    assert!(page.len() < 1_500_000, "{}", page.len());
    assert_eq!(page, html::html(&report(&run)));
    // Many devices, with more names than there is room for: fewer points, the same sums.
    let mut runs: Vec<Run> =
        (0..3).map(|_| training(Training { layers: 60, devices: 8, ..Training::HUGE })).collect();
    for (rank, run) in runs.iter_mut().enumerate() {
        run.process.pid += rank as u32;
        run.cells.iter_mut().filter_map(|cell| cell.tag.as_mut()).for_each(|tag| *tag += &"&<>".repeat(60));
    }
    let reports: Vec<Report<'_>> = runs.iter().map(report).collect();
    let page = html::group("3 processes of job 8812", &reports, "gpumemctl report --job 8812");
    assert!(page.len() <= html::MAX_BYTES, "{}", page.len());
    let Some(mut opened) = Opened::page("large", &page) else { return };
    assert!(
        opened.eval("document.querySelector('footer').textContent").to_string().contains("more than fits")
    );
    assert_eq!(opened.eval("document.querySelectorAll('.overview tbody tr').length"), json!(24));
    let peak = runs[0].devices[0].peak.tracked_bytes;
    for table in ["layer", "structure"] {
        let rows = opened.bytes(&format!("#grouping-{table}"), "tbody");
        assert_eq!(Some(rows.iter().filter_map(|row| row[0]).sum::<i64>()), peak, "{table}");
    }
}

#[test]
fn answer_is_above_everything_else() {
    for has_oom in [false, true] {
        let Some(mut page) = Opened::of("answer", &training(Training { has_oom, ..Training::SMALL })) else {
            return;
        };
        let verdict = page.eval("DATA.processes[0].verdict.filter((line) => !document.getElementById('answer').textContent.includes(line))");
        assert_eq!(verdict, json!([]));
        assert!(
            !has_oom
                || page
                    .eval("document.getElementById('answer').textContent")
                    .to_string()
                    .contains("OUT OF MEMORY")
        );
        let above = "(() => { const bottom = document.getElementById('answer').getBoundingClientRect().bottom; return ['nav', '.tools', '#strip', '#statement'].filter((part) => document.querySelector(part).getBoundingClientRect().top < bottom); })()";
        assert_eq!(page.eval(above), json!([]));
    }
}

#[test]
fn narrow_page_shows_whole_names() {
    let Some(mut page) = Opened::of("names", &training(Training::SMALL)) else { return };
    page.eval("document.querySelector('input[name=by][value=\"2\"]').click()");
    page.browser.show(360, 800, false);
    let cut = page.eval("[...document.querySelectorAll('#statement th bdi')].filter((name) => name.scrollWidth > name.clientWidth).map((name) => name.textContent)");
    assert_eq!(cut, json!([]));
}

#[test]
fn page_fits_every_window_in_light_and_dark() {
    let to = std::env::var_os("GPUMEM_PICTURES").map(PathBuf::from);
    let job: Vec<Run> = (0..4)
        .map(|rank| {
            let mut run = training(Training::SMALL);
            run.process.pid += rank;
            run.process.claims.insert("rank".into(), rank.to_string());
            run
        })
        .collect();
    let runs = [
        ("small", vec![training(Training::SMALL)]),
        ("huge", vec![training(Training::HUGE)]),
        ("eight", vec![training(Training::EIGHT)]),
        ("hostile", vec![hostile::run()]),
        ("job", job),
    ];
    for (name, runs) in runs {
        let reports: Vec<Report<'_>> = runs.iter().map(report).collect();
        let html = match reports.as_slice() {
            [one] => html::html(one),
            many => html::group("4 processes of job 8812", many, "gpumemctl report --job 8812"),
        };
        let Some(mut page) = Opened::page(name, &html) else { return };
        let mut grounds = Vec::new();
        for (width, height, dark) in
            [(1280, 800, false), (1280, 800, true), (800, 600, true), (400, 700, false)]
        {
            page.browser.show(width, height, dark);
            page.browser.settle();
            let wide = page.eval(&format!("[...document.querySelectorAll('main *')].filter((it) => it.getBoundingClientRect().right > {width} + 1 && !it.closest('.scroll, svg, .hidden')).map((it) => it.outerHTML.slice(0, 200)).slice(0, 3)"));
            assert_eq!(
                (page.eval("document.documentElement.scrollWidth"), wide),
                (json!(width), json!([])),
                "{name} {width}"
            );
            // No label of the picture overlaps another.
            let collisions = "(() => { const boxes = [...document.querySelectorAll('#timeline text')].map((text) => [text.textContent, text.getBoundingClientRect()]); return boxes.flatMap(([a, one], at) => boxes.slice(at + 1).filter(([, other]) => one.left < other.right - 1 && other.left < one.right - 1 && one.top < other.bottom - 3 && other.top < one.bottom - 3).map(([b]) => a + ' on ' + b)); })()";
            assert_eq!(page.eval(collisions), json!([]), "{name} {width}");
            // A long name takes one line and shows its last part.
            let tall = "[...document.querySelectorAll('.bars .pick')].filter((it) => it.offsetHeight > 1.9 * parseFloat(getComputedStyle(it).fontSize) || it.querySelector('.path > :last-child').offsetWidth === 0).map((it) => it.textContent).slice(0, 3)";
            assert_eq!(page.eval(tall), json!([]), "{name} {width}");
            grounds.push(page.eval("getComputedStyle(document.documentElement).backgroundColor"));
            let picture = page.browser.screenshot(true);
            assert!(picture.starts_with(b"\x89PNG") && picture.len() > 20_000, "{name} {width}");
            if let Some(to) = &to {
                let theme = if dark { "dark" } else { "light" };
                std::fs::write(to.join(format!("{name}-{width}-{theme}.png")), picture).expect("written");
                std::fs::write(
                    to.join(format!("{name}-{width}-{theme}-top.png")),
                    page.browser.screenshot(false),
                )
                .expect("written");
            }
        }
        assert_eq!(
            grounds,
            ["rgb(255, 255, 255)", "rgb(20, 23, 27)", "rgb(20, 23, 27)", "rgb(255, 255, 255)"],
            "{name}"
        );
        // The reader's choice has precedence over the system's.
        page.eval("document.querySelector('input[name=theme][value=dark]').click()");
        assert_eq!(
            page.eval("getComputedStyle(document.documentElement).backgroundColor"),
            json!("rgb(20, 23, 27)")
        );
        page.is_quiet();
    }
}

#[test]
fn runs_with_little_data_have_a_page() {
    let mut bare = training(Training::SMALL);
    for device in &mut bare.devices {
        device.details = Default::default();
        device.reading = None;
    }
    let mut uncovered = bare.clone();
    uncovered.coverage = Default::default();
    for device in &mut uncovered.devices {
        for moment in [&mut device.last, &mut device.peak] {
            *moment = gpumem_model::run::Moment {
                time_ns: moment.time_ns,
                uncovered_used_bytes: moment.used_bytes().map(|used| used as u64),
                ..Default::default()
            };
        }
    }
    let mut nothing = bare.clone();
    nothing.devices.clear();
    let mut moment = bare.clone();
    moment.devices[0].series.buckets.clear();
    for (name, run) in [("bare", bare), ("uncovered", uncovered), ("nothing", nothing), ("moment", moment)] {
        for by in [None, Some(GroupBy::Tag)] {
            let page = html::html(&Report::new(&run, Groupings::of_run(&run), by));
            let Some(mut opened) = Opened::page(name, &page) else { return };
            let output_text = opened.eval("document.querySelector('main').textContent").to_string();
            let has_course = opened.eval("document.querySelector('#timeline svg') !== null");
            assert_eq!(has_course, json!(matches!(name, "bare" | "uncovered")), "{name}: {output_text}");
            assert!(
                !output_text.contains("NaN")
                    && !output_text.contains("undefined")
                    && !output_text.contains("Infinity"),
                "{name}: {output_text}"
            );
        }
    }
}
