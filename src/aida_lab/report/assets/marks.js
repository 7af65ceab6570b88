// Pieces of a chart: SVG nodes, markers, legend entries, smoothing and ranges.

const SVG = "http://www.w3.org/2000/svg";

function draw(tag, attributes, parent) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (parent) parent.append(node);
  return node;
}

const dashes = (dash, width) => DATA.dashes[dash].map((length) => length * width).join(" ");

function marker(colour, x, y, size) {
  return "M" + DATA.markers[colour].map(([a, b]) => `${(x + a * size).toFixed(1)},${(y - b * size).toFixed(1)}`).join("L") + "Z";
}

// Exponential moving average, corrected for its start. Tooltips show the values themselves.
function smoothed(points, weight) {
  const sums = { y: 0, low: 0, high: 0 }, norms = { ...sums };
  return points.map((point) => {
    const found = { ...point };
    for (const key of Object.keys(sums)) {
      if (point[key] === undefined) continue;
      sums[key] = weight * sums[key] + point[key];
      norms[key] = weight * norms[key] + 1;
      found[key] = sums[key] / norms[key];
    }
    return found;
  });
}

// Whether a range is wide enough for distinct ticks and not far wider than the whole.
function showable(low, high, whole) {
  return distinct(low, high) && high - low >= 1e-9 * whole && high - low <= 100 * whole;
}

function distinct(low, high) {
  return high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high));
}

function spread(low, high, share) {
  if (distinct(low, high)) return [low - (high - low) * share, high + (high - low) * share];
  const room = Math.abs(high) * 0.05 || 1;
  return [low - room, high + room];
}

// A piece of a series' line with its marker, for the legend.
function swatch(look) {
  const svg = draw("svg", { viewBox: "0 0 34 12", width: 34, height: 12, "aria-hidden": "true" });
  const stroke = `var(--c${look.colour})`;
  draw("line", { x1: 1, x2: 33, y1: 6, y2: 6, stroke, "stroke-width": 2, "stroke-dasharray": dashes(look.dash, 2) }, svg);
  draw("path", { d: marker(look.colour, 17, 6, 3.4), fill: look.dash ? "var(--paper)" : stroke, stroke, "stroke-width": 1.2 }, svg);
  return svg;
}
