// Table of a device's memory: at the end, at the peak, and at the cursor of its timeline.

// Returns the rows of a device. Rows that only its timeline needs are added with 0 bytes at the end and at the peak. Names without
// a code are summed, because the timeline does not know them.
function statementRows(detail, by) {
  const rows = detail.statements[by].map((row) => ({ ...row }));
  const tracked = rows.find((row) => row.part === "tracked");
  if (!tracked || detail.course.t.length === 0) return rows;
  const parents = new Map(rows.map((row) => [row, rows[row.parent]]));
  const stack = stackOf(detail, by);
  const unnamed = rows.filter((row) => row.part === "category" && row.code === SMALLER);
  const needed = [
    ["smaller", SMALLER, "(other names)"], ["others", OTHERS, by === TAG ? "(no tag)" : "Others"],
    ["idle", undefined, "pool idle"], ["opaque", undefined, "opaque pools"],
  ];
  for (const [part, code, name] of needed) {
    const isNeeded = stack[part].some((bytes) => bytes !== 0) || (part === "smaller" && unnamed.length > 0);
    if (!isNeeded || rows.some((row) => row.part === part)) continue;
    const isBefore = (row) => row === tracked || (parents.get(row) === tracked && (part !== "smaller" || row.part === "category"));
    const row = { part, code, name, bytes: [0, 0], note: "", carried: [false, false] };
    parents.set(row, tracked);
    rows.splice(rows.findLastIndex(isBefore) + 1, 0, row);
  }
  const smaller = rows.find((row) => row.part === "smaller");
  for (const row of unnamed) {
    smaller.bytes = smaller.bytes.map((bytes, column) => (bytes === null ? null : bytes + (row.bytes[column] ?? 0)));
    rows.splice(rows.indexOf(row), 1);
  }
  for (const row of rows) row.parent = parents.get(row) ? rows.indexOf(parents.get(row)) : null;
  return rows;
}

// Returns the bytes of each row at a position of the timeline.
function rowsAt(rows, stack, at) {
  if (at.point === null) {
    const of = { used: at.used, tracked: at.tracked, untrackable: at.gap };
    return rows.map((row) => of[row.part] ?? null);
  }
  return rows.map((row) => {
    switch (row.part) {
      case "tracked": return at.tracked;
      case "category": return stack.rows.get(row.code)[at.point];
      case "smaller": return stack.smaller[at.point];
      case "others": return stack.others[at.point];
      case "idle": return stack.idle[at.point];
      case "opaque": return stack.opaque[at.point];
      case "predates": return at.predates;
      case "untrackable": return at.gap;
      case "used": return at.used;
      default: return null;
    }
  });
}

// Rounds a column. Parts are apportioned from their parent, so that the printed numbers add up.
function printedSteps(rows, bytes) {
  const steps = bytes.map((amount) => (amount === null ? null : round(amount)));
  rows.forEach((_, parent) => {
    if (steps[parent] === null) return;
    const parts = rows.map((_, at) => at).filter((at) => rows[at].parent === parent && bytes[at] !== null);
    apportion(steps[parent], parts.map((at) => bytes[at])).forEach((shown, at) => { steps[parts[at]] = shown; });
  });
  return steps;
}

function depthOf(rows, at) {
  let depth = 0;
  for (let row = rows[at]; row.parent !== null; row = rows[row.parent]) depth++;
  return depth;
}

const ROW_COLOR = { idle: "idle", opaque: "opaque", untrackable: "untrackable", predates: "predates" };

// Returns the table, and the function that moves its third column to a point.
function statement(process, device) {
  const { detail } = device;
  const rows = statementRows(detail, state.by);
  const stack = stackOf(detail, state.by);
  const columns = [0, 1].map((column) => rows.map((row) => row.bytes[column]));
  const steps = columns.map((bytes) => printedSteps(rows, bytes));
  const when = (t) => (process.clock.kind === "wall" ? time(process.clock, t).split(" ") : [time(process.clock, t)]).flatMap((word) => [h("br"), h("span", { class: "soft" }, word)]);
  const head = (text, t) => h("th", { class: "n", scope: "col" }, text, when(t));
  const cursorHead = h("th", { class: "n cursor", scope: "col" });
  const cursorCells = [];
  const body = rows.map((row, at) => {
    const cells = [0, 1].map((column) => number(steps[column][at], row.bytes[column], row.carried[column] ? "~" : ""));
    const cell = h("td", { class: "n cursor" });
    cursorCells.push(cell);
    const total = row.part === "used" || row.part === "tracked" || row.part === "untrackable";
    const name = h("th", { scope: "row" }, swatch(ROW_COLOR[row.part] ?? row.code), h("bdi", {}, path(row.name)), row.note ? h("span", { class: "soft note" }, row.note) : null);
    const isZero = !total && steps.every((column) => !column[at]);
    return h("tr", { class: `d${depthOf(rows, at)}${total ? " total" : ""}${isZero ? " zero" : ""}`, "data-part": row.part },
      name, cells, cell);
  });
  const isCarried = rows.some((row) => row.carried[0] || row.carried[1]);
  const table = h("table", { id: "statement", "aria-describedby": "statement-note" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, unit().name),
      head(process.open ? "now" : "last", device.last_t), head("at peak", device.peak_t), cursorHead)),
    h("tbody", {}, body));
  const move = (at) => {
    const bytes = at === null ? rows.map(() => null) : rowsAt(rows, stack, at);
    const shown = printedSteps(rows, bytes);
    const carried = new Set(["used", "untrackable"]);
    table.classList.toggle("without-cursor", at === null);
    cursorHead.replaceChildren("at cursor", ...(at === null ? [] : when(at.t)));
    rows.forEach((row, index) => {
      const mark = at !== null && at.isCarried && carried.has(row.part) ? "~" : "";
      cursorCells[index].textContent = shown[index] === null ? (at === null ? "" : "-") : mark + print(shown[index]);
      if (bytes[index] === null) cursorCells[index].removeAttribute("data-bytes");
      else cursorCells[index].setAttribute("data-bytes", String(bytes[index]));
    });
  };
  move(null);
  const note = h("p", { class: "soft", id: "statement-note" }, "Every column adds up as printed.", isCarried ? " ~ contains Untrackable measured at another time." : "");
  return { table: h("div", {}, h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "summary" }, table), note), move };
}
