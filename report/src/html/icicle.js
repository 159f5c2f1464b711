// Paths of tags from the top down: widths are bytes. Click or Enter zooms, Escape goes back, arrows move. A search dims
// the paths that do not match, and shows the sum of the matching paths.

const DEEPEST = 14;
const ROW = 24;

// Replaces a number by `*`, as the text report does, so that parts that differ only in it become one.
const starred = (part) => (/^\d+$/.test(part) ? "*" : part.replace(/\.\d+$/, ".*"));
// Returns whether numbers are replaced by default: if there are over 200 paths, and at most a quarter are left then.
function wantsStars(detail) {
  const paths = new Set(detail.tags);
  return paths.size > 200 && new Set([...paths].map((path) => path.split("/").map(starred).join("/"))).size * 4 <= paths.size;
}

// Makes a tree of the holdings at the shown moment. A leaf has one category of a grouping, so its colour is exact.
function treeOf(detail, by, isStarred) {
  const separator = detail.tags.some((tag) => tag.includes("/")) ? "/" : ":";
  const bytesOf = bytesAt(detail);
  const root = { name: "tracked", path: [], bytes: 0, children: new Map(), code: null };
  for (const holding of detail.holdings) {
    const bytes = bytesOf(holding);
    if (bytes <= 0) continue;
    const code = codeOf(holding, by);
    let path;
    if (typeof code === "string") path = [nameOf(by, code)];
    else if (holding[H_TAG] === SMALLER) path = ["(small ones)"];
    else if (holding[H_TAG] < 0) path = holding[H_LIBRARY] < 0 ? ["(no tag)"] : ["(no tag)", detail.libraries[holding[H_LIBRARY]]];
    else path = detail.tags[holding[H_TAG]].split(separator).slice(0, 64).map((part) => (isStarred ? starred(part) : part));
    let node = root;
    node.bytes += bytes;
    for (const part of path) {
      if (!node.children.has(part)) node.children.set(part, { name: part, path: [...node.path, part], bytes: 0, children: new Map(), own: new Map(), parent: node, code: null });
      node = node.children.get(part);
      node.bytes += bytes;
    }
    node.own.set(code, (node.own.get(code) ?? 0) + bytes);
  }
  finish(root, by, separator);
  return root;
}

// Sorts children. A node's own bytes become children by category, unless it is a leaf with one category.
function finish(node, by, separator) {
  const children = [...node.children.values()];
  children.forEach((child) => finish(child, by, separator));
  const own = node.own ? [...node.own] : [];
  if (own.length === 1 && children.length === 0) node.code = own[0][0];
  else {
    for (const [code, bytes] of own) {
      const path = [...node.path, nameOf(by, code)];
      children.push({ name: nameOf(by, code), path, label: path.join(separator), bytes, children: [], parent: node, code });
    }
  }
  node.label = node.path.join(separator);
  node.children = children.sort((a, b) => b.bytes - a.bytes || (a.name < b.name ? -1 : 1));
}

function icicle(device) {
  const { detail } = device;
  const by = state.by !== TAG ? state.by : DATA.groupings[STRUCTURE].names.length ? STRUCTURE : LAYER;
  state.starred ??= wantsStars(detail);
  const root = treeOf(detail, by, state.starred);
  const total = root.bytes;
  let zoomed = state.zoomed.reduce((node, part) => node.children.find((child) => child.name === part) ?? node, root);
  let { word } = state;
  const crumbs = h("p", { class: "crumbs", "aria-live": "polite" });
  const board = h("div", { class: "icicle", id: "icicle", role: "tree", "aria-label": "paths of tags, widths are bytes; Enter zooms, Escape goes back" });
  const told = (node) => `${node.label || "tracked"}: ${withUnit(node.bytes)}, ${percent(node.bytes, total)} of tracked`;
  const isIn = (node) => node.label.toLowerCase().includes(word);
  // A matching node counts with everything below it.
  const matching = (node) => (node !== root && isIn(node) ? node.bytes : sum([...node.children].map(matching)));
  const hasMatch = (node) => (node !== root && isIn(node)) || node.children.some(hasMatch) || hasMatchAbove(node.parent);
  const hasMatchAbove = (node) => Boolean(node) && node !== root && (isIn(node) || hasMatchAbove(node.parent));

  const tell = (node) => {
    const found = word ? `; “${word}” is in ${withUnit(matching(root))}, ${percent(matching(root), total)}` : "";
    crumbs.replaceChildren(h("bdi", {}, told(node)), found);
  };
  const zoom = (node) => {
    zoomed = node;
    state.zoomed = node.path;
    layout();
    tell(node);
    board.querySelector('[tabindex="0"]')?.focus({ preventScroll: true });
  };
  let boxes = [];
  const layout = () => {
    const width = board.clientWidth;
    if (width < 40) return;
    boxes = [];
    const above = [];
    for (let node = zoomed; node; node = node.parent) above.unshift(node);
    above.forEach((node, level) => boxes.push({ node, level, left: 0, width }));
    const place = (node, level, left, room) => {
      if (level >= above.length + DEEPEST) return;
      let at = left;
      let thin = 0;
      for (const child of node.children) {
        const wide = (room * child.bytes) / node.bytes;
        // Children narrower than 3 pixels share one box, so that widths remain proportional to bytes.
        if (wide < 3) { thin += wide; continue; }
        boxes.push({ node: child, level, left: at, width: wide });
        place(child, level + 1, at, wide);
        at += wide;
      }
      if (thin >= 3) boxes.push({ node: { name: "…", label: `${node.label}: smaller ones`, bytes: Math.round((node.bytes * thin) / room), children: [], parent: node, code: SMALLER, isRest: true }, level, left: at, width: thin });
    };
    place(zoomed, above.length, 0, width);
    const levels = boxes.reduce((most, box) => Math.max(most, box.level), 0) + 1;
    sized(board, { height: `${levels * ROW}px` });
    board.replaceChildren(...boxes.map((box) => {
      const { node } = box;
      const isDim = word && !hasMatch(node);
      const made = h("div", {
        role: "treeitem", tabindex: node === zoomed ? "0" : "-1", "aria-level": String(box.level + 1), "aria-label": told(node), title: told(node),
        "aria-expanded": node.children.length ? String(boxes.some((other) => other.node.parent === node)) : null,
        class: `${node.code === null ? "path" : colorClass(node.code, by)}${box.width < 12 ? " thin" : ""}${isDim ? " dim" : ""}`,
      }, box.width < 24 ? null : node === root ? `tracked ${withUnit(total)}` : node.name);
      made.addEventListener("click", () => { if (!node.isRest) zoom(node === zoomed && node.parent ? node.parent : node); });
      made.addEventListener("focus", () => tell(node));
      made.addEventListener("pointerenter", () => tell(node));
      box.made = made;
      return sized(made, { left: `${box.left}px`, width: `${box.width}px`, top: `${box.level * ROW}px` });
    }));
  };
  const go = (box, wanted) => {
    if (!wanted) return;
    box.made.setAttribute("tabindex", "-1");
    wanted.made.setAttribute("tabindex", "0");
    wanted.made.focus();
  };
  board.addEventListener("keydown", (event) => {
    const box = boxes.find((box) => box.made === document.activeElement);
    if (!box) return;
    const level = boxes.filter((other) => other.level === box.level);
    const at = level.indexOf(box);
    const act = {
      Enter: () => !box.node.isRest && zoom(box.node), " ": () => !box.node.isRest && zoom(box.node),
      Escape: () => zoom(zoomed.parent),
      ArrowDown: () => go(box, boxes.find((other) => other.node.parent === box.node)),
      ArrowUp: () => go(box, boxes.find((other) => other.node === box.node.parent)),
      ArrowRight: () => go(box, level[at + 1]), ArrowLeft: () => go(box, level[at - 1]),
      Home: () => go(box, level[0]), End: () => go(box, level[level.length - 1]),
    }[event.key];
    if (!act || (event.key === "Escape" && !zoomed.parent) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  const search = h("input", { type: "search", id: "search", placeholder: "part of a path", autocomplete: "off", spellcheck: "false", value: word });
  const find = () => { state.word = word = search.value.trim().toLowerCase(); layout(); tell(zoomed); };
  search.addEventListener("input", find);
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || search.value === "") return;
    event.preventDefault();
    search.value = "";
    find();
  });
  const made = section("paths", "Paths", `Paths of tags ${momentName()}`,
    total <= 0 ? h("p", { class: "soft" }, "No bytes with a path.") : [
      h("div", { class: "buttons" }, h("label", {}, "search ", search),
        h("label", {}, h("input", { type: "checkbox", id: "starred", checked: state.starred, onchange: (event) => { state.starred = event.target.checked; render({ focus: "starred" }); } }), " numbers alike (layers.* for layers.0, layers.1 …)"), h("button", { type: "button", onclick: () => zoom(root) }, "all of it"),
        h("span", { class: "soft screen optional" }, "click or Enter zooms, Escape goes back")),
      board, crumbs, folded("paths", "The picture as a table", () => pathTable(root, total, by))]);
  return { made, redraw: () => { layout(); tell(zoomed); } };
}

// Makes a table of the paths with at least a thousandth of tracked memory, in the order of the picture.
function pathTable(root, total, by) {
  const rows = [];
  const walk = (node, depth) => {
    for (const child of node.children) {
      if (child.bytes * 1000 < total || rows.length > 2000) continue;
      rows.push(h("tr", {}, sized(h("th", { scope: "row" }, swatch(child.code, by), h("bdi", { class: "tag" }, child.name || "(empty)")), { "padding-left": `${depth}rem` }),
        number(round(child.bytes), child.bytes), h("td", { class: "n soft" }, percent(child.bytes, total))));
      walk(child, depth + 1);
    }
  };
  walk(root, 0);
  return h("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "paths of tags" }, h("table", {}, h("caption", {}, "a thousandth of tracked, or more"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "path"), h("th", { class: "n", scope: "col" }, unit().name), h("th", { class: "n", scope: "col" }, "of tracked"))), h("tbody", {}, rows)));
}
