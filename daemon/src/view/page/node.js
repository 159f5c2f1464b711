// The page of all devices with the processes that use their memory. The printed numbers of each device add up.

// Codes of categories, and the numbers of their colours, by name.
const [codes, colors] = [new Map(), new Map()];
let node = null;
let nodeSource = null;
// The reader's choice of processes: order of the rows, and a word that they contain.
const listed = { by: "used", word: "" };
// Maximum number of ended processes, and their maximum age in ms.
const [MOST_ENDED, MOST_AGE] = [8, 600000];

// Returns the unit in which a report prints this number of bytes, with three to six digits.
function unitFor(bytes) {
  const [KIB, MIB] = [2 ** 10, 2 ** 20];
  if (bytes >= 10000 * MIB) return { name: "MiB", step: [MIB, 1] };
  if (bytes >= 10 * MIB) return { name: "MiB", step: [MIB, 10] };
  return bytes >= 10 * KIB ? { name: "KiB", step: [KIB, 10] } : { name: "bytes", step: [1, 1] };
}

// Returns the code of a category, which does not change while the page is open.
function codeFor(name) {
  return name === "Others" ? OTHERS : name === "(smaller ones)" ? SMALLER : codes.get(name) ?? SMALLER;
}
function takeNode(data) {
  const sums = new Map();
  for (const process of data.processes) for (const { name, bytes, color } of process.structures) sums.set(name, { color, bytes: (sums.get(name)?.bytes ?? 0) + bytes });
  for (const [name, { color }] of [...sums].sort((a, b) => b[1].bytes - a[1].bytes)) {
    if (name === "Others" || name === "(smaller ones)" || codes.has(name)) continue;
    codes.set(name, codes.size);
    colors.set(name, color);
  }
  node = data;
  const largest = data.devices.reduce((most, device) => Math.max(most, device.total_bytes ?? device.reading?.used_bytes ?? 0), 0);
  DATA = { processes: [], groupings: [{ name: "layer", names: [], colors: [] }, { name: "structure", names: [...codes.keys()], colors: [...colors.values()] }, { name: "tag", names: [], colors: [] }], unit: unitFor(largest) };
}

const named = (device) => `GPU ${device.ordinal}`;
const flagsOf = (process) => process.flags.filter((flag) => flag !== "covered");
const isCovered = (process) => process.tracked_bytes !== null;
const whoOf = ({ who: { user, comm, pod, container, slurm_job: slurm, job, rank }, uid }) =>
  [user ?? (uid === null ? null : String(uid)), comm, pod ?? container, slurm ? "slurm " + slurm : job, rank === undefined ? null : "rank " + rank].filter(Boolean).join(" · ");
const isListed = (process) => listed.word === "" || `${process.pid} ${whoOf(process)}`.toLowerCase().includes(listed.word);
// Orders of the rows; `used` is the order of the device.
const ORDERS = {
  tracked: (a, b) => (b.tracked_bytes ?? -1) - (a.tracked_bytes ?? -1),
  untrackable: (a, b) => (b.untrackable_bytes ?? -Infinity) - (a.untrackable_bytes ?? -Infinity),
  user: (a, b) => whoOf(a).localeCompare(whoOf(b)),
  pid: (a, b) => a.pid - b.pid,
};
const since = (time_ns) => (node.now_ns - time_ns) / 1e9 + nodeSource.age();

// Returns the parts of a process's memory that are drawn: categories, idle memory, memory without an allocation. Without an agent
// there is only one part.
function piecesOf(process) {
  if (process.used_bytes === null) return [];
  if (!isCovered(process) || process.untrackable_bytes === null) return [["smaller", process.used_bytes]];
  return [...process.structures.map(({ name, bytes }) => [codeFor(name), bytes]), ["opaque", process.opaque_bytes], ["idle", process.pool_idle_bytes],
    ["predates", process.predates_bytes], ["untrackable", process.untrackable_bytes]].filter(([, bytes]) => bytes > 0);
}
const piece = (className, bytes, ...inside) => sized(h("span", { class: className }, inside), { flex: `${Math.max(0, bytes)} 1 0` });
function processBar(process, className) {
  return piece(className, process.used_bytes ?? 0, piecesOf(process).map(([code, bytes]) => piece(colorClass(code), bytes)));
}

// Returns the processes of a device, largest first. Two processes of about the same size keep their order, because rows that swap
// at each update cannot be read.
const order = new Map();
const keyOf = (process, at) => (process.pid === 0 ? `hidden ${at}` : `${process.pid}.${process.start_ticks}`);
function inStableOrder(device, processes) {
  const size = (process) => process.used_bytes ?? process.tracked_bytes ?? 0;
  const before = order.get(device.name) ?? [];
  const place = new Map(before.map((key, at) => [key, at]));
  const at = (process) => place.get(keyOf(process)) ?? Infinity;
  const rows = processes.slice().sort((a, b) => (at(a) === at(b) ? size(b) - size(a) : at(a) - at(b)));
  for (let row = 1; row < rows.length; row++) {
    for (let up = row; up > 0 && size(rows[up]) > 1.1 * size(rows[up - 1]); up--) [rows[up - 1], rows[up]] = [rows[up], rows[up - 1]];
  }
  order.set(device.name, rows.map((process) => keyOf(process)));
  return rows;
}
// Returns the rows of a device as they are printed: its processes, and its other memory. `total` is null if their sum is unknown.
function deviceOf(device, at) {
  const processes = inStableOrder(device, node.processes.filter((process) => process.device === at));
  const reading = device.listed ?? device.reading;
  // A device without its own memory shows the host's memory. Then memory that belongs to no GPU process is used by the host.
  const unified = reading?.unified ?? false;
  const words = unified ? { unaccounted: "rest of the host", free: "available" } : {};
  const beside = [
    ["other processes", device.other_processes.count > 0 ? device.other_processes.used_bytes : null, "smaller"],
    ["unaccounted", device.unaccounted_bytes, unified ? "opaque" : "predates"], ["system", reading?.system_reserved_bytes ?? null, "opaque"], ["free", reading?.free_bytes ?? null, "free"],
  ].filter(([, bytes]) => bytes !== null);
  const known = [...processes.map((process) => process.used_bytes), ...beside.map(([, bytes]) => bytes)];
  const total = device.listed === null ? null : sum(known.filter((bytes) => bytes !== null));
  const there = known.filter((bytes) => bytes !== null);
  const steps = (total === null ? there.map(round) : apportion(round(total), there))[Symbol.iterator]();
  const printed = known.map((bytes) => (bytes === null ? null : steps.next().value));
  return {
    device, at, processes, reading, total, unified,
    used: printed.slice(0, processes.length),
    beside: beside.map(([name, bytes, color], index) => ({ name, label: words[name] ?? name, bytes, color, steps: printed[processes.length + index] })),
  };
}

function doubtOf({ device, reading }) {
  const words = [];
  if (device.why !== null) words.push(device.why);
  if (!reading) words.push("its memory was not read");
  else if (since(device.reading.time_ns) > STALE) words.push(`stale: read ${seconds(since(device.reading.time_ns))} ago`);
  return words.join(", ");
}

function strip(of) {
  const { processes, beside } = of;
  return h("span", { class: "strip", "aria-hidden": "true" }, processes.map((process) => processBar(process, "mine")), beside.map(({ color, bytes }) => piece(color, bytes)));
}

function devicesTable(all) {
  const find = (of, name) => of.beside.find((row) => row.name === name);
  const names = ["unaccounted", "system", "free"];
  const cell = (row) => number(row?.steps ?? null, row?.bytes ?? null);
  const rows = all.map((of) => {
    const others = find(of, "other processes");
    const bytes = [...of.processes.map((process) => process.used_bytes), others?.bytes ?? null].filter((bytes) => bytes !== null);
    const steps = sum([...of.used.filter((steps) => steps !== null), others?.steps ?? 0]);
    const title = `${of.device.model} ${of.device.name}`;
    return h("tr", { "data-key": of.device.name }, h("th", { scope: "row" }, h("a", { href: `#gpu-${of.device.ordinal}`, title }, named(of.device)), of.unified ? h("span", { class: "soft" }, " unified") : null, doubtOf(of) ? h("span", { class: "bad" }, " ", doubtOf(of)) : null),
      h("td", { class: "wide" }, strip(of)), number(bytes.length || of.total !== null ? steps : null, bytes.length || of.total !== null ? sum(bytes) : null), ...names.map((name) => Object.assign(cell(find(of, name)), { className: name === "free" ? "n" : "n optional" })),
      Object.assign(number(of.total === null ? null : round(of.total), of.total), { className: "n optional" }));
  });
  return h("section", { id: "devices", "data-key": "devices", "aria-labelledby": "devices-h" }, h("h2", { id: "devices-h" }, `${all.length} ${all.length === 1 ? "device" : "devices"}`),
    h("div", { class: "scroll" }, h("table", { class: "devices" }, h("caption", {}, unit().name),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "device"), h("th", { class: "wide", "aria-hidden": "true" }), h("th", { class: "n", scope: "col" }, "processes"),
        names.map((name) => h("th", { class: name === "free" ? "n" : "n optional", scope: "col" }, name)), h("th", { class: "n optional", scope: "col" }, "in all"))),
      h("tbody", {}, rows))),
    h("p", { class: "keys" }, legend(all)));
}

function legend(all) {
  const seen = new Map();
  const see = (code, bytes, word) => { if (bytes > 0) seen.set(code, (seen.get(code) ?? new Set()).add(word)); };
  const words = { idle: "pool idle", opaque: "opaque pools", predates: "predates the agent", untrackable: "Untrackable", smaller: "processes without an agent", free: "free" };
  for (const { processes, beside } of all) {
    for (const process of processes) for (const [code, bytes] of piecesOf(process)) see(code, bytes, words[code] ?? categoryName(STRUCTURE, code));
    for (const { color, bytes, label } of beside) see(color, bytes, label);
  }
  const order = (code) => (typeof code === "string" ? 1000 + Object.keys(words).indexOf(code) : code < 0 ? 500 - code : code);
  return [...seen.keys()].sort((a, b) => order(a) - order(b)).map((code) => h("span", { "data-key": "legend " + code }, swatch(code), h("bdi", {}, [...seen.get(code)].join(", "))));
}

function deviceSection(of) {
  const { device, processes, beside, total } = of;
  const hasPredates = processes.some((process) => process.predates_bytes);
  const columns = hasPredates ? 4 : 3;
  const most = processes.reduce((most, process) => Math.max(most, process.used_bytes ?? 0), 1);
  const shown = processes.map((process, at) => [process, at]).filter(([process]) => isListed(process));
  if (ORDERS[listed.by]) shown.sort(([a], [b]) => ORDERS[listed.by](a, b));
  const hidden = processes.map((process, at) => ({ bytes: process.used_bytes, steps: of.used[at], process })).filter(({ process }) => !isListed(process));
  const rows = shown.map(([process, at]) => {
    const { used_bytes: used, tracked_bytes: tracked, untrackable_bytes: gap, predates_bytes: predates } = process;
    const steps = { tracked: tracked === null ? null : round(tracked), gap: gap === null ? null : round(gap), predates: predates === null ? null : round(predates) };
    if ([used, tracked, gap, predates].every((bytes) => bytes !== null)) [steps.predates, steps.tracked, steps.gap] = apportion(of.used[at], [predates, tracked, gap]);
    const key = keyOf(process, at);
    const doubt = [...flagsOf(process), process.used_absence, process.time_ns !== null && since(process.time_ns) > STALE ? `sampled ${seconds(since(process.time_ns))} ago` : null].filter(Boolean);
    const optional = (cell) => Object.assign(cell, { className: "n optional" });
    return h("tr", { "data-key": key, "data-pid": process.pid },
      h("th", { scope: "row" }, process.pid === 0 ? "-" : h("a", { href: `/process/${key}#on-${device.name}`, id: `process-${device.ordinal}-${key}` }, String(process.pid))),
      h("td", { class: "who" }, h("bdi", {}, whoOf(process) || "-"), doubt.length ? h("span", { class: "soft" }, ` ${doubt.join(", ")}`) : null),
      number(of.used[at], used), optional(number(steps.tracked, tracked)), optional(number(process.pool_idle_bytes === null ? null : round(process.pool_idle_bytes), process.pool_idle_bytes)),
      hasPredates ? optional(number(steps.predates, predates)) : null, optional(number(steps.gap, gap)),
      h("td", { class: "barcell", "aria-hidden": "true" }, used === null ? null : sized(h("span", { class: "stack" }, piecesOf(process).map(([code, bytes]) => piece(colorClass(code), bytes))), { width: `${(100 * used) / most}%` })));
  });
  const foot = (name, steps, bytes, color, kind) => h("tr", { class: kind, "data-part": name }, h("th", { scope: "row", colspan: 2 }, color ? swatch(color) : null, name), number(steps, bytes), Array.from({ length: columns }, () => h("td", { class: "optional" })), h("td"));
  const doubt = doubtOf(of);
  const id = `gpu-${device.ordinal}`;
  return h("section", { id, "data-key": device.name, "aria-labelledby": id + "-h" },
    h("h2", { id: id + "-h" }, h("bdi", {}, `${named(device)} ${device.model}`), h("span", { class: "soft" }, " ", h("bdi", {}, device.name.slice(0, 12)))),
    doubt ? h("p", { class: "alert" }, h("bdi", {}, doubt)) : null,
    of.unified ? h("p", { class: "soft" }, "Unified memory: this GPU uses the host's memory and has none of its own. Size, used and available are the host's.") : null,
    total === null && device.reading ? h("p", { class: "soft moved" }, "Memory moved while the processes were listed, or one of them has no number: no sum is computed.") : null,
    h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `processes of ${named(device)}` }, h("table", { class: "bars processes" }, h("caption", {}, unit().name),
      h("colgroup", {}, ["pid", "who", "amount", ...Array.from({ length: columns }, () => "amount optional"), "drawn"].map((name) => h("col", { class: name }))),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "pid"), h("th", { scope: "col" }, "who"), h("th", { class: "n", scope: "col" }, "used"),
        ["tracked", "pool idle", hasPredates ? "predates" : null, "Untrackable"].filter(Boolean).map((name) => h("th", { class: "n optional", scope: "col" }, name)), h("th", { class: "barcell", "aria-hidden": "true" }))),
      h("tbody", {}, rows.length ? rows : h("tr", { "data-key": "none" }, h("td", { colspan: 3, class: "soft" }, hidden.length ? "no process contains the word" : "no process"))),
      h("tfoot", {}, hidden.length ? foot(`${hidden.length} without “${listed.word}”`, sum(hidden.map(({ steps }) => steps ?? 0)), sum(hidden.map(({ bytes }) => bytes ?? 0)), null, "beside") : null,
        beside.map((row) => foot(row.name === "other processes" ? `${thousands(device.other_processes.count)} more processes` : row.label, row.steps, row.bytes, row.color, "beside")),
        total === null ? null : foot(of.unified ? "= the host" : "= the device", round(total), total, null, "sum")))));
}

// Whether nobody uses a device. The table of devices has all its amounts.
const isIdle = ({ processes, beside, total }) => total !== null && processes.length === 0 && beside.every(({ name, bytes }) => name === "system" || name === "free" || bytes === 0);
// Returns a list of the devices that nobody uses.
function idleSection(idle) {
  if (idle.length === 0) return null;
  const rows = idle.map(({ device }) => h("li", { "data-key": device.name, id: `gpu-${device.ordinal}` }, h("bdi", {}, `${named(device)} ${device.model}`), h("span", { class: "soft" }, " ", h("bdi", {}, device.name.slice(0, 12)))));
  return h("section", { id: "idle", "data-key": "idle", "aria-labelledby": "idle-h" }, h("h2", { id: "idle-h" }, "Devices without processes"), h("ul", {}, rows));
}

// Returns a line with the number of devices that processes report although NVML does not have them.
function claimsLine({ processes, devices }) {
  if (processes === 0) return null;
  const who = processes === 1 ? "1 process names" : `${thousands(processes)} processes name`;
  const what = devices === 1 ? "a device" : `${thousands(devices)} devices`;
  return h("p", { "data-key": "claims", class: "alert" }, `${who} ${what} that NVML does not have; `, h("code", {}, "gpumemctl ps"), " lists them.");
}

// Returns the findings about processes, the most important first; a line that there is none if a process with an agent exists.
const MOST_FINDINGS = 5;
function findingsSection() {
  const { findings } = node;
  const covered = new Set(node.processes.filter(isCovered).map((process) => keyOf(process)));
  if (findings.length === 0) {
    return covered.size === 0 ? null : h("p", { "data-key": "findings", id: "findings", class: "soft" }, `No problem found in ${covered.size === 1 ? "1 process" : `${thousands(covered.size)} processes`} with an agent.`);
  }
  const rows = findings.slice(0, MOST_FINDINGS).map(({ pid, start_ticks, device: at, kind, severity, text }) => {
    const process = node.processes.find((process) => process.pid === pid && process.start_ticks === start_ticks);
    const device = node.devices[at];
    const where = [device ? named(device) : null, process?.who.comm, process?.who.user].filter(Boolean).join(" · ");
    const key = `${pid}.${start_ticks}`;
    return h("li", { "data-key": `${key} ${at} ${kind}`, class: severity === "note" ? "soft" : "problem" },
      h("strong", {}, severity), " ", h("a", { href: `/process/${key}${device ? "#on-" + device.name : ""}` }, `pid ${pid}`), " ", h("bdi", {}, `${where}: ${text}`));
  });
  const more = findings.length - rows.length;
  return h("section", { id: "findings", "data-key": "findings", "aria-labelledby": "findings-h" },
    h("h2", { id: "findings-h" }, `${thousands(findings.length)} ${findings.length === 1 ? "finding" : "findings"}`),
    h("ul", {}, rows, more > 0 ? h("li", { "data-key": "more", class: "soft" }, `${thousands(more)} more`) : null));
}

// Returns a line for each process that ended a short time ago, with a link to its report and the command that shows it.
function endedSection() {
  const last = node.ended.filter((process) => process.age_ms < MOST_AGE).slice(0, MOST_ENDED);
  if (last.length === 0) return null;
  const rows = last.map((process) => h("li", { "data-key": keyOf(process) }, h("a", { href: `/process/${keyOf(process)}` }, `pid ${process.pid}`), " ", h("bdi", {}, whoOf(process)),
    `, ended ${seconds(process.age_ms / 1000)} ago`,
    process.outcome ? h("strong", {}, `, ${process.outcome}`) : null, ": ", h("code", {}, `gpumemctl report ${process.run}`)));
  return h("section", { id: "ended", "data-key": "ended", "aria-labelledby": "ended-h" }, h("h2", { id: "ended-h" }, "Ended processes"), h("ul", {}, rows));
}

// Makes the controls that choose and order the rows of processes.
function listTools() {
  const search = h("input", { type: "search", id: "find", autocomplete: "off", spellcheck: "false", placeholder: "user, program, job, pid" });
  search.addEventListener("input", () => { listed.word = search.value.trim().toLowerCase(); drawNode(); });
  const orders = [["used", "used"], ["tracked", "tracked"], ["untrackable", "Untrackable"], ["user", "user"], ["pid", "pid"]];
  return [choice("sort by", "sort", orders, listed.by, (by) => { listed.by = by; drawNode(); }), h("label", { class: "find" }, h("span", { class: "soft" }, "processes with "), search)];
}

function drawNode() {
  if (node === null) return;
  const all = node.devices.map(deviceOf);
  const none = h("p", { "data-key": "none" }, "No device: ", h("bdi", {}, node.nvml.reason || "NVML has none"), ". ", h("code", {}, "gpumemctl doctor"), " says more.");
  const fresh = h("div", { id: "panel" }, all.length ? [endedSection(), devicesTable(all), claimsLine(node.claims), ...all.filter((of) => !isIdle(of)).map(deviceSection), idleSection(all.filter(isIdle))] : [none, claimsLine(node.claims)]);
  const active = document.activeElement;
  const where = window.scrollY;
  updateTree(answer, h("div", { id: "answer" }, all.length ? findingsSection() : null));
  updateTree(panel, fresh);
  // If the row with the focus has moved, it has lost the focus.
  if (active?.isConnected && document.activeElement !== active && panel.contains(active)) active.focus({ preventScroll: true });
  if (window.scrollY !== where) window.scrollTo(0, where);
  const offset = node.clock.wall_offset_ns ?? 0;
  asOf.textContent = nodeSource.paused ? "paused" : `as of ${clockTime(new Date((offset + node.at_ns) / 1e6))}`;
}

function startNode() {
  panel.id = "panel";
  document.title = "GPU memory";
  const source = () => nodeSource;
  nodeSource = follow("/api/processes", 1000, {
    show: (data) => {
      const isFirst = node === null;
      takeNode(data);
      headline.replaceChildren("GPU memory of ", h("bdi", {}, data.host));
      document.title = `GPU memory of ${data.host}`;
      pageFooter.textContent = `gpumemd ${data.program}. This page sends it one request a second, and none to others. ${data.shows === "tags" ? "" : "It shows categories; gpumemctl report shows tags to their owner."}`;
      if (isFirst) toolbar.replaceChildren(tools([updates(nodeSource), listTools()], drawNode));
      drawNode();
      if (isFirst && location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
    },
    tick: drawNode,
    onProblem: problemView(source, "The numbers"),
  });
  nodeSource.ask();
}
