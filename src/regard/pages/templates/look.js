"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = id => document.getElementById(id);
  const bytes = text => {
    const raw = atob(text), out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out;
  };
  const floats = text => new Float32Array(bytes(text).buffer);
  const COLOURS = bytes(data.colours);
  // The same as pixels; the scale's bytes go red, green, blue, alpha in memory on every machine.
  const RGBA = new Uint8Array(1024).fill(255);
  for (let i = 0; i < 256; i++) RGBA.set(COLOURS.subarray(3 * i, 3 * i + 3), 4 * i);
  const PIXELS = new Uint32Array(RGBA.buffer);

  // A stored matrix: a byte q of row r stands for tops[r] (q / 255)².
  const SHARE = Float32Array.from({ length: 256 }, (_, q) => (q / 255) ** 2);
  const matrix = stored => ({ ...stored, values: bytes(stored.values), tops: floats(stored.tops) });
  const layers = data.layers.map(matrix);
  const rollouts = data.rollout.map(matrix);

  const state = { view: data.view, layer: data.layer, head: data.head, class: 0,
    at: [data.at[0], data.at[1]] };  // at: (y, x) as shares of the model's input

  const cellOf = grid => state.at.map((share, axis) =>
    Math.min(grid[axis] - 1, Math.max(0, Math.floor(share * grid[axis]))));

  /** Adds row `row` of head `head`, times `factor`, to `out`. */
  function addRow(m, head, row, factor, out) {
    const n = out.length, start = (head * n + row) * n, top = m.tops[head * n + row] * factor;
    for (let j = 0; j < n; j++) out[j] += top * SHARE[m.values[start + j]];
  }

  const memory = new Map();
  function received(index, head) {
    const key = `${index} ${head}`, m = layers[index], n = m.grid[0] * m.grid[1];
    if (!memory.has(key)) {
      const out = new Float32Array(n);
      for (let i = 0; i < n; i++) addRow(m, head, i, 1 / n, out);
      memory.set(key, out);
    }
    return memory.get(key);
  }

  /** The map of one view: its values and grid. head -1 is the mean over heads. */
  function mapOf(view, index, head) {
    if (view === "relevance") {
      const found = data.relevance[state.class];
      return { grid: found.grid, values: floats(found.values) };
    }
    const m = view === "rollout" ? rollouts[index] : layers[index];
    const n = m.grid[0] * m.grid[1], out = new Float32Array(n);
    const [row, column] = cellOf(m.grid), token = row * m.grid[1] + column;
    const heads = view === "rollout" ? [0]
      : head >= 0 ? [head] : Array.from({ length: m.heads }, (_, g) => g);
    for (const g of heads) {
      if (view === "received") received(index, g).forEach((v, j) => { out[j] += v / heads.length; });
      else addRow(m, g, token, 1 / heads.length, out);
    }
    return { grid: m.grid, values: out };
  }

  const sumOf = values => values.reduce((a, b) => a + b, 0);
  function peakOf(values) {
    let best = 0;
    for (let j = 1; j < values.length; j++) if (values[j] > values[best]) best = j;
    return best;
  }

  /** Writes a map's colours into `pixels`, rows of `stride`, from `start`; returns its maximum. */
  function colour(pixels, stride, start, map) {
    const [h, w] = map.grid, top = Math.max(map.values[peakOf(map.values)], 1e-30);
    for (let y = 0; y < h; y++) {
      for (let x = 0; x < w; x++) {
        pixels[start + y * stride + x] = PIXELS[Math.round(255 * map.values[y * w + x] / top)];
      }
    }
    return top;
  }

  /** Gives a canvas a size, which clears it, or clears it: a new size takes new memory. */
  function blank(canvas, w, h) {
    const context = canvas.getContext("2d");
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
    } else {
      context.setTransform(1, 0, 0, 1, 0, 0);
      context.clearRect(0, 0, w, h);
    }
    return context;
  }

  function paint(canvas, map) {
    const [h, w] = map.grid, image = new ImageData(w, h);
    const greatest = colour(new Uint32Array(image.data.buffer), w, 0, map);
    blank(canvas, w, h).putImageData(image, 0, 0);
    return greatest;
  }

  // Where the model's input lies on the picture, in percent of the picture.
  const [top, left, bottom, right] = data.box;
  const onPicture = (element, y0, x0, y1, x1) => {
    const percent = (value, whole) => `${100 * value / whole}%`;
    const [H, W] = data.picture;
    element.style.top = percent(top + y0 * (bottom - top), H);
    element.style.left = percent(left + x0 * (right - left), W);
    element.style.height = percent((y1 - y0) * (bottom - top), H);
    element.style.width = percent((x1 - x0) * (right - left), W);
  };

  function shadeUnseen(stage) {
    const [H, W] = data.picture;
    const parts = [[0, 0, top, W], [bottom, 0, H, W], [top, 0, bottom, left], [top, right, bottom, W]];
    for (const [y0, x0, y1, x1] of parts) {
      if (y1 - y0 <= 0 || x1 - x0 <= 0) continue;
      const shade = document.createElement("div");
      shade.className = "unseen";
      shade.style.top = `${100 * y0 / H}%`;
      shade.style.left = `${100 * x0 / W}%`;
      shade.style.height = `${100 * (y1 - y0) / H}%`;
      shade.style.width = `${100 * (x1 - x0) / W}%`;
      stage.append(shade);
    }
  }

  const pointed = () => state.view === "from" || state.view === "rollout";
  const share = value => `${(100 * value).toPrecision(3)} %`;
  const word = cell => `row ${cell[0] + 1}, column ${cell[1] + 1}`;

  function say(map, greatest) {
    const [h, w] = map.grid, at = cellOf(map.grid), peak = peakOf(map.values);
    const place = [Math.floor(peak / w), peak % w];
    const heads = state.head < 0 ? "mean over heads" : `head ${state.head + 1}`;
    const total = sumOf(map.values);
    const layer = layers[state.layer].name;
    let text = "";
    if (state.view === "from") {
      text = `From ${word(at)} of ${h} × ${w}: ${layer}, ${heads}, looks most at ${word(place)} ` +
        `(${share(map.values[peak])} of its attention; evenly spread, each place would have ` +
        `${share(total / (h * w))}).`;
      if (total < 0.995) text += ` ${share(1 - total)} goes to tokens that are no place.`;
    } else if (state.view === "received") {
      text = `${layer}, ${heads}: ${word(place)} of ${h} × ${w} receives most, ` +
        `${share(map.values[peak])} of all attention.`;
    } else if (state.view === "rollout") {
      text = `Of what stands at ${word(at)} of ${h} × ${w} after ${layer}, most comes from ` +
        `${word(place)} (${share(map.values[peak])}), by rollout.`;
    } else {
      const found = data.relevance[state.class];
      text = `The evidence for “${found.name}” is strongest at ${word(place)} of ${h} × ${w}.`;
    }
    $("said").textContent = text;
    $("most").textContent = state.view === "relevance" ? "most" : share(greatest);
    const stage = $("overlay").dataset;
    stage.at = at;
    stage.peak = place;
  }

  const small = document.createElement("canvas");
  let tiles = [];
  function drawSheet() {
    const canvas = $("sheet"), bare = state.view === "relevance";
    $("many").hidden = bare;
    if (bare) return;
    const most = state.view === "rollout" ? 0 : Math.max(...layers.map(m => m.heads));
    const rows = layers.length, ratio = window.devicePixelRatio || 1;
    const label = 34, gap = 3, columns = 1 + most;
    const width = $("many").clientWidth;
    const slope = (bottom - top) / (right - left), room = (width - label) / columns - gap;
    const tile = Math.max(10, Math.floor(Math.min(72, 72 / slope, room)));
    const tall = Math.round(tile * slope);
    const w = label + columns * (tile + gap), h = 20 + rows * (tall + gap);
    const context = blank(canvas, Math.floor(w * ratio), Math.floor(h * ratio));
    canvas.style.width = `${w}px`;
    const style = getComputedStyle(document.body);
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillStyle = style.getPropertyValue("--soft");
    for (let c = 0; c < columns; c++) {
      const name = c ? c : most ? "mean" : "";
      context.fillText(name, label + c * (tile + gap) + tile / 2, 13);
    }
    // All maps go through one image: a canvas that is written between two readings is copied.
    const sources = state.view === "rollout" ? rollouts : layers;
    const [ch, cw] = [0, 1].map(axis => Math.max(...sources.map(m => m.grid[axis])));
    const atlas = new ImageData(columns * cw, rows * ch);
    const pixels = new Uint32Array(atlas.data.buffer);
    tiles = [];
    for (let r = 0; r < rows; r++) {
      for (let c = 0; c <= (most ? layers[r].heads : 0); c++) {
        colour(pixels, atlas.width, r * ch * atlas.width + c * cw, mapOf(state.view, r, c - 1));
      }
    }
    blank(small, atlas.width, atlas.height).putImageData(atlas, 0, 0);
    for (let r = 0; r < rows; r++) {
      const [gh, gw] = sources[r].grid;
      const y = 20 + r * (tall + gap);
      context.fillStyle = style.getPropertyValue("--soft");
      context.fillText(r + 1, label / 2, y + tall / 2 + 4);
      for (let c = 0; c <= (most ? layers[r].heads : 0); c++) {
        const x = label + c * (tile + gap);
        context.drawImage(small, c * cw, r * ch, gw, gh, x, y, tile, tall);
        tiles.push({ x, y, w: tile, h: tall, layer: r, head: c - 1 });
        if (r === state.layer && (!most || c - 1 === state.head)) {
          context.strokeStyle = style.getPropertyValue("--two");
          context.lineWidth = 3;
          context.strokeRect(x - 0.5, y - 0.5, tile + 1, tall + 1);
        }
      }
    }
  }

  function draw() {
    const started = performance.now();
    const map = mapOf(state.view, state.layer, state.head);
    const greatest = paint($("heat"), map);
    for (const place of document.querySelectorAll(".place")) {
      place.hidden = !pointed();
      const grid = state.view === "rollout" ? rollouts[state.layer].grid : layers[state.layer].grid;
      const [row, column] = cellOf(grid);
      onPicture(place, row / grid[0], column / grid[1], (row + 1) / grid[0], (column + 1) / grid[1]);
    }
    $("title").textContent = $("view").selectedOptions[0].text;
    $("layer-choice").hidden = state.view === "relevance";
    $("head-choice").hidden = state.view === "relevance" || state.view === "rollout";
    $("class-choice").hidden = state.view !== "relevance";
    $("layer").value = state.layer;
    $("head").value = state.head;
    say(map, greatest);
    drawSheet();
    document.body.dataset.drawn = (performance.now() - started).toFixed(1);
  }

  let waiting = false;
  const redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  };

  function fillHeads() {
    const heads = layers[state.layer].heads;
    state.head = Math.min(state.head, heads - 1);
    $("head").replaceChildren(...[-1, ...Array(heads).keys()].map(g =>
      new Option(g < 0 ? "mean over heads" : `head ${g + 1}`, g)));
  }

  function point(event) {
    const rect = event.currentTarget.getBoundingClientRect(), [H, W] = data.picture;
    const y = (event.clientY - rect.top) / rect.height * H;
    const x = (event.clientX - rect.left) / rect.width * W;
    const at = [(y - top) / (bottom - top), (x - left) / (right - left)];
    if (at.some(v => v < 0 || v >= 1)) {
      $("said").textContent = "The model did not see this part of the picture.";
      return;
    }
    state.at = at;
    redraw();
  }

  const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  function press(event) {
    const step = ARROWS[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const grid = (state.view === "rollout" ? rollouts : layers)[state.layer].grid;
    const cell = cellOf(grid);
    state.at = cell.map((v, axis) =>
      (Math.min(grid[axis] - 1, Math.max(0, v + step[axis])) + 0.5) / grid[axis]);
    redraw();
  }

  for (const stage of document.querySelectorAll(".stage")) {
    const place = document.createElement("div");
    place.className = "place";
    shadeUnseen(stage);
    stage.append(place);
    stage.addEventListener("pointermove", point);
    stage.addEventListener("pointerdown", point);
    stage.addEventListener("keydown", press);
  }
  const original = document.querySelector(".stage img");
  $("again").src = original.src;
  $("again").className = original.className;
  onPicture($("heat"), 0, 0, 1, 1);

  const views = [["from", "attention from a place"], ["received", "attention received"]];
  if (rollouts.length) views.push(["rollout", "rollout from a place"]);
  if (data.relevance.length) views.push(["relevance", "relevance for a class"]);
  $("view").replaceChildren(...views.map(([value, text]) => new Option(text, value)));
  $("view").value = state.view;
  $("layer").replaceChildren(...layers.map((m, i) => new Option(`${i + 1}: ${m.name}`, i)));
  $("class").replaceChildren(...data.relevance.map((r, i) => new Option(r.name, i)));
  fillHeads();
  $("view").addEventListener("change", e => { state.view = e.target.value; redraw(); });
  $("layer").addEventListener("change", e => { state.layer = +e.target.value; fillHeads(); redraw(); });
  $("head").addEventListener("change", e => { state.head = +e.target.value; redraw(); });
  $("class").addEventListener("change", e => { state.class = +e.target.value; redraw(); });
  $("opacity").addEventListener("input", e => { $("heat").style.opacity = e.target.value / 100; });
  $("heat").style.opacity = $("opacity").value / 100;
  $("sheet").addEventListener("click", event => {
    const { offsetX: x, offsetY: y } = event;
    const hit = tiles.find(t => x >= t.x && x < t.x + t.w && y >= t.y && y < t.y + t.h);
    if (!hit) return;
    state.layer = hit.layer;
    fillHeads();
    if (state.view !== "rollout") state.head = hit.head;
    redraw();
  });
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const bar = $("scale"), context = bar.getContext("2d"), ramp = context.createImageData(256, 1);
  ramp.data.set(RGBA);
  context.putImageData(ramp, 0, 0);
  draw();
})();
