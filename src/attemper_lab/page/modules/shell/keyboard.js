// Keys: a row of tabs is one stop for Tab, and arrow keys move in it; a panel may add its own keys.

const TYPED_INTO = new Set(["INPUT", "TEXTAREA", "SELECT"]);

/** Keys that a panel listens to while the focus is inside `root` and not in a field: `{" ": () => …, ArrowRight: () => …}`. */
export function keys(root, actions) {
  const listen = (event) => {
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey || TYPED_INTO.has(event.target.tagName)) return;
    if (event.key === " " && event.target.closest("button, a, summary, [role=tab]")) return; // Space presses those
    event.preventDefault();
    action(event);
  };
  root.addEventListener("keydown", listen);
  return () => root.removeEventListener("keydown", listen);
}

/** The index that an arrow key leads to in a row of so many; null for another key. */
export function stepped(key, index, count) {
  const next = { ArrowRight: index + 1, ArrowDown: index + 1, ArrowLeft: index - 1, ArrowUp: index - 1, Home: 0, End: count - 1 }[key];
  return next === undefined ? null : (next + count) % count;
}
