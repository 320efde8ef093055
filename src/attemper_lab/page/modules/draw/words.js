// d_k with a small, low k, and ‖J‖_F with such an F: text that is read, copied and searched as `d_k`, and looks as in a book.

const LOW = /([dW‖])_(k|model|Q|K|V|F)(?!\w)/g;

/** A text in pieces: [[text, false], [subscript, true], …]. */
export function pieces(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(LOW)) {
    found.push([text.slice(from, match.index) + match[1], false], [match[2], true]);
    from = match.index + match[0].length;
  }
  if (from < text.length || !found.length) found.push([text.slice(from), false]);
  return found;
}

const PLAIN = new Set(["option", "title", "pre", "textarea", "code"]); // these hold plain text only

/** A `make` whose texts have their subscripts. */
export function typesetting(make) {
  const set = (child) => {
    if (typeof child !== "string" || !child.includes("_")) return child;
    const parts = pieces(child).map(([text, low]) => (low ? make("span.sub", {}, make("span.under", {}, "_"), text) : text));
    return parts.length > 1 ? make("span.set", {}, parts) : child; // one element: in a flex box the pieces would drift apart
  };
  return (kind, attributes, ...children) =>
    make(kind, attributes, ...(PLAIN.has(kind.split(".")[0]) ? children : children.flat(3).map(set)));
}

/** The same for a picture: pieces of a text element. */
export function lowered(pen, text) {
  let after = false;
  return pieces(text).flatMap(([words, low]) => {
    const node = low
      ? [pen("tspan.under", {}, "_"), pen("tspan.low", { dy: 2.5 }, words)]
      : [pen("tspan", after ? { dy: -2.5 } : {}, words)];
    after = low;
    return node;
  });
}

/** Set the text of an element, if it differs. */
export function say(page, node, text) {
  if (node.textContent === text) return;
  if (!text.includes("_")) node.textContent = text;
  else if (node.namespaceURI.endsWith("svg")) node.replaceChildren(...lowered(page.pen, text));
  else node.replaceChildren(...page.make("span", {}, text).childNodes);
}
