// Elements made of text, and figures as people read them. Nothing here takes markup.

export const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function shape(tag, attributes, title) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (title) made.append(Object.assign(document.createElementNS(SVG, "title"), { textContent: title }));
  return made;
}

export function strip(label) {
  const attributes = { viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img" };
  return shape("svg", { ...attributes, "aria-label": label });
}

function scaled(value, units, digits = 3) {
  if (value === null || value === undefined) return "–";
  let at = 0;
  while (Math.abs(value) >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${Number(value.toPrecision(digits))}${units[at]}`;
}

export const count = (value) => (value ?? 0).toLocaleString("en");
export const bytes = (value) => scaled(value, [" B", " kB", " MB", " GB", " TB"]);
export const number = (value) => scaled(value, ["", " k", " M", " G", " T"]);
export const figure = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(4))));

export function age(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}
