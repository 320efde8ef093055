// SVG that is drawn once and then brought up to date, and a copy of it that stands alone in a file.

const SVG = "http://www.w3.org/2000/svg";
/** What a picture needs of the page's style when it leaves the page. */
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
  return (kind, attributes = {}, ...children) => {
    const [tag, ...classes] = kind.split(".");
    const node = page.createElementNS(SVG, tag);
    if (classes.length) node.setAttribute("class", classes.join(" "));
    change(node, attributes);
    node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  };
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
    for (const name of ["class", "style", "role", "tabindex", "aria-label", "aria-hidden"]) target.removeAttribute(name);
  });
  for (const node of gone) node.remove();
  const [, , width, height] = svg.getAttribute("viewBox").split(" ");
  change(copy, { xmlns: SVG, width, height });
  return new view.XMLSerializer().serializeToString(copy);
}

/** A picture of a fixed size in its own units, that shrinks with its column. Its name is what a screen reader says. */
export function picture(pen, { width, height, name }) {
  return pen("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name, width, height });
}
