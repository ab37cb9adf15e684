// Selections: a token before the patches ({token}), or a rectangle of patches ({top, left, bottom, right}).

const sameSelection = (one, other) => (one && formatSelection(one)) === (other && formatSelection(other));

/** Return the rectangle between two patches, each [row, column]. */
function rectangle([row, column], [otherRow, otherColumn] = [row, column]) {
  return { top: Math.min(row, otherRow), left: Math.min(column, otherColumn),
    bottom: Math.max(row, otherRow), right: Math.max(column, otherColumn) };
}

/** Return the text of a selection in the address of the page. */
function formatSelection({ token, top, left, bottom, right }) {
  if (token !== undefined) return `t${token}`;
  return top === bottom && left === right ? `${top}.${left}` : `${top}.${left}-${bottom}.${right}`;
}

/** Return the selection of a text, or null if it is none of this page. */
function parseSelection(text, about) {
  const [rows, columns] = about.grid;
  const token = /^t(\d+)$/.exec(text);
  if (token) return +token[1] < about.prefix.length ? { token: +token[1] } : null;
  const found = /^(\d+)\.(\d+)(?:-(\d+)\.(\d+))?$/.exec(text);
  if (!found) return null;
  const [top, left, bottom, right] = [found[1], found[2], found[3] ?? found[1], found[4] ?? found[2]].map(Number);
  const fits = Math.max(top, bottom) < rows && Math.max(left, right) < columns;
  return fits ? rectangle([top, left], [bottom, right]) : null;
}

/** Return the numbers of the tokens of a selection. */
function tokensOf({ token, top, left, bottom, right }, about) {
  if (token !== undefined) return [token];
  const chosen = [];
  for (let row = top; row <= bottom; row++) {
    for (let column = left; column <= right; column++) {
      chosen.push(about.prefix.length + row * about.grid[1] + column);
    }
  }
  return chosen;
}

/** Return the name of a selection. */
function nameOf(selection, about) {
  const { token, top, left, bottom, right } = selection;
  if (token !== undefined) return about.prefix[token];
  const count = (bottom - top + 1) * (right - left + 1);
  if (count === 1) return `row ${top}, column ${left}`;
  if (count === about.grid[0] * about.grid[1]) return "all patches (mean)";
  return `rows ${top} to ${bottom}, columns ${left} to ${right} (mean of ${count})`;
}

/** Return the name of a token by its number. */
function tokenName(number, about) {
  const patch = number - about.prefix.length, columns = about.grid[1];
  return patch < 0 ? about.prefix[number] : `row ${Math.floor(patch / columns)}, column ${patch % columns}`;
}
