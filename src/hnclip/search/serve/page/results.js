/* What was found: pictures in rows of equal height, near-twins side by side, captions beside their pictures. */

import { addressOf } from "./address.js";
import { arrange, button, byId, count, icon, lastPart, make, plural, ratio, score, thumbnail } from "./dom.js";
import { band } from "./twins.js";

const SHORT = 6; // results in a row that may stand beside a band, if there is room
const SKELETONS = [1.5, 1.33, 0.75, 1.5, 1, 1.33, 1.78, 0.75, 1.33, 1.5];

export class Results {
  /**
   * @param {object} does
   * @param {(id: number) => void} does.open a result
   * @param {() => void} does.more is called near the end
   * @param {() => void} does.leave is called where the arrows go above the first row
   */
  constructor({ open, more, leave }) {
    this.does = { open, leave };
    this.place = byId("results");
    this.list = []; // results in the order in which they are shown
    this.place.addEventListener("click", (event) => this.#click(event));
    this.place.addEventListener("keydown", (event) => this.#key(event));
    this.place.addEventListener("focusin", (event) => this.#rove(event.target.closest(".tile")));
    this.watcher = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) more();
    }, { rootMargin: "800px" });
    this.#forget();
  }

  clear() {
    this.#forget();
    byId("found").hidden = true;
  }

  /** Something is under way: what was found before fades, or places are kept for what will come. */
  wait() {
    byId("found").setAttribute("aria-busy", "true");
    this.watcher.disconnect();
    if (this.list.length > 0 || this.place.querySelector(".caption-result")) {
      byId("found").classList.add("stale");
      return;
    }
    byId("found").hidden = false;
    byId("found-count").textContent = "Searching …";
    byId("found-legend").textContent = "";
    const bones = SKELETONS.map((share) => {
      const parts = ["bone-picture", "bone-text"].map((kind) => make("span", { class: kind }));
      const cell = make("li", { class: "cell bone" }, ...parts);
      cell.style.setProperty("--ratio", share);
      return cell;
    });
    this.place.replaceChildren(make("ul", { class: "run", "aria-hidden": "true" }, ...bones));
  }

  /**
   * @param {object} answer the server's
   * @param {object} question it answers
   * @param {{again: boolean, more: boolean, total: number}} among again: it continues what is shown; more: is to come
   */
  show(answer, question, { again, more, total }) {
    if (!again) this.#forget();
    this.question = question;
    const found = byId("found"), pictures = question.find === "images";
    found.classList.remove("stale");
    found.removeAttribute("aria-busy");
    const results = pictures ? answer.results : answer.captions.flatMap((caption) => caption.pictures);
    this.byId = new Map(results.map((result) => [result.id, result]));
    this.groups = answer.groups;
    const held = document.activeElement;
    arrange(this.place, pictures ? this.#pictures(answer) : this.#captions(answer));
    if (held?.classList.contains("tile") && document.activeElement !== held) held.focus({ preventScroll: true });
    this.list = [...new Set(this.tiles().map((tile) => Number(tile.dataset.id)))].map((id) => this.byId.get(id));
    this.#rove(this.tiles().find((tile) => tile.tabIndex === 0) ?? this.tiles()[0]);
    this.#head(answer, question, total);
    this.#end(more, total, pictures ? answer.results.length : answer.captions.length, pictures);
  }

  /** More could not be had. */
  fail(message, again) {
    byId("tail").replaceChildren(make("p", { class: "problem-line", text: message }), button("Try again", again));
  }

  tiles() {
    return [...this.place.querySelectorAll(".tile")];
  }

  focus(id) {
    const tile = this.place.querySelector(id === undefined ? ".tile[tabindex='0']" : `.tile[data-id="${id}"]`);
    tile?.focus({ preventScroll: true });
    tile?.scrollIntoView({ block: "nearest" });
    return tile !== null;
  }

  #forget() {
    this.parts = new Map(); // tiles, cells, runs and bands that are used again when more is found
    this.list = [];
    this.groups = [];
    this.place.replaceChildren();
    byId("tail").replaceChildren();
    this.watcher.disconnect();
  }

  #head(answer, question, total) {
    const number = question.find === "images" ? answer.results.length : answer.captions.length;
    const [one, many] = question.find === "images" ? ["picture", "pictures"] : ["caption", "captions"];
    byId("found").hidden = number === 0; // the page says so
    byId("found-count").textContent = number < total
      ? `The best ${count(number)} of ${plural(total, one, many)}` : `${plural(number, one, many)}, best first`;
    byId("found-count").title = `Found in ${answer.seconds.toFixed(2)} seconds`;
    const closely = answer.results.some(({ tokens }) => tokens !== null);
    byId("found-legend").textContent = closely
      ? "The number says how well words and parts of the picture match; only the best 100 are ordered by it."
      : `The number is the cosine with your ${question.text === "" ? "picture" : "description"}; higher is better.`;
  }

  #end(more, total, shown, pictures) {
    const tail = byId("tail");
    tail.replaceChildren();
    if (more) {
      tail.append(make("p", { class: "hint", text: "More …" }));
      this.watcher.disconnect();
      this.watcher.observe(tail);
    } else if (shown > 0) {
      const all = shown >= total;
      const what = pictures ? ["picture", "pictures"] : ["caption", "captions"];
      tail.append(make("p", { class: "hint", text: all
        ? `That is ${total === 1 ? `the only ${what[0]}` : `all ${plural(total, ...what)}`} of this index.`
        : `${count(total - shown)} more are not shown. A longer description brings the right one to the front.` }));
    }
  }

  #pictures(answer) {
    const children = [], done = new Set();
    let run = [];
    const closeRun = () => {
      if (run.length > 0) children.push(this.#run(run));
      run = [];
    };
    for (const result of answer.results) {
      if (done.has(result.id)) continue;
      const group = result.group === null ? null : answer.groups[result.group];
      const ids = group?.ids.filter((id) => this.byId.has(id)) ?? [];
      if (ids.length < 2) {
        run.push(result);
        continue;
      }
      closeRun();
      ids.forEach((id) => done.add(id));
      children.push(this.#band({ ...group, ids }));
    }
    closeRun();
    return children;
  }

  #band(group) {
    const tiles = group.ids.map((id) => this.#tile(this.byId.get(id)));
    return this.#keep(`band ${group.ids}`, () => band(group, tiles, this.byId, this.question.text));
  }

  #run(results) {
    const list = this.#keep(`run ${results[0].id}`, () => make("ul", { class: "run" }));
    list.classList.toggle("short", results.length <= SHORT);
    arrange(list, results.map((result) => {
      const cell = this.#keep(`cell ${result.id}`, () => make("li", { class: "cell" }));
      const tile = this.#tile(result);
      cell.style.setProperty("--ratio", ratio(result));
      if (tile.parentElement !== cell) cell.append(tile);
      return cell;
    }));
    return list;
  }

  #captions(answer) {
    const small = (result) => this.#link(result, "tile small-tile", [thumbnail(result)]);
    const article = (caption) => make("article", { class: "caption-result" },
      make("div", { class: "strip" }, ...caption.pictures.map(small)),
      make("p", { class: "caption-text", dir: "auto", text: caption.text }),
      make("span", { class: "score", text: score(caption.score) }));
    return answer.captions.map((caption, at) => this.#keep(`caption ${at} ${caption.text}`, () => article(caption)));
  }

  #tile(result) {
    return this.#keep(`tile ${result.id}`, () => {
      const closely = result.tokens === null ? "" : `, word by word ${score(result.tokens)}`;
      const line = make("span", { class: "tile-line", title: `${result.name}\nscore ${score(result.score)}${closely}` },
        make("bdi", { class: "tile-name", text: lastPart(result.name) }),
        make("span", { class: "score", text: score(result.tokens ?? result.score) }));
      const tile = this.#link(result, "tile", [
        make("span", { class: "picture" }, thumbnail(result), icon("broken")), line,
      ]);
      const [said] = result.captions;
      if (said !== undefined) tile.append(make("span", { class: "tile-caption", dir: "auto", text: said }));
      return tile;
    });
  }

  #link(result, kind, children) {
    return make("a", {
      class: kind, href: addressOf({ ...this.question, open: result.id }), "data-id": result.id, tabindex: "-1",
      draggable: "false",
      "aria-label": `${lastPart(result.name).slice(0, 200)}, score ${score(result.score)}`,
    }, ...children);
  }

  #keep(key, makeOne) {
    if (!this.parts.has(key)) this.parts.set(key, makeOne());
    return this.parts.get(key);
  }

  #click(event) {
    const tile = event.target.closest(".tile");
    if (tile === null || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    this.#rove(tile);
    this.does.open(Number(tile.dataset.id));
  }

  /** One tile takes part in the order of Tab; arrows go to the others. */
  #rove(tile) {
    if (!tile) return;
    for (const other of this.place.querySelectorAll(".tile[tabindex='0']")) if (other !== tile) other.tabIndex = -1;
    tile.tabIndex = 0;
  }

  #key(event) {
    const tile = event.target.closest?.(".tile");
    if (!tile || event.ctrlKey || event.metaKey || event.altKey) return;
    const tiles = this.tiles(), at = tiles.indexOf(tile);
    const next = {
      ArrowRight: () => tiles[at + 1], ArrowLeft: () => tiles[at - 1], Home: () => tiles[0], End: () => tiles.at(-1),
      ArrowDown: () => beside(tile, tiles, 1), ArrowUp: () => beside(tile, tiles, -1),
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const target = next();
    if (target) {
      target.focus({ preventScroll: true });
      target.scrollIntoView({ block: "nearest" });
    } else if (event.key === "ArrowUp") {
      this.does.leave();
    }
  }
}

/** The tile below (1) or above (-1): of those in the next row the one nearest across. */
function beside(tile, tiles, direction) {
  const box = (one) => one.getBoundingClientRect(), own = box(tile), middle = own.left + own.width / 2;
  const ahead = tiles.map((one) => [one, box(one)]).filter(([, { top }]) => direction * (top - own.top) > 8);
  if (ahead.length === 0) return undefined;
  const row = direction * Math.min(...ahead.map(([, { top }]) => direction * top));
  const away = ({ left, width }) => Math.abs(left + width / 2 - middle);
  const inRow = ahead.filter(([, { top }]) => Math.abs(top - row) <= 8);
  return inRow.reduce((best, one) => (away(one[1]) < away(best[1]) ? one : best))[0];
}
