/* Help, the token, and keys that work everywhere on the page. */

import { Failure, ask } from "./api.js";
import { byId } from "./dom.js";

/** @param {{box: () => void, results: () => void}} focus ways to the box and to the results */
export function dialogs(focus) {
  byId("show-help").addEventListener("click", () => byId("help").showModal());
  byId("help").addEventListener("click", (event) => {
    if (event.target === byId("help") || event.target.closest("[data-close]")) byId("help").close();
  });
  document.addEventListener("keydown", (event) => {
    const writing = event.target.matches("textarea, input:not([type=radio], [type=checkbox], [type=file])");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (writing) {
      const box = byId("box"), atEnd = event.target === box && box.selectionStart === box.value.length;
      if (event.key === "ArrowDown" && atEnd && !event.isComposing && focus.results()) event.preventDefault();
    } else if (event.key === "?" && !byId("unlock").open) {
      event.preventDefault();
      if (!byId("help").open) byId("help").showModal();
    } else if (event.key === "/" && document.querySelector("dialog[open]") === null) {
      event.preventDefault();
      focus.box();
    }
  });
}

let unlocking = null;
/** Ask for the token until the server takes it. Whoever needs it waits for the same answer. */
export function askForToken() {
  unlocking ??= new Promise((resolve, reject) => {
    const dialog = byId("unlock"), form = byId("unlock-form"), token = byId("token"), problem = byId("unlock-problem");
    const done = (end) => {
      form.onsubmit = dialog.onclose = null;
      unlocking = null;
      token.value = problem.textContent = "";
      if (dialog.open) dialog.close();
      end();
    };
    const locked = new Failure("This index is locked: without its token it cannot be searched.");
    dialog.onclose = () => done(() => reject(locked));
    form.onsubmit = async (event) => {
      event.preventDefault();
      problem.textContent = "";
      try {
        await ask("/api/session", { body: { token: token.value } });
        done(resolve);
      } catch (error) {
        problem.textContent = error.status === 401 ? "This is not the token." : error.message;
        token.select();
      }
    };
    dialog.showModal();
    token.focus();
  });
  return unlocking;
}
