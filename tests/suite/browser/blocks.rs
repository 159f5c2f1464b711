//! The picture of single blocks in a report page: its polygons, the chosen block, search, zoom and keys.
use super::html_report::Opened;
use gpumem_model::blocks::Block;
use gpumem_tests::pages::{Training, training, with_blocks};
use serde_json::{Value, json};

#[test]
fn blocks_are_stacked_without_overlap_and_add_up() {
    let Some(mut page) = Opened::of("blocks", &with_blocks(training(Training::SMALL))) else { return };
    // At times between all events: the polygons lie on each other without a hole, and with the bands they give the tracked bytes.
    let wrong = page.eval("(() => { const { data } = { data: here().device.detail.blocks }; const { polygons, tops } = stackBlocks(data); const levels = levelsOf(data, tops); const wrong = []; for (let t = 1; t < data.to - data.from; t += 7e6 + 3) { let top = 0; for (const of of polygons.filter((of) => of.begin <= t && of.end > t).sort((a, b) => lowAt(a, t) - lowAt(b, t))) { if (lowAt(of, t) !== top) wrong.push([t, of.row]); top += of.row[B_BYTES]; } const level = levels[lastAt(levels.map((level) => level.t), t)]; const tracked = (t < 2e9 ? 2000 : 2100) * 1048576; if (level.top !== top || top + level.smaller + level.free !== tracked) wrong.push([t, level, top]); } return wrong; })()");
    assert_eq!(wrong, json!([]));
    assert_eq!(
        page.eval("document.getElementById('blocks-h').textContent"),
        json!("Blocks of steps 95 to 99")
    );
    let drawn =
        page.eval("document.querySelectorAll('#blocks-plot .block').length").as_u64().expect("a number");
    assert!(drawn > 100, "{drawn}");
    page.is_quiet();
}

#[test]
fn the_sum_is_right_at_each_time_even_if_more_times_change_than_the_page_has() {
    let mut run = with_blocks(training(Training::SMALL));
    let all = &mut run.devices[0].details.blocks;
    let (from_ns, first) = (all.from_ns, all.blocks[0]);
    let made = |at: u64, bytes: u64, lives_ns: u64| Block {
        address: at << 30,
        bytes,
        made_ns: Some(from_ns + at * 333_001),
        freed_ns: Some(from_ns + at * 333_001 + lives_ns),
        ..first
    };
    (all.steps, all.tracked) = (Vec::new(), vec![(from_ns, 1 << 30)]);
    all.blocks = (1..15_000).map(|at| made(at, 1 << 20, 200_000)).collect();
    all.blocks.extend((1..100).map(|at| made(at * 150, 1 << 29, 7_000_000)));
    let Some(mut page) = Opened::of("many-blocks", &run) else { return };
    let wrong = page.eval("(() => { const data = here().device.detail.blocks; const levels = levelsOf(data, stackBlocks(data).tops); return [data.levels.length > 4000, levels.filter((level) => level.top + level.smaller + level.free !== 2 ** 30).length]; })()");
    assert_eq!(wrong, json!([true, 0]));
    page.is_quiet();
}

#[test]
fn a_block_is_chosen_by_pointer_and_keys_searched_and_zoomed() {
    let Some(mut page) = Opened::of("block-keys", &with_blocks(training(Training::SMALL))) else { return };
    page.eval("document.getElementById('blocks-plot').scrollIntoView({ block: 'center' })");
    page.browser.settle();
    let readout = |page: &mut Opened| page.eval("document.getElementById('block').textContent").to_string();
    // The pointer at the bottom is on a block that is live all the time.
    let [x, y]: [f64; 2] = serde_json::from_value(page.eval("(() => { const box = document.getElementById('blocks-plot').getBoundingClientRect(); return [box.left + box.width / 2, box.bottom - MARGIN.bottom - 2]; })()")).expect("two numbers");
    page.browser
        .call("Input.dispatchMouseEvent", json!({"type": "mouseMoved", "x": x, "y": y, "button": "none"}));
    assert!(readout(&mut page).contains("live all the time"), "{}", readout(&mut page));
    page.eval("document.getElementById('blocks-plot').focus({ preventScroll: true })");
    page.browser.key("End");
    assert!(readout(&mut page).contains("lived"), "{}", readout(&mut page));
    let value = "document.getElementById('blocks-plot').getAttribute('aria-valuenow')";
    let last = page.eval(value);
    page.browser.key("ArrowLeft");
    assert_ne!(page.eval(value), last);
    // The keys zoom this picture, and not the course.
    page.browser.key("+");
    let zoomed = page.eval("[state.shownBlocks !== null, state.shown]");
    assert_eq!(zoomed, json!([true, null]));
    page.browser.key("0");
    assert_eq!(page.eval("state.shownBlocks"), Value::Null);
    // The search highlights blocks by a part of their name.
    page.eval("(() => { const input = document.querySelector('#blocks input'); input.value = here().device.detail.blocks.names[0][0]; input.dispatchEvent(new Event('input')); })()");
    let [hits, others]: [u64; 2] = serde_json::from_value(
        page.eval("['.hit', '.dim'].map((name) => document.querySelectorAll('#blocks-plot ' + name).length)"),
    )
    .expect("two numbers");
    assert!(hits > 0 && others > 0, "{hits} {others}");
    page.eval("document.querySelectorAll('#blocks details').forEach((details) => { details.open = true; })");
    page.browser.settle();
    let rows = page.eval("document.querySelectorAll('#blocks tbody tr').length").as_u64().expect("a number");
    assert!(rows > 100, "{rows}");
    page.is_quiet();
}
