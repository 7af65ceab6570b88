// The runs behind a number, and the list of all of them.

function make(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const dialog = document.querySelector("dialog");
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

// A window with a configuration's spec, its seeds and their curves.
function openRuns(id) {
  const configuration = DATA.configurations[id], column = DATA.columns[configuration.column];
  const runs = configuration.runs.map((index) => DATA.runs[index]);
  const close = make("button", { type: "button", className: "close", textContent: "Close" });
  close.addEventListener("click", () => dialog.close());
  const title = make("div", {},
    make("h2", { id: "dialog-title", textContent: DATA.methods[configuration.method].title }),
    make("div", { className: "soft", textContent: column.title }));
  const body = make("div", { className: "body" }, facts(configuration, column), runTable(runs, column));
  const panel = make("div", { className: "panel" });
  body.append(panel, make("h3", { textContent: "Spec" }));
  const specs = make("pre", { id: "dialog-spec" });
  const show = (run) => { specs.textContent = JSON.stringify(specOf(configuration, run), null, 2); };
  if (runs.length > 1) {
    const pick = make("select", { className: "filter" }, ...runs.map((run, index) => make("option", { value: index, textContent: `seed ${run.seed} (${run.key})` })));
    pick.setAttribute("aria-label", "Run whose spec is shown");
    pick.addEventListener("change", () => show(runs[pick.value]));
    body.append(" ", pick);
  }
  show(runs[0]);
  body.append(specs);
  dialog.replaceChildren(make("div", { className: "top" }, title, close), body);
  dialog.showModal();
  dialog.scrollTop = 0;
  const { series, axes, about, settled } = seedsOf(id);
  if (!series.length) return panel.remove();
  const keys = series.map((each) => make("span", {}, swatch(each), ` ${each.title}`));
  panel.append(make("div", {}), make("div", { className: "keys soft" }, ...keys));
  new Chart(panel.firstChild, about).show(series, axes, about, { settled });
}

function specOf(configuration, run) {
  return { ...configuration.spec, seed: run.seed, probe_every: run.probe };
}

function facts(configuration, column) {
  const spread = (found, digits) => (found ? fixed(found[0], digits) + (found[1] === null ? "" : ` ± ${fixed(found[1], digits)}`) : "none");
  const list = make("dl", { className: "facts" });
  const said = [
    [`${column.metric}, best epoch`, spread(configuration.best, column.digits)],
    ["last epoch", spread(configuration.last, column.digits)],
    ["seeds", String(configuration.n)],
    ["seconds an epoch", spread(configuration.seconds, 2)],
    ["hyper-parameters", configuration.hyper],
  ];
  for (const [name, value] of said) list.append(make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value })));
  return list;
}

function runTable(runs, column) {
  const table = make("table", { className: "sortable" });
  const row = table.createTHead().insertRow();
  for (const [text, numeric] of [["seed", 1], ["best", 1], ["at epoch", 1], ["last", 1], ["s / epoch", 1], ["state", 0], ["device", 0], ["commit", 0], ["torch", 0], ["folder", 0]]) {
    row.append(make("th", { scope: "col", className: numeric ? "num" : "" }, make("span", { textContent: text })));
  }
  const rows = table.createTBody();
  for (const run of runs) {
    const line = rows.insertRow();
    const number = (value, digits) => {
      const cell = make("td", { className: "num", textContent: fixed(value, digits) });
      if (value !== null && value !== undefined) cell.dataset.order = value;
      line.append(cell);
    };
    line.append(make("th", { scope: "row", className: "num", textContent: String(run.seed) }));
    number(run.best, column.digits);
    number(run.bestEpoch, 0);
    number(run.last, column.digits);
    number(run.seconds, 2);
    line.append(
      make("td", {}, run.state, ...(run.remark ? [make("small", { textContent: run.remark })] : [])),
      ...[run.device, run.commit, run.torch].map((text) => make("td", { textContent: text })),
      make("td", {}, make("a", { href: run.link, textContent: run.key })));
  }
  const frame = make("div", { className: "scroll", tabIndex: 0 }, table);
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", "Runs of this configuration");
  makeSortable(table);
  return frame;
}

// The list of all runs, sortable, with a field that narrows it down.
function listRuns(host) {
  const field = make("input", { className: "filter", type: "search", placeholder: "experiment, method, state, key …" });
  field.setAttribute("aria-label", "Show only runs that contain these words");
  const count = make("span", { className: "soft", role: "status" });
  const table = make("table", { className: "sortable", id: "all-runs" });
  const head = table.createTHead().insertRow();
  for (const [text, numeric] of [["run", 0], ["experiment", 0], ["method", 0], ["seed", 1], ["state", 0], ["best", 1], ["last", 1], ["epochs", 1], ["s / epoch", 1], ["commit", 0], ["torch", 0]]) {
    head.append(make("th", { scope: "col", className: numeric ? "num" : "" }, make("span", { textContent: text })));
  }
  const body = table.createTBody(), lines = [];
  for (const [id, configuration] of Object.entries(DATA.configurations)) {
    const column = DATA.columns[configuration.column], method = DATA.methods[configuration.method].title;
    for (const run of configuration.runs.map((index) => DATA.runs[index])) {
      const line = make("tr", {});
      const open = make("button", { type: "button", className: "open", textContent: run.key });
      open.dataset.opens = id;
      line.append(make("th", { scope: "row" }, open));
      for (const text of [column.title, method]) line.append(make("td", { textContent: text }));
      const number = (value, digits) => {
        const cell = make("td", { className: "num", textContent: fixed(value, digits) });
        if (value !== null && value !== undefined) cell.dataset.order = value;
        line.append(cell);
      };
      number(run.seed, 0);
      line.append(make("td", { textContent: run.state }));
      number(run.best, column.digits);
      number(run.last, column.digits);
      number(run.done, 0);
      number(run.seconds, 2);
      for (const text of [run.commit, run.torch]) line.append(make("td", { textContent: text }));
      lines.push({ line, words: [run.key, column.title, column.id, method, configuration.method, configuration.hyper, run.state, run.commit, run.torch].join(" ").toLowerCase() });
      body.append(line);
    }
  }
  const filter = () => {
    const wanted = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { line, words } of lines) {
      line.hidden = !wanted.every((word) => words.includes(word));
      shown += !line.hidden;
    }
    count.textContent = ` ${shown.toLocaleString("en")} of ${lines.length.toLocaleString("en")} runs`;
  };
  field.addEventListener("input", filter);
  filter();
  const frame = make("div", { className: "scroll", tabIndex: 0 }, table);
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", "All runs");
  host.replaceChildren(field, count, frame);
  makeSortable(table);
}
