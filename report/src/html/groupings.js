// Two independent groupings of the same bytes, side by side. The share of a picked category is shown in the other grouping.

const nameOf = (by, code) => (code === "idle" ? "pool idle" : code === "opaque" ? "opaque pools" : categoryName(by, code));

// Returns the sums by category, largest first. Smaller ones, opaque pools and idle memory come last.
function grouped(holdings, by, bytesOf) {
  const sums = new Map();
  for (const holding of holdings) sums.set(codeOf(holding, by), (sums.get(codeOf(holding, by)) ?? 0) + bytesOf(holding));
  const last = { [SMALLER]: 1, opaque: 2, idle: 3 };
  return [...sums].filter(([, bytes]) => bytes !== 0).sort((a, b) => (last[a[0]] ?? 0) - (last[b[0]] ?? 0) || b[1] - a[1]);
}

// Makes a name of one line. If a path is too long, its last part stays visible, because neighbours differ there.
function path(name) {
  const cut = name.lastIndexOf("/", name.length - 2) + 1;
  return h("span", { class: "path", title: name }, cut ? h("span", {}, name.slice(0, cut)) : null, h("span", {}, name.slice(cut)));
}

function groupings(device) {
  const { detail } = device;
  const bytesOf = bytesAt(detail);
  const isPicked = (holding) => state.picked && codeOf(holding, state.picked.by) === state.picked.code;
  const picked = state.picked ? detail.holdings.filter(isPicked) : [];
  const total = sum(detail.holdings.map(bytesOf));
  const table = (by, title) => {
    const rows = grouped(detail.holdings, by, bytesOf);
    const shares = new Map(grouped(picked, by, bytesOf));
    const isOther = state.picked && state.picked.by !== by;
    const most = rows.reduce((most, [, bytes]) => Math.max(most, bytes), 1);
    const steps = apportion(round(total), rows.map(([, bytes]) => bytes));
    const bar = (code, bytes) => sized(h("span", { class: `bar ${colorClass(code, by)}` }), { width: `${Math.max(0, (100 * bytes) / most)}%` });
    const body = rows.map(([code, bytes], at) => {
      const isThis = state.picked && state.picked.by === by && state.picked.code === code;
      const pick = () => {
        state.picked = isThis ? null : { by, code };
        render({ focus: `pick-${by}-${code}` });
      };
      const part = shares.get(code) ?? 0;
      return h("tr", { class: isThis ? "picked" : "" },
        h("th", { scope: "row" }, swatch(code, by), h("button", { type: "button", class: "pick name", id: `pick-${by}-${code}`, "aria-pressed": String(Boolean(isThis)), onclick: pick }, path(nameOf(by, code)))),
        h("td", { class: "barcell", "aria-hidden": "true" }, isOther ? h("span", { class: "under" }, bar(code, bytes), bar(code, part)) : bar(code, bytes)),
        number(steps[at], bytes), h("td", { class: "n soft" }, percent(bytes, total)),
        isOther ? number(round(part), part) : null);
    });
    const head = (text) => h("th", { class: "n", scope: "col" }, text);
    return h("div", { class: "scroll" }, h("table", { class: "bars", id: "grouping-" + DATA.groupings[by].name },
      h("caption", {}, `${title}, ${unit().name} ${momentName()}`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, title), h("th", { class: "barcell", "aria-hidden": "true" }), head(unit().name), head("of tracked"),
        isOther ? head("of picked") : null)),
      h("tbody", {}, body),
      h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "tracked"), h("td", { "aria-hidden": "true" }), number(round(total), total), h("td", { class: "n soft" }, percent(total, total)),
        isOther ? number(round(sum(picked.map(bytesOf))), sum(picked.map(bytesOf))) : null))));
  };
  // Without tags, only rules name layers. If no rule does, only data structures are shown.
  const shown = [[LAYER, "Layer"], [STRUCTURE, "Data structure"]].filter(([by]) => by === STRUCTURE || DATA.tags || DATA.groupings[by].names.length > 0);
  return section("groupings", "Composition", `Composition ${momentName()}`,
    h("p", { class: "soft" }, state.picked
      ? ["Of ", h("bdi", {}, nameOf(state.picked.by, state.picked.code)), ", by the other grouping: the full bars. Press it again to see all."]
      : shown.length > 1 ? "Two groupings of the same bytes. Press a category to see its share in the other." : ""),
    shown.length > 1 ? h("div", { class: "pair even" }, shown.map(([by, title]) => table(by, title))) : table(...shown[0]));
}

// Shows the largest tags of each category.
const TOP = 20;
function entries(process, device) {
  const { detail } = device;
  const bytesOf = bytesAt(detail);
  const by = state.by === TAG ? STRUCTURE : state.by;
  const rows = grouped(detail.holdings, by, bytesOf).filter(([code]) => typeof code === "number");
  const gap = shownRows(process, device).find((row) => row.part === "untrackable");
  const lists = rows.map(([code, bytes], at) => {
    const tags = new Map();
    let folded = 0;
    for (const holding of detail.holdings) {
      if (codeOf(holding, by) !== code) continue;
      const amount = bytesOf(holding);
      if (amount === 0) continue;
      if (holding[H_TAG] === SMALLER) { folded += amount; continue; }
      const name = holding[H_TAG] >= 0 ? detail.tags[holding[H_TAG]] : "(no tag)" + (holding[H_LIBRARY] >= 0 ? " by " + detail.libraries[holding[H_LIBRARY]] : "");
      tags.set(name, (tags.get(name) ?? 0) + amount);
    }
    const sorted = [...tags].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
    const shown = sorted.slice(0, TOP);
    const rest = bytes - sum(shown.map(([, amount]) => amount));
    if (rest !== 0) shown.push([sorted.length > TOP ? `(${thousands(sorted.length - TOP)} more${folded ? ", and small ones" : ""})` : "(small ones)", rest]);
    const steps = apportion(round(bytes), shown.map(([, amount]) => amount));
    const table = h("div", { class: "scroll" }, h("table", { class: "bars" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "tag"), h("th", { class: "barcell", "aria-hidden": "true" }), h("th", { class: "n", scope: "col" }, unit().name), h("th", { class: "n", scope: "col" }, "of it"))),
      h("tbody", {}, shown.map(([name, amount], row) => h("tr", {}, h("th", { scope: "row" }, h("bdi", { class: "tag" }, path(name))),
        h("td", { class: "barcell", "aria-hidden": "true" }, row < sorted.length && row < TOP ? sized(h("span", { class: "bar " + colorClass(code, by) }), { width: `${Math.max(0, (100 * amount) / Math.max(1, shown[0][1]))}%` }) : null),
        number(steps[row], amount), h("td", { class: "n soft" }, percent(amount, bytes))))),
      h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "sum"), h("td", { "aria-hidden": "true" }), number(round(bytes), bytes), h("td")))));
    return h("details", { open: at === 0, "data-key": "entry " + nameOf(by, code) }, h("summary", {}, swatch(code, by), h("bdi", {}, nameOf(by, code)),
      ` ${withUnit(bytes)}`, h("span", { class: "soft" }, ` · ${sorted.length === 1 ? "1 tag" : thousands(sorted.length) + " tags"}`)), table);
  });
  const single = gap && gap.shown !== null
    ? h("p", {}, swatch("untrackable"), `Untrackable ${withUnit(gap.shown)}`, h("span", { class: "soft" }, " · no tags: this memory has no names")) : null;
  return section("entries", "Largest tags", `Largest tags of each ${DATA.groupings[by].name === "layer" ? "layer" : "data structure"} ${momentName()}`,
    lists.length ? lists : h("p", { class: "soft" }, "No bytes with a name or a tag."), single);
}
