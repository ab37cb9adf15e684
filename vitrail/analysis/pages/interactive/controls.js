// The mouse, touch and keys that change the state, and the parts of the page.

// ---- changes of the state

function change(values, isSpoken = true) {
  Object.assign(state, values);
  schedule(isSpoken);
}

function release(slot) {
  if (slot === "a") [state.a, state.b] = [state.b, null];
  else state.b = null;
  pointer.isComparing = state.b !== null;
  schedule(true);
}

/** Pin a selection, or release it if it is pinned. The second one is compared with the first one. */
function pin(selection, isSecond = pointer.isComparing) {
  const slot = isSecond && state.a ? "b" : "a";
  if (sameSelection(state[slot], selection)) return release(slot);
  if (slot === "b") pointer.isComparing = true;
  change({ [slot]: selection });
}

const stepped = (value, step, count) => Math.max(0, Math.min(count - 1, value + step));

/** Show another layer and head, which are so many away. */
function changeHead(layers, heads) {
  const layer = stepped(state.layer, layers, about.layers.length);
  change({ layer, head: stepped(state.head, heads, about.heads.length), view: "attention" });
}

/** Move the cursor on the picture. With `isExtending`, the rectangle from where it was grows. */
function moveCursor([down, across], isExtending) {
  if (isExtending) pointer.anchor ??= pointer.cursor;
  else pointer.anchor = null;
  pointer.cursor = [stepped(pointer.cursor[0], down, rowCount), stepped(pointer.cursor[1], across, columnCount)];
  pointer.at = rectangle(pointer.cursor, pointer.anchor ?? pointer.cursor);
  schedule(true);
}

/** Return the patch under an event as [row, column]. Places outside of all patches count as the nearest one. */
function patchAt(event) {
  const box = canvas.getBoundingClientRect(), frame = frameOf(about), [left, top, across, down] = about.area;
  const x = ((event.clientX - box.left) / box.width) * frame.width + frame.x;
  const y = ((event.clientY - box.top) / box.height) * frame.height + frame.y;
  const place = (position, begin, length, count) =>
    stepped(Math.floor(((position - begin) / length) * count), 0, count);
  return [place(y, top, down, rowCount), place(x, left, across, columnCount)];
}

// ---- mouse and touch

stage.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  pointer.anchor = pointer.cursor = patchAt(event);
  pointer.drag = rectangle(pointer.cursor);
  if (event.pointerType !== "touch") stage.setPointerCapture(event.pointerId);
  schedule();
});
stage.addEventListener("pointermove", (event) => {
  pointer.cursor = patchAt(event);
  pointer.at = rectangle(pointer.cursor);
  if (pointer.drag) pointer.drag = rectangle(pointer.anchor, pointer.cursor);
  schedule();
});
stage.addEventListener("pointerup", (event) => {
  if (!pointer.drag) return;
  const selection = pointer.drag;
  pointer.drag = pointer.anchor = null;
  if (event.pointerType === "touch") pointer.at = null;
  pin(selection, pointer.isComparing || event.shiftKey);
});
for (const kind of ["pointerleave", "pointercancel", "blur"]) {
  stage.addEventListener(kind, () => {
    if (kind === "pointercancel") pointer.drag = null;
    pointer.at = null;
    schedule();
  });
}

stage.addEventListener("focus", () => {
  if (!stage.matches(":focus-visible")) return;
  pointer.at = rectangle(pointer.cursor);
  schedule(true);
});

// ---- keys

const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

stage.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (moves[event.key]) moveCursor(moves[event.key], event.shiftKey);
  else if (event.key === "Enter" || event.key === " ") pinCursor(event.shiftKey);
  else return;
  event.preventDefault();
});

function pinCursor(isSecond) {
  pin(pointed() ?? rectangle(pointer.cursor), pointer.isComparing || isSecond);
}

const keys = {
  "[": () => changeHead(-1, 0),
  "]": () => changeHead(1, 0),
  ",": () => changeHead(0, -1),
  ".": () => changeHead(0, 1),
  c: () => change({ [pointer.isComparing && state.a ? "b" : "a"]: start }),
  p: () => pinCursor(false),
  P: () => pinCursor(true),
  d: () => change({ direction: state.direction === "to" ? "from" : "to" }),
  Escape: () => { pointer.isComparing = false; change({ a: null, b: null }); },
};

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, select, dialog"), isAllowed = byId("has-keys").checked;
  if (event.altKey || event.ctrlKey || event.metaKey || isTyping || !isAllowed) return;
  if (event.key === "?") byId("keys").showModal();
  else if (weights && Object.hasOwn(keys, event.key)) keys[event.key]();
});

/** Move the focus inside a group of buttons by arrow keys. `move` returns the next button. */
function rove(group, move) {
  group.addEventListener("keydown", (event) => {
    if (!moves[event.key]) return;
    event.preventDefault();
    move(event.target, moves[event.key]).focus();
  });
}

// ---- the parts of the page

function makeMatrix() {
  const table = byId("matrix"), head = make("tr");
  head.append(make("td"), ...about.heads.map((number) => make("th", number, { scope: "col" })));
  table.append(head);
  about.layers.forEach((number, layer) => {
    const line = make("tr");
    line.append(make("th", number, { scope: "row" }));
    about.heads.forEach((name, place) => {
      const title = `Layer ${number}, head ${name}`, button = make("button", undefined, { "aria-label": title, title });
      const small = make("canvas", undefined, { width: columnCount, height: rowCount });
      button.append(small);
      button.addEventListener("click", () => change({ layer, head: place, view: "attention" }));
      const cell = make("td");
      cell.append(button);
      line.append(cell);
      cells.push({ button, canvas: small });
    });
    table.append(line);
  });
  rove(table, (_, [down, across]) => {
    changeHead(down, across);
    return cells[chosenMap()].button;
  });
}

function makeTokens() {
  const choices = [...about.prefix.map((name, token) => [name, { token }]), ["all patches", everyPatch]];
  for (const [name, selection] of choices) {
    const button = make("button"), swatch = make("span", undefined, { class: "swatch", "aria-hidden": "true" });
    button.append(swatch, name);
    button.tabIndex = tokenButtons.length ? -1 : 0;
    button.addEventListener("click", (event) => pin(selection, pointer.isComparing || event.shiftKey));
    button.addEventListener("focus", () => {
      for (const one of tokenButtons) one.button.tabIndex = one.button === button ? 0 : -1;
    });
    for (const kind of ["pointerenter", "focus", "pointerleave", "blur"]) {
      button.addEventListener(kind, () => {
        pointer.at = kind === "pointerenter" || kind === "focus" ? selection : null;
        schedule(kind === "focus");
      });
    }
    tokenButtons.push({ button, swatch, selection });
  }
  byId("tokens").append(make("span", "Query"), ...tokenButtons.map(({ button }) => button));
  rove(byId("tokens"), (button, [down, across]) => {
    const place = tokenButtons.findIndex((one) => one.button === button);
    return tokenButtons[stepped(place, down + across, tokenButtons.length)].button;
  });
}

function makeControls() {
  const views = { attention: "attention of a head", rollout: "attention rollout", relevance: "relevance" };
  if (!about.layers.length) delete views.attention;
  if (!about.relevance.length) delete views.relevance;
  byId("view").append(...Object.entries(views).map(([value, text]) => make("option", text, { value })));
  byId("class").append(...about.relevance.map(({ label }, value) => make("option", label, { value })));
  for (const name of ["view", "direction", "scale", "form", "class", "strength"]) {
    const isNumber = name === "class" || name === "strength";
    byId(name).addEventListener("input", () => change({ [name]: isNumber ? +byId(name).value : byId(name).value }));
  }
  byId("compare").addEventListener("click", () => {
    pointer.isComparing = !pointer.isComparing;
    change({ b: null }, false);
  });
  byId("start-name").textContent = about.hasClassToken
    ? "pin the class token" : "pin all patches, because this model has no class token";
  byId("help").addEventListener("click", () => byId("keys").showModal());
  byId("close").addEventListener("click", () => byId("keys").close());
  byId("table").addEventListener("toggle", () => schedule());
  for (const part of document.querySelectorAll(".attention")) part.hidden = !weights;
  makeExports();
}

function makeExports() {
  const name = () => `${about.name}-${shown.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-")}`;
  byId("png").addEventListener("click", () => savePng(about, picture, shown, name()));
  byId("svg").addEventListener("click", () => {
    const text = makeSvg(about, picture.src, shown, `${about.name}: ${shown.title}`);
    save(new Blob([text], { type: "image/svg+xml" }), name() + ".svg");
  });
  byId("csv").addEventListener("click", () => {
    const [query = "", less = ""] = shown.chosen.map((one) => nameOf(one, about));
    const description = { map: shown.title, direction: shown.tokens ? state.direction : "", query, less };
    const text = makeCsv(about, description, shown.tokens ?? shown.values, shown.tokens ? 0 : prefixCount);
    save(new Blob([text], { type: "text/csv" }), name() + ".csv");
  });
}

/** Give the picture as many pixels as the screen shows. */
function fitStage() {
  const frame = frameOf(about), width = Math.round(stage.clientWidth * (window.devicePixelRatio || 1));
  if (!width || canvas.width === width) return;
  canvas.width = width;
  canvas.height = Math.round((width * frame.height) / frame.width);
  schedule();
}

async function begin() {
  try {
    if (about.layers.length) weights = await readWeights(about, byId("weights").textContent);
    picture.src = byId("picture").textContent;
    await picture.decode();
    const [, , across, down] = about.area, frame = frameOf(about);
    const sizes = { patches: across / down, frame: frame.width / frame.height, heads: about.heads.length };
    for (const [name, value] of Object.entries(sizes)) document.body.style.setProperty("--" + name, value.toFixed(4));
    makeMatrix();
    makeTokens();
    makeControls();
    readHash();
    byId("explorer").hidden = false;
    window.addEventListener("hashchange", () => { readHash(); schedule(); });
    new ResizeObserver(fitStage).observe(stage);
    fitStage();
  } catch (error) {
    byId("failure").hidden = false;
    byId("failure").textContent = `The maps cannot be shown: ${error.message}. Use a browser of 2023 or later.`;
  }
}

begin();
