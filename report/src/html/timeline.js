// Memory over time: stacked categories, untracked memory above, and NVML's line over both. Mouse and keys move a cursor,
// which shows exact numbers, and choose the shown part of the time (zoom.js).

const HEIGHT = 320;
const MARGIN = { left: 58, right: 10, top: 22, bottom: 20 };
const LANE = 15;

// Returns a step of 1, 2 or 5 times a power of ten that makes about `ticks` ticks.
function niceStep(span, ticks) {
  const rough = span / Math.max(1, ticks);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough) ?? power * 10;
}
const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

function timeTicks(clock, from, to, width) {
  const most = Math.max(2, Math.floor(width / 90));
  if (clock.kind === "lines") {
    const step = Math.max(1, niceStep(to - from, most));
    const first = Math.ceil((from + clock.base) / step) * step - clock.base;
    return Array.from({ length: 64 }, (_, at) => first + at * step).filter((t) => t <= to).map((t) => [t, time(clock, t)]);
  }
  const span = (to - from) / 1e9;
  const whole = CLOCK_STEPS.find((step) => span / step <= most) ?? Math.ceil(span / most / 86400) * 86400;
  const step = span / most < 1 ? niceStep(span, most) : whole;
  const zero = clock.base + clock.base_ns / 1e9;
  const first = Math.ceil((zero + from / 1e9) / step) * step;
  let lastDay = "";
  const label = (seconds) => {
    const t = (seconds - zero) * 1e9;
    if (step >= 1 && clock.kind === "wall") {
      // Shows the day if it differs from the previous tick's, and seconds if the step is not whole minutes.
      const [day, clockTime] = wallParts(clock, t + 1e3);
      const isNew = clock.dated && day !== lastDay;
      lastDay = day;
      if (step >= 86400) return day.slice(5);
      return (isNew ? day.slice(5) + " " : "") + (step % 60 === 0 ? clockTime.slice(0, 5) + "Z" : clockTime);
    }
    if (step >= 1) return time(clock, t + 1e3);
    const decimals = Math.max(0, Math.ceil(-Math.log10(step)));
    return clock.kind === "seconds" ? "+" + seconds.toFixed(decimals) + " s" : wallParts(clock, t + 1e3)[1].slice(0, 8) + (seconds % 1).toFixed(decimals).slice(1) + "Z";
  };
  return Array.from({ length: 64 }, (_, at) => first + at * step)
    .map((seconds) => [(seconds - zero) * 1e9, label(seconds)]).filter(([t]) => t <= to);
}

// Returns everything that can be drawn of a device's timeline.
function courseOf(process, device) {
  const { detail } = device;
  const { course } = detail;
  const stack = stackOf(detail, state.by);
  const smaller = statementRows(detail, state.by).find((row) => row.part === "smaller");
  const predatesRow = detail.statements[state.by].find((row) => row.part === "predates");
  const predates = predatesRow ? predatesRow.bytes[0] ?? predatesRow.bytes[1] : 0;
  const gaps = course.buckets.filter((bucket) => bucket[3]);
  const nearest = (buckets, t) => {
    let best = null;
    for (const bucket of buckets) if (best === null || Math.abs(bucket[0] - t) < Math.abs(best[0] - t)) best = bucket;
    return best;
  };
  // Outside the measured range, a gap is used only for points close to it.
  const span = Math.max(device.last_t, ...course.t) - Math.min(0, ...course.t);
  const near = Math.max(2 * course.width, span / 20);
  const gapAt = course.t.map((t) => nearest(gaps, t)).map((bucket, at) => {
    const t = course.t[at];
    const isBetween = gaps.length > 1 && t >= gaps[0][0] && t <= gaps[gaps.length - 1][0];
    return bucket && (isBetween || Math.abs(bucket[0] - t) <= near) ? bucket : null;
  });
  const positions = course.t.length
    ? course.t.map((t, point) => {
      const bucket = gapAt[point];
      const gap = bucket ? bucket[3][2] : null;
      const used = gap === null || predates === null ? null : predates + course.tracked[point] + gap;
      return { t, point, gap, predates, used, tracked: course.tracked[point], isCarried: bucket !== null && Math.abs(bucket[0] - t) > course.width };
    })
    : course.buckets.map((bucket) => ({
      t: bucket[0], point: null, predates, isCarried: false,
      used: bucket[1]?.[2] ?? null, tracked: bucket[2]?.[2] ?? null, gap: bucket[3]?.[2] ?? null,
    }));
  const rows = [...stack.rows].map(([code, bytes]) => ({ code, bytes, name: categoryName(state.by, code) })).filter(({ code }) => code !== SMALLER);
  const most = (row) => row.bytes.reduce((a, b) => Math.max(a, b), 0);
  // Steady bands are at the bottom: those that grow, or come and go, would move the bands above them.
  const isSteady = (row) => 4 * row.bytes.filter((bytes) => 2 * bytes >= most(row)).length >= 3 * row.bytes.length;
  rows.sort((a, b) => isSteady(b) - isSteady(a) || most(b) - most(a));
  const bands = rows.concat([
    { code: SMALLER, bytes: stack.smaller, name: smaller?.name ?? "(other names)" }, { code: OTHERS, bytes: stack.others, name: state.by === TAG ? "(no tag)" : "Others" },
    { code: "opaque", bytes: stack.opaque, name: "opaque pools" }, { code: "idle", bytes: stack.idle, name: "pool idle" },
    { code: "predates", bytes: positions.map(() => (course.t.length ? predates ?? 0 : 0)), name: "predates the agent" },
    { code: "untrackable", bytes: positions.map((at) => (course.t.length ? at.gap ?? 0 : 0)), name: "Untrackable" },
  ]).filter((band) => band.bytes.some((bytes) => bytes !== 0));
  const events = [
    ...detail.steps.map((step) => ({ kind: "gap", t: step.t, text: `Untrackable ${signed(step.bytes)} ${unit().name}: ${step.what}`, up: step.bytes >= 0 })),
    ...(detail.marks || []).map((mark) => ({ kind: "mark", t: mark.t, text: "mark: " + mark.name, name: mark.name })),
    ...detail.ooms.flatMap(({ kind, t, last_t: last, lines: [text = "out of memory"] }) => [{ kind, t, text }, ...(last > t ? [{ kind, t: last, text: "the last of these: " + text }] : [])]),
  ].sort((a, b) => a.t - b.t);
  const times = [...positions.map((at) => at.t), ...course.buckets.map((bucket) => bucket[0]), ...events.map((event) => event.t), device.last_t, device.peak_t];
  const begin = times.reduce((a, b) => Math.min(a, b), Infinity);
  const whole = [begin, Math.max(begin + 1, times.reduce((a, b) => Math.max(a, b), -Infinity))];
  return { process, device, course, stack, positions, bands, events, nearest, whole, end: device.last_t };
}

// Stacks bands: adds the lower and upper edge at each point.
function stacked(bands, count) {
  const floor = new Array(count).fill(0);
  return bands.map((band) => {
    const low = floor.slice();
    band.bytes.forEach((bytes, at) => { floor[at] += Math.max(0, bytes); });
    return { ...band, low, high: floor.slice() };
  });
}

function timeline(process, device, move) {
  const all = courseOf(process, device);
  const { positions, events, course, whole } = all;
  const described = h("p", { class: "readout", id: "readout" }, "Point at a time to read its numbers. A click shows its composition below, a drag zooms, a drag with Alt shows the fullest moment of a range; Escape returns to the peak.");
  const canvas = h("div", {
    class: "plot", id: "timeline", tabindex: "0", role: "slider", "aria-label": "memory over time; arrow keys move the cursor, Enter shows the composition there, r that of the shown range, Escape that of the peak; p goes to the peak, n and b to events, plus and minus zoom, Shift and arrows move the shown part, 0 shows all",
    "aria-valuemin": "0", "aria-valuenow": "0", "aria-valuetext": "no time is chosen", "aria-valuemax": String(Math.max(0, positions.length - 1)), "aria-orientation": "horizontal", "aria-describedby": "readout",
  });
  if (new Set([...positions.map((at) => at.t), ...course.buckets.map((bucket) => bucket[0])]).size < 2) {
    return { figure: h("p", { class: "soft" }, "No course over time: this run knows the moments of the table only."), redraw: () => {}, showChosen: () => {} };
  }
  let current = null;
  let drawing = null;

  const select = (index) => {
    current = Math.max(0, Math.min(positions.length - 1, index));
    const at = positions[current];
    state.cursor = at.t;
    move(at);
    const next = positions[current + 1]?.t ?? Infinity;
    const near = events.filter((event) => (event.t >= at.t || current === 0) && event.t < next);
    const sample = all.nearest(course.buckets.filter((bucket) => bucket[1]), at.t);
    const shown = shownOf(whole);
    const named = (t) => time(process.clock, t, shown[1] - shown[0]);
    const words = [named(at.t)];
    if (at.tracked !== null) words.push(`tracked ${withUnit(at.tracked)}`);
    if (sample) words.push(`NVML used ${withUnit(sample[1][2])}` + (Math.abs(sample[0] - at.t) > course.width ? ` (read at ${named(sample[0])})` : ""));
    else if (at.used !== null) words.push(`used ${withUnit(at.used)}`);
    if (at.gap !== null) words.push(`Untrackable ${withUnit(at.gap)}`);
    near.slice(0, 3).forEach((event) => words.push(event.text));
    if (near.length > 3) words.push(`${near.length - 3} more events`);
    described.textContent = words.join(" · ");
    canvas.setAttribute("aria-valuenow", String(current));
    canvas.setAttribute("aria-valuetext", words.join(", "));
    if (drawing) drawing.cursor(at.t);
    buttons.moment.disabled = !canLook;
  };
  // Selects the point at an index, and shows it.
  const step = (index) => {
    select(index);
    zoom.follow(positions[current].t);
  };
  const indexAt = (t) => Math.max(0, positions.findLastIndex((at) => at.t <= t));
  const toTime = (t) => step(indexAt(t));
  // Returns the time of the peak, or of the fullest point of the shown part.
  const peakTime = () => {
    const [from, to] = shownOf(whole);
    if (device.peak_t >= from && device.peak_t <= to) return device.peak_t;
    const fullness = (at) => at.tracked ?? at.used ?? 0;
    const inside = positions.filter((at) => at.t >= from && at.t <= to);
    return inside.reduce((best, at) => (fullness(at) > fullness(best) ? at : best), inside[0] ?? positions[indexAt(from)]).t;
  };
  const toEvent = (direction) => {
    const from = current === null ? -Infinity : positions[current].t;
    const until = current === null ? -Infinity : positions[current + 1]?.t ?? Infinity;
    const found = direction > 0 ? events.find((event) => event.t >= until) : events.findLast((event) => event.t < from);
    if (found) toTime(found.t);
  };
  const zoom = zoomer(whole, () => redraw());
  const zoomBy = (factor) => {
    const [from, to] = shownOf(whole);
    const t = current === null ? null : positions[current].t;
    zoom.by(factor, t !== null && t >= from && t <= to ? t : (from + to) / 2);
  };
  const { detail } = device;
  const canLook = course.t.length > 0;
  const look = (index) => { if (canLook && index !== null) lookAt(CHOSEN, positions[index].t); };
  const lookAtShown = () => { if (canLook) lookAtRange(detail, shownOf(whole)); };
  const keys = {
    Enter: () => look(current), r: lookAtShown,
    ArrowRight: () => step((current ?? -1) + 1), ArrowLeft: () => step((current ?? positions.length) - 1),
    PageDown: () => step((current ?? 0) + 16), PageUp: () => step((current ?? 0) - 16),
    Home: () => step(0), End: () => step(positions.length - 1),
    p: () => toTime(peakTime()), n: () => toEvent(1), b: () => toEvent(-1),
    "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), 0: zoom.all,
  };
  keyboard(canvas, zoom, keys);
  gestures(canvas, zoom, {
    whole,
    timeAt: (x) => (drawing ? drawing.timeAt(x) : whole[0]),
    select: (t) => select(indexAt(t)),
    mark: (from, to) => drawing?.mark(from, to),
    look: (t) => look(indexAt(t)),
    lookAtRange: (range) => { if (canLook) lookAtRange(detail, range); },
  });
  // The cursor returns to the shown moment when the pointer leaves.
  canvas.addEventListener("pointerleave", () => { if (state.chosen && !state.isHeld) select(indexAt(state.chosen.t)); });

  const redraw = () => {
    const width = canvas.clientWidth;
    if (width < 60) return;
    const shown = shownOf(whole);
    part.textContent = state.shown === null ? "" : `shown: ${shown.map((t) => time(process.clock, t, shown[1] - shown[0])).join(" to ")}`;
    buttons.all.disabled = state.shown === null;
    drawing = draw(all, width, shown);
    canvas.replaceChildren(drawing.svg);
    if (current !== null) drawing.cursor(positions[current].t);
    markChosen();
  };
  const markChosen = () => {
    drawing?.chosen(state.chosen);
    buttons.moment.disabled = current === null;
    buttons.peak.disabled = state.moment !== CHOSEN;
  };
  const button = (text, act) => h("button", { type: "button", onclick: act }, text);
  const buttons = {
    all: button("show all", zoom.all), moment: button("look at this moment", keys.Enter), range: button("look at the shown range", keys.r),
    peak: button("back to the peak", () => lookAt(PEAK)),
  };
  const part = h("span", { class: "soft", id: "shown", role: "status" });
  if (state.cursor !== null) {
    // A growing timeline is thinned at times. The point before the chosen time is then shown, and the chosen time stays.
    const chosen = state.cursor;
    toTime(chosen);
    state.cursor = chosen;
  }
  const figure = h("figure", {},
    canvas, described,
    h("div", { class: "buttons" }, button("to the peak", keys.p), events.length ? [button("previous event", keys.b), button("next event", keys.n)] : null,
      button("zoom in", keys["+"]), button("zoom out", keys["-"]), buttons.all, part),
    canLook ? h("div", { class: "buttons" }, buttons.moment, buttons.range, buttons.peak) : null,
    h("p", { class: "keys" }, legendOf(all)),
    folded("course", "The picture as a table", () => courseTable(all)),
    events.length ? folded("events", `${events.length === 1 ? "1 event" : thousands(events.length) + " events"} as a table`, () => eventTable(all)) : null);
  const showChosen = () => {
    markChosen();
    if (state.chosen) select(indexAt(state.chosen.t));
  };
  return { figure, redraw, showChosen };
}

function legendOf(all) {
  const lines = [];
  const line = (className, text) => lines.push(h("span", {}, s("svg", { width: 22, height: 8, "aria-hidden": "true" }, s("path", { class: className, d: "M0 4H22" })), " " + text));
  if (all.course.buckets.some((bucket) => bucket[1])) line("used", "used, as NVML reports");
  if (all.course.buckets.some((bucket) => bucket[2])) line("tracked", all.course.t.length ? "highest tracked" : "tracked");
  if (!all.course.t.length && all.course.buckets.some((bucket) => bucket[3])) line("gapline", "Untrackable");
  const areas = all.bands.map((band) => h("span", {}, swatch(band.code), h("bdi", {}, band.name)));
  return lines.concat(areas.reverse());
}

function courseTable(all) {
  const { bands, positions, process, course } = all;
  const heads = course.t.length ? [...bands.map((band) => band.name), "used"] : ["used", "tracked", "Untrackable"];
  const rows = positions.map((at, index) => {
    const bytes = course.t.length ? [...bands.map((band) => band.bytes[index]), at.used] : [at.used, at.tracked, at.gap];
    return h("tr", {}, h("th", { scope: "row" }, time(process.clock, at.t)), bytes.map((amount) => number(amount === null ? null : round(amount), amount)));
  });
  return h("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "memory over time" }, h("table", {}, h("caption", {}, unit().name),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "time"), heads.map((head) => h("th", { class: "n", scope: "col" }, h("bdi", {}, head))))),
    h("tbody", {}, rows)));
}

function eventTable(all) {
  const rows = all.events.map((event) => h("tr", {}, h("th", { scope: "row" }, time(all.process.clock, event.t)), h("td", {}, h("bdi", {}, event.text))));
  return h("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "events" }, h("table", {}, h("tbody", {}, rows)));
}
