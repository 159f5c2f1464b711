// Table of a device's memory: at the end, at the peak, and at the cursor of its timeline.

// Returns the rows of a device. Rows that only its timeline needs are added with 0 bytes at the end and at the peak.
function statementRows(detail, by) {
  const rows = detail.statements[by].map((row) => ({ ...row }));
  const tracked = rows.findIndex((row) => row.part === "tracked");
  if (tracked < 0 || detail.course.t.length === 0) return rows;
  const stack = detail.course.stacks[by];
  const needed = [
    ["smaller", SMALLER, "(other names)", stack.smaller, (row) => row.part === "smaller"],
    ["others", OTHERS, by === TAG ? "(no tag)" : "Others", stack.others, (row) => row.part === "others"],
    ["idle", undefined, "pool idle", detail.course.idle, (row) => row.part === "idle"],
    ["opaque", undefined, "opaque pools", detail.course.opaque, (row) => row.part === "opaque"],
  ];
  for (const [part, code, name, values, is] of needed) {
    if (rows.some(is) || !values.some((bytes) => bytes !== 0)) continue;
    let at = rows.findLastIndex((row) => row.parent === tracked || row.part === "tracked") + 1;
    if (part === "smaller") at = tracked + 1 + rows.filter((row) => row.part === "category").length;
    for (const row of rows) if (row.parent >= at) row.parent++;
    rows.splice(at, 0, { part, code, name, parent: tracked, bytes: [0, 0], note: "", carried: [false, false] });
  }
  return rows;
}

// Returns the bytes of each row at a point of the timeline.
function rowsAt(detail, by, rows, at) {
  const { course } = detail;
  const stack = course.stacks[by];
  if (at.point === null) {
    const of = { used: at.used, tracked: at.tracked, untrackable: at.gap };
    return rows.map((row) => of[row.part] ?? null);
  }
  let named = 0;
  return rows.map((row) => {
    switch (row.part) {
      case "tracked": return course.tracked[at.point];
      case "category": return stack.rows[named++][1][at.point];
      case "smaller": return stack.smaller[at.point];
      case "others": return stack.others[at.point];
      case "idle": return course.idle[at.point];
      case "opaque": return course.opaque[at.point];
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
    const name = h("th", { scope: "row" }, swatch(ROW_COLOR[row.part] ?? row.code), h("bdi", { title: row.name }, row.name), row.note ? h("span", { class: "soft note" }, row.note) : null);
    return h("tr", { class: `d${depthOf(rows, at)}${total ? " total" : ""}`, "data-part": row.part },
      name, cells, cell);
  });
  const isCarried = rows.some((row) => row.carried[0] || row.carried[1]);
  const table = h("table", { id: "statement", "aria-describedby": "statement-note" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, unit().name),
      head(process.open ? "now" : "last", device.last_t), head("at peak", device.peak_t), cursorHead)),
    h("tbody", {}, body));
  const move = (at) => {
    const bytes = at === null ? rows.map(() => null) : rowsAt(detail, state.by, rows, at);
    const shown = printedSteps(rows, bytes);
    const carried = new Set(["used", "untrackable"]);
    cursorHead.replaceChildren(...(at === null ? [h("span", { class: "soft" }, "at cursor")] : ["at cursor", ...when(at.t)]));
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
