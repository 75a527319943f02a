/* What is asked for, in the page's address, so that back, forward and reload work: behind #, which is not sent. */

/**
 * @typedef {object} Question
 * @property {string} text the description
 * @property {"images" | "captions"} find
 * @property {boolean} rerank
 * @property {number | null} like id of a picture of the index to search with
 * @property {string | null} picture key of a picture that was dropped, pasted or chosen
 * @property {number | null} open id of the result that is open
 */

/** @type {Question} */
export const NOTHING = { text: "", find: "images", rerank: false, like: null, picture: null, open: null };

export function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  return {
    text: said.get("q") ?? "",
    find: said.get("find") === "captions" ? "captions" : "images",
    rerank: said.has("rerank"),
    like: number(said.get("like")),
    picture: said.get("picture"),
    open: number(said.get("open")),
  };
}

export function addressOf(question) {
  const said = new URLSearchParams();
  if (question.picture !== null) said.set("picture", question.picture);
  else if (question.like !== null) said.set("like", question.like);
  else if (question.text !== "") said.set("q", question.text);
  if (question.find !== "images") said.set("find", question.find);
  if (question.rerank) said.set("rerank", "1");
  if (question.open !== null) said.set("open", question.open);
  return `${said}` === "" ? location.pathname : `#${said}`;
}

/** The same for questions that have the same answer. */
export const searchOf = ({ open, ...search }) => JSON.stringify(search);
export const isSearch = ({ text, like, picture }) => text !== "" || like !== null || picture !== null;

const number = (text) => (/^\d{1,15}$/.test(text ?? "") ? Number(text) : null);
