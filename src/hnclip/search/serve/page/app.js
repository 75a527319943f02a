/* The page of `hnclip serve`. Its query is in the address: from there it is searched for, shown, and a hit opened. */

import { imageBlob, onLocked, request, Failure } from "./api.js";
import { Composer } from "./composer.js";
import { baseName, byId, fill, icon, make, plural, problem } from "./dom.js";
import { Results } from "./results.js";
import { Viewer } from "./viewer.js";

const FIRST = 24; // hits; each time the end comes near, twice as many are requested
const KEPT = 8; // answers that are shown at once when one goes back
const TRUNCATED = "The description is longer than the model reads. Its end was left out.";
const EMPTY_INDEX = "This index has no images yet. “hnclip index FOLDER --out INDEX” adds some.";

/**
 * @typedef {object} Query
 * @property {string} text
 * @property {"images" | "captions"} find
 * @property {boolean} rerank
 * @property {number | null} like id of an image of the index to search with
 * @property {string | null} image key of an image that was dropped, pasted or chosen
 * @property {number | null} open id of the hit in the viewer
 */

/** @type {Query} */
const NOTHING = { text: "", find: "images", rerank: false, like: null, image: null, open: null };

let query = NOTHING;
let info = null; // what the server says about the index
let shown = null; // {result, k, blob} of the query
let pending = new AbortController(); // aborts the requests of the query
const answers = new Map();

const composer = new Composer((next) => go(next));
const results = new Results({
  addressOf: (id) => addressOf({ ...query, open: id }),
  open: (id) => go({ ...query, open: id }),
  more,
  leave: () => composer.focus(),
});
const viewer = new Viewer({
  step,
  open: (id) => go({ ...query, open: id }, true),
  similar: (id) => go({ ...NOTHING, like: id }),
  closed,
});

/* The address: the query is behind #, which browsers do not send to the server. */

function readAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const id = (name) => (/^\d{1,15}$/.test(fields.get(name) ?? "") ? Number(fields.get(name)) : null);
  return {
    text: fields.get("q") ?? "",
    find: fields.get("find") === "captions" ? "captions" : "images",
    rerank: fields.has("rerank"),
    like: id("like"),
    image: fields.get("image"),
    open: id("open"),
  };
}

function addressOf({ text, find, rerank, like, image, open }) {
  const fields = new URLSearchParams();
  if (image !== null) fields.set("image", image);
  else if (like !== null) fields.set("like", like);
  else if (text !== "") fields.set("q", text);
  if (find !== "images") fields.set("find", find);
  if (rerank) fields.set("rerank", "1");
  if (open !== null) fields.set("open", open);
  return fields.size === 0 ? location.pathname : `#${fields}`;
}

/** The same for queries with the same answer. */
const keyOf = (any) => addressOf({ ...any, open: null });
const isSearch = ({ text, like, image }) => text !== "" || like !== null || image !== null;

/** Go to another query: a step in the history of the browser, unless it replaces the present one. */
function go(next, replace = false) {
  if (leaving !== null) {
    leaving.then(() => go(next, replace)); // the browser is going back: that would undo a step that is made now
    return;
  }
  const again = !replace && addressOf(next) === addressOf(query);
  const opened = next.open !== null && (replace ? history.state?.opened === true : query.open === null);
  history[replace || again ? "replaceState" : "pushState"]({ opened }, "", addressOf(next));
  if (again) answers.delete(keyOf(next)); // the same search once more, on purpose
  show(next, again);
}

/** Show a query, from whatever was shown before. */
function show(next, again = false) {
  const same = shown !== null && !again && keyOf(next) === keyOf(query);
  query = next;
  if (same) {
    view();
  } else if (query.image !== null && composer.imageOf(query.image) === null) {
    go(NOTHING, true);
    say("The image of this search is not available any more: images are kept for a short time only, and not when the "
      + "page is reloaded. Choose it again.");
  } else {
    if (query.open === null) viewer.close();
    document.body.classList.toggle("searched", isSearch(query));
    composer.show(query);
    search();
  }
}

async function search() {
  pending.abort();
  pending = new AbortController();
  const { signal } = pending, asked = query;
  shown = answers.get(keyOf(asked)) ?? null;
  say(null);
  setTitle();
  byId("progress").hidden = shown !== null || !isSearch(asked);
  if (shown !== null) {
    render(false);
    return;
  }
  if (!isSearch(asked)) results.clear();
  else results.wait();
  if (asked.open === null) window.scrollTo({ top: 0 });
  try {
    await loadIndex();
    if (signal.aborted || !isSearch(asked)) return;
    const blob = asked.like === null ? composer.imageOf(asked.image) : await imageBlob(asked.like, info.limits.upload, signal);
    const k = Math.min(FIRST, info.limits.k), result = await find(asked, k, blob, signal);
    shown = { result, k, blob };
    render(false);
  } catch (error) {
    if (signal.aborted) return;
    results.clear();
    viewer.close();
    composer.setNote("");
    say(error, search);
  }
  byId("progress").hidden = true;
}

function find({ text, find: what, rerank }, k, blob, signal) {
  const waiting = () => composer.setNote("The server is busy. Trying again …");
  if (blob !== null) return request(`/api/search/image?k=${k}&find=${what}`, { body: blob, signal, waiting });
  const body = { text, k, find: what, rerank: rerank && what === "images" };
  return request("/api/search", { body, signal, waiting });
}

function render(continued) {
  const { result } = shown, key = keyOf(query);
  answers.delete(key);
  answers.set(key, shown); // the newest is the last
  if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  composer.setNote(result.truncated ? TRUNCATED : "");
  if (query.like !== null) composer.setImageName(baseName(result.hits.find(({ id }) => id === query.like)?.name ?? ""));
  results.show(result, { continued, more: hasMore(), text: query.text });
  if (result.hits.length + result.captions.length === 0) {
    say(result.total > 0 ? "No results." : query.find === "images" ? EMPTY_INDEX : "This index has no captions.");
  }
  byId("compact-query").textContent = query.text || "Similar to an image";
  view();
}

function hasMore() {
  const { result, k } = shown, found = result.hits.length + result.captions.length;
  return found >= k && k < info.limits.k && found < result.total;
}

let loadingMore = false;
async function more() {
  if (loadingMore || shown === null || !hasMore()) return;
  loadingMore = true;
  const { signal } = pending, k = Math.min(2 * shown.k, info.limits.k);
  try {
    const result = await find(query, k, shown.blob, signal);
    shown = { ...shown, result, k };
    loadingMore = false;
    render(true);
  } catch (error) {
    if (!signal.aborted) results.fail(error, more);
  }
  loadingMore = false;
}

/** Open the viewer or close it, as the query says. */
function view() {
  const at = results.hits.findIndex(({ id }) => id === query.open);
  if (query.open === null) {
    viewer.close();
  } else if (at < 0) {
    go({ ...query, open: null }, true);
  } else {
    viewer.show(results.hits[at], {
      text: query.text, at, count: results.hits.length, more: hasMore(), group: results.groupOf(results.hits[at]),
    });
    if (at >= results.hits.length - 3) more();
  }
}

function step(by) {
  const next = results.hits[results.hits.findIndex(({ id }) => id === query.open) + by];
  if (next !== undefined) go({ ...query, open: next.id }, true);
}

let leaving = null; // promise: the browser has gone back from an open hit
let left = null; // id of that hit: the browser scrolls to where the viewer was opened, which may be far away

/** The viewer was closed by hand, or because the query says so. */
function closed() {
  if (query.open === null) return;
  const last = query.open;
  results.focus(last);
  query = { ...query, open: null };
  if (history.state?.opened) {
    left = last;
    leaving = new Promise((resolve) => { addEventListener("popstate", resolve, { once: true }); });
    leaving.then(() => { leaving = null; });
    history.back();
  } else {
    history.replaceState(null, "", addressOf(query));
  }
}

let loadingIndex = null;

/** Ask the server about the index, once; if that fails, the next search asks again. */
function loadIndex() {
  loadingIndex ??= request("/api/index").then(introduce).catch((error) => { loadingIndex = null; throw error; });
  return loadingIndex;
}

function introduce(answer) {
  info = answer;
  composer.setIndex(info);
  byId("index-name").textContent = info.name;
  byId("welcome-text").textContent = info.images === 0 ? EMPTY_INDEX
    : `Describe it in as many words as you like: it is one of ${plural(info.images, "image")}.`;
  byId("index-size").textContent = `${plural(info.images, "image")} · ${plural(info.captions, "caption")}`;
  byId("show-problems").textContent = `${plural(info.problems, "file")} could not be indexed`;
  byId("show-problems").hidden = info.problems === 0;
  byId("index-model").textContent = `Model: ${info.model} · engine: ${info.engine}`;
  setTitle();
}

function setTitle() {
  const what = query.text === "" ? "Find an image" : query.text.slice(0, 60);
  document.title = `${what} · ${info?.name ?? "hnclip"}`;
}

/** Show a sentence or an error below the form; null hides it. */
function say(message, again) {
  const notice = byId("notice"), isError = message instanceof Error;
  notice.hidden = message === null;
  notice.classList.toggle("error", isError);
  notice.setAttribute("role", isError ? "alert" : "status");
  notice.replaceChildren(...(isError ? [icon("broken"), ...problem(message, again)] : [make("p", { text: message })]));
}

/* Dialogs and keys */

function showProblems() {
  byId("problems").showModal();
  fill(byId("problem-list"), "Loading …", async () => {
    const { problems } = await request("/api/problems");
    return [make("ul", {}, ...problems.map(({ kind, where, detail }) => make("li", {}, make("strong", { text: kind }),
      make("p", { dir: "auto", text: where }), make("p", { class: "hint", dir: "auto", text: detail }))))];
  });
}

let unlocking = null;

/** Ask for the token until the server accepts one; requests that need it share one dialog. */
function askForToken() {
  unlocking ??= new Promise((resolve, reject) => {
    const dialog = byId("unlock"), token = byId("token"), error = byId("unlock-error");
    byId("unlock-form").onsubmit = async (event) => {
      event.preventDefault();
      error.textContent = "";
      try {
        await request("/api/session", { body: { token: token.value } });
        resolve();
        dialog.close();
      } catch ({ status, message }) {
        error.textContent = status === 401 ? "This token is wrong." : message;
        token.select();
      }
    };
    dialog.onclose = () => {
      unlocking = null;
      token.value = error.textContent = "";
      reject(new Failure("This index is locked: it can be searched with its token only.")); // unless it is unlocked
    };
    dialog.showModal();
  });
  return unlocking;
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const box = byId("box"), { key, target } = event, isOpen = document.querySelector("dialog[open]") !== null;
  if (target.matches("textarea, [type=password]")) {
    const atEnd = target === box && box.selectionStart === box.value.length;
    if (key === "ArrowDown" && atEnd && results.focus()) event.preventDefault();
  } else if (key === "?" && !byId("unlock").open) {
    event.preventDefault();
    if (!byId("help").open) byId("help").showModal();
  } else if (key === "/" && !isOpen) {
    event.preventDefault();
    composer.focus();
  }
}

for (const dialog of document.querySelectorAll("dialog:has([data-close])")) {
  dialog.addEventListener("click", ({ target }) => {
    if (target === dialog || target.closest("[data-close]") !== null) dialog.close();
  });
}
byId("show-help").addEventListener("click", () => byId("help").showModal());
byId("show-problems").addEventListener("click", showProblems);
byId("compact").addEventListener("click", () => composer.focus());
document.addEventListener("keydown", onKey);
addEventListener("popstate", () => {
  show(readAddress());
  if (left !== null && query.open === null) requestAnimationFrame(() => { results.focus(left); left = null; });
});
new IntersectionObserver(([{ isIntersecting, boundingClientRect }]) => {
  byId("compact").hidden = isIntersecting || boundingClientRect.top > 0;
}).observe(byId("composer"));
onLocked(askForToken);
show(readAddress());
