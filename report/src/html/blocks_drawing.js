// Draws single blocks in a part of their time, [from, to] in ns, at a width in pixels. `isMatch` selects the highlighted blocks.

function drawBlocks(all, width, [from, to], isMatch) {
  const { process, data, polygons, levels } = all;
  const [begin, end] = [from - data.from, to - data.from];
  const plotted = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: HEIGHT - MARGIN.bottom };
  const first = Math.max(0, lastAt(levels.map(({ t }) => t), begin));
  const inside = levels.slice(first).filter(({ t }) => t <= end);
  const height = (level) => level.top + level.smaller + level.free;
  const most = 1.04 * inside.reduce((most, level) => Math.max(most, height(level)), 1);
  const x = (t) => plotted.left + ((Math.min(Math.max(t, begin), end) - begin) / (end - begin)) * (plotted.right - plotted.left);
  const y = (bytes) => plotted.bottom - (Math.max(0, bytes) / most) * (plotted.bottom - plotted.top);
  const n = (number) => Math.round(number * 10) / 10;
  const svg = s("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" }, patterns());
  axes(svg, plotted, { clock: process.clock, from, to, most, width }, (t) => x(t - data.from), y);

  // Returns the path of an area between two heights that are valid from times on.
  const area = (times, low, high, until) => {
    const [upper, lower] = [[], []];
    for (let at = 0; at < times.length; at++) {
      const next = at + 1 < times.length ? times[at + 1] : until;
      if (next <= begin || times[at] >= end) continue;
      const [a, b] = [n(x(times[at])), n(x(next))];
      // Corners within a tenth of a pixel are not visible.
      if (a === b && at + 1 < times.length) continue;
      upper.push(`L${a} ${n(y(high(at)))}H${b}`);
      lower.push(`L${b} ${n(y(low(at)))}H${a}`);
    }
    return upper.length ? "M" + (upper.join("") + lower.reverse().join("")).slice(1) + "Z" : "";
  };
  const times = inside.map(({ t }) => t);
  const band = (code, low, high) => svg.append(s("path", { class: "area", fill: fillOf(code), d: area(times, low, high, end) }));
  // The ground of the polygons shows where they are too small to be drawn.
  band(SMALLER, () => 0, (at) => inside[at].top + inside[at].smaller);
  band("idle", (at) => inside[at].top + inside[at].smaller, (at) => height(inside[at]));
  const paths = new Map();
  const group = s("g", {});
  for (const of of polygons) {
    const { row } = of;
    const pixels = y(0) - y(row[B_BYTES]);
    if (of.begin >= end || of.end <= begin || pixels < 0.3) continue;
    const d = area(of.t, (at) => of.low[at], (at) => of.low[at] + row[B_BYTES], of.end);
    if (d === "") continue;
    const code = data.names[row[B_NAME]][4][state.by];
    const path = s("path", { class: "block" + (pixels < 3 ? " thin" : "") + (isMatch === null ? "" : isMatch(of) ? " hit" : " dim"), fill: fillOf(code), d });
    paths.set(of, path);
    group.append(path);
  }
  svg.append(group);
  let free = -Infinity;
  for (const [t, number] of data.steps) {
    if (t < begin || t > end) continue;
    const at = n(x(t));
    svg.append(s("path", { class: "peak", d: `M${at} ${plotted.top - 6}V${plotted.bottom}` }));
    const label = (free === -Infinity ? "step " : "") + thousands(number);
    if (at < free || at + textWidth(label) > plotted.right) continue;
    svg.append(s("text", { class: "onplot", x: at + 3, y: 12 }, label));
    free = at + textWidth(label) + 10;
  }
  const outline = s("path", { class: "chosenblock", d: "" });
  const selection = s("rect", { class: "range", y: plotted.top, height: plotted.bottom - plotted.top, width: 0 });
  svg.append(outline, selection);
  const inPlot = (clientX) => clientX - svg.getBoundingClientRect().left;
  const timeAt = (clientX) => from + ((inPlot(clientX) - plotted.left) / (plotted.right - plotted.left)) * (to - from);
  return {
    svg, timeAt,
    choose: (of) => outline.setAttribute("d", paths.get(of)?.getAttribute("d") ?? ""),
    blockAt: (clientX, clientY) => {
      const t = timeAt(clientX) - data.from;
      const bytes = ((plotted.bottom - (clientY - svg.getBoundingClientRect().top)) / (plotted.bottom - plotted.top)) * most;
      return polygons.find((of) => {
        if (of.begin > t || of.end <= t) return false;
        const low = lowAt(of, t);
        return low <= bytes && bytes < low + of.row[B_BYTES];
      });
    },
    // Marks a range of client pixels as selected; null ends the selection.
    mark: (begin, end) => {
      const [left, right] = begin === null ? [0, 0] : [inPlot(begin), inPlot(end)].sort((a, b) => a - b);
      selection.setAttribute("x", left);
      selection.setAttribute("width", right - left);
    },
  };
}
