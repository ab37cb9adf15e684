// Files that the reader can keep: PNG, SVG and CSV.

/** Offer a file for download. */
function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Save the picture under its map, at least 512 pixels long. */
function savePng(about, picture, shown, name) {
  const canvas = document.createElement("canvas"), frame = frameOf(about);
  const zoom = Math.max(1, Math.ceil(512 / Math.max(frame.width, frame.height)));
  canvas.width = Math.round(frame.width * zoom);
  canvas.height = Math.round(frame.height * zoom);
  drawPicture(canvas, about, picture, shown);
  canvas.toBlob((blob) => save(blob, name + ".png"), "image/png");
}

/** Return the picture under its map as SVG, in which each patch has its value as a tooltip. */
function makeSvg(about, address, { values, scale, colours, strength, marks }, title) {
  const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
  const frame = frameOf(about), [left, top, across, down] = about.area, [rows, columns] = about.grid;
  const width = across / columns, height = down / rows;
  const box = (row, column, wide = 1, high = 1) =>
    `x="${left + column * width}" y="${top + row * height}" width="${wide * width}" height="${high * height}"`;
  const parts = [...values].map((value, place) => {
    const row = Math.floor(place / columns), column = place % columns;
    const colour = cssColour(pickColour(colours, scale(value)));
    const text = `row ${row}, column ${column}: ${formatNumber(value)}`;
    return `<rect ${box(row, column)} fill="${colour}" fill-opacity="${strength}"><title>${text}</title></rect>`;
  });
  const unit = Math.max(frame.width, frame.height) / 480;
  for (const { selection, dashes } of marks) {
    if (selection.top === undefined) continue;
    const { top: row, left: column, bottom, right } = selection;
    const place = box(row, column, right - column + 1, bottom - row + 1);
    const look = `stroke-width="${2.5 * unit}" stroke-dasharray="${dashes.map((dash) => dash * unit).join(" ")}"`;
    parts.push(`<rect ${place} fill="none" stroke="#000" stroke-width="${5 * unit}"/>`,
      `<rect ${place} fill="none" stroke="#fff" ${look}/>`);
  }
  const view = `${frame.x} ${frame.y} ${frame.width} ${frame.height}`;
  const size = `width="${frame.width}" height="${frame.height}"`;
  parts.unshift(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="${view}" ${size}>`,
    `<title>${escaped(title)}</title>`,
    `<image href="${address}" width="${about.picture[0]}" height="${about.picture[1]}"/>`);
  return parts.join("\n") + "\n</svg>\n";
}

/** Return a map as CSV: its first columns say which map it is, and the others name each token. */
function makeCsv(about, description, values, first) {
  const cell = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  const lines = [[...Object.keys(description), "token", "row", "column", "value"]];
  values.forEach((value, place) => {
    const patch = first + place - about.prefix.length, columns = about.grid[1];
    const where = patch < 0 ? [about.prefix[first + place], "", ""]
      : ["patch", Math.floor(patch / columns), patch % columns];
    lines.push([...Object.values(description), ...where, value]);
  });
  return lines.map((line) => line.map(cell).join(",")).join("\n") + "\n";
}
