// The tools of a panel: copy as Python, its pictures, its numbers, the picture in words, its link. And the controls that a teacher may hide.

import { sheet } from "../draw/svg.js";
import { copied, download, toPng } from "./export.js";

const SEEN = 2000; // milliseconds for which a button says what it did

/** A dialog that shows text that can be copied or saved. */
function textDialog(make, host, page, id) {
  const title = make("h2", { id }),
    body = make("pre", { tabindex: "0" }),
    said = make("span.dim", { role: "status" });
  const copy = make(
    "button.plain",
    {
      type: "button",
      async onclick() {
        said.textContent = (await copied(page, body.textContent)) ? "Copied." : "Select the text and copy it.";
      },
    },
    "Copy",
  );
  const close = make("button.plain", { type: "button", onclick: () => dialog.close() }, "Close");
  const dialog = make("dialog.words", { "aria-labelledby": id }, title, body, make("div.row", {}, copy, close, said));
  host.append(dialog);
  return (name, text) => {
    title.textContent = name;
    body.textContent = text;
    said.textContent = "";
    dialog.showModal();
    copy.focus();
  };
}

/** The row of tools under a panel; `mounted` is what its mount() gave, `link()` its address. */
export function tools(make, host, panel, mounted, { announce, link }) {
  const page = host.ownerDocument,
    showText = textDialog(make, host, page, `words-${panel.id}`);
  const button = (words, action, says) => make("button.plain", { type: "button", title: says, onclick: action }, words);
  async function save(kind) {
    const pictures = (mounted.figures?.() ?? []).map(({ name, svg }) => ({ name, svg: svg() }));
    if (!pictures.length) return showText("There is no picture yet", "This panel has nothing to draw so far. Start it, then save its pictures.");
    const [ground, ink] = ["--ground", "--ink"].map((name) => colourOf(page, host, name)),
      whole = sheet(pictures, ground, ink, `attemper, ${panel.title} ${mounted.caption?.() ?? ""}`.trim()),
      name = `attemper-${panel.id}.${kind}`;
    if (kind === "svg") download(page, name, whole, "image/svg+xml");
    else download(page, name, await toPng(page, whole));
    return announce(`${panel.title}: saved as ${kind.toUpperCase()}.`);
  }
  /** Says on itself that the link was copied, since a clipboard shows nothing. */
  function linkButton() {
    const node = button(
      "Copy link",
      async () => {
        if (!(await copied(page, link()))) return showText("A link to this state", link());
        announce("Link copied.");
        node.textContent = "Link copied";
        return setTimeout(() => node.replaceChildren("Copy link"), SEEN);
      },
      "A link to exactly this state",
    );
    return node;
  }
  return make(
    "div.tools",
    { "data-control": "tools", role: "group", "aria-label": `Take ${panel.title} away` },
    mounted.python &&
      button("As Python", () => showText("The same numbers, in Python", mounted.python()), "Code that prints this panel's numbers"),
    mounted.text && button("In words", () => showText("This panel in words", mounted.text()), "The pictures as text"),
    mounted.figures && button("SVG", () => save("svg"), "Save the pictures as SVG"),
    mounted.figures && button("PNG", () => save("png"), "Save the pictures as PNG"),
    mounted.json &&
      button(
        "JSON",
        () => {
          download(page, `attemper-${panel.id}.json`, JSON.stringify(mounted.json(), null, 1), "application/json");
          announce("Numbers saved as JSON.");
        },
        "Save the numbers as JSON",
      ),
    link() && linkButton(),
  );
}

/** A variable's colour as the page computes it: `light-dark()` is a colour only where it is used. */
function colourOf(page, host, variable) {
  const probe = page.createElement("i");
  probe.style.color = `var(${variable})`;
  host.append(probe);
  const found = page.defaultView.getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** For teachers: every control that can be hidden, as a box to tick; `choose(set)` gets the names that are hidden. */
export function hiding(make, root, hidden, choose) {
  const box = make("div.boxes"),
    summary = make("summary", {}, "For teachers: hide controls");
  const details = make(
    "details.hiding",
    { "data-control": "hiding" },
    summary,
    make(
      "p.dim",
      {},
      "Untick what students should not see. The address of this page keeps the choice; send them the link. " +
        "To see everything again, remove hide=… from the address.",
    ),
    box,
  );
  details.addEventListener("toggle", () => {
    const names = [...new Set([...root.querySelectorAll("[data-control]")].map((node) => node.dataset.control))];
    box.replaceChildren(
      ...names.map((name) =>
        make(
          "label.check",
          {},
          make("input", {
            type: "checkbox",
            checked: !hidden().has(name),
            onchange(event) {
              const next = new Set(hidden());
              if (event.target.checked) next.delete(name);
              else next.add(name);
              choose(next);
            },
          }),
          ` ${name}`,
        ),
      ),
    );
  });
  return details;
}
