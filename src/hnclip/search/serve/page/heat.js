/* Where the model sees a word: cosines of patches, as colours over the picture. */

const RESOLUTION = 320; // pixels of the longer side; the page scales them
// Unlit to lit. What is not meant is dimmed, so that the picture itself stays to be seen where it matters.
const COLOURS = [
  [0, 14, 18, 44, 150],
  [0.35, 66, 28, 120, 150],
  [0.62, 200, 58, 88, 128],
  [0.82, 250, 150, 50, 112],
  [1, 255, 226, 110, 128],
];

/**
 * The cosines between which each word's colours run: from its middle patch to its best one; the lower half is dark. All
 * words of a description have at least half of the widest range, so that one that is seen everywhere and nowhere stays
 * dark instead of being blown up.
 */
export function ranges(words) {
  const spans = words.map(({ patches }) => [middle(patches), Math.max(...patches)]);
  const widest = Math.max(...spans.map(([low, high]) => high - low), 1e-6);
  return spans.map(([low, high]) => ({ low, high: low + Math.max(high - low, widest / 2) }));
}

const middle = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];

/** Paint patches into a canvas; its size follows the shape that it is shown in. */
export function paintHeat(canvas, patches, rows, columns, { low, high }, shape) {
  const scale = RESOLUTION / Math.max(shape.width, shape.height);
  canvas.width = Math.max(1, Math.round(shape.width * scale));
  canvas.height = Math.max(1, Math.round(shape.height * scale));
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  const across = places(canvas.width, columns), down = places(canvas.height, rows);
  const line = (row) => across.map((place) => blend(place, (column) => patches[row * columns + column]));
  const lines = Array.from({ length: rows }, (_, row) => line(row));
  let at = 0;
  for (const place of down) {
    for (let x = 0; x < canvas.width; x += 1) {
      const value = blend(place, (row) => lines[row][x]);
      image.data.set(STEPS[step((value - low) / (high - low))], at);
      at += 4;
    }
  }
  context.putImageData(image, 0, 0);
}

/** The colours from low to high, for a legend. */
export function paintScale(canvas) {
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x += 1) {
    const [red, green, blue] = STEPS[step(x / (canvas.width - 1))];
    context.fillStyle = `rgb(${red} ${green} ${blue})`;
    context.fillRect(x, 0, 1, canvas.height);
  }
}

/** For each pixel the four patches around it and their shares (Catmull and Rom): a patch's middle has its own value. */
function places(pixels, patches) {
  const inside = (patch) => Math.min(patches - 1, Math.max(0, patch));
  return Array.from({ length: pixels }, (_, pixel) => {
    const place = ((pixel + 0.5) / pixels) * patches - 0.5, from = Math.floor(place), t = place - from;
    const shares = [t * (t * (2 - t) - 1), t * t * (3 * t - 5) + 2, t * (t * (4 - 3 * t) + 1), t * t * (t - 1)];
    return shares.map((share, at) => [inside(from - 1 + at), share / 2]);
  });
}

const blend = (place, valueAt) => place.reduce((sum, [at, share]) => sum + share * valueAt(at), 0);
const mix = (from, to, share) => from + (to - from) * share;
const step = (value) => Math.round(255 * Math.min(1, Math.max(0, value)));
const STEPS = Array.from({ length: 256 }, (_, number) => {
  const value = number / 255, next = Math.max(1, COLOURS.findIndex(([stop]) => stop >= value));
  const [start, ...from] = COLOURS[next - 1], [stop, ...to] = COLOURS[next];
  return from.map((part, at) => mix(part, to[at], (value - start) / (stop - start)));
});
