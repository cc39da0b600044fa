"use strict";
/* Elements and numbers. Text of checkpoints becomes text nodes and attributes alone: nothing here parses HTML. */

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
}

function facts(rows) {
  return el("dl", { class: "facts" }, rows.map(([label, text]) => [el("dt", {}, label || "\u00a0"), el("dd", {}, text)]));
}

function inBytes(count) {
  if (count < 1000) return `${count} bytes`;
  const units = ["kB", "MB", "GB", "TB"];
  let size = count / 1000;
  while (size >= 999.5 && units.length > 1) {
    size /= 1000;
    units.shift();
  }
  return `${Number(size.toPrecision(3))} ${units[0]}`;
}

function inShort(value, digits = 3) {
  if (value === null || value === undefined) return "";
  if (Number.isInteger(value)) return Math.abs(value) < 1e7 ? value.toLocaleString("en") : value.toExponential(2);
  const size = Math.abs(value);
  const text = size >= 1e-4 && size < 1e6 ? value.toPrecision(digits) : value.toExponential(digits - 1);
  return text.includes("e") && size >= 1e-4 && size < 1e6 ? String(Number(text)) : text;
}

function counted(count, one, more = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : more}`;
}
