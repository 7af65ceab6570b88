// A chart in SVG: lines with bands, steps or points with error bars; zoomed by pointer, keys or buttons.
//
// A series is {name, title, colour, dash, kind: "line" | "steps" | "points", points: [{x, y, low, high, left, right, opens}]}.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "2 2.5", "10 3 2 3"];
const MARGIN = { left: 58, right: 14, top: 10, bottom: 42 };

function draw(tag, attributes, parent) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (parent) parent.append(node);
  return node;
}

// The shape that goes with a colour, so that points are told apart without it.
function marker(colour, x, y, size) {
  const s = size, d = (...points) => "M" + points.map(([a, b]) => `${x + a * s},${y + b * s}`).join("L") + "Z";
  switch (colour) {
    case 0: return `M${x - s},${y}a${s},${s} 0 1,0 ${2 * s},0a${s},${s} 0 1,0 ${-2 * s},0Z`;
    case 1: return d([0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]);
    case 2: return d([-1, -1], [1, -1], [1, 1], [-1, 1]);
    case 3: return d([0, -1.2], [1.2, 1], [-1.2, 1]);
    case 4: return d([0, 1.2], [1.2, -1], [-1.2, -1]);
    case 5: return d([-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]);
    default: return d([-1, -1.3], [0, -0.4], [1, -1.3], [1.3, -1], [0.4, 0], [1.3, 1], [1, 1.3], [0, 0.4], [-1, 1.3], [-1.3, 1], [-0.4, 0], [-1.3, -1]);
  }
}

class Chart {
  constructor(host, about) {
    this.host = host;
    host.classList.add("chart");
    this.svg = draw("svg", { tabindex: 0, role: "img", "aria-label": about }, host);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    host.append(this.tip);
    this.series = [];
    this.view = null;
    this.listen();
    new ResizeObserver(() => this.render()).observe(host);
  }

  // axes: {x: {kind, label, integer}, y: {kind, label, digits}}; settled: share of x from which on y is fitted at first
  show(series, axes, about, { settled = 0, keep = false } = {}) {
    this.series = series;
    this.axes = axes;
    this.settled = settled;
    this.svg.setAttribute("aria-label", about);
    if (!keep || !this.zoomed) this.reset();
    else this.render();
  }

  reset() {
    this.zoomed = false;
    this.view = null;
    const all = this.units((point) => true);
    if (all.length) {
      const xs = all.flatMap(({ x, left, right }) => [x, left ?? x, right ?? x]);
      const [x0, x1] = spread(Math.min(...xs), Math.max(...xs), this.axes.x.pad ?? 0.03);
      this.view = { x0, x1, ...this.fittedY(Math.min(...xs) + this.settled * (Math.max(...xs) - Math.min(...xs)), x1) };
    }
    this.home = this.view;
    this.render();
  }

  // Points in units, those that pass; what a log axis cannot show is left out.
  units(passes) {
    const { x, y } = this.axes, toX = SCALES[x.kind].to, toY = SCALES[y.kind].to;
    const fit = (value, to) => (value === null || value === undefined ? undefined : to(value));
    return this.series
      .flatMap((series) => series.points)
      .map((p) => ({
        x: toX(p.x), y: fit(p.y, toY), low: fit(p.low, toY), high: fit(p.high, toY), left: fit(p.left, toX), right: fit(p.right, toX),
      }))
      .filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y) && passes(p));
  }

  fittedY(x0, x1) {
    if (this.axes.y.range) return { y0: this.axes.y.range[0], y1: this.axes.y.range[1] };
    let inside = this.units((p) => p.x >= x0 && p.x <= x1);
    if (!inside.length) inside = this.units(() => true);
    const ys = inside.flatMap(({ y, low, high }) => [y, low, high]).filter(Number.isFinite);
    const [y0, y1] = spread(Math.min(...ys), Math.max(...ys), 0.06);
    return { y0, y1 };
  }

  // Stops where ticks could no longer be told apart, and where everything would be a dot.
  zoomTo(view) {
    const home = this.home;
    if (!showable(view.x0, view.x1, home.x1 - home.x0) || !showable(view.y0, view.y1, home.y1 - home.y0)) return;
    this.view = view;
    this.zoomed = true;
    this.render();
  }

  zoom(factor) {
    if (!this.view) return;
    const { x0, x1, y0, y1 } = this.view, x = (x0 + x1) / 2, y = (y0 + y1) / 2;
    this.zoomTo({ x0: x + (x0 - x) * factor, x1: x + (x1 - x) * factor, y0: y + (y0 - y) * factor, y1: y + (y1 - y) * factor });
  }

  move(right, up) {
    if (!this.view) return;
    const { x0, x1, y0, y1 } = this.view, dx = (x1 - x0) * right, dy = (y1 - y0) * up;
    this.zoomTo({ x0: x0 + dx, x1: x1 + dx, y0: y0 + dy, y1: y1 + dy });
  }

  // The last part of the x axis, y fitted to what is there.
  zoomToEnd(share) {
    this.reset();
    if (!this.view) return;
    const xs = this.units(() => true).map((p) => p.x), high = Math.max(...xs), low = Math.min(...xs);
    const x0 = high - share * (high - low);
    this.zoomTo({ x0, x1: this.view.x1, ...this.fittedY(x0, high) });
  }

  render() {
    const width = Math.round(this.host.clientWidth);
    if (!width || !this.axes) return;
    const height = Math.round(Math.max(280, Math.min(460, width * 0.5)));
    this.box = { x: MARGIN.left, y: MARGIN.top, w: width - MARGIN.left - MARGIN.right, h: height - MARGIN.top - MARGIN.bottom };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren();
    this.hide();
    if (!this.view) {
      draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "none" }, this.svg).textContent =
        "Nothing to show: every method is switched off, or has no values here.";
      return;
    }
    this.drawAxes();
    this.clip = this.clip || `clip-${(Chart.count = (Chart.count || 0) + 1)}`;
    const clip = draw("clipPath", { id: this.clip }, this.svg), { x, y, w, h } = this.box;
    draw("rect", { x, y: y - 4, width: w, height: h + 8 }, clip);
    const field = draw("g", { "clip-path": `url(#${this.clip})` }, this.svg);
    for (const series of [...this.series].reverse()) this.drawSeries(series, field);
    this.overlay = draw("g", {}, this.svg);
  }

  px(x) { return this.box.x + ((SCALES[this.axes.x.kind].to(x) - this.view.x0) / (this.view.x1 - this.view.x0)) * this.box.w; }
  py(y) { return this.box.y + (1 - (SCALES[this.axes.y.kind].to(y) - this.view.y0) / (this.view.y1 - this.view.y0)) * this.box.h; }

  // A log axis has no place for what is not positive: below all that is shown.
  pyLow(low) { return Number.isFinite(SCALES[this.axes.y.kind].to(low)) ? this.py(low) : this.box.y + this.box.h + 8; }

  drawAxes() {
    const { x, y, w, h } = this.box, view = this.view, bottom = y + h;
    for (const [unit, text] of ticks(this.axes.x.kind, view.x0, view.x1, Math.max(2, w / 85), this.axes.x.integer)) {
      const at = x + ((unit - view.x0) / (view.x1 - view.x0)) * w;
      draw("line", { x1: at, x2: at, y1: y, y2: bottom, class: "grid" }, this.svg);
      draw("text", { x: at, y: bottom + 17, "text-anchor": "middle" }, this.svg).textContent = text;
    }
    for (const [unit, text] of ticks(this.axes.y.kind, view.y0, view.y1, Math.max(2, h / 48), false)) {
      const at = bottom - ((unit - view.y0) / (view.y1 - view.y0)) * h;
      draw("line", { x1: x, x2: x + w, y1: at, y2: at, class: "grid" }, this.svg);
      draw("text", { x: x - 7, y: at + 4, "text-anchor": "end" }, this.svg).textContent = text;
    }
    draw("path", { d: `M${x},${y}V${bottom}H${x + w}`, fill: "none", class: "axis" }, this.svg);
    draw("text", { x: x + w / 2, y: bottom + 36, "text-anchor": "middle", class: "label" }, this.svg).textContent = this.axes.x.label;
    const turned = { transform: `translate(13,${y + h / 2}) rotate(-90)`, "text-anchor": "middle", class: "label" };
    const label = draw("text", turned, this.svg);
    label.textContent = this.axes.y.label;
    if (label.getComputedTextLength() > h + 40) { // a long name on a phone
      label.setAttribute("textLength", h + 40);
      label.setAttribute("lengthAdjust", "spacingAndGlyphs");
    }
  }

  drawSeries(series, field) {
    const points = series.points.filter((p) => p.y !== null && p.y !== undefined && Number.isFinite(SCALES[this.axes.y.kind].to(p.y)));
    if (!points.length) return;
    const stroke = `var(--c${series.colour})`;
    const group = draw("g", { "data-series": series.name }, field);
    if (series.kind !== "points") {
      const banded = points.filter((p) => p.low !== undefined && p.high !== undefined);
      if (series.kind === "line" && !series.marked && banded.length > 1) {
        const up = banded.map((p) => `${this.px(p.x)},${this.py(p.high)}`);
        const down = banded.map((p) => `${this.px(p.x)},${this.pyLow(p.low)}`).reverse();
        draw("path", { d: `M${[...up, ...down].join("L")}Z`, fill: stroke, "fill-opacity": 0.14 }, group);
      }
      let path = "";
      points.forEach((p, index) => {
        const at = [this.px(p.x), this.py(p.y)];
        path += index ? (series.kind === "steps" ? `H${at[0]}V${at[1]}` : `L${at}`) : `M${at}`;
      });
      draw("path", { d: path, fill: "none", stroke, "stroke-width": 1.9, "stroke-dasharray": DASHES[series.dash], "stroke-linejoin": "round" }, group);
    }
    if (series.kind === "points" || series.marked || points.length < 3) {
      for (const p of points) {
        const x = this.px(p.x), y = this.py(p.y), thin = { stroke, "stroke-width": 1 };
        if (p.high !== undefined) draw("line", { x1: x, x2: x, y1: this.pyLow(p.low), y2: this.py(p.high), ...thin }, group);
        if (p.right !== undefined) draw("line", { x1: this.px(p.left), x2: this.px(p.right), y1: y, y2: y, ...thin }, group);
        const fill = series.dash ? "var(--paper)" : stroke;
        const look = { d: marker(series.colour, x, y, p.minor ? 3 : 5), fill, stroke, "stroke-width": 1.5 };
        draw("path", { ...look, opacity: p.minor ? 0.5 : 1 }, group);
      }
    }
  }

  // --- what the pointer and the keys do ---

  listen() {
    const svg = this.svg;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button || !this.view) return;
      this.start = this.at(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => (this.start ? this.brush(event) : this.point(event)));
    svg.addEventListener("pointerup", (event) => this.release(event));
    svg.addEventListener("pointercancel", () => { this.start = null; this.overlay?.replaceChildren(); });
    svg.addEventListener("pointerleave", () => this.hide());
    svg.addEventListener("dblclick", () => this.reset());
    svg.addEventListener("keydown", (event) => {
      const act = {
        "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), "0": () => this.reset(),
        ArrowLeft: () => this.move(-0.15, 0), ArrowRight: () => this.move(0.15, 0),
        ArrowUp: () => this.move(0, 0.15), ArrowDown: () => this.move(0, -0.15),
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }

  at(event) {
    const rect = this.svg.getBoundingClientRect(), { x, y, w, h } = this.box;
    return {
      x: Math.min(x + w, Math.max(x, event.clientX - rect.left)), y: Math.min(y + h, Math.max(y, event.clientY - rect.top)),
    };
  }

  brush(event) {
    const now = this.at(event), { x, y, w, h } = this.box;
    const across = event.pointerType === "touch" || Math.abs(now.y - this.start.y) < 14;
    this.drag = { x0: Math.min(now.x, this.start.x), x1: Math.max(now.x, this.start.x), across };
    this.drag.y0 = across ? y : Math.min(now.y, this.start.y);
    this.drag.y1 = across ? y + h : Math.max(now.y, this.start.y);
    this.hide();
    const { x0, x1, y0, y1 } = this.drag;
    draw("rect", { x: x0, y: y0, width: x1 - x0, height: y1 - y0, class: "brush" }, this.overlay);
  }

  release(event) {
    const drag = this.drag, start = this.start;
    this.start = this.drag = null;
    this.overlay?.replaceChildren();
    if (!start) return;
    if (!drag || drag.x1 - drag.x0 < 6) {
      const near = this.nearest(this.at(event));
      if (event.pointerType === "touch") this.point(event);
      else if (near?.point.opens) openRuns(near.point.opens);
      return;
    }
    const { x, y, w, h } = this.box, view = this.view;
    const unitX = (px) => view.x0 + ((px - x) / w) * (view.x1 - view.x0);
    const unitY = (py) => view.y1 - ((py - y) / h) * (view.y1 - view.y0);
    const x0 = unitX(drag.x0), x1 = unitX(drag.x1);
    this.zoomTo(drag.across ? { x0, x1, ...this.fittedY(x0, x1) } : { x0, x1, y0: unitY(drag.y1), y1: unitY(drag.y0) });
  }

  // The point closest to the pointer, within reach.
  nearest(at) {
    let best = null;
    for (const series of this.series) {
      for (const point of series.points) {
        if (point.y === null || point.y === undefined) continue;
        const distance = Math.hypot(this.px(point.x) - at.x, this.py(point.y) - at.y);
        if (distance < 40 && (!best || distance < best.distance)) best = { series, point, distance };
      }
    }
    return best;
  }

  point(event) {
    if (!this.view) return;
    const at = this.at(event);
    this.hide();
    if (this.series.some((series) => series.kind === "points" || series.marked)) {
      const near = this.nearest(at);
      if (near) this.tell(at, [[near.series, near.point.tells]]);
      return;
    }
    // every line at the epoch, or gap, under the pointer
    const x = SCALES[this.axes.x.kind].from(this.view.x0 + ((at.x - this.box.x) / this.box.w) * (this.view.x1 - this.view.x0));
    const rows = [];
    let where = null;
    for (const series of this.series) {
      const known = series.points.filter((p) => p.y !== null && p.y !== undefined);
      if (!known.length) continue;
      const before = known.filter((p) => p.x <= x);
      const found = series.kind === "steps"
        ? before[before.length - 1] : known.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
      if (!found) continue;
      if (where === null || Math.abs(found.x - x) < Math.abs(where - x)) where = found.x;
      rows.push([series, fixed(found.y, this.axes.y.digits), found.y]);
    }
    if (!rows.length) return;
    const sign = this.axes.y.better === "lower" ? 1 : -1;
    rows.sort((a, b) => sign * (a[2] - b[2]));
    const line = this.px(this.series[0].kind === "steps" ? x : where);
    draw("line", { x1: line, x2: line, y1: this.box.y, y2: this.box.y + this.box.h, class: "cursor" }, this.overlay);
    this.tell(at, rows, `${this.axes.x.label} ${this.series[0].kind === "steps" ? fixed(x, 1) : where}`);
  }

  tell(at, rows, head) {
    this.tip.replaceChildren();
    if (head) this.tip.append(head);
    const table = document.createElement("table");
    for (const [series, text] of rows) {
      const row = table.insertRow();
      row.insertCell().append(swatch(series));
      row.insertCell().textContent = series.title;
      row.insertCell().textContent = text;
    }
    this.tip.append(table);
    this.tip.hidden = false;
    const width = this.tip.offsetWidth, room = this.host.clientWidth;
    this.tip.style.left = `${Math.max(0, at.x + 16 + width > room ? at.x - width - 16 : at.x + 16)}px`;
    this.tip.style.top = `${Math.max(0, Math.min(at.y - 20, this.box.y + this.box.h - this.tip.offsetHeight))}px`;
  }

  hide() {
    this.tip.hidden = true;
    this.overlay?.replaceChildren();
  }
}

// Whether the numbers from low to high differ in digits that a number has, and are not far more than the whole of them.
function showable(low, high, whole) {
  return tellsApart(low, high) && high - low >= 1e-9 * whole && high - low <= 100 * whole;
}

function tellsApart(low, high) {
  return high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high));
}

function spread(low, high, share) {
  if (tellsApart(low, high)) return [low - (high - low) * share, high + (high - low) * share];
  const room = Math.abs(high) * 0.05 || 1;
  return [low - room, high + room];
}

// A piece of a series' line, with its shape.
function swatch(look) {
  const svg = draw("svg", { viewBox: "0 0 34 12", width: 34, height: 12, "aria-hidden": "true" });
  const stroke = `var(--c${look.colour})`;
  draw("line", { x1: 1, x2: 33, y1: 6, y2: 6, stroke, "stroke-width": 2, "stroke-dasharray": DASHES[look.dash] }, svg);
  draw("path", { d: marker(look.colour, 17, 6, 3.4), fill: look.dash ? "var(--paper)" : stroke, stroke, "stroke-width": 1.2 }, svg);
  return svg;
}
