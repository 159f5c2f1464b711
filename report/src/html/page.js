// The page: head, overview of several devices, one device in full.

let redraws = [];

function choice(legend, name, options, current, act) {
  return h("fieldset", {}, h("legend", {}, legend), options.map(([value, label]) => h("label", {},
    h("input", { type: "radio", name, value: String(value), checked: String(value) === String(current), onchange: () => act(value) }), h("span", {}, label))));
}

function theme(value) {
  if (value === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", value);
  try { localStorage.setItem("gpumem-theme", value); } catch { /* a file may have no storage */ }
}

// The choice of the moment; a chosen one is an option while it is shown.
const momentChoice = h("div", {});
function drawMomentChoice() {
  const hadFocus = momentChoice.contains(document.activeElement);
  const options = [[PEAK, "at peak"], [END, isOpen() ? "now" : "at the end"], ...(state.moment === CHOSEN ? [[CHOSEN, `at ${chosenTime(state.chosen.t)}`]] : [])];
  momentChoice.replaceChildren(choice("composition", "moment", options, state.moment, (value) => lookAt(value)));
  if (hadFocus) momentChoice.querySelector("input:checked")?.focus({ preventScroll: true });
}

// Makes the controls for rows, moment, unit and theme, then `more`. A page without processes has none for the moment.
function tools(more, draw = render) {
  let kept = "auto";
  try { kept = localStorage.getItem("gpumem-theme") ?? "auto"; } catch { /* a file may have no storage */ }
  if (kept !== "auto") theme(kept);
  const change = (key) => (value) => { state[key] = value; state.picked = null; render({}); };
  const named = DATA.groupings.map((grouping, by) => [by, grouping.name]).filter(([by]) => by === state.by || DATA.groupings[by].names.length > 0);
  return h("div", { class: "tools", role: "group", "aria-label": "how it is shown" },
    named.length > 1 ? choice("rows", "by", named, state.by, change("by")) : null,
    DATA.processes.length === 0 ? null : momentChoice,
    choice("in", "unit", [["", DATA.unit.name], ["bytes", "exact bytes"]], state.exact ? "bytes" : "", (value) => { state.exact = value === "bytes"; draw({}); }),
    choice("theme", "theme", [["auto", "auto"], ["light", "light"], ["dark", "dark"]], kept, theme), more);
}

// A longer overview scrolls in a box, so that the chosen device below it is near.
const MOST_ROWS_WHOLE = 16;

// Makes a table with a row for each device. All curves have one scale.
function overview() {
  const most = PLACES.reduce((most, { device }) => Math.max(most, device.amounts.used ?? 0, device.peak_tracked ?? 0, device.peak_used?.[0] ?? 0), 1);
  const keys = ["used", "predates", "tracked", "idle", "gap"].filter((key) => key !== "predates" || PLACES.some(({ device }) => device.amounts.predates));
  // Rounds as the text report does: `used` is apportioned from its sum, the parts of each row from its `used`.
  const known = PLACES.filter(({ device }) => device.amounts.used !== null).map(({ device }) => device.amounts.used);
  const usedSteps = apportion(round(sum(known)), known)[Symbol.iterator]();
  const rows = PLACES.map(({ process, device }, place) => {
    const { used, predates, tracked, gap, idle } = device.amounts;
    const steps = Object.fromEntries(["used", "predates", "tracked", "idle", "gap"].map((key) => [key, device.amounts[key] === null ? null : round(device.amounts[key])]));
    if (used !== null) steps.used = usedSteps.next().value;
    if ([used, predates, tracked, gap].every((bytes) => bytes !== null)) [steps.predates, steps.tracked, steps.gap] = apportion(steps.used, [predates, tracked, gap]);
    return { process, device, place, steps };
  });
  const several = DATA.processes.length > 1;
  const spark = (device) => {
    if (!device.detail) return null;
    const buckets = device.detail.course.buckets;
    const used = buckets.map((bucket) => bucket[1]?.[1] ?? null).filter((bytes) => bytes !== null);
    const values = used.length > 1 ? used : buckets.map((bucket) => bucket[2]?.[1] ?? null).filter((bytes) => bytes !== null);
    return values.length > 1 ? sparkline(values, 120, 26, most) : null;
  };
  const columnSum = (key) => {
    const steps = rows.map((row) => row.steps[key]).filter((steps) => steps !== null);
    return steps.length ? h("td", { class: "n" }, print(sum(steps))) : h("td", { class: "n" }, "-");
  };
  // A narrow window has the number of the device, and no more than two columns of amounts.
  const titleOf = ({ title }) => { const [, short, more] = /^(\S+ \S+)(.*)$/.exec(title) ?? [null, title, ""]; return [h("span", { class: "short" }, short), h("span", { class: "more" }, more)]; };
  const amounts = (key, cell) => { if (key !== "used") cell.classList.add("optional"); return cell; };
  const go = (place) => (event) => { event.preventDefault(); location.hash = "device-" + place; };
  return h("section", { id: "overview", class: "overview", "aria-labelledby": "overview-h" }, h("h2", { id: "overview-h" }, `${PLACES.length} rows: ${several ? "processes and devices" : "devices"}`),
    h("div", PLACES.length > MOST_ROWS_WHOLE ? { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "processes and devices" } : { class: "scroll" }, h("table", {}, h("caption", {}, `${unit().name}, ${isOpen() ? "now" : "at the end"}; courses at one scale, up to ${withUnit(most)}`),
      h("thead", {}, h("tr", {}, several ? h("th", { scope: "col" }, "rank") : null, h("th", { scope: "col" }, several ? "process and device" : "device"), keys.map((key) => amounts(key, h("th", { class: "n", scope: "col" }, key === "gap" ? "Untrackable" : key))),
        h("th", { class: "n", scope: "col" }, "peak of tracked"), h("th", { class: "optional", "aria-hidden": "true" }, "used over time"))),
      h("tbody", {}, rows.map(({ process, device, place, steps }) => h("tr", { class: place === state.place ? "here" : "" },
        several ? h("td", {}, process.rank ?? "-") : null,
        h("th", { scope: "row" }, h("a", { href: "#device-" + place, onclick: go(place), "aria-current": place === state.place ? "true" : null }, h("bdi", {}, several ? `${process.pid} ${process.label}, ` : "", titleOf(device))),
          process.covered ? null : h("span", { class: "soft" }, " uncovered")),
        keys.map((key) => amounts(key, number(steps[key], device.amounts[key]))), number(device.peak_tracked === null ? null : round(device.peak_tracked), device.peak_tracked),
        h("td", { class: "optional", "aria-hidden": "true" }, spark(device))))),
      PLACES.length > 1 ? h("tfoot", {}, h("tr", {}, several ? h("td") : null, h("th", { scope: "row" }, "sum of the known values"), keys.map((key) => amounts(key, columnSum(key))), h("td"), h("td", { class: "optional" }))) : null)));
}

// The conclusions, above everything else.
const answer = h("div", { id: "answer" });
const MOST_ANSWERS = 5;

// Returns what the top of the page says: of one device its summary, of several the processes with a problem.
function conclusions() {
  if (PLACES.length === 1) return verdict(PLACES[0].process, PLACES[0].device);
  const lines = problems().map((process) => h("p", { class: "alert" },
    h("a", { href: "#device-" + placeOf(process) }, h("bdi", {}, `${process.label}, pid ${process.pid}`)), ": ", h("bdi", {}, process.verdict[0])));
  const more = lines.length - MOST_ANSWERS;
  return [lines.slice(0, MOST_ANSWERS), more > 0 ? h("p", { class: "soft" }, `${thousands(more)} more processes have findings`) : null];
}
const hasProblem = (process) => process.verdict.length > 0 && !process.verdict[0].startsWith("no problem");
const isOutOfMemory = (process) => process.verdict[0].startsWith("OUT OF MEMORY");
// Returns the processes with a problem, first those that ran out of memory.
const problems = () => DATA.processes.filter(hasProblem).sort((a, b) => isOutOfMemory(b) - isOutOfMemory(a));
const placeOf = (process) => PLACES.findIndex((place) => place.process === process);

// Returns the line that states where the numbers are from and whether they are complete.
function origin(process) {
  const data = h("a", { href: "#coverage" }, h("bdi", {}, `data: ${process.data}`));
  return h("p", { class: "soft" }, process.coverage[0] ? [h("bdi", {}, process.coverage[0]), " · "] : null, data);
}

// Divides the title into the command and what identifies the process.
function title() {
  const [command, ...rest] = DATA.title.split("  ").filter(Boolean);
  return { command, rest: rest.join(" · ") };
}

// Returns the summary: findings, how the process ended, its last OOM, and the memory it used.
function verdict(process, device) {
  const detail = device.detail;
  if (!detail) return null;
  const last = detail.ooms.findLast((oom) => oom.kind !== "refused");
  const reading = device.peak_used ? ` NVML's highest reading was ${withUnit(device.peak_used[0])} at ${time(process.clock, device.peak_used[1])}.` : "";
  const [row] = detail.statements[state.by];
  const size = device.total === null ? "" : ` of ${withUnit(device.total)}`;
  const used = row.bytes[1] ?? row.bytes[0];
  // Untrackable memory was measured at another time, so the sum is not exact.
  const about = row.carried[row.bytes[1] === null ? 0 : 1] ? "about " : "";
  const said = used === null ? (device.peak_tracked === null ? "" : `Tracked ${withUnit(device.peak_tracked)}${size} at its peak.`)
    : `It used ${about}${withUnit(used)}${size}${row.bytes[1] === null ? " at the end." : ` at the peak${process.covered ? " of tracked memory" : ""}, ${time(process.clock, device.peak_t)}.`}`;
  // A verdict about the last OOM has the record's sentence.
  const isTold = hasProblem(process) && isOutOfMemory(process);
  const record = h("a", { href: "#oom" }, "the record");
  return [
    process.verdict.map((line, at) => h("p", !hasProblem(process) ? {} : { class: "alert", role: "note" }, h("bdi", {}, line), at === 0 && isTold && last ? [" (", record, ")"] : null)),
    process.ending ? h("p", { class: "alert", role: "note" }, h("b", {}, "How it ended: "), h("bdi", {}, process.ending)) : null,
    last && !isTold ? h("p", { class: "alert", role: "note" }, h("b", {}, last.kind === "oom" ? "Memory ran out. " : "Memory may have run out. "), h("bdi", {}, last.lines[0] ?? ""), " ", h("bdi", {}, last.lines.findLast((line) => line.startsWith("verdict"))?.replace(/^verdict\s+/, "— ") ?? ""), " (",
      record, ")") : null,
    process.advice ? h("p", {}, h("bdi", {}, process.advice)) : null,
    h("p", {}, said + reading),
  ];
}

function devicePanel({ process, device }) {
  const { detail } = device;
  const several = PLACES.length > 1;
  const title = several ? h("h2", { id: "device-h", tabindex: "-1" }, h("bdi", {}, DATA.processes.length > 1 ? `${process.label}, pid ${process.pid}, ${device.title}` : device.title)) : null;
  const alerts = process.warnings.map((line) => h("p", { class: "alert" }, h("bdi", {}, line)));
  if (!detail) return [title, alerts, h("p", {}, "There was no room for its details in this file: gpumemctl report " + process.pid + " --html has them."), words(process, device)];
  const table = statement(process, device);
  const course = timeline(process, device, table.move);
  const blocks = blocksPanel(process, device);
  // Parts that show one moment. They are made again for another one; the timeline stays.
  const [strip, composed] = [h("div", {}), h("div", {})];
  let paths = null;
  const compose = () => {
    paths = process.covered && DATA.tags ? icicle(device) : null;
    strip.replaceChildren(deviceStrip(process, device) ?? "");
    composed.replaceChildren(...(process.covered ? [groupings(device), paths?.made, DATA.tags ? entries(process, device) : null] : []).filter(Boolean));
    redraws = [course.redraw, blocks?.redraw, paths?.redraw].filter(Boolean);
    drawMomentChoice();
  };
  refresh = () => {
    compose();
    course.showChosen();
    paths?.redraw();
    reachWideTables();
  };
  compose();
  return [
    title, alerts, several ? h("p", { class: "soft" }, h("bdi", {}, process.coverage[1] ?? process.coverage[0] ?? "")) : null, several ? verdict(process, device) : null, strip,
    section("summary", "Summary", "Where it went, and when", h("div", { class: "pair summary" }, table.table, course.figure)),
    blocks?.made, composed,
    bridge(process, device), gapSteps(process, device), iterations(device), counters(process), ooms(process, device), words(process, device),
  ];
}

// Puts tables that are wider than their place in the order of Tab, so that the keyboard can scroll them.
function reachWideTables() {
  for (const box of document.querySelectorAll("main .scroll:not([role]), main .scroll[data-wide]")) {
    const isWide = box.scrollWidth > box.clientWidth;
    const attributes = { "data-wide": "", tabindex: "0", role: "group", "aria-label": box.querySelector("caption")?.textContent ?? "table" };
    for (const [name, value] of Object.entries(attributes)) isWide ? box.setAttribute(name, value) : box.removeAttribute(name);
  }
}

const panel = h("div", { id: "panel" });
const over = h("div", {});
const links = h("nav", { "aria-label": "parts of the report" });

function render({ focus }) {
  // The pictures are replaced, so a pressed pointer is on none of them.
  state.isHeld = false;
  // An unchanged text keeps the focus on its link.
  const told = h("div", {}, conclusions());
  if (told.textContent !== answer.textContent) answer.replaceChildren(...told.childNodes);
  const scrolled = over.querySelector(".tall")?.scrollTop;
  over.replaceChildren(...(PLACES.length > 1 ? [overview()] : []));
  showRow(scrolled);
  const made = PLACES.length ? devicePanel(here()) : [h("p", {}, "No GPU memory was seen."), ...DATA.processes.map((process) => [counters(process), words(process, {})])];
  panel.replaceChildren(...made.flat(4).filter(Boolean));
  const parts = [...document.querySelectorAll("main section[id]")].filter((part) => part.id !== "overview");
  links.replaceChildren(h("ul", {}, parts.map((part) => h("li", {}, h("a", { href: "#" + part.id }, part.dataset.link))), document.getElementById("text") ? h("li", {}, h("a", { href: "#text" }, "As text")) : null));
  redraws.forEach((redraw) => redraw());
  reachWideTables();
  if (focus) document.getElementById(focus)?.focus();
}

// Scrolls a long overview: as before, or to the row of a device that was not shown before.
let rowShown = null;
function showRow(scrolled) {
  const box = over.querySelector(".tall");
  if (!box) return;
  const row = box.querySelector("tr.here");
  if (scrolled !== undefined) box.scrollTop = scrolled;
  const isVisible = row.offsetTop > box.scrollTop && row.offsetTop + row.offsetHeight < box.scrollTop + box.clientHeight;
  if (rowShown !== state.place && !isVisible) box.scrollTop = row.offsetTop - box.clientHeight / 2;
  rowShown = state.place;
}

function followHash() {
  const [, place] = /^#device-(\d+)$/.exec(location.hash) ?? [];
  if (place === undefined || !PLACES[place] || Number(place) === state.place) return;
  toPlace(Number(place));
  render({ focus: "device-h" });
}

// Redraws pictures when the width changes. For printing, tags and OOM records are opened, and closed again afterwards.
function followSize() {
  let width = 0;
  new ResizeObserver(() => {
    if (panel.clientWidth === width) return;
    width = panel.clientWidth;
    redraws.forEach((redraw) => redraw());
    reachWideTables();
  }).observe(panel);
  // `toggle` does not bubble.
  document.addEventListener("toggle", reachWideTables, true);
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("#entries details:not([open]), #oom details:not([open])")];
    opened.forEach((details) => { details.open = true; });
    redraws.forEach((redraw) => redraw());
  });
  window.addEventListener("afterprint", () => { opened.forEach((details) => { details.open = false; }); redraws.forEach((redraw) => redraw()); });
}
