"use strict";
// The ladder in motion, for the front page: the recorded step of every stage, side by side, moment by moment.
{
  const { html, svg, kindFill, legend, inBytes, still } = zerolab;
  const { course, held, sum, sameMoment, ORDER, STAGES } = zerolab.step;
  const RANKS = zerolab.recording.ranks;
  const SHARDS = ["everything in full", "optimizer ÷ 4", "gradients ÷ 4, too", "parameters ÷ 4, too"];
  const [WIDTH, HEIGHT, TOP, FOOT] = [640, 300, 26, 46];

  const courses = STAGES.map((_, stage) => course(stage, "fp32"));
  const lead = courses[3]; // it has the most moments; the others stand at the same one
  const highest = Math.max(...courses.flatMap(({ peaks }) => peaks));
  const scale = (HEIGHT - TOP - FOOT) / highest;

  function build(place) {
    const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "wide ladder", role: "img" });
    const groups = STAGES.map((name, stage) => {
      const left = (stage * WIDTH) / 4;
      const words = (text, y, kind) => svg("text", { x: left + WIDTH / 8, y, class: kind }, text);
      const size = words("", 0, "name");
      const bars = [...Array(RANKS).keys()].map((rank) =>
        Object.fromEntries(ORDER.map((kind) => [kind, svg("rect", { x: left + 16 + 33 * rank, width: 29, fill: kindFill(kind) })])));
      drawing.append(...bars.flatMap((bar) => Object.values(bar)), size, words(name, HEIGHT - FOOT + 20, "name"), words(SHARDS[stage], HEIGHT - FOOT + 38, "minor"));
      return { size, bars };
    });
    const said = html("p", { class: "small moment" });

    function draw(moment) {
      groups.forEach(({ size, bars }, stage) => {
        const now = courses[stage].moments[sameMoment(lead, moment, courses[stage])];
        let top = HEIGHT;
        bars.forEach((bar, rank) => {
          const sizes = held(now, rank);
          let y = HEIGHT - FOOT;
          for (const kind of ORDER) {
            y -= sizes[kind] * scale;
            bar[kind].setAttribute("y", y);
            bar[kind].setAttribute("height", sizes[kind] * scale);
          }
          top = Math.min(top, y);
        });
        size.setAttribute("y", top - 8);
        size.textContent = inBytes(sum(held(now, 0)));
      });
      const [phase, unit] = lead.moments[moment];
      said.textContent = phase === "step" ? "the optimizer's step" : phase === "zero_grad" ? "the gradients are released" : `${phase.replace("_", "-")}: ${unit}`;
    }

    // It moves by itself unless the reader asked for less motion, and stops at a click.
    let [moment, timer] = [0, 0];
    const button = html("button", { type: "button", onclick: () => (timer ? stop() : start()) });
    const end = lead.moments.length;
    function start() {
      timer = setInterval(() => document.hidden || draw((moment = (moment + 1) % end)), 160);
      button.textContent = "Pause";
    }
    function stop() {
      clearInterval(timer);
      timer = 0;
      button.textContent = "Play";
    }
    const used = ORDER.filter((kind) => kind !== "other");
    place.replaceChildren(drawing, html("div", { class: "row" }, button, said), legend(used));
    moment = lead.moments.findIndex(([phase]) => phase === "step") - 1; // backward has returned
    draw(moment);
    const sizes = groups.map(({ size }, stage) => `${size.textContent} with ${STAGES[stage]}`);
    drawing.setAttribute("aria-label", `When backward returns, each of four ranks holds ${sizes.join(", ")}.`);
    if (still()) stop();
    else start();
  }

  for (const place of document.querySelectorAll('[data-explorable="ladder"]')) build(place);
}
