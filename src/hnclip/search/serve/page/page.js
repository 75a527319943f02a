/* The page: what is asked for is in the address; from there it is searched for, shown, and opened. */

import { NOTHING, addressOf, isSearch, readAddress, searchOf } from "./address.js";
import { Failure, ask, pause, picture, whenLocked } from "./api.js";
import { Composer } from "./composer.js";
import { button, byId, icon, lastPart, make, plural } from "./dom.js";
import { Results } from "./results.js";
import { askForToken, dialogs } from "./dialogs.js";
import { Viewer } from "./viewer.js";

const FIRST = 24; // results; each time the end is near it is twice as many
const REMEMBERED = 8; // searches that are shown again at once when one goes back
const LOADING = 0.7; // seconds between questions whether the model is loaded
const LOADING_TEXT = "The model is still being loaded. You can write already: the search begins when it is ready.";

let info = null;
let question = NOTHING;
let under = new AbortController(); // of the search that is under way or shown
let found = null; // {answer, k, body}: what is shown
const remembered = new Map();

const composer = new Composer((asked) => go({ ...NOTHING, ...asked }));
const results = new Results({ open: (id) => go({ ...question, open: id }), more, leave: () => composer.focus() });
const viewer = new Viewer({
  step, open: (id) => go({ ...question, open: id }, "replace"), closed,
  similar: (result) => go({ ...NOTHING, like: result.id }),
});

/** Ask something else: a step in the browser's history, unless it replaces the last one. */
function go(next, how = "push") {
  if (leaving !== null) {
    leaving.then(() => go(next, how)); // a step that is under way would lead away from this one
    return;
  }
  const opened = next.open !== null && (how === "push" ? question.open === null : history.state?.opened === true);
  if (how === "push" && addressOf(next) !== addressOf(question)) history.pushState({ opened }, "", addressOf(next));
  else history.replaceState({ opened }, "", addressOf(next));
  const again = how === "push" && searchOf(next) === searchOf(question) && next.open === question.open;
  if (again) remembered.delete(searchOf(next)); // asked anew on purpose
  show(next, again);
}

/** Bring the page to a question, from wherever it was. */
function show(next, again = false) {
  const same = searchOf(next) === searchOf(question) && found !== null && !again;
  question = next;
  if (question.open === null) viewer.close();
  if (same) {
    view();
    return;
  }
  document.body.classList.toggle("asked", isSearch(question));
  composer.show(question); // only now: what is being written there stays while results are opened and closed
  search();
}

async function search() {
  under.abort();
  under = new AbortController();
  const { signal } = under, asked = question, key = searchOf(asked);
  found = null;
  say(null);
  title();
  if (!isSearch(asked)) {
    results.clear();
    busy(false);
    return;
  }
  if (asked.picture !== null && composer.pictureOf(asked.picture) === null) {
    go(NOTHING, "replace");
    say("The picture that was searched with is not kept for long, nor when the page is loaded anew: choose it once more.");
    return;
  }
  const known = remembered.get(key);
  if (known !== undefined) {
    found = known;
    busy(false);
    render(false);
    return;
  }
  if (asked.open === null) window.scrollTo({ top: 0 });
  busy(true);
  results.wait();
  try {
    await modelReady(signal);
    const body = asked.like !== null ? await picture(asked.like, signal) : composer.pictureOf(asked.picture);
    const k = Math.min(FIRST, info.limits.k), answer = await answerOf(asked, k, body, signal);
    await recount(asked, answer, k, signal);
    if (signal.aborted) return;
    found = { answer, k, body };
    render(false);
  } catch (error) {
    if (signal.aborted) return;
    results.clear();
    viewer.close();
    complain(error, search);
  }
  busy(false);
}

function answerOf(asked, k, body, signal) {
  const waiting = () => composer.say("The server is busy. Trying again …");
  if (body !== null) return ask(`/api/search/image?k=${k}&find=${asked.find}`, { body, signal, waiting });
  const { text, find, rerank } = asked;
  return ask("/api/search", { body: { text, k, find, rerank: rerank && find === "images" }, signal, waiting });
}

function render(again) {
  const { answer } = found, pictures = question.find === "images";
  const total = pictures ? info.pictures : info.captions;
  remember();
  composer.say(answer.cut ? "This description is longer than the model reads: only its beginning counted." : "");
  composer.nameLike(lastPart(answer.results.find(({ id }) => id === question.like)?.name ?? ""));
  results.show(answer, question, { again, more: hasMore(), total });
  if (answer.results.length + answer.captions.length === 0) {
    say(total > 0 ? "Nothing was found for this. Try other words, or fewer of them."
      : pictures ? emptyText() : "This index has no captions.");
  }
  byId("compact-query").textContent = question.text || "Like this picture";
  view();
}

const hasMore = () => {
  const { answer, k } = found, shown = question.find === "images" ? answer.results.length : answer.captions.length;
  return shown >= k && k < info.limits.k && shown < (question.find === "images" ? info.pictures : info.captions);
};

/** Ask what the index is again if an answer does not fit to it: it has changed since. */
async function recount(asked, answer, k, signal) {
  const pictures = asked.find === "images", total = pictures ? info.pictures : info.captions;
  const shown = pictures ? answer.results.length : answer.captions.length;
  if (shown === Math.min(k, total) && k !== total) return; // exactly as many as there were may be a part of more
  try {
    introduce(await ask("/api/index", { signal }));
  } catch (error) {
    if (!(error instanceof Failure)) throw error; // without it the answer is shown as well
  }
}

let loading = false;
async function more() {
  if (loading || found === null || !hasMore()) return;
  loading = true;
  const { signal } = under, k = Math.min(2 * found.k, info.limits.k);
  try {
    const answer = await answerOf(question, k, found.body, signal);
    await recount(question, answer, k, signal);
    if (!signal.aborted) {
      found = { ...found, answer, k };
      loading = false;
      render(true);
    }
  } catch (error) {
    if (!signal.aborted) results.fail(error instanceof Failure ? error.message : "More could not be shown.", more);
  }
  loading = false;
}

/** Answers of the last questions, so that going back shows them at once and where they were. */
function remember() {
  const key = searchOf(question);
  remembered.delete(key);
  remembered.set(key, found);
  if (remembered.size > REMEMBERED) remembered.delete(remembered.keys().next().value);
}

/** Open or close the viewer as the address says. */
function view() {
  const at = results.list.findIndex(({ id }) => id === question.open);
  if (question.open === null) {
    viewer.close();
  } else if (at < 0) {
    go({ ...question, open: null }, "replace");
  } else {
    const result = results.list[at];
    const group = result.group === null ? null : results.groups[result.group] ?? null;
    const ids = group?.ids.filter((id) => results.byId.has(id)) ?? [];
    viewer.show(result, {
      text: question.text, at, length: results.list.length, more: hasMore(), byId: results.byId,
      group: ids.length > 1 ? { ...group, ids } : null,
    });
    if (at >= results.list.length - 3) more();
  }
}

function step(by) {
  const at = results.list.findIndex(({ id }) => id === question.open), next = results.list[at + by];
  if (next !== undefined) go({ ...question, open: next.id }, "replace");
}

let leaving = null; // the step back from an open result, until it is done
let left = null; // id of the result whose viewer was closed: the way back goes to it
/** The viewer was closed by hand, or because the address says so. */
function closed() {
  const last = question.open;
  if (last === null) return;
  results.focus(last);
  left = last;
  const pushed = history.state?.opened;
  question = { ...question, open: null };
  if (pushed) {
    leaving = new Promise((arrived) => { addEventListener("popstate", arrived, { once: true }); });
    leaving.then(() => { leaving = null; });
    history.back();
  } else history.replaceState(null, "", addressOf(question));
}

let asking = null;
/** What the index is, and that its model is loaded. Whoever waits for it waits together. */
function modelReady(signal) {
  asking ??= (async () => {
    try {
      for (;;) {
        introduce(await ask("/api/index"));
        if (info.ready) return;
        await pause(LOADING);
      }
    } finally {
      if (!info?.ready) asking = null;
    }
  })();
  const given = new Promise((_, reject) => signal?.addEventListener("abort", () => reject(signal.reason)));
  return Promise.race([asking, given]);
}

function introduce(told) {
  info = told;
  composer.know(info);
  byId("index-name").textContent = info.name;
  byId("welcome-count").textContent = info.pictures === 0 ? emptyText()
    : `Describe it in as many words as you like. It is one of ${plural(info.pictures, "picture", "pictures")}.`;
  document.body.classList.toggle("loading", !info.ready);
  if (!info.ready) say(LOADING_TEXT, { kind: "wait" });
  else if (byId("notice").classList.contains("wait")) say(null);
  const parts = [plural(info.pictures, "picture", "pictures"), plural(info.captions, "caption", "captions")];
  if (info.left_out > 0) parts.push(`${plural(info.left_out, "file", "files")} could not be indexed`);
  byId("footer").replaceChildren(
    make("span", { text: parts.join(" · ") }),
    make("span", { text: `model ${info.model} · engine ${info.engine} · ${info.storage}` }),
  );
  title();
}

const emptyText = () => "This index has no pictures yet. “hnclip index FOLDER --out INDEX” adds some.";

function title() {
  const place = info?.name ?? "hnclip";
  document.title = question.text === "" ? `Find a picture · ${place}` : `${question.text.slice(0, 60)} · ${place}`;
}

function busy(is) {
  byId("progress").hidden = !is;
}

function complain(error, again) {
  const failure = error instanceof Failure ? error : new Failure("The page has failed. Loading it anew may help.");
  const hopeless = failure.status >= 400 && failure.status < 500 && failure.status !== 408 && failure.status !== 429;
  composer.say("");
  say(failure.message, { kind: "problem", again: hopeless ? null : () => { say(null); again(); } });
  if (!(error instanceof Failure)) throw error;
}

/** A sentence under the box, with a way on where there is one. */
function say(text, { kind = "note", again = null } = {}) {
  const notice = byId("notice");
  notice.hidden = text === null;
  notice.className = `notice ${kind}`;
  notice.setAttribute("role", kind === "problem" ? "alert" : "status");
  if (text === null) {
    notice.replaceChildren();
    return;
  }
  notice.replaceChildren(make("p", { text }));
  if (kind === "problem") notice.prepend(icon("broken"));
  if (again !== null) notice.append(button("Try again", again));
}

async function start() {
  try {
    await modelReady();
  } catch (error) {
    if (!isSearch(question)) complain(error, start);
  }
}

whenLocked(askForToken);
dialogs({ box: () => composer.focus(), results: () => results.focus() });
addEventListener("popstate", () => {
  show(readAddress());
  // The browser goes where the page was when the viewer was opened; that may be far from what was looked at since.
  if (left !== null && question.open === null) requestAnimationFrame(() => { results.focus(left); left = null; });
});
byId("skip").addEventListener("click", (event) => { event.preventDefault(); composer.focus(); });
byId("compact").addEventListener("click", () => composer.focus());
new IntersectionObserver(([{ isIntersecting, boundingClientRect }]) => {
  byId("compact").hidden = isIntersecting || boundingClientRect.top > 0;
}).observe(byId("composer"));
show(readAddress());
start();
