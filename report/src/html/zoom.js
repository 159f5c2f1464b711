// The shown part of a timeline, and the gestures and keys that change it.

// Smallest part that is shown, as a share of the whole.
const LEAST_SHARE = 1 / 4096;
// Movement in pixels from which a press is a drag.
const DRAG = 5;

// Returns the shown part of `whole`, both as [from, to] in ns. `state[key]` has it, so that it survives a redraw.
const shownOf = (whole, key = "shown") => (state[key] ? within(state[key], whole) : whole);

// Moves and shrinks a part so that it lies in `whole`.
function within([from, to], whole) {
  const room = whole[1] - whole[0];
  const span = Math.min(room, Math.max(1, room * LEAST_SHARE, to - from));
  const start = Math.min(Math.max(whole[0], (from + to - span) / 2), whole[1] - span);
  return [start, start + span];
}

// Returns the actions that change the shown part. Each calls `changed`.
function zoomer(whole, changed, key = "shown") {
  const show = (part) => {
    const [from, to] = within(part, whole);
    state[key] = to - from >= whole[1] - whole[0] ? null : [from, to];
    changed();
  };
  return {
    show,
    all: () => show(whole),
    // Multiplies the shown span by `factor`; the time `t` stays at its place.
    by: (factor, t) => {
      const [from, to] = shownOf(whole, key);
      show([t - (t - from) * factor, t + (to - t) * factor]);
    },
    // Moves the shown part by a share of its span.
    pan: (share) => {
      const [from, to] = shownOf(whole, key);
      show([from + share * (to - from), to + share * (to - from)]);
    },
    // Moves the shown part only if it does not contain `t`.
    follow: (t) => {
      const [from, to] = shownOf(whole, key);
      if (t < from || t > to) show([t - (to - from) / 2, t + (to - from) / 2]);
    },
  };
}

// Calls the action of a pressed key. Shift and an arrow move the shown part.
function keyboard(canvas, zoom, keys) {
  const shifted = { ArrowRight: () => zoom.pan(0.25), ArrowLeft: () => zoom.pan(-0.25) };
  canvas.addEventListener("keydown", (event) => {
    const act = (event.shiftKey && shifted[event.key]) || keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
}

// Gestures on `canvas`. A drag with the mouse shows the chosen part, with Shift it moves the shown part, with Alt it looks at the
// memory of the chosen part; a click looks at a moment. The wheel zooms with Ctrl or while the canvas has the focus, else it
// scrolls the page. One finger moves the shown part, two fingers also zoom. `timeAt` converts a client pixel to a time.
function gestures(canvas, zoom, { whole, key = "shown", timeAt, select, mark, look, lookAtRange }) {
  // Position in client pixels of each pressed pointer, and the time at which it was pressed.
  const pointers = new Map();
  let begin = null;
  let isDrag = false;
  // Shows the part in which each pointer is at the time at which it was pressed.
  const drag = () => {
    const [from, to] = shownOf(whole, key);
    const [one, other] = [...pointers.values()].map(({ x, t }) => ({ t, share: (timeAt(x) - from) / (to - from) }));
    const span = other ? Math.abs((other.t - one.t) / (other.share - one.share || 1e-9)) : to - from;
    zoom.show([one.t - one.share * span, one.t + (1 - one.share) * span]);
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    pointers.set(event.pointerId, { x: event.clientX, t: timeAt(event.clientX) });
    canvas.setPointerCapture(event.pointerId);
    state.isHeld = true;
    begin = event.clientX;
    isDrag = pointers.size > 1;
    if (pointers.size === 1) select(timeAt(event.clientX));
  });
  canvas.addEventListener("pointermove", (event) => {
    const x = event.clientX;
    const pointer = pointers.get(event.pointerId);
    if (!pointer) {
      if (event.pointerType === "mouse") select(timeAt(x));
      return;
    }
    pointer.x = x;
    isDrag ||= Math.abs(x - begin) >= DRAG;
    if (!isDrag || pointers.size > 2) return;
    if (event.pointerType === "mouse" && !event.shiftKey) mark(begin, x);
    else drag();
  });
  const finish = (event) => {
    if (!pointers.delete(event.pointerId) || pointers.size > 0) return;
    state.isHeld = false;
    mark(null);
    if (event.type !== "pointerup") return;
    if (!isDrag) { look(timeAt(event.clientX)); return; }
    if (event.pointerType !== "mouse" || event.shiftKey || Math.abs(event.clientX - begin) < DRAG) return;
    const [from, to] = shownOf(whole, key);
    const range = [timeAt(begin), timeAt(event.clientX)].sort((a, b) => a - b).map((t) => Math.min(Math.max(t, from), to));
    // Both ends may be beside the picture.
    if (range[0] === range[1]) return;
    if (event.altKey) lookAtRange(range);
    else zoom.show(range);
  };
  // Escape ends a gesture without its effect.
  canvas.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || pointers.size === 0) return;
    event.preventDefault();
    pointers.clear();
    state.isHeld = false;
    mark(null);
  });
  canvas.addEventListener("pointerup", finish);
  canvas.addEventListener("pointercancel", finish);
  canvas.addEventListener("dblclick", zoom.all);
  canvas.addEventListener("wheel", (event) => {
    const isHeld = event.ctrlKey || event.metaKey || document.activeElement === canvas;
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const [from, to] = shownOf(whole, key);
    // At the whole timeline, a turn away from it scrolls the page.
    if (!isHeld || (to - from >= whole[1] - whole[0] && (isSideways || event.deltaY > 0))) return;
    event.preventDefault();
    if (isSideways) zoom.pan(Math.sign(event.deltaX || event.deltaY) / 10);
    else zoom.by(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.clientX));
  }, { passive: false });
}
