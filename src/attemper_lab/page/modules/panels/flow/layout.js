// The position of each matrix of the flow at a given width: four columns on a desktop, two on a phone. The last column of a desktop
// follows the values: V, its weighted sum, all heads joined, the output.

export const ROWS = 12; // tokens that are drawn
const PROJECTION = 5; // rows of a projection that are drawn, of hundreds
const NUMBERS = 30; // a cell at least so wide shows its number
const TITLE = 20;

/** id, column, columns taken; a band is a row of blocks. */
const WIDE = {
  columns: 4,
  bands: [
    [["X", 1, 2]],
    [
      ["W_Q", 0],
      ["W_K", 1],
      ["W_V", 3],
    ],
    [
      ["Q", 0],
      ["K", 1],
      ["V", 3],
    ],
    [
      ["S", 0],
      ["Z", 2],
    ],
    [
      ["U", 0],
      ["P", 2],
      ["C", 3],
    ],
    [
      ["heads", 0, 3],
      ["concat", 3],
    ],
    [
      ["W_O", 2],
      ["Y", 3],
    ],
  ],
  links: [
    ["X", "W_Q"],
    ["X", "W_K"],
    ["X", "W_V"],
    ["W_Q", "Q"],
    ["W_K", "K"],
    ["W_V", "V"],
    ["Q", "S"],
    ["K", "S"],
    ["S", "Z"],
    ["S", "U"],
    ["Z", "P"],
    ["P", "C"],
    ["V", "C"],
    ["C", "concat"],
    ["heads", "concat"],
    ["concat", "Y"],
    ["W_O", "Y"],
  ],
};
const NARROW = {
  columns: 2,
  bands: [
    [["X", 0, 2]],
    [
      ["W_Q", 0],
      ["Q", 1],
    ],
    [
      ["W_K", 0],
      ["K", 1],
    ],
    [
      ["W_V", 0],
      ["V", 1],
    ],
    [
      ["S", 0],
      ["Z", 1],
    ],
    [
      ["U", 0],
      ["P", 1],
    ],
    [["C", 0, 2]],
    [["heads", 0, 2]],
    [["concat", 0, 2]],
    [
      ["W_O", 0],
      ["Y", 1],
    ],
  ],
  links: [
    ["W_Q", "Q"],
    ["W_K", "K"],
    ["W_V", "V"],
    ["S", "Z"],
    ["S", "U"],
    ["Z", "P"],
    ["W_O", "Y"],
  ],
};
const SQUARE = new Set(["S", "Z", "U", "P"]);
const LABELLED = new Set(["X", "Q", "S", "U", "C", "concat"]); // tokens stand to their left, where there is room

/** How many columns of numbers are drawn in a width, and how wide one is. */
function vectors(room, known, few) {
  const count = Math.min(known, few ? Math.max(3, Math.floor(room / 35)) : 16);
  return { shown: count, wide: room / count };
}

/** The size of one block: {rows, shown, wide, tall, top}; `top` is the room for the names of keys. */
function sized(id, part, room, n, few, square) {
  const rows = Math.min(n, ROWS),
    tall = few ? 26 : Math.min(square / rows, 15);
  if (SQUARE.has(id)) return { rows, shown: rows, wide: room / rows, tall, top: few ? 16 : 34 };
  if (id.startsWith("W_")) return { rows: PROJECTION, ...vectors(room, part.shown, few), tall: few ? 12 : 8, top: 0 };
  return { rows, ...vectors(room, part.shown, few), tall: id === "C" ? tall : few ? 22 : 11, top: 0 };
}

/** Small pictures of all heads: how many in a line, and how large. */
function strip(heads, room, narrow) {
  const most = Math.min(heads, 24),
    across = narrow ? Math.min(6, most) : most > 8 ? Math.ceil(most / 2) : most,
    each = Math.min(60, room / across - 6);
  return { across, each, lines: Math.ceil(most / across), most };
}

/**
 * All blocks with their places, `{x, y, width, height, …}`, the links between them, and the height of the picture. Parts that
 * a model does not show are left out.
 */
export function layout(flow, parts, width, served = false) {
  const narrow = width < 620,
    plan = narrow ? NARROW : WIDE,
    few = flow.n <= 4,
    left = narrow ? 50 : 60,
    gap = narrow ? 26 : 48;
  const column = (width - left) / plan.columns,
    blocks = {};
  let y = 4;
  for (const band of plan.bands) {
    const made = band
      .filter(([id]) => parts[id === "heads" ? "all" : id])
      .map(([id, place, taken = 1]) => {
        const room = taken * column - gap;
        const size =
          id === "heads" ? { ...strip(flow.heads, room, narrow), top: 0, served } : sized(id, parts[id], room, flow.n, few, column - gap);
        const height = id === "heads" ? size.lines * (size.each + 20) : size.rows * size.tall;
        return {
          id,
          x: left + place * column,
          width: room,
          height,
          ...size,
          numbers: size.wide >= NUMBERS && size.tall >= 18,
          labels: LABELLED.has(id) && (place === 0 || id === "X"),
        };
      });
    if (!made.length) continue;
    const top = Math.max(...made.map((one) => one.top)); // rows of neighbours are level
    for (const one of made) blocks[one.id] = { ...one, y: y + TITLE + top };
    const legend = band[0][0] === "S" ? 44 : 0; // the scale that S and Z share
    y += TITLE + top + Math.max(...made.map((one) => one.height)) + (narrow ? 34 : 44) + legend;
  }
  const links = plan.links
    .filter(([from, to]) => blocks[from] && blocks[to])
    .map(([from, to]) => ({ from, to, path: route(blocks[from], blocks[to]) }));
  return { width, height: y - (narrow ? 14 : 30), blocks, links, few, narrow };
}

/** A curve from one block to the next: across where they stand side by side, down otherwise. */
function route(a, b) {
  if (a.y === b.y) {
    const [from, y] = [a.x + a.width + (a.id === "heads" ? -2 : 16), a.y + a.height / 2],
      [end, to] = [b.x - 8, b.y + b.height / 2],
      middle = (from + end) / 2;
    return `M${from} ${y}C${middle} ${y} ${middle} ${to} ${end} ${to}`;
  }
  const [x, y, to, end] = [
      a.x + a.width / 2,
      a.y + a.height + (a.rows < 12 && a.id.startsWith("W_") ? 14 : 6),
      b.x + b.width / 2,
      b.y - b.top - TITLE,
    ],
    middle = (y + end) / 2;
  return `M${x} ${y}C${x} ${middle} ${to} ${middle} ${to} ${end}`;
}
