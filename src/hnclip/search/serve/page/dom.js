/* Elements. Whatever comes from the index is set as text, never as markup: names and captions are anybody's. */

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes, `text` or children, and listeners under `on`. */
export function make(tag, { text, on = {}, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
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

/** Give a parent exactly these children, moving only those that are not in their place: what stays keeps its focus. */
export function arrange(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  children.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
}

/** A button that says what it does. */
export const button = (text, run) =>
  make("button", { type: "button", class: "quiet-button", text, on: { click: () => run() } });

export const thumbnailOf = (id) => `/api/pictures/${id}/thumbnail`;
export const pictureOf = (id) => `/api/pictures/${id}`;

/** A thumbnail; its room is there before. One that fails is asked for once more, since the server may be busy. */
export function thumbnail(result, { lazy = true } = {}) {
  const image = make("img", {
    src: thumbnailOf(result.id), alt: "", width: result.width, height: result.height, decoding: "async",
    loading: lazy ? "lazy" : "eager",
  });
  let tries = 2;
  image.addEventListener("error", () => {
    tries -= 1;
    if (tries > 0) setTimeout(() => { image.src = thumbnailOf(result.id); }, 1500);
    else image.classList.add("missing");
  });
  return image;
}

export const count = (number) => number.toLocaleString("en").replaceAll(",", "\u202f");
export const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;
export const score = (number) => number.toFixed(2).replace("-", "\u2212");
export const lastPart = (name) => name.split("/").filter(Boolean).pop() ?? name;
/** Width by height, kept from extremes that would leave no room for others. */
export const ratio = ({ width, height }) => Math.min(2.4, Math.max(0.5, width / height || 1));
/** Characters as the server counts them. */
export const length = (text) => [...text].length;
