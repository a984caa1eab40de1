"use strict";
// Four schedules of a pipeline: what each stage does when, how long it stands still, and what it keeps for backward.
{
  const { html, svg, field, select, status, kindFill, fixed, player, speak, comparison } = zerolab;

  const SCHEDULES = { gpipe: "GPipe", "1f1b": "1F1B", interleaved: "interleaved", "zero-bubble": "zero bubble" };
  // A backward (B) makes the gradients of its input (I) and then those of its weights (W). Only zero bubble parts them.
  const LOOKS = { F: "parameters", B: "gradients", I: "gradients", W: "optimizer" };
  const WORDS = { F: "forward", B: "backward", I: "gradient of the input", W: "gradient of the weights" };
  const TICKS = { F: 2, B: 4, I: 2, W: 2 }; // of a stage that holds an Nth of the model
  const range = (count) => [...Array(count).keys()];
  const partsOf = (schedule) => (schedule === "interleaved" ? 2 : 1); // of the model, on each rank

  // What a rank does, in order: [what, which of its parts, which micro-batch].
  function order(schedule, rank, n, m) {
    const parts = partsOf(schedule);
    const steps = parts * m;
    // Interleaved, N micro-batches go through one part, and then through the next.
    const batch = (k) => n * Math.floor(k / (n * parts)) + (k % n);
    const part = (k) => Math.floor(k / n) % parts;
    const ahead = { gpipe: steps, interleaved: (parts - 1) * n + 2 * (n - 1 - rank) }[schedule] ?? n - 1 - rank;
    const forwards = range(steps).map((k) => ["F", part(k), batch(k)]);
    const done = forwards.splice(0, Math.min(ahead, steps));
    const split = schedule === "zero-bubble";
    let weights = 0;
    for (const k of range(steps)) {
      done.push(...forwards.splice(0, 1), [split ? "I" : "B", parts - 1 - part(k), batch(k)]);
      if (split && k >= rank) done.push(["W", 0, weights++]); // the later a rank, the longer it puts them off
    }
    while (split && weights < steps) done.push(["W", 0, weights++]);
    return done;
  }

  // Each rank goes through its order, and waits where what it needs is not there yet. A message takes no time.
  function run(schedule, n, m) {
    const parts = partsOf(schedule);
    const spans = range(n).map(() => []);
    const left = range(n).map((rank) => order(schedule, rank, n, m));
    const ends = new Map(); // "F 3 0": when the forward of stage 3 on micro-batch 0 has ended
    function ready(what, stage, batch) {
      if (what === "F") return stage ? ends.get(`F ${stage - 1} ${batch}`) : 0;
      if (what === "W") return ends.get(`I ${stage} ${batch}`);
      return ends.get(stage === n * parts - 1 ? `F ${stage} ${batch}` : `${what} ${stage + 1} ${batch}`);
    }
    for (let went = true; went; ) {
      went = false;
      for (const rank of range(n))
        while (left[rank].length) {
          const [what, part, batch] = left[rank][0];
          const stage = part * n + rank;
          const from = ready(what, stage, batch);
          if (from === undefined) break;
          const begin = Math.max(from, spans[rank].at(-1)?.end ?? 0);
          const end = begin + TICKS[what] / parts;
          spans[rank].push({ what, part, batch, begin, end });
          ends.set(`${what} ${stage} ${batch}`, end);
          left[rank].shift();
          went = true;
        }
    }
    return spans;
  }

  // bubble: of all ranks' time, the fraction in which they stand still. kept: by each rank, at most, in activations of
  // one micro-batch on an Nth of the model. sends: messages forward, for each micro-batch.
  function totals(schedule, n, m) {
    const spans = run(schedule, n, m);
    const ticks = Math.max(...spans.map((of) => of.at(-1).end));
    const busy = spans.flat().reduce((total, { begin, end }) => total + end - begin, 0);
    const kept = spans.map((of) => {
      let [now, most] = [0, 0];
      for (const { what } of of) most = Math.max(most, (now += { F: 1, I: 0 }[what] ?? -1));
      return most / partsOf(schedule);
    });
    return { ticks, bubble: 1 - busy / (n * ticks), kept, sends: n * partsOf(schedule) - 1 };
  }

  zerolab.pipeline = { order, run, totals };

  // ---------------------------------------------------------------- the picture

  const at = (of, tick) => of.find(({ begin, end }) => begin < tick && tick <= end);

  // A row for each rank, time to the right. What comes after this tick is pale.
  function gantt(spans, ticks, tick) {
    const [left, height, wide] = [34, 26, 640];
    const place = (time) => left + ((wide - left) * time) / ticks;
    const drawing = svg("svg", { viewBox: `0 0 ${wide} ${height * spans.length + 6}`, class: "pipeline wide", "aria-hidden": "true" });
    spans.forEach((of, rank) => {
      const y = height * rank + 3;
      drawing.append(svg("text", { x: 4, y: y + 17 }, rank), svg("rect", { x: left, y, width: wide - left, height: height - 4, class: "still" }));
      for (const { what, part, batch, begin, end } of of) {
        const [x, width] = [place(begin), place(end) - place(begin)];
        const later = begin >= tick && tick > 0 ? "to-come" : null;
        const box = svg("rect", { x, y, width, height: height - 4, fill: kindFill(LOOKS[what]), class: part ? "second" : "first" });
        const number = width >= 18 ? svg("text", { x: x + width / 2, y: y + 16, class: "number" }, batch) : null;
        drawing.append(svg("g", { class: later }, svg("title", {}, `rank ${rank}: ${WORDS[what]} of micro-batch ${batch}`), box, number));
      }
    });
    if (tick) drawing.append(svg("line", { x1: place(tick), x2: place(tick), y1: 0, y2: height * spans.length + 6, class: "cursor" }));
    return drawing;
  }

  function key(schedule) {
    const kinds = schedule === "zero-bubble" ? ["F", "I", "W"] : ["F", "B"];
    const swatch = (fill) => svg("svg", { width: 18, height: 12, "aria-hidden": "true" }, svg("rect", { width: 18, height: 12, ...fill }));
    const items = kinds.map((what) => html("li", {}, swatch({ fill: kindFill(LOOKS[what]) }), WORDS[what]));
    const second = partsOf(schedule) > 1 ? html("li", {}, swatch({ class: "second", fill: "none" }), "in its second part") : null;
    return html("ul", { class: "legend" }, items, second, html("li", {}, swatch({ class: "still" }), "stands still"));
  }

  function compare(n, m, chosen) {
    const all = Object.entries(SCHEDULES).map(([schedule, name]) => [name, totals(schedule, n, m), schedule === chosen]);
    const lines = [
      ["stands still", (t) => `${fixed(100 * t.bubble, 1)} %`],
      ["kept on the first rank", (t) => t.kept[0]],
      ["kept on the last rank", (t) => t.kept.at(-1)],
      ["messages forward", (t) => t.sends],
    ];
    return comparison("The four schedules compared", `${n} ranks, ${m} micro-batches`, all, lines);
  }

  function sentence(schedule, spans, ticks, tick, { bubble }) {
    const n = spans.length;
    if (tick === 0) return `${SCHEDULES[schedule]}: ${ticks} ticks, of which ranks stand still for ${fixed(100 * bubble, 1)} % on average.`;
    const now = spans.map((of) => at(of, tick));
    const still = now.filter((span) => !span).length;
    const [what, batch] = now[0] ? [WORDS[now[0].what], now[0].batch] : [];
    const first = now[0] ? `Rank 0: ${what} of micro-batch ${batch}` : "Rank 0 stands still";
    return `Tick ${tick} of ${ticks}. ${first}. ${still === 0 ? "All ranks work" : `Of ${n} ranks ${still} stand${still === 1 ? "s" : ""} still`}.`;
  }

  // ---------------------------------------------------------------- controls

  function build(place) {
    const schedule = select(Object.entries(SCHEDULES), "gpipe");
    const ranks = select(["2", "4", "8"].map((n) => [n, n]), "8");
    const each = select(["1", "2", "4", "8"].map((n) => [n, n]), "1");
    const said = status();
    const drawn = html("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "What each rank does when" });
    const [named, compared] = [html("div"), html("div")];
    let spans, sums;
    const steps = player("tick", (tick, playing) => {
      const text = sentence(schedule.value, spans, sums.ticks, tick, sums);
      drawn.replaceChildren(gantt(spans, sums.ticks, tick));
      speak(said, text, playing);
      return text;
    }, 300);
    function restart() {
      const [n, m] = [Number(ranks.value), Number(ranks.value) * Number(each.value)];
      spans = run(schedule.value, n, m);
      sums = totals(schedule.value, n, m);
      named.replaceChildren(key(schedule.value));
      compared.replaceChildren(compare(n, m, schedule.value));
      steps.resize(sums.ticks);
    }
    const controls = html("div", { class: "controls" }, field("schedule", schedule), field("ranks", ranks), field("micro-batches per rank", each));
    controls.addEventListener("input", restart);
    place.append(controls, steps.element, said, named, drawn, compared);
    restart();
  }

  const question = {
    ask: "Eight ranks, eight micro-batches: all forwards, then all backwards. What percentage of its time does a rank stand still?",
    unit: "%",
    answer: Number(fixed(100 * totals("gpipe", 8, 8).bubble, 1)),
    because: "It waits for N-1 micro-batches' worth of time and works for M: (N-1)/(M+N-1).",
  };
  zerolab.show("pipeline", question, build);
}
