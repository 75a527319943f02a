/* Results that are nearly the same, side by side: which words tell them apart, and how well each picture shows them. */

import { Failure, ask } from "./api.js";
import { button, icon, make, plural, ratio, score, thumbnail } from "./dom.js";

const AROUND = 4; // words kept on either side of a highlighted one
const PLAIN = 120; // characters of a caption without highlighted words that may not fit into what is shown of it
const MOST = 8; // pictures that the server compares at once

/** Pieces [text, highlighted] as nodes. */
export const marked = (pieces) => pieces.map(([text, highlighted]) => (highlighted ? make("mark", { text }) : text));

/** Pieces with what is far from any highlighted word left out, where that saves something. */
export function excerpt(pieces) {
  if (!pieces.some(([, highlighted]) => highlighted)) return pieces;
  return pieces.map(([text, highlighted], at) => {
    if (highlighted) return [text, true];
    const words = text.split(/(?<=\s)(?=\S)/u), before = at > 0, after = at < pieces.length - 1;
    const kept = (before ? AROUND : 0) + (after ? AROUND : 0);
    if (words.length <= kept + 4) return [text, false];
    const start = before ? words.slice(0, AROUND).join("") : "", stop = after ? words.slice(-AROUND).join("") : "";
    return [`${start.trimEnd()}${before ? " " : ""}…${after ? " " : ""}${stop}`, false];
  });
}

/**
 * A band of near-twins.
 * @param {object} group as the server gives it
 * @param {HTMLElement[]} tiles of its members, in its order
 * @param {Map<number, object>} results by id
 * @param {string} text the description; "" when a picture was searched with
 */
export function band(group, tiles, results, text) {
  const element = make("section", { class: "band", "aria-label": `${tiles.length} results that are nearly the same` });
  const first = results.get(group.ids[0]);
  element.style.setProperty("--ratio", ratio(first));
  const said = new Map(group.captions.map(({ id, pieces }) => [id, pieces]));
  const long = group.captions.some(({ pieces }) => isLong(pieces));
  const caption = (pieces) => make("p", { class: "twin-caption short", dir: "auto" }, ...marked(excerpt(pieces)));
  const captions = new Map([...said].map(([id, pieces]) => [id, caption(pieces)]));
  const member = (tile, id) => make("div", { class: "member", role: "listitem" }, tile, captions.get(id) ?? null);
  const members = tiles.map((tile, at) => member(tile, group.ids[at]));

  const tools = make("div", { class: "band-tools" });
  const title = make("h3", {}, icon("alike"), "Nearly the same");
  const head = make("div", { class: "band-head" }, title,
    make("p", { text: `${plural(tiles.length, "picture", "pictures")}, at least ${score(group.similarity)} alike`,
      title: "The smallest cosine between the first of these pictures and another one" }), tools);
  if (long) tools.append(wholeCaptions(said, captions));
  const row = make("div", { class: "members", role: "list" }, ...members);
  const body = make("div", { class: "band-body" }, row);
  if (text !== "") body.append(separation(group.ids.slice(0, MOST), results, text, tools));
  element.append(head, body);
  return element;
}

const isLong = (pieces) => pieces.some(([, highlighted]) => highlighted)
  ? excerpt(pieces).some(([part], at) => part !== pieces[at][0])
  : pieces.reduce((sum, [part]) => sum + part.length, 0) > PLAIN;

function wholeCaptions(said, captions) {
  const toggle = button("Whole captions", () => {
    const whole = toggle.getAttribute("aria-pressed") !== "true";
    toggle.setAttribute("aria-pressed", whole);
    for (const [id, element] of captions) {
      element.classList.toggle("short", !whole);
      element.replaceChildren(...marked(whole ? said.get(id) : excerpt(said.get(id))));
    }
  });
  toggle.setAttribute("aria-pressed", "false");
  return toggle;
}

/** A table of the words that tell the pictures apart, asked for when it is opened. */
function separation(ids, results, text, tools) {
  const place = make("div", { class: "apart", hidden: true, "aria-live": "polite" });
  const toggle = make("button", { type: "button", class: "quiet-button", "aria-expanded": "false" },
    icon("apart"), "What separates them");
  const load = async () => {
    place.replaceChildren(make("p", { class: "hint", text: "Comparing words …" }));
    try {
      const { separators } = await ask("/api/separate", { body: { text, ids } });
      place.replaceChildren(...table(separators, ids, results));
      place.scrollIntoView({ block: "nearest" });
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      place.replaceChildren(make("p", { class: "problem-line", text: `${error.message} ` }), button("Try again", load));
    }
  };
  toggle.addEventListener("click", () => {
    place.hidden = !place.hidden;
    toggle.setAttribute("aria-expanded", !place.hidden);
    if (!place.hidden && place.childElementCount === 0) load();
    else if (!place.hidden && place.querySelector("button") !== null) load();
  });
  tools.append(toggle);
  return place;
}

function table(separators, ids, results) {
  if (separators.length === 0) {
    return [make("p", { class: "hint", text: "No word of the description tells these pictures apart." })];
  }
  // Cosines of words lie close together, far from 0: bars begin where the lowest is still to be seen.
  const all = separators.flatMap(({ scores }) => scores), high = Math.max(...all);
  const span = 1.2 * (high - Math.min(...all)) || 1;
  const head = ids.map((id, at) => make("th", { scope: "col" },
    thumbnail(results.get(id)), make("span", { class: "unseen", text: `Picture ${at + 1}` })));
  const rows = separators.map(({ word, scores }) => {
    const best = Math.max(...scores);
    const cells = scores.map((value) => {
      const bar = make("span", { class: "bar" });
      bar.style.setProperty("--share", 1 - (high - value) / span);
      return make("td", { class: value === best ? "best" : null }, bar, make("span", { text: score(value) }));
    });
    return make("tr", {}, make("th", { scope: "row", dir: "auto", text: word }), ...cells);
  });
  return [
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "What separates them" },
      make("table", {},
        make("thead", {}, make("tr", {}, make("th", { scope: "col", text: "Word" }), ...head)),
        make("tbody", {}, ...rows))),
    make("p", { class: "hint", text: "How well each picture shows those words of your description that differ most." }),
  ];
}
