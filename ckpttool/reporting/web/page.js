/* The page from its data. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const WARNINGS = ["calls", "could run", "beware", "unclear", "missing"];

function build(data) {
  const { checkpoint, difference, training, evaluations = [], rows = [] } = data;
  document.getElementById("head").append(...headOfPage(data));
  const parts = [
    training?.runs.length && trainingOf(training),
    ...evaluations.map(evaluationOf),
    checkpoint && overviewOf(checkpoint),
    difference && changesOf(difference),
    checkpoint && modulesOf(checkpoint, difference),
    checkpoint?.others.length && othersOf(checkpoint.others),
    rows.length && checkpointsOf(rows),
  ].filter(Boolean);
  document.getElementById("main").replaceChildren(...parts);
  if (parts.length > 1) {
    const titles = parts.map((part) => part.querySelector("h2").textContent);
    const kinds = titles.map((title) => title.split(":")[0]);
    const named = (title, i) => (kinds.filter((kind) => kind === kinds[i]).length > 1 ? title : kinds[i]);
    const links = parts.map((part, i) => el("a", { href: `#${part.id}` }, named(titles[i], i)));
    document.getElementById("head").append(el("nav", { "aria-label": "Sections" }, links));
  }
}

function headOfPage({ title, version, checkpoint }) {
  const said = checkpoint ? [checkpoint.format, inBytes(checkpoint.bytes), checkpoint.parameters ? counted(checkpoint.parameters, "parameter") : ""] : [];
  return [el("h1", {}, title || "report"), el("p", {}, [...said, `by ckpttool ${version}`].filter(Boolean).join(" · "))];
}

function overviewOf({ facts: rows, path }) {
  const shown = [];
  for (const [label, text] of rows) {
    const previous = shown[shown.length - 1];
    if (label || !previous) shown.push([label, [text]]);
    else previous[1].push(text);
  }
  const list = facts([["file", path], ...shown.map(([label, texts]) => [label, texts.map((text) => el("div", { class: WARNINGS.includes(label) ? "warning" : null }, text))])]);
  return section("overview", "Overview", list);
}

function othersOf(others) {
  const columns = [0, 1].map((i) => ({ title: ["name", "value"][i], text: (row) => row[i], key: (row) => row[i] }));
  return section("others", "Other contents", tableOf(counted(others.length, "entry", "entries"), columns, others));
}

function checkpointsOf(rows) {
  const columns = [
    { title: "checkpoint", text: (row) => row[0], key: (row) => row[0] },
    { title: "step", numeric: true, text: (row) => (row[1] === null ? "" : String(row[1])), key: (row) => row[1] },
    { title: "format", text: (row) => row[2] ?? "" },
    { title: "bytes", numeric: true, text: (row) => inBytes(row[3]), key: (row) => row[3] },
    { title: "state", text: (row) => (row[4] ? `no: ${row[4]}` : "whole") },
  ];
  return section("checkpoints", "Checkpoints", tableOf(counted(rows.length, "checkpoint"), columns, rows));
}

function modulesOf(checkpoint, difference) {
  const tensors = tensorsOf(checkpoint.tensors);
  if (difference) join(tensors, difference);
  const tree = treeOf(tensors.map((tensor) => tensor.name));
  summed(tree.nodes, tensors);
  const dtypes = [...new Set(tensors.map((tensor) => tensor.dtype))];
  const detail = el("div", { class: "detail", "aria-live": "polite" }, el("p", {}, "Choose a module or a tensor."));
  const choose = (node) => detail.replaceChildren(...detailOf(node, tensors, tree.root));
  const said = el("p", { class: "found", "aria-live": "polite" });
  const grid = treeGrid(tree, tensors, columnsOf(tensors, difference), said, choose);
  const colourOf = difference ? (node) => heatClass(stateOf(node)) : (node) => `c${dtypes.indexOf(dtypeOf(node, tensors)) % 8}`;
  const map = treemapOf(tree.root, colourOf, (node) => grid.reveal(node));
  const key = difference ? heatKey() : el("p", { class: "key" }, "by type: ", dtypes.slice(0, 12).map((dtype, i) => el("span", {}, el("i", { class: `c${i % 8}`, "aria-hidden": "true" }), dtype)));
  return section(
    "modules", "Modules and tensors",
    el("div", { class: difference ? "modules moving" : "modules" },
      el("div", { class: "side" }, map.element, key),
      el("div", { class: "side" }, searchOf(grid, tensors, dtypes, said), grid.element)),
    detail,
  );
}

/* Names of a comparison are those in the model's state; outside it, those in the file. */
function join(tensors, { where, changed, only_a: gone, names }) {
  const byName = new Map(tensors.map((tensor) => [tensor.name, tensor]));
  const of = (name) => byName.get(where ? `${where}.${name}` : name) ?? byName.get(name);
  for (const name of decoded(names)) if (of(name)) of(name).compared = true;
  for (const change of changed) if (of(change.name)) of(change.name).change = change;
  for (const name of gone) if (of(name)) of(name).gone = true;
}

function stateOf(node) {
  return { state: node.changed ? "changed" : "same", change: { relative: node.moved === Infinity ? null : node.moved } };
}

/* The type that most of a module's bytes have: that of its largest tensor. */
function dtypeOf(node, tensors) {
  let largest = node;
  while (largest.tensor < 0) largest = largest.kids.reduce((most, kid) => (kid.bytes > most.bytes ? kid : most));
  return tensors[largest.tensor].dtype;
}

function searchOf(grid, tensors, dtypes, said) {
  const kinds = new Map([["everything", null]]);
  const offer = (title, kept) => {
    const count = tensors.filter(kept).length;
    if (count && count < tensors.length) kinds.set(`${title} (${count.toLocaleString("en")})`, kept);
  };
  offer("not finite", (tensor) => tensor.bad);
  offer("changed", (tensor) => tensor.change);
  offer("shared", (tensor) => tensor.shared);
  for (const dtype of dtypes.slice(0, 40)) offer(dtype, (tensor) => tensor.dtype === dtype);
  const text = el("input", { type: "search", id: "search", placeholder: "words in a name", autocomplete: "off", spellcheck: "false" });
  const kind = el("select", { id: "kind" }, [...kinds.keys()].map((title) => el("option", {}, title)));
  let waiting = 0;
  const seek = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => grid.seek(text.value, kinds.get(kind.value)), 60);
  };
  text.addEventListener("input", seek);
  kind.addEventListener("change", seek);
  return el("div", { class: "search" }, el("label", { for: "search" }, "Search"), text, el("label", { for: "kind" }, "Show"), kind, said);
}

function columnsOf(tensors, difference) {
  const measured = tensors.some((tensor) => tensor.bins);
  const mark = (node) => (node.kids.length ? el("span", { class: "fold", "aria-hidden": "true" }, node.open ? "▾" : "▸") : null);
  const badge = (node) => (node.bad ? el("span", { class: "badge", title: "NaN or infinity" }, "NaN") : null);
  const columns = [
    { name: "name", title: "name", key: (node) => node.name, cell: (node) => [mark(node), el("span", { class: "text", title: node.path }, node.name || "(empty)"), badge(node)] },
    { name: "dtype", title: "type", cell: (node, tensor) => tensor?.dtype ?? "" },
    { name: "shape", title: "shape", cell: (node, tensor) => tensor?.shape ?? counted(node.count, "tensor") },
    { name: "bytes", title: "bytes", key: (node) => node.bytes, cell: (node, tensor) => (tensor?.again ? "shared" : inBytes(node.bytes)) },
  ];
  if (measured) {
    const range = (tensor) => (tensor?.bins ? `${inShort(tensor.min)} … ${inShort(tensor.max)}` : "");
    columns.push(
      { name: "mean", title: "mean", cell: (node, tensor) => inShort(tensor?.mean) },
      { name: "range", title: "range", key: (node) => node.most, cell: (node, tensor) => range(tensor) },
      { name: "bins", title: "values", cell: (node, tensor) => (tensor?.bins ? histogram(tensor.bins, 64, 20, `histogram from ${inShort(tensor.min)} to ${inShort(tensor.max)}`) : "") },
    );
  }
  if (difference) columns.push({ name: "moved", title: "change", key: (node) => node.moved, cell: (node, tensor) => changeIn(node, tensor) });
  return columns;
}

function changeIn(node, tensor) {
  if (tensor) return tensor.change ? sayChange(tensor.change).replace(" relative", "") : tensor.gone ? "gone" : tensor.compared ? "same" : "";
  return node.changed ? `${node.changed} of ${node.count}` : "";
}

function detailOf(node, tensors, root) {
  const tensor = tensors[node.tensor];
  const share = root.bytes ? ` (${Number(((100 * node.bytes) / root.bytes).toPrecision(3))}% of all)` : "";
  const rows = [["bytes", `${inBytes(tensor?.again ? tensor.bytes : node.bytes)}${tensor?.again ? ", counted once under another name" : share}`]];
  if (!tensor) rows.push(["holds", marksOf(node)]);
  else {
    rows.push(["type", tensor.dtype], ["shape", tensor.shape]);
    if (tensor.shared) rows.push(["shared with", tensor.shared]);
    if (tensor.bad) rows.push(["not finite", el("span", { class: "warning" }, counted(tensor.bad, "value"))]);
    if (tensor.bins) rows.push(["range", `${inShort(tensor.min, 4)} … ${inShort(tensor.max, 4)}`], ["mean", inShort(tensor.mean, 4)], ["deviation", inShort(tensor.std, 4)]);
    if (tensor.change) rows.push(["change", tensor.change.text]);
  }
  const drawn = tensor?.bins ? el("figure", {}, histogram(tensor.bins, 320, 90, "histogram of the values"), el("figcaption", {}, el("span", {}, inShort(tensor.min, 4)), el("span", {}, inShort(tensor.max, 4)))) : null;
  return [el("h3", {}, node.path || "all"), el("div", { class: "columns" }, facts(rows), drawn ?? "")];
}

build(DATA);
