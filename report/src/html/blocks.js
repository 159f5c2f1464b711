// Single blocks of the last steps: their place in the picture, the part that is shown, the chosen block, search, and the table.

const [B_NAME, B_BYTES, B_MADE, B_FREED, B_ADDRESS, B_COUNT] = [0, 1, 2, 3, 4, 5];
// Number of rows of the table of blocks.
const MOST_ROWS = 200;

// Stacks the blocks in the order of their allocation; a free moves down the blocks above. Returns the polygons: for each block its
// begin and end, and its lowest byte (`low`) from each time in `t` on. `tops` has the height of the stack from a time on.
function stackBlocks({ rows, to, from }) {
  const end = to - from;
  const polygons = rows.map((row) => ({ row, begin: row[B_MADE] ?? 0, end: row[B_FREED] ?? end, t: [], low: [] }));
  const events = polygons.flatMap((of) => [[of.begin, 1, of], ...(of.row[B_FREED] === null ? [] : [[of.end, 0, of]])]);
  events.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const stack = [];
  const tops = [];
  let top = 0;
  const put = (of, t, low) => {
    if (of.t[of.t.length - 1] === t) of.low[of.low.length - 1] = low;
    else { of.t.push(t); of.low.push(low); }
  };
  for (const [t, isMade, of] of events) {
    if (isMade) {
      put(of, t, top);
      stack.push(of);
      top += of.row[B_BYTES];
    } else {
      const at = stack.lastIndexOf(of);
      stack.splice(at, 1);
      for (const above of stack.slice(at)) put(above, t, above.low[above.low.length - 1] - of.row[B_BYTES]);
      top -= of.row[B_BYTES];
    }
    if (tops.length && tops[tops.length - 1][0] === t) tops[tops.length - 1][1] = top;
    else tops.push([t, top]);
  }
  return { polygons, tops };
}

// Returns the height of the polygons, the smaller blocks and the bytes in no block, from each time on at which one changes. The
// times of the levels may be rounded, so the smaller blocks get at most the tracked bytes above the polygons.
function levelsOf(data, tops) {
  const times = [...new Set([...tops.map(([t]) => t), ...data.levels.map(([t]) => t)])].sort((a, b) => a - b);
  let [top, level] = [-1, -1];
  return times.map((t) => {
    while (tops[top + 1]?.[0] <= t) top++;
    while (data.levels[level + 1]?.[0] <= t) level++;
    const [height, [, most, tracked]] = [tops[top]?.[1] ?? 0, data.levels[level] ?? [0, 0, 0]];
    const smaller = Math.min(most, Math.max(0, tracked - height));
    return { t, top: height, smaller, free: Math.max(0, tracked - height - smaller) };
  });
}

// Returns the index of the last entry of a sorted list that is at most `t`, or -1.
function lastAt(times, t) {
  let [low, high] = [0, times.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= t) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
const lowAt = (of, t) => of.low[Math.max(0, lastAt(of.t, t))];

function duration(clock, t) {
  if (clock.kind === "lines") return thousands(t) + " lines";
  const [scale, name] = t < 1e6 ? [1e3, "us"] : t < 1e9 ? [1e6, "ms"] : [1e9, "s"];
  return `${(t / scale).toPrecision(3)} ${name}`;
}

// Describes a block in words: name, bytes, life, role, source line, address.
function blockWords(process, data, { row, begin, end }) {
  const [name, line, role, phase] = data.names[row[B_NAME]];
  const at = (t) => time(process.clock, data.from + t, data.to - data.from);
  const life = row[B_MADE] === null ? (row[B_FREED] === null ? "live all the time" : `made before, freed at ${at(end)}`)
    : `made at ${at(begin)}, ` + (row[B_FREED] === null ? "not freed" : `lived ${duration(process.clock, end - begin)}`);
  const count = row[B_COUNT] > 1 ? `${thousands(row[B_COUNT])} blocks` : "";
  return [name, withUnit(row[B_BYTES]), count, life, role, phase ? "made in " + phase : "", line, row[B_ADDRESS] ? "0x" + row[B_ADDRESS].toString(16) : ""].filter(Boolean);
}

function blocksTable(process, data, polygons) {
  const largest = polygons.slice().sort((a, b) => b.row[B_BYTES] - a.row[B_BYTES] || a.begin - b.begin).slice(0, MOST_ROWS);
  const rows = largest.map((of) => {
    const [name, line, role] = data.names[of.row[B_NAME]];
    return h("tr", {}, h("th", { scope: "row" }, h("bdi", {}, name)), h("td", { class: "n" }, thousands(of.row[B_COUNT])), number(round(of.row[B_BYTES]), of.row[B_BYTES]),
      h("td", {}, of.row[B_MADE] === null ? "before" : time(process.clock, data.from + of.begin, data.to - data.from)),
      h("td", {}, of.row[B_FREED] === null ? "not freed" : duration(process.clock, of.end - of.begin)), h("td", {}, role || "-"), h("td", {}, h("bdi", {}, line || "-")));
  });
  const heads = ["name", "blocks", unit().name, "made", "lived", "role", "line"];
  return h("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "largest blocks" }, h("table", {},
    h("caption", {}, `The largest of ${thousands(data.count)} blocks; blocks with one name that are live all the time are one row`),
    h("thead", {}, h("tr", {}, heads.map((head, at) => h("th", { class: at === 1 || at === 2 ? "n" : "", scope: "col" }, head)))), h("tbody", {}, rows)));
}

// Makes the panel of blocks. For a run without single blocks it says how to get them, or is null.
function blocksPanel(process, device) {
  const { blocks: data, no_blocks: why } = device.detail;
  if (!data) return why ? { made: section("blocks", "Blocks", "Single blocks", h("p", { class: "soft" }, why)), redraw: () => {} } : null;
  const { polygons, tops } = stackBlocks(data);
  const all = { process, device, data, polygons, levels: levelsOf(data, tops) };
  const whole = [data.from, data.to];
  const steps = data.steps.length;
  const title = steps > 1 ? `Blocks of steps ${thousands(data.steps[0][1])} to ${thousands(data.steps[steps - 1][1])}` : "Single blocks over time";
  const readout = h("p", { class: "readout", id: "block" }, "Point to a block, or choose one with the arrow keys.");
  const canvas = h("div", {
    class: "plot", id: "blocks-plot", tabindex: "0", role: "slider", "aria-valuemin": "0", "aria-valuemax": String(Math.max(0, polygons.length - 1)), "aria-valuenow": "0", "aria-valuetext": "no block is chosen",
    "aria-label": "single blocks over time; left and right arrow choose the block made before or after, up and down the block above or below, plus and minus zoom, Shift and arrows move the shown part, 0 shows all", "aria-describedby": "block",
  });
  let [drawing, chosen] = [null, null];
  const choose = (of) => {
    if (!of) return;
    chosen = of;
    const words = blockWords(process, data, of);
    readout.textContent = words.join(" · ");
    canvas.setAttribute("aria-valuenow", String(polygons.indexOf(of)));
    canvas.setAttribute("aria-valuetext", words.join(", "));
    drawing?.choose(of);
  };
  const redraw = () => {
    const width = canvas.clientWidth;
    if (width < 60) return;
    const shown = shownOf(whole, "shownBlocks");
    buttons.all.disabled = state.shownBlocks === null;
    drawing = drawBlocks(all, width, shown, matches());
    canvas.replaceChildren(drawing.svg);
    if (chosen) drawing.choose(chosen);
  };
  const zoom = zoomer(whole, redraw, "shownBlocks");
  const middle = () => sum(shownOf(whole, "shownBlocks")) / 2;
  // Chooses the block before or after the chosen one, and shows it.
  const step = (by) => {
    const at = chosen ? polygons.indexOf(chosen) + by : by > 0 ? 0 : polygons.length - 1;
    choose(polygons[at]);
    if (chosen) zoom.follow(data.from + chosen.begin);
  };
  // Chooses the block above or below, in the middle of the shown part of the chosen block's life.
  const climb = (by) => {
    if (!chosen) { step(1); return; }
    const [from, to] = shownOf(whole, "shownBlocks").map((t) => t - data.from);
    const t = (Math.max(from, chosen.begin) + Math.min(to, chosen.end)) / 2;
    const live = polygons.filter((of) => of.begin <= t && of.end > t).sort((a, b) => lowAt(a, t) - lowAt(b, t));
    choose(live[live.indexOf(chosen) + by]);
  };
  const keys = {
    ArrowRight: () => step(1), ArrowLeft: () => step(-1), ArrowUp: () => climb(1), ArrowDown: () => climb(-1), Home: () => choose(polygons[0]), End: () => choose(polygons[polygons.length - 1]),
    "+": () => zoom.by(0.5, middle()), "=": () => zoom.by(0.5, middle()), "-": () => zoom.by(2, middle()), 0: zoom.all,
  };
  keyboard(canvas, zoom, keys);
  const point = (event) => { if (drawing && !state.isHeld) choose(drawing.blockAt(event.clientX, event.clientY)); };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("click", point);
  gestures(canvas, zoom, {
    whole, key: "shownBlocks", timeAt: (x) => (drawing ? drawing.timeAt(x) : whole[0]), select: () => {}, look: () => {},
    mark: (begin, end) => drawing?.mark(begin, end), lookAtRange: zoom.show,
  });

  // Returns whether a block has the searched word in its name, line, role or phase; null without a word.
  const matches = () => {
    const word = state.blockWord.trim().toLowerCase();
    const names = data.names.map((texts) => texts.slice(0, 4).some((text) => text.toLowerCase().includes(word)));
    return word === "" ? null : ({ row }) => names[row[B_NAME]];
  };
  const count = (polygons) => sum(polygons.map(({ row }) => row[B_COUNT]));
  const found = h("span", { class: "soft", role: "status" });
  const search = () => {
    const isMatch = matches();
    const hits = isMatch ? polygons.filter(isMatch) : [];
    found.textContent = isMatch ? `${thousands(count(hits))} of ${thousands(count(polygons))} blocks` : "";
    redraw();
  };
  const input = h("input", { type: "search", placeholder: "name, line or role", "aria-label": "search blocks", value: state.blockWord, oninput: (event) => { state.blockWord = event.target.value; search(); } });
  const button = (text, act) => h("button", { type: "button", onclick: act }, text);
  const buttons = { all: button("show all", zoom.all) };
  const rest = data.count - count(polygons);
  const band = (code, text) => h("span", {}, swatch(code), text);
  const made = section("blocks", "Blocks", title,
    h("p", { class: "soft" }, "Each area is a block: its height is its bytes, its width its life. Blocks with one name that live all the time are one area. A free moves the blocks above it down."),
    h("figure", {}, canvas, readout,
      h("div", { class: "buttons" }, input, found, button("zoom in", keys["+"]), button("zoom out", keys["-"]), buttons.all),
      h("p", { class: "keys" }, band(SMALLER, rest > 0 ? `smaller blocks, with ${thousands(rest)} that zooming does not show` : "blocks that are too small here"), band("idle", "in no block: cached by the allocator"), h("span", {}, "colours as in the course")),
      folded("blocks", "The largest blocks as a table", () => blocksTable(process, data, polygons))));
  return { made, redraw };
}
