/* Building the page. Names and captions are set as text, never as markup: they may contain anything. */

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes (null and false: none), `text`, listeners under `on`, and children (null: none). */
export function make(tag, { text, on = {}, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  if (text !== undefined) element.textContent = text;
  element.append(...children.filter((child) => child !== null));
  return element;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg"), use = document.createElementNS(SVG, "use");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

export const button = (text, run) =>
  make("button", { type: "button", class: "quiet-button", text, on: { click: () => run() } });

export const hint = (text) => make("p", { class: "hint", text });

/** An error as a sentence, with "Try again" where that may help. */
export function problem(error, again) {
  if (error.retryable === undefined) console.error(error); // not a failed request: a bug
  const text = error.retryable === undefined ? "This page has a bug. Reload it to continue." : error.message;
  return [make("p", { class: "problem", text }), ...(error.retryable ? [button("Try again", again)] : [])];
}

/** Fill a place with the nodes that are loaded, and meanwhile with a sentence; or with the error. */
export async function fill(place, meanwhile, load) {
  place.replaceChildren(hint(meanwhile));
  try {
    place.replaceChildren(...await load());
  } catch (error) {
    place.replaceChildren(...problem(error, () => fill(place, meanwhile, load)));
  }
}

/** Give a parent exactly these children and move only those that are out of place: the others keep focus and scroll. */
export function arrange(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  children.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
}

export const imageUrl = (id) => `/api/images/${id}`;
export const thumbnailUrl = (id) => `/api/images/${id}/thumbnail`;

/** The thumbnail of a hit, which takes its space before it is loaded. */
export function thumbnail({ id, width, height }) {
  const image = make("img", { src: thumbnailUrl(id), alt: "", width, height, decoding: "async", loading: "lazy" });
  image.addEventListener("error", () => image.classList.add("missing"));
  return image;
}

/** Width by height, without extremes that would leave no space for others. */
export const ratio = ({ width, height }) => Math.min(2.4, Math.max(0.5, width / height || 1));
export const count = (number) => number.toLocaleString("en").replaceAll(",", "\u202f");
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const score = (number) => number.toFixed(2).replace("-", "\u2212");
export const baseName = (name) => name.split("/").filter(Boolean).pop() ?? name;
/** The number of characters as the server counts them: code points. */
export const length = (text) => [...text].length;
