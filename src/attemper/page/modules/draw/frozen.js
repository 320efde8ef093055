// SVG elements, and a picture as text that looks the same outside the page: styles are written into it.

const SPACE = "http://www.w3.org/2000/svg";
const WRITTEN = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "opacity", "font-size", "font-weight",
  "font-family", "text-anchor", "dominant-baseline"];

/** `draw("rect.cell", {x: 1})`: as report's make(), in SVG. */
export function drawer(page) {
  return (kind, attributes = {}, ...children) => {
    const [tag, ...classes] = kind.split("."), node = page.createElementNS(SPACE, tag);
    if (classes.length) node.setAttribute("class", classes.join(" "));
    for (const [name, given] of Object.entries(attributes)) {
      if (given !== null && given !== undefined && given !== false) node.setAttribute(name, given === true ? "" : given);
    }
    node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  };
}

/** An SVG of the page as text, with the styles it has now; what is hidden is left out. */
export function frozen(svg) {
  const view = svg.ownerDocument.defaultView, copy = svg.cloneNode(true);
  const from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((node, i) => {
    const style = view.getComputedStyle(node);
    if (style.display === "none") to[i].setAttribute("display", "none");
    for (const name of WRITTEN) {
      const value = style.getPropertyValue(name);
      if (value) to[i].setAttribute(name, value.replaceAll('"', "'"));
    }
    for (const name of ["class", "tabindex", "role"]) to[i].removeAttribute(name);
  });
  copy.setAttribute("xmlns", SPACE);
  copy.querySelectorAll("[display=none]").forEach((node) => node.remove());
  return new view.XMLSerializer().serializeToString(copy);
}

const CUT = 0.62; // width of a letter, as a share of the size of its font

/** A word cut to a width in pixels. */
export function fitted(word, width, size = 11) {
  const letters = [...word], most = Math.max(1, Math.floor(width / (CUT * size)));
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : word;
}
