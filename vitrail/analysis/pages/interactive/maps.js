// Attention weights of all layers and heads, as packing.py writes them, and the maps that are read from them.

class Weights {
  /** `raw` holds the largest weight of each row, and then the codes as differences from the row above. */
  constructor(about, raw) {
    this.tokens = about.prefix.length + about.grid[0] * about.grid[1];
    this.count = about.layers.length * about.heads.length;
    const rows = this.count * this.tokens, size = this.tokens ** 2;
    this.maxima = new Float32Array(raw, 0, rows);
    this.codes = new Uint8Array(raw, 4 * rows);
    for (let start = 0; start < this.codes.length; start += size) {
      for (let place = start + this.tokens; place < start + size; place++) {
        this.codes[place] += this.codes[place - this.tokens];  // an 8-bit array adds modulo 256
      }
    }
    const levels = 2 ** about.bits - 1;
    this.fractions = Float64Array.from({ length: levels + 1 }, (_, code) => (code / levels) ** 2);
  }

  /** Return the attention of one token to another in a map, which is a number from 0 to `count` - 1. */
  weight(map, query, key) {
    const row = map * this.tokens + query;
    return this.maxima[row] * this.fractions[this.codes[row * this.tokens + key]];
  }

  /** Return, for each token, the mean attention that it gets from some tokens, or that it pays to them. */
  values(map, chosen, isReversed) {
    const found = new Float64Array(this.tokens);
    for (const one of chosen) {
      for (let other = 0; other < this.tokens; other++) {
        found[other] += isReversed ? this.weight(map, other, one) : this.weight(map, one, other);
      }
    }
    return found.map((sum) => sum / chosen.length);
  }
}

/** Return the weights of the page, decompressed. */
async function readWeights(about, text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Weights(about, await new Response(stream).arrayBuffer());
}

/** Return the smallest and largest value of some maps. */
function boundsOf(maps) {
  let low = Infinity, high = -Infinity;
  for (const map of maps) {
    for (const value of map) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}

/** Return a function from values to fractions of a colour scale. A difference has 0 in the middle of the scale. */
function makeScale([low, high], isLog, isDifference) {
  if (isDifference) {
    const most = Math.max(-low, high) || 1, bend = 1000;
    return (value) => {
      const part = Math.min(1, Math.abs(value) / most);
      const size = isLog ? Math.log1p(bend * part) / Math.log1p(bend) : part;
      return 0.5 + 0.5 * Math.sign(value) * size;
    };
  }
  if (isLog && high > 0) {
    const start = Math.max(low, high / 10000), span = Math.log(high / start) || 1;
    return (value) => Math.log(Math.max(value, start) / start) / span;
  }
  const span = high - low || 1;
  return (value) => (value - low) / span;
}

/** Return the rank of a value among others. The largest one has rank 1. */
function rankOf(value, values) {
  return 1 + values.reduce((count, other) => count + (other > value), 0);
}
