// Returns the faults of a page's layout as sentences, at the window's present size; tests and tests/tools/pages.py evaluate this.
(() => {
  const words = (it) => it.textContent.trim().replace(/\s+/g, " ").slice(0, 80);
  const isShown = (it) => it.checkVisibility() && !it.closest(".hidden, .skip");
  const faults = [];
  if (document.documentElement.scrollWidth > innerWidth) faults.push(`the page is ${document.documentElement.scrollWidth} px wide`);
  for (const it of document.querySelectorAll("main *")) {
    if (it.closest(".scroll, svg") || !isShown(it)) continue;
    const { right } = it.getBoundingClientRect();
    if (right > innerWidth + 1) faults.push(`beyond the edge by ${Math.round(right - innerWidth)} px: ${words(it)}`);
  }
  // Text that an ancestor cuts without an ellipsis.
  const texts = document.createTreeWalker(document.querySelector("main") ?? document.body, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const it = node.parentElement;
    if (node.data.trim() === "" || it.closest("svg, pre, script, [aria-hidden=true]") || !isShown(it)) continue;
    for (let box = it; box && box.tagName !== "MAIN"; box = box.parentElement) {
      const style = getComputedStyle(box);
      if (style.overflowX === "visible" || box.scrollWidth <= box.clientWidth + 1 || box.clientWidth === 0) continue;
      if (!["auto", "scroll"].includes(style.overflowX) && style.textOverflow !== "ellipsis") faults.push(`cut: ${words(it)}`);
      break;
    }
  }
  // Text that runs from its cell into the next one, and captions that continue beyond their place.
  for (let node = ((texts.currentNode = texts.root), texts.nextNode()); node; node = texts.nextNode()) {
    const cell = node.parentElement.closest("td, th");
    if (!cell || node.data.trim() === "" || node.parentElement.closest("svg") || !isShown(node.parentElement)) continue;
    const text = document.createRange();
    text.selectNodeContents(node);
    let { right } = text.getBoundingClientRect();
    for (let box = node.parentElement; box !== cell; box = box.parentElement) {
      if (getComputedStyle(box).overflowX !== "visible") right = Math.min(right, box.getBoundingClientRect().right);
    }
    if (right > cell.getBoundingClientRect().right + 1) faults.push(`beyond its cell: ${words(cell)}`);
  }
  for (const caption of document.querySelectorAll("main .scroll caption")) {
    const [{ right }, place] = [caption.getBoundingClientRect(), caption.closest(".scroll").getBoundingClientRect()];
    if (isShown(caption) && right > place.right + 1) faults.push(`a caption is cut: ${words(caption)}`);
  }
  // Columns so narrow that names become columns of words or letters.
  for (const cell of document.querySelectorAll("main td, main th")) {
    if (!isShown(cell) || cell.closest("[aria-hidden=true]")) continue;
    const size = parseFloat(getComputedStyle(cell).fontSize);
    const text = document.createRange();
    text.selectNodeContents(cell);
    const { width, height } = text.getBoundingClientRect();
    if (width < 7 * size && height > 6.5 * size) faults.push(`a narrow column: ${words(cell)}`);
  }
  // Labels of a picture on each other or beyond its edge.
  for (const svg of document.querySelectorAll("main svg")) {
    const edge = svg.getBoundingClientRect();
    const labels = [...svg.querySelectorAll("text")].filter((text) => text.textContent !== "" && isShown(text)).map((text) => [text.textContent, text.getBoundingClientRect()]);
    labels.forEach(([name, one], at) => {
      if (one.left < edge.left - 1 || one.right > edge.right + 1) faults.push(`beyond the picture: ${name}`);
      for (const [other, box] of labels.slice(at + 1)) {
        if (one.left < box.right - 1 && box.left < one.right - 1 && one.top < box.bottom - 3 && box.top < one.bottom - 3) faults.push(`${name} is on ${other}`);
      }
    });
  }
  // The legend has every area of the course, and nothing else.
  const areas = document.querySelectorAll("#timeline path.area").length;
  const named = document.querySelectorAll("#summary .keys .swatch").length;
  if (areas > 0 && areas !== named) faults.push(`${named} areas in the legend, ${areas} in the picture`);
  return [...new Set(faults)].slice(0, 20);
})()
