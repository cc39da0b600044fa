/* Curves over the epochs of a training, the time of its steps, and evaluations. */

const SIZE = { width: 420, height: 240, left: 52, right: 10, top: 10, bottom: 32 };
const SPREAD = 50; // from this ratio of the most to the least on, the axis is logarithmic

function trainingOf({ runs, panels, seconds }) {
  const key = runs.length > 1 ? runs.map((name, i) => el("span", {}, el("i", { class: `r${i % 7}`, "aria-hidden": "true" }), name)) : [];
  const charts = panels.map((panel) => chart(panel.title, panel.curves.map((curve) => ({ ...curve, name: curveName(curve, runs) })), panel.quantity));
  const times = seconds.flatMap((each, run) => (each.step ? [phases(each, runs.length > 1 ? `, ${runs[run]}` : "", run)] : []));
  return section("training", "Training", el("p", { class: "key" }, key, el("span", {}, "thin: training; thick, with points: test; dots: training, by epoch")), el("div", { class: "charts" }, charts, times));
}

function curveName({ run, kind }, runs) {
  return runs.length > 1 ? `${runs[run]}, ${kind}` : kind;
}

/* curves: {name, run, kind, points: [[epochs or another unit, value]]}; a value may be null. */
function chart(title, curves, quantity, unit = "epoch") {
  const all = curves.flatMap((curve) => curve.points).filter(([, value]) => value !== null);
  const values = all.map(([, value]) => value);
  const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  const last = all.reduce((most, [at]) => Math.max(most, at), 0) || 1;
  const end = all.every(([at]) => at === last) ? 2 * last : last; // what happened at one place stands in the middle
  const logarithmic = low > 0 && high > SPREAD * low && !["lr", "samples_per_second"].includes(quantity);
  const fromZero = ["lr", "samples_per_second", "seconds"].includes(quantity) && !logarithmic;
  const y = low === high && isShare(quantity) ? axis(0, 1, false) : axis(fromZero ? 0 : low, high, logarithmic);
  const x = (at) => SIZE.left + (at / end) * (SIZE.width - SIZE.left - SIZE.right);
  const drawn = svg("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": `${title}: ${curves.map(inWords).join("; ")}` });
  drawn.append(...axes(y, x, end, quantity, unit));
  for (const curve of curves) drawn.append(...line(curve, x, y.place));
  return el("figure", { class: "chart" }, el("figcaption", {}, title), readable(drawn, curves, x, quantity, unit));
}

function inWords({ name, points }) {
  const known = points.filter(([, value]) => value !== null);
  if (!known.length) return `${name}: no number`;
  return `${name} from ${inShort(known[0][1])} to ${inShort(known[known.length - 1][1])} in ${counted(known.length, "point")}`;
}

function axis(low, high, logarithmic) {
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  if (low === high) [low, high] = low ? [Math.min(0, 2 * low), Math.max(0, 2 * low)] : [0, 1];
  const scale = logarithmic ? Math.log10 : (value) => value;
  const [from, to] = [scale(low), scale(high)];
  const tall = SIZE.height - SIZE.top - SIZE.bottom;
  return { place: (value) => SIZE.top + tall * (1 - (scale(value) - from) / (to - from)), ticks: logarithmic ? decades(low, high) : ticks(low, high) };
}

function ticks(low, high, count = 5) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9) + 1e-300; i++) found.push(Number((i * step).toPrecision(12)));
  return found.slice(0, 12);
}

function decades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const each of [1, 2, 5]) if (each * 10 ** power >= low && each * 10 ** power <= high) found.push(Number((each * 10 ** power).toPrecision(3)));
  }
  return found.length > 7 ? found.filter((value) => /^1(0*|e.*)$|^0\.0*1$/.test(String(value))) : found;
}

function axes(y, x, end, quantity, unit) {
  const percent = isShare(quantity);
  const right = SIZE.width - SIZE.right;
  const lines = y.ticks.flatMap((value) => [
    svg("line", { class: "grid", x1: SIZE.left, x2: right, y1: y.place(value), y2: y.place(value) }),
    svg("text", { x: SIZE.left - 6, y: y.place(value) + 4, "text-anchor": "end" }, percent ? `${Number((100 * value).toPrecision(4))}%` : short(value)),
  ]);
  const below = ticks(0, end).map((at) => svg("text", { x: x(at), y: SIZE.height - 16, "text-anchor": "middle" }, short(at)));
  return [...lines, ...below, svg("text", { x: right, y: SIZE.height - 4, "text-anchor": "end" }, `${unit}s`)];
}

function isShare(quantity) {
  return quantity.endsWith("accuracy");
}

function short(value) {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e5) ? value.toExponential().replace("e+", "e") : String(value);
}

function line({ run, kind, points }, x, y) {
  const known = points.filter(([, value]) => value !== null);
  const path = known.map(([at, value], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const colour = `r${run % 7}`;
  const style = { training: "thin", test: "thick" }[kind] ?? "";
  const dots = kind !== "training" || known.length < 4 ? known.filter((_, i) => i % Math.ceil(known.length / 30) === 0) : [];
  return [
    ...(kind === "training, by epoch" ? [] : [svg("path", { d: path || "M0 0", class: `${colour} ${style}` })]),
    ...dots.map(([at, value]) => svg("circle", { cx: x(at), cy: y(value), r: known.length === 1 ? 4.5 : kind === "test" ? 3.5 : 2.5, class: colour })),
  ];
}

/* The values at one place, under the pointer or moved to by the arrow keys. */
function readable(drawn, curves, x, quantity, unit) {
  const places = [...new Set(curves.flatMap((curve) => curve.points.map(([at]) => at)))].sort((a, b) => a - b);
  const mark = svg("line", { class: "mark", y1: SIZE.top, y2: SIZE.height - SIZE.bottom });
  const said = el("p", { class: "reading", "aria-live": "polite" }, "\u00a0");
  let place = places.length - 1;
  const show = (i) => {
    place = Math.min(Math.max(i, 0), places.length - 1);
    const at = places[place];
    mark.setAttribute("x1", x(at));
    mark.setAttribute("x2", x(at));
    drawn.append(mark);
    const known = curves.map((curve) => [curve.name, curve.points.filter((point) => point[0] <= at).pop()]).filter(([, point]) => point);
    const percent = isShare(quantity);
    const words = known.map(([name, [, value]]) => `${name} ${value === null ? "no number" : percent ? `${inShort(100 * value, 4)}%` : inShort(value, 4)}`);
    said.textContent = `${unit} ${Number(at.toPrecision(4))}: ${words.join(", ")}`;
  };
  const frame = el("div", { class: "plot", tabindex: 0, role: "group", "aria-label": "arrow keys read the values" }, drawn);
  frame.addEventListener("pointermove", (event) => {
    const box = drawn.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * SIZE.width;
    show(places.reduce((best, each, i) => (Math.abs(x(each) - at) < Math.abs(x(places[best]) - at) ? i : best), 0));
  });
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -places.length, End: places.length }[event.key];
    if (!step || !places.length) return;
    event.preventDefault();
    show(place + step);
  });
  if (places.length === 1) show(0);
  return el("div", {}, frame, said);
}

/* Where the time of a step goes: one share for each phase, and the whole step over the training. */
function phases(seconds, of, run) {
  const mean = (points) => points.reduce((sum, [, value]) => sum + (value ?? 0), 0) / (points.length || 1);
  const step = mean(seconds.step);
  const parts = Object.entries(seconds).filter(([name]) => name !== "step").map(([name, points]) => [name, mean(points)]);
  const bar = el("div", { class: "phases", "aria-hidden": "true" }, parts.map(([, value], i) => {
    const part = el("span", { class: `c${i % 8}` });
    part.style.flexGrow = String(step ? value / step : 0);
    return part;
  }));
  const rows = parts.map(([name, value], i) => el("li", {}, el("i", { class: `c${i % 8}`, "aria-hidden": "true" }), `${name} ${inShort(value)} s (${step ? Math.round((100 * value) / step) : 0}%)`));
  const drawn = chart(`Seconds a step${of}`, [{ name: "step", run, kind: "training", points: seconds.step }], "seconds");
  drawn.append(bar, el("ul", { class: "key" }, rows));
  return drawn;
}

function evaluationOf(evaluation, number) {
  const [holds, verdict] = evaluation.certificate ?? [null, "no prediction files lie beside it to check it by"];
  const numeric = (title, i) => ({ title, numeric: true, key: (row) => row[i], text: (row) => (i > 3 ? inShort(row[i], 4) : inShort(row[i])) });
  const columns = [{ title: "class", text: (row) => row[0], key: (row) => row[0] }, ...["samples", "predicted", "correct", "precision", "recall", "f1"].map((title, i) => numeric(title, i + 1))];
  return section(
    `evaluation-${number}`, `Evaluation: ${evaluation.folder}`,
    el("p", { class: holds === false ? "warning" : "verdict" }, `Certificate: ${verdict}`),
    el("div", { class: "columns" },
      evaluation.confusion ? confusion(evaluation.confusion) : null,
      evaluation.per_class.length ? tableOf("Per class", columns, evaluation.per_class) : null),
    el("details", {}, el("summary", {}, "What it states"), facts(evaluation.stated)),
  );
}

function confusion({ classes, cells, pairs }) {
  if (pairs) {
    const columns = [["label", 0], ["predicted", 1], ["samples", 2]].map(([title, i]) => ({ title, numeric: i === 2, text: (row) => String(row[i]), key: (row) => row[i] }));
    return tableOf("The most frequent confusions", columns, pairs);
  }
  const counts = classes.map(() => classes.map(() => 0));
  for (const [label, said, count] of cells) counts[label][said] = count;
  const head = el("tr", {}, el("td"), classes.map((name) => el("th", { scope: "col" }, name)));
  const body = counts.map((row, label) => {
    const sum = row.reduce((total, count) => total + count, 0);
    return el("tr", {}, el("th", { scope: "row" }, classes[label]), row.map((count, said) =>
      el("td", { class: count ? `${label === said ? "right" : "wrong"} s${Math.ceil((4 * count) / sum)}` : "none", title: `${classes[label]} predicted as ${classes[said]}: ${count}` }, count || el("span", { class: "said" }, "0")),
    ));
  });
  const table = el("table", { class: "confusion" }, el("caption", {}, "Confusion: a row per label, a column per prediction"), el("thead", {}, head), el("tbody", {}, body));
  return el("div", { class: "table" }, scrolling(table, "Confusion matrix"));
}
