// The flow as one picture: matrices of cells with their shapes and numbers, the links between them, and what is pointed at.

import { written } from "../../../report/data/numbers.js";
import { fitted } from "../../draw/fitted.js";
import { NAMES } from "./steps.js";
import { ROWS } from "./layout.js";

const HUE = {
  X: "plain",
  W_Q: "query",
  Q: "query",
  W_K: "key",
  K: "key",
  W_V: "value",
  V: "value",
  C: "value",
  S: "weight",
  Z: "weight",
  U: "other",
  P: "weight",
  heads: "weight",
  concat: "value",
  W_O: "plain",
  Y: "plain",
};
const SYMBOL = { heads: "heads", concat: "concat", U: "P" };
const STEPS = 41; // of the bar of a scale

/** The largest size of a number that is drawn at full strength: S and Z share theirs, so that one sees what the scale does. */
function strongest(parts, id) {
  if (id === "P" || id === "U") return 1;
  if (id === "S" || id === "Z") return parts.S.data.reduce((most, one) => Math.max(most, Math.abs(one)), 1e-9);
  const sizes = Float64Array.from(parts[id].data, Math.abs).sort(); // a few numbers of a trained model are very large
  return Math.max(1e-9, sizes[Math.floor(0.985 * (sizes.length - 1))]);
}

/** Which columns of a part are drawn: the first; of the heads side by side, some of each. */
function drawnColumns(flow, block) {
  if (block.id !== "concat") return Array.from({ length: block.shown }, (_, i) => i);
  const each = Math.max(1, Math.floor(16 / flow.heads));
  return Array.from({ length: Math.min(flow.heads, 24) * each }, (_, i) => Math.floor(i / each) * flow.d_v + (i % each));
}

/** Strength and number of one cell, written into its nodes. */
function paint(cell, value, most, decimals) {
  const share = Number.isFinite(value) ? Math.min(1, Math.abs(value) / most) : 0;
  cell.node.setAttribute("fill-opacity", (0.05 + 0.95 * share).toFixed(3));
  cell.node.classList.toggle("less", value < 0);
  cell.node.classList.toggle("hides", value === -Infinity);
  if (!cell.text) return;
  cell.text.textContent = value === -Infinity ? "" : written(value, decimals);
  cell.text.classList.toggle("over", share > 0.72 && value > 0);
}

/** One matrix: its name and shape, its cells, and the tokens beside it. */
function matrix(draw, flow, parts, block) {
  const { id, x, y, rows, tall, top } = block,
    part = parts[id],
    columns = drawnColumns(flow, block),
    wide = block.width / columns.length;
  const gap = wide > 20 ? 2 : 1,
    cells = [];
  const numbers = block.numbers && id !== "concat";
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns.length; c++) {
      const left = x + c * wide,
        above = y + r * tall;
      const node = draw("rect.cell", {
        x: (left + gap / 2).toFixed(2),
        y: (above + gap / 2).toFixed(2),
        width: (wide - gap).toFixed(2),
        height: (tall - gap).toFixed(2),
        rx: wide > 20 ? 3 : 1,
      });
      const text = numbers ? draw("text.number", { x: left + wide / 2, y: above + tall / 2 + 3.5 }) : null;
      cells.push({ node, text, row: r, column: columns[c] });
    }
  }
  const index = id.includes("_") ? draw("tspan.index", { dy: 3 }, id.slice(2)) : null;
  const shape = draw("tspan.shape", { dx: 6, dy: index ? -3 : 0 }, `${part.rows} × ${part.columns}`);
  const title = draw("text.name", { x, y: y - top - 8 }, draw("tspan", {}, SYMBOL[id] ?? id[0]), index, shape);
  const tokens = flow.tokens.slice(0, rows),
    labels = [];
  if (block.labels)
    tokens.forEach((token, i) =>
      labels.push(
        draw(`text.token${flow.special[i] ? ".special" : ""}`, { x: x - 8, y: y + (i + 0.5) * tall + 3.5 }, fitted(token, 54, 10)),
      ),
    );
  if (top) {
    const turned = top > 20;
    tokens.forEach((token, j) => {
      const at = x + (j + 0.5) * wide,
        place = turned ? { transform: `translate(${at + 3} ${y - 5}) rotate(-52)` } : { x: at, y: y - 5 };
      labels.push(draw(turned ? "text.token.above" : "text.token.over-cell", place, fitted(token, turned ? 46 : wide, 10)));
    });
  }
  const more = [];
  if (columns.length < part.columns) more.push(draw("text.more", { x: x + block.width + 4, y: y + (rows * tall) / 2 + 3 }, "⋯"));
  if (rows < part.rows) more.push(draw("text.more.below", { x: x + block.width / 2, y: y + rows * tall + 9 }, "⋮"));
  const words = `${NAMES[id]}: ${part.rows} × ${part.columns}. Arrow keys move over its cells.`;
  const group = draw(
    `g.block.of-${HUE[id]}`,
    { "data-part": id, tabindex: "0", role: "group", "aria-label": words },
    title,
    labels,
    draw("rect.hit", { x, y, width: block.width, height: rows * tall }),
    cells.map((cell) => [cell.node, cell.text]),
    more,
    draw("g.marks"),
  );
  return { id, group, cells, columns, wide, block };
}

/** All heads, each as a small picture of its weights. */
function strip(draw, flow, parts, block) {
  const rows = Math.min(flow.n, ROWS),
    { across, each, most } = block,
    chosen = flow.way === "lesson" || block.served,
    spots = [];
  const small = Array.from({ length: most }, (_, h) => {
    const x = block.x + (h % across) * (block.width / across),
      y = block.y + Math.floor(h / across) * (each + 20),
      size = each / rows;
    const cells = Array.from({ length: rows * rows }, (_, i) => ({
      row: Math.floor(i / rows),
      column: i % rows,
      node: draw("rect.cell", {
        x: (x + (i % rows) * size).toFixed(2),
        y: (y + Math.floor(i / rows) * size).toFixed(2),
        width: size.toFixed(2),
        height: size.toFixed(2),
      }),
    }));
    spots.push({ h, cells });
    return draw(
      `g.small-head${h === flow.head ? ".own" : ""}`,
      chosen ? { "data-head": h, tabindex: "0", role: "button", "aria-label": `head ${h}`, "aria-pressed": String(h === flow.head) } : {},
      draw("rect.ground", { x, y, width: each, height: each }),
      cells.map((cell) => cell.node),
      draw("rect.edge", { x: x - 1, y: y - 1, width: each + 2, height: each + 2, rx: 2 }),
      draw("text.small", { x: x + each / 2, y: y + each + 11 }, String(h)),
    );
  });
  const title = draw(
    "text.name",
    { x: block.x, y: block.y - 7 },
    draw("tspan", {}, "P of every head"),
    draw("tspan.shape", { dx: 6 }, `${flow.heads} × [${flow.n} × ${flow.n}]`),
  );
  const group = draw("g.block.of-weight", { "data-part": "heads" }, title, small);
  return { id: "heads", group, spots, block };
}

/** The colour scale that S and Z share, with the part of it that each takes. */
function sharedScale(draw, parts, { S, Z }) {
  const most = strongest(parts, "S"),
    x = S.x,
    wide = Z.x + Z.width - S.x,
    y = S.y + S.height + 14;
  const place = (number) => x + ((number / most + 1) / 2) * wide,
    ends = (part) => {
      const seen = [...part.data].filter(Number.isFinite);
      return [Math.min(...seen), Math.max(...seen)];
    };
  const bar = Array.from({ length: STEPS }, (_, i) => {
    const share = (2 * i) / (STEPS - 1) - 1;
    return draw(`rect.cell${share < 0 ? ".less" : ""}`, {
      x: x + (i * wide) / STEPS,
      y,
      width: wide / STEPS + 0.5,
      height: 6,
      "fill-opacity": 0.05 + 0.95 * Math.abs(share),
    });
  });
  const span = (name, part, below) => {
    const [low, high] = ends(part),
      at = y + below;
    return [
      draw("path.span", { d: `M${place(low)} ${at - 3}v6M${place(low)} ${at}H${place(high)}M${place(high)} ${at - 3}v6` }),
      draw("text.span-name", { x: x - 58, y: at + 3.5 }, name),
      draw("text.span-end", { x: place(low) - 5, y: at + 3.5, "text-anchor": "end" }, written(low, 1)),
      draw("text.span-end", { x: place(high) + 5, y: at + 3.5 }, written(high, 1)),
    ];
  };
  return draw(
    "g.shared.of-weight",
    { "data-part": "scale" },
    bar,
    span("S", parts.S, 17),
    span("Z", parts.Z, 32),
    draw("text.span-end", { x: x + wide / 2, y: y + 50, "text-anchor": "middle" }, "one colour scale for S and Z"),
  );
}

/** The operation on the scores: "÷ 8" where the scale is 1/√64. */
function scaleWords({ scale, d_k }) {
  const root = Math.sqrt(d_k);
  if (Math.abs(scale * root - 1) < 1e-6) return `÷ ${written(root, Number.isInteger(root) ? 0 : 2)}`;
  return Number.isFinite(scale) ? `× ${written(scale)}` : "×";
}

/** A picture in an SVG element: `show(parts)`, `step(ids)`, `point(made)`, `cellAt(event)`. */
export function picture(draw, svg, flow, parts, plan) {
  const { blocks } = plan,
    drawn = new Map();
  svg.setAttribute("viewBox", `0 0 ${plan.width} ${plan.height}`);
  svg.setAttribute("width", plan.width);
  svg.setAttribute("height", plan.height);
  const links = plan.links.map((link) => ({
    ...link,
    node: draw(`path.link.of-${HUE[link.from]}`, { d: link.path, "data-from": link.from, "data-to": link.to }),
  }));
  for (const block of Object.values(blocks))
    drawn.set(block.id, block.id === "heads" ? strip(draw, flow, parts, block) : matrix(draw, flow, parts, block));
  const middle =
    blocks.S && blocks.Z
      ? draw("text.divide", { x: (blocks.S.x + blocks.S.width + blocks.Z.x) / 2, y: blocks.S.y + blocks.S.height / 2 - 8 })
      : null;
  const scale = draw("g");
  svg.replaceChildren(
    draw(
      "g.links",
      {},
      links.map((link) => link.node),
    ),
    ...[...drawn.values()].map((one) => one.group),
    scale,
    middle,
  );

  function fill(one, now, as = one.id) {
    if (one.spots) {
      for (const { h, cells } of one.spots) for (const cell of cells) paint(cell, now.all[h][cell.row * flow.n + cell.column], 1);
      return;
    }
    const part = now[as],
      most = strongest(now, as),
      decimals = "PU".includes(one.id) ? 2 : most >= 9.95 ? 1 : 2;
    for (const cell of one.cells) paint(cell, part.data[cell.row * part.shown + cell.column], most, decimals);
  }
  return {
    /** Fill every cell. */
    show(now, skip) {
      for (const one of drawn.values()) fill(one, now);
      const other = drawn.get("U").group;
      other.classList.toggle("divided", skip);
      other.querySelector(".shape").textContent = skip ? `with ${scaleWords(flow)}` : "not divided";
      scale.replaceChildren(sharedScale(draw, now, blocks));
      middle.textContent = skip ? "× 1" : scaleWords(flow);
    },
    /** Z as it was before the scale: the next show() then lets it shrink. */
    before(now) {
      fill(drawn.get("Z"), { ...now, Z: now.S });
    },
    /** Light the parts of a step; the others step back. */
    step(ids) {
      for (const one of drawn.values()) one.group.classList.toggle("back", !ids.includes(one.id) && !ids.includes("tokens"));
      const within = links.filter((link) => ids.includes(link.from) && ids.includes(link.to));
      const live = within.length ? within : links.filter((link) => ids.includes(link.to));
      for (const link of links) link.node.classList.toggle("live", live.includes(link));
      for (const node of [scale, middle]) node.classList.toggle("back", ![..."SZ", "tokens"].some((id) => ids.includes(id)));
      svg.classList.toggle("only-tokens", ids.includes("tokens"));
    },
    /** Outline a part that the text names; null: none. */
    name(id) {
      for (const one of drawn.values()) one.group.classList.toggle("named", one.id === id);
      svg.classList.toggle("names-tokens", id === "tokens");
    },
    /** Outline a cell and the cells it was made of; null: nothing. */
    point(made) {
      for (const one of drawn.values()) {
        one.group.querySelector(".marks")?.replaceChildren();
        one.group.classList.remove("lit");
      }
      if (!made) return;
      mark(drawn.get(made.id), made, "target");
      for (const source of made.sources) if (drawn.has(source.part)) mark(drawn.get(source.part), source, "source");
    },
    box: (id) => drawn.get(id)?.group ?? null,
    /** The cell under a pointer. */
    cellAt(event) {
      const group = event.target.closest?.("[data-part]"),
        one = group && drawn.get(group.dataset.part);
      if (!one?.cells) return null;
      const spot = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()),
        { block } = one;
      const row = Math.floor((spot.y - block.y) / block.tall),
        column = Math.floor((spot.x - block.x) / one.wide);
      return row >= 0 && row < block.rows && column >= 0 && column < one.columns.length
        ? { id: one.id, row, column: one.columns[column] }
        : null;
    },
    /** The next cell in the direction of an arrow key. */
    moved(id, from, key) {
      const one = drawn.get(id),
        at = Math.max(0, one.columns.indexOf(from?.column ?? 0)),
        row = from?.row ?? 0;
      if (!from) return { id, row: 0, column: one.columns[0] };
      const by = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[key];
      const held = (number, most) => Math.min(most - 1, Math.max(0, number));
      return { id, row: held(row + by[0], one.block.rows), column: one.columns[held(at + by[1], one.columns.length)] };
    },
  };

  function mark(one, { row, column }, kind) {
    const { block, wide, columns } = one,
      c = columns.indexOf(column);
    one.group.classList.add("lit");
    if (column !== undefined && c < 0) return; // beyond the columns that are drawn
    if (row !== undefined && row >= block.rows) return;
    const x = column === undefined ? block.x : block.x + c * wide,
      y = row === undefined ? block.y : block.y + row * block.tall;
    one.group
      .querySelector(".marks")
      .append(
        draw(`rect.mark.${kind}`, {
          x: x - 1,
          y: y - 1,
          rx: 3,
          width: (column === undefined ? block.width : wide) + 2,
          height: (row === undefined ? block.rows * block.tall : block.tall) + 2,
        }),
      );
  }
}
