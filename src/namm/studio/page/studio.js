// The studio's page: asks the server, colours what it answers, and keeps nothing.
"use strict";

const token = location.hash.slice(1);
const $ = (selector, root = document) => root.querySelector(selector);
const SVG = "http://www.w3.org/2000/svg";
let run; // what the server said of the run

// Elements and numbers

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children.filter((child) => child !== null));
  return element;
}

function draw(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

// 0.0123, 1234, 4.68·10⁻⁸, as everywhere in namm
function format(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0) return `−${format(-value, digits)}`;
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  if (power >= -3 && power < 4) return Number(value.toPrecision(digits)).toFixed(Math.max(0, digits - 1 - power));
  return `${mantissa}·10${[...String(Number(power))].map((letter) => SUPERSCRIPTS[letter]).join("")}`;
}

// Asking: one question after the other

let queue = Promise.resolve();

function ask(name, body = {}) {
  const answer = queue.then(() => request(name, body));
  queue = answer.catch(() => {});
  return answer;
}

async function request(name, body) {
  const watch = setInterval(showProgress, 300);
  try {
    return await send(`/api/${name}`, { method: "POST", body: JSON.stringify(body) });
  } finally {
    clearInterval(watch);
    $("#progress").hidden = true;
    watched += 1;
  }
}

async function send(path, options = {}) {
  const headers = { "Content-Type": "application/json", "X-Namm-Token": token };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The studio does not answer any more: start `namm studio` again.");
  }
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error), { status: response.status });
  return answer;
}

let watched = 0; // questions that have been answered

async function showProgress() {
  const asked = watched;
  const state = await send("/api/state").catch(() => ({ doing: "" }));
  if (asked !== watched || !state.doing) return;
  const bar = $("#progress progress");
  $("#progress").hidden = false;
  $("#stop").hidden = !state.total;
  $("#doing").textContent = state.total ? `${state.doing}: ${state.done} of ${state.total} steps` : `${state.doing} …`;
  if (state.total) [bar.max, bar.value] = [state.total, state.done];
  else bar.removeAttribute("value");
}

function complain(error) {
  $("#message p").textContent = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  $("#message").hidden = false;
}

async function attempt(action) {
  try {
    const result = await action();
    $("#message").hidden = true;
    return result;
  } catch (error) {
    complain(error);
    return null;
  }
}

// Pictures

function values(packed) {
  if (!packed.values) {
    const bytes = Uint8Array.from(atob(packed.data), (letter) => letter.charCodeAt(0));
    packed.values = new Float32Array(bytes.buffer);
  }
  return packed.values;
}

function colour(value, scale) {
  const shades = scale.signed ? run.colours.deviations : run.colours.values;
  const place = (value - scale.low) / (scale.high - scale.low);
  return shades[Math.max(0, Math.min(shades.length - 1, Math.round(place * (shades.length - 1))))];
}

function paint(canvas, packed, k, scale, shade = (rgb) => rgb) {
  const [, height, width] = packed.shape, all = values(packed), start = k * height * width;
  Object.assign(canvas, { width, height });
  const image = new ImageData(width, height);
  for (let pixel = 0; pixel < height * width; pixel++) {
    const value = all[start + pixel];
    if (Number.isNaN(value)) continue; // transparent
    image.data.set([...shade(colour(value, scale), pixel), 255], 4 * pixel);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.onpointermove = (event) => {
    const [row, column] = pixelAt(canvas, event);
    const value = all[start + row * width + column];
    canvas.title = Number.isNaN(value) ? "not observed" : `row ${row}, column ${column}: ${format(value)}`;
  };
  return canvas;
}

function pixelAt(canvas, event) {
  const box = canvas.getBoundingClientRect();
  const inside = (place, size) => Math.max(0, Math.min(size - 1, Math.floor(place * size)));
  return [
    inside((event.clientY - box.top) / box.height, canvas.height),
    inside((event.clientX - box.left) / box.width, canvas.width),
  ];
}

function picture(packed, k, scale, label) {
  const canvas = paint(make("canvas"), packed, k, scale);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  return canvas;
}

function card(title, canvas, lines = [], pair = []) {
  const small = pair.map(([name, each]) => make("figure", {}, make("figcaption", { textContent: name }), each));
  return make(
    "figure",
    { className: "card" },
    title ? make("figcaption", { textContent: title }) : null,
    canvas,
    small.length ? make("div", { className: "pair" }, ...small) : null,
    ...lines.map((line) => make("p", { className: "value" }, ...line)),
  );
}

const strong = (text) => make("b", { textContent: text });

function colourBar(scale, label) {
  const canvas = make("canvas", { width: 128, height: 1 }), image = new ImageData(128, 1);
  for (let x = 0; x < 128; x++) {
    image.data.set([...colour(scale.low + ((scale.high - scale.low) * x) / 127, scale), 255], 4 * x);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return make("span", {}, `${label} ${format(scale.low, 2)}`, canvas, format(scale.high, 2));
}

function bars(residuals, others = []) {
  const all = [colourBar(run.view, run.view.label), ...others.map(([label, scale]) => colourBar(scale, label))];
  if (residuals) all.push(colourBar(residuals, "residual"));
  return make("div", { className: "bars" }, ...all);
}

// Charts with a logarithmic axis of ℓ

function decades(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const step = Math.max(1, Math.ceil((last - first) / 6));
  return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, k) => 10 ** (first + k * step));
}

function power(value) {
  const exponent = Math.round(Math.log10(value));
  return exponent >= -2 && exponent <= 2 ? String(Number(value.toPrecision(1))) : format(value, 1).replace("1·", "");
}

const charts = new Map(); // by element, what draws it at its width

function chart(height, render) {
  const svg = draw("svg", { height, role: "img" }), box = make("div", { className: "chart" }, svg);
  const redraw = () => {
    const width = svg.clientWidth;
    if (!width) return;
    svg.replaceChildren();
    render(svg, width);
  };
  charts.set(box, redraw);
  requestAnimationFrame(redrawCharts);
  return box;
}

function redrawCharts() {
  for (const [box, redraw] of charts) box.isConnected ? redraw() : charts.delete(box);
}

addEventListener("resize", redrawCharts);

// A row of dots per method, ℓ from left to right; hollow ones are polished
function strip(rows) {
  const shown = rows.flatMap((row) => [...row.distances, ...(row.polished || [])]).concat(run.floor);
  const positive = shown.filter((value) => value > 0);
  const [low, high] = [Math.min(...positive) / 1.6, Math.max(...positive) * 1.6], lane = 26;
  return chart(rows.length * lane + 46, (svg, width) => {
    const left = 70, right = width - 12, bottom = rows.length * lane + 22;
    const x = (value) => left + (Math.log(Math.max(value, low) / low) / Math.log(high / low)) * (right - left);
    svg.setAttribute("aria-label", "ℓ of each sample");
    for (const tick of decades(low, high).filter((each) => each >= low && each <= high)) {
      svg.append(draw("line", { class: "axis", x1: x(tick), x2: x(tick), y1: 8, y2: bottom }));
      svg.append(draw("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, power(tick)));
    }
    svg.append(draw("text", { x: 0, y: bottom + 16 }, "ℓ"));
    const data = { class: "data", x1: x(run.floor), x2: x(run.floor), y1: 8, y2: bottom, "stroke-dasharray": "4 3" };
    svg.append(draw("line", data), draw("text", { class: "data", x: x(run.floor) + 5, y: bottom - 4 }, "data"));
    rows.forEach((row, k) => {
      const y = 20 + k * lane;
      svg.append(draw("text", { class: row.kind, x: 0, y: y + 4 }, row.kind));
      row.distances.forEach((value, each) => {
        const after = row.polished && row.polished[each];
        const dot = { class: row.kind, cx: x(value), cy: y, r: 5, "fill-opacity": after === undefined ? 0.75 : 0.25, "stroke-opacity": 0.4 };
        svg.append(draw("circle", dot));
        if (after !== undefined && after !== null) svg.append(draw("circle", { class: `${row.kind} hollow`, cx: x(after), cy: y, r: 5 }));
      });
    });
  });
}

// ℓ against σ, with and without the map
function sigmaChart(curve, sigma) {
  const all = [...curve.returned, ...curve.untouched].filter((value) => value > 0);
  const [low, high] = [Math.min(...all) / 1.5, Math.max(...all) * 1.5];
  return chart(220, (svg, width) => {
    const left = 46, right = width - 10, top = 26, bottom = 184, end = curve.sigmas[curve.sigmas.length - 1];
    const x = (value) => left + (value / end) * (right - left);
    const y = (value) => bottom - (Math.log(Math.max(value, low) / low) / Math.log(high / low)) * (bottom - top);
    svg.setAttribute("aria-label", "ℓ against σ, with and without the map");
    for (const tick of decades(low, high).filter((each) => each >= low && each <= high)) {
      svg.append(draw("line", { class: "axis", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
      svg.append(draw("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, power(tick)));
    }
    for (let k = 0; k <= run.limits.reach; k++) {
      if (width < 520 && k > 1 && k < run.limits.reach) continue; // no room
      const label = k === 0 ? "0" : k === 1 ? "σ_max" : `${k} σ_max`;
      svg.append(draw("text", { x: x(k * run.sigma_max), y: bottom + 18, "text-anchor": k === run.limits.reach ? "end" : "middle" }, label));
    }
    const edge = { class: "ours", x1: x(run.sigma_max), x2: x(run.sigma_max), y1: top, y2: bottom, "stroke-dasharray": "2 4" };
    svg.append(draw("line", edge), draw("line", { class: "data", x1: x(sigma), x2: x(sigma), y1: top, y2: bottom }));
    const kinds = [["baseline", "untouched", "ℓ of x with the same errors"], ["ours", "returned", "ℓ of f(g(x) + σz)"]];
    kinds.forEach(([kind, name, label], k) => {
      const points = curve[name].map((value, each) => [x(curve.sigmas[each]), y(value)]);
      svg.append(draw("path", { class: kind, d: `M${points.map((point) => point.join(" ")).join("L")}` }));
      svg.append(draw("text", { class: kind, x: left + (width > 520 ? k * 220 : 0), y: width > 520 ? 14 : 2 + k * 15 }, label));
    });
  });
}

// Polishing: the last answers by key, so that a switch turned back and forth asks once

const polishedBy = new Map(), KEPT = 16;

async function polished(shown) {
  if (!shown) return null;
  if (polishedBy.has(shown.key)) return polishedBy.get(shown.key);
  const answer = await ask("polish", { key: shown.key });
  polishedBy.set(shown.key, answer);
  if (polishedBy.size > KEPT) polishedBy.delete(polishedBy.keys().next().value);
  return answer;
}

function distanceLine(shown, k, after) {
  const now = after ? format(after.images.distances[k]) : format(shown.distances[k]);
  return after ? ["ℓ ", `${format(after.before[k])} → `, strong(now)] : ["ℓ ", strong(now)];
}

function movedLine(after, k) {
  return after ? [[`moved ${format(after.moved[k], 2)} · ${after.reached[k] ? "on the rule" : "not on the rule yet"}`]] : [];
}

function notesOf(...results) {
  const notes = new Set(results.filter(Boolean).flatMap((each) => each.notes));
  return [...notes].map((text) => make("p", { className: "note", textContent: text }));
}

// The switch of a panel shows what `render` makes of the polished answers; new images turn it off, and an answer about
// older ones comes too late.
function polishSwitch(panel, keys, render) {
  const toggle = $("[name=polish]", panel), mine = (panel.shown = {});
  toggle.checked = false;
  toggle.disabled = false;
  toggle.onchange = () =>
    attempt(async () => {
      const wanted = toggle.checked;
      toggle.disabled = true;
      try {
        const after = wanted ? await Promise.all(keys.map(polished)) : [];
        if (panel.shown === mine) render(...after);
      } catch (error) {
        if (panel.shown !== mine) return;
        toggle.checked = false;
        throw error;
      } finally {
        if (panel.shown === mine) toggle.disabled = false;
      }
    });
}

// Samples

async function drawSamples(panel) {
  const form = $("form", panel);
  const answer = await ask("draw", { seed: number(form.seed), n: number(form.n), steps: number(form.steps) });
  const groups = [["ours", answer.ours, "x̂ = f(ŷ)"], ["baseline", answer.baseline, "the plain model"]];
  const render = (ours, baseline) => {
    const after = { ours, baseline };
    const there = groups.filter(([, shown]) => shown);
    const rows = there.map(([kind, shown]) => {
      return { kind, distances: shown.distances, polished: after[kind] && after[kind].images.distances };
    });
    $(".results", panel).replaceChildren(
      strip(rows),
      ...there.map(([kind, shown, title]) => sampleGroup(kind, title, answer, shown, after[kind])),
      ...notesOf(answer.ours, answer.baseline, ours, baseline),
      bars(answer.residual_scale, [["mirror space", run.mirror_view]]),
    );
  };
  render();
  polishSwitch(panel, groups.map(([, shown]) => shown), render);
}

function sampleGroup(kind, title, answer, shown, after) {
  const images = after ? after.images : shown;
  const cards = shown.distances.map((_, k) => {
    const pair = [];
    if (kind === "ours") pair.push(["ŷ", picture(answer.mirror, k, run.mirror_view, `mirror sample ${k}`)]);
    if (images.residuals && answer.residual_scale) pair.push(["residual", picture(images.residuals, k, answer.residual_scale, `residual of sample ${k}`)]);
    const lines = [distanceLine(shown, k, after), ...movedLine(after, k)];
    return card("", picture(images.pictures, k, run.view, `sample ${k} of ${kind}`), lines, pair);
  });
  const mean = after ? `${format(shown.mean)} → ${format(after.images.mean)}` : format(shown.mean);
  return make(
    "div",
    { className: `group ${kind}` },
    make(
      "div",
      { className: "heading" },
      make("h2", {}, make("i", { className: "dot" }), `${kind}: ${title}`),
      make("span", { className: "mean", textContent: `mean ℓ ${mean}` }),
      make("span", { className: "soft", textContent: `total variation ${format(answer.variation[kind], 2)} of the data's` }),
    ),
    make("div", { className: "cards" }, ...cards),
  );
}

// Mirror space

const mirrorSpace = { running: false, again: false, asked: "", curve: null };

// The last position of the slider wins: while one answer is on its way, the next question waits.
async function moveImage(panel) {
  mirrorSpace.again = true;
  if (mirrorSpace.running) return;
  mirrorSpace.running = true;
  try {
    while (mirrorSpace.again) {
      mirrorSpace.again = false;
      await patiently(() => showMoved(panel));
    }
  } finally {
    mirrorSpace.running = false;
  }
}

async function showMoved(panel) {
  const form = $("form", panel);
  const about = { index: number(form.index), seed: number(form.seed), white: form.white.value === "white" };
  const sigma = number(form.sigma);
  if (JSON.stringify(about) !== mirrorSpace.asked) {
    mirrorSpace.curve = await ask("curve", about);
    mirrorSpace.asked = JSON.stringify(about);
  }
  const answer = await ask("perturb", { ...about, sigma }), { curve } = mirrorSpace;
  const render = (returned, untouched) => {
    $(".results", panel).replaceChildren(
      pathCards(answer, returned, untouched),
      sigmaChart(curve, sigma),
      ...notesOf(answer.original, answer.returned, answer.untouched, returned, untouched),
      bars(answer.residual_scale, [["mirror space", run.mirror_view]]),
    );
  };
  render();
  polishSwitch(panel, [answer.returned, answer.untouched], render);
}

function pathCards(answer, returned, untouched) {
  const shown = (name, after) => (after ? after.images : answer[name]);
  const image = (name, after, label) => picture(shown(name, after).pictures, 0, run.view, label);
  const residual = (name, after, title) => {
    const found = shown(name, after).residuals;
    return found && answer.residual_scale ? [card(title, picture(found, 0, answer.residual_scale, title))] : [];
  };
  const lines = (name, after) => [distanceLine(answer[name], 0, after), ...movedLine(after, 0)];
  const left = answer.untouched.distances[0] > 0 ? (100 * answer.returned.distances[0]) / answer.untouched.distances[0] : null;
  return make(
    "div",
    { className: "cards four" },
    card("x, held out", image("original", null, "x"), lines("original")),
    card("g(x)", picture(answer.mirror, 0, run.mirror_view, "g(x)"), [["in mirror space"]]),
    card("g(x) + σz", picture(answer.moved, 0, run.mirror_view, "g(x) + σz"), [["moved by errors"]]),
    card("f(g(x) + σz)", image("returned", returned, "f(g(x) + σz)"), lines("returned", returned)),
    card("x with the same errors", image("untouched", untouched, "x with the same errors"), lines("untouched", untouched)),
    ...residual("untouched", untouched, "its residual"),
    ...residual("returned", returned, "residual of f(g(x) + σz)"),
    make(
      "div",
      { className: "card text" },
      make("p", {}, "f leaves ", strong(left === null ? "–" : `${format(left, 2)} %`), " of the ℓ that the errors make."),
      make("p", { className: "soft" }, `Away from x, root mean square: ${format(answer.errors.returned, 2)} after f, ${format(answer.errors.untouched, 2)} with the errors alone.`),
    ),
  );
}

// Observations

const scene = { truth: null, mask: null, last: null };

async function showTruth(panel) {
  const { original } = await patiently(() => ask("perturb", { index: number($("form", panel).index), sigma: 0 }));
  scene.truth = original.pictures;
  paintScene();
}

function paintScene() {
  if (!scene.truth) return; // still on its way
  const canvas = $("#paint"), ground = getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number);
  const fade = (rgb, pixel) => (scene.mask[pixel] ? rgb : rgb.map((value, k) => Math.round(0.22 * value + 0.78 * ground[k])));
  paint(canvas, scene.truth, 0, run.view, fade);
  const seen = scene.mask.reduce((sum, value) => sum + value, 0);
  $("#observed").textContent = `${seen} of ${scene.mask.length} pixels are observed`;
}

function observe(choose) {
  const [, height, width] = run.shape;
  scene.mask = Array.from({ length: height * width }, (_, pixel) => (choose(pixel % width, width, pixel) ? 1 : 0));
  paintScene();
}

function observeColumns(panel) {
  const share = number($("form", panel).share) / 100;
  observe((column, width) => column < Math.max(1, Math.round(share * width)));
}

function observeRandom(panel) {
  const share = number($("form", panel).share) / 100, [, height, width] = run.shape;
  const order = Array.from({ length: height * width }, () => Math.random());
  const limit = [...order].sort((a, b) => a - b)[Math.max(1, Math.round(share * order.length)) - 1];
  observe((column, across, pixel) => order[pixel] <= limit);
}

function stroke(panel, event) {
  const form = $("form", panel), canvas = $("#paint"), [, height, width] = run.shape;
  const [row, column] = pixelAt(canvas, event), [fromRow, fromColumn] = scene.last || [row, column];
  const steps = Math.max(Math.abs(row - fromRow), Math.abs(column - fromColumn), 1);
  const size = number(form.brush), value = Number(form.mode.value), before = Math.floor((size - 1) / 2);
  for (let step = 0; step <= steps; step++) {
    const top = Math.round(fromRow + ((row - fromRow) * step) / steps) - before;
    const left = Math.round(fromColumn + ((column - fromColumn) * step) / steps) - before;
    for (let r = Math.max(0, top); r < Math.min(height, top + size); r++) {
      for (let c = Math.max(0, left); c < Math.min(width, left + size); c++) scene.mask[r * width + c] = value;
    }
  }
  scene.last = [row, column];
  paintScene();
}

async function drawPosterior(panel) {
  const form = $("form", panel);
  const answer = await ask("posterior", {
    index: number(form.index),
    mask: scene.mask.join(""),
    noise: number(form.noise),
    n: number(form.n),
    steps: number(form.steps),
    seed: number(form.seed),
  });
  const render = (after) => $(".found", panel).replaceChildren(...posteriorCards(answer, after), ...notesOf(answer.truth, answer.samples, after));
  render();
  polishSwitch(panel, [answer.samples], render);
  $(".found", panel).scrollIntoView({ block: "nearest" });
}

function posteriorCards(answer, after) {
  const shown = after ? after.images : answer.samples;
  const seen = picture(answer.observed, 0, run.view, "observed");
  seen.className = "nothing";
  const samples = answer.samples.distances.map((_, k) => {
    const residual = shown.residuals && answer.residual_scale && picture(shown.residuals, k, answer.residual_scale, `residual of posterior sample ${k}`);
    const chi2 = after ? after.chi2[k] : answer.chi2[k];
    const lines = [distanceLine(answer.samples, k, after), ["χ² ", strong(format(chi2))], ...movedLine(after, k)];
    return card("", picture(shown.pictures, k, run.view, `posterior sample ${k}`), lines, residual ? [["residual", residual]] : []);
  });
  const mean = after ? `${format(answer.samples.mean)} → ${format(after.images.mean)}` : format(answer.samples.mean);
  const failed = answer.failed ? [make("p", { className: "note", textContent: `${answer.failed} samples diverged and are left out: take more steps, or more noise.` })] : [];
  return [
    make(
      "div",
      { className: "cards four" },
      card("truth", picture(answer.truth.pictures, 0, run.view, "truth"), [distanceLine(answer.truth, 0), ["χ² ", strong(format(answer.truth_chi2))]]),
      card("observed, with noise", seen, [[`${answer.measured} values`]]),
      card("mean of the samples", picture(answer.mean, 0, run.view, "mean"), [[`error ${format(answer.error)}`]]),
      card("their spread", picture(answer.spread, 0, answer.spread_scale, "spread"), [[`up to ${format(answer.spread_scale.high, 2)}`]]),
    ),
    ...failed,
    make(
      "div",
      { className: "group ours" },
      make(
        "div",
        { className: "heading" },
        make("h2", {}, make("i", { className: "dot" }), "posterior samples: mirror DPS"),
        make("span", { className: "mean", textContent: `mean ℓ ${mean}` }),
        make("span", { className: "soft", textContent: "χ² per observed value: about 1 where sample and observation agree" }),
      ),
      make("div", { className: "cards" }, ...samples),
    ),
    bars(answer.residual_scale, [["spread", answer.spread_scale]]),
  ];
}

// The page

const number = (input) => Number(input.value);

function fill(form, name, properties) {
  Object.assign(form.elements[name], properties);
  form.elements[name].dispatchEvent(new Event("input"));
}

// What a slider stands at, beside its name
function sliders(root, texts = {}) {
  for (const input of root.querySelectorAll("input[type=range]")) {
    const output = $("output", input.closest("label"));
    const tell = () => (output.textContent = (texts[input.name] || String)(input.value));
    input.addEventListener("input", tell);
    tell();
  }
}

function describe() {
  document.title = `${run.name} · namm studio`;
  $("#name").textContent = run.name;
  const size = run.shape.join("×");
  const facts = [run.name === run.experiment ? "" : run.experiment, `preset ${run.preset}`, `images ${size}`, `rule ${run.rule}`, `data's mean ℓ ${format(run.floor)}`];
  if (run.stage_of_f) facts.push(run.stage_of_f === "finetune" ? "f finetuned" : "f not finetuned");
  $("#facts").textContent = facts.filter(Boolean).join(" · ");
  $("#notes").replaceChildren(...run.notes.map((text) => make("p", { className: "note", textContent: text })));
  if (run.verdict) {
    const chip = $("#verdict");
    Object.assign(chip, { hidden: false, textContent: run.verdict.outcome });
    chip.classList.add(run.verdict.outcome.replace(" ", "-"));
    chip.title = run.verdict.findings.map((finding) => `${finding.holds ? "✓" : "✗"} ${finding.sentence}`).join("\n");
  }
  if (run.measured.length) {
    const head = ["", "samples", "mean ℓ", "√MMD²", "total variation"].map((text) => make("th", { textContent: text }));
    const rows = run.measured.map((row) => {
      const cells = [row.n, format(row.distance), format(row.mmd), format(row.variation, 2)];
      return make("tr", {}, make("th", { textContent: row.name }), ...cells.map((text) => make("td", { textContent: text })));
    });
    $("#measured").replaceChildren(make("div", { className: "scroll" }, make("table", {}, make("tr", {}, ...head), ...rows)));
    $("#more").hidden = false;
  }
}

function select(name) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    $(`#${tab.getAttribute("aria-controls")}`).hidden = !chosen;
  }
  dispatchEvent(new Event("resize")); // charts know their width now
  const panel = $(`#${name}`);
  if (run.lacking[name] || panel.dataset.begun) return;
  panel.dataset.begun = true;
  const first = { perturb: moveImage, posterior: showTruth }[name];
  if (first) attempt(() => first(panel).catch((error) => {
    delete panel.dataset.begun;
    throw error;
  }));
}

function prepareTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  tabs.forEach((tab, k) => {
    tab.onclick = () => select(tab.getAttribute("aria-controls"));
    tab.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: tabs.length - 1 }[event.key];
      if (!step) return;
      const next = tabs[(k + step) % tabs.length];
      next.focus();
      next.click();
    };
  });
  for (const [name, reason] of Object.entries(run.lacking)) {
    if (reason) $(`#${name}`).replaceChildren(make("p", { className: "note", textContent: `This needs more of the run: ${reason}` }));
  }
  $(".tabs").hidden = false;
}

function prepareButtons(panel, changed) {
  const form = $("form", panel);
  form.onsubmit = (event) => event.preventDefault();
  const another = $(".another", panel), next = $(".next", panel);
  if (another) another.onclick = () => change(form.seed, (number(form.seed) + 1) % run.limits.seed);
  if (next) next.onclick = () => change(form.index, (number(form.index) + 1) % run.held_out);
  const change = (input, value) => {
    input.value = value;
    changed();
  };
}

// The button does one thing at a time
function mainButton(panel, action) {
  const button = $("button.main", panel);
  $("form", panel).onsubmit = async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    button.disabled = true;
    await attempt(action);
    button.disabled = false;
  };
}

function prepareDraw(panel) {
  const form = $("form", panel);
  prepareButtons(panel, () => form.requestSubmit());
  fill(form, "seed", { max: run.limits.seed, value: run.seed });
  fill(form, "n", { max: run.limits.samples });
  fill(form, "steps", { min: run.limits.steps[0], max: run.limits.steps[1], value: run.sampler.steps });
  sliders(form);
  mainButton(panel, () => drawSamples(panel));
  $(".results", panel).replaceChildren(make("p", { className: "empty", textContent: "Samples of the run's models appear here." }));
}

function preparePerturb(panel) {
  const form = $("form", panel), update = () => attempt(() => moveImage(panel));
  prepareButtons(panel, update);
  fill(form, "index", { max: run.held_out - 1 });
  fill(form, "seed", { max: run.limits.seed });
  const end = run.limits.reach * run.sigma_max;
  fill(form, "sigma", { max: end, step: end / 200, value: run.sigma_max });
  sliders(form, { sigma: (value) => `${format(Number(value), 2)} = ${format(value / run.sigma_max, 2)} σ_max` });
  const mark = $(".mark", panel);
  mark.textContent = "σ_max";
  mark.style.left = `${100 / run.limits.reach}%`;
  $(".kind", panel).hidden = !run.model_errors;
  for (const name of ["sigma", "index", "seed", "white"]) form.elements[name].addEventListener("input", update);
}

function preparePosterior(panel) {
  const form = $("form", panel), canvas = $("#paint");
  prepareButtons(panel, () => {});
  $(".next", panel).addEventListener("click", () => attempt(() => showTruth(panel)));
  form.index.addEventListener("change", () => attempt(() => showTruth(panel)));
  fill(form, "index", { max: run.held_out - 1 });
  fill(form, "seed", { max: run.limits.seed });
  fill(form, "noise", { value: run.posterior.noise });
  fill(form, "n", { max: run.limits.posterior });
  fill(form, "steps", { min: run.limits.steps[0], max: run.limits.steps[1], value: run.posterior.steps });
  sliders(form, { share: (value) => `${value} %`, brush: (value) => `${value} ${value === "1" ? "pixel" : "pixels"}` });
  $(".columns", panel).onclick = () => observeColumns(panel);
  $(".random", panel).onclick = () => observeRandom(panel);
  $(".clear", panel).onclick = () => observe(() => false);
  canvas.addEventListener("pointerdown", (event) => {
    if (!scene.truth) return;
    canvas.setPointerCapture(event.pointerId);
    scene.last = null;
    stroke(panel, event);
  });
  canvas.addEventListener("pointermove", (event) => event.buttons && scene.truth && stroke(panel, event));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintScene);
  observeColumns(panel);
  mainButton(panel, () => drawPosterior(panel));
  $(".found", panel).replaceChildren(make("p", { className: "empty", textContent: "Images behind these observations appear here." }));
}

async function begin() {
  $("#message button").onclick = () => ($("#message").hidden = true);
  $("#stop").onclick = () => send("/api/stop", { method: "POST" }).catch(complain);
  if (!token) throw new Error("The address lacks its token: open the one that `namm studio` printed, with what stands behind #.");
  run = await patiently(() => ask("about"));
  describe();
  const prepare = { draw: prepareDraw, perturb: preparePerturb, posterior: preparePosterior };
  for (const name of Object.keys(prepare)) if (!run.lacking[name]) prepare[name]($(`#${name}`));
  prepareTabs();
  select(Object.keys(run.lacking).find((name) => !run.lacking[name]) || "draw");
}

// Another window may be at work: wait until it is done
async function patiently(action) {
  for (;;) {
    try {
      return await action();
    } catch (error) {
      if (error.status !== 409) throw error;
      complain(error);
      await new Promise((done) => setTimeout(done, 1000));
      $("#message").hidden = true;
    }
  }
}

begin().catch(complain);
