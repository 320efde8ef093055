// A matrix of shares in a picture: the cells of one shade are one path, since thousands of elements would be slow.

import { shade } from "../../report/data/numbers.js";

const LEVELS = 32;

/** `shares`, rows × columns, in a box, shaded by their roots as on the page. */
export function matrix(pen, theme, { rows, columns, shares }, { x, y, width, height }) {
  const paths = Array.from({ length: LEVELS + 1 }, () => ""),
    [wide, high] = [width / columns, height / rows],
    at = (number) => Number(number.toFixed(2));
  shares.forEach((share, i) => {
    const level = Math.round(LEVELS * Math.sqrt(Math.min(1, share)));
    paths[level] += `M${at(x + (i % columns) * wide)} ${at(y + Math.floor(i / columns) * high)}h${at(wide)}v${at(high)}h${-at(wide)}z`;
  });
  return paths.flatMap((d, level) => (d ? [pen("path", { d, fill: shade(theme, level / LEVELS).css })] : []));
}
