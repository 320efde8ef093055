// Makes elements. Only here does text enter a page, as text nodes: no markup is parsed, whatever the tokens are.

const DRAWN = new Set(["svg", "path", "line", "circle", "g", "text"]);

/** `make("td.name", {title: "…"}, "text", node, …)` on a page; `on…` are listeners, `--…` custom properties. */
export function maker(page) {
  return (kind, attributes = {}, ...children) => {
    const [tag, ...classes] = kind.split(".");
    const node = DRAWN.has(tag) ? page.createElementNS("http://www.w3.org/2000/svg", tag) : page.createElement(tag);
    if (classes.length) node.setAttribute("class", classes.join(" "));
    for (const [name, given] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), given);
      else if (name.startsWith("--")) node.style.setProperty(name, given);
      else if (given !== null && given !== undefined && given !== false) node.setAttribute(name, given === true ? "" : given);
    }
    node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  };
}

/** One stop for Tab among many buttons (null: a gap); arrow keys move within. `step(key, index)` gives the next index, or null. */
export function roving(box, buttons, step) {
  const stop = (index) => buttons.forEach((button, i) => button?.setAttribute("tabindex", i === index ? "0" : "-1"));
  stop(0);
  box.addEventListener("keydown", (event) => {
    const index = buttons.indexOf(event.target.closest("button"));
    const next = index < 0 ? null : step(event.key, index);
    if (next === null || !buttons[next]) return;
    event.preventDefault();
    stop(next);
    buttons[next].focus();
  });
  return stop;
}

/** Arrow keys in a grid of `columns`. */
export const grid = (columns, count) => (key, index) => {
  const next = { ArrowRight: index + 1, ArrowLeft: index - 1, ArrowDown: index + columns, ArrowUp: index - columns,
    Home: index - (index % columns), End: index - (index % columns) + columns - 1 }[key];
  return next === undefined || next < 0 || next >= count ? null : next;
};
