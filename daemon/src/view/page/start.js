// The page of one process: the report, drawn again when there is new data. The user's choices stay. Also starts both pages.

// Changes the codes in new data so that each name keeps its code and its colour.
const known = [0, 1, 2].map(() => ({ names: [], colors: [] }));
function keepColors(data) {
  data.groupings.forEach((grouping, by) => {
    const { names, colors } = known[by];
    grouping.names.forEach((name, at) => {
      if (names.includes(name)) return;
      names.push(name);
      colors.push(grouping.colors[at]);
    });
    const to = grouping.names.map((name) => names.indexOf(name));
    const code = (old) => (typeof old === "number" && old >= 0 ? to[old] : old);
    Object.assign(grouping, { names, colors });
    for (const { detail } of data.processes.flatMap((process) => process.devices)) {
      if (!detail) continue;
      for (const row of detail.statements[by]) if (row.code !== undefined) row.code = code(row.code);
      for (const holding of detail.holdings) holding[H_CODES + by] = code(holding[H_CODES + by]);
    }
  });
}

// Corrects the times of the view: times are relative to the begin of the data, which differs in new data.
function rebase(old, clock) {
  const shift = (old.base - clock.base) * 1e9 + (old.base_ns - clock.base_ns);
  if (state.cursor !== null) state.cursor += shift;
  state.shown &&= state.shown.map((t) => t + shift);
  if (state.chosen) state.chosen = { ...state.chosen, t: state.chosen.t + shift, range: state.chosen.range?.map((t) => t + shift) ?? null };
}

const FOCUSABLE = "a[href], button, input, summary, [tabindex]";
function saveView() {
  const active = panel.contains(document.activeElement) ? document.activeElement : null;
  const within = active?.closest("section");
  const parts = (selector) => [...panel.querySelectorAll(selector)];
  return {
    id: active?.id, section: within?.id, at: active && within ? [...within.querySelectorAll(FOCUSABLE)].indexOf(active) : -1,
    path: active?.getAttribute("role") === "treeitem" ? active.getAttribute("aria-label").split(": ")[0] : null,
    caret: active?.matches("input[type=search]") ? active.selectionStart : null,
    open: new Map(parts("details[data-key]").map((details) => [details.dataset.key, details.open])),
    scrolled: parts(".scroll").map((made) => [made.scrollLeft, made.scrollTop]), y: window.scrollY,
  };
}
function restoreView(saved) {
  for (const details of panel.querySelectorAll("details[data-key]")) {
    const open = saved.open.get(details.dataset.key);
    if (open === undefined || open === details.open) continue;
    if (open && details.unfold) details.unfold();
    else details.open = open;
  }
  [...panel.querySelectorAll(".scroll")].forEach((made, at) => { [made.scrollLeft, made.scrollTop] = saved.scrolled[at] ?? [0, 0]; });
  const section = saved.section && document.getElementById(saved.section);
  const treeitem = saved.path !== null && [...panel.querySelectorAll("[role=treeitem]")].find((made) => made.getAttribute("aria-label").startsWith(saved.path + ": "));
  const found = treeitem || (saved.id && document.getElementById(saved.id)) || (section && section.querySelectorAll(FOCUSABLE)[saved.at]);
  if (found) {
    found.focus({ preventScroll: true });
    if (saved.caret !== null && found.setSelectionRange) found.setSelectionRange(saved.caret, saved.caret);
  }
  window.scrollTo(0, saved.y);
}

function startProcess(key) {
  let source = null;
  let signature = null;
  let moved = { t: null, at: 0 };
  const showTime = () => {
    if (DATA === null) return;
    const { process } = here() ?? { process: DATA.processes[0] };
    const last = here()?.device.last_t;
    if (!isOpen()) {
      asOf.textContent = last === undefined ? "ended" : `ended; last numbers as of ${time(process.clock, last)}`;
      asOf.className = "";
    } else if (source.paused) asOf.textContent = "paused";
    else if (last !== undefined) {
      const age = (performance.now() - moved.at) / 1000;
      asOf.textContent = `as of ${time(process.clock, last)}` + (age > STALE ? `, nothing newer for ${seconds(age)}` : "");
      asOf.className = age > STALE ? "bad" : "";
    }
  };
  const show = (data) => {
    if (state.isHeld) return;
    if (DATA !== null) rebase(DATA.processes[0].clock, data.processes[0].clock);
    const isFirst = DATA === null;
    keepColors(data);
    take(data);
    const last = JSON.stringify(PLACES.map(({ process, device }) => [process.clock.base, process.clock.base_ns, device.last_t]));
    if (moved.t !== last) moved = { t: last, at: performance.now() };
    const [process] = data.processes;
    headline.replaceChildren(h("bdi", {}, title().command));
    document.title = `pid ${process.pid} · GPU memory`;
    subtitle.replaceChildren(h("p", { class: "soft" }, h("bdi", {}, title().rest)), PLACES.length > 1 ? "" : origin(process));
    pageFooter.textContent = `gpumemd ${data.program}. ${isOpen() ? "This page sends it one request every two seconds, and none to others. " : ""}${data.tags ? "" : "It shows categories; gpumemctl report " + process.pid + " shows tags to their owner."}`;
    const names = JSON.stringify([data.unit, data.groupings.map((grouping) => grouping.names.length > 0), isOpen()]);
    if (names !== signature) {
      const at = toolbar.contains(document.activeElement) ? document.activeElement : null;
      signature = names;
      toolbar.replaceChildren(tools(isOpen() ? updates(source) : null));
      if (at) toolbar.querySelector(`input[name="${at.name}"]:checked`)?.focus({ preventScroll: true });
    }
    const [, place] = /^#device-(\d+)$/.exec(location.hash) ?? [];
    const on = location.hash.startsWith("#on-") ? PLACES.findIndex(({ device }) => device.name === location.hash.slice(4)) : Number(place);
    if (isFirst && PLACES[on]) state.place = on;
    if (!PLACES[state.place]) toPlace(0);
    const saved = saveView();
    render({});
    if (!isFirst) restoreView(saved);
    // The run of an ended process does not change.
    source.paused ||= !isOpen();
    showTime();
  };
  source = follow(`/api/process/${key}/page`, 2000, { show, tick: showTime, onProblem: problemView(() => source, "The numbers") });
  window.addEventListener("hashchange", followHash);
  followSize();
  source.ask();
}

function start() {
  const [, key] = /^\/process\/(\d+\.\d+)$/.exec(location.pathname) ?? [];
  panel.replaceChildren(h("p", { class: "soft" }, "gpumemd is asked …"));
  document.getElementById("main").replaceChildren(
    h("header", {}, key ? h("p", { class: "back" }, h("a", { href: "/" }, "all devices")) : null, headline, h("p", { class: "soft asof" }, asOf), answer, subtitle, announcer, problemBox),
    key ? links : "", toolbar, key ? over : "", panel);
  document.body.append(pageFooter);
  if (key) startProcess(key);
  else startNode();
}
start();
