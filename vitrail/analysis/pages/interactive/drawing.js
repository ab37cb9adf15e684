// Colours, mini maps, and the picture under a map.

const DIFFERENCE = [[8, 48, 107], [66, 146, 198], [247, 247, 247], [241, 133, 49], [127, 39, 4]];  // blue to orange

/** Return 256 colours between the given ones, which are at equal distances. */
function makeColours(stops) {
  return Array.from({ length: 256 }, (_, number) => {
    const place = (number / 255) * (stops.length - 1), first = Math.min(Math.floor(place), stops.length - 2);
    const mixed = stops[first].map((level, channel) => level + (place - first) * (stops[first + 1][channel] - level));
    return [...mixed.map(Math.round), 255];
  });
}

const pickColour = (colours, fraction) => colours[Math.max(0, Math.min(255, Math.round(255 * fraction)))];
const cssColour = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;

/** Draw a map into a canvas that has one pixel per patch. */
function drawMap(canvas, values, scale, colours) {
  const context = canvas.getContext("2d"), pixels = context.createImageData(canvas.width, canvas.height);
  values.forEach((value, place) => pixels.data.set(pickColour(colours, scale(value)), 4 * place));
  context.putImageData(pixels, 0, 0);
}

/** Return the smallest rectangle around the picture and the patches, which can extend beyond the picture. */
function frameOf({ picture: [width, height], area: [left, top, across, down] }) {
  const x = Math.min(0, left), y = Math.min(0, top);
  return { x, y, width: Math.max(width, left + across) - x, height: Math.max(height, top + down) - y };
}

/** Return the edges of the columns and rows of patches, in pixels of a drawing. */
function edgesOf({ grid: [rows, columns], area: [left, top, across, down] }, frame, zoom) {
  const edges = (count, start, length) =>
    Array.from({ length: count + 1 }, (_, number) => Math.round((start + (number * length) / count) * zoom));
  return [edges(columns, left - frame.x, across), edges(rows, top - frame.y, down)];
}

/** Draw the picture with a map over it. `marks` are selections with their looks. */
function drawPicture(canvas, about, picture, { values, scale, colours, strength, marks }) {
  const frame = frameOf(about), zoom = canvas.width / frame.width, context = canvas.getContext("2d");
  const [across, down] = edgesOf(about, frame, zoom);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = zoom < 2;
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, -frame.x * zoom, -frame.y * zoom, about.picture[0] * zoom, about.picture[1] * zoom);
  context.globalAlpha = strength;
  values.forEach((value, place) => {
    const row = Math.floor(place / about.grid[1]), column = place % about.grid[1];
    context.fillStyle = cssColour(pickColour(colours, scale(value)));
    context.fillRect(across[column], down[row], across[column + 1] - across[column], down[row + 1] - down[row]);
  });
  context.globalAlpha = 1;
  const unit = Math.max(1, canvas.width / 480);
  for (const { selection: { top, left, bottom, right }, dashes } of marks) {
    if (top === undefined) continue;
    const x = across[left] - unit, y = down[top] - unit;  // the line lies around the patches, which can be tiny
    const box = [x, y, across[right + 1] + unit - x, down[bottom + 1] + unit - y];
    for (const [colour, width] of [["#000", 5], ["#fff", 2.5]]) {
      context.setLineDash(colour === "#fff" ? dashes.map((dash) => dash * unit) : []);
      context.strokeStyle = colour;
      context.lineWidth = width * unit;
      context.strokeRect(...box);
    }
  }
  context.setLineDash([]);
}
