// A chart in SVG: lines with bands, steps, or points with error bars. Zoomed by pointer, keys or buttons.
//
// A series is {name, title, colour, dash, kind: "line" | "steps" | "points", marked, minor, points: [{x, y, low, high, x_std, opens, note, best}]}.

const MARGIN = { left: 58, right: 14, top: 10, bottom: 42 };
const LABELS = 720; // Narrower charts have no labels at the lines' ends: the legend is enough.

const short = (text) => (text.length > 24 ? `${text.slice(0, 23)}…` : text);

class Chart {
  constructor(host, changed = () => {}) {
    this.host = host;
    this.changed = changed;
    host.classList.add("chart");
    this.svg = draw("svg", { tabindex: 0, role: "img" }, host);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    host.append(this.tip);
    this.series = [];
    this.view = null;
    this.smooth = 0;
    this.listen();
    new ResizeObserver(() => this.render()).observe(host);
  }

  // axes: {x, y}, each {label, scale, digits, better, integer, pad, ends}; settled: the share of x after which y is fitted at first
  show(series, axes, about, { settled = 0, keep = false, view = null } = {}) {
    this.series = series;
    this.axes = axes;
    this.settled = settled;
    this.svg.setAttribute("aria-label", `${about}; ${series.map((each) => each.title).join(", ")}`);
    if (keep && this.zoomed) return this.render();
    this.reset(view);
  }

  reset(view = null) {
    this.zoomed = false;
    this.view = null;
    const all = this.units(() => true);
    if (all.length) {
      const xs = all.flatMap(({ x, left, right }) => [x, left ?? x, right ?? x]);
      const low = Math.min(...xs), high = Math.max(...xs);
      const [x0, x1] = spread(low, high, this.axes.x.pad);
      this.view = { x0, x1, ...this.fittedY(low + this.settled * (high - low), x1) };
    }
    this.home = this.view;
    if (view && this.view) return this.zoomTo(view);
    this.render();
    this.changed();
  }

  // Points in axis positions that pass a test, without those a log axis cannot show.
  units(passes) {
    const { x, y } = this.axes, toX = SCALES[x.scale].to, toY = SCALES[y.scale].to;
    const fit = (value, to) => (value === null || value === undefined ? undefined : to(value));
    return this.series
      .flatMap((series) => series.points)
      .map((p) => ({
        x: toX(p.x), y: fit(p.y, toY), low: fit(p.low, toY), high: fit(p.high, toY),
        left: p.x_std ? toX(p.x - p.x_std) : undefined, right: p.x_std ? toX(p.x + p.x_std) : undefined,
      }))
      .filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y) && passes(p));
  }

  fittedY(x0, x1) {
    if (this.axes.y.ends) return { y0: this.axes.y.ends[0], y1: this.axes.y.ends[1] };
    let inside = this.units((p) => p.x >= x0 && p.x <= x1);
    if (!inside.length) inside = this.units(() => true);
    const ys = inside.flatMap(({ y, low, high }) => [y, low, high]).filter(Number.isFinite);
    const [y0, y1] = spread(Math.min(...ys), Math.max(...ys), 0.06);
    return { y0, y1 };
  }

  // Stops before two ticks would have the same label, and before everything would be a dot.
  zoomTo(view) {
    const home = this.home;
    if (!showable(view.x0, view.x1, home.x1 - home.x0) || !showable(view.y0, view.y1, home.y1 - home.y0)) return;
    this.view = view;
    this.zoomed = true;
    this.render();
    this.changed();
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
    const drawn = this.series.map((each) => ({ ...each, points: this.drawable(each) })).filter((each) => each.points.length);
    const labels = width >= LABELS ? drawn.filter((each) => each.kind !== "points" && !each.marked) : [];
    const right = labels.length ? 24 + 7 * Math.max(...labels.map((each) => short(each.title).length)) : MARGIN.right;
    this.box = { x: MARGIN.left, y: MARGIN.top, w: width - MARGIN.left - right, h: height - MARGIN.top - MARGIN.bottom };
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
    draw("rect", { x, y, width: w, height: h }, clip);
    const field = draw("g", { "clip-path": `url(#${this.clip})` }, this.svg);
    drawn.map((series, place) => [series, place]).reverse().forEach(([series, place]) => this.drawSeries(series, place, field));
    this.drawLabels(labels);
    this.overlay = draw("g", {}, this.svg);
  }

  drawable(series) {
    const points = series.points.filter((p) => p.y !== null && p.y !== undefined && Number.isFinite(SCALES[this.axes.y.scale].to(p.y)));
    return this.smooth && series.kind === "line" && !series.marked ? smoothed(points, this.smooth) : points;
  }

  px(x) { return this.box.x + ((SCALES[this.axes.x.scale].to(x) - this.view.x0) / (this.view.x1 - this.view.x0)) * this.box.w; }
  py(y) { return this.box.y + (1 - (SCALES[this.axes.y.scale].to(y) - this.view.y0) / (this.view.y1 - this.view.y0)) * this.box.h; }

  drawAxes() {
    const { x, y, w, h } = this.box, view = this.view, bottom = y + h;
    for (const [unit, text] of ticks(this.axes.x.scale, view.x0, view.x1, Math.max(2, w / 85), this.axes.x.integer)) {
      const at = x + ((unit - view.x0) / (view.x1 - view.x0)) * w;
      draw("line", { x1: at, x2: at, y1: y, y2: bottom, class: "grid" }, this.svg);
      draw("text", { x: at, y: bottom + 17, "text-anchor": "middle" }, this.svg).textContent = text;
    }
    for (const [unit, text] of ticks(this.axes.y.scale, view.y0, view.y1, Math.max(2, h / 48), false)) {
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

  drawSeries(series, place, field) {
    const { points } = series, stroke = `var(--c${series.colour})`, fill = series.dash ? "var(--paper)" : stroke;
    const group = draw("g", { "data-series": series.name }, field);
    const shape = (p, size, opacity = 1) =>
      draw("path", { d: marker(series.colour, this.px(p.x), this.py(p.y), size), fill, stroke, "stroke-width": 1.5, opacity }, group);
    if (series.kind !== "points") {
      const banded = points.filter((p) => p.low !== undefined && p.high !== undefined);
      if (!series.marked && banded.length > 1) {
        const up = banded.map((p) => `${this.px(p.x)},${this.py(p.high)}`);
        const down = banded.map((p) => `${this.px(p.x)},${this.py(p.low)}`).reverse();
        draw("path", { d: `M${[...up, ...down].join("L")}Z`, fill: stroke, "fill-opacity": 0.14, class: "band" }, group);
      }
      let path = "";
      points.forEach((p, index) => {
        const at = [this.px(p.x), this.py(p.y)];
        path += index ? (series.kind === "steps" ? `H${at[0]}V${at[1]}` : `L${at}`) : `M${at}`;
      });
      draw("path", { d: path, fill: "none", stroke, "stroke-width": 1.9, "stroke-dasharray": dashes(series.dash, 1.9), "stroke-linejoin": "round", class: "line" }, group);
    }
    if (series.marked || points.length < 3) {
      for (const p of points) {
        const x = this.px(p.x), y = this.py(p.y), thin = { stroke, "stroke-width": 1 };
        if (p.high !== undefined) draw("line", { x1: x, x2: x, y1: this.py(p.low), y2: this.py(p.high), ...thin }, group);
        if (p.x_std) draw("line", { x1: this.px(p.x - p.x_std), x2: this.px(p.x + p.x_std), y1: y, y2: y, ...thin }, group);
        shape(p, series.minor ? 3 : 4.5, series.minor ? 0.5 : 1);
        if (p.best) draw("circle", { cx: x, cy: y, r: 9, fill: "none", stroke, "stroke-width": 1.5 }, group);
      }
      return;
    }
    // one marker of the legend every 140 pixels, at different places for each method
    let next = this.box.x + 20 + 31 * (place % 5);
    for (const p of points) {
      const x = this.px(p.x);
      if (x < next) continue;
      shape(p, 3.6);
      next = x + 140;
    }
  }

  // Each line's title beside its end, moved apart so that no two overlap.
  drawLabels(labels) {
    const { x, y, w, h } = this.box, ends = [];
    for (const series of labels) {
      const inside = series.points.filter((p) => this.px(p.x) <= x + w + 1);
      const last = inside[inside.length - 1], at = last && this.py(last.y);
      if (last && at >= y - 1 && at <= y + h + 1) ends.push({ series, at, from: this.px(last.x), text: at });
    }
    ends.sort((a, b) => a.at - b.at);
    const step = Math.min(14, h / Math.max(1, ends.length));
    for (let index = 1; index < ends.length; index += 1) ends[index].text = Math.max(ends[index].text, ends[index - 1].text + step);
    let limit = y + h;
    for (const end of [...ends].reverse()) { end.text = Math.min(end.text, limit); limit = end.text - step; }
    for (const { series, at, from, text } of ends) {
      const group = draw("g", { "data-label": series.name }, this.svg);
      draw("path", { d: `M${from},${at}L${x + w + 8},${text}`, stroke: `var(--c${series.colour})`, fill: "none", "stroke-width": 0.8, opacity: 0.7 }, group);
      draw("text", { x: x + w + 12, y: text + 4, class: "end", style: `fill: var(--c${series.colour})` }, group).textContent = short(series.title);
    }
  }

  // Everything but one series in the background; null for none.
  emphasise(name) {
    for (const group of this.svg.querySelectorAll("[data-series], [data-label]")) {
      group.classList.toggle("dim", name !== null && (group.dataset.series ?? group.dataset.label) !== name);
    }
  }

  // --- pointer and keys ---

  listen() {
    const svg = this.svg;
    svg.addEventListener("pointerdown", (event) => {
      svg.classList.add("by-pointer"); // no focus frame for a drag
      if (event.button || !this.view) return;
      this.start = this.at(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => (this.start ? this.brush(event) : this.point(event)));
    svg.addEventListener("pointerup", (event) => this.release(event));
    svg.addEventListener("pointercancel", () => { this.start = null; this.overlay?.replaceChildren(); });
    // a tap's values stay until the next tap
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") this.hide(); });
    document.addEventListener("pointerdown", (event) => { if (!svg.contains(event.target)) this.hide(); });
    svg.addEventListener("dblclick", () => this.reset());
    svg.addEventListener("keydown", (event) => {
      const act = {
        "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), "0": () => this.reset(),
        ArrowLeft: () => this.move(-0.15, 0), ArrowRight: () => this.move(0.15, 0),
        ArrowUp: () => this.move(0, 0.15), ArrowDown: () => this.move(0, -0.15),
      }[event.key];
      svg.classList.remove("by-pointer");
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
    if (this.series.some((series) => series.marked)) {
      const near = this.nearest(at);
      if (near) this.tell(at, [[near.series, `${this.value(near.point)}; ${near.point.note}`]]);
      return;
    }
    // every line at the epoch, or gap, under the pointer
    const x = SCALES[this.axes.x.scale].from(this.view.x0 + ((at.x - this.box.x) / this.box.w) * (this.view.x1 - this.view.x0));
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
      rows.push([series, this.value(found), found.y]);
    }
    if (!rows.length) return;
    const sign = this.axes.y.better === "lower" ? 1 : -1;
    rows.sort((a, b) => sign * (a[2] - b[2]));
    const line = this.px(this.series[0].kind === "steps" ? x : where);
    draw("line", { x1: line, x2: line, y1: this.box.y, y2: this.box.y + this.box.h, class: "cursor" }, this.overlay);
    this.tell(at, rows, this.series[0].kind === "steps" ? `gap ${fixed(x, 1)} %` : `${this.axes.x.label} ${where}`);
  }

  value({ y, high }) {
    const { digits } = this.axes.y;
    return fixed(y, digits) + (high === undefined ? "" : ` ± ${fixed(high - y, digits)}`);
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
