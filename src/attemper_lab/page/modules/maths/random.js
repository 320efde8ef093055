// Unit normal numbers from a seed. Entry i of row j is the same number however many rows and columns are drawn, so that a
// slider adds entries and changes none. attemper_lab.page.normal() draws the same in Python.

export const WIDEST = 1024; // every draw is a corner of a table with this many columns
export const STREAMS = { query: 1, key: 2, gradient: 3, weight: 4 };

/** Mix 32 bits. */
function mixed(number) {
  number = (number + 0x9e3779b9) >>> 0;
  number = Math.imul(number ^ (number >>> 16), 0x21f0aaad) >>> 0;
  number = Math.imul(number ^ (number >>> 15), 0x735a2d97) >>> 0;
  return (number ^ (number >>> 15)) >>> 0;
}

/** One row of the table: `columns` numbers into `into` from `at` on. */
function fill(into, at, base, row, from, columns) {
  for (let column = from; column < columns; column++) {
    const place = row * WIDEST + column,
      first = mixed((base ^ (2 * place)) >>> 0),
      second = mixed((base ^ (2 * place + 1)) >>> 0);
    into[at + column] = Math.sqrt(-2 * Math.log((first + 0.5) / 4294967296)) * Math.cos((2 * Math.PI * second) / 4294967296);
  }
}

/** A table that draws its rows when they are first needed: `table(rows, columns)` gives a Float32Array of rows that are WIDEST apart. */
export function normalTable(what, seed) {
  const base = mixed((mixed(seed >>> 0) ^ STREAMS[what]) >>> 0);
  let kept = new Float32Array(0),
    widths = [];
  return (rows, columns) => {
    if (rows * WIDEST > kept.length) {
      const larger = new Float32Array(rows * WIDEST);
      larger.set(kept);
      kept = larger;
    }
    for (let row = 0; row < rows; row++) {
      const drawn = widths[row] ?? 0;
      if (drawn < columns) {
        fill(kept, row * WIDEST, base, row, drawn, columns);
        widths[row] = columns;
      }
    }
    return kept;
  };
}
