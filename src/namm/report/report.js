"use strict";
// Lets a reader look closer: draws pictures from their values in place of the still ones, with values under the pointer,
// zoom, one method over another, states in time, and files to take away. Text goes to the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { coordinates, panels } = data;
  const file = document.querySelector("main").dataset.file;
  const groups = [];

  // Values

  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

  function half(bits) {
    const exponent = (bits >> 10) & 31, mantissa = (bits & 1023) / 1024;
    const size = exponent ? (1 + mantissa) * 2 ** (exponent - 15) : mantissa * 2 ** -14;
    return bits & 0x8000 ? -size : size;
  }

  const colours = Object.fromEntries(Object.entries(data.colours).map(([name, text]) => [name, bytes(text)]));
  const coloursOf = (block) => colours[block.signed ? "deviations" : "values"];

  class Picture {
    constructor({ height, width, scale, halves }) {
      Object.assign(this, { height, width, scale, halves, bitmaps: new Map() });
    }

    get values() {
      if (!this.decoded) {
        const packed = new DataView(bytes(this.halves).buffer);
        this.decoded = Float64Array.from({ length: this.height * this.width }, (_, k) =>
          half(packed.getUint16(2 * k, true)) * this.scale);
      }
      return this.decoded;
    }

    value(row, column) {
      return this.values[row * this.width + column];
    }

    // A canvas of one point to a pixel, in the colours of a block.
    bitmap(block) {
      if (!this.bitmaps.has(block)) {
        const canvas = make("canvas", { width: this.width, height: this.height });
        const context = canvas.getContext("2d"), image = context.createImageData(this.width, this.height);
        const [low, high] = block.ends, map = coloursOf(block);
        this.values.forEach((value, k) => {
          const shade = 3 * clamp(Math.floor(256 * (value - low) / (high - low)), 0, 255);
          image.data.set([map[shade], map[shade + 1], map[shade + 2], 255], 4 * k);
        });
        context.putImageData(image, 0, 0);
        this.bitmaps.set(block, canvas);
      }
      return this.bitmaps.get(block);
    }
  }

  const pictures = data.pictures.map((stored) => new Picture(stored));
  const picture = (row, k) => pictures[row.pictures[k]];
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  // As `format_number` writes it: 0.0123, 1234, 4.68·10⁻⁸.
  function number(value, digits = 3) {
    if (value === 0) return "0";
    const [mantissa, power] = value.toExponential(digits - 1).split("e");
    if (power >= -3 && power < 4) return Number(value.toPrecision(digits)).toFixed(Math.max(0, digits - 1 - power));
    return `${mantissa}·10${power.replace("+", "").replace("-", "⁻").replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit])}`;
  }

  const at = (axis, index) => axis.first + axis.step * index;
  const counts = (axis) => axis.first === 0 && axis.step === 1;
  const place = (axis, index) => (counts(axis) ? `${axis.name} ${index}` : `${axis.name} = ${number(at(axis, index))}`);

  // Coordinates of a pixel by name, of a picture that is so wide.
  function where(block, width, row, column) {
    const { rows, columns, state, time } = coordinates, [down, right] = block.offset;
    const inside = (index, shift) => (state ? index % state : index) + shift;
    const found = [[rows, inside(row, down)], [columns, inside(column, right)]];
    if (state && time) found.push([time, Math.floor(row / state) * (width / state) + Math.floor(column / state)]);
    return found;
  }

  // Elements

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  function button(text, label, act) {
    const found = make("button", { type: "button", textContent: text, onclick: act });
    found.setAttribute("aria-label", label);
    return found;
  }

  function slider(label, value, max, step, act) {
    const found = make("input", { type: "range", min: 0, max, step, value, oninput: () => act(Number(found.value)) });
    found.setAttribute("aria-label", label);
    return found;
  }

  // Buttons 1 … count, one of them pressed.
  function choice(label, count, act) {
    const found = Array.from({ length: count }, (_, k) => button(String(k + 1), `${label} ${k + 1}`, () => {
      found.forEach((other) => other.setAttribute("aria-pressed", String(other === found[k])));
      act(k);
    }));
    found[0]?.setAttribute("aria-pressed", "true");
    return count > 1 ? make("span", { className: "choice" }, label, ...found) : "";
  }

  function scale(block) {
    const canvas = make("canvas", { width: 256, height: 1, className: "scale" }), map = coloursOf(block);
    const context = canvas.getContext("2d"), image = context.createImageData(256, 1);
    for (let k = 0; k < 256; k += 1) image.data.set([...map.subarray(3 * k, 3 * k + 3), 255], 4 * k);
    context.putImageData(image, 0, 0);
    const [low, high] = block.ends.map((end) => make("span", { className: "text", textContent: number(end, 2) }));
    return make("div", { className: "legend" }, low, canvas, high,
      make("span", { className: "text", textContent: block.label }));
  }

  // Pictures

  // What the pictures of a figure share: how close they are looked at, where the pointer is, and the words beside it.
  class Group {
    constructor(figure) {
      Object.assign(this, { figure, zoom: 1, centre: [0.5, 0.5], cursor: null, viewers: [], redraws: [] });
      this.tip = make("output", { className: "tip", hidden: true });
      this.level = make("span", { textContent: "1×" });
      this.tools = make("span", { className: "tools" },
        button("−", "zoom out", () => this.zoomTo(this.zoom / 2)), this.level,
        button("+", "zoom in", () => this.zoomTo(this.zoom * 2)));
      figure.append(this.tip);
      groups.push(this);
    }

    zoomTo(zoom, centre = this.centre) {
      this.zoom = clamp(zoom, 1, 32);
      this.centre = centre.map((each) => clamp(each, 0.5 / this.zoom, 1 - 0.5 / this.zoom));
      this.level.textContent = `${number(this.zoom, 2).replace(/\.0$/, "")}×`;
      this.figure.classList.toggle("closer", this.zoom > 1);
      this.figure.dataset.zoom = this.zoom;
      this.draw();
    }

    point(viewer, row, column) {
      const shown = viewer.under(column), { block } = viewer, { name } = shown;
      const [down, right] = block.offset.map(Math.trunc);
      this.cursor = [row + down, column + right];
      const places = where(block, shown.picture.width, row, column).map(([axis, index]) => place(axis, index));
      this.tip.replaceChildren(
        make("b", { textContent: `${block.symbol} = ${number(shown.picture.value(row, column))}` }),
        make("span", { textContent: places.join(", ") }), make("span", { textContent: name }));
      this.tip.hidden = false;
      const frame = this.figure.getBoundingClientRect(), [x, y] = viewer.onScreen(row, column);
      const left = clamp(x - frame.left + 14, 0, frame.width - this.tip.offsetWidth);
      const above = y - frame.top - this.tip.offsetHeight - 14;
      this.tip.style.left = `${left}px`;
      this.tip.style.top = `${above < 0 ? y - frame.top + 20 : above}px`;
      this.draw();
    }

    leave() {
      this.cursor = null;
      this.tip.hidden = true;
      this.draw();
    }

    draw() {
      this.viewers.forEach((viewer) => viewer.draw());
      this.redraws.forEach((redraw) => redraw());
    }
  }

  // One picture on the screen, or two of which the second lies right of `group.wipe`.
  class Viewer {
    constructor(group, block, layers, source = null) {
      Object.assign(this, { group, block, layers, source });
      this.canvas = make("canvas", { className: "picture", tabIndex: 0 });
      this.canvas.setAttribute("role", "img");
      this.canvas.setAttribute("aria-label", layers.map((layer) => layer.name).join(", "));
      const [, , width, height] = this.whole;
      this.canvas.style.aspectRatio = `${width} / ${height}`;
      group.viewers.push(this);
      this.listen();
    }

    get whole() {
      return this.source ?? [0, 0, this.layers[0].picture.width, this.layers[0].picture.height];
    }

    get region() {
      const [left, top, width, height] = this.whole, { zoom, centre } = this.group;
      return [left + (centre[0] - 0.5 / zoom) * width, top + (centre[1] - 0.5 / zoom) * height, width / zoom,
        height / zoom];
    }

    fraction(event) {
      const box = this.canvas.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    }

    pixel(event) {
      const [left, top, width, height] = this.region, [x, y] = this.fraction(event), whole = this.whole;
      return [clamp(Math.floor(top + y * height), whole[1], whole[1] + whole[3] - 1),
        clamp(Math.floor(left + x * width), whole[0], whole[0] + whole[2] - 1)];
    }

    onScreen(row, column) {
      const [left, top, width, height] = this.region, box = this.canvas.getBoundingClientRect();
      return [box.left + ((column + 0.5 - left) / width) * box.width, box.top + ((row + 0.5 - top) / height) * box.height];
    }

    // The layer that is seen in a column.
    under(column) {
      const [left, , width] = this.region;
      return this.layers.length > 1 && (column + 0.5 - left) / width > this.group.wipe ? this.layers[1] : this.layers[0];
    }

    toFigure(event) {
      const [left, top, width, height] = this.region, [x, y] = this.fraction(event), whole = this.whole;
      return [(left + x * width - whole[0]) / whole[2], (top + y * height - whole[1]) / whole[3]];
    }

    listen() {
      const { canvas, group } = this;
      let moved = 0;
      canvas.onpointerdown = (event) => { moved = 0; group.point(this, ...this.pixel(event)); };
      canvas.onpointermove = (event) => {
        if (event.buttons && group.zoom > 1) {
          const box = canvas.getBoundingClientRect();
          moved += Math.abs(event.movementX) + Math.abs(event.movementY);
          group.zoomTo(group.zoom, [group.centre[0] - event.movementX / box.width / group.zoom,
            group.centre[1] - event.movementY / box.height / group.zoom]);
        }
        group.point(this, ...this.pixel(event));
      };
      canvas.onpointerleave = () => group.leave();
      canvas.onblur = () => group.leave();
      canvas.onclick = (event) => {
        if (event.pointerType !== "touch" && moved < 4) group.zoomTo(group.zoom * 2, this.toFigure(event));
      };
      canvas.addEventListener("wheel", (event) => {
        if (group.zoom === 1 && !event.ctrlKey) return; // the page is being scrolled
        event.preventDefault();
        const before = this.toFigure(event), ratio = 2 ** (-event.deltaY / 400);
        const zoom = clamp(group.zoom * ratio, 1, 32);
        // What is under the pointer stays there.
        group.zoomTo(zoom, group.centre.map((each, k) => before[k] + (each - before[k]) * (group.zoom / zoom)));
      }, { passive: false });
      canvas.onkeydown = (event) => this.key(event);
    }

    key(event) {
      const { group } = this, [left, top, width, height] = this.whole;
      const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      const zooms = { "+": group.zoom * 2, "-": group.zoom / 2, 0: 1, Escape: 1 };
      if (event.key in steps) {
        const shift = this.block.offset.map(Math.trunc);
        const start = group.cursor ? group.cursor.map((each, k) => each - shift[k]) : [top - 1, left - 1];
        group.point(this, clamp(start[0] + steps[event.key][0], top, top + height - 1),
          clamp(start[1] + steps[event.key][1], left, left + width - 1));
      } else if (event.key in zooms) {
        group.zoomTo(zooms[event.key]);
      } else {
        return;
      }
      event.preventDefault();
    }

    draw() {
      const { canvas, group, block } = this, context = fitted(canvas);
      if (!context) return;
      const [left, top, width, height] = this.region;
      context.imageSmoothingEnabled = width > canvas.width;
      this.layers.forEach((layer, k) => {
        context.save();
        if (k) {
          context.beginPath();
          context.rect(group.wipe * canvas.width, 0, canvas.width, canvas.height);
          context.clip();
        }
        context.drawImage(layer.picture.bitmap(block), left, top, width, height, 0, 0, canvas.width, canvas.height);
        context.restore();
      });
      if (this.layers.length > 1) {
        context.fillStyle = getComputedStyle(canvas).color;
        context.fillRect(group.wipe * canvas.width - 1, 0, 2, canvas.height);
      }
      if (group.cursor) this.mark(context, canvas.width / width, canvas.height / height);
    }

    mark(context, across, down) {
      const [left, top] = this.region, shift = this.block.offset.map(Math.trunc);
      const [row, column] = this.group.cursor.map((each, k) => each - shift[k]);
      const x = (column - left) * across, y = (row - top) * down, wide = Math.max(across, 7), high = Math.max(down, 7);
      const box = [x + across / 2 - wide / 2, y + down / 2 - high / 2, wide, high];
      for (const [width, colour] of [[4, "#000"], [2, "#fff"]]) {
        context.lineWidth = width;
        context.strokeStyle = colour;
        context.strokeRect(...box);
      }
    }
  }

  // The context of a canvas with as many points as the screen has for it; nothing while it is not shown.
  function fitted(canvas) {
    const points = (size) => Math.round(size * (window.devicePixelRatio || 1));
    const width = points(canvas.clientWidth), height = points(canvas.clientHeight);
    if (!width || !height) return null;
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    return context;
  }

  // Figures

  const layer = (row, k) => ({ name: `${row.name} ${k + 1}`, picture: picture(row, k) });

  function cell(viewer, caption) {
    return make("div", { className: "cell" }, viewer.canvas, make("small", { className: "text", textContent: caption ?? "" }));
  }

  // Which coordinates lie down and across, where that is known.
  const axes = () => (data.axes ? make("div", { className: "text legend", textContent: data.axes }) : "");

  // Every picture of every row, rows of a block above each other.
  function table(group, blocks) {
    return blocks.map((block) => {
      const count = Math.max(...block.rows.map((row) => row.pictures.length));
      const rows = block.rows.map((row) => make("div", { className: "row" },
        make("span", { className: "text name", textContent: row.name }),
        ...row.pictures.map((_, k) => cell(new Viewer(group, block, [layer(row, k)]), row.captions[k]))));
      const found = make("div", { className: "block" }, ...rows, scale(block), block === blocks[0] ? axes() : "");
      found.style.setProperty("--count", count);
      return found;
    });
  }

  // Every set of pictures as a square of them.
  function squares(group, [block]) {
    const sets = block.rows.map((row) => {
      const tiles = make("div", { className: "tiles-of" }, ...row.pictures.map((_, k) => new Viewer(group, block, [layer(row, k)]).canvas));
      tiles.style.setProperty("--count", Math.ceil(Math.sqrt(row.pictures.length)));
      return make("div", {}, make("span", { className: "text name", textContent: row.name }), tiles);
    });
    return [make("div", { className: "sets" }, ...sets), scale(block), axes()];
  }

  // For one number x → g(x) and ŷ → f(ŷ), and below each by how much it breaks the rule.
  function spaces(group, blocks) {
    const order = ["x", "g(x)", "ŷ", "f(ŷ)"], stage = make("div", { className: "spaces" });
    const image = blocks.filter((block) => block.symbol !== "residual");
    const residual = blocks.find((block) => block.symbol === "residual");
    const rowOf = (block, name) => block?.rows.find((row) => row.name === name);
    const shown = (block, name, k, caption) => {
      const row = rowOf(block, name);
      return row && k < row.pictures.length ? cell(new Viewer(group, block, [layer(row, k)]), caption ?? row.captions[k]) : "";
    };
    const show = (k) => {
      group.viewers = [];
      stage.replaceChildren(...order.map((name, j) => {
        const block = image.find((each) => rowOf(each, name));
        return make("div", {}, make("span", { className: "text name", textContent: `${j % 2 ? "→ " : ""}${name}` }),
          shown(block, name, k), residual ? shown(residual, name, k, "residual") : "");
      }));
      watch(group);
    };
    show(0);
    const count = Math.min(...blocks.flatMap((block) => block.rows.map((row) => row.pictures.length)));
    return [make("div", { className: "controls" }, choice("number", count, show)), stage, ...blocks.map(scale)];
  }

  // Ours left and the baseline right of a line that moves.
  function compare(group, blocks) {
    const [first, second] = blocks[0].rows, stage = make("div", { className: "pair" });
    const show = (k) => {
      group.viewers = blocks.map((block) => new Viewer(group, block, block.rows.map((row) => layer(row, k))));
      stage.replaceChildren(...group.viewers.map((viewer, j) =>
        make("div", { className: "cell" }, viewer.canvas, scale(blocks[j]))));
      watch(group);
    };
    group.wipe = 0.5;
    const move = slider("how much of either is seen", 0.5, 1, 0.005, (value) => { group.wipe = value; group.draw(); });
    show(0);
    const count = Math.min(first.pictures.length, second.pictures.length);
    return [make("div", { className: "controls" }, choice("sample", count, show)), stage,
      make("div", { className: "controls wipe" }, make("span", { className: "text", textContent: first.name }), move,
        make("span", { className: "text", textContent: second.name }))];
  }

  // Pictures of the data, ours and the baseline, as they are shown elsewhere: blocks with a row of each.
  function trajectories() {
    const [image, residual] = panels.samples;
    const extra = (block) => panels.mirror?.flatMap((each) => (each.symbol === block?.symbol ? each.rows : []))
      .find((row) => row.name === "x");
    const real = extra(image) ?? panels.grids?.[0].rows.find((row) => row.name === "data");
    const withData = (block, row) => ({ ...block, rows: [...(row ? [{ ...row, name: "data" }] : []), ...block.rows] });
    return [withData(image, real), ...(residual ? [withData(residual, extra(residual))] : [])];
  }

  function time(group) {
    const blocks = trajectories(), { state, time: clock } = coordinates;
    const { height, width } = picture(blocks[0].rows[0], 0);
    const frames = state ? (height / state) * (width / state) : width;
    const stage = make("div", { className: "films" }), words = make("div", { className: "legend" }), shown = make("output", { className: "text" });
    const begun = Math.max(...blocks.map((block) => (state ? 0 : Math.trunc(block.offset[1]))));
    let frame = begun, playing = null; // the first column follows from nothing
    const film = state ? stateFilm : columnFilm;
    const go = (next) => {
      frame = next;
      group.figure.dataset.frame = frame;
      scrub.value = frame;
      shown.textContent = `${place(clock, frame)} (${frame + 1} of ${frames})`;
      group.films.forEach((show) => show(frame));
    };
    const show = (k) => {
      Object.assign(group, { viewers: [], films: [], redraws: [], words: new Map() });
      const names = blocks[0].rows.map((row) => row.name);
      stage.style.setProperty("--count", names.length);
      stage.replaceChildren(...blocks.flatMap((block) => names.map((name) => {
        const row = block.rows.find((each) => each.name === name);
        return row && k < row.pictures.length ? film(group, block, row, k) : make("div");
      })));
      words.replaceChildren(...[...group.words.values()].map((text) => make("div", { className: "text", textContent: text })));
      watch(group);
      go(frame);
    };
    const pause = () => { cancelAnimationFrame(playing); playing = null; play.textContent = "Play"; };
    const begin = () => {
      const pace = 1000 / clamp(frames / 6, 2, 12);
      let last = performance.now();
      const tick = (now) => {
        if (now - last >= pace) { last = now; go((frame + 1) % frames); }
        playing = requestAnimationFrame(tick);
      };
      playing = requestAnimationFrame(tick);
      play.textContent = "Pause";
    };
    const play = make("button", { type: "button", textContent: "Play", onclick: () => (playing === null ? begin() : pause()) });
    const scrub = slider("time", 0, frames - 1, 1, (value) => { pause(); go(value); });
    show(0);
    const count = Math.min(...blocks[0].rows.map((row) => row.pictures.length));
    return [make("div", { className: "controls" }, choice("sample", count, show)), stage, words, ...(state ? blocks.map(scale) : []),
      make("div", { className: "controls" }, play, scrub, shown)];
  }

  const filmOf = (canvas, block, row) => make("div", { className: "cell" }, canvas,
    make("small", { className: "text", textContent: `${row.name}: ${block.symbol}` }));

  // One state of a picture that has several laid out.
  function stateFilm(group, block, row, k) {
    const { state } = coordinates, across = picture(row, k).width / state;
    const cut = (frame) => [(frame % across) * state, Math.floor(frame / across) * state, state, state];
    const viewer = new Viewer(group, block, [layer(row, k)], cut(0));
    group.films.push((frame) => { viewer.source = cut(frame); viewer.draw(); });
    return filmOf(viewer.canvas, block, row);
  }

  // One column of a picture as a curve over the rows' coordinate, on the axes of all curves of its block.
  function columnFilm(group, block, row, k) {
    const { rows } = coordinates, shown = picture(row, k), later = Math.trunc(block.offset[1]);
    const all = block.rows.flatMap((each) => [...(pictures[each.pictures[k]]?.values ?? [])]);
    const far = all.reduce((size, value) => Math.max(size, Math.abs(value)), 0) || 1;
    const [low, high] = block.signed ? [-far, far]
      : all.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
    const [start, end] = [at(rows, 0), at(rows, shown.height - 1)].sort((a, b) => a - b);
    const canvas = make("canvas", { className: `curve ${row.name}` });
    let column = 0;
    const draw = () => {
      const context = fitted(canvas);
      if (!context) return;
      const [width, height] = [canvas.width, canvas.height - 4], style = getComputedStyle(canvas);
      const level = (value) => 2 + height * (1 - (value - low) / (high - low || 1));
      if (block.signed) {
        context.strokeStyle = style.borderColor;
        context.strokeRect(0, level(0), width, 0);
      }
      context.strokeStyle = style.color;
      context.lineWidth = 2 * (window.devicePixelRatio || 1);
      context.lineJoin = "round";
      context.beginPath();
      for (let k = 0; column >= 0 && k < shown.height; k += 1) {
        context.lineTo(width * (at(rows, k) - start) / (end - start), level(shown.value(k, column)));
      }
      context.stroke();
    };
    group.films.push((frame) => { column = frame - later; draw(); });
    group.redraws.push(draw);
    group.words.set(block, `${block.symbol} from ${number(low, 2)} to ${number(high, 2)}, over ${rows.name} from ${number(start, 2)} to ${number(end, 2)}`);
    return filmOf(canvas, block, row);
  }

  // Files

  // Every pixel of some blocks as CSV, a line each, with the digits that are kept.
  function csv(blocks) {
    const { rows, columns, state, time: clock } = coordinates;
    const head = ["of", "number", "quantity", rows.name, columns.name, ...(state && clock ? [clock.name] : []), "value"];
    const lines = [head.join(",")];
    const quoted = (text) => `"${text.replace(/^(?=[=+\-@\t\r])/, "'").replaceAll("\"", "\"\"")}"`;
    for (const block of blocks) for (const row of block.rows) row.pictures.forEach((_, k) => {
      const shown = picture(row, k), first = `${quoted(row.name)},${k + 1},${quoted(block.symbol)}`;
      shown.values.forEach((value, index) => {
        const found = where(block, shown.width, Math.floor(index / shown.width), index % shown.width);
        lines.push([first, ...found.map(([axis, i]) => Number(at(axis, i).toPrecision(6))), Number(value.toPrecision(5))].join(","));
      });
    });
    return `${lines.join("\r\n")}\r\n`;
  }

  // What a figure shows now, as a picture: its canvases and its words where they are.
  function snapshot(panel) {
    const frame = panel.getBoundingClientRect(), ratio = 2;
    const canvas = make("canvas", { width: ratio * frame.width, height: ratio * frame.height });
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.fillStyle = getComputedStyle(panel.parentElement).backgroundColor;
    context.fillRect(0, 0, frame.width, frame.height);
    context.imageSmoothingEnabled = false;
    context.textBaseline = "middle";
    for (const element of panel.querySelectorAll("canvas, .text")) {
      const box = element.getBoundingClientRect(), style = getComputedStyle(element);
      if (element.tagName === "CANVAS") {
        context.drawImage(element, box.left - frame.left, box.top - frame.top, box.width, box.height);
      } else {
        context.fillStyle = style.color;
        context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
        context.fillText(element.textContent, box.left - frame.left, box.top + box.height / 2 - frame.top, box.width);
      }
    }
    return canvas.toDataURL("image/png");
  }

  // A link whose content is made when it is asked for.
  function download(text, name, content) {
    const link = make("a", { className: "file", textContent: text, download: `${file}-${name}`, href: "#" });
    link.onclick = () => { link.href = content(); };
    return link;
  }

  function blob(text) {
    const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    setTimeout(() => URL.revokeObjectURL(url), 60000);
    return url;
  }

  // Draw when a figure gets another size, and when colours change.
  const watcher = new ResizeObserver((entries) => {
    new Set(entries.map((entry) => entry.target.group)).forEach((group) => group.draw());
  });
  function watch(group) {
    group.figure.querySelectorAll("canvas.picture, canvas.curve").forEach((canvas) => {
      canvas.group = group;
      watcher.observe(canvas);
    });
    group.draw();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => groups.forEach((group) => group.draw()));

  const kinds = {
    samples: [panels.samples, table], worst: [panels.worst, table], mirror: [panels.mirror, spaces],
    grids: [panels.grids, squares], compare: [panels.samples, compare], time: [panels.samples, time],
  };
  for (const figure of document.querySelectorAll("figure[data-figure]")) {
    const name = figure.dataset.figure, still = figure.querySelector("picture"), files = figure.querySelector(".files");
    if (still) files.prepend(make("a", { className: "file", textContent: "PNG", download: `${file}-${name}.png`, href: still.querySelector("img").src }));
    const [blocks, build] = kinds[name] ?? [];
    if (!blocks) continue;
    const panel = make("div", { className: `panel ${name}` });
    figure.hidden = false;
    figure.prepend(panel);
    const group = new Group(figure);
    try {
      panel.append(...build(group, blocks));
    } catch (error) {
      panel.remove();
      figure.hidden = !still;
      console.error(error); // the still picture stays
      continue;
    }
    if (still) still.hidden = true;
    else files.append(download("PNG", `${name}.png`, () => snapshot(panel)));
    files.append(download("CSV", `${name}.csv`, () => blob(csv(name === "time" ? trajectories() : blocks))));
    if (group.viewers.length) files.append(group.tools);
    watch(group);
  }
  document.querySelectorAll("[data-script]").forEach((element) => { element.hidden = false; });
})();
