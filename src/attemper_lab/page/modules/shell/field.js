// The field where somebody types a sentence. One that is too long is refused before it is sent, with its length.

/** `{node, field}`: a form whose `enter(words)` gets what was typed. */
export function sentenceForm(make, { name, button, longest, enter }) {
  const field = make("input.sentence-field", {
    type: "text",
    placeholder: "Type a sentence",
    "aria-label": "Type a sentence",
    autocomplete: "off",
    spellcheck: "false",
    onkeydown(event) {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault(); // JupyterLab keeps Enter from a form
      node.requestSubmit();
    },
    oninput() {
      const count = field.value.trim().length;
      field.setCustomValidity(count > longest ? `At most ${longest} characters; this has ${count}. Shorten it.` : "");
    },
  });
  const node = make(
    "form.row.sentence-form",
    {
      "data-control": name,
      onsubmit(event) {
        event.preventDefault();
        if (field.value.trim()) enter(field.value.trim());
      },
    },
    field,
    make("button.plain", { type: "submit" }, button),
  );
  return { node, field };
}
