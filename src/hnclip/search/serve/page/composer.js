/* The box that takes paragraphs, and the picture that may stand in its place: chosen, pasted, or dropped anywhere. */

import { byId, length } from "./dom.js";

const NEAR = 0.9; // of the limit: from here on the number of characters is said
const EXAMPLE =
  "Two people sit on a green bench under a bare tree. The one on the left wears a red coat and reads; " +
  "a brown dog lies in the snow in front of them.";

const KEPT = 8; // pictures that were chosen, for the way back

/** What was chosen last in this visit, by key; an address holds the key alone. */
const pictures = new Map();
let chosen = 0;

export class Composer {
  /** @param {(question: object) => void} search is called with what is to be searched for */
  constructor(search) {
    this.search = search;
    this.form = byId("composer");
    this.box = byId("box");
    this.limits = null;
    this.counted = false; // whether the number of characters is said
    this.picture = null; // {key | like, blob | null, name}
    this.address = null; // of the picture that is shown
    this.#listen();
    this.#listenForPictures();
    byId("examples").append(EXAMPLE);
    byId("examples").addEventListener("click", () => { this.box.value = EXAMPLE; this.#grow(); this.#submit(); });
  }

  /** Show a question that comes from the address. */
  show(question) {
    if (question.picture === null && question.like === null) {
      this.#setPicture(null);
      if (this.box.value.trim() !== question.text) this.box.value = question.text;
    } else if (question.like !== null) {
      this.#setPicture({ like: question.like, blob: null, name: "" });
    } else {
      this.#setPicture({ key: question.picture, ...(pictures.get(question.picture) ?? { blob: null, name: "" }) });
    }
    this.form.querySelector(`[name=find][value=${question.find}]`).checked = true;
    byId("rerank").checked = question.rerank;
    this.#adjust();
    this.#grow();
  }

  know(info) {
    this.limits = info.limits;
    byId("find").hidden = info.captions === 0;
    this.#measure();
  }

  /** The picture behind a key, if it was chosen in this visit. */
  pictureOf(key) {
    return pictures.get(key)?.blob ?? null;
  }

  say(text) {
    byId("composer-note").textContent = text;
  }

  nameLike(name) {
    if (this.picture?.like !== undefined) byId("chip-name").textContent = name;
  }

  focus() {
    const target = this.picture === null ? this.box : byId("chip-remove");
    target.focus({ preventScroll: true });
    this.form.scrollIntoView({ block: "center" });
  }

  #listen() {
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.#submit(); });
    this.box.addEventListener("input", () => { this.say(""); this.#measure(); this.#grow(); });
    this.box.addEventListener("keydown", (event) => {
      // While an input method composes, Enter takes its proposal.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    this.form.addEventListener("change", (event) => {
      if (event.target.name !== "find" && event.target.id !== "rerank") return;
      this.#adjust();
      if (this.picture !== null || this.box.value.trim() !== "") this.#submit();
    });
    new ResizeObserver(() => this.#grow()).observe(this.form);
  }

  #listenForPictures() {
    byId("choose").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", (event) => {
      this.#take(event.target.files);
      event.target.value = ""; // the same file may be chosen again
    });
    byId("chip-remove").addEventListener("click", () => {
      this.#setPicture(null);
      this.#adjust();
      this.box.focus();
      this.search({ ...this.#choice(), text: "" });
    });
    document.addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      if (files.length > 0 && !types.includes("text/plain")) {
        event.preventDefault();
        this.#take(files);
      }
    });
    this.#listenForDrops();
  }

  #listenForDrops() {
    const cover = byId("drop");
    let inside = false; // of this page: its own pictures are dragged out, not in
    const foreign = (event) => !inside && event.dataTransfer.types.includes("Files");
    document.addEventListener("dragstart", () => { inside = true; });
    document.addEventListener("dragend", () => { inside = false; });
    document.addEventListener("dragover", (event) => {
      if (!foreign(event)) return;
      event.preventDefault();
      event.dataTransfer.dropEffect = "copy";
      if (!cover.matches(":popover-open")) cover.showPopover(); // also above an open result
    });
    document.addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) cover.hidePopover();
    });
    document.addEventListener("drop", (event) => {
      cover.hidePopover();
      if (!foreign(event)) return;
      event.preventDefault();
      this.#take(event.dataTransfer.files);
    });
  }

  #take(files) {
    const file = [...files].find(({ type }) => type.startsWith("image/"));
    if (file === undefined) {
      if (files.length > 0) this.say("This is no picture. A JPEG, PNG or WebP file, for example, can be searched with.");
    } else if (this.limits !== null && file.size > this.limits.upload) {
      const [size, most] = [file.size, this.limits.upload].map((bytes) => `${(bytes / 1e6).toFixed(1)} MB`);
      this.say(`This picture has ${size}, and the server takes ${most}: make it smaller.`);
    } else {
      const key = `${Date.now().toString(36)}-${chosen++}`; // not that of a picture before a reload
      pictures.set(key, { blob: file, name: file.name });
      if (pictures.size > KEPT) pictures.delete(pictures.keys().next().value);
      this.say("");
      this.search({ ...this.#choice(), text: "", picture: key });
    }
  }

  #submit() {
    const text = this.box.value.trim();
    if (this.picture !== null) {
      const { key = null, like = null } = this.picture;
      this.search({ ...this.#choice(), text: "", picture: key, like });
    } else if (text === "") {
      this.box.focus();
    } else if (!this.#tooLong()) {
      if (matchMedia("(pointer: coarse)").matches) this.box.blur(); // the keyboard makes room for the results
      this.search({ ...this.#choice(), text });
    }
  }

  #choice() {
    return { find: this.form.elements.find.value, rerank: byId("rerank").checked, picture: null, like: null };
  }

  #setPicture(picture) {
    this.picture = picture;
    byId("chip").hidden = picture === null;
    byId("ask").hidden = picture !== null;
    if (this.address?.startsWith("blob:")) URL.revokeObjectURL(this.address);
    this.address = null;
    if (picture === null) return;
    if (picture.like !== undefined) this.address = `/api/pictures/${picture.like}/thumbnail`;
    else if (picture.blob !== null) this.address = URL.createObjectURL(picture.blob);
    if (this.address === null) byId("chip-picture").removeAttribute("src");
    else byId("chip-picture").src = this.address;
    byId("chip-name").textContent = picture.name;
  }

  /** Hide what does not apply. */
  #adjust() {
    byId("choose-text").textContent = this.picture === null ? "Use a picture" : "Another picture";
    byId("submit").hidden = this.picture !== null; // a picture is searched with as soon as it is there
    byId("closely").hidden = this.picture !== null || this.form.elements.find.value !== "images";
    this.#measure();
  }

  #tooLong() {
    return this.limits !== null && this.picture === null && length(this.box.value.trim()) > this.limits.text;
  }

  #measure() {
    const most = this.limits?.text ?? Infinity, now = length(this.box.value.trim());
    const near = this.picture === null && now > NEAR * most, over = near && now > most;
    this.form.classList.toggle("over", over);
    byId("submit").disabled = over;
    if (over) this.say(`${now - most} characters too many: the server takes ${most}.`);
    else if (near) this.say(`${most - now} characters left`);
    else if (this.counted) this.say("");
    this.counted = near;
  }

  #grow() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight}px`;
  }
}
