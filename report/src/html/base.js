"use strict";
// Data, elements, numbers, times. Strings from processes become text, never markup.

const SVG = "http://www.w3.org/2000/svg";
const [LAYER, STRUCTURE, TAG] = [0, 1, 2];
const [OTHERS, SMALLER] = [-1, -2];

// State of the view: grouping of the rows, shown moment (moment.js), exact bytes or the page's unit, and device.
// A reader's choices on one device survive a redraw: the cursor as a time, the shown part of the timeline (null: all of it), the
// zoomed path, and the search word. `isHeld`: a pointer is pressed on the timeline, so it must not be replaced.
const state = { by: null, moment: 1, chosen: null, exact: false, place: 0, picked: null, starred: null, cursor: null, shown: null, shownBlocks: null, isHeld: false, zoomed: [], word: "", blockWord: "" };

// The shown document, and the devices of all its processes in their order.
let DATA = null;
let PLACES = [];
function take(data) {
  DATA = data;
  // Processes without a number as their rank come last, and keep their order.
  const rank = (process) => { const number = Number(process.rank ?? NaN); return Number.isNaN(number) ? Infinity : number; };
  data.processes.sort((a, b) => (rank(a) === rank(b) ? 0 : rank(a) - rank(b)));
  PLACES = data.processes.flatMap((process) => process.devices.map((device) => ({ process, device })));
  state.by ??= data.by;
}
function toPlace(place) {
  if (state.chosen) Object.assign(state, { moment: 1, chosen: null });
  Object.assign(state, { place, picked: null, cursor: null, shown: null, shownBlocks: null, isHeld: false, zoomed: [], word: "", blockWord: "" });
}

// Makes an element in a namespace (null: HTML) with attributes, handlers (on...) and children, which are elements or text.
function element(space, name, attributes, children) {
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== "") made.append(child);
  }
  return made;
}
const h = (name, attributes, ...children) => element(null, name, attributes, children);
const s = (name, attributes, ...children) => element(SVG, name, attributes, children);
// Sets sizes that depend on data through the DOM, because the content security policy forbids style attributes.
function sized(made, style) {
  for (const [key, value] of Object.entries(style)) made.style.setProperty(key, value);
  return made;
}

// Numbers.
const unit = () => (state.exact ? { name: "bytes", step: [1, 1] } : DATA.unit);
const sum = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
function thousands(number) {
  const digits = String(Math.abs(number)).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
  return number < 0 ? "-" + digits : digits;
}
function round(bytes) {
  const [size, scale] = unit().step;
  return Math.floor((bytes * scale + Math.floor(size / 2)) / size);
}
// Splits `total` steps into parts that add up to it exactly: rounds all down, then adds one step to those that lost most.
function apportion(total, parts) {
  const [size, scale] = unit().step;
  const steps = parts.map((bytes) => Math.floor((bytes * scale) / size));
  const lost = parts.map((bytes, at) => bytes * scale - steps[at] * size);
  const order = parts.map((_, at) => at).sort((a, b) => lost[b] - lost[a] || a - b);
  let missing = total - sum(steps);
  for (let turn = 0; missing > 0 && turn < 2 * order.length; turn++, missing--) steps[order[turn % order.length]]++;
  return steps;
}
function print(steps) {
  const scale = unit().step[1];
  const whole = thousands(Math.floor(Math.abs(steps) / scale));
  const sign = steps < 0 ? "-" : "";
  return scale === 1 ? sign + whole : sign + whole + "." + String(Math.abs(steps) % scale).padStart(String(scale).length - 1, "0");
}
const amount = (bytes) => (bytes === null || bytes === undefined ? "-" : print(round(bytes)));
const withUnit = (bytes) => `${amount(bytes)} ${unit().name}`;
const signed = (bytes) => (bytes > 0 ? "+" : "") + amount(bytes);
const percent = (part, whole) => (whole > 0 ? ((100 * part) / whole).toFixed(1) + " %" : "-");

// Makes a cell of a table: it shows the printed steps, and exact bytes in its tooltip.
function number(steps, bytes, mark) {
  const text = steps === null || steps === undefined ? "-" : (mark || "") + print(steps);
  const known = bytes !== null && bytes !== undefined;
  return h("td", { class: "n", "data-bytes": known ? String(bytes) : undefined, title: known ? thousands(bytes) + " bytes" : undefined }, text);
}

// Times.
function wallParts(clock, t) {
  const seconds = clock.base + Math.floor((clock.base_ns + t) / 1e9);
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? ["", "?"] : [date.toISOString().slice(0, 10), date.toISOString().slice(11, 19) + "Z"];
}
// Names a time. Within a span of ns, it has as many decimals as tell hundredths of the span apart.
function time(clock, t, span = Infinity) {
  const decimals = Math.min(6, Math.max(0, Math.ceil(Math.log10(100e9 / span))));
  if (clock.kind === "lines") return "line " + thousands(clock.base + Math.round(t));
  if (clock.kind === "seconds") return "+" + (clock.base + (clock.base_ns + t) / 1e9).toFixed(Math.max(1, decimals)) + " s";
  const [day, whole] = wallParts(clock, t);
  const ns = Math.floor(clock.base_ns + t) % 1e9;
  const parts = String(ns < 0 ? ns + 1e9 : ns).padStart(9, "0").slice(0, decimals);
  const clockTime = parts === "" ? whole : whole.replace("Z", `.${parts}Z`);
  return clock.dated ? day + " " + clockTime : clockTime;
}

// Returns the colour class: of a category in a grouping, or by kind for other memory such as idle.
const colorClass = (code, by = state.by ?? STRUCTURE) =>
  typeof code === "string" ? code : code === OTHERS ? "others" : code === SMALLER ? "smaller" : "c" + DATA.groupings[by].colors[code];
const swatch = (code, by) => h("span", { class: "swatch " + (code === null || code === undefined ? "none" : colorClass(code, by)), "aria-hidden": "true" });
const categoryName = (by, code) =>
  code === OTHERS ? (by === TAG ? "(no tag)" : "Others") : code === SMALLER ? "(smaller ones)" : DATA.groupings[by].names[code];

const here = () => PLACES[state.place];
// Returns whether a process still runs. Its amounts at the end are then the current ones.
const isOpen = () => DATA.processes.some((process) => process.open);
const section = (id, link, title, ...children) =>
  h("section", { id, "data-link": link, "aria-labelledby": id + "-h" }, h("h2", { id: id + "-h" }, title), children);
const folded = (key, title, make) => {
  // Makes the content when it is first opened, because tables may be long.
  const made = h("details", { "data-key": key }, h("summary", {}, title));
  const fill = () => { if (made.open && made.children.length === 1) made.append(make()); };
  made.addEventListener("toggle", fill);
  made.unfold = () => { made.open = true; fill(); };
  return made;
};
