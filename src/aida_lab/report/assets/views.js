// What a panel can show of a column: series and axes, from the data.

const DATA = JSON.parse(document.getElementById("data").textContent);

function look(method) {
  const { title, colour, dash } = DATA.methods[method];
  return { name: method, title, colour, dash };
}

function meanAndStd(values) {
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  if (values.length < 2) return [mean, null];
  return [mean, Math.sqrt(values.reduce((sum, each) => sum + (each - mean) ** 2, 0) / (values.length - 1))];
}

function around(mean, std) {
  return std ? { low: mean - std, high: mean + std } : {};
}

// The mean over the runs that count, where all of them have a value.
function meanCurve(id, quantity) {
  const configuration = DATA.configurations[id], epochs = DATA.columns[configuration.column].epochs;
  const curves = configuration.runs.map((index) => DATA.runs[index]).filter((run) => run.counts).map((run) => run[quantity]);
  if (!curves.length || curves.some((curve) => !curve)) return [];
  const points = [];
  epochs.forEach((x, index) => {
    const values = curves.map((curve) => curve[index]);
    if (values.some((value) => value === null || value === undefined)) return;
    const [y, std] = meanAndStd(values);
    points.push({ x, y, ...around(y, std), opens: id });
  });
  return points;
}

function curvesOf(column, quantity, shown) {
  const loss = quantity === "loss";
  const series = Object.entries(column.chosen).filter(([method]) => shown(method))
    .map(([method, id]) => ({ ...look(method), kind: "line", points: meanCurve(id, quantity) }))
    .filter((each) => each.points.length);
  const digits = loss ? 4 : column.digits;
  const kind = loss && series.every((each) => each.points.every((point) => point.y > 0)) ? "log" : "linear";
  return {
    series,
    axes: {
      x: { kind: "linear", label: "epoch", integer: true, pad: 0.01 },
      y: { kind, label: loss ? "training loss" : column.metric, digits, better: loss ? "lower" : column.better },
    },
    settled: 0.1,
    about: `${column.title}: ${loss ? "training loss" : column.metric} over the epochs, ${series.map((each) => each.title).join(", ")}`,
  };
}

// Whether an experiment is measured after every epoch, or at its end alone.
function measuredThroughout(column) {
  return Object.values(column.chosen).some((id) => meanCurve(id, "metric").length > 1);
}

function timesOf(column, shown) {
  const series = Object.entries(column.chosen).filter(([method]) => shown(method)).map(([method, id]) => {
    const { best, seconds, n } = DATA.configurations[id];
    if (!seconds) return null;
    const [x, apart] = seconds, [y, std] = best;
    const tells = `${fixed(y, column.digits)}${std === null ? "" : " ± " + fixed(std, column.digits)} (n=${n}), ${fixed(x, 2)} s an epoch`;
    const sides = apart ? { left: x - apart, right: x + apart } : {};
    return { ...look(method), kind: "points", points: [{ x, y, ...around(y, std), ...sides, opens: id, tells }] };
  }).filter(Boolean);
  return {
    series,
    axes: {
      x: { kind: "linear", label: "training seconds an epoch", pad: 0.06 },
      y: { kind: "linear", label: column.metric, digits: column.digits, better: column.better },
    },
    settled: 0,
    about: `${column.title}: ${column.metric} against training seconds an epoch`,
  };
}

function searchOf(column, search, shown) {
  const series = [];
  for (const [method, points] of Object.entries(search.points)) {
    if (!shown(method)) continue;
    const ridge = new Set(search.ridges[method]);
    const all = points.map(([x, id]) => {
      const { best, n, hyper } = DATA.configurations[id], [y, std] = best;
      const tells = `${fixed(y, column.digits)}${std === null ? "" : " ± " + fixed(std, column.digits)} (n=${n}); ${hyper}`;
      return { x, y, ...around(y, std), opens: id, tells, minor: !ridge.has(id) };
    });
    series.push({ ...look(method), kind: "line", marked: true, points: all.filter((point) => !point.minor) });
    series.push({ ...look(method), kind: "points", points: all.filter((point) => point.minor) });
  }
  return {
    series,
    axes: {
      x: { kind: "log", label: search.setting, pad: 0.04 },
      y: { kind: "linear", label: column.metric, digits: column.digits, better: column.better },
    },
    settled: 0,
    about: `${column.title}: ${column.metric} over ${search.setting}; the line goes through the best configuration at each value`,
  };
}

function profileOf(shown) {
  const { gaps, tasks } = DATA.profile;
  const furthest = 108 * Math.max(0.01, ...Object.values(gaps).flat());
  const series = Object.entries(gaps).filter(([method]) => shown(method)).map(([method, found]) => {
    const within = (gap) => found.filter((each) => 100 * each <= gap + 1e-9).length / tasks;
    const stops = [...new Set([0, ...found.map((each) => 100 * each), furthest])].sort((a, b) => a - b);
    return { ...look(method), kind: "steps", points: stops.map((x) => ({ x, y: within(x) })) };
  });
  return {
    series,
    axes: {
      x: { kind: "gap", label: "gap to the lowest cost, %", pad: 0 },
      y: { kind: "linear", label: `share of ${tasks} tasks within the gap`, digits: 2, better: "higher", range: [-0.03, 1.03] },
    },
    settled: 0,
    about: "Performance profile: the share of tasks on which each method is within a gap of the best",
  };
}

// The curves of single runs, one line a seed.
function seedsOf(id) {
  const configuration = DATA.configurations[id], column = DATA.columns[configuration.column];
  const series = configuration.runs.map((index) => DATA.runs[index]).filter((run) => run.metric).map((run, index) => ({
    name: run.key, title: `seed ${run.seed}`, colour: index % 7, dash: Math.floor(index / 7) % 4, kind: "line",
    points: run.metric.map((y, place) => ({ x: column.epochs[place], y })),
  }));
  return {
    series,
    axes: {
      x: { kind: "linear", label: "epoch", integer: true, pad: 0.01 },
      y: { kind: "linear", label: column.metric, digits: column.digits, better: column.better },
    },
    settled: 0.1,
    about: `${column.metric} over the epochs, a line a seed`,
  };
}
