/* The modules as rectangles, whose areas are their bytes: squarified (Bruls, Huizing and van Wijk, 2000). */

const DEEPEST = 6;
const LEAST = 14; // pixels of a side, below which modules are drawn together
const MARGIN = 2;
const HEAD = 20; // pixels for the name of a module that is drawn with what is in it

function squarified(kids, box) {
  const items = kids.filter((kid) => kid.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  const placed = [];
  let { x, y, w, h } = box;
  let left = items.reduce((sum, item) => sum + item.bytes, 0);
  let at = 0;
  while (at < items.length && w > 0 && h > 0) {
    const side = Math.min(w, h);
    const scale = (w * h) / left;
    let sum = items[at].bytes;
    let end = at + 1;
    while (end < items.length && worst(items, at, end + 1, sum + items[end].bytes, side, scale) <= worst(items, at, end, sum, side, scale)) {
      sum += items[end].bytes;
      end += 1;
    }
    const depth = (sum * scale) / side;
    let offset = 0;
    for (const node of items.slice(at, end)) {
      const length = (node.bytes / sum) * side;
      placed.push(w >= h ? { node, x, y: y + offset, w: depth, h: length } : { node, x: x + offset, y, w: length, h: depth });
      offset += length;
    }
    if (w >= h) [x, w] = [x + depth, w - depth];
    else [y, h] = [y + depth, h - depth];
    left -= sum;
    at = end;
  }
  return placed;
}

/* The largest ratio of sides in a row of items; the first of them has the most bytes, the last the fewest. */
function worst(items, start, end, sum, side, scale) {
  const area = sum * scale;
  const [most, least] = [items[start].bytes * scale, items[end - 1].bytes * scale];
  return Math.max((side * side * most) / (area * area), (area * area) / (side * side * least));
}

function treemapOf(root, colourOf, choose) {
  const area = el("div", { class: "treemap", role: "group", "aria-label": "Modules by bytes" });
  const path = el("nav", { class: "path", "aria-label": "Module shown in the map" });
  let shown = root;

  function draw() {
    const boxes = [];
    boxesIn(shown, { x: 0, y: 0, w: area.clientWidth, h: area.clientHeight }, 0, boxes);
    area.replaceChildren(...boxes.map(button));
    if (!boxes.length) area.append(el("p", { class: "empty" }, "nothing here has bytes"));
  }

  function boxesIn(node, box, depth, boxes) {
    const start = boxes.length;
    const small = { count: 0, bytes: 0, x: Infinity, y: Infinity, right: 0, bottom: 0 };
    for (const each of squarified(node.kids, box)) {
      const { node: kid, x, y, w, h } = each;
      if (w < LEAST || h < LEAST) {
        Object.assign(small, { count: small.count + 1, bytes: small.bytes + kid.bytes });
        Object.assign(small, { x: Math.min(small.x, x), y: Math.min(small.y, y) });
        Object.assign(small, { right: Math.max(small.right, x + w), bottom: Math.max(small.bottom, y + h) });
        continue;
      }
      const inside = kid.kids.length && depth + 1 < DEEPEST && w > 5 * LEAST && h > 3 * LEAST + HEAD;
      boxes.push({ ...each, label: kid.name, outer: inside });
      if (inside) {
        const within = { x: x + MARGIN, y: y + HEAD, w: w - 2 * MARGIN - 1, h: h - HEAD - MARGIN - 1 };
        boxesIn(kid, within, depth + 1, boxes);
      }
    }
    if (small.count && small.right - small.x > 3 && small.bottom - small.y > 3) {
      const size = { x: small.x, y: small.y, w: small.right - small.x, h: small.bottom - small.y };
      boxes.splice(start, 0, { ...size, node, rest: small, label: "…" }); // behind the larger ones beside them
    }
  }

  function button({ node, x, y, w, h, label, outer, rest }) {
    const bytes = rest ? rest.bytes : node.bytes;
    const what = rest ? `${counted(rest.count, "smaller part")} of ${node.path || "all"}` : node.path;
    const share = root.bytes ? `${(100 * bytes / root.bytes).toPrecision(2)} %` : "";
    const said = [what, inBytes(bytes), share, rest ? "" : marksOf(node)].filter(Boolean).join(", ");
    const colour = rest ? "rest" : outer ? "outer" : colourOf(node);
    const made = el("button", { type: "button", class: `box ${colour}`, title: said, "aria-label": said, click: () => open(node, rest) });
    Object.assign(made.style, { left: `${x}px`, top: `${y}px`, width: `${Math.max(w - 1, 1)}px`, height: `${Math.max(h - 1, 1)}px` });
    if (w > 34 && h > 17) made.append(el("span", {}, label), h > 36 && !outer ? el("small", {}, inBytes(bytes)) : "");
    if (!rest && !outer && node.bad) made.classList.add("bad");
    return made;
  }

  function open(node, rest) {
    if (!rest) choose(node);
    if (node.kids.length && node !== shown) show(node);
  }

  function show(node) {
    shown = node;
    const above = [];
    for (let each = node; each; each = each.parent) above.unshift(each);
    path.replaceChildren(...above.map((each) =>
      el("button", { type: "button", "aria-current": each === node ? "true" : null, click: () => show(each) }, each.parent ? each.name : "all"),
    ));
    draw();
  }

  area.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !shown.parent) return;
    show(shown.parent);
    area.querySelector("button")?.focus();
  });
  new ResizeObserver(draw).observe(area);
  show(root);
  return { element: el("div", { class: "map" }, path, area), show: (node) => show(node.kids.length ? node : node.parent ?? root), draw };
}

function marksOf(node) {
  const marks = [counted(node.count, "tensor")];
  if (node.bad) marks.push(`${counted(node.bad, "tensor")} with NaN or infinity`);
  if (node.changed) marks.push(`${node.changed} changed`);
  return marks.join(", ");
}
