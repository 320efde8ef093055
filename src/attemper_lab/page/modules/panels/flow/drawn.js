// The random vectors of attemper.explain, number by number: sha256 of a name seeds the Mersenne Twister, and Box and Muller's
// formula makes normal numbers of it, as torch.randn does in float64. So the page and the library draw the same lesson.

const PRIMES = Array.from({ length: 400 }, (_, i) => i + 2)
  .filter((n) => {
    for (let d = 2; d * d <= n; d++) if (n % d === 0) return false;
    return true;
  })
  .slice(0, 64);
const fraction = (number) => Math.floor((number - Math.floor(number)) * 2 ** 32) | 0;
const ROUNDS = PRIMES.map((prime) => fraction(Math.cbrt(prime)));
const BEGIN = PRIMES.slice(0, 8).map((prime) => fraction(Math.sqrt(prime)));
const turned = (word, by) => (word >>> by) | (word << (32 - by));

/** sha256 of a text in UTF-8, as eight 32-bit words. */
export function sha256(text) {
  const bytes = new TextEncoder().encode(text),
    blocks = ((bytes.length + 8) >> 6) + 1,
    padded = new Uint8Array(64 * blocks);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer),
    w = new Int32Array(64),
    hash = Int32Array.from(BEGIN);
  view.setUint32(padded.length - 4, 8 * bytes.length);
  for (let at = 0; at < padded.length; at += 64) {
    for (let i = 0; i < 16; i++) w[i] = view.getInt32(at + 4 * i);
    for (let i = 16; i < 64; i++) {
      const a = w[i - 15],
        b = w[i - 2];
      w[i] = w[i - 16] + (turned(a, 7) ^ turned(a, 18) ^ (a >>> 3)) + w[i - 7] + (turned(b, 17) ^ turned(b, 19) ^ (b >>> 10));
    }
    let [a, b, c, d, e, f, g, h] = hash;
    for (let i = 0; i < 64; i++) {
      const one = (h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + ROUNDS[i] + w[i]) | 0;
      const two = ((turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((word, i) => {
      hash[i] += word;
    });
  }
  return Uint32Array.from(hash);
}

/** The Mersenne Twister from a 32-bit seed: each call gives 32 bits. */
function twister(seed) {
  const state = new Int32Array(624);
  state[0] = seed;
  for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
  let at = 624;
  return () => {
    if (at === 624) {
      for (let i = 0; i < 624; i++) {
        const y = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
        state[i] = state[(i + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
      }
      at = 0;
    }
    let y = state[at++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  };
}

/** `count` numbers from N(0, 1), a multiple of 16, from a name and a seed alone: `explain.compute.normal`. */
export function named(name, count, seed = 0) {
  const next = twister(sha256(`${seed}:${name}`)[1]); // torch takes the low half of the 64-bit seed
  const uniform = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    const high = next();
    uniform[i] = ((high & 0x1fffff) * 2 ** 32 + next()) * 2 ** -53;
  }
  for (let block = 0; block < count; block += 16) {
    for (let j = block; j < block + 8; j++) {
      const radius = Math.sqrt(-2 * Math.log1p(-uniform[j])),
        angle = 2 * Math.PI * uniform[j + 8];
      uniform[j] = radius * Math.cos(angle);
      uniform[j + 8] = radius * Math.sin(angle);
    }
  }
  return uniform;
}
