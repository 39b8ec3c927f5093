// Score over cost of the runs that the table shows, as SVG.
"use strict";

(() => {
  const section = document.querySelector(".plot"), filters = document.querySelector("form[data-filters=runs]");
  if (!section || !filters) return;
  const form = section.querySelector("form"), drawing = section.querySelector(".drawing");
  const SVG = "http://www.w3.org/2000/svg", SHAPES = ["circle", "square", "diamond", "triangle", "cross", "tip"];
  const methods = [...new Set(report.points.map(point => point.method))].sort();
  const look = method => { const place = methods.indexOf(method); return { colour: `var(--series-${place % 8})`, shape: SHAPES[place % SHAPES.length] }; };
  const make = (name, attributes = {}, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const round = value => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3)).toString();

  const visible = () => {
    const shown = new Set([...document.querySelectorAll("tr[data-run]")].filter(row => !row.hidden).map(row => row.dataset.run));
    return report.points.filter(point => shown.has(point.id));
  };

  const ticks = (low, high, count) => {
    const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(unit => unit * power).find(unit => unit >= raw);
    const found = [];
    for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(Number(tick.toPrecision(12)));
    return found;
  };

  const mark = (shape, x, y) => {
    const r = 5;
    if (shape === "circle") return make("circle", { cx: x, cy: y, r });
    const path = {
      square: `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
      diamond: `M${x} ${y - 1.4 * r}L${x + 1.4 * r} ${y}L${x} ${y + 1.4 * r}L${x - 1.4 * r} ${y}z`,
      triangle: `M${x} ${y - 1.3 * r}L${x + 1.3 * r} ${y + r}L${x - 1.3 * r} ${y + r}z`,
      tip: `M${x} ${y + 1.3 * r}L${x + 1.3 * r} ${y - r}L${x - 1.3 * r} ${y - r}z`,
      cross: `M${x - r} ${y - r}L${x + r} ${y + r}M${x + r} ${y - r}L${x - r} ${y + r}`,
    }[shape];
    return make("path", { d: path });
  };

  const draw = () => {
    const metric = form.elements.y.value, cost = form.elements.x.value;
    const points = visible().filter(point => point.scores[metric] && point[cost] !== null && point[cost] !== undefined)
      .map(point => ({ ...point, x: point[cost], y: point.scores[metric][0], low: point.scores[metric][1], high: point.scores[metric][2] }));
    if (!points.length) { drawing.textContent = "No shown run has this score and this cost."; return; }
    const width = Math.max(320, drawing.clientWidth || 640), height = 360, left = 56, right = 12, top = 12, bottom = 42;
    const xs = points.map(point => point.x), ys = points.flatMap(point => [point.y, point.low ?? point.y, point.high ?? point.y]);
    const logarithmic = Math.min(...xs) > 0 && Math.max(...xs) / Math.min(...xs) > 8;
    const scale = value => logarithmic ? Math.log2(value) : value;
    const spread = (low, high) => { const room = (high - low || Math.abs(high) || 1) * 0.06; return [low - room, high + room]; };
    const [x0, x1] = spread(scale(Math.min(...xs)), scale(Math.max(...xs))), [y0, y1] = spread(Math.min(...ys), Math.max(...ys));
    const px = value => left + (width - left - right) * (scale(value) - x0) / (x1 - x0);
    const py = value => height - bottom - (height - top - bottom) * (value - y0) / (y1 - y0);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": `${metric} over ${form.elements.x.selectedOptions[0].text}, ${points.length} runs` });
    for (const tick of ticks(y0, y1, 5)) {
      svg.append(make("line", { x1: left, x2: width - right, y1: py(tick), y2: py(tick), class: "grid" }), make("text", { x: left - 8, y: py(tick) + 4, "text-anchor": "end" }, round(tick)));
    }
    let powers = [];
    for (let power = Math.ceil(x0); logarithmic && power <= x1; power += 1) powers.push(2 ** power);
    if (powers.length > width / 60) powers = powers.filter((_, index) => index % 2 === 0);
    for (const tick of logarithmic ? powers : ticks(x0, x1, Math.max(2, Math.floor(width / 110)))) {
      svg.append(make("text", { x: px(tick), y: height - bottom + 18, "text-anchor": "middle" }, round(tick)));
    }
    svg.append(make("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, form.elements.x.selectedOptions[0].text));
    const series = new Map();
    for (const point of points) {
      const name = [point.model, point.task, point.name].join(" · ");
      series.set(name, [...(series.get(name) ?? []), point]);
    }
    for (const same of series.values()) {
      same.sort((a, b) => a.x - b.x);
      if (same.length > 1) svg.append(make("polyline", { points: same.map(point => `${px(point.x)},${py(point.y)}`).join(" "), class: "series", style: `stroke:${look(same[0].method).colour}` }));
    }
    for (const point of points) {
      const { colour, shape } = look(point.method), budget = point.budget === null ? "full KV" : `budget ${point.budget}`;
      const interval = point.low === null || point.low === undefined ? "" : ` (${round(point.low)} to ${round(point.high)})`;
      const text = `${point.model}, ${point.task}, ${point.name}, ${budget}: ${metric} ${round(point.y)}${interval} at ${round(point.x)}`;
      const link = make("a", { href: `#run-${point.id}`, "aria-label": text, style: `--colour:${colour}`, class: `point ${shape}` });
      link.append(make("title", {}, text));
      if (point.low !== null && point.low !== undefined) link.append(make("line", { x1: px(point.x), x2: px(point.x), y1: py(point.low), y2: py(point.high), class: "bar" }));
      const drawn = mark(shape, px(point.x), py(point.y));
      drawn.classList.add("mark");
      if (point.status !== "complete") drawn.classList.add("hollow");
      link.append(drawn);
      svg.append(link);
    }
    const legend = document.createElement("ul");
    legend.className = "legend";
    for (const method of [...new Set(points.map(point => point.method))].sort()) {
      const item = document.createElement("li"), icon = make("svg", { width: 16, height: 16, "aria-hidden": "true", style: `--colour:${look(method).colour}`, class: `point ${look(method).shape}` });
      const drawn = mark(look(method).shape, 8, 8);
      drawn.classList.add("mark");
      icon.append(drawn);
      item.append(icon, ` ${method}`);
      legend.append(item);
    }
    drawing.replaceChildren(svg, legend);
  };

  const offer = () => {  // the scores that the shown runs have, most frequent first
    const counts = new Map(), before = form.elements.y.value;
    for (const point of visible()) for (const name of Object.keys(point.scores)) counts.set(name, (counts.get(name) ?? 0) + 1);
    const average = name => name.startsWith("avg") ? 0 : 1;
    const names = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a) || average(a) - average(b) || a.localeCompare(b, "en"));
    form.elements.y.replaceChildren(...names.map(name => { const option = document.createElement("option"); option.textContent = option.value = name; return option; }));
    if (names.includes(before)) form.elements.y.value = before;
    draw();
  };

  section.hidden = false;
  filters.addEventListener("filtered", offer);
  form.addEventListener("input", draw);
  form.addEventListener("submit", event => event.preventDefault());
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 100); });
  offer();
})();
