// The moment whose memory the bar, the groupings, the paths and the tags show: the end, the peak, or a chosen moment.

const [H_TAG, H_CODES, H_CLASS, H_LIBRARY, H_LAST, H_PEAK, H_COURSE] = [0, 1, 4, 5, 6, 7, 8];
const [END, PEAK, CHOSEN] = [0, 1, 2];

// Returns the bytes of a holding at each of `count` points.
function courseBytes(holding, count) {
  const bytes = new Array(count).fill(0);
  const changes = holding[H_COURSE];
  for (let at = 0; at < changes.length; at += 2) bytes.fill(changes[at + 1], changes[at], changes[at + 2]);
  return bytes;
}

// Returns the category of a holding in a grouping, or `idle` or `opaque`.
const codeOf = (holding, by) => (holding[H_CLASS] === 1 ? "idle" : holding[H_CLASS] === 2 ? "opaque" : holding[H_CODES + by]);

// Returns the bytes at each point by category: those with a row in the statement, and `smaller`, `others`, `idle`, `opaque`.
function stackOf(detail, by) {
  const count = detail.course.t.length;
  const none = () => new Array(count).fill(0);
  const stack = { rows: new Map(), smaller: none(), others: none(), idle: none(), opaque: none() };
  for (const row of detail.statements[by]) if (row.part === "category" && row.code !== SMALLER) stack.rows.set(row.code, none());
  for (const holding of detail.holdings) {
    const code = codeOf(holding, by);
    const sums = typeof code === "string" ? stack[code] : stack.rows.get(code) ?? (code === OTHERS ? stack.others : stack.smaller);
    courseBytes(holding, count).forEach((bytes, at) => { sums[at] += bytes; });
  }
  return stack;
}

// Returns the point of the course that is valid at a time.
const pointAt = (detail, t) => Math.max(0, detail.course.t.findLastIndex((of) => of <= t));
// Returns the fullest point of a range of time, as its index. The range contains the point that is valid at its start.
function fullestIn(detail, [from, to]) {
  const { t, tracked } = detail.course;
  const first = pointAt(detail, from);
  return t.reduce((best, at, point) => (point > first && at <= to && tracked[point] > tracked[best] ? point : best), first);
}

// Returns a function that gives the bytes of a holding at the shown moment.
function bytesAt(detail) {
  if (state.moment !== CHOSEN) return (holding) => holding[state.moment === PEAK ? H_PEAK : H_LAST];
  const point = pointAt(detail, state.chosen.t);
  return (holding) => {
    const changes = holding[H_COURSE];
    let bytes = 0;
    for (let at = 0; at < changes.length && changes[at] <= point; at += 2) bytes = changes[at + 1];
    return bytes;
  };
}

// Returns the rows of the statement with their bytes at the shown moment, which may be null.
function shownRows(process, device) {
  const rows = statementRows(device.detail, state.by);
  if (state.moment !== CHOSEN) return rows.map((row) => ({ ...row, shown: row.bytes[state.moment] }));
  const all = courseOf(process, device);
  const bytes = rowsAt(rows, all.stack, all.positions[pointAt(device.detail, state.chosen.t)]);
  return rows.map((row, at) => ({ ...row, shown: bytes[at] }));
}

// Names a time with the precision with which the moment was chosen, so that its name stays while the course grows.
const chosenTime = (t) => time(here().process.clock, t, state.chosen.span);

// Names the shown moment for captions.
function momentName() {
  if (state.moment !== CHOSEN) return state.moment === PEAK ? "at the peak" : isOpen() ? "now" : "at the end";
  const { t, range } = state.chosen;
  return `at ${chosenTime(t)}${range ? `, the fullest moment from ${range.map(chosenTime).join(" to ")}` : ""}`;
}

// Shows a moment: END or PEAK, or a time in ns with the range of which it is the fullest moment.
let refresh = () => {};
function lookAt(moment, t = null, range = null) {
  const [from, to] = range ?? shownOf([0, here()?.device.last_t ?? 0]);
  Object.assign(state, { moment, chosen: t === null ? null : { t, range, span: to - from }, picked: null });
  refresh();
}
const lookAtRange = (detail, range) => lookAt(CHOSEN, detail.course.t[fullestIn(detail, range)], range);

// Escape goes back to the peak, unless the focused element has used the key.
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || state.moment !== CHOSEN) return;
  event.preventDefault();
  lookAt(PEAK);
});
