// The state of the page, also in its address, and what the page shows of it.

const byId = (id) => document.getElementById(id);
const about = JSON.parse(byId("about").textContent);
const [rowCount, columnCount] = about.grid, prefixCount = about.prefix.length;
const everyPatch = { top: 0, left: 0, bottom: rowCount - 1, right: columnCount - 1 };
const start = about.hasClassToken ? { token: 0 } : everyPatch;
const sequential = makeColours(about.colours), diverging = makeColours(DIFFERENCE);
const stage = byId("stage"), canvas = stage.querySelector("canvas"), picture = new Image();
const cells = [], tokenButtons = [];
const usual = { layer: about.layers.length - 1, head: 0, a: null, b: null, direction: "to", scale: "own",
  form: "linear", view: about.layers.length ? "attention" : "rollout", class: 0, strength: 65 };
const state = { ...usual };
const pointer = { at: null, cursor: [rowCount >> 1, columnCount >> 1], anchor: null, drag: null, isComparing: false };
let weights = null, shown = null, computed = {}, isWaiting = false, isSaying = false, hashTimer = 0;

/** Return a number as text of four digits. */
function formatNumber(value) {
  const size = Math.abs(value);
  return size && (size < 1e-4 || size >= 1e5) ? value.toExponential(3) : String(+value.toPrecision(4));
}

function make(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// ---- the state in the address

function readHash() {
  Object.assign(state, usual);
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    const place = { layer: about.layers, head: about.heads }[name]?.indexOf(+text) ?? -1;
    if (place >= 0) state[name] = place;
    if (name === "a" || name === "b") state[name] = parseSelection(text, about);
    if (name === "class" && about.relevance[+text]) state.class = +text;
    if (name === "strength" && +text >= 0 && +text <= 100) state.strength = +text;
    const choice = ["direction", "scale", "form", "view"].includes(name) && byId(name);
    if (choice && [...choice.options].some((option) => option.value === text)) state[name] = text;
  }
  if (!state.a) state.b = null;
  pointer.isComparing = state.b !== null;
}

function writeHash() {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    const numbers = { layer: about.layers, head: about.heads }[name];
    const isSelection = name === "a" || name === "b";
    if (value !== usual[name]) found.set(name, numbers ? numbers[value] : isSelection ? formatSelection(value) : value);
  }
  const text = found.size ? "#" + found : location.pathname + location.search;
  if (location.hash.slice(1) !== String(found)) history.replaceState(null, "", text);
}

// ---- what is shown

/** Return the selection under the pointer or at the cursor, or null. */
const pointed = () => pointer.drag ?? pointer.at;

const chosenMap = () => state.layer * about.heads.length + state.head;

/** Return the one or two selections whose attention is shown. */
function queries() {
  const isSecond = pointer.isComparing && state.a;
  const first = (isSecond ? null : pointer.drag) ?? state.a ?? pointed() ?? start;
  const second = isSecond ? pointer.drag ?? state.b ?? pointed() : null;
  return second && !sameSelection(first, second) ? [first, second] : [first];
}

/** Return the values of all tokens in each map. They are kept until the selections or the direction change. */
function attentionMaps(chosen) {
  const isReversed = state.direction === "from", key = [state.direction, ...chosen.map(formatSelection)].join(" ");
  if (computed.key === key) return computed.maps;
  const [first, second] = chosen.map((one) => tokensOf(one, about));
  const maps = Array.from({ length: weights.count }, (_, map) => {
    const values = weights.values(map, first, isReversed);
    if (!second) return values;
    const others = weights.values(map, second, isReversed);
    return values.map((value, token) => value - others[token]);
  });
  computed = { key, maps };
  return maps;
}

/** Return what the picture shows: a map with its scale and its name. */
function pictureMap(maps, scaleOf, chosen) {
  if (state.view === "attention") {
    const map = chosenMap(), title = `Layer ${about.layers[state.layer]}, head ${about.heads[state.head]}`;
    return { values: maps[map].subarray(prefixCount), tokens: maps[map], ...scaleOf(map), title, chosen };
  }
  const { label, values } = state.view === "rollout" ? { values: about.rollout } : about.relevance[state.class];
  const bounds = boundsOf([values]), scale = makeScale(bounds, state.form === "log");
  const title = label === undefined ? "Attention rollout" : `Relevance for ${label}`;
  return { values: Float64Array.from(values), bounds, scale, colours: sequential, title, chosen: [] };
}

/** Return the text about the patch or token under the pointer, and about the largest value of the map. */
function readout({ values, tokens, title, chosen }) {
  const all = tokens ?? values, first = tokens ? 0 : prefixCount, at = pointed(), texts = [title];
  const number = at && tokensOf(at, about).length === 1 ? tokensOf(at, about)[0] : -1;
  const target = number < first ? "" : tokenName(number, about);
  const names = chosen.map((one) => nameOf(one, about)).map((name) => {
    if (!target) return `${state.direction === "to" ? "of" : "to"} ${name}`;
    return state.direction === "to" ? `of ${name} to ${target}` : `of ${target} to ${name}`;
  });
  if (names.length) texts.push("Attention " + names.join(" less that "));
  else if (target) texts.push(target);
  if (target) {
    const value = all[number - first];
    const rank = number < prefixCount ? "" : `, rank ${rankOf(value, values)} of ${values.length}`;
    texts.push(`${texts.pop()}: ${formatNumber(value)}${rank}`);
  }
  const high = boundsOf([values])[1], place = prefixCount + values.indexOf(high);
  return `${texts.join(". ")}. Largest: ${tokenName(place, about)}, ${formatNumber(high)}`;
}

function render() {
  isWaiting = false;
  const chosen = queries(), isDifference = chosen.length === 2, isLog = state.form === "log";
  const colours = isDifference ? diverging : sequential;
  let maps = [], scaleOf = null;
  if (weights) {
    maps = attentionMaps(chosen);
    const patches = maps.map((map) => map.subarray(prefixCount));
    const common = boundsOf(patches), commonScale = makeScale(common, isLog, isDifference);
    scaleOf = (map) => {
      if (state.scale === "all") return { bounds: common, scale: commonScale, colours };
      const bounds = boundsOf([patches[map]]);
      return { bounds, scale: makeScale(bounds, isLog, isDifference), colours };
    };
    cells.forEach(({ button, canvas: small }, map) => {
      drawMap(small, patches[map], scaleOf(map).scale, colours);
      const isChosen = map === chosenMap();
      button.setAttribute("aria-pressed", isChosen);
      button.tabIndex = isChosen ? 0 : -1;
    });
  }
  shown = pictureMap(maps, scaleOf, chosen);
  shown.strength = state.strength / 100;
  shown.marks = markedSelections(shown.chosen);
  drawPicture(canvas, about, picture, shown);
  showLegend();
  showControls(chosen);
  byId("readout").textContent = readout(shown);
  stage.setAttribute("aria-label", `Picture, ${rowCount} rows and ${columnCount} columns of patches`);
  if (isSaying) byId("said").textContent = readout(shown);
  isSaying = false;
  if (byId("table").open) showTable();
  clearTimeout(hashTimer);
  hashTimer = setTimeout(writeHash, 200);
}

/** Draw once before the next frame. With `isSpoken`, screen readers say the text about the selection. */
function schedule(isSpoken = false) {
  isSaying ||= isSpoken;
  if (!isWaiting) requestAnimationFrame(render);
  isWaiting = true;
}

function markedSelections(chosen) {
  const marks = chosen.map((selection, number) => ({ selection, dashes: number ? [6, 4] : [] }));
  const at = pointed();
  if (at && !chosen.some((one) => sameSelection(one, at))) marks.push({ selection: at, dashes: [2, 3] });
  return marks.filter(({ selection }) => !sameSelection(selection, everyPatch));
}

function showLegend() {
  const { bounds: [low, high], colours } = shown, isDifference = colours === diverging;
  const most = Math.max(-low, high), context = byId("legend").querySelector("canvas").getContext("2d");
  byId("low").textContent = formatNumber(isDifference ? -most : low);
  byId("high").textContent = formatNumber(isDifference ? most : high) + (state.form === "log" ? " (logarithmic)" : "");
  colours.forEach((colour, place) => {
    context.fillStyle = cssColour(colour);
    context.fillRect(place, 0, 1, 1);
  });
}

function showControls(chosen) {
  for (const name of ["view", "class", "direction", "scale", "form", "strength"]) byId(name).value = state[name];
  byId("class-choice").hidden = state.view !== "relevance";
  for (const { button, swatch, selection } of tokenButtons) {
    button.setAttribute("aria-pressed", chosen.some((one) => sameSelection(one, selection)));
    swatch.hidden = !shown.tokens || selection.token === undefined;
    if (!swatch.hidden) {
      const value = shown.tokens[selection.token];
      swatch.style.background = cssColour(pickColour(shown.colours, shown.scale(value)));
      button.title = formatNumber(value);
    }
  }
  showPins();
}

function showPins() {
  const pins = ["a", "b"].filter((slot) => state[slot]).map((slot) => [slot, nameOf(state[slot], about)]);
  const text = JSON.stringify([pins, pointer.isComparing]);
  if (byId("pins").dataset.shown === text) return;
  byId("pins").dataset.shown = text;
  const buttons = pins.map(([slot, name]) => {
    const title = `${slot.toUpperCase()}: ${name}`;
    const button = make("button", title + " ×", { "aria-label": "Release " + title });
    button.addEventListener("click", () => { release(slot); stage.focus(); });
    return button;
  });
  byId("pins").replaceChildren(make("span", pins.length ? "Pinned" : "Nothing is pinned"), ...buttons);
  byId("compare").disabled = !state.a;
  byId("compare").setAttribute("aria-pressed", pointer.isComparing);
}

function showTable() {
  const table = make("table"), head = make("tr"), { values, tokens } = shown;
  head.append(make("td"), ...Array.from({ length: columnCount }, (_, column) => make("th", column, { scope: "col" })));
  table.append(make("caption", byId("readout").textContent), head);
  for (let row = 0; row < rowCount; row++) {
    const line = make("tr"), some = values.subarray(row * columnCount, (row + 1) * columnCount);
    line.append(make("th", row, { scope: "row" }), ...[...some].map((value) => make("td", formatNumber(value))));
    table.append(line);
  }
  about.prefix.forEach((name, number) => {
    if (!tokens) return;
    const line = make("tr");
    line.append(make("th", name, { scope: "row" }), make("td", formatNumber(tokens[number]), { colspan: columnCount }));
    table.append(line);
  });
  byId("table").querySelector("div").replaceChildren(table);
}
