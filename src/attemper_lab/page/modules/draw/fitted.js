// Words in a picture that has little room.

const LETTER = 0.62; // width of a letter, as a share of the size of its font

/** A word cut to a width in pixels. */
export function fitted(word, width, size = 11) {
  const letters = [...word],
    most = Math.max(1, Math.floor(width / (LETTER * size)));
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : word;
}
