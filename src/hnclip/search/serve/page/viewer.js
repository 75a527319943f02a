/* One result, large: what is known of it, and where the model sees each word of the description. */

import { Failure, ask } from "./api.js";
import { button, byId, count, lastPart, make, pictureOf, score, thumbnail, thumbnailOf } from "./dom.js";
import { paintHeat, paintScale, ranges } from "./heat.js";
import { marked } from "./twins.js";

const SWIPE = 60; // pixels
const APPROXIMATE = "The original is gone: its thumbnail was looked at.";
const HINT = "Choose a word: the picture shows where the model sees it.";

export class Viewer {
  /**
   * @param {object} does
   * @param {(by: number) => void} does.step to another result
   * @param {(id: number) => void} does.open a result
   * @param {(result: object) => void} does.similar search with a result
   * @param {() => void} does.closed is called when the viewer has been closed
   */
  constructor(does) {
    this.does = does;
    this.dialog = byId("viewer");
    this.result = null;
    this.text = "";
    this.word = null; // number of the chosen one: it stays chosen from picture to picture
    this.explanations = new Map();
    this.explanation = null;
    this.#listen();
  }

  get isOpen() {
    return this.dialog.open;
  }

  /**
   * @param {object} result
   * @param {{text: string, at: number, length: number, more: boolean}} among the description, and its place of how many
   * @param {{group: object | null, byId: Map<number, object>}} among its near-twins, and all results
   */
  show(result, { text, at, length, more, group, byId: results }) {
    byId("viewer-place").textContent = `${at + 1} of ${length}${more ? "+" : ""}`;
    byId("before").disabled = at === 0;
    byId("after").disabled = at === length - 1;
    if (this.isOpen && this.text === text && this.result?.id === result.id) return; // only more was found
    if (text !== this.text) this.#forget(text);
    this.result = result;
    this.explanation = null;
    byId("viewer-name").textContent = lastPart(result.name);
    byId("viewer-folder").textContent = result.name.slice(0, -lastPart(result.name).length);
    this.#facts(result);
    this.#picture(result);
    this.#said(result, group);
    this.#twins(group, results);
    byId("words-part").hidden = text === "";
    if (!this.isOpen) {
      this.dialog.showModal();
      byId("viewer-name").focus(); // it is read out, and arrows are free for pictures
    }
    byId("panel").scrollTop = this.word === null ? 0 : byId("panel").scrollTop;
    if (text !== "") this.#explain();
  }

  close() {
    if (this.isOpen) this.dialog.close();
  }

  #forget(text) {
    this.text = text;
    this.word = null;
    this.explanations.clear();
    byId("words").replaceChildren();
  }

  #listen() {
    byId("before").addEventListener("click", () => this.does.step(-1));
    byId("after").addEventListener("click", () => this.does.step(1));
    byId("viewer-close").addEventListener("click", () => this.close());
    byId("similar").addEventListener("click", () => this.does.similar(this.result));
    this.dialog.addEventListener("close", () => this.does.closed());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog || event.target === byId("stage")) this.close();
    });
    document.addEventListener("keydown", (event) => this.#key(event));
    this.#listenToSwipes();
    const words = byId("words");
    words.addEventListener("click", (event) => {
      const at = wordAt(event);
      if (at !== null) this.#choose(this.word === at && event.detail > 0 && !this.fresh ? null : at);
      this.fresh = false;
    });
    words.addEventListener("focusin", (event) => {
      const at = wordAt(event);
      this.fresh = at !== null && this.word !== at; // the click that follows must not take back what the focus chose
      if (at !== null) this.#choose(at);
    });
    words.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse") this.#paint(wordAt(event) ?? this.word);
    });
    words.addEventListener("pointerleave", () => this.#paint(this.word));
  }

  #listenToSwipes() {
    let start = null;
    const stage = byId("stage");
    stage.addEventListener("touchstart", ({ touches }) => {
      start = touches.length === 1 ? touches[0] : null;
    }, { passive: true });
    stage.addEventListener("touchend", ({ changedTouches: [end] }) => {
      if (start === null) return;
      const across = end.clientX - start.clientX, down = end.clientY - start.clientY;
      start = null;
      if (Math.abs(across) > SWIPE && Math.abs(across) > 2 * Math.abs(down)) this.does.step(across < 0 ? 1 : -1);
    });
  }

  #key(event) {
    if (!this.isOpen || document.querySelector(".small[open]")) return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = wordAt(event);
    const along = { ArrowLeft: -1, ArrowRight: 1 }[event.key], down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (at !== null && along) {
      const words = [...byId("words").querySelectorAll(".word")];
      words[at + along]?.focus();
    } else if (along ?? (at !== null && down)) {
      this.does.step(along ?? down);
    } else {
      return;
    }
    event.preventDefault();
  }

  #facts(result) {
    const facts = [["Score", score(result.score)], ["Size", `${count(result.width)} × ${count(result.height)}`]];
    if (result.tokens !== null) facts.splice(1, 0, ["Word by word", score(result.tokens)]);
    byId("viewer-facts").replaceChildren(...facts.map(([name, value]) =>
      make("div", {}, make("dt", { text: name }), make("dd", { text: value }))));
  }

  /** The thumbnail at once, the picture itself as soon as it is there. */
  #picture(result) {
    const image = byId("viewer-picture"), frame = byId("frame"), original = byId("original");
    frame.style.setProperty("--ratio", result.width / result.height || 1);
    frame.style.setProperty("--width", `${result.width}px`);
    frame.classList.remove("only-thumbnail");
    image.src = thumbnailOf(result.id);
    image.alt = result.captions[0] ?? result.name;
    original.href = pictureOf(result.id);
    original.hidden = false;
    byId("heat").hidden = true;
    const whole = new Image();
    whole.addEventListener("load", () => { if (this.result === result) image.src = whole.src; });
    whole.addEventListener("error", () => {
      if (this.result !== result) return;
      original.hidden = true; // moved, gone, or of a kind that browsers do not show
      frame.classList.add("only-thumbnail");
    });
    whole.src = pictureOf(result.id);
  }

  #said(result, group) {
    const differing = group?.captions.find(({ id }) => id === result.id);
    const plain = differing?.pieces.map(([text]) => text).join("");
    const others = result.captions.filter((caption) => caption !== plain);
    byId("captions-part").hidden = result.captions.length === 0 && !differing;
    byId("viewer-captions").replaceChildren(
      ...(differing ? [make("p", { dir: "auto" }, ...marked(differing.pieces))] : []),
      ...others.map((caption) => make("p", { dir: "auto", text: caption })),
    );
  }

  #twins(group, results) {
    byId("twins-part").hidden = group === null;
    byId("twins-strip").replaceChildren(...(group?.ids ?? []).map((id, at) => {
      const own = id === this.result.id;
      return make("button", {
        type: "button", class: "twin", "aria-label": `Picture ${at + 1} of these`, "aria-current": own ? "true" : null,
        on: { click: () => this.does.open(id) },
      }, thumbnail(results.get(id), { lazy: false }));
    }));
  }

  async #explain() {
    const { result, text } = this;
    const known = this.explanations.get(result.id);
    if (known === undefined && byId("words").childElementCount === 0) {
      byId("words").replaceChildren(make("p", { class: "hint", text: "Looking at the words …" }));
    }
    byId("words").setAttribute("aria-busy", "true");
    try {
      const explanation = known ?? await ask("/api/explain", { body: { text, id: result.id } });
      this.explanations.set(result.id, explanation);
      if (this.result === result && this.text === text) this.#words(explanation);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      if (this.result !== result || this.text !== text) return;
      const again = button("Try again", () => this.#explain());
      byId("words").replaceChildren(make("p", { class: "problem-line", text: error.message }), again);
      byId("legend").hidden = true;
    }
    byId("words").removeAttribute("aria-busy");
  }

  /** The description, its words to be chosen. Those that are shown already stay, and with them the focus. */
  #words(explanation) {
    const { words, text } = explanation, place = byId("words");
    this.explanation = explanation;
    byId("words-hint").textContent = explanation.approximate ? `${HINT} ${APPROXIMATE}` : HINT;
    this.ranges = ranges(words);
    let chips = [...place.querySelectorAll(".word")];
    if (chips.length !== words.length || chips.some((chip, at) => chip.textContent !== words[at].text)) {
      const characters = [...text]; // the server counts characters, not the units that JavaScript counts
      let end = 0;
      const between = (stop) => characters.slice(end, stop).join("").trim();
      const nodes = words.flatMap(({ text: word, start, stop }, at) => {
        const before = between(start);
        end = stop;
        return [...(before === "" ? [] : [make("span", { class: "between", text: before })]),
          make("button", { type: "button", class: "word", text: word, "data-at": at, tabindex: "-1" })];
      });
      place.replaceChildren(...nodes, make("span", { class: "between", text: between() }));
      chips = [...place.querySelectorAll(".word")];
    }
    const scores = words.map((word) => word.score), low = Math.min(...scores), span = Math.max(...scores) - low || 1;
    chips.forEach((chip, at) => {
      chip.style.setProperty("--share", `${Math.round(((words[at].score - low) / span) * 100)}%`);
      chip.title = `Best part of the picture: ${score(words[at].score)}`;
    });
    if (words.length > 0) this.#choose(this.word !== null && this.word < words.length ? this.word : null);
  }

  #choose(at) {
    this.word = at;
    byId("words").querySelectorAll(".word").forEach((chip, number) => {
      chip.setAttribute("aria-pressed", number === at);
      chip.tabIndex = number === (at ?? 0) ? 0 : -1;
    });
    this.#paint(at);
  }

  #paint(at) {
    const canvas = byId("heat"), legend = byId("legend");
    const shown = at !== null && this.explanation !== null;
    canvas.hidden = legend.hidden = !shown;
    if (!shown) return;
    const { words, rows, columns, box: [left, top, right, bottom] } = this.explanation, range = this.ranges[at];
    const shape = { width: (right - left) * this.result.width, height: (bottom - top) * this.result.height };
    for (const [side, share] of [["left", left], ["top", top], ["width", right - left], ["height", bottom - top]]) {
      canvas.style.setProperty(side, `${100 * share}%`);
    }
    paintHeat(canvas, words[at].patches, rows, columns, range, shape);
    canvas.classList.toggle("part", left > 0.005 || top > 0.005 || right < 0.995 || bottom < 0.995);
    this.#legend(words[at], range, canvas.classList.contains("part"));
  }

  #legend(word, { low, high }, part) {
    const scale = make("canvas", { width: 128, height: 1, "aria-hidden": "true" });
    paintScale(scale);
    const legend = byId("legend");
    const frame = part ? "; the model sees only what lies inside the frame" : "";
    legend.title = `Cosine of the word with each part of the picture${frame}`;
    const [from, to] = [low, high].map((value) => make("span", { text: score(value) }));
    legend.replaceChildren(make("bdi", { text: word.text }), from, scale, to);
  }
}

const wordAt = ({ target }) => {
  const word = target.closest?.(".word");
  return word ? Number(word.dataset.at) : null;
};
