/* Tables whose rows are made when they are looked at, sorted by their columns. */

const FIRST_ROWS = 100;

/* columns: {title, text(row), key(row), numeric, bar(row) from 0 to 1}; a column with a key is sorted by it. */
function tableOf(caption, columns, rows, sorted = null) {
  const body = el("tbody");
  const more = el("button", { type: "button", class: "more", click: () => show(shown * 4) });
  const heads = columns.map((column) => headOf(column, () => sortBy(column)));
  let order = rows;
  let shown = FIRST_ROWS;
  let by = null;
  let downwards = false;

  function sortBy(column, down = null) {
    downwards = down ?? (by === column ? !downwards : Boolean(column.numeric));
    by = column;
    const sign = downwards ? -1 : 1;
    order = [...rows].sort((a, b) => sign * compared(column.key(a), column.key(b)));
    heads.forEach((head, i) => {
      if (columns[i] === by) head.setAttribute("aria-sort", downwards ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    show(shown);
  }

  function show(count) {
    shown = count;
    body.replaceChildren(...order.slice(0, shown).map((row) => rowOf(columns, row)));
    const left = order.length - shown;
    more.hidden = left <= 0;
    more.textContent = `Show more: ${counted(Math.max(left, 0), "row")} left`;
  }

  if (sorted) sortBy(sorted, true);
  else show(shown);
  const table = el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, heads)), body);
  return el("div", { class: columns.length > 2 ? "table wide" : "table" }, scrolling(table, caption), more);
}

/* Whoever has no mouse scrolls what has the focus. */
function scrolling(element, label) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, element);
}

function headOf(column, sort) {
  const attributes = { scope: "col", class: column.numeric ? "number" : null };
  return el("th", attributes, column.key ? el("button", { type: "button", click: sort }, column.title) : column.title);
}

function rowOf(columns, row) {
  return el("tr", {}, columns.map((column, i) => {
    const cell = el(i ? "td" : "th", { scope: i ? null : "row", class: column.numeric ? "number" : null }, column.text(row));
    if (column.bar) {
      const bar = el("span", { class: "bar", "aria-hidden": "true" });
      bar.style.width = `${100 * column.bar(row)}%`;
      cell.append(bar);
    }
    return cell;
  }));
}

function compared(a, b) {
  if (typeof a === "string" && typeof b === "string") return a.localeCompare(b, "en", { numeric: true });
  return (a ?? -Infinity) === (b ?? -Infinity) ? 0 : (a ?? -Infinity) < (b ?? -Infinity) ? -1 : 1;
}
