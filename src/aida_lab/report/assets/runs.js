// The runs behind a number, and the list of all runs.

function make(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function labelled(node, text) {
  node.setAttribute("aria-label", text);
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
  const facts = Object.entries(configuration.facts).map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value })));
  const rows = runs.map((run) => [
    { text: run.seed, order: run.seed }, ...numbers(run, column), { text: run.state, note: run.remark },
    ...[run.device, run.commit, run.torch].map((text) => ({ text })), { text: run.key, link: run.link },
  ]);
  const heads = ["seed#", "best#", "at epoch#", "last#", "s / epoch#", "state", "device", "commit", "torch", "folder"];
  const panel = make("div", { className: "panel" });
  const body = make("div", { className: "body" }, make("dl", { className: "facts" }, ...facts), tableOf(heads, rows, "Runs of this configuration").frame, panel, make("h3", { textContent: "Spec" }));
  const specs = make("pre", { id: "dialog-spec" });
  const show = (run) => { specs.textContent = JSON.stringify({ ...configuration.spec, seed: run.seed, probe_every: run.probe }, null, 2); };
  if (runs.length > 1) {
    const pick = labelled(make("select", { className: "filter" }, ...runs.map((run, index) => make("option", { value: index, textContent: `seed ${run.seed} (${run.key})` }))), "Run whose spec is shown");
    pick.addEventListener("change", () => show(runs[pick.value]));
    body.append(" ", pick);
  }
  show(runs[0]);
  body.append(specs);
  dialog.replaceChildren(make("div", { className: "top" }, title, close), body);
  dialog.showModal();
  dialog.scrollTop = 0;
  const series = runs.filter((run) => run.metric).map((run, index) => ({
    name: run.key, title: `seed ${run.seed}`, colour: index % DATA.markers.length, dash: Math.floor(index / DATA.markers.length) % DATA.dashes.length,
    kind: "line", points: run.metric.map((y, place) => ({ x: column.epochs[place], y })),
  }));
  if (!series.length) return panel.remove();
  panel.append(make("div", {}), make("div", { className: "keys soft" }, ...series.map((each) => make("span", {}, swatch(each), ` ${each.title}`))));
  const axes = {
    x: { scale: "linear", label: "epoch", integer: true, pad: 0.01 },
    y: { scale: "linear", label: column.metric, digits: column.digits, better: column.better },
  };
  new Chart(panel.firstChild).show(series, axes, `${column.metric} over the epochs, one line per seed`, { settled: 0.1 });
}

function numbers(run, { digits }) {
  return [[run.best, digits], [run.bestEpoch, 0], [run.last, digits], [run.seconds, 2]].map(([value, places]) => ({ text: fixed(value, places), order: value }));
}

// A sortable table; a head that ends in # is of numbers, a field is {text, order, note, link, opens}.
function tableOf(heads, rows, about) {
  const table = make("table", { className: "sortable" });
  const head = table.createTHead().insertRow(), body = table.createTBody();
  const numeric = heads.map((text) => (text.endsWith("#") ? "num" : ""));
  heads.forEach((text, place) => head.append(make("th", { scope: "col", className: numeric[place] }, make("span", { textContent: text.replace("#", "") }))));
  for (const fields of rows) {
    const line = body.insertRow();
    fields.forEach(({ text, order, note, link, opens }, place) => {
      const shown = link ? make("a", { href: link, textContent: text }) : opens ? make("button", { type: "button", className: "open", textContent: text }) : String(text);
      if (opens) shown.dataset.opens = opens;
      const cell = make(place ? "td" : "th", { className: numeric[place] }, shown, ...(note ? [make("small", { textContent: note })] : []));
      if (!place) cell.scope = "row";
      if (order !== null && order !== undefined) cell.dataset.order = order;
      line.append(cell);
    });
  }
  const frame = labelled(make("div", { className: "scroll", tabIndex: 0, role: "region" }, table), about);
  const outer = make("div", { className: "frame" }, frame);
  makeSortable(table);
  showScrolling(frame);
  return { table, frame: outer };
}

// Numbers in one notation, so that 1e-3 finds 0.001.
function canonical(text) {
  return text.toLowerCase().split(/[\s,=()]+/).filter(Boolean).map((word) => (Number.isFinite(Number(word)) ? String(Number(word)) : word));
}

// The list of all runs, with a filter: words, and pairs such as "eps 1e-3".
function listRuns(host) {
  const field = labelled(make("input", { className: "filter", type: "search", placeholder: "method, experiment, state, eps 1e-3 …" }), "Show only runs that contain these words");
  const count = make("span", { className: "soft", role: "status" });
  const rows = [], texts = [], names = new Set();
  for (const [id, configuration] of Object.entries(DATA.configurations)) {
    const column = DATA.columns[configuration.column], method = DATA.methods[configuration.method].title;
    const hyper = configuration.facts["hyper-parameters"];
    Object.keys(configuration.spec.hyper).forEach((name) => names.add(name.toLowerCase()));
    for (const run of configuration.runs.map((index) => DATA.runs[index])) {
      const [best, , last, seconds] = numbers(run, column);
      rows.push([
        { text: run.key, opens: id }, { text: column.title }, { text: method }, { text: hyper }, { text: run.seed, order: run.seed }, { text: run.state },
        best, last, { text: run.done, order: run.done }, seconds, { text: run.commit }, { text: run.torch },
      ]);
      texts.push(` ${canonical([run.key, column.title, column.id, method, configuration.method, hyper, run.state, run.commit, run.torch].join(" ")).join(" ")} `);
    }
  }
  const heads = ["run", "experiment", "method", "hyper-parameters", "seed#", "state", "best#", "last#", "epochs#", "s / epoch#", "commit", "torch"];
  const { table, frame } = tableOf(heads, rows, "All runs");
  table.id = "all-runs";
  const lines = [...table.tBodies[0].rows];
  const filter = () => {
    const wanted = [];
    for (const word of canonical(field.value)) {
      const name = wanted[wanted.length - 1];
      if (names.has(name) && Number.isFinite(Number(word))) wanted[wanted.length - 1] = ` ${name} ${word} `;
      else wanted.push(word);
    }
    let shown = 0;
    lines.forEach((line, index) => {
      line.hidden = !wanted.every((word) => texts[index].includes(word));
      shown += !line.hidden;
    });
    count.textContent = ` ${shown.toLocaleString("en")} of ${lines.length.toLocaleString("en")} runs`;
  };
  field.addEventListener("input", filter);
  filter();
  host.replaceChildren(field, count, frame);
}
