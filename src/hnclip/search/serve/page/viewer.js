/* One hit, large: what is known about it, and for each word of the query a heat map of its similarity to the image. */

import { request } from "./api.js";
import { baseName, byId, count, hint, imageUrl, make, problem, score, thumbnail, thumbnailUrl } from "./dom.js";
import { marked } from "./results.js";

const SWIPE = 60; // pixels
const SCALE = 15; // pixels of the heat map for each patch; an odd number: the middle one has the value of the patch
const HINT = "Choose a word for its heat map. It shows which parts of the image the model compares with the word; "
  + "it may not show where things are.";
const APPROXIMATE = "The original file is not available; the scores are those of its thumbnail.";
// Stops of the heat map from low to high, with red, green, blue and alpha.
const COLOURS = [
  [0, 14, 18, 44, 150],
  [0.35, 66, 28, 120, 150],
  [0.62, 200, 58, 88, 128],
  [0.82, 250, 150, 50, 112],
  [1, 255, 226, 110, 128],
];

export class Viewer {
  #actions;
  #dialog = byId("viewer");
  #hit = null;
  #text = "";
  #word = null; // number of the chosen one, which stays chosen from hit to hit
  #explanation = null;
  #ranges = []; // of its words
  #explanations = new Map(); // of this text, by hit

  /**
   * @param {object} actions
   * @param {(by: number) => void} actions.step to another hit
   * @param {(id: number) => void} actions.open
   * @param {(id: number) => void} actions.similar search with an image
   * @param {() => void} actions.closed is called when the viewer has been closed
   */
  constructor(actions) {
    this.#actions = actions;
    byId("previous").addEventListener("click", () => actions.step(-1));
    byId("next").addEventListener("click", () => actions.step(1));
    byId("similar").addEventListener("click", () => actions.similar(this.#hit.id));
    byId("stage").addEventListener("click", ({ target }) => { if (target.id === "stage") this.close(); });
    this.#dialog.addEventListener("close", () => actions.closed());
    const stops = COLOURS.map(([stop, ...rgba]) => `rgb(${rgba.slice(0, 3)}) ${100 * stop}%`);
    byId("scale").style.background = `linear-gradient(to right, ${stops})`;
    document.addEventListener("keydown", (event) => this.#onKey(event));
    this.#listenToSwipes();
    this.#listenToWords();
  }

  /** @param {{text: string, at: number, count: number, more: boolean, group: object | null}} context the query, the
   *    place of the hit among how many, and its near-duplicates */
  show(hit, { text, at, count: number, more, group }) {
    byId("viewer-place").textContent = `${at + 1} of ${number}${more ? "+" : ""}`;
    byId("previous").disabled = at === 0;
    byId("next").disabled = at === number - 1;
    if (this.#dialog.open && this.#text === text && this.#hit.id === hit.id) return; // only more hits were found
    if (text !== this.#text) {
      this.#text = text;
      this.#word = null;
      this.#explanations.clear();
      byId("words").replaceChildren();
    }
    this.#hit = hit;
    this.#explanation = null;
    this.#showFacts();
    this.#showImage();
    this.#showCaptions(group);
    this.#showNearDuplicates(group);
    if (!this.#dialog.open) {
      this.#dialog.showModal();
      byId("viewer-name").focus(); // screen readers read it, and arrow keys lead to other hits
    }
    if (this.#word === null) byId("panel").scrollTop = 0;
    byId("words-part").hidden = text === "";
    if (text !== "") this.#explain();
  }

  close() {
    this.#dialog.close();
  }

  #showFacts() {
    const { name, width, height, score: cosine, token_score: tokens } = this.#hit;
    const facts = [["Score", score(cosine)], ["Size", `${count(width)} × ${count(height)}`]];
    if (tokens !== null) facts.splice(1, 0, ["Reranked by", score(tokens)]);
    byId("viewer-name").textContent = baseName(name);
    byId("viewer-folder").textContent = name.slice(0, -baseName(name).length);
    byId("viewer-facts").replaceChildren(...facts.map(([term, value]) =>
      make("div", {}, make("dt", { text: term }), make("dd", { text: value }))));
  }

  /** The thumbnail at once, and the original as soon as it is loaded. */
  #showImage() {
    const hit = this.#hit, image = byId("viewer-image"), frame = byId("frame"), note = byId("viewer-note");
    frame.style.setProperty("--ratio", hit.width / hit.height || 1);
    frame.style.setProperty("--width", `${hit.width}px`);
    image.src = thumbnailUrl(hit.id);
    image.alt = hit.captions[0] ?? hit.name;
    byId("original").href = imageUrl(hit.id);
    byId("original").hidden = false;
    note.textContent = "";
    byId("heat").hidden = byId("legend").hidden = true;
    const original = new Image();
    original.addEventListener("load", () => { if (this.#hit === hit) image.src = original.src; });
    original.addEventListener("error", () => {
      if (this.#hit !== hit) return;
      byId("original").hidden = true;
      note.textContent = "The original file cannot be shown. This is its thumbnail.";
    });
    original.src = imageUrl(hit.id);
  }

  #showCaptions(group) {
    const pieces = group?.captions.find(({ id }) => id === this.#hit.id)?.pieces ?? [];
    const own = pieces.map(([text]) => text).join("");
    const others = this.#hit.captions.filter((caption) => caption !== own);
    const captions = [...(own === "" ? [] : [marked(pieces)]), ...others.map((caption) => [caption])];
    byId("captions-part").hidden = captions.length === 0;
    byId("viewer-captions").replaceChildren(...captions.map((nodes) => make("p", { dir: "auto" }, ...nodes)));
  }

  #showNearDuplicates(group) {
    byId("group-part").hidden = group === null;
    byId("group").replaceChildren(...(group?.hits ?? []).map((hit, at) => make("button", {
      type: "button", class: "member-button", "aria-label": `Near-duplicate ${at + 1}`,
      "aria-current": hit.id === this.#hit.id ? "true" : null, on: { click: () => this.#actions.open(hit.id) },
    }, thumbnail(hit))));
  }

  async #explain() {
    const hit = this.#hit, text = this.#text, place = byId("words");
    if (place.querySelector(".word") === null) place.replaceChildren(hint("Comparing words …"));
    place.setAttribute("aria-busy", "true");
    try {
      const explanation = this.#explanations.get(hit.id) ?? await request("/api/explain", { body: { text, id: hit.id } });
      this.#explanations.set(hit.id, explanation);
      if (this.#hit === hit && this.#text === text) this.#showWords(explanation);
    } catch (error) {
      if (this.#hit === hit && this.#text === text) place.replaceChildren(...problem(error, () => this.#explain()));
    }
    place.removeAttribute("aria-busy");
  }

  /** The query with its words as buttons. Those that are shown already stay, and keep the focus. */
  #showWords(explanation) {
    const { words, text, approximate } = explanation;
    let chips = this.#chips();
    this.#explanation = explanation;
    this.#ranges = rangesOf(words);
    byId("words-hint").textContent = approximate ? `${HINT} ${APPROXIMATE}` : HINT;
    if (chips.length !== words.length || chips.some((chip, at) => chip.textContent !== words[at].text)) {
      byId("words").replaceChildren(...wordNodes(text, words));
      chips = this.#chips();
    }
    const scores = words.filter(({ content }) => content).map((word) => word.score);
    const low = Math.min(...scores), span = Math.max(...scores) - low || 1;
    words.forEach((word, at) => {
      const share = word.content ? 25 + 75 * (word.score - low) / span : 0; // function words match anything
      chips[at].style.setProperty("--share", `${Math.round(share)}%`);
      chips[at].title = `Highest score of a part of the image: ${score(word.score)}`;
    });
    this.#choose(this.#word);
  }

  #chips = () => [...byId("words").querySelectorAll(".word")];

  #choose(at) {
    this.#word = at;
    this.#chips().forEach((chip, number) => {
      chip.setAttribute("aria-pressed", number === at);
      chip.tabIndex = number === (at ?? 0) ? 0 : -1;
    });
    this.#paint(at);
  }

  /** Show the heat map of a word; null hides it. */
  #paint(at) {
    const word = this.#explanation?.words[at], canvas = byId("heat");
    canvas.hidden = byId("legend").hidden = word === undefined;
    if (word === undefined) return;
    const { rows, columns, box: [left, top, right, bottom] } = this.#explanation, range = this.#ranges[at];
    paint(canvas, word.patches, rows, columns, range);
    for (const [side, share] of [["left", left], ["top", top], ["width", right - left], ["height", bottom - top]]) {
      canvas.style.setProperty(side, `${100 * share}%`);
    }
    canvas.classList.toggle("part", left > 0.005 || top > 0.005 || right < 0.995 || bottom < 0.995);
    byId("legend-word").textContent = word.text;
    byId("legend-low").textContent = score(range.low);
    byId("legend-high").textContent = score(range.high);
  }

  #listenToWords() {
    const words = byId("words");
    words.addEventListener("click", ({ target }) => {
      const at = numberOf(target);
      if (at !== null) this.#choose(at === this.#word ? null : at);
    });
    words.addEventListener("focusin", ({ target }) => {
      if (target.matches(".word:focus-visible")) this.#choose(numberOf(target)); // it was reached with a key
    });
    words.addEventListener("pointerover", ({ target, pointerType }) => {
      if (pointerType === "mouse") this.#paint(numberOf(target) ?? this.#word);
    });
    words.addEventListener("pointerleave", () => this.#paint(this.#word));
  }

  #listenToSwipes() {
    let start = null;
    byId("stage").addEventListener("touchstart", ({ touches }) => {
      start = touches.length === 1 ? touches[0] : null;
    }, { passive: true });
    byId("stage").addEventListener("touchend", ({ changedTouches: [end] }) => {
      if (start === null) return;
      const across = end.clientX - start.clientX, down = end.clientY - start.clientY;
      start = null;
      if (Math.abs(across) > SWIPE && Math.abs(across) > 2 * Math.abs(down)) this.#actions.step(across < 0 ? 1 : -1);
    });
  }

  #onKey(event) {
    if (!this.#dialog.open || document.querySelector(".small[open]") !== null) return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = numberOf(event.target), across = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (at !== null && across) this.#chips()[at + across]?.focus();
    else if (across || (at !== null && down)) this.#actions.step(across ?? down);
    else return;
    event.preventDefault();
  }
}

/** The number of the word that an element belongs to, or null. */
function numberOf(element) {
  const number = element.closest?.(".word")?.dataset.number;
  return number === undefined ? null : Number(number);
}

/** A text with a button for each word. The server counts characters, not UTF-16 units as JavaScript actions. */
function wordNodes(text, words) {
  const characters = [...text], nodes = [];
  let end = 0;
  const addBetween = (start) => {
    const between = characters.slice(end, start).join("").trim();
    if (between !== "") nodes.push(make("span", { class: "between", text: between }));
  };
  words.forEach((word, number) => {
    addBetween(word.start);
    end = word.stop;
    nodes.push(make("button", { type: "button", class: "word", "data-number": number, text: word.text }));
  });
  addBetween(characters.length);
  return nodes;
}

/**
 * The cosines between which the colours of each word run: from its median patch to its best one, so that half of the
 * image is dark. All have at least half of the widest range, so that a word which is similar to every part stays dark.
 */
function rangesOf(words) {
  const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const ranges = words.map(({ patches }) => ({ low: median(patches), high: Math.max(...patches) }));
  const widest = Math.max(...ranges.map(({ low, high }) => high - low), 1e-6);
  return ranges.map(({ low, high }) => ({ low, high: Math.max(high, low + widest / 2) }));
}

/** Paint patches into a canvas: the browser interpolates the values, of which each becomes its colour. */
function paint(canvas, patches, rows, columns, { low, high }) {
  const small = new OffscreenCanvas(columns, rows).getContext("2d"), values = small.createImageData(columns, rows);
  patches.forEach((value, at) => values.data.set([255 * (value - low) / (high - low), 0, 0, 255], 4 * at));
  small.putImageData(values, 0, 0);
  [canvas.width, canvas.height] = [SCALE * columns, SCALE * rows];
  const large = canvas.getContext("2d", { willReadFrequently: true });
  large.drawImage(small.canvas, 0, 0, canvas.width, canvas.height);
  const image = large.getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < image.data.length; at += 4) image.data.set(colourOf(image.data[at] / 255), at);
  large.putImageData(image, 0, 0);
}

/** Red, green, blue and alpha of a value between 0 and 1. */
function colourOf(value) {
  const next = Math.max(1, COLOURS.findIndex(([stop]) => stop >= value));
  const [start, ...from] = COLOURS[next - 1], [stop, ...to] = COLOURS[next];
  return from.map((part, at) => part + (to[at] - part) * (value - start) / (stop - start));
}
