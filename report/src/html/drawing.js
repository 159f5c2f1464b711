// Draws a part of the timeline, [from, to] in ns, at a width in pixels.

function draw(all, width, [from, to]) {
  const { process, device, course, end } = all;
  const isShown = (t) => t >= from && t <= to;
  const events = all.events.filter((event) => isShown(event.t));
  // Points whose validity, up to the next point, reaches into the part.
  const first = Math.max(0, all.positions.findLastIndex((at) => at.t <= from));
  const beyond = all.positions.findIndex((at) => at.t > to);
  const last = beyond < 0 ? all.positions.length : beyond;
  const positions = all.positions.slice(first, last);
  const bands = stacked(all.bands.map((band) => ({ ...band, bytes: band.bytes.slice(first, last) })), positions.length);
  const buckets = course.buckets.filter((bucket) => bucket[0] + course.width >= from && bucket[0] <= to);
  const lanes = [["gap", "changes"], ["mark", "marks"], ["oom", "OOM"], ["suspected", "suspect"], ["refused", "refused"]].filter(([kind]) => events.some((event) => event.kind === kind));
  const height = HEIGHT + lanes.length * LANE;
  const plotted = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: HEIGHT - MARGIN.bottom };
  const tops = [...bands.flatMap((band) => band.high), ...buckets.flatMap((bucket) => [bucket[1]?.[1] ?? 0, bucket[2]?.[1] ?? 0])];
  const hasPeak = device.peak_tracked !== null && isShown(device.peak_t);
  const highest = Math.max(1, tops.reduce((a, b) => Math.max(a, b), 0), hasPeak ? device.peak_tracked : 0);
  // Shows the device's size as a line only near the highest amount. Otherwise its scale would make everything else small.
  const hasSize = device.total !== null && device.total <= 1.6 * highest && device.total >= 0.5 * highest;
  const most = 1.04 * Math.max(highest, hasSize ? device.total : 0);
  const x = (t) => plotted.left + ((t - from) / (to - from)) * (plotted.right - plotted.left);
  const y = (bytes) => plotted.bottom - (Math.max(0, bytes) / most) * (plotted.bottom - plotted.top);
  const n = (number) => Math.round(number * 10) / 10;
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, patterns(),
    s("clipPath", { id: "plotted" }, s("rect", { x: plotted.left, y: 0, width: plotted.right - plotted.left, height })));

  axes(svg, plotted, { clock: process.clock, from, to, most, width }, x, y);

  // Middle, baseline and half the width of each label in the plot.
  const written = [];
  // A point is valid until the next one, the last one until the end.
  if (course.t.length && positions.length) {
    const until = beyond < 0 ? end : all.positions[beyond].t;
    const clamped = (t) => x(Math.min(Math.max(t, from), to));
    const edges = positions.map((at, index) => [clamped(at.t), clamped(index + 1 < positions.length ? positions[index + 1].t : Math.max(at.t, until))]);
    for (const band of bands) {
      const upper = edges.map(([a, b], at) => `L${n(a)} ${n(y(band.high[at]))}H${n(b)}`).join("");
      const lower = edges.map(([a, b], at) => `L${n(b)} ${n(y(band.low[at]))}H${n(a)}`).reverse().join("");
      svg.append(s("path", { class: "area", fill: fillOf(band.code), d: "M" + (upper + lower).slice(1) + "Z" }));
    }
    for (const label of labels(bands, edges, y)) {
      written.push([n(label.x), n(label.y) + 4, textWidth(label.text) / 2]);
      svg.append(sized(s("text", { class: isHatched(label.code) ? "halo" : null, x: n(label.x), y: n(label.y) + 4, "text-anchor": "middle" }, label.text),
        isHatched(label.code) ? {} : { fill: `var(--on-${colorClass(label.code)})` }));
    }
  }
  const clipped = s("g", { "clip-path": "url(#plotted)" });
  lines(clipped, course, buckets, x, y, to, n);
  svg.append(clipped);
  if (hasSize) {
    svg.append(s("path", { class: "size", d: `M${plotted.left} ${n(y(device.total))}H${plotted.right}` }));
    svg.append(s("text", { class: "onplot", x: plotted.right, y: n(y(device.total)) - 4, "text-anchor": "end" }, `size of the device ${withUnit(device.total)}`));
  }
  if (hasPeak) {
    const label = `peak of tracked ${amount(device.peak_tracked)}`;
    const half = textWidth(label) / 2;
    const middle = Math.min(Math.max(x(device.peak_t), plotted.left + half), plotted.right - half);
    svg.append(s("path", { class: "peak", d: `M${n(x(device.peak_t))} ${plotted.top - 6}V${plotted.bottom}` }));
    // Leaves the label out where it would overlap the label of the device's size.
    if (!hasSize || y(device.total) > plotted.top + 12 || x(device.peak_t) + half < plotted.right - 200) {
      svg.append(s("text", { class: "onplot", x: n(middle), y: 11, "text-anchor": "middle" }, label));
    }
  }
  lanes.forEach(([kind, name], lane) => {
    const middle = HEIGHT + lane * LANE + LANE / 2;
    svg.append(s("text", { x: plotted.left - 6, y: middle + 4, "text-anchor": "end" }, name));
    svg.append(s("path", { class: "axis", d: `M${plotted.left} ${middle}H${plotted.right}` }));
    let named = -Infinity;
    for (const event of events.filter((event) => event.kind === kind)) {
      const at = n(x(event.t));
      if (kind === "oom" || kind === "suspected") svg.append(s("path", { class: "oomline", d: `M${at} ${plotted.top}V${middle}` }));
      svg.append(glyph(event, at, middle));
      if (kind === "mark") {
        const shown = event.name.length > 18 ? event.name.slice(0, 17) + "…" : event.name;
        const wide = textWidth(shown);
        if (at + 7 > named && at + 7 + wide < plotted.right) {
          svg.append(s("text", { class: "onlane", x: at + 7, y: middle + 4 }, shown));
          named = at + 13 + wide;
        }
      }
    }
  });
  const chosenRange = s("rect", { class: "range", y: plotted.top, height: plotted.bottom - plotted.top, width: 0 });
  const chosenLine = s("path", { class: "chosen", d: "" });
  const chosenLabel = s("text", { class: "onplot chosenlabel", y: plotted.bottom - 5, "text-anchor": "middle" });
  svg.append(chosenRange, chosenLine, chosenLabel);
  const cursor = s("path", { class: "at", d: "" });
  const selection = s("rect", { class: "range", y: plotted.top, height: plotted.bottom - plotted.top, width: 0 });
  svg.append(cursor, selection);
  const inPlot = (clientX) => clientX - svg.getBoundingClientRect().left;
  return {
    svg,
    cursor: (t) => cursor.setAttribute("d", isShown(t) ? `M${n(x(t))} ${plotted.top}V${height}` : ""),
    timeAt: (clientX) => from + ((inPlot(clientX) - plotted.left) / (plotted.right - plotted.left)) * (to - from),
    // Marks the shown moment and its range, or null.
    chosen: (moment) => {
      const [left, right] = (moment?.range ?? [to, from]).map((t) => Math.min(Math.max(x(t), plotted.left), plotted.right));
      chosenRange.setAttribute("x", left);
      chosenRange.setAttribute("width", Math.max(0, right - left));
      const isMarked = moment && isShown(moment.t);
      chosenLine.setAttribute("d", isMarked ? `M${n(x(moment.t))} ${plotted.top}V${plotted.bottom}` : "");
      chosenLabel.textContent = isMarked ? "shown below" : "";
      const half = textWidth("shown below") / 2 + 2;
      if (!isMarked) return;
      const middle = Math.min(Math.max(x(moment.t), plotted.left + half), plotted.right - half);
      const isFree = (line) => written.every(([at, base, wide]) => Math.abs(base - line) >= 13 || Math.abs(at - middle) >= wide + half);
      let line = plotted.bottom - 5;
      while (!isFree(line) && line > plotted.top + 13) line -= 4;
      chosenLabel.setAttribute("x", n(middle));
      chosenLabel.setAttribute("y", n(line));
    },
    // Marks a range of client pixels as selected; null ends the selection.
    mark: (begin, end) => {
      const [left, right] = begin === null ? [0, 0] : [begin, end].map((at) => Math.min(Math.max(inPlot(at), plotted.left), plotted.right)).sort((a, b) => a - b);
      selection.setAttribute("x", left);
      selection.setAttribute("width", right - left);
    },
  };
}

// Draws the axes: amounts on the left, times below.
function axes(svg, plotted, { clock, from, to, most, width }, x, y) {
  const n = (number) => Math.round(number * 10) / 10;
  const [size, scale] = unit().step;
  const per = size / scale === 1 ? 1 : size;
  const step = niceStep(most / per, 5) * per;
  svg.append(s("text", { x: plotted.left - 6, y: 12, "text-anchor": "end" }, unit().name));
  for (let bytes = 0; bytes <= most; bytes += step) {
    svg.append(s("path", { class: "axis", d: `M${plotted.left} ${n(y(bytes))}H${plotted.right}` }));
    svg.append(s("text", { x: plotted.left - 6, y: n(y(bytes)) + 4, "text-anchor": "end" }, thousands(Math.round((bytes / per) * 1000) / 1000)));
  }
  let free = -Infinity;
  for (const [t, label] of timeTicks(clock, from, to, plotted.right - plotted.left)) {
    const half = textWidth(label) / 2;
    if (x(t) - half < free + 8 || x(t) + half > width - 2) continue;
    free = x(t) + half;
    svg.append(s("path", { class: "axis", d: `M${n(x(t))} ${plotted.bottom}v4` }));
    svg.append(s("text", { x: n(x(t)), y: plotted.bottom + 15, "text-anchor": "middle" }, label));
  }
}

// Draws the highest `used` of NVML and the highest tracked memory as lines. A run without points also gets a line of
// Untrackable, and shadows from the lowest to the highest amount.
function lines(svg, course, buckets, x, y, to, n) {
  const middle = (bucket) => x(Math.min(bucket[0] + course.width / 2, Math.max(bucket[0], to)));
  const line = (which, of, className, shadow) => {
    const known = buckets.filter((bucket) => bucket[which]);
    if (known.length === 0) return;
    // Keeps one point for each 2 pixels: its lowest and highest amount, and the highest of the drawn amount.
    const columns = new Map();
    for (const bucket of known) {
      const column = Math.round(middle(bucket) / 2);
      const [low, high, drawn] = [bucket[which][0], bucket[which][1], bucket[which][of]];
      const there = columns.get(column);
      columns.set(column, there ? { ...there, low: Math.min(there.low, low), high: Math.max(there.high, high), drawn: Math.max(there.drawn, drawn) } : { x: middle(bucket), low, high, drawn });
    }
    const all = [...columns.values()];
    if (shadow && all.some((column) => column.low !== column.high)) {
      const upper = all.map((column) => `L${n(column.x)} ${n(y(column.high))}`).join("");
      const lower = all.map((column) => `L${n(column.x)} ${n(y(column.low))}`).reverse().join("");
      svg.append(s("path", { class: "range", d: "M" + (upper + lower).slice(1) + "Z" }));
    }
    const path = all.map((column) => `L${n(column.x)} ${n(y(column.drawn))}`).join("").slice(1);
    svg.append(s("path", { class: className, d: all.length === 1 ? `M${path}h4` : "M" + path }));
  };
  line(2, 1, "tracked", course.t.length === 0);
  if (course.t.length === 0) line(3, 1, "gapline", true);
  line(1, 1, "used", course.t.length === 0);
}

function glyph(event, x, y) {
  switch (event.kind) {
    case "gap": return s("path", { class: "event", d: event.up ? `M${x - 4} ${y + 4}L${x} ${y - 4}L${x + 4} ${y + 4}Z` : `M${x - 4} ${y - 4}L${x} ${y + 4}L${x + 4} ${y - 4}Z` });
    case "mark": return s("path", { class: "event", d: `M${x - 1} ${y - 6}h6l-2 3 2 3h-5v6h-1Z` });
    case "oom": case "suspected": return s("path", { class: "oom", "stroke-width": 2.5, d: `M${x - 4} ${y - 4}L${x + 4} ${y + 4}M${x - 4} ${y + 4}L${x + 4} ${y - 4}` });
    default: return s("path", { class: "event", d: `M${x - 4} ${y}L${x} ${y - 4}L${x + 4} ${y}L${x} ${y + 4}Z` });
  }
}

// Returns the labels of bands that are somewhere wide and high enough for the label.
function labels(bands, edges, y) {
  const columns = Math.floor(edges[edges.length - 1][1]);
  const first = Math.ceil(edges[0][0]);
  const at = new Array(Math.max(0, columns + 1)).fill(-1);
  edges.forEach(([a, b], index) => { for (let column = Math.max(first, Math.floor(a)); column <= Math.min(columns, b); column++) at[column] = index; });
  const found = [];
  for (const band of bands) {
    const text = band.name.length > 32 ? band.name.slice(0, 31) + "…" : band.name;
    const wide = Math.ceil(textWidth(text)) + 8;
    let best = null;
    for (let left = first; left + wide <= columns; left += 6) {
      let [upper, lower] = [-Infinity, Infinity];
      for (let column = left; column <= left + wide; column += 3) {
        const index = at[column];
        if (index < 0) { lower = -Infinity; break; }
        upper = Math.max(upper, y(band.high[index]));
        lower = Math.min(lower, y(band.low[index]));
      }
      if (lower - upper >= 13 && (best === null || lower - upper > best.room)) best = { room: lower - upper, x: left + wide / 2, y: (upper + lower) / 2 };
    }
    if (best) found.push({ ...best, text, code: band.code });
  }
  return found;
}

let measure = null;
function textWidth(text) {
  measure ??= document.createElement("canvas").getContext("2d");
  measure.font = "11px " + getComputedStyle(document.body).fontFamily;
  return measure.measureText(text).width;
}

// Idle, opaque, older and untrackable memory is hatched, because it has no category.
const isHatched = (code) => typeof code === "string";
const fillOf = (code) => (isHatched(code) ? `url(#hatch-${code})` : `var(--${colorClass(code)})`);
function patterns() {
  const hatch = (code, size, turn, width) =>
    s("pattern", { id: "hatch-" + code, width: size, height: size, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${turn})` },
      s("rect", { width: size, height: size, fill: `var(--${code})` }), s("rect", { width: size, height: width, fill: `var(--${code}-ink)` }));
  return s("defs", {}, hatch("idle", 7, 45, 1), hatch("opaque", 5, 0, 1), hatch("predates", 5, 90, 1), hatch("untrackable", 5, -45, 1.4));
}
