// Files that the page saves, pictures as PNG, text for the clipboard.

/** Save text or a blob under a name. */
export function download(page, name, content, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const url = URL.createObjectURL(blob);
  const link = page.createElement("a");
  link.href = url;
  link.download = name;
  page.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** An SVG, as text, as a PNG of twice its size. */
export async function toPng(page, svg) {
  const url = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    await new Promise((resolve, reject) => {
      image.onload = resolve;
      image.onerror = () => reject(new Error("the picture could not be drawn"));
      image.src = url;
    });
    const canvas = page.createElement("canvas");
    canvas.width = 2 * image.width;
    canvas.height = 2 * image.height;
    const pen = canvas.getContext("2d");
    pen.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  } finally {
    URL.revokeObjectURL(url);
  }
}

/** Copy text; where the browser does not allow it, through a field that is selected. Returns whether it worked. */
export async function copied(page, text) {
  try {
    await page.defaultView.navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = page.createElement("textarea");
    field.value = text;
    (page.querySelector("dialog[open]") ?? page.body).append(field);
    field.select();
    const worked = page.execCommand("copy");
    field.remove();
    return worked;
  }
}
