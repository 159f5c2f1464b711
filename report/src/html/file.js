// A report in a file, which contains its data.

function start() {
  const [process] = DATA.processes;
  document.getElementById("text").open = false;
  document.getElementById("main").append(
    h("header", {}, h("h1", {}, h("bdi", {}, title().command)), answer, h("p", { class: "soft" }, h("bdi", {}, title().rest)), PLACES.length > 1 || !process ? null : origin(process)),
    links, tools(), over, panel);
  document.body.append(h("footer", {}, `Made by gpumemctl ${DATA.program} from one run: nothing in this file asks a network for anything.`,
    DATA.thinned ? " The run has more than fits into 5 MB: it lacks single blocks, then points of courses and small names." : ""));
  const [, place] = /^#device-(\d+)$/.exec(location.hash) ?? [];
  if (PLACES[place]) state.place = Number(place);
  else state.place = Math.max(0, placeOf(problems()[0]));
  render({});
  window.addEventListener("hashchange", followHash);
  followSize();
}
take(JSON.parse(document.getElementById("data").textContent));
start();
