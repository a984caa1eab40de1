"use strict";
// A step on a link: what a rank computes, what travels meanwhile, and what nothing hides.
// The model of zerolab/measure/overlap.py, in bf16; a test compares every moment.
{
  const { html, svg, field, select, status, kindFill, legend, fixed, inBytes, withCommas, comparison } = zerolab;

  const STAGES = ["DDP", "Zero1", "Zero2", "Zero3"];
  const BYTES = 2; // of an element, in bf16
  const WAITS = { gather: "gathered", reduce: "reduced" };

  // ---------------------------------------------------------------- the model

  // What a rank does in each phase. Unit 0 is the root. A gather and a reduction are started, and waited for later.
  function* forward(stage, last, prefetch) {
    for (let unit = 0; unit <= last; unit++) {
      if (stage > 0) {
        if (unit === 0 || !prefetch) yield ["gather", unit];
        yield ["gathered", unit];
        if (prefetch && unit < last) yield ["gather", unit + 1];
      }
      if (unit > 0) yield ["compute", unit];
    }
    yield ["compute", 0];
  }
  function* backward(stage, last, prefetch) {
    if (stage === 3 && prefetch) yield ["gather", last];
    yield ["compute", 0];
    for (let unit = last; unit > 0; unit--) {
      if (stage === 3) {
        if (!prefetch) yield ["gather", unit];
        yield ["gathered", unit];
      }
      if (unit + 2 <= last) yield ["reduced", unit + 2];
      if (stage === 3 && prefetch && unit > 1) yield ["gather", unit - 1];
      if (unit < last) yield ["reduce", unit + 1];
      yield ["compute", unit];
    }
    if (last > 1) yield ["reduced", 2];
    for (const unit of [1, 0]) yield* [["reduce", unit], ["reduced", unit]];
  }

  const passes = (op) => (op === "all_reduce" ? 2 : 1);

  // units: [elements, seconds of the forward] of each, the root first. A call is on the link from begin to end.
  function predicted(stage, units, ranks, bandwidth, latency, prefetch) {
    const ops = { gather: "all_gather", reduce: stage ? "reduce_scatter" : "all_reduce" };
    const [spans, calls, latest] = [[], [], {}];
    let [now, free] = [0, 0];
    for (const [phase, doings] of Object.entries({ forward, backward }))
      for (const [verb, unit] of doings(stage, units.length - 1, prefetch)) {
        const [elements, seconds] = units[unit];
        const op = ops[verb];
        if (verb === "compute") {
          const end = now + (phase === "forward" ? seconds : 2 * seconds);
          spans.push({ phase, unit, begin: now, end });
          now = end;
        } else if (op) {
          const sent = Math.floor((passes(op) * elements * BYTES * (ranks - 1)) / ranks);
          const begin = Math.max(now, free);
          free = begin + (passes(op) * (ranks - 1) * latency + sent / bandwidth);
          latest[`${WAITS[verb]} ${unit}`] = free;
          calls.push({ verb, op, unit, phase, sent, start: now, begin, end: free });
        } else now = Math.max(now, latest[`${verb} ${unit}`]);
      }
    return { spans, calls, end: now };
  }

  const sum = (of, measure) => of.reduce((total, one) => total + measure(one), 0);
  const seconds = ({ begin, end }) => end - begin;

  // The bandwidth from which on every phase could hide what it sends. The latency of its messages takes time, too.
  function knee({ spans, calls }, ranks, latency) {
    const least = ["forward", "backward"].map((name) => {
      const mine = calls.filter(({ phase }) => phase === name);
      const late = sum(mine, ({ op }) => passes(op)) * (ranks - 1) * latency;
      const time = sum(spans.filter(({ phase }) => phase === name), seconds) - late;
      return mine.length ? (time > 0 ? sum(mine, ({ sent }) => sent) / time : Infinity) : 0;
    });
    return Math.max(...least);
  }

  // In seconds: the step, what of it is computing, and standing still: before, between and after computing.
  function totals({ spans, calls, end }) {
    const computing = sum(spans, seconds);
    const [still, before, after] = [end - computing, spans[0].begin, end - spans.at(-1).end];
    const travelling = sum(calls, seconds);
    const between = Math.max(0, still - before - after); // rounding may leave a trace
    return { end, computing, still, before, between, after, travelling, score: 1 - still / travelling };
  }

  zerolab.overlap = { predicted, knee, totals };

  // ---------------------------------------------------------------- settings

  // 1.3 billion elements, and what a GPU computes in a second. 2 FLOP for each weight and token make a forward.
  const [ROOT, BLOCKS, FLOPS] = [0.1e9, 1.2e9, 400e12];
  const BANDWIDTHS = [1e9, 1e10, 1e11].flatMap((scale) => [1, 1.25, 1.6, 2, 2.5, 3.15, 4, 5, 6.3, 8].map((step) => step * scale)).concat(1e12);
  const START = { stage: "3", prefetch: "yes", units: "12", ranks: "8", tokens: "8192", latency: "20e-6", bandwidth: 50e9 };

  // The step with these settings, but for `change`.
  function take(settings, change) {
    const { stage, prefetch, units, ranks, tokens, latency, bandwidth } = { ...settings, ...change };
    const sizes = [ROOT, ...Array(Number(units)).fill(BLOCKS / units)];
    const model = sizes.map((elements) => [elements, (2 * elements * tokens) / FLOPS]);
    const step = predicted(Number(stage), model, Number(ranks), bandwidth, Number(latency), prefetch === "yes");
    return { ...step, ...totals(step), knee: knee(step, Number(ranks), Number(latency)) };
  }

  const inTime = (time) => (time >= 1 ? `${fixed(time, 2)} s` : `${fixed(1e3 * time, 1)} ms`);
  const perSecond = (bandwidth) => (bandwidth === Infinity ? "none" : `${inBytes(bandwidth)}/s`);
  const short = (text) => text.replace(/\.0+(?= )/, ""); // "50.0 ms": "50 ms"

  // ---------------------------------------------------------------- the pictures

  const WIDE = 640;
  const LOOKS = { forward: "parameters", backward: "gradients", gather: "gathered parameters", reduce: "communication" };

  // Above what the rank computes, black where it stands still; below what is on its link.
  function gantt({ spans, calls, end }) {
    const [left, height] = [76, 30];
    const place = (time) => left + ((WIDE - left - 20) * time) / end;
    const drawing = svg("svg", { viewBox: `0 0 ${WIDE} 96`, class: "pipeline wide", "aria-hidden": "true" });
    const still = { x: left, width: place(end) - left };
    ["computes", "link"].forEach((name, lane) => {
      const y = 2 + lane * height;
      drawing.append(svg("text", { x: left / 2 - 4, y: y + 18 }, name), svg("rect", { ...still, y, height: height - 4, class: "still" }));
      if (!lane) drawing.append(svg("rect", { ...still, y: y + 9, height: 8, class: "waits" }));
      for (const { verb, phase, unit, begin, end } of lane ? calls : spans) {
        const [what, x, width] = [verb || phase, place(begin), place(end) - place(begin)];
        const title = `${what} of ${unit ? `unit ${unit}` : "the root"}, ${inTime(begin)} to ${inTime(end)}`;
        const number = width >= (unit ? 20 : 36) ? svg("text", { x: x + width / 2, y: y + 17, class: "number" }, unit || "root") : null;
        drawing.append(svg("g", {}, svg("title", {}, title), svg("rect", { x, y, width, height: height - 4, fill: kindFill(LOOKS[what]), class: width > 4 ? "first" : null }), number));
      }
    });
    const scale = 10 ** Math.floor(Math.log10(end / 2.5));
    const tick = scale * [5, 2, 1].find((step) => step * scale <= end / 2.5);
    for (let time = 0; time <= end; time += tick) {
      const x = place(time);
      drawing.append(svg("line", { x1: x, x2: x, y1: 62, y2: 70, class: "axis" }), svg("text", { x, y: 88, class: "tick" }, time ? short(inTime(time)) : 0));
    }
    return drawing;
  }

  function key(stage) {
    const words = { parameters: "forward", gradients: "backward", "gathered parameters": "all-gather", communication: stage === "0" ? "all-reduce" : "reduce-scatter" };
    const list = legend(Object.values(LOOKS).filter((kind) => stage !== "0" || kind !== LOOKS.gather), words);
    const black = svg("svg", { width: 18, height: 12, "aria-hidden": "true" }, svg("rect", { y: 3, width: 18, height: 6, class: "waits" }));
    list.append(html("li", {}, black, "stands still"));
    return list;
  }

  // The time of a step at every bandwidth, on logarithmic scales.
  function curve(settings, { end, computing, knee }) {
    const [left, right, top, foot] = [88, WIDE - 16, 14, 190];
    const points = BANDWIDTHS.map((bandwidth) => ({ bandwidth, ...take(settings, { bandwidth }) }));
    const inTurn = (point) => point.computing + point.travelling;
    const [low, high] = [computing / 1.4, 1.1 * inTurn(points[0])].map(Math.log);
    const x = (bandwidth) => left + ((right - left) * Math.log10(bandwidth / 1e9)) / 3;
    const y = (time) => foot - ((foot - top) * (Math.log(time) - low)) / (high - low);
    const drawing = svg("svg", { viewBox: `0 0 ${WIDE} 224`, class: "knee wide", "aria-hidden": "true" });
    const rule = (x1, y1, x2, y2, kind) => drawing.append(svg("line", { x1, y1, x2, y2, class: kind }));
    const name = (x, y, text, kind) => drawing.append(svg("text", { x, y, class: kind }, text));
    const line = (time, kind) => drawing.append(svg("polyline", { points: points.map((point) => `${x(point.bandwidth)},${y(time(point))}`).join(" "), class: kind }));
    rule(left, foot, right, foot, "axis");
    for (const bandwidth of [1e9, 1e10, 1e11, 1e12]) {
      rule(x(bandwidth), foot, x(bandwidth), foot + 6, "axis");
      name(Math.min(x(bandwidth), WIDE - 40), foot + 26, short(perSecond(bandwidth)));
    }
    for (const time of [computing, ...[0.01, 0.1, 1, 10, 100].filter((time) => time > 1.6 * computing && y(time) > top)]) {
      rule(left, y(time), right, y(time), "axis");
      name(left / 2 - 4, y(time) + 5, short(time === computing && time < 1 ? `${fixed(1e3 * time, 0)} ms` : inTime(time)));
    }
    if (knee >= 1e9 && knee <= 1e12) {
      rule(x(knee), top, x(knee), foot, "at-knee");
      const after = x(knee) < WIDE / 2 + 90;
      name(x(knee) + (after ? 8 : -8), top + 14, `knee ${perSecond(knee)}`, after ? "after" : "before");
    }
    line(inTurn, "in-turn");
    line((point) => point.end, "step");
    drawing.append(svg("circle", { cx: x(settings.bandwidth), cy: y(end), r: 7, class: "here" }));
    return drawing;
  }

  function compare(settings) {
    const all = STAGES.map((name, stage) => [name, take(settings, { stage }), stage === Number(settings.stage)]);
    const lines = [
      ["a step takes", (t) => inTime(t.end)],
      ["stands still", (t) => inTime(t.still)],
      ["· before computing", (t) => inTime(t.before)],
      ["· in between", (t) => inTime(t.between)],
      ["· after computing", (t) => inTime(t.after)],
      ["something travels", (t) => inTime(t.travelling)],
      ["overlap score", (t) => fixed(t.score, 2)],
      ["knee", (t) => perSecond(t.knee)],
    ];
    return comparison("The four stages compared", `At every stage a rank computes for ${inTime(all[0][1].computing)}`, all, lines);
  }

  function sentence({ stage, prefetch, bandwidth }, { end, computing, still, travelling, score, knee }) {
    const how = stage === "0" ? "" : prefetch === "yes" ? " with prefetch" : " without prefetch";
    const step = `${STAGES[stage]}${how} at ${perSecond(bandwidth)}: a step takes ${inTime(end)}. The rank computes for ${inTime(computing)} and stands still for ${inTime(still)}.`;
    const hidden = `Something travels for ${inTime(travelling)}, and ${fixed(100 * score, 0)} % of that is hidden.`;
    if (knee === Infinity) return `${step} ${hidden} There is no knee: the latency of a phase's messages alone takes longer than its computing.`;
    if (bandwidth < knee) return `${step} ${hidden} The link is below the knee, ${perSecond(knee)}: a phase sends more than fits behind its computing.`;
    const late = how === " without prefetch" ? ", but each gather starts only when it is needed" : "";
    return `${step} ${hidden} The link is above the knee, ${perSecond(knee)}: what a phase sends fits behind its computing${late}.`;
  }

  // ---------------------------------------------------------------- controls

  function build(place) {
    const numbers = (...values) => values.map((value) => [String(value), withCommas(value)]);
    const controls = {
      stage: select(STAGES.map((name, stage) => [String(stage), `${stage} ${name}`]), START.stage),
      prefetch: select([["yes", "one unit ahead"], ["no", "none"]], START.prefetch),
      units: select(numbers(2, 4, 8, 12, 24), START.units),
      ranks: select(numbers(2, 8, 64, 512), START.ranks),
      tokens: select(numbers(2048, 4096, 8192, 16384, 32768), START.tokens),
      latency: select([["0", "0"], ["5e-6", "5 µs"], ["20e-6", "20 µs"], ["100e-6", "100 µs"], ["1e-3", "1 ms"]], START.latency),
      bandwidth: html("input", { type: "range", min: 0, max: BANDWIDTHS.length - 1, value: BANDWIDTHS.indexOf(START.bandwidth) }),
    };
    const labels = { units: "units besides the root", tokens: "tokens per rank", latency: "latency of a message", bandwidth: "bandwidth of the link" };
    const [said, speed] = [status(), html("span", { class: "speed" })];
    const drawn = html("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "What a rank computes and what travels" });
    const [named, swept, compared] = [html("div"), html("div"), html("div")];
    const explained = "The time of a step at every bandwidth, on logarithmic scales; the dot is this link. Dashed: nothing overlaps. Lowest rule: computing alone.";
    function refresh() {
      const settings = Object.fromEntries(Object.entries(controls).map(([name, control]) => [name, control.value]));
      settings.bandwidth = BANDWIDTHS[settings.bandwidth];
      const step = take(settings, {});
      controls.prefetch.disabled = settings.stage === "0"; // which gathers nothing
      speed.textContent = perSecond(settings.bandwidth);
      controls.bandwidth.setAttribute("aria-valuetext", speed.textContent);
      said.textContent = sentence(settings, step);
      named.replaceChildren(key(settings.stage));
      drawn.replaceChildren(gantt(step));
      swept.replaceChildren(curve(settings, step));
      compared.replaceChildren(compare(settings));
    }
    const fields = Object.entries(controls).map(([name, control]) => field(labels[name] || name, control, name === "bandwidth" ? speed : null));
    const grid = html("div", { class: "controls" }, fields);
    grid.addEventListener("input", refresh);
    place.append(grid, said, named, drawn, swept, html("p", { class: "small" }, explained), compared);
    refresh();
  }

  const [ddp, zero3] = ["0", "3"].map((stage) => take(START, { stage }));
  const question = {
    ask: `A rank computes for ${inTime(ddp.computing)} in a step. With DDP it stands still for another ${inTime(ddp.still)}, as the last two all-reduces have nothing to hide behind. ZeRO-3 also gathers every unit, in forward and again in backward, over the same link. For how many ms does the rank stand still then?`,
    unit: "ms",
    answer: Number(fixed(1e3 * zero3.still, 1)),
    because: "The first two gathers and the last two reductions have nothing to hide behind, and a gather and a reduction together take as long as an all-reduce. All else hides: this link is fast enough.",
  };
  zerolab.show("overlap", question, build);
}
