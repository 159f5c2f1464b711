// Lists: users of the device, torch to nvidia-smi, changes of Untrackable, iterations, counters, OOM records, coverage.

const DEVICE_COLORS = { "this process": "none", unaccounted: "predates", system: "opaque", "rest of the host": "opaque", "rest of the device": "rest", free: "free", available: "free" };

// Draws the device at the shown moment as one bar. The part of this process is divided as in its table. The other parts are known
// at the end only: at other moments they are one part.
function deviceStrip(process, device) {
  const rows = shownRows(process, device);
  const used = rows.find((row) => row.part === "used")?.shown ?? null;
  const tracked = rows.find((row) => row.part === "tracked")?.shown ?? null;
  const mine = used ?? tracked;
  if (mine === null || mine <= 0) return null;
  const name = used === null ? "tracked of this process" : "this process";
  const rest = device.total === null ? [] : [["rest of the device", device.total - mine]];
  const parts = state.moment === END && used !== null && device.detail.device ? device.detail.device : [[name, mine], ...rest.filter(([, bytes]) => bytes > 0)];
  const total = sum(parts.map(([, bytes]) => bytes));
  const steps = apportion(round(total), parts.map(([, bytes]) => bytes));
  const color = (name) => DEVICE_COLORS[name] ?? "smaller";
  const isLeaf = (row, at) => !rows.some((other) => other.parent === at) && rows[row.parent]?.part !== "untrackable";
  const pieces = rows.filter((row, at) => row.shown !== null && (row.part === "untrackable" || isLeaf(row, at)) && (used !== null || row.parent === rows.findIndex((row) => row.part === "tracked")));
  const piece = (className, bytes, ...inside) => sized(h("span", { class: className }, inside), { flex: `${Math.max(0, bytes)} 1 0` });
  return h("figure", { id: "strip" },
    h("div", { class: "strip", "aria-hidden": "true" }, parts.map(([name, bytes], at) =>
      at === 0 ? piece("mine", bytes, pieces.map((row) => piece(colorClass(ROW_COLOR[row.part] ?? row.code ?? "others"), row.shown))) : piece(color(name), bytes))),
    h("figcaption", { class: "keys" }, h("span", { class: "soft" }, `${momentName()}, ${unit().name}:`),
      parts.map(([name, bytes], at) => h("span", {}, at === 0 ? null : swatch(color(name)), `${name} `, h("b", { "data-bytes": String(bytes) }, print(steps[at])))),
      parts.length > 1 ? h("span", {}, "= the device ", h("b", {}, print(round(total)))) : null));
}

// memory_allocated + idle = memory_reserved; + outside + predates + Untrackable = used.
function bridge(process, device) {
  const { detail } = device;
  const columns = [0, 1].filter((column) => detail.bridges[column]);
  if (columns.length === 0) return null;
  const rows = detail.statements[LAYER];
  const at = (part) => rows.findIndex((row) => row.part === part);
  const told = columns.map((column) => {
    const of = detail.bridges[column];
    // Rounds as the summary does, so that both show the same numbers.
    const steps = printedSteps(rows, rows.map((row) => row.bytes[column]));
    const [tracked, predates, gap, used] = ["tracked", "predates", "untrackable", "used"].map((part) => (at(part) < 0 ? null : steps[at(part)]));
    const parts = apportion(tracked, [of.memory_allocated_bytes, of.idle_bytes, of.outside_bytes]);
    return { of, steps: [parts[0], parts[1], parts[0] + parts[1], parts[2], predates, gap, used] };
  });
  const isPool = told[0].of.source === "pool";
  const lines = [
    [isPool ? "memory_allocated" : "allocated from the driver by torch's library", "memory_allocated_bytes", ""], ["+ idle", "idle_bytes", ""],
    [isPool ? "= memory_reserved" : "= held by torch", "memory_reserved_bytes", "total"], ["+ outside torch", "outside_bytes", ""],
    ["+ predates the agent", "predates_bytes", ""], ["+ Untrackable", "untrackable_bytes", ""], ["= used, as nvidia-smi shows", "used_bytes", "total"],
  ];
  const body = lines.map(([name, key, kind], row) => {
    if (key === "predates_bytes" && told.every(({ of }) => !of[key])) return null;
    return h("tr", { class: kind }, h("th", { scope: "row" }, name), told.map(({ of, steps }) => number(of[key] === null ? null : steps[row], of[key])));
  });
  return section("bridge", "torch to nvidia-smi", "From memory_allocated to nvidia-smi",
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, unit().name),
      columns.map((column) => h("th", { class: "n", scope: "col" }, column === 0 ? (process.open ? "now" : "last") : "at peak")))), h("tbody", {}, body))));
}

function gapSteps(process, device) {
  const { steps, other_steps: [restBytes, restCount] } = device.detail;
  if (!process.covered || (steps.length === 0 && restCount === 0)) return null;
  const total = sum(steps.map((step) => step.bytes)) + restBytes;
  const most = steps.reduce((most, step) => Math.max(most, Math.abs(step.bytes)), 1);
  const shown = apportion(round(total), [...steps.map((step) => step.bytes), restBytes]);
  const plus = (steps, bytes) => number(steps, bytes, steps > 0 ? "+" : "");
  const body = steps.map((step, at) => h("tr", {}, h("th", { scope: "row", class: "n" }, time(process.clock, step.t)), plus(shown[at], step.bytes),
    h("td", { class: "barcell", "aria-hidden": "true" }, sized(h("span", { class: "bar " + (step.bytes < 0 ? "smaller" : "untrackable") }), { width: `${(100 * Math.abs(step.bytes)) / most}%` })),
    h("td", {}, h("bdi", {}, step.what), step.note ? h("span", { class: "soft" }, " · ", h("bdi", {}, step.note)) : null)));
  if (restCount) body.push(h("tr", {}, h("th", { scope: "row" }), plus(shown[shown.length - 1], restBytes), h("td"), h("td", {}, `(${thousands(restCount)} more)`)));
  return section("gap", "Untrackable", "Changes of Untrackable with their causes",
    h("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "changes of Untrackable" }, h("table", {}, h("caption", {}, `changes of used - tracked, not rounded, in ${unit().name}`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "time"), h("th", { class: "n", scope: "col" }, unit().name), h("th", { class: "barcell", "aria-hidden": "true" }), h("th", { scope: "col" }, "cause, and where"))),
      h("tbody", {}, body), h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "sum"), plus(round(total), total), h("td"), h("td"))))));
}

function sparkline(values, width, height, most) {
  const top = Math.max(1, most ?? values.reduce((a, b) => Math.max(a, b), 0));
  const x = (at) => (values.length < 2 ? 0 : (at / (values.length - 1)) * (width - 2)) + 1;
  const y = (value) => height - 1 - (Math.max(0, value) / top) * (height - 2);
  const path = values.map((value, at) => (value === null ? "" : `${at && values[at - 1] !== null ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`)).join("");
  return s("svg", { width, height, "aria-hidden": "true" }, s("path", { class: "used", d: values.length === 1 ? path + "h3" : path }));
}

function iterations(device) {
  const table = device.detail.iterations;
  if (!table) return null;
  const column = (at) => table.rows.map((row) => row[1][at]);
  const body = table.rows.map(([name, amounts, isPartial], at) => h("tr", {}, h("th", { scope: "row", class: "n" }, name), amounts.map((bytes) => number(round(bytes), bytes)),
    h("td", { class: "soft" }, [isPartial ? "records were lost" : null, table.open && at === table.rows.length - 1 ? "under way" : null].filter(Boolean).join(", "))));
  const range = (of) => table.columns.map((_, at) => number(round(of(column(at))), of(column(at))));
  return section("iterations", "Iterations", "Iterations",
    h("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "iterations" }, h("table", {},
      h("caption", {}, `${unit().name}; highest in the iteration, of reserved, params, optimizer and copies at its end`),
      h("thead", {}, h("tr", {}, h("th", { class: "n", scope: "col" }, "iteration"), table.columns.map((name) => h("th", { class: "n", scope: "col" }, name)), h("th", {}, h("span", { class: "hidden" }, "remark"))),
        h("tr", { "aria-hidden": "true" }, h("td", { class: "n soft" }, "course"), table.columns.map((_, at) => h("td", { class: "n" }, sparkline(column(at), 72, 22)))), 
        h("tr", {}, h("th", { class: "n", scope: "row" }, "least"), range((values) => Math.min(...values))),
        h("tr", {}, h("th", { class: "n", scope: "row" }, "most"), range((values) => Math.max(...values)))),
      h("tbody", {}, body))));
}

// Shows the program's counters, and the durations of its ranges.
function counters(process) {
  const { own } = process;
  if (!own) return null;
  const table = (caption, columns, rows) => (rows.length === 0 ? null : h("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": caption }, h("table", {}, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, columns.map((name, at) => h("th", { class: at === 0 ? "" : "n", scope: "col" }, name)))), h("tbody", {}, rows))));
  const row = (name, cells) => h("tr", {}, h("th", { scope: "row" }, h("bdi", {}, name)), cells.map((cell) => h("td", { class: "n" }, cell ?? "-")));
  return section("counters", "Counters", "Counters and ranges of the program's own",
    table("counters", ["name", "now", "changes", "min", "max", "mean", "course"], own.counters.map(({ name, told, course }) => row(name, [...told, sparkline(course, 72, 22)]))),
    table("ranges, each with those inside of it", ["name", "count", "total", "min", "max", "mean", "open"], own.ranges.map(([name, count, lengths, open]) => row(name, [thousands(count), ...lengths, thousands(open)]))),
    own.remarks.map((line) => h("p", { class: "soft" }, line)));
}

function ooms(process, device) {
  const all = device.detail.ooms;
  const dropped = process.ooms_dropped + device.detail.earlier_ooms;
  if (all.length === 0 && dropped === 0) return null;
  const ranked = (name) => { const rank = DATA.groupings[DATA.by].names.indexOf(name); return { Untrackable: "untrackable", idle: "idle" }[name] ?? (rank < 0 ? SMALLER : rank); };
  const table = (title, rows, colors) => {
    const total = sum(rows.map(([, bytes]) => bytes));
    const steps = apportion(round(total), rows.map(([, bytes]) => bytes));
    const hasGrowth = rows.some((row) => row[2] !== undefined && row[2] !== null);
    const most = rows.reduce((most, [, bytes]) => Math.max(most, bytes), 1);
    return h("div", { class: "scroll" }, h("table", { class: "bars" }, h("caption", {}, `${title}, ${unit().name}`),
      hasGrowth ? h("thead", {}, h("tr", {}, h("th", {}, "who"), h("th", { class: "barcell", "aria-hidden": "true" }), h("th", { class: "n" }, "holds"), h("th", { class: "n" }, "grew by"))) : null,
      h("tbody", {}, rows.map(([name, bytes, growth], at) => h("tr", {}, h("th", { scope: "row" }, h("bdi", {}, path(name))),
        h("td", { class: "barcell", "aria-hidden": "true" }, sized(h("span", { class: "bar " + colorClass(colors(name), DATA.by) }), { width: `${Math.max(0, (100 * bytes) / most)}%` })),
        number(steps[at], bytes), hasGrowth ? h("td", { class: "n" }, growth === null ? "-" : signed(growth)) : null))),
      h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "sum"), h("td"), number(round(total), total), hasGrowth ? h("td") : null))));
  };
  const one = (oom, isOpen) => h("details", { open: isOpen, class: "oomrecord", "data-key": "oom " + oom.t }, h("summary", {}, h("bdi", {}, oom.lines[0] ?? "")),
    h("pre", { tabindex: "0" }, oom.lines.slice(1).join("\n")),
    h("div", { class: "pair even" }, oom.held.length ? table("what this process held then", oom.held, ranked) : null,
      oom.holders.length ? table("memory of the device by process", oom.holders, (name) => DEVICE_COLORS[name] ?? SMALLER) : null));
  // Opens only the last record that is not just a refused allocation.
  const last = all.findLastIndex((oom) => oom.kind !== "refused");
  return section("oom", "Out of memory", "When memory ran out", all.map((oom, at) => one(oom, at === last)), dropped ? h("p", {}, `${thousands(dropped)} more are not shown here.`) : null);
}

function words(process, device) {
  const isNote = (line) => line.startsWith("note: ");
  const notes = process.tail.filter(isNote).map((line) => line.slice(6));
  const rest = process.tail.filter((line) => !isNote(line));
  const list = (lines) => (lines.length ? h("ul", {}, lines.map((line) => h("li", {}, h("bdi", {}, line)))) : null);
  return section("coverage", "Coverage", "Coverage and caveats", list(process.coverage), list(notes), device.detail ? [h("h3", {}, "Of this device"), list(device.detail.facts)] : null,
    rest.flatMap((line) => line.split(/ {2,}/)).map((part) => h("p", {}, h("code", {}, part))));
}
