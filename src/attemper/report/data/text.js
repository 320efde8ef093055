// Text from strangers: what would turn a line round, or cannot be seen, becomes something that can. No page is needed here.

// direction marks, and control characters except those that are blanks
const STEERING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]/g;
const UNSEEN = /^[\p{Cf}\p{Zl}\p{Zp}\p{Mn}\ufe0f]+$/u; // nothing of it can be seen by itself

const code = (letter) => `⟨U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;

/** A document whose texts steer nothing: done once, where it comes in. */
export function cleaned(given) {
  if (typeof given === "string") return given.replace(STEERING, code);
  if (Array.isArray(given)) return given.map(cleaned);
  if (given === null || typeof given !== "object") return given;
  return Object.fromEntries(Object.entries(given).map(([name, part]) => [name, cleaned(part)]));
}

/** A token as it can be seen: line ends and blanks get a sign of their own, and what nobody can see its number. */
export function visible(token) {
  const text = String(token).replace(/\r\n|[\n\r\u2028\u2029]/g, "⏎").replace(/\t/g, "⇥");
  if (text.trim() === "") return "␣";
  const [, letters, part] = text.match(/^(.*?)( \(\d+\/\d+\))?$/su);
  return UNSEEN.test(letters) ? [...letters].map(code).join("") + (part ?? "") : text;
}

/** A token inside a string: whichever way it is written, the words around it keep theirs. */
export const isolated = (text) => `\u2068${text}\u2069`;

/** A text of at most so many letters. */
export const cut = (text, most) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);
