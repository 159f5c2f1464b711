// The live page. It polls the server that the page came from, and shows the age of the numbers and failed requests.

// Age in seconds from which on a reading is outdated.
const STALE = 5;
const headline = h("h1", {});
const beneath = h("div", {});
const told = h("span", {});
const spoken = h("p", { class: "hidden", role: "status" });
const trouble = h("div", {});
const chosen = h("div", {});
const feet = h("footer", {});

// Announces a text once, also to screen readers.
function announce(text) {
  if (spoken.textContent !== text) spoken.textContent = text;
}

// Updates a tree to equal another one and leaves equal parts untouched, so that a link keeps its focus and a selection stays. Neither
// tree has listeners. Children with a key are matched by it.
function liken(old, fresh) {
  if (old.nodeName !== fresh.nodeName || old.dataset?.key !== fresh.dataset?.key) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = fresh.style.cssText;
    else old.setAttribute(name, value);
  }
  const known = new Map([...old.children].filter((child) => child.dataset.key).map((child) => [child.dataset.key, child]));
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const mine = child.dataset?.key ? known.get(child.dataset.key) : at && !at.dataset?.key ? at : null;
    if (!mine) { old.insertBefore(child, at); continue; }
    if (mine === at) at = at.nextSibling;
    else old.insertBefore(mine, at);
    liken(mine, child);
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
}

// Polls a path about every `every` ms while the page is visible. `show(data)` gets new data, `tick()` is called every second, and
// `lost(why)` gets the problem, or null without one.
function follow(path, every, { show, tick, lost }) {
  let [tag, page, timer, silent] = [null, null, null, null];
  const self = { paused: false, heard: null };
  const isWanted = () => !self.paused && document.visibilityState === "visible";
  const plan = (after) => { clearTimeout(timer); timer = isWanted() ? setTimeout(ask, after) : null; };
  const fail = (why, kind) => {
    silent ??= new Date();
    lost({ why, kind, since: silent });
  };
  async function ask() {
    timer = null;
    const began = performance.now();
    let wait = every;
    try {
      const response = await fetch(path, { headers: tag === null ? {} : { "If-None-Match": tag }, cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(8000) });
      // A daemon of another version serves another page.
      const serves = response.headers.get("gpumemd-page");
      page ??= serves;
      if (serves !== page) { location.reload(); return; }
      if (response.status === 200 || response.status === 304) {
        if (response.status === 200) {
          const data = await response.json();
          tag = response.headers.get("etag");
          self.heard = performance.now();
          show(data);
        }
        if (silent !== null) lost(null);
        silent = null;
      } else {
        wait = 3 * every;
        const said = await response.json().then((body) => body.error, () => null);
        fail(said ?? `it answers ${response.status}`, response.status === 503 ? "busy" : "refused");
      }
    } catch (error) {
      fail(error.name === "TimeoutError" ? "gpumemd does not answer in time" : error instanceof TypeError || error.name === "AbortError" ? "gpumemd does not answer" : String(error), "silent");
    }
    plan(Math.max(100, wait - (performance.now() - began)));
  }
  document.addEventListener("visibilitychange", () => plan(0));
  setInterval(() => { if (document.visibilityState === "visible") tick(); }, 1000);
  self.pause = (paused) => { self.paused = paused; plan(0); tick(); };
  self.age = () => (self.heard === null ? 0 : (performance.now() - self.heard) / 1000);
  self.ask = ask;
  return self;
}

const seconds = (age) => (age < 90 ? `${Math.round(age)} s` : age < 5400 ? `${Math.round(age / 60)} min` : `${Math.round(age / 3600)} h`);
const clockTime = (date) => date.toISOString().slice(11, 19) + "Z";

// Shows a problem at the top, and marks the displayed data as old.
function lostView(source, what) {
  return (lost) => {
    document.body.classList.toggle("old", lost !== null);
    const old = source().heard === null ? "" : ` ${what} are ${seconds(source().age())} old.`;
    trouble.replaceChildren(...(lost === null ? [] : [h("p", { class: "alert", id: "trouble" }, h("b", {}, lost.kind === "silent" ? "No answer. " : ""), h("bdi", {}, lost.why), `, since ${clockTime(lost.since)}.${old} This page goes on by itself.`)]));
    announce(lost === null ? "The numbers are live again." : lost.why);
  };
}
const updates = (source) => choice("updates", "updates", [["live", "live"], ["paused", "paused"]], source.paused ? "paused" : "live", (value) => source.pause(value === "paused"));
