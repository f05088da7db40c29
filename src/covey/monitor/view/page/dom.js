// Elements made from data. Whatever a model, a data set or a run's name says becomes a text node: nothing here parses HTML.

/** An element with properties (`class`, `on...`, `data-...`, attributes) and children (elements, text, null). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (["value", "checked", "disabled", "selected", "open"].includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...parts(children));
  return element;
}

const parts = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...parts(children));
  return element;
}

const DIRECTION = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f]/g;

/** Text with its control characters as pictures, and without those that reorder what is read. */
export function visible(text) {
  return String(text ?? "")
    .replace(/\r\n/g, "\n")
    .replace(CONTROL, (c) => (c === "\u007f" ? "␡" : String.fromCharCode(0x2400 + c.charCodeAt(0))))
    .replace(DIRECTION, "\ufffd");
}

/** A dot of a colour, as legends and tooltips have it. */
export function dot(colour) {
  const element = h("span", { class: "dot" });
  element.style.backgroundColor = colour;
  return element;
}

/** An entry of a legend. */
export const entry = (name, colour) => h("span", { class: "key" }, dot(colour), name);

/** Move the focus along links with j and k; false for other keys. */
export function walk(key, links) {
  const by = { j: 1, k: -1 }[key];
  if (!by) return false;
  links[Math.min(Math.max(links.indexOf(document.activeElement) + by, 0), links.length - 1)]?.focus();
  return true;
}

/** A variable of the style sheet, in the theme there is now. */
export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Add words to a query; lists repeat, empty values are left out. */
export function addTo(query, words) {
  for (const [name, value] of Object.entries(words)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "" && one !== false) query.append(name, one === true ? "1" : one);
  }
  return query;
}

const WHOLE = new Intl.NumberFormat("en");

/** A number in few characters; a dash for none. */
export function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return WHOLE.format(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : value.toFixed(size < 10 ? digits + zeros(size) : 1);
}

/** Zeros between the point and the first digit of a number below 1. */
const zeros = (size) => (size > 0 && size < 1 ? Math.max(0, -Math.floor(Math.log10(size)) - 1) : 0);

/** The numbers of an axis, with as many digits as it takes to tell neighbours apart. */
export function axisTexts(places) {
  const there = places.filter((value) => value !== null);
  const gap = Math.min(...there.slice(1).map((value, at) => Math.abs(value - there[at])).filter((one) => one > 0), Infinity);
  const size = Math.max(...there.map(Math.abs), 0);
  if (!Number.isFinite(gap) || size >= 1e6 || size < 1e-3) {
    return places.map((value) => (value === null ? "" : value === 0 ? "0" : size >= 1e6 || size < 1e-3 ? value.toExponential(Math.min(6, digitsOf(size, gap))) : short(value)));
  }
  const digits = Math.min(12, Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9)));
  return places.map((value) => (value === null ? "" : digits ? value.toFixed(digits) : WHOLE.format(value)));
}

const digitsOf = (size, gap) => (Number.isFinite(gap) && size ? Math.max(1, Math.ceil(Math.log10(size / gap))) : 1);

/** `call`, once nothing has asked for it for so many milliseconds. */
export function later(call, wait) {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...words), wait);
  };
}

/** True while a button of the pointer is down on the page: the element below it must stay until it is let go, or the click is lost. */
export const isPressed = () => document.getElementById("main").matches(":active");

/** Wait until no button of the pointer is down. */
export async function letGo() {
  while (isPressed()) await new Promise((done) => setTimeout(done, 20));
}
