/* What differs: a map of layers and matrices, coloured by the relative change, and a list of all changes. */

const STEPS = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]; // of the relative change, between the colours
const MOST_LAYERS = 400;
const MOST_MATRICES = 200;

function changesOf(difference) {
  const changed = new Map(difference.changed.map((change) => [change.name, change]));
  const { a, b, tensors } = difference;
  const families = familiesOf(decoded(difference.names), difference, changed);
  const verdict = difference.same
    ? `They hold the same: ${counted(tensors, "tensor")} compared${difference.tolerated ? `, ${difference.tolerated} differ within the tolerance` : ""}.`
    : `${counted(tensors, "tensor")} compared: ${difference.said}.`;
  return section(
    "difference", "Difference",
    el("p", { class: difference.same ? "verdict" : "differs" }, verdict),
    facts([["before", a], ["after", b]]),
    lossesOf(families),
    ...families.map((family) => heatmap(family)),
    difference.changed.length ? changeTable(difference.changed) : null,
    ...[["Gone: only in the first", difference.only_a], ["New: only in the second", difference.only_b], ["Not compared", difference.aside]]
      .filter(([, names]) => names.length)
      .map(([title, names]) => tableOf(`${title} (${names.length.toLocaleString("en")})`, [{ title: "name", text: (name) => name, key: (name) => name }], names)),
  );
}

/* Names that differ in one number, as `layers.0.attn.weight`: by what stands before it, and behind it. */
function familiesOf(names, difference, changed) {
  const families = new Map();
  const put = (name, state, change) => {
    const parts = /^(|.*?[^0-9])(\d{1,9})\.(.+)$/s.exec(name);
    if (!parts) return;
    const [, before, number, matrix] = parts;
    if (!families.has(before)) families.set(before, { before, layers: new Set(), matrices: new Map() });
    const family = families.get(before);
    family.layers.add(Number(number));
    if (!family.matrices.has(matrix)) family.matrices.set(matrix, new Map());
    family.matrices.get(matrix).set(Number(number), { state, change });
  };
  const gone = new Set(difference.only_a);
  for (const name of names) put(name, gone.has(name) ? "gone" : changed.has(name) ? "changed" : "same", changed.get(name));
  for (const name of difference.only_b) put(name, "new");
  const large = [...families.values()].filter((family) => family.layers.size > 1);
  return large.sort((x, y) => y.layers.size * y.matrices.size - x.layers.size * x.matrices.size).slice(0, 8);
}

/* What packing or rounding cost each layer: all its tensors together, and the worst of them. */
function lossesOf(families) {
  const points = { layer: [], "its worst tensor": [] };
  const family = families.find(({ matrices }) => [...matrices.values()].some((cells) => [...cells.values()].some(isLoss)));
  if (!family) return null;
  for (const layer of [...family.layers].sort((x, y) => x - y)) {
    const changes = [...family.matrices.values()].map((cells) => cells.get(layer)).filter((cell) => cell && isLoss(cell)).map((cell) => cell.change);
    if (!changes.length) continue;
    const squares = changes.reduce((sum, change) => sum + change.squares, 0);
    points.layer.push([layer, squares ? changes.reduce((sum, change) => sum + change.nmse * change.squares, 0) / squares : 0]);
    points["its worst tensor"].push([layer, Math.max(...changes.map((change) => change.nmse))]);
  }
  const kinds = { layer: "test", "its worst tensor": "training, by epoch" };
  const curves = Object.entries(points).map(([name, found], run) => ({ name, run, kind: kinds[name], points: found }));
  const key = curves.map(({ name, run }) => el("span", {}, el("i", { class: `r${run}`, "aria-hidden": "true" }), name));
  const drawn = chart(`NMSE by layer: ${family.before}…`, curves, "nmse", "layer");
  return el("div", {}, el("p", { class: "key" }, key), el("div", { class: "charts" }, drawn));
}

function isLoss({ change }) {
  return Number.isFinite(change?.nmse);
}

function heatmap({ before, layers, matrices }) {
  const numbers = [...layers].sort((x, y) => x - y).slice(0, MOST_LAYERS);
  const rows = [...matrices].slice(0, MOST_MATRICES);
  const head = el("tr", {}, el("td"), numbers.map((number) => el("th", { scope: "col" }, number)));
  const body = rows.map(([matrix, cells]) =>
    el("tr", {}, el("th", { scope: "row", title: matrix }, matrix), numbers.map((number) => heatCell(cells.get(number), `${before}${number}.${matrix}`))),
  );
  const left = layers.size - numbers.length + matrices.size - rows.length;
  const caption = `${before}… by number${left ? ` (${left} more are in the list)` : ""}`;
  const table = el("table", { class: "heat" }, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body));
  return el("div", { class: "table" }, scrolling(table, caption), heatKey());
}

function heatCell(cell, name) {
  if (!cell) return el("td");
  const said = cell.state === "changed" ? sayChange(cell.change) : cell.state;
  return el("td", { class: heatClass(cell), title: `${name}: ${said}` }, el("span", { class: "said" }, said));
}

function heatClass({ state, change }) {
  if (state !== "changed") return state;
  const far = farness(change);
  return far === Infinity ? "odd" : `h${STEPS.filter((step) => far >= step).length}`;
}

function sayChange(change) {
  if (change.nans) return `${change.nans} NaN on one side`;
  return change.relative === null || change.relative === undefined ? change.why : `${inShort(change.relative)} relative`;
}

function heatKey() {
  const steps = ["<1e-6", ...STEPS.map((step) => `≥${step >= 1e-3 ? step : step.toExponential()}`)];
  const states = [["same", "same"], ...steps.map((text, i) => [`h${i}`, text]), ["odd", "not measured"], ["gone", "gone"], ["new", "new"]];
  return el("p", { class: "key" }, "relative change: ", states.map(([name, text]) => el("span", {}, el("i", { class: name, "aria-hidden": "true" }), text)));
}

function changeTable(changed) {
  const most = Math.max(...changed.map(farness).filter(Number.isFinite), 0);
  const far = (change) => Math.min(farness(change), Number.MAX_VALUE);
  const columns = [
    { title: "name", text: (change) => change.name, key: (change) => change.name },
    { title: "relative", numeric: true, key: far, text: (change) => (change.relative === undefined ? "" : change.nans ? "NaN" : inShort(change.relative) || "∞"), bar: (change) => (Number.isFinite(farness(change)) && most ? farness(change) / most : 0) },
    { title: "cosine", numeric: true, key: (change) => -(change.cosine ?? -2), text: (change) => (change.cosine === undefined || change.cosine === null ? "" : change.cosine.toFixed(6)) },
    { title: "largest", numeric: true, key: (change) => change.most, text: (change) => inShort(change.most) },
    { title: "differ", numeric: true, key: (change) => change.differ / change.of, text: (change) => (change.of ? shareOf(change.differ, change.of) : "") },
    ...(changed.some((change) => change.nmse !== undefined) ? lossColumns() : []),
    { title: "what", text: (change) => (change.relative === undefined ? change.text : change.kind) },
  ];
  const order = columns.find(({ title }) => title === "NMSE") ?? columns[1];
  return tableOf(`What changed, and how far (${changed.length.toLocaleString("en")})`, columns, changed, order);
}

function lossColumns() {
  const count = (change, name) => change[name] ?? null;
  const counts = ["saturated", "zeroed"].map((name) => ({ title: name, numeric: true, key: (change) => count(change, name), text: (change) => count(change, name)?.toLocaleString("en") ?? "" }));
  return [{ title: "NMSE", numeric: true, key: (change) => change.nmse, text: (change) => inShort(change.nmse) }, ...counts];
}

/* As `diff` says it: never rounded to all or to nothing. */
function shareOf(count, of) {
  if (count === of) return "all";
  const percent = (100 * count) / of;
  return percent < 0.1 ? "<0.1%" : `${Number(Math.min(percent, 99.9).toPrecision(3))}%`;
}
