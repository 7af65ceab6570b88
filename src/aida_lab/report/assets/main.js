// Panels, switches, sorting and the address: brings the page to life.

// Methods that are switched off, in every panel.
const hidden = new Set();
const panels = [];

class Panel {
  constructor(host, state) {
    this.host = host;
    this.name = host.closest("section").id;
    const columns = (host.dataset.columns || "").split(" ").filter(Boolean).map((index) => DATA.columns[index]);
    this.columns = columns.length ? columns.map(({ title, views }) => ({ title, views })) : [{ title: "", views: [DATA.profile] }];
    const [column, view, smooth, ...zoom] = (state || "").split("~");
    this.column = Math.min(Number(column) || 0, this.columns.length - 1);
    this.view = view || this.views[0].name;
    this.tools = make("div", { className: "tools" });
    this.keys = labelled(make("div", { className: "keys", role: "group" }), "Methods shown");
    const place = make("div", {});
    this.hint = make("p", { className: "hint" });
    host.append(this.tools, place, this.keys, this.hint);
    this.chart = new Chart(place, () => remember());
    this.chart.smooth = Number(smooth) || 0;
    if (this.columns.length > 1) this.chooseColumn();
    this.choice = labelled(make("span", { className: "group", role: "group" }), "What is shown");
    this.tools.append(this.choice, make("span", { className: "gap" }), this.smoothing(), this.zooming());
    const [x0, x1, y0, y1] = zoom.map(Number);
    this.refresh(false, zoom.length === 4 && zoom.every(Number.isFinite.bind(null, x0 + x1 + y0 + y1)) ? { x0, x1, y0, y1 } : null);
  }

  get views() { return this.columns[this.column].views; }
  get shown() { return this.views.find(({ name }) => name === this.view) || this.views[0]; }

  // What the address keeps of it; empty for a panel nobody has touched.
  get state() {
    const { view, zoomed, smooth } = this.chart;
    const zoom = zoomed ? [view.x0, view.x1, view.y0, view.y1].map((each) => Number(each.toPrecision(5))) : [];
    if (!this.column && this.shown === this.views[0] && !smooth && !zoomed) return "";
    return [this.column, this.shown.name, smooth, ...zoom].join("~");
  }

  chooseColumn() {
    const pick = labelled(make("select", {}, ...this.columns.map(({ title }, index) => make("option", { value: index, textContent: title }))), "Experiment");
    pick.value = this.column;
    pick.addEventListener("change", () => { this.column = Number(pick.value); this.refresh(); });
    this.tools.append(pick);
  }

  smoothing() {
    const slider = labelled(make("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: this.chart.smooth }), "Smoothing");
    slider.addEventListener("input", () => { this.chart.smooth = Number(slider.value); this.chart.render(); remember(); });
    this.smoother = make("label", { className: "smooth" }, "Smoothing ", slider);
    return this.smoother;
  }

  zooming() {
    const group = labelled(make("span", { className: "group", role: "group" }), "Zoom");
    const buttons = [
      ["Whole", "Show everything", () => this.chart.reset()], ["Last quarter", "Show the last quarter", () => this.chart.zoomToEnd(0.25)],
      ["−", "Zoom out", () => this.chart.zoom(1 / 0.6)], ["+", "Zoom in", () => this.chart.zoom(0.6)],
    ];
    for (const [text, about, act] of buttons) {
      const button = labelled(make("button", { type: "button", textContent: text, title: about }), about);
      button.addEventListener("click", act);
      if (text === "Last quarter") this.quarter = button;
      group.append(button);
    }
    return group;
  }

  refresh(keep = false, view = null) {
    const { x, y, about, settled, series } = this.shown;
    const found = series.filter(({ method }) => !hidden.has(method)).map(seriesOf);
    this.chart.show(found, { x, y }, about, { settled, keep, view });
    this.quarter.hidden = this.smoother.hidden = x.label !== "epoch";
    const opens = series.some((each) => each.opens);
    this.hint.textContent = matchMedia("(pointer: coarse)").matches
      ? "Tap to read values, swipe sideways to zoom in."
      : `Drag to zoom, double-click to go back; keys + − arrows 0.${opens ? " Select a line or point to see its runs." : ""}`;
    const views = this.views.length > 1 ? this.views : [];
    this.choice.replaceChildren(...views.map(({ name, label }) => {
      const button = make("button", { type: "button", textContent: label });
      button.setAttribute("aria-pressed", String(name === this.shown.name));
      button.dataset.view = name;
      button.addEventListener("click", () => {
        this.view = name;
        this.refresh();
        this.choice.querySelector(`[data-view="${CSS.escape(name)}"]`).focus();
      });
      return button;
    }));
    const methods = [...new Set(series.map(({ method }) => method))];
    const switches = [["All", () => hidden.clear()], ["None", () => methods.forEach((method) => hidden.add(method))]];
    this.keys.replaceChildren(...methods.map((method) => this.key(method)), ...switches.map(([text, act]) => {
      const button = make("button", { type: "button", textContent: text });
      button.addEventListener("click", () => { act(); refreshAll(); });
      button.dataset.switch = text;
      return button;
    }));
  }

  key(method) {
    const known = look(method);
    const button = make("button", { type: "button" }, swatch(known), known.title);
    button.dataset.switch = method;
    button.setAttribute("aria-pressed", String(!hidden.has(method)));
    for (const [event, name] of [["pointerenter", method], ["focus", method], ["pointerleave", null], ["blur", null]]) {
      button.addEventListener(event, () => { if (!hidden.has(method)) this.chart.emphasise(name); });
    }
    button.addEventListener("click", () => {
      if (!hidden.delete(method)) hidden.add(method);
      refreshAll();
      this.keys.querySelector(`[data-switch="${CSS.escape(method)}"]`)?.focus();
    });
    return button;
  }
}

function look(method) {
  return { name: method, ...DATA.methods[method] };
}

function seriesOf(series) {
  const at = (field, index) => (Array.isArray(series[field]) ? series[field][index] ?? undefined : series[field]);
  const points = series.x.map((x, index) => ({
    x, y: series.y[index], low: at("low", index), high: at("high", index), x_std: at("x_std", index),
    opens: at("opens", index), note: at("note", index), best: at("best", index),
  }));
  return { ...look(series.method), kind: series.kind, marked: series.marked, minor: series.minor, points };
}

function refreshAll() {
  for (const panel of panels) panel.refresh(true);
  remember();
}

// The address keeps what was selected: #section&off=adam+sgd&table-III=column~view~smoothing~zoom
function remember() {
  if (!panels.ready) return;
  const [anchor] = location.hash.slice(1).split("&");
  const parts = [anchor.includes("=") ? "" : anchor];
  if (hidden.size) parts.push(`off=${[...hidden].map(encodeURIComponent).join("+")}`);
  for (const panel of panels) if (panel.state) parts.push(`${panel.name}=${encodeURIComponent(panel.state)}`);
  const hash = parts.length > 1 ? `#${parts.join("&")}` : anchor ? `#${anchor}` : "#";
  if (hash !== (location.hash || "#")) history.replaceState(null, "", hash);
}

function remembered() {
  const [anchor, ...parts] = location.hash.slice(1).split("&");
  const state = Object.fromEntries(parts.map((part) => part.split("=")));
  for (const method of (state.off || "").split("+").filter(Boolean)) hidden.add(decodeURIComponent(method));
  return { anchor, state };
}

// Heads become buttons that sort; fields without a value stay at the end either way.
function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => {
    const button = make("button", { type: "button", className: "sort" }, ...head.firstElementChild.childNodes);
    head.firstElementChild.replaceWith(button);
    button.addEventListener("click", () => {
      const numeric = head.classList.contains("num");
      const first = numeric ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const value = (row) => {
        const cell = row.cells[place];
        if (cell.dataset.order !== undefined) return Number(cell.dataset.order);
        const text = cell.textContent.trim();
        return numeric && (cell.classList.contains("faint") || Number.isNaN(Number(text)) || !text) ? null : numeric ? Number(text) : text;
      };
      const rows = [...table.tBodies[0].rows].map((row) => [value(row), row]);
      rows.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}

// A shadow at the side to which a table or figure can be scrolled.
function showScrolling(frame) {
  const update = () => {
    frame.parentElement.classList.toggle("more-right", frame.scrollLeft + frame.clientWidth < frame.scrollWidth - 2);
    frame.parentElement.classList.toggle("more-left", frame.scrollLeft > 2);
  };
  frame.addEventListener("scroll", update, { passive: true });
  const observer = new ResizeObserver(update);
  [frame, frame.firstElementChild].forEach((each) => observer.observe(each));
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-opens]");
  if (button) openRuns(button.dataset.opens);
});
for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
for (const frame of document.querySelectorAll(".scroll")) showScrolling(frame);

const { anchor, state } = remembered();
for (const host of document.querySelectorAll("[data-panel]")) {
  const name = host.closest("section").id;
  panels.push(new Panel(host, decodeURIComponent(state[name] || "")));
}
panels.ready = true;
if (anchor && Object.keys(state).length) document.getElementById(anchor)?.scrollIntoView();
addEventListener("hashchange", remember);
// Made when it is opened: it may have thousands of rows.
const list = document.querySelector("[data-runs]");
list.parentElement.addEventListener("toggle", () => listRuns(list), { once: true });
