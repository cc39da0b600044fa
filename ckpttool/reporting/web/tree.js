/* The tree of modules and tensors: a treegrid (WAI-ARIA) of which only the rows in view exist. */

const ROW = 30; // pixels
const OVER = 8; // rows made above and below those in view
const UNFOLDED = 40; // rows that are unfolded at first, at most
const OPENED = 500; // finds that are unfolded

const LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"; // the heights of bars, as the page has them

function treeGrid({ root, nodes }, tensors, columns, said, choose) {
  const space = el("div", { class: "space", role: "rowgroup" });
  const heads = columns.map((column) => {
    const head = el("div", { class: `cell ${column.name}`, role: "columnheader" });
    head.append(column.key ? el("button", { type: "button", tabindex: -1, click: () => sortBy(column) }, column.title) : column.title);
    return head;
  });
  const head = el("div", { role: "rowgroup", class: "heads" }, el("div", { class: "row", role: "row", "aria-rowindex": 1 }, heads));
  const grid = el("div", { class: "tree", role: "treegrid", tabindex: 0, "aria-label": "Modules and tensors" }, head, space);
  let rows = [];
  let active = null;
  let kept = null; // with what is sought: the nodes that are it, or hold it
  let by = null;
  let downwards = true;

  function flatten() {
    rows = [];
    const stack = [root];
    while (stack.length) {
      const node = stack.pop();
      if (node !== root) rows.push(node);
      if (!node.open) continue;
      const kids = kept ? node.kids.filter((kid) => kept.has(kid)) : node.kids;
      for (let i = kids.length - 1; i >= 0; i--) {
        kids[i].place = i + 1;
        kids[i].size = kids.length;
        stack.push(kids[i]);
      }
    }
    rows.forEach((node, i) => (node.row = i));
    grid.setAttribute("aria-rowcount", rows.length + 1);
    space.style.height = `${Math.max(rows.length, 1) * ROW}px`;
    render();
  }

  function render() {
    const first = Math.max(0, Math.floor(grid.scrollTop / ROW) - OVER);
    const last = Math.min(rows.length, Math.ceil((grid.scrollTop + grid.clientHeight) / ROW) + OVER);
    const made = rows.slice(first, last).map(rowOf);
    if (!rows.length) made.push(el("div", { class: "row", role: "row" }, el("div", { class: "cell name", role: "gridcell" }, "nothing found")));
    space.replaceChildren(...made);
    const seen = active && rows[active.row] === active && active.row >= first && active.row < last;
    if (seen) grid.setAttribute("aria-activedescendant", `row-${active.row}`);
    else grid.removeAttribute("aria-activedescendant");
  }

  function rowOf(node) {
    const folds = node.kids.length > 0;
    const row = el("div", {
      class: "row", role: "row", id: `row-${node.row}`, "aria-level": node.level, "aria-rowindex": node.row + 2,
      "aria-posinset": node.place, "aria-setsize": node.size, "aria-expanded": folds ? String(node.open) : null,
      "aria-selected": String(node === active),
      click: () => { activate(node); if (folds) toggle(node); },
    });
    row.style.top = `${node.row * ROW}px`;
    row.append(...columns.map((column) => {
      const cell = el("div", { class: `cell ${column.name}`, role: "gridcell" }, column.cell(node, tensors[node.tensor]));
      if (column.name === "name") cell.style.paddingLeft = `${Math.min(node.level - 1, 20) * 14 + 4}px`;
      return cell;
    }));
    return row;
  }

  function toggle(node, open = !node.open) {
    node.open = open;
    flatten();
  }

  function activate(node) {
    active = node;
    choose(node);
    const top = node.row * ROW;
    const height = grid.clientHeight - ROW;
    if (top < grid.scrollTop) grid.scrollTop = top;
    else if (top + ROW > grid.scrollTop + height) grid.scrollTop = top + ROW - height;
    render();
  }

  function reveal(node) {
    if (kept && !kept.has(node)) seek("", () => true, true);
    for (let above = node.parent; above; above = above.parent) above.open = true;
    flatten();
    activate(node);
  }

  function seek(text, isKept, all = false) {
    const words = text.toLowerCase().split(/[\s*]+/).filter(Boolean);
    if (all || (!words.length && !isKept)) {
      kept = null;
      said.textContent = "";
    } else {
      kept = new Set();
      let count = 0;
      for (const node of nodes) {
        if (node.tensor < 0 || !found(tensors[node.tensor], words, isKept)) continue;
        for (let each = node; each && !kept.has(each); each = each.parent) {
          kept.add(each);
          if (count < OPENED && each !== node) each.open = true;
        }
        count += 1;
      }
      said.textContent = `${counted(count, "tensor")} found`;
    }
    grid.scrollTop = 0;
    flatten();
  }

  function sortBy(column) {
    downwards = by === column ? !downwards : column.name !== "name";
    by = column;
    const sign = downwards ? -1 : 1;
    for (const node of nodes) {
      node.kids.sort((a, b) => sign * compared(column.key(a, tensors[a.tensor]), column.key(b, tensors[b.tensor])));
    }
    heads.forEach((each, i) => {
      if (columns[i] === by) each.setAttribute("aria-sort", downwards ? "descending" : "ascending");
      else each.removeAttribute("aria-sort");
    });
    flatten();
  }

  const keys = {
    ArrowDown: () => step(1),
    ArrowUp: () => step(-1),
    PageDown: () => step(Math.floor(grid.clientHeight / ROW) - 2),
    PageUp: () => step(2 - Math.floor(grid.clientHeight / ROW)),
    Home: () => step(-rows.length),
    End: () => step(rows.length),
    Enter: () => active.kids.length && toggle(active),
    " ": () => active.kids.length && toggle(active),
    ArrowRight: () => (active.kids.length && !active.open ? toggle(active, true) : step(1)),
    ArrowLeft: () => (active.kids.length && active.open ? toggle(active, false) : active.parent?.parent && activate(active.parent)),
  };

  function step(count) {
    if (!rows.length) return;
    const from = active && rows[active.row] === active ? active.row : count > 0 ? -1 : rows.length;
    activate(rows[Math.min(Math.max(from + count, 0), rows.length - 1)]);
  }

  grid.addEventListener("keydown", (event) => {
    if (event.target !== grid || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    if (!active || rows[active.row] !== active) step(1);
    else keys[event.key]();
  });
  grid.addEventListener("scroll", render);
  new ResizeObserver(render).observe(grid);
  unfold(root);
  flatten();
  return { element: grid, seek, reveal };
}

function found(tensor, words, isKept) {
  const name = tensor.name.toLowerCase();
  return words.every((word) => name.includes(word)) && (!isKept || isKept(tensor));
}

/* Open level after level, the largest modules first, while the rows are few. */
function unfold(root) {
  let left = UNFOLDED - root.kids.length;
  let level = root.kids;
  while (level.length && left > 0) {
    const next = [];
    for (const node of level) {
      if (!node.kids.length || node.kids.length > left) continue;
      node.open = true;
      left -= node.kids.length;
      next.push(...node.kids);
    }
    level = next;
  }
}

/* A histogram: bars of equal width from the least value to the most. */
function histogram(bins, width, height, label) {
  const step = width / bins.length;
  const drawn = svg("svg", { class: "histogram", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  if (bins.length === 1) {
    drawn.append(svg("rect", { x: width / 2 - 2, y: 0, width: 4, height })); // all values are equal
    return drawn;
  }
  [...bins].forEach((level, i) => {
    const size = (LEVELS.indexOf(level) / (LEVELS.length - 1)) * height;
    if (size) drawn.append(svg("rect", { x: i * step, y: height - size, width: Math.max(step - 0.5, 0.5), height: size }));
  });
  return drawn;
}
