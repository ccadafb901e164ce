// The timeline. Every lane is a column of starts and lengths, sorted; a frame draws what is in
// view, and what is narrower than a pixel is added up per pixel, so a frame costs as many
// rectangles as the screen has columns, however many spans there are.
function drawTimeline(data) {
  const canvas = document.getElementById("timeline");
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  const lanes = data.lanes.map((lane) => ({
    rank: lane.rank,
    lane: lane.lane,
    kind: kindOf(lane.lane),
    start: new Uint32Array(bytes(lane.start)),
    length: new Uint32Array(bytes(lane.length)),
    name: lane.name ? new Uint16Array(bytes(lane.name)) : null,
  }));
  const total = Math.max(data.duration, 1);
  const stage = canvas.parentElement;
  const tip = document.getElementById("tip");
  const details = document.getElementById("details");
  const range = document.getElementById("range");
  const search = document.getElementById("search");
  const found = document.getElementById("found");
  const GUTTER = 118, AXIS = 24, LANE = 19, GAP = 2, BETWEEN = 11;

  function kindOf(lane) {
    const word = lane.split(" ")[0];
    return { operators: "compute", stream: "compute", phases: "phase", steps: "step", actions: "action" }[word] ?? word;
  }
  // A pipeline's action, "forward 3, stage 1": a hue for each micro-batch, backward darker.
  const actions = data.names.map((name) => {
    const found = /^(forward|backward|input gradient|weight gradient) (\d+), stage (\d+)$/.exec(name);
    if (!found) return null;
    const kind = { forward: "F", backward: "B", "input gradient": "I", "weight gradient": "W" }[found[1]];
    const light = { F: 46, B: 33, I: 33, W: 24 }[kind];
    return { short: kind + found[2], color: `hsl(${(found[2] * 137.5) % 360} 52% ${light}%)` };
  });

  let y = AXIS + 2, rank = null;
  for (const lane of lanes) {
    if (rank !== null && lane.rank !== rank) y += BETWEEN;
    lane.first = lane.rank !== rank;
    rank = lane.rank;
    lane.y = y;
    lane.height = lane.kind === "step" ? 16 : LANE;
    y += lane.height + GAP;
  }
  const height = y + 6;
  let from = 0, to = total; // in view, in the data's unit
  let width = 0, colors = {}, context = null, frame = 0;
  let hover = null, selected = null, query = "", matches = null, match = -1;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function readColors() {
    colors = {
      compute: css("--compute"), comm: css("--comm"), wait: css("--wait"), memory: css("--memory"),
      bubble: css("--bubble"), action: css("--compute"),
      phase: css("--phase"), step: css("--idle"), other: css("--neutral"), ink: css("--ink"),
      muted: css("--muted"), paper: css("--paper"), line: css("--hairline"), wash: css("--wash"),
      onFill: css("--on-fill"),
    };
  }
  function resize() {
    const ratio = window.devicePixelRatio || 1;
    width = stage.clientWidth;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
    context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw();
  }
  const plot = () => Math.max(width - GUTTER - 8, 10);
  const xOf = (t) => GUTTER + ((t - from) / (to - from)) * plot();
  const tOf = (x) => from + ((x - GUTTER) / plot()) * (to - from);
  const seconds = (t) => t * data.unit_ns * 1e-9;
  function duration(t) {
    const ns = t * data.unit_ns;
    if (ns < 1e3) return ns.toFixed(0) + " ns";
    if (ns < 1e6) return (ns / 1e3).toPrecision(3) + " µs";
    if (ns < 1e9) return (ns / 1e6).toPrecision(3) + " ms";
    return (ns / 1e9).toPrecision(4) + " s";
  }
  // The first span of a lane that ends after t. Spans of a lane rarely overlap; where some do
  // (collectives at work at once) a look back of a few covers them.
  function firstAfter(lane, t) {
    let low = 0, high = lane.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.start[middle] + lane.length[middle] < t) low = middle + 1; else high = middle;
    }
    return Math.max(low - 8, 0);
  }
  const nameOf = (lane, i) => (lane.name ? data.names[lane.name[i]] : lane.lane);

  function draw() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(paint);
  }
  function paint() {
    const c = context, right = GUTTER + plot();
    c.clearRect(0, 0, width, height);
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    axis(c, right);
    const bins = new Float32Array(Math.ceil(plot()) + 1);
    for (const lane of lanes) paintLane(c, lane, bins, right);
    outline(c, selected, colors.ink, 2);
    outline(c, hover, colors.ink, 1);
    range.textContent = `${duration(to - from)} of ${duration(total)}`;
    canvas.dataset.from = from;
    canvas.dataset.to = to;
  }
  function axis(c, right) {
    const span = seconds(to - from), rough = span / Math.max(plot() / 110, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough);
    const unit = step < 1e-6 ? [1e9, "ns"] : step < 1e-3 ? [1e6, "µs"] : step < 1 ? [1e3, "ms"] : [1, "s"];
    const digits = Math.max(0, -Math.floor(Math.log10(step * unit[0]) + 1e-9));
    c.strokeStyle = colors.line;
    c.fillStyle = colors.muted;
    c.textAlign = "center";
    c.beginPath();
    for (let n = Math.ceil(seconds(from) / step); n * step <= seconds(to); n++) {
      const x = Math.round(xOf((n * step * 1e9) / data.unit_ns)) + 0.5;
      c.moveTo(x, AXIS - 4);
      c.lineTo(x, height);
      if (x < right - 20) c.fillText((n * step * unit[0]).toFixed(digits) + " " + unit[1], x, 11);
    }
    c.stroke();
  }
  function paintLane(c, lane, bins, right) {
    c.textAlign = "left";
    if (lane.first) {
      c.fillStyle = colors.ink;
      c.font = "600 12px system-ui, sans-serif";
      c.fillText("rank " + lane.rank, 8, lane.y + lane.height / 2);
      c.font = "12px system-ui, sans-serif";
    } else {
      c.fillStyle = colors.muted;
      let label = lane.lane;
      while (c.measureText(label).width > GUTTER - 20 && label.length > 4) label = label.slice(0, -2) + "…";
      c.fillText(label, 8, lane.y + lane.height / 2);
    }
    c.fillStyle = colors.wash;
    c.fillRect(GUTTER, lane.y, right - GUTTER, lane.height);
    const color = colors[lane.kind] ?? colors.other;
    const scale = plot() / (to - from);
    bins.fill(0);
    let dense = false;
    c.save();
    c.beginPath();
    c.rect(GUTTER, lane.y, right - GUTTER, lane.height);
    c.clip();
    const texts = [];
    for (let i = firstAfter(lane, from); i < lane.start.length && lane.start[i] <= to; i++) {
      const left = (lane.start[i] - from) * scale, wide = lane.length[i] * scale;
      const hit = matches !== null && isMatch(lane, i);
      if (wide < 1.2 && !hit) {
        const bin = left | 0;
        if (bin >= 0 && bin < bins.length) { bins[bin] += Math.max(wide, 0.08); dense = true; }
        continue;
      }
      c.globalAlpha = matches === null || hit ? 1 : 0.25;
      c.fillStyle = (lane.kind === "action" && actions[lane.name[i]]?.color) || color;
      const x = GUTTER + left, w = Math.max(wide - (wide > 3 ? 0.6 : 0), hit ? 2 : 1);
      c.fillRect(x, lane.y, w, lane.height);
      if (wide > (lane.kind === "action" ? 18 : 34)) texts.push([Math.max(x, GUTTER), Math.min(x + w, right), i]);
    }
    if (dense) {
      c.fillStyle = color;
      for (let bin = 0; bin < bins.length; bin++) {
        if (bins[bin] === 0) continue;
        c.globalAlpha = Math.min(1, 0.3 + 0.7 * bins[bin]) * (matches === null ? 1 : 0.25);
        c.fillRect(GUTTER + bin, lane.y, 1, lane.height);
      }
    }
    c.globalAlpha = 1;
    c.fillStyle = lane.kind === "step" || lane.kind === "phase" ? colors.ink : lane.kind === "action" ? "#fff" : colors.onFill;
    c.font = "11px system-ui, sans-serif";
    for (const [x, end, i] of texts) {
      const short = lane.kind === "action" ? actions[lane.name[i]]?.short : null;
      const room = end - x - (short ? 4 : 8);
      if (room < (short ? 12 : 24)) continue;
      let text = nameOf(lane, i).replace("ProfilerStep#", "step ");
      const fits = Math.floor(room / 5.6);
      if (short && text.length > fits) text = short;
      if (text.length > fits) text = text.slice(0, Math.max(fits - 1, 1)) + "…";
      c.fillText(text, x + (short ? 2 : 4), lane.y + lane.height / 2 + 0.5, room);
    }
    c.restore();
  }
  function outline(c, span, color, thick) {
    if (!span) return;
    const { lane, i } = span;
    const left = Math.max(xOf(lane.start[i]), GUTTER), end = Math.min(xOf(lane.start[i] + lane.length[i]), GUTTER + plot());
    if (end < GUTTER || left > GUTTER + plot()) return;
    c.strokeStyle = color;
    c.lineWidth = thick;
    c.strokeRect(left - 0.5, lane.y - 0.5, Math.max(end - left, 1) + 1, lane.height + 1);
    c.lineWidth = 1;
  }
  function at(x, py) {
    const lane = lanes.find((l) => py >= l.y && py < l.y + l.height);
    if (!lane || x < GUTTER) return null;
    const t = tOf(x), slack = (1.5 * (to - from)) / plot();
    let best = null, least = Infinity;
    for (let i = firstAfter(lane, t - slack); i < lane.start.length && lane.start[i] <= t + slack; i++) {
      const away = Math.max(lane.start[i] - t, t - lane.start[i] - lane.length[i], 0);
      if (away <= slack && away <= least) { best = i; least = away; }
    }
    return best === null ? null : { lane, i: best };
  }
  function describe({ lane, i }) {
    return `${nameOf(lane, i)} · ${duration(lane.length[i])} · from ${duration(lane.start[i])} · rank ${lane.rank}, ${lane.lane}`;
  }
  function view(a, b) {
    const least = Math.max(200 / data.unit_ns, 2);
    let span = Math.min(Math.max(b - a, least), total);
    a = (a + b - span) / 2;
    a = Math.min(Math.max(a, 0), total - span);
    from = a;
    to = a + span;
    draw();
  }
  const zoom = (factor, t = (from + to) / 2) => view(t - (t - from) * factor, t + (to - t) * factor);
  const pan = (share) => view(from + share * (to - from), to + share * (to - from));
  function select(span, show) {
    selected = span;
    details.textContent = span ? describe(span) : "";
    if (span && show) {
      const { lane, i } = span, middle = lane.start[i] + lane.length[i] / 2;
      const room = Math.max(lane.length[i] * 6, Math.min(to - from, total / 20));
      view(middle - room / 2, middle + room / 2);
      stage.scrollTop = Math.max(lane.y - stage.clientHeight / 2, 0);
    }
    draw();
  }

  // ---- search
  let hits = new Set();
  const isMatch = (lane, i) => (lane.name ? hits.has(lane.name[i]) : false);
  function find(text) {
    query = text.trim().toLowerCase();
    match = -1;
    if (!query) { matches = null; hits = new Set(); found.textContent = ""; draw(); return; }
    hits = new Set();
    data.names.forEach((name, n) => { if (name.toLowerCase().includes(query)) hits.add(n); });
    matches = [];
    for (const lane of lanes) if (lane.name) for (let i = 0; i < lane.name.length; i++) if (hits.has(lane.name[i])) matches.push({ lane, i });
    const sum = matches.reduce((s, m) => s + m.lane.length[m.i], 0);
    found.textContent = matches.length ? `${matches.length.toLocaleString("en")} spans, ${duration(sum)}` : "nothing found";
    draw();
  }
  function next(direction) {
    if (!matches?.length) return;
    match = (match + direction + matches.length) % matches.length;
    select(matches[match], true);
    found.textContent = `${match + 1} of ${matches.length.toLocaleString("en")}`;
  }
  search.addEventListener("input", () => find(search.value));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); next(event.shiftKey ? -1 : 1); }
    if (event.key === "Escape") { search.value = ""; find(""); canvas.focus(); }
  });

  // ---- mouse, touch, keys
  canvas.addEventListener("wheel", (event) => {
    // The page scrolls as usual unless the timeline has the focus or Ctrl is held.
    if (!(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / plot());
    else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.0045), tOf(event.offsetX));
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.focus({ preventScroll: true });
    drag = { x: event.offsetX, from, to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = ((drag.x - event.offsetX) / plot()) * (drag.to - drag.from);
      if (Math.abs(drag.x - event.offsetX) > 3) drag.moved = true;
      if (drag.moved) { tip.hidden = true; view(drag.from + by, drag.to + by); }
      return;
    }
    hover = at(event.offsetX, event.offsetY);
    tip.hidden = !hover;
    if (hover) {
      tip.textContent = describe(hover);
      const x = Math.min(event.offsetX + 14, width - tip.offsetWidth - 8);
      tip.style.left = Math.max(x, 4) + "px";
      tip.style.top = event.offsetY + 18 + "px";
    }
    draw();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) select(at(event.offsetX, event.offsetY), false);
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => { hover = null; tip.hidden = true; draw(); });
  canvas.addEventListener("dblclick", (event) => {
    const span = at(event.offsetX, event.offsetY);
    if (span) view(span.lane.start[span.i] - span.lane.length[span.i] * 0.2, span.lane.start[span.i] + span.lane.length[span.i] * 1.2);
  });
  function neighbour(direction) { // the next or the last span of the same lane
    if (!selected) {
      const lane = lanes.find((l) => l.kind === "compute") ?? lanes[0];
      return select({ lane, i: Math.min(firstAfter(lane, from) + 8, lane.start.length - 1) }, false);
    }
    const i = selected.i + direction;
    if (i >= 0 && i < selected.lane.start.length) {
      const lane = selected.lane;
      select({ lane, i }, false);
      if (lane.start[i] < from || lane.start[i] + lane.length[i] > to) {
        const middle = lane.start[i] + lane.length[i] / 2, half = (to - from) / 2;
        view(middle - half, middle + half);
      }
    }
  }
  const keys = {
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), a: () => pan(-0.15), d: () => pan(0.15),
    "+": () => zoom(0.6), "=": () => zoom(0.6), w: () => zoom(0.6), "-": () => zoom(1 / 0.6), s: () => zoom(1 / 0.6),
    Home: () => view(0, total), 0: () => view(0, total), "/": () => search.focus(), f: () => search.focus(),
    n: () => next(1), N: () => next(-1), ".": () => neighbour(1), ",": () => neighbour(-1), Escape: () => select(null),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => (button.dataset.zoom === "all" ? view(0, total) : zoom(Number(button.dataset.zoom))));
  }
  const jump = document.getElementById("jump");
  const steps = lanes.find((lane) => lane.kind === "step");
  if (steps) {
    for (let i = 0; i < steps.start.length; i++) jump.append(new Option(nameOf(steps, i).replace("ProfilerStep#", "step "), i));
    jump.addEventListener("change", () => {
      if (jump.value === "") return view(0, total);
      const i = Number(jump.value);
      view(steps.start[i] - steps.length[i] * 0.03, steps.start[i] + steps.length[i] * 1.03);
    });
  } else jump.hidden = true;

  readColors();
  resize();
  new ResizeObserver(resize).observe(stage);
  window.addEventListener("beforeprint", resize);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); draw(); });
  canvas.paintNow = () => { const t = performance.now(); paint(); return performance.now() - t; }; // for tests
}
