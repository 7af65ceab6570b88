"use strict";
// Scales, ticks and numbers. A chart keeps its view in axis positions ("units"), so zooming is the same on every scale.

const DATA = JSON.parse(document.getElementById("data").textContent);

const SCALES = {
  linear: { to: (value) => value, from: (unit) => unit },
  log: { to: (value) => Math.log10(value), from: (unit) => 10 ** unit },
  // linear from 0 to 1, logarithmic above
  gap: {
    to: (value) => (value <= 1 ? value : 1 + Math.log10(value)),
    from: (unit) => (unit <= 1 ? unit : 10 ** (unit - 1)),
  },
};

// Ticks between two units, as [unit, text].
function ticks(kind, low, high, room, integer) {
  const scale = SCALES[kind];
  if (kind === "linear") return evenTicks(low, high, room, integer);
  const found = [];
  const add = (value) => {
    const unit = scale.to(value);
    if (unit >= low - 1e-9 && unit <= high + 1e-9) found.push([unit, shortNumber(value)]);
  };
  if (kind === "gap") [0, 0.5].forEach(add);
  const first = Math.floor(Math.log10(Math.max(scale.from(low), kind === "gap" ? 1 : 1e-300)));
  const last = Math.ceil(Math.log10(scale.from(high)));
  if (last - first > 60) return evenTicks(low, high, room, false);
  const steps = 3 * (last - first) <= 1.6 * room ? [1, 2, 5] : [1];
  const stride = Math.max(1, Math.ceil((last - first) / room));
  for (let decade = first; decade <= last; decade += stride) {
    for (const step of steps) add(step * 10 ** decade);
  }
  // zoomed in between two decades
  if (found.length < 2) return evenTicks(scale.from(low), scale.from(high), room, false).map(([v, t]) => [scale.to(v), t]);
  return found;
}

function evenTicks(low, high, room, integer) {
  const raw = (high - low) / Math.max(1, room);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  let step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999) || power;
  if (integer) step = Math.max(1, Math.ceil(step));
  let digits = 0; // as few as show each tick exactly
  const whole = (scaled) => Math.abs(scaled - Math.round(scaled)) <= 1e-6 * scaled;
  while (digits < 12 && !whole(step * 10 ** digits)) digits += 1;
  const text = (value) => (digits < 12 && Math.abs(value) < 1e15 ? value.toFixed(digits) : String(Number(value.toPrecision(12))));
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index += 1) {
    found.push([index * step, text(index * step).replaceAll("-", "−")]);
  }
  return found;
}

function shortNumber(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(0).replace("e-", "e−").replace("e+", "e");
  return String(Number(value.toPrecision(3)));
}

function fixed(value, digits) {
  return value === null || value === undefined ? "" : value.toFixed(digits).replace("-", "−");
}
