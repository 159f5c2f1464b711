// Parts of both live pages: polling the daemon that served the page, updating the shown elements, and showing failed requests.

// Age in seconds from which on a reading is shown as stale.
const STALE = 5;
const headline = h("h1", {});
const subtitle = h("div", {});
const asOf = h("span", {});
const announcer = h("p", { class: "hidden", role: "status" });
const problemBox = h("div", {});
const toolbar = h("div", {});
const pageFooter = h("footer", {});

// Makes screen readers read a text, unless they have just read it.
function announce(text) {
  if (announcer.textContent !== text) announcer.textContent = text;
}

// Changes the element `old` so that it equals `fresh`. Equal parts are left untouched, so that a link keeps its focus and a
// selection stays. Children with a data-key are matched by their key. Both elements must be without listeners.
function updateTree(old, fresh) {
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
    const present = child.dataset?.key ? known.get(child.dataset.key) : at && !at.dataset?.key ? at : null;
    if (!present) { old.insertBefore(child, at); continue; }
    if (present === at) at = at.nextSibling;
    else old.insertBefore(present, at);
    updateTree(present, child);
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
}

// Requests a path about every `every` ms while the page is visible. Calls `show(data)` with new data, `tick()` each second, and
// `onProblem(problem)` after a failed request. After the next successful request, calls `onProblem(null)`.
function follow(path, every, { show, tick, onProblem }) {
  let [tag, page, timer, failedSince] = [null, null, null, null];
  const self = { paused: false, receivedAt: null };
  const isWanted = () => !self.paused && document.visibilityState === "visible";
  const plan = (after) => { clearTimeout(timer); timer = isWanted() ? setTimeout(ask, after) : null; };
  const fail = (why, kind) => {
    failedSince ??= new Date();
    onProblem({ why, kind, since: failedSince });
  };
  async function ask() {
    timer = null;
    const began = performance.now();
    let wait = every;
    let fresh = null;
    try {
      const response = await fetch(path, { headers: tag === null ? {} : { "If-None-Match": tag }, cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(8000) });
      // A daemon of another version has another page, so this one is loaded again.
      const serves = response.headers.get("gpumemd-page");
      page ??= serves;
      if (serves !== page) { location.reload(); return; }
      if (response.status === 200 || response.status === 304) {
        if (response.status === 200) {
          fresh = await response.json();
          tag = response.headers.get("etag");
          self.receivedAt = performance.now();
        }
        if (failedSince !== null) onProblem(null);
        failedSince = null;
      } else {
        wait = 3 * every;
        const message = await response.json().then((body) => body.error, () => null);
        fail(message ?? `it answers ${response.status}`, response.status === 503 ? "busy" : "refused");
      }
    } catch (error) {
      fail(error.name === "TimeoutError" ? "gpumemd does not answer in time" : error instanceof TypeError || error.name === "AbortError" ? "gpumemd does not answer" : String(error), "silent");
    }
    plan(Math.max(100, wait - (performance.now() - began)));
    // Outside of `try`, because an error in drawing is not a failed request.
    if (fresh !== null) show(fresh);
  }
  document.addEventListener("visibilitychange", () => plan(0));
  setInterval(() => { if (document.visibilityState === "visible") tick(); }, 1000);
  self.pause = (paused) => { self.paused = paused; plan(0); tick(); };
  self.age = () => (self.receivedAt === null ? 0 : (performance.now() - self.receivedAt) / 1000);
  self.ask = ask;
  return self;
}

const seconds = (age) => (age < 90 ? `${Math.round(age)} s` : age < 5400 ? `${Math.round(age / 60)} min` : `${Math.round(age / 3600)} h`);
const clockTime = (date) => date.toISOString().slice(11, 19) + "Z";

// Returns a function that shows a problem at the top of the page, and marks the shown data as old.
function problemView(source, what) {
  return (problem) => {
    document.body.classList.toggle("old", problem !== null);
    const old = source().receivedAt === null ? "" : ` ${what} are ${seconds(source().age())} old.`;
    problemBox.replaceChildren(...(problem === null ? [] : [h("p", { class: "alert", id: "trouble" }, h("b", {}, problem.kind === "silent" ? "No answer. " : ""), h("bdi", {}, problem.why), `, since ${clockTime(problem.since)}.${old} This page continues when the daemon answers again.`)]));
    announce(problem === null ? "The numbers are live again." : problem.why);
  };
}
const updates = (source) => choice("updates", "updates", [["live", "live"], ["paused", "paused"]], source.paused ? "paused" : "live", (value) => source.pause(value === "paused"));
