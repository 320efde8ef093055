// SVG that is drawn once and then brought up to date, and a copy of it that stands alone in a file.

import { lowered } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
/** The style properties that a picture takes along when it leaves the page. */
const KEPT = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "stroke-opacity",
  "stroke-linecap",
  "stroke-linejoin",
  "opacity",
  "font-family",
  "font-size",
  "font-weight",
  "text-anchor",
  "dominant-baseline",
  "font-variant-numeric",
  "paint-order",
];

/** An element of a picture: `draw(page)("path.bars", {d: "…"}, child, …)`. */
export function draw(page) {
  const pen = (kind, attributes = {}, ...children) => {
    const [tag, ...classes] = kind.split(".");
    const node = page.createElementNS(SVG, tag);
    if (classes.length) node.setAttribute("class", classes.join(" "));
    change(node, attributes);
    const set = (child) => (tag === "text" && typeof child === "string" && child.includes("_") ? lowered(pen, child) : child);
    node.append(
      ...children
        .flat(3)
        .flatMap(set)
        .filter((child) => child !== null && child !== undefined && child !== false),
    );
    return node;
  };
  return pen;
}

/** Set attributes; one that is null is removed. */
export function change(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value);
  }
  return node;
}

/** The picture as text that stands alone: colours and fonts are written into it, and what is hidden is left out. */
export function standalone(svg) {
  const view = svg.ownerDocument.defaultView,
    copy = svg.cloneNode(true);
  const ours = [svg, ...svg.querySelectorAll("*")],
    theirs = [copy, ...copy.querySelectorAll("*")];
  const gone = [];
  ours.forEach((node, i) => {
    const style = view.getComputedStyle(node),
      target = theirs[i];
    if (style.display === "none") gone.push(target);
    for (const name of KEPT) target.setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "style", "role", "tabindex", "aria-hidden"]) target.removeAttribute(name);
  });
  for (const node of gone) node.remove();
  const [, , width, height] = svg.getAttribute("viewBox").split(" ");
  change(copy, { xmlns: SVG, width, height, overflow: "visible" });
  return new view.XMLSerializer().serializeToString(copy);
}

/** A picture of a fixed size in its own units, that shrinks with its column. Its name is what a screen reader says. */
export function picture(pen, { width, height, name }) {
  return pen("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name, width, height });
}

const ROOM = 24; // around and between the pictures of a sheet
const TITLE = 26; // above each
const SHEET = 1120; // the widest row of a sheet, unless one picture is wider

/** Pictures, `{name, svg}` with the text of each, on one sheet, titled: from left to right, a new row where one would not fit; below, a caption. */
export function sheet(pictures, ground, ink, caption) {
  const sized = pictures.map(({ name, svg }) => ({
    svg,
    title: labelOf(svg) ?? name,
    wide: sizeOf(svg, "width"),
    high: sizeOf(svg, "height"),
  }));
  const most = Math.max(SHEET, ...sized.map((one) => one.wide));
  let x = ROOM,
    y = ROOM,
    row = 0,
    right = 0,
    parts = "";
  for (const { svg, title, wide, high } of sized) {
    if (x > ROOM && x + wide > most + ROOM) [x, y, row] = [ROOM, y + row + ROOM, 0];
    parts += `<text x="${x}" y="${y + 14}" fill="${ink}" font-family="sans-serif" font-size="14" font-weight="600">${title}</text>`;
    parts += `<g transform="translate(${x} ${y + TITLE})">${svg}</g>`;
    x += wide + ROOM;
    right = Math.max(right, x);
    row = Math.max(row, high + TITLE);
  }
  const low = y + row + ROOM,
    escaped = caption.replaceAll("&", "&amp;").replaceAll("<", "&lt;"),
    [wide, high] = [right, low + ROOM];
  parts += `<text x="${ROOM}" y="${low}" fill="${ink}" font-family="sans-serif" font-size="12">${escaped}</text>`;
  return `<svg xmlns="${SVG}" viewBox="0 0 ${wide} ${high}" width="${wide}" height="${high}"><rect width="100%" height="100%" fill="${ground}"/>${parts}</svg>`;
}

const sizeOf = (svg, side) => Number(svg.match(new RegExp(`^<svg[^>]*? ${side}="([\\d.]+)"`))?.[1] ?? 300);
/** The label of a picture, as its text has it: escaped. */
const labelOf = (svg) => svg.match(/^<svg[^>]*? aria-label="([^"]*)"/)?.[1];
