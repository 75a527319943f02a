/* The form at the top: a text box for a long query, or an image in its place that was chosen, pasted or dropped. */

import { byId, count, length, plural, thumbnailUrl } from "./dom.js";

const KEPT = 8; // images of earlier queries, for the way back
const EXAMPLE =
  "Two people sit on a green bench under a bare tree. The one on the left wears a red coat and reads; " +
  "a brown dog lies in the snow in front of them.";

export class Composer {
  #search;
  #form = byId("composer");
  #box = byId("box");
  #images = new Map(); // key: File; the address holds the key alone
  #image = null; // of the query: {key} or {like}
  #limits = { text: Infinity, upload: Infinity };

  /** @param {(query: object) => void} search is called with what the form asks for */
  constructor(search) {
    this.#search = search;
    this.#listen();
    this.#listenForImages();
    this.#listenForDrops();
    byId("example").textContent = EXAMPLE;
    byId("example").addEventListener("click", () => { this.#box.value = EXAMPLE; this.#submit(); });
  }

  /** Show a query that comes from the address. */
  show({ text, find, rerank, like, image }) {
    if (like === null && image === null && this.#box.value.trim() !== text) this.#box.value = text;
    this.#form.elements.find.value = find;
    byId("rerank").checked = rerank;
    this.#setImage(like !== null ? { like } : image !== null ? { key: image } : null);
  }

  setIndex({ limits, captions }) {
    this.#limits = limits;
    byId("find-what").hidden = captions === 0;
    this.#update();
  }

  /** The image with this key, if it was given on this visit and is still kept. */
  imageOf = (key) => this.#images.get(key) ?? null;

  setNote = (text) => { byId("note").textContent = text; };

  setImageName = (name) => { byId("chip-name").textContent = name; };

  focus() {
    const target = this.#image === null ? this.#box : byId("chip-remove");
    target.focus({ preventScroll: true });
    this.#form.scrollIntoView({ block: "center" });
  }

  #listen() {
    this.#form.addEventListener("submit", (event) => { event.preventDefault(); this.#submit(); });
    this.#box.addEventListener("input", () => { this.setNote(""); this.#update(); });
    this.#box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // an input method uses Enter, too
      event.preventDefault();
      this.#submit();
    });
    this.#form.addEventListener("change", ({ target }) => {
      if (target.name !== "find" && target.id !== "rerank") return;
      this.#update();
      if (this.#image !== null || this.#box.value.trim() !== "") this.#submit();
    });
    new ResizeObserver(() => this.#grow()).observe(this.#form);
  }

  #listenForImages() {
    byId("choose").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", ({ target }) => {
      this.#take([...target.files]);
      target.value = ""; // else the same file could not be chosen again
    });
    byId("chip-remove").addEventListener("click", () => {
      this.#setImage(null);
      this.#box.focus();
      this.#search(this.#query({}));
    });
    document.addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      if (files.length === 0 || types.includes("text/plain")) return;
      event.preventDefault();
      this.#take([...files]);
    });
  }

  #listenForDrops() {
    const cover = byId("drop");
    let own = false; // an image of this page is dragged
    const isFile = (event) => !own && event.dataTransfer.types.includes("Files");
    document.addEventListener("dragstart", () => { own = true; });
    document.addEventListener("dragend", () => { own = false; });
    document.addEventListener("dragover", (event) => {
      if (!isFile(event)) return;
      event.preventDefault();
      event.dataTransfer.dropEffect = "copy";
      if (!cover.matches(":popover-open")) cover.showPopover(); // a popover is above the viewer, too
    });
    document.addEventListener("dragleave", ({ relatedTarget }) => {
      if (relatedTarget === null) cover.hidePopover();
    });
    document.addEventListener("drop", (event) => {
      cover.hidePopover();
      if (!isFile(event)) return;
      event.preventDefault();
      this.#take([...event.dataTransfer.files]);
    });
  }

  #take(files) {
    const file = files.find(({ type }) => type.startsWith("image/"));
    if (file === undefined) {
      if (files.length > 0) this.setNote("This file is not an image. JPEG, PNG and WebP work, for example.");
    } else if (file.size > this.#limits.upload) {
      const [size, limit] = [file.size, this.#limits.upload].map((bytes) => `${(bytes / 1e6).toFixed(1)} MB`);
      this.setNote(`This image has ${size}; the limit of the server is ${limit}.`);
    } else {
      const key = crypto.getRandomValues(new Uint32Array(1))[0].toString(36);
      this.#images.set(key, file);
      if (this.#images.size > KEPT) this.#images.delete(this.#images.keys().next().value);
      this.#search(this.#query({ image: key }));
    }
  }

  #submit() {
    const text = this.#box.value.trim();
    if (this.#image !== null) {
      this.#search(this.#query({ like: this.#image.like, image: this.#image.key }));
    } else if (text === "") {
      this.#box.focus();
    } else if (length(text) <= this.#limits.text) {
      if (matchMedia("(pointer: coarse)").matches) this.#box.blur(); // the keyboard makes room for the results
      this.#search(this.#query({ text }));
    }
  }

  #query = ({ text = "", like = null, image = null }) =>
    ({ text, like, image, find: this.#form.elements.find.value, rerank: byId("rerank").checked, open: null });

  #setImage(image) {
    const shown = byId("chip-image"), file = this.imageOf(image?.key);
    this.#image = image;
    URL.revokeObjectURL(shown.src);
    if (image !== null) shown.src = file === null ? thumbnailUrl(image.like) : URL.createObjectURL(file);
    this.setImageName(file?.name ?? "");
    this.#update();
  }

  /** Hide what does not apply, and say when the text is too long. */
  #update() {
    const image = this.#image !== null, limit = this.#limits.text;
    const excess = image ? 0 : Math.max(0, length(this.#box.value.trim()) - limit);
    byId("chip").hidden = !image;
    this.#box.hidden = byId("submit").hidden = image; // an image is searched with at once
    byId("choose-text").textContent = image ? "Another image" : "Use an image";
    byId("rerank-choice").hidden = image || this.#form.elements.find.value !== "images";
    this.#form.classList.toggle("too-long", excess > 0);
    byId("submit").disabled = excess > 0;
    if (excess > 0) this.setNote(`${plural(excess, "character")} too many: the limit of the server is ${count(limit)}.`);
    this.#grow();
  }

  #grow() {
    this.#box.style.height = "auto";
    this.#box.style.height = `${this.#box.scrollHeight}px`;
  }
}
