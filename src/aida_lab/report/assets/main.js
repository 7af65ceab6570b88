// Panels, switches and sorting: brings the page to life.

// Methods that are switched off, in every panel.
const hidden = new Set();
const panels = [];

class Panel {
  constructor(host) {
    this.host = host;
    this.columns = (host.dataset.columns || "").split(" ").filter(Boolean).map((index) => DATA.columns[index]);
    this.column = 0;
    this.view = this.columns.length && !measuredThroughout(this.columns[0]) ? "loss" : "metric";
    this.tools = make("div", { className: "tools" });
    this.keys = make("div", { className: "keys", role: "group" });
    this.keys.setAttribute("aria-label", "Methods shown");
    const place = make("div", {});
    host.append(this.tools, place, this.keys);
    host.append(make("p", { className: "hint", textContent: "Drag to zoom, double-click to go back; keys + − arrows 0. Select a line or point to see its runs." }));
    this.chart = new Chart(place, "");
    if (this.columns.length > 1) this.chooseColumn();
    this.views = make("span", { className: "group", role: "group" });
    this.views.setAttribute("aria-label", "What is shown");
    this.tools.append(this.views, make("span", { className: "gap" }), this.zooming());
    this.refresh();
  }

  chooseColumn() {
    const pick = make("select", {}, ...this.columns.map((column, index) => make("option", { value: index, textContent: column.title })));
    pick.setAttribute("aria-label", "Experiment");
    pick.addEventListener("change", () => { this.column = Number(pick.value); this.view = this.options().some(([name]) => name === this.view) ? this.view : "metric"; this.refresh(); });
    this.tools.append(pick);
  }

  zooming() {
    const group = make("span", { className: "group", role: "group" });
    group.setAttribute("aria-label", "Zoom");
    const buttons = [["Whole", "Show everything", () => this.chart.reset()], ["−", "Zoom out", () => this.chart.zoom(1 / 0.6)], ["+", "Zoom in", () => this.chart.zoom(0.6)]];
    if (this.columns.length) buttons.splice(1, 0, ["Last quarter", "Show the last quarter", () => this.chart.zoomToEnd(0.25)]);
    for (const [text, about, act] of buttons) {
      const button = make("button", { type: "button", textContent: text, title: about });
      button.setAttribute("aria-label", about);
      button.addEventListener("click", act);
      if (text === "Last quarter") this.quarter = button;
      group.append(button);
    }
    return group;
  }

  options() {
    if (!this.columns.length) return [];
    const column = this.columns[this.column];
    const named = column.searches.map((search, index) => [`search-${index}`, `Search: ${search.setting}`]);
    const timed = Object.values(column.chosen).some((id) => DATA.configurations[id].seconds);
    const time = timed ? [["time", "Time against metric"]] : [];
    return [["metric", "Learning curves"], ["loss", "Training loss"], ...time, ...named];
  }

  found() {
    const shown = (method) => !hidden.has(method);
    if (!this.columns.length) return profileOf(shown);
    const column = this.columns[this.column];
    if (this.view === "time") return timesOf(column, shown);
    if (this.view.startsWith("search-")) return searchOf(column, column.searches[this.view.slice(7)], shown);
    return curvesOf(column, this.view, shown);
  }

  methods() {
    if (!this.columns.length) return Object.keys(DATA.profile.gaps);
    const column = this.columns[this.column];
    return this.view.startsWith("search-") ? Object.keys(column.searches[this.view.slice(7)].points) : Object.keys(column.chosen);
  }

  refresh(keep = false) {
    const { series, axes, about, settled } = this.found();
    this.chart.show(series, axes, about, { settled, keep });
    if (this.quarter) this.quarter.hidden = axes.x.label !== "epoch";
    this.views.replaceChildren(...this.options().map(([name, text]) => {
      const button = make("button", { type: "button", textContent: text });
      button.setAttribute("aria-pressed", String(name === this.view));
      button.dataset.view = name;
      button.addEventListener("click", () => {
        this.view = name;
        this.refresh();
        this.views.querySelector(`[data-view="${name}"]`).focus();
      });
      return button;
    }));
    const all = ["All", () => hidden.clear()], none = ["None", () => this.methods().forEach((method) => hidden.add(method))];
    this.keys.replaceChildren(...this.methods().map((method) => this.key(method)), ...[all, none].map(([text, act]) => {
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
    button.addEventListener("click", () => {
      if (!hidden.delete(method)) hidden.add(method);
      refreshAll();
      this.keys.querySelector(`[data-switch="${CSS.escape(method)}"]`)?.focus();
    });
    return button;
  }
}

function refreshAll() {
  for (const panel of panels) panel.refresh(true);
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

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-opens]");
  if (button) openRuns(button.dataset.opens);
});
for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);

for (const host of document.querySelectorAll("[data-panel]")) panels.push(new Panel(host));
// Made when it is opened: it may be thousands of lines.
const list = document.querySelector("[data-runs]");
list.parentElement.addEventListener("toggle", () => listRuns(list), { once: true });
