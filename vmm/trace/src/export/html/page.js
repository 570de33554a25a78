"use strict";
// Everything that comes from the guest is text: it is drawn on a canvas or set as textContent, and never parsed as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const number = (n) => Math.round(n).toLocaleString("en-US");
function percent(part, whole) {
  const share = whole ? 100 * part / whole : 0;
  if (share > 0 && share < 0.001) return "<\u00a00.001\u00a0%";
  return share.toFixed(share >= 0.1 || share === 0 ? 1 : 3) + "\u00a0%";
}
const seconds = (ns) => (ns / 1e9).toFixed(6) + " s";
const FONT = "12px system-ui, sans-serif";

function color(text, light) {
  let hash = 2166136261;
  for (let n = 0; n < text.length; n++) {
    hash = Math.imul(hash ^ text.charCodeAt(n), 16777619);
  }
  const hue = (hash >>> 0) % 360;
  return `hsl(${hue} 55% ${light}%)`;
}

// A canvas of so many CSS pixels, sharp on any screen; gives what draws on it.
function prepare(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = FONT;
  pen.textBaseline = "middle";
  return pen;
}

function fit(pen, text, width) {
  if (width < 14) return "";
  if (pen.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pen.measureText(text.slice(0, middle) + "…").width <= width) low = middle; else high = middle - 1;
  }
  return low ? text.slice(0, low) + "…" : "";
}

// ---- The flame graph: nodes in preorder, each behind its parent.
const { parent, name, own } = data.nodes;
const count = parent.length;
const all = Float64Array.from(own);
for (let n = count - 1; n > 0; n--) all[parent[n]] += all[n];
const total = all[0] || 0;
const depth = new Int32Array(count);
const start = new Float64Array(count);
{
  // A node's own instructions come first, then its children in their order.
  const next = new Float64Array(count);
  for (let n = 0; n < count; n++) {
    if (n > 0) {
      depth[n] = depth[parent[n]] + 1;
      start[n] = next[parent[n]];
      next[parent[n]] += all[n];
    }
    next[n] = start[n];
  }
}
const label = (n) => (n === 0 ? "all" : data.names[name[n]]);
const ROW = 18;
let focus = 0;
const past = [];
let wanted = "";
let hits = null;

// Whether a node is the focus, below it, or above it.
const end = (n) => start[n] + all[n];
const inFocus = (n) => end(n) > start[focus] && start[n] < end(focus);

let shownRows = 1;
function drawGraph() {
  const canvas = at("graph");
  const width = at("flame").clientWidth;
  const perPixel = all[focus] / Math.max(1, width);
  const seen = [];
  let deepest = 0;
  for (let n = 0; n < count; n++) {
    if (!inFocus(n) || (depth[n] > depth[focus] && all[n] < perPixel * 0.5)) continue;
    seen.push(n);
    deepest = Math.max(deepest, depth[n]);
  }
  shownRows = deepest + 1;
  const pen = prepare(canvas, width, shownRows * ROW);
  for (const n of seen) {
    const above = depth[n] < depth[focus];
    const x = above ? 0 : (start[n] - start[focus]) / perPixel;
    const w = above ? width : all[n] / perPixel;
    const y = depth[n] * ROW;
    const hit = hits && hits[name[n]] && n > 0;
    pen.fillStyle = hit ? "#a3339f" : n === 0 ? "#e3e5e8" : color(label(n), above ? 90 : 78);
    pen.fillRect(x, y, Math.max(0.5, w - 0.5), ROW - 1);
    const text = fit(pen, label(n), w - 8);
    if (text) {
      pen.fillStyle = hit ? "#ffffff" : "#1d1f21";
      pen.fillText(text, x + 4, y + ROW / 2);
    }
  }
  at("back").disabled = past.length === 0;
  at("reset").disabled = focus === 0;
  document.body.dataset.drawn = String(seen.length);
}

function nodeAt(event) {
  const box = at("graph").getBoundingClientRect();
  const row = Math.floor((event.clientY - box.top) / ROW);
  const share = (event.clientX - box.left) / box.width;
  const where = start[focus] + share * all[focus];
  for (let n = 0; n < count; n++) {
    if (depth[n] === row && inFocus(n) && (row < depth[focus] || (start[n] <= where && where < end(n)))) return n;
  }
  return -1;
}

function describe(n) {
  if (n < 0) return "";
  const path = [];
  for (let m = n; m > 0; m = parent[m]) path.unshift(label(m));
  const shown = path.length > 6 ? [path[0], "…", ...path.slice(-4)] : path;
  return `${number(all[n])} instructions (${percent(all[n], total)}), ${number(own[n])} of its own: ${shown.join(" › ") || "all"}`;
}

function zoom(n) {
  if (n < 0 || n === focus) return;
  past.push(focus);
  focus = n;
  drawGraph();
  at("graph-says").textContent = describe(n);
}

// ---- Functions: own instructions, and those with what they call, each stack once.
const functions = data.names.map((text, n) => ({ n, text, own: 0, all: 0 }));
{
  const open = new Int32Array(data.names.length);
  const stack = [];
  for (let n = 1; n < count; n++) {
    while (stack.length && depth[stack[stack.length - 1]] >= depth[n]) open[name[stack.pop()]]--;
    // The first row is of threads.
    const is = functions[name[n]];
    if (depth[n] > 1) {
      is.own += own[n];
      if (open[name[n]] === 0) is.all += all[n];
      is.called = true;
    }
    if (depth[n] > 1) { open[name[n]]++; stack.push(n); }
  }
}
const MOST = 200;

function drawFunctions() {
  const some = functions.filter((is) => is.called && (!wanted || is.text.toLowerCase().includes(wanted)));
  some.sort((a, b) => b.own - a.own || b.all - a.all);
  const rows = some.slice(0, MOST).map((is) => {
    const row = document.createElement("tr");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = is.text;
    button.addEventListener("click", () => { at("search").value = is.text; search(); });
    const first = document.createElement("td");
    first.append(button);
    row.append(first);
    for (const value of [is.own, is.all]) {
      const cell = document.createElement("td");
      cell.className = "number";
      cell.textContent = `${number(value)} (${percent(value, total)})`;
      row.append(cell);
    }
    return row;
  });
  at("functions").replaceChildren(...rows);
  at("functions-note").textContent = `${number(some.length)} function${some.length === 1 ? "" : "s"}` +
    (wanted ? ` with “${at("search").value}” in the name` : "") +
    (some.length > MOST ? `; the ${MOST} with the most instructions of their own are shown.` : ".");
}

function search() {
  wanted = at("search").value.trim().toLowerCase();
  hits = null;
  at("found").textContent = "";
  if (wanted) {
    hits = data.names.map((text) => text.toLowerCase().includes(wanted));
    let sum = 0;
    // What is below a hit is part of it.
    const covered = new Uint8Array(count);
    for (let n = 1; n < count; n++) {
      covered[n] = covered[parent[n]];
      if (!covered[n] && hits[name[n]]) {
        covered[n] = 1;
        sum += all[n];
      }
    }
    at("found").textContent = sum ? `${number(sum)} instructions (${percent(sum, total)}) in stacks with “${at("search").value}”`
      : `no stack has “${at("search").value}”`;
  }
  drawGraph();
  drawFunctions();
}

// ---- The timeline: cells [vCPU, thread, bin, instructions, bin, instructions, ...].
const rows = [];
for (let cpu = 0; cpu < data.cpus; cpu++) rows.push({ text: `vCPU ${cpu}`, cpu, bins: new Map() });
const ofThread = data.threads.map((thread) => ({ text: thread.name + (thread.tid ? ` (${thread.tid})` : ""), thread, bins: new Map() }));
for (const [cpu, thread, ...pairs] of data.cells) {
  for (let n = 0; n < pairs.length; n += 2) {
    const bin = pairs[n], some = pairs[n + 1];
    const mine = ofThread[thread].bins;
    mine.set(bin, (mine.get(bin) || 0) + some);
    const there = rows[cpu].bins.get(bin) || { sum: 0, most: -1, best: 0 };
    there.sum += some;
    if (some > there.best) { there.best = some; there.most = thread; }
    rows[cpu].bins.set(bin, there);
  }
}
rows.push(...ofThread.filter((row) => row.bins.size));
const HIGH = 16;
let tallest = 1;
for (const row of rows) for (const bin of row.bins.values()) tallest = Math.max(tallest, bin.sum || bin);
const leftOf = (width) => Math.min(190, Math.round(width * 0.34));

function drawRows() {
  const width = at("timeline").clientWidth;
  const left = leftOf(width);
  const pen = prepare(at("rows"), width, (rows.length + 1) * HIGH + 4);
  const wide = (width - left) / Math.max(1, data.bins);
  const axis = (width - left) < 400 ? 2 : 4;
  pen.fillStyle = "#5c6166";
  for (let n = 0; n <= axis; n++) {
    const text = seconds(data.from_ns + data.bin_ns * data.bins * n / axis);
    const long = pen.measureText(text).width;
    const x = left + (width - left) * n / axis;
    pen.fillText(text, Math.min(width - long - 2, Math.max(left, x - long / 2)), HIGH / 2);
  }
  rows.forEach((row, number) => {
    const y = (number + 1) * HIGH;
    if (number % 2) { pen.fillStyle = "#f4f5f6"; pen.fillRect(0, y, width, HIGH); }
    pen.fillStyle = "#1d1f21";
    pen.fillText(fit(pen, row.text, left - 8), 4, y + HIGH / 2);
    for (const [bin, value] of row.bins) {
      const some = value.sum || value;
      const named = row.cpu === undefined ? row.thread : data.threads[value.most];
      const high = Math.max(2, (HIGH - 2) * some / tallest);
      pen.fillStyle = color(named.name, 52);
      pen.fillRect(left + bin * wide, y + HIGH - 1 - high, Math.max(1, wide), high);
    }
  });
}

function rowsSay(event) {
  const box = at("rows").getBoundingClientRect();
  const row = rows[Math.floor((event.clientY - box.top) / HIGH) - 1];
  const left = leftOf(box.width);
  const bin = Math.floor((event.clientX - box.left - left) / (box.width - left) * data.bins);
  if (!row || bin < 0) return;
  const value = row.bins.get(bin);
  const from = data.from_ns + bin * data.bin_ns;
  const when = `${seconds(from)} to ${seconds(from + data.bin_ns)}`;
  let what = "nothing ran";
  if (value) {
    what = `${number(value.sum || value)} instructions`;
    if (row.cpu !== undefined) what += `, most of them ${number(value.best)} of ${data.threads[value.most].name}`;
  }
  at("rows-says").textContent = `${row.text}, ${when}: ${what}`;
}

// ---- Putting it together.
at("title").textContent = data.title;
document.title = data.title;
at("facts").textContent = `${data.facts}; ${number(total)} instructions`;
at("timeline-note").textContent = data.timeline_note;
at("flame-note").textContent = data.flame_note;
at("graph").addEventListener("click", (event) => { const n = nodeAt(event); zoom(n); at("graph-says").textContent = describe(n); });
at("graph").addEventListener("mousemove", (event) => { at("graph-says").textContent = describe(nodeAt(event)) || " "; });
at("graph").addEventListener("keydown", (event) => { if (event.key === "Escape") at("back").click(); });
at("back").addEventListener("click", () => { if (past.length) { focus = past.pop(); drawGraph(); } });
at("reset").addEventListener("click", () => { past.length = 0; focus = 0; drawGraph(); });
at("search").addEventListener("input", search);
at("search-form").addEventListener("submit", (event) => event.preventDefault());
at("rows").addEventListener("mousemove", rowsSay);
at("rows").addEventListener("click", rowsSay);
window.addEventListener("resize", () => { drawGraph(); drawRows(); });
// A part of the page's address behind # is looked for.
if (location.hash.length > 1) {
  try { at("search").value = decodeURIComponent(location.hash.slice(1)); } catch { /* no such text */ }
}
search();
drawRows();
document.body.dataset.total = String(total);
