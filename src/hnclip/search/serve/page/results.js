/* The results: images in rows of equal height, near-duplicates side by side in bands, captions next to their images. */

import { request } from "./api.js";
import {
  arrange, baseName, button, byId, count, fill, hint, icon, make, plural, problem, ratio, score, thumbnail,
} from "./dom.js";

const SHORT = 6; // hits in a row that may stand next to a band
const MAX_COMPARED = 8; // near-duplicates that the server compares at once
const CONTEXT = 4; // words of an excerpt before and after a highlighted one
const OPENING = 20; // words of an excerpt without highlighted ones

export class Results {
  hits = []; // in the order in which they are shown
  #place = byId("results");
  #parts = new Map(); // elements by key, to be used again when more results are shown
  #byId = new Map();
  #groups = [];
  #text = "";
  #actions;
  #end;

  /**
   * @param {object} actions
   * @param {(id: number) => string} actions.addressOf the address of an open hit
   * @param {(id: number) => void} actions.open
   * @param {() => void} actions.more is called near the end
   * @param {() => void} actions.leave is called when an arrow key leads above the first row
   */
  constructor(actions) {
    this.#actions = actions;
    this.#place.addEventListener("click", (event) => this.#onClick(event));
    this.#place.addEventListener("keydown", (event) => this.#onKey(event));
    this.#place.addEventListener("focusin", ({ target }) => this.#makeCurrent(target.closest(".tile")));
    this.#end = new IntersectionObserver((entries) => {
      if (entries.some(({ isIntersecting }) => isIntersecting)) actions.more();
    }, { rootMargin: "800px" });
  }

  clear() {
    this.#forget();
    byId("found").hidden = true;
    byId("found").removeAttribute("aria-busy");
  }

  /** A search has begun: fade the results that are shown. */
  wait() {
    byId("found").setAttribute("aria-busy", "true");
    this.#end.disconnect();
  }

  /**
   * @param {object} result of the server
   * @param {{continued: boolean, more: boolean, text: string}} options `continued`: it begins with what is shown;
   *   `more`: more can be requested; `text`: the query, "" if it is an image
   */
  show(result, { continued, more, text }) {
    if (!continued) this.#forget();
    const ofImages = result.find === "images", number = ofImages ? result.hits.length : result.captions.length;
    const hits = ofImages ? result.hits : result.captions.flatMap(({ images }) => images);
    this.#text = text;
    this.#groups = result.groups;
    this.#byId = new Map(hits.map((hit) => [hit.id, hit]));
    const focused = document.activeElement;
    arrange(this.#place, ofImages ? this.#rows(result.hits) : this.#captions(result.captions));
    if (focused?.matches(".tile") && document.activeElement !== focused) focused.focus({ preventScroll: true });
    this.hits = [...new Set(this.#tiles().map((tile) => Number(tile.dataset.id)))].map((id) => this.#byId.get(id));
    this.#makeCurrent(this.#current() ?? this.#tiles()[0]);
    byId("found").hidden = number === 0;
    byId("found").removeAttribute("aria-busy");
    this.#describe(result, number, more);
  }

  /** More results could not be requested. */
  fail(error, again) {
    byId("tail").replaceChildren(...problem(error, again));
  }

  /** Focus the tile of a hit, or the current one; false if it is not shown. */
  focus(id) {
    const tile = id === undefined ? this.#current() : this.#place.querySelector(`.tile[data-id="${id}"]`);
    tile?.focus({ preventScroll: true });
    tile?.scrollIntoView({ block: "nearest" });
    return tile !== null;
  }

  /** The near-duplicates of a hit among the results, itself included; null if there are none. */
  groupOf(hit) {
    const group = this.#groups[hit.group];
    const hits = group?.ids.map((id) => this.#byId.get(id)).filter((found) => found !== undefined) ?? [];
    return hits.length < 2 ? null : { ...group, hits };
  }

  #forget() {
    this.#parts.clear();
    this.#end.disconnect();
    this.#place.replaceChildren();
    byId("tail").replaceChildren();
    this.hits = [];
  }

  /** The lines above and below the results. */
  #describe({ find, hits, total, seconds }, number, more) {
    const noun = find === "images" ? "image" : "caption", tail = byId("tail");
    byId("found-count").textContent = number < total
      ? `The best ${count(number)} of ${plural(total, noun)}` : `${plural(number, noun)}, best first`;
    byId("found-count").title = `Found in ${seconds.toFixed(2)} seconds`;
    byId("found-legend").textContent = hits.some((hit) => hit.token_score !== null)
      ? "The number compares words with parts of the image; the best 100 are ordered by it."
      : `The number is the cosine with your ${this.#text === "" ? "image" : "description"}; higher is better.`;
    tail.replaceChildren(hint(more ? "Loading more …"
      : number < total ? `${count(total - number)} more are not shown. A more detailed query ranks better.`
      : total === 1 ? `This is the only ${noun} of the index.` : `These are all ${plural(total, noun)} of the index.`));
    this.#end.disconnect();
    if (more) this.#end.observe(tail);
  }

  /** Runs of single hits, and each group of near-duplicates as a band at the place of its best hit. */
  #rows(hits) {
    const rows = [], done = new Set();
    for (const hit of hits) {
      if (done.has(hit.id)) continue;
      const group = this.groupOf(hit), last = rows.at(-1);
      group?.hits.forEach(({ id }) => done.add(id));
      if (group !== null) rows.push(group);
      else if (Array.isArray(last)) last.push(hit);
      else rows.push([hit]);
    }
    return rows.map((row) => (Array.isArray(row) ? this.#run(row) : this.#band(row)));
  }

  #run(hits) {
    const run = this.#part(`run ${hits[0].id}`, () => make("ul", { class: "run" }));
    run.classList.toggle("short", hits.length <= SHORT);
    arrange(run, hits.map((hit) => {
      const cell = this.#part(`cell ${hit.id}`, () => make("li", { class: "cell" }));
      cell.style.setProperty("--ratio", ratio(hit));
      arrange(cell, [this.#tile(hit)]);
      return cell;
    }));
    return run;
  }

  #band(group) {
    const tiles = group.hits.map((hit) => this.#tile(hit));
    return this.#part(`band ${group.hits.map(({ id }) => id)}`, () => band(group, tiles, this.#text));
  }

  #captions(captions) {
    return captions.map(({ text, score: cosine, images }, at) => this.#part(`caption ${at} ${text}`, () =>
      make("article", { class: "caption-result" },
        make("div", { class: "strip" }, ...images.map((hit) => this.#link(hit, "tile small-tile", thumbnail(hit)))),
        make("p", { class: "caption-text", dir: "auto", text }),
        make("span", { class: "score", text: score(cosine) }))));
  }

  #tile(hit) {
    return this.#part(`tile ${hit.id}`, () => {
      const rerank = hit.token_score === null ? "" : `, reranked by ${score(hit.token_score)}`;
      return this.#link(hit, "tile",
        make("span", { class: "image" }, thumbnail(hit), icon("broken")),
        make("span", { class: "tile-line", title: `${hit.name}\nscore ${score(hit.score)}${rerank}` },
          make("bdi", { class: "tile-name", text: baseName(hit.name) }),
          make("span", { class: "score", text: score(hit.token_score ?? hit.score) })),
        hit.captions.length === 0 ? null : make("span", { class: "tile-caption", dir: "auto", text: hit.captions[0] }));
    });
  }

  #link(hit, kind, ...children) {
    return make("a", {
      class: kind, href: this.#actions.addressOf(hit.id), "data-id": hit.id, tabindex: "-1", draggable: "false",
      "aria-label": `${baseName(hit.name).slice(0, 200)}, score ${score(hit.score)}`,
    }, ...children);
  }

  #part(key, create) {
    if (!this.#parts.has(key)) this.#parts.set(key, create());
    return this.#parts.get(key);
  }

  #tiles = () => [...this.#place.querySelectorAll(".tile")];

  /** Tab leads to one tile, the current one; from there arrow keys lead to the others. */
  #current = () => this.#place.querySelector(".tile[tabindex='0']");

  #makeCurrent(tile) {
    if (!tile) return;
    this.#current()?.setAttribute("tabindex", "-1");
    tile.tabIndex = 0;
  }

  #onClick(event) {
    const tile = event.target.closest(".tile");
    if (tile === null || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    this.#makeCurrent(tile);
    this.#actions.open(Number(tile.dataset.id));
  }

  #onKey(event) {
    const tile = event.target.closest(".tile");
    if (tile === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const tiles = this.#tiles(), at = tiles.indexOf(tile);
    const target = {
      ArrowRight: () => tiles[at + 1], ArrowLeft: () => tiles[at - 1], Home: () => tiles[0], End: () => tiles.at(-1),
      ArrowDown: () => neighbour(tile, tiles, 1), ArrowUp: () => neighbour(tile, tiles, -1),
    }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    const next = target();
    next?.focus({ preventScroll: true });
    next?.scrollIntoView({ block: "nearest" });
    if (next === undefined && event.key === "ArrowUp") this.#actions.leave();
  }
}

/** The nearest tile of the next row, below (1) or above (-1). */
function neighbour(tile, tiles, direction) {
  const boxes = new Map(tiles.map((one) => [one, one.getBoundingClientRect()])), own = boxes.get(tile);
  const middle = ({ left, width }) => left + width / 2;
  const [row, away] = [({ top }) => direction * (top - own.top), (box) => Math.abs(middle(box) - middle(own))];
  const ahead = tiles.filter((one) => row(boxes.get(one)) > 8); // pixels: in a row tops may differ a little
  const first = Math.min(...ahead.map((one) => row(boxes.get(one))));
  const inRow = ahead.filter((one) => row(boxes.get(one)) <= first + 8);
  return inRow.sort((a, b) => away(boxes.get(a)) - away(boxes.get(b)))[0];
}

/** Pieces [text, highlighted] of a caption as nodes. */
export const marked = (pieces) => pieces.map(([text, highlighted]) => (highlighted ? make("mark", { text }) : text));

/** The same with what is far from highlighted words in elements that styles can leave out. */
function excerpt(pieces) {
  const opening = pieces.some(([, highlighted]) => highlighted) ? 0 : OPENING;
  return pieces.flatMap(([text, highlighted], at) => {
    if (highlighted) return marked([[text, true]]);
    const words = text.split(/(?<=\s)(?=\S)/u);
    const start = at > 0 ? CONTEXT : opening, stop = words.length - (at < pieces.length - 1 ? CONTEXT : 0);
    if (stop - start <= CONTEXT) return [text];
    const [before, omitted, after] = [words.slice(0, start), words.slice(start, stop), words.slice(stop)];
    const inner = make("span", { text: omitted.join("") });
    return [before.join(""), make("span", { class: "omitted" }, inner), after.join("")];
  });
}

/** A group of near-duplicates side by side, with the words in which their captions differ. */
function band({ hits, similarity, captions }, tiles, text) {
  const said = new Map(captions.map(({ id, pieces }) =>
    [id, make("p", { class: "band-caption", dir: "auto" }, ...excerpt(pieces))]));
  const tools = make("div", { class: "band-tools" });
  const row = make("div", { class: "members", role: "list" }, ...hits.map(({ id }, at) =>
    make("div", { class: "member", role: "listitem" }, tiles[at], said.get(id) ?? null)));
  const body = make("div", { class: "band-body" }, row);
  const element = make("section", { class: "band", "aria-label": `${hits.length} near-duplicates` },
    make("div", { class: "band-head" },
      make("h3", {}, icon("similar"), "Near-duplicates"),
      make("p", { text: `${plural(hits.length, "image")}, similarity at least ${score(similarity)}`,
        title: "The smallest cosine of one of these images with the first" }),
      tools),
    body);
  element.style.setProperty("--ratio", ratio(hits[0]));
  if (element.querySelector(".omitted") !== null) {
    const toggle = button("Full captions", () => toggle.setAttribute("aria-pressed", element.classList.toggle("full")));
    toggle.setAttribute("aria-pressed", "false");
    tools.append(toggle);
  }
  if (text !== "") {
    const { toggle, place } = separation(hits.slice(0, MAX_COMPARED), text);
    tools.append(toggle);
    body.append(place);
  }
  return element;
}

/** A button, and the place of the table that it shows: the words of the query that separate near-duplicates. */
function separation(hits, text) {
  const place = make("div", { class: "separation", hidden: true, "aria-live": "polite" });
  const load = async () => table(await request("/api/separate", { body: { text, ids: hits.map(({ id }) => id) } }), hits);
  const toggle = button("What separates them", () => {
    place.hidden = !place.hidden;
    toggle.setAttribute("aria-expanded", !place.hidden);
    if (!place.hidden && place.querySelector("table") === null) {
      fill(place, "Comparing words …", load).then(() => place.scrollIntoView({ block: "nearest" }));
    }
  });
  toggle.setAttribute("aria-expanded", "false");
  toggle.prepend(icon("compare"));
  return { toggle, place };
}

function table({ separators, approximate }, hits) {
  if (separators.length === 0) return [hint("No word of the description separates these images.")];
  const highest = Math.max(...separators.flatMap(({ scores }) => scores), 1e-6);
  const head = hits.map((hit, at) =>
    make("th", { scope: "col" }, thumbnail(hit), make("span", { class: "unseen", text: `Image ${at + 1}` })));
  const rows = separators.map(({ word, scores }) => {
    const best = Math.max(...scores);
    return make("tr", {}, make("th", { scope: "row", dir: "auto", text: word }), ...scores.map((value) => {
      const bar = make("span", { class: "bar" });
      bar.style.setProperty("--share", Math.max(0, value / highest));
      return make("td", { class: value === best ? "best" : null }, bar, make("span", { text: score(value) }));
    }));
  });
  return [
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "What separates them" },
      make("table", {},
        make("thead", {}, make("tr", {}, make("th", { scope: "col", text: "Word" }), ...head)),
        make("tbody", {}, ...rows))),
    hint("The words of the description whose scores differ most between these images. Bars start at zero."
      + (approximate ? " Some scores are of thumbnails, since the original files are not available." : "")),
  ];
}
