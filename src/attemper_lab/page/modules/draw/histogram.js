// Counting into bins, and bars as one path: fast enough to be drawn anew at every step of a slider.

/** The shares of `values` in `bins` equal bins from low to high; what lies outside counts in the last bin on its side. */
export function counted(values, low, high, bins) {
  const shares = new Float64Array(bins),
    width = (high - low) / bins;
  for (let i = 0; i < values.length; i++) {
    const bin = Math.floor((values[i] - low) / width);
    shares[bin < 0 ? 0 : bin >= bins ? bins - 1 : bin || 0] += 1 / values.length;
  }
  return shares;
}

/** Bars that stand on `base`, as one path; `height(share)` is a length. */
export function barPath(shares, at, base, height, gap = 1) {
  let text = "";
  for (let i = 0; i < shares.length; i++) {
    if (!shares[i]) continue;
    const left = at(i),
      right = at(i + 1) - gap;
    text += `M${left.toFixed(1)} ${base}V${(base - height(shares[i])).toFixed(1)}H${right.toFixed(1)}V${base}Z`;
  }
  return text;
}
