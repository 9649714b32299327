// Small helpers: elements, readable numbers, colours of the theme. Text is never set as HTML.

export const $ = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const NONE = "–";

export function ms(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 999.5) return `${Number((value / 1000).toPrecision(value < 9995 ? 2 : 3))} s`;
  return `${value >= 100 ? Math.round(value) : Number(value.toPrecision(2))} ms`;
}

export function count(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

export function bytes(value) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${value} B`;
}

export function long(seconds) {
  const [unit, size] = [["d", 86400], ["h", 3600], ["min", 60]].find(([, size]) => seconds >= 2 * size) ?? ["s", 1];
  return `${Math.max(0, Math.floor(seconds / size))} ${unit}`;
}

// Keeps the box of a long table as high as whole rows need, at most `highest` pixels: no row is cut until it is scrolled.
export function wholeRows(table, highest) {
  new ResizeObserver(() => {
    const rows = [...table.rows], last = rows.filter((row) => row.offsetTop + row.offsetHeight <= highest).at(-1);
    table.parentElement.style.maxHeight = last && last !== rows.at(-1) ? `${last.offsetTop + last.offsetHeight}px` : "";
  }).observe(table);
}

let cachedStyle = null;
export function color(name) {
  cachedStyle ??= getComputedStyle(document.documentElement);
  return cachedStyle.getPropertyValue(`--${name}`).trim();
}

// Returns the context of a cleared canvas with its size on the screen; null while it has no size.
export function prepared(canvas, height) {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  if (!width) return null;
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = '11.5px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  return { pen, width, height };
}

// Between blue and yellow, away from the page's colour, with a lightness that only grows or only falls: the order is plain
// to every kind of colour vision, and in grey; an idle engine is as quiet as the page, a full one stands out.
const ON_DARK = [[42, 58, 98], [78, 87, 110], [118, 118, 114], [158, 150, 116], [204, 188, 100], [254, 232, 56]];
const ON_LIGHT = [[230, 236, 240], [222, 203, 128], [168, 157, 117], [112, 113, 117], [62, 78, 110], [0, 34, 78]];
export function heat(share) {
  const stops = color("bg") === "#0f151c" ? ON_DARK : ON_LIGHT;
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(at));
  const rgb = stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (at - low)));
  return { fill: `rgb(${rgb.join(" ")})`, ink: rgb[0] * 0.3 + rgb[1] * 0.59 + rgb[2] * 0.11 > 130 ? "#111" : "#fff" };
}
