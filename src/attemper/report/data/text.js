// Untrusted text: direction marks and invisible characters become visible ones. Runs without a page.

// direction marks, and control characters that are not white space
const STEERING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]/g;
const UNSEEN = /^[\p{Cf}\p{Zl}\p{Zp}\p{Mn}\ufe0f]+$/u; // invisible by itself

const code = (letter) => `⟨U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;

/** A document with all of its texts cleaned; called once, when it is read. */
export function cleaned(given) {
  if (typeof given === "string") return given.replace(STEERING, code);
  if (Array.isArray(given)) return given.map(cleaned);
  if (given === null || typeof given !== "object") return given;
  return Object.fromEntries(Object.entries(given).map(([name, part]) => [name, cleaned(part)]));
}

/** A token made visible: line ends and blanks as signs, invisible characters as their code points. */
export function visible(token) {
  const text = String(token).replace(/\r\n|[\n\r\u2028\u2029]/g, "⏎").replace(/\t/g, "⇥");
  if (text.trim() === "") return "␣";
  const [, letters, part] = text.match(/^(.*?)( \(\d+\/\d+\))?$/su);
  return UNSEEN.test(letters) ? [...letters].map(code).join("") + (part ?? "") : text;
}

/** A token to put into a string: its writing direction does not change that of the words around it. */
export const isolated = (text) => `\u2068${text}\u2069`;

/** The text, cut to at most `most` letters. */
export const cut = (text, most) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);
