"use strict";
// A recorded step of four ranks: docs/site/record.py wrote down what happened, and nothing here computes it.
{
  const { html, svg, field, select, status, kindFill, legend, fixed, inBytes, player, speak } = zerolab;
  const { courses, kinds, lines, ranks, sources } = zerolab.recording;

  const STAGES = ["DDP", "Zero1", "Zero2", "Zero3"];
  const ORDER = ["parameters", "optimizer", "gradients", "gathered parameters", "communication", "other", "activations"];

  // ---------------------------------------------------------------- reading a recording

  const course = (stage, precision) => courses[`${stage} ${precision}`];
  // Bytes of each kind that a rank holds; where all ranks hold the same, it is written once.
  const held = ([, , , bytes], rank) => Object.fromEntries((Array.isArray(bytes[0]) ? bytes[rank] : bytes).map((size, place) => [kinds[place], size]));
  const sum = (sizes) => Object.values(sizes).reduce((one, other) => one + other, 0);
  const under = ({ calls }, moment) => calls.filter(([, , , , first, last]) => first <= moment && moment <= last);

  // Moments that follow each other with the same unit in the same phase are one passage. Every stage has the same
  // passages in the same order, so the third one of this kind in one stage is the third one in another.
  function passages({ moments }) {
    const seen = {};
    let [before, name] = ["", ""];
    return moments.map(([phase, unit]) => {
      const now = `${phase} ${unit}`;
      if (now !== before) name = `${now} ${(seen[now] = (seen[now] || 0) + 1)}`;
      before = now;
      return name;
    });
  }
  // The moment of `to` that corresponds to a moment of `from`: as far into the same passage, at most to its end.
  function sameMoment(from, moment, to) {
    const [mine, theirs] = [passages(from), passages(to)];
    const [first, last] = [theirs.indexOf(mine[moment]), theirs.lastIndexOf(mine[moment])];
    return Math.min(first + moment - mine.indexOf(mine[moment]), last);
  }

  // The method that a line is in, as {lines, at}.
  function method([file, name, text]) {
    const code = sources[file].split("\n");
    const begin = code.findIndex((line) => line.startsWith(`    def ${name}(`));
    const length = code.slice(begin + 1).findIndex((line) => /^ {0,4}\S/.test(line));
    const body = code.slice(begin, length < 0 ? undefined : begin + 1 + length);
    while (!body.at(-1).trim()) body.pop();
    return { lines: body, at: body.findIndex((line) => line.trim() === text) };
  }

  zerolab.step = { course, held, sum, under, passages, sameMoment, method, lines, ORDER, STAGES };

  // ---------------------------------------------------------------- the picture

  const [WIDTH, HEIGHT] = [320, 120];

  // One rank's skyline; what is still to come is pale.
  function panel(chosen, rank, highest) {
    const { moments } = chosen;
    const x = (moment) => (moment / moments.length) * WIDTH;
    const y = (bytes) => HEIGHT - (bytes / highest) * HEIGHT;
    const clip = svg("rect", { x: 0, y: 0, height: HEIGHT, width: 0 });
    const id = zerolab.newId();
    const areas = svg("g", {});
    let floor = moments.map(() => 0);
    for (const kind of ORDER) {
      const ceiling = moments.map((moment, place) => floor[place] + held(moment, rank)[kind]);
      const top = ceiling.map((bytes, place) => `L${x(place)} ${y(bytes)}L${x(place + 1)} ${y(bytes)}`).join("");
      const bottom = floor.map((bytes, place) => `L${x(place + 1)} ${y(bytes)}L${x(place)} ${y(bytes)}`).reverse().join("");
      if (ceiling.some((bytes, place) => bytes > floor[place])) areas.append(svg("path", { d: `M${top.slice(1)}${bottom}z`, fill: kindFill(kind) }));
      floor = ceiling;
    }
    const past = areas.cloneNode(true);
    past.setAttribute("clip-path", `url(#${id})`);
    areas.setAttribute("class", "to-come");
    const peak = y(chosen.peaks[rank]);
    const cursor = svg("line", { y1: 0, y2: HEIGHT, class: "cursor" });
    const name = html("figcaption");
    const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "wide", "aria-hidden": "true" },
      svg("clipPath", { id }, clip), areas, past, svg("line", { x1: 0, x2: WIDTH, y1: peak, y2: peak, class: "peak" }), cursor);
    const move = (moment) => {
      clip.setAttribute("width", x(moment + 1));
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(moment + 1));
      name.textContent = `rank ${rank}: ${inBytes(sum(held(moments[moment], rank)))}`;
    };
    return { drawing: html("figure", {}, name, drawing), move };
  }

  // The units in a row: which is at work, and what is under way for it.
  function units(chosen, moment) {
    const names = [...new Set(chosen.moments.map(([, unit]) => unit))].filter(Boolean);
    const [phase, unit] = chosen.moments[moment];
    return html("ul", { class: "units" }, names.map((name) => {
      const calls = under(chosen, moment).filter(([, of]) => of === name);
      const said = calls.map(([op, , payload]) => html("span", { class: "call" }, `${op.replace("_", "-")} ${inBytes(payload)}`));
      return html("li", { class: name === unit ? "at-work" : null }, html("strong", {}, name), html("span", {}, name === unit ? phase.replace("_", " ") : ""), said);
    }));
  }

  function code(line) {
    if (!line) return html("p", { class: "small" }, "No line of a stage's file: the model's own code computes, or torch's optimizer.");
    const { lines: body, at } = method(line);
    const rows = body.map((text, place) => html(place === at ? "mark" : "span", {}, text.slice(4) || " "));
    return html("div", {}, html("p", { class: "small" }, html("strong", {}, line[0])), html("pre", { tabindex: 0, role: "region", "aria-label": `Lines of ${line[0]}` }, html("code", {}, rows)));
  }

  function sentence(chosen, moment) {
    const [phase, unit, line] = chosen.moments[moment];
    const total = inBytes(sum(held(chosen.moments[moment], 0)));
    const calls = under(chosen, moment).map(([op, of, payload, sent]) => `${op.replace("_", "-")} of ${of}, ${inBytes(payload)}, of which a rank sends ${inBytes(sent)}`);
    const at = line === null ? "" : ` Line of ${lines[line][0]}: ${lines[line][2]}`;
    const doing = phase === "step" ? "The optimizer takes its step" : phase === "zero_grad" ? "The gradients are released" : `${phase} of ${unit}`;
    return `Moment ${moment + 1} of ${chosen.moments.length}. ${doing}. Rank 0 holds ${total}.${calls.length ? ` Under way: ${calls.join("; ")}.` : ""}${at}`;
  }

  // ---------------------------------------------------------------- controls

  function build(place) {
    const precision = select([["fp32", "fp32"], ["bf16", "bf16, fp32 masters"]], "fp32");
    const buttons = STAGES.map((_, number) => html("button", { type: "button", onclick: () => choose(number) }));
    const said = status();
    const [panels, row, source] = [html("div", { class: "panels" }), html("div"), html("div", { class: "source" })];
    let stage = 3;
    let moves = [];
    const chosen = () => course(stage, precision.value);
    const steps = player("moment of the step", (moment, playing) => {
      const line = chosen().moments[moment][2];
      for (const move of moves) move(moment);
      row.replaceChildren(units(chosen(), moment));
      source.replaceChildren(code(line === null ? null : lines[line]));
      buttons.forEach((button, number) => {
        const other = course(number, precision.value);
        const size = sum(held(other.moments[sameMoment(chosen(), moment, other)], 0));
        button.replaceChildren(html("strong", {}, `${number} ${STAGES[number]}`), ` ${inBytes(size)}`);
        button.setAttribute("aria-pressed", number === stage);
      });
      const text = sentence(chosen(), moment);
      speak(said, text, playing);
      return text;
    }, 350);
    function draw(moment) {
      const highest = Math.max(...STAGES.flatMap((_, number) => course(number, precision.value).peaks));
      const drawn = [...Array(ranks).keys()].map((rank) => panel(chosen(), rank, highest));
      panels.replaceChildren(...drawn.map(({ drawing }) => drawing));
      moves = drawn.map(({ move }) => move);
      steps.resize(chosen().moments.length - 1, moment);
    }
    function choose(number) {
      const before = chosen();
      const moment = steps.at();
      stage = number;
      draw(sameMoment(before, moment, chosen()));
    }
    precision.addEventListener("input", () => {
      const before = course(stage, precision.value === "fp32" ? "bf16" : "fp32");
      draw(sameMoment(before, steps.at(), chosen()));
    });
    const used = ORDER.filter((kind) => Object.values(courses).some(({ moments }) => moments.some((moment) => held(moment, 0)[kind])));
    const stages = html("div", { class: "stages", role: "group", "aria-label": "stage, and what rank 0 holds at this moment" }, buttons);
    place.append(html("div", { class: "controls" }, field("precision", precision)), stages, steps.element, legend(used), panels, row, said, source);
    draw(0);
  }

  const [ddp, zero3] = [0, 3].map((stage) => course(stage, "fp32").peaks[0]);
  const question = {
    ask: `Four ranks train a small GPT in fp32 with Adam. With DDP a rank holds ${inBytes(ddp)} at the peak of a step. How many MB does it hold at the peak with ZeRO-3?`,
    unit: "MB",
    answer: Number(fixed(zero3 / 1e6, 2)),
    because: `What a rank keeps is a quarter. At the peak, full parameters and gradients of the units in flight come on top, and activations, which no stage shards.`,
  };
  if (document.querySelector('[data-explorable="step"]')) zerolab.show("step", question, build);
}
