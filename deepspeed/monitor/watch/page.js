"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 210, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 22;

// Numbers, as page.py writes them.

function number(v) {
  if (v === null || v === undefined) return "–";
  const size = Math.abs(v);
  if (v === 0) return "0";
  if (size >= 999.95) return v.toLocaleString("en-US", {maximumFractionDigits: 0});
  if (size < 1e-3) {
    const [digits, exponent] = v.toExponential(3).split("e");
    return `${Number(digits)}e${Number(exponent)}`;
  }
  return String(Number(v.toPrecision(4)));
}

function bytes(v) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (v >= 1024 && power < units.length - 1) { v /= 1024; power++; }
  return `${number(v)} ${units[power]}`;
}

function written(v, unit) {
  if (v === null || v === undefined) return "–";
  return unit === "bytes" ? bytes(v) : number(v) + (unit ? ` ${unit}` : "");
}

// Drawing

function make(parent, name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.appendChild(element);
  return element;
}

function html(parent, name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}

function ticks(low, high, count, base) {
  const rough = (high - low) / count;
  const power = Math.pow(base, Math.floor(Math.log(rough) / Math.log(base)));
  const steps = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  const step = power * (steps.find((s) => s * power >= rough) || base);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const digit of [1, 2, 5]) {
      const value = digit * Math.pow(10, e);
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  const few = found.filter((v) => String(v.toExponential()).startsWith("1e"));
  if (found.length > 6 && few.length > 1) {
    const every = Math.ceil(few.length / 6);
    return few.filter((_, i) => i % every === 0);
  }
  return found.length > 1 ? found : [low, high];
}

// The curves of a stacked chart lie on each other; `base` is what is below each.
function placed(chart) {
  if (!chart.stacked) return chart.series.map((s) => ({...s, base: null, top: s.y}));
  const sums = new Map();
  return chart.series.map((s) => {
    if (s.dashed) return {...s, base: null, top: s.y};
    const base = s.x.map((x) => sums.get(x) || 0);
    const top = s.y.map((y, i) => base[i] + y);
    s.x.forEach((x, i) => sums.set(x, top[i]));
    return {...s, base, top};
  });
}

function extent(chart, series, log) {
  const tops = series.flatMap((s) => s.top).filter((v) => !log || v > 0);
  let low = Math.min(...tops), high = Math.max(...tops);
  if (!log && (chart.zero || chart.stacked)) low = Math.min(0, low);
  // A few early or late values must not flatten all others.
  if (!log && tops.length > 20) {
    const sorted = [...tops].sort((a, b) => a - b);
    const most = sorted[Math.floor(0.97 * (sorted.length - 1))];
    if (high > most + 3 * (most - low)) high = most + 1.5 * (most - low);
  }
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= chart.zero ? 0 : pad; high += pad; }
  if (log) return [low / 1.05, high * 1.05];
  const pad = (high - low) * 0.05;
  return [chart.zero || chart.stacked ? low : low - pad, high + pad];
}

function draw(view) {
  const {chart, svg, series} = view;
  const width = Math.max(220, svg.clientWidth);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const log = view.log;
  const [low, high] = extent(chart, series, log);
  const xs = series.flatMap((s) => s.x);
  let first = Math.min(...xs), last = Math.max(...xs);
  if (first === last) { first -= 1; last += 1; }
  const toX = (x) => LEFT + ((x - first) / (last - first)) * (width - LEFT - RIGHT);
  const scale = log ? Math.log : (v) => v;
  const span = scale(high) - scale(low);
  const toY = (y) => {
    const share = (scale(log ? Math.max(y, low) : y) - scale(low)) / span;
    return HEIGHT - BOTTOM - Math.min(1.02, Math.max(-0.02, share)) * (HEIGHT - TOP - BOTTOM);
  };
  const base = chart.unit === "bytes" ? 1024 : 10;
  for (const value of log ? logTicks(low, high) : ticks(low, high, 5, base)) {
    make(svg, "line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: toY(value), y2: toY(value)});
    const text = make(svg, "text", {x: LEFT - 6, y: toY(value) + 4, "text-anchor": "end"});
    text.textContent = chart.unit === "bytes" ? bytes(value) : number(value);
  }
  for (const value of ticks(first, last, Math.max(2, width / 75), 10)) {
    if (value !== Math.round(value)) continue;
    const text = make(svg, "text", {x: toX(value), y: HEIGHT - 6, "text-anchor": "middle"});
    text.textContent = number(value);
  }
  for (const step of chart.skips)
    make(svg, "line", {class: "skip", x1: toX(step), x2: toX(step), y1: TOP, y2: HEIGHT - BOTTOM,
                       "stroke-dasharray": "2 3"});
  for (const s of series) {
    const color = `var(--${s.color})`;
    const path = (ys, start = "M") => ys.map((y, i) => `${i ? "L" : start}${toX(s.x[i]).toFixed(1)} ${toY(y).toFixed(1)}`).join("");
    const back = (ys) => ys.map((y, i) => `L${toX(s.x[i]).toFixed(1)} ${toY(y).toFixed(1)}`).reverse().join("");
    if (s.base) {
      make(svg, "path", {d: path(s.top) + back(s.base) + "Z", fill: color, "fill-opacity": 0.75});
      continue;
    }
    if (s.low && !s.dashed)
      make(svg, "path", {d: path(s.high) + back(s.low) + "Z", fill: color, "fill-opacity": 0.16});
    const curve = make(svg, "path", {class: "curve", d: path(s.top), stroke: color});
    if (s.dashed) { curve.setAttribute("stroke-dasharray", "4 3"); curve.setAttribute("opacity", 0.6); }
    if (s.x.length === 1) make(svg, "circle", {cx: toX(s.x[0]), cy: toY(s.top[0]), r: 3, fill: color});
  }
  view.cursor = make(svg, "line", {class: "cursor", x1: 0, x2: 0, y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
  view.toX = toX;
  view.fromX = (pixel) => first + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (last - first);
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid + 1; else high = mid; }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

// The legend has the values at `x`, without one the last of this run and those before at that step.
function read(view, x) {
  const unit = view.chart.unit;
  const end = Math.max(...view.series.filter((s) => !s.dashed).map((s) => s.x[s.x.length - 1]));
  view.series.forEach((s, i) => {
    const at = nearest(s.x, x === undefined ? end : x);
    const beyond = x !== undefined && (x > s.x[s.x.length - 1] + 0.5 || x < s.x[0] - 0.5);
    view.values[i].textContent = beyond ? "–" : written(s.y[at], unit);
  });
  const longest = view.series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  const place = x === undefined ? undefined : longest.x[nearest(longest.x, x)];
  view.place.textContent = place === undefined ? "" : `${view.chart.x} ${number(place)}`;
  view.cursor.setAttribute("visibility", place === undefined ? "hidden" : "visible");
  if (place !== undefined)
    for (const end of ["x1", "x2"]) view.cursor.setAttribute(end, view.toX(place));
}

// The run before beyond this one says nothing yet, and would press this one together.
function cut(chart) {
  const mine = chart.series.filter((s) => !s.dashed).flatMap((s) => s.x);
  if (!mine.length) return;
  const first = Math.min(...mine), last = Math.max(...mine);
  const limit = last + 0.25 * (last - first);
  for (const s of chart.series.filter((each) => each.dashed)) {
    const kept = Math.max(1, s.x.filter((x) => x <= limit).length);
    for (const key of ["x", "y", "low", "high"]) if (s[key]) s[key] = s[key].slice(0, kept);
  }
}

function add(chart) {
  cut(chart);
  const figure = html(document.getElementById("charts"), "figure");
  figure.dataset.chart = chart.title;
  const caption = html(figure, "figcaption");
  html(caption, "b", "", chart.title);
  const view = {chart, series: placed(chart), log: chart.scale === "log", values: []};
  view.place = html(caption, "span", "place", "");
  const positive = view.series.every((s) => s.top.every((v) => v > 0));
  if (chart.scale === "choice" && positive) {
    const button = html(caption, "button", "", "log");
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      view.log = !view.log;
      button.setAttribute("aria-pressed", String(view.log));
      draw(view);
      read(view);
    });
  }
  const legend = html(caption, "div", "legend");
  for (const s of view.series) {
    const entry = html(legend, "span");
    html(entry, "i", s.dashed ? "dashed" : "").style.borderColor = `var(--${s.color})`;
    entry.appendChild(document.createTextNode(s.label));
    view.values.push(html(entry, "em"));
  }
  view.svg = make(figure, "svg", {role: "img", "aria-label": `${chart.title} over steps`});
  new ResizeObserver(() => { draw(view); read(view); }).observe(view.svg);
  const follow = (event) => {
    const box = view.svg.getBoundingClientRect();
    read(view, view.fromX(event.clientX - box.left));
  };
  view.svg.addEventListener("pointermove", follow);
  view.svg.addEventListener("pointerdown", follow);
  view.svg.addEventListener("pointerleave", () => read(view));
  draw(view);
  read(view);
}

// Whether the run is alive, and a newer page

function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function tell() {
  if (data.ended !== null) return;
  const silence = Date.now() / 1e3 - data.heard;
  const patience = Math.max(60, 3 * data.refresh, (10 * (data.step_ms || 0)) / 1e3);
  const state = document.getElementById("state");
  const silent = silence > patience;
  state.className = `state ${silent ? "silent" : "training"}`;
  state.textContent = silent ? `silent for ${ago(silence)}` : `training, ${ago(Math.max(0, silence))} ago`;
}

function renew() {
  const busy = document.hidden || document.querySelector("svg:hover") || !getSelection().isCollapsed;
  if (!busy) location.reload();
}

data.charts.forEach(add);
tell();
setInterval(tell, 1000);
if (data.refresh) setInterval(renew, 1e3 * Math.max(2, data.refresh));
})();
