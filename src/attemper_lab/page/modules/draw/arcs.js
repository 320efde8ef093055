// Which token attends to which, as arcs over a line of tokens: above the line those that look back, below it those that look ahead.

const FAINT = 0.02; // smaller weights draw no arc
const MOST = 500; // arcs of one colour, the strongest
const LEVELS = 12; // arcs of one strength are one path: thousands of elements would be slow

/** How tokens stand in a width: how far apart, whether their words are turned, and the heights of the parts. */
export function arcRoom(count, width) {
  const apart = Math.max(15, width / Math.max(1, count)),
    turned = apart < 44,
    wide = apart * count;
  const reach = Math.min(wide / 2, 118),
    words = turned ? 64 : 26;
  return {
    apart,
    turned,
    width: Math.max(width, wide),
    above: reach + 8,
    words,
    below: Math.min(reach, 64) + 10,
    height: reach + 8 + words + Math.min(reach, 64) + 10,
  };
}

/** One arc from place a to place b; above the line where b is before a. */
function arc(a, b, room) {
  const x = (a + 0.5) * room.apart,
    to = (b + 0.5) * room.apart,
    back = b < a;
  const y = back ? room.above : room.above + room.words,
    most = back ? room.above - 8 : room.below - 10;
  const high = Math.min(most, 10 + (Math.abs(to - x) / room.width) * 1.9 * most),
    rx = Math.abs(to - x) / 2;
  return `M${x.toFixed(1)} ${y}A${rx.toFixed(1)} ${high.toFixed(1)} 0 0 0 ${to.toFixed(1)} ${y}`;
}

/**
 * The arcs of weights between shown tokens: `[level, path]`, where level + 1 of LEVELS is the strength. `pairs` are [query, key,
 * weight] by their places on the line.
 */
export function arcPaths(pairs, room) {
  const strong = pairs
    .filter(([a, b, weight]) => a !== b && weight >= FAINT)
    .sort((x, y) => y[2] - x[2])
    .slice(0, MOST);
  const paths = Array.from({ length: LEVELS }, () => "");
  for (const [a, b, weight] of strong) paths[Math.min(LEVELS - 1, Math.floor(weight * LEVELS))] += arc(a, b, room);
  return paths.map((d, level) => ({ d, strength: (level + 0.75) / LEVELS })).filter((one) => one.d);
}
