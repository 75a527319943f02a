/* Requests to the server that this page came from. Whatever goes wrong is a Failure with a sentence for people. */

const RETRIES = 2; // after "busy", before it is said
const LONGEST_PAUSE = 10; // seconds, whatever Retry-After says
const PATIENCE = 90_000; // milliseconds: the server gives up long before, a lost connection never would

const SENTENCES = {
  401: "A token is needed.",
  403: "The server does not allow this.",
  404: "This is not there any more.",
  413: "This is larger than the server takes.",
  503: "The server is busy.",
  504: "The search took too long and was given up.",
};

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let unlock = async () => {};
/** What asks for the token when the server wants one; it resolves when the server is content. */
export const whenLocked = (ask) => { unlock = ask; };

/**
 * The JSON of an answer. Busy servers are asked again after a pause, locked ones once they are unlocked.
 * @param {string} path
 * @param {{body?: unknown, signal?: AbortSignal, waiting?: () => void}} options `body` is a Blob or becomes JSON;
 *   `waiting` is called before each pause
 */
export async function ask(path, options = {}) {
  const answer = await send(path, options);
  if (answer.status === 204) return null;
  try {
    return await answer.json();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure("The server’s answer could not be read.", answer.status);
  }
}

/** The bytes of a picture of the index: its own, or its thumbnail where these are gone. */
export async function picture(id, signal) {
  for (const path of [`/api/pictures/${id}`, `/api/pictures/${id}/thumbnail`]) {
    try {
      const answer = await send(path, { signal });
      return await answer.blob();
    } catch (error) {
      if (!(error instanceof Failure) || ![404, 410].includes(error.status) || path.endsWith("thumbnail")) throw error;
    }
  }
}

async function send(path, { body, signal, waiting = () => {} }) {
  const request = { signal: limited(signal), cache: body === undefined ? "default" : "no-store" };
  if (body !== undefined) {
    request.method = "POST";
    request.headers = { "Content-Type": body instanceof Blob ? body.type : "application/json" };
    request.body = body instanceof Blob ? body : JSON.stringify(body);
  }
  for (let left = RETRIES, unlocked = false; ; ) {
    const answer = await fetched(path, request, signal);
    if (answer.ok) return answer;
    if (answer.status === 401 && path !== "/api/session") {
      if (unlocked) throw new Failure("The browser does not keep the cookie that opens this index.", 401);
      await unlock();
      unlocked = true;
    } else if (answer.status === 503 && left > 0) {
      left -= 1;
      waiting();
      await pause(seconds(answer.headers.get("Retry-After")), signal);
    } else {
      throw new Failure(await sentence(answer), answer.status);
    }
    request.signal = limited(signal);
  }
}

async function fetched(path, request, signal) {
  try {
    return await fetch(path, request);
  } catch (error) {
    if (signal?.aborted) throw error;
    if (error.name === "TimeoutError") throw new Failure("The server does not answer.");
    throw new Failure("The server cannot be reached. Is “hnclip serve” still running?");
  }
}

async function sentence(answer) {
  let said = "";
  try {
    said = (await answer.json()).error;
  } catch {
    // Not JSON: something between the page and the server has answered.
  }
  if (typeof said === "string" && said !== "") return said[0].toUpperCase() + said.slice(1);
  return SENTENCES[answer.status] ?? "The server could not answer this.";
}

function limited(signal) {
  const patience = AbortSignal.timeout(PATIENCE);
  return signal ? AbortSignal.any([signal, patience]) : patience;
}

function seconds(header) {
  const asked = Number.parseFloat(header ?? "");
  return Number.isFinite(asked) && asked >= 0 ? Math.min(asked, LONGEST_PAUSE) : 1;
}

export function pause(duration, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, duration * 1000);
    signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });
}
