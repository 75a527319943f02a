/* Requests to the server of this page. Every error is a Failure with a sentence for people. */

import { imageUrl, thumbnailUrl } from "./dom.js";

const RETRIES = 2; // of a request to a busy server
const LONGEST_PAUSE = 10; // seconds, whatever Retry-After says
const TIMEOUT = 90_000; // milliseconds: the server gives up much earlier, a lost connection never would

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
    /** Whether the same request may succeed later. */
    this.retryable = status === 0 || status === 408 || status >= 500;
  }
}

let unlock = async () => {};
/** Set what asks for the token; its promise is kept when the server has accepted one. */
export const onLocked = (ask) => { unlock = ask; };

/**
 * The JSON of an answer.
 * @param {string} path
 * @param {{body?: unknown, signal?: AbortSignal, waiting?: () => void}} options `body` is a Blob or becomes JSON;
 *   `waiting` is called before each pause for a busy server
 */
export async function request(path, options = {}) {
  const response = await send(path, options);
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure("The answer of the server could not be read.");
  }
}

/** An image of the index as a Blob: the original, or its thumbnail if that is gone or larger than an upload may be. */
export async function imageBlob(id, limit, signal) {
  try {
    const original = await (await send(imageUrl(id), { signal })).blob();
    if (original.size <= limit) return original;
  } catch (error) {
    if (error.status !== 404 && error.status !== 410) throw error;
  }
  return (await send(thumbnailUrl(id), { signal })).blob();
}

async function send(path, { body, signal, waiting = () => {} }) {
  let retries = RETRIES, unlocked = false;
  for (;;) {
    const response = await fetchOnce(path, body, signal);
    if (response.ok) return response;
    if (response.status === 401 && path !== "/api/session") {
      if (unlocked) throw new Failure("The browser does not store the cookie that unlocks this index.", 401);
      await unlock();
      unlocked = true;
    } else if (response.status === 503 && retries > 0) {
      retries -= 1;
      waiting();
      await pause(Number.parseFloat(response.headers.get("Retry-After")), signal);
    } else {
      throw new Failure(await sentence(response), response.status);
    }
  }
}

async function fetchOnce(path, body, signal) {
  const timeout = AbortSignal.timeout(TIMEOUT);
  const options = { signal: signal ? AbortSignal.any([signal, timeout]) : timeout };
  if (body !== undefined) {
    const type = body instanceof Blob ? body.type : "application/json";
    Object.assign(options, { method: "POST", headers: { "Content-Type": type } });
    options.body = body instanceof Blob ? body : JSON.stringify(body);
  }
  try {
    return await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    if (error.name === "TimeoutError") throw new Failure("The server does not answer.");
    throw new Failure("The server cannot be reached. Is “hnclip serve” still running?");
  }
}

async function sentence(response) {
  const { error } = (await response.json().catch(() => null)) ?? {}; // a proxy may answer with something else
  if (typeof error !== "string" || error === "") return `The server could not answer (HTTP status ${response.status}).`;
  return error[0].toUpperCase() + error.slice(1);
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    setTimeout(resolve, 1000 * Math.min(seconds >= 0 ? seconds : 1, LONGEST_PAUSE));
    signal?.addEventListener("abort", () => reject(signal.reason));
  });
}
