"use strict";
// What every explorable shares: elements, controls, the prediction that unlocks it, the kinds of memory and how they
// look, and numbers as zerolab/measure/units.py writes them.
//
// Classic scripts: a browser refuses to import a module from a page that was opened as a file. Each explorable adds
// its functions to `zerolab` and calls `zerolab.show(name, question, build)`.

const zerolab = (() => {
  const COLOURS = {
    parameters: "#56B4E9",
    "gathered parameters": "#0072B2",
    gradients: "#E69F00",
    optimizer: "#009E73",
    activations: "#CC79A7",
    communication: "#D55E00",
    other: "#BBBBBB",
  };
  const LABELS = { optimizer: "optimizer state" };
  // Nothing depends on colour alone: each kind has a hatch too. Paths in a square of 8.
  const HATCHES = {
    parameters: "M0 8L8 0",
    "gathered parameters": "M4 0V8M0 4H8",
    gradients: "M3 4h2",
    optimizer: "M0 0L8 8",
    activations: "M0 8L8 0M0 0L8 8",
    communication: "M0 4H8",
    other: "",
  };

  // ---------------------------------------------------------------- elements

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child != null));
    return node;
  }
  const html = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  let made = 0;
  const newId = () => `explorable-${(made += 1)}`;

  // A label above its control.
  function field(label, control, note) {
    control.id = control.id || newId();
    return html("div", { class: "field" }, html("label", { for: control.id }, label), control, note);
  }
  const select = (options, value) =>
    html("select", {}, options.map(([name, text]) => html("option", { value: name, selected: name === value }, text)));

  // What a picture says, spoken when it changes.
  const status = () => html("p", { class: "said", role: "status" });
  // While something plays, a screen reader is not told of every step.
  function speak(said, text, playing) {
    said.setAttribute("aria-live", playing ? "off" : "polite");
    said.textContent = text;
  }

  // ---------------------------------------------------------------- kinds of memory

  // The patterns are defined once a page: url(#...) finds them from every picture.
  function kindFill(kind) {
    const id = `kind-${kind.replace(" ", "-")}`;
    if (!document.getElementById(id)) {
      const square = { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" };
      const look = { d: HATCHES[kind], stroke: "#fff", "stroke-opacity": 0.55, "stroke-width": 1.5 };
      const pattern = svg("pattern", square, svg("rect", { width: 8, height: 8, fill: COLOURS[kind] }), svg("path", look));
      document.body.append(svg("svg", { width: 0, height: 0, "aria-hidden": "true", class: "patterns" }, pattern));
    }
    return `url(#${id})`;
  }
  const legend = (kinds, words = LABELS) =>
    html("ul", { class: "legend" }, kinds.map((kind) => html("li", {}, swatch(kind), words[kind] || kind)));
  const swatch = (kind) =>
    svg("svg", { width: 18, height: 12, "aria-hidden": "true" }, svg("rect", { width: 18, height: 12, fill: kindFill(kind) }));

  // ---------------------------------------------------------------- a table that scrolls by itself

  // columns: [name, what `say` gets of it, whether it is marked]. lines: [name, say]; a column that has nothing gets "–".
  function comparison(about, caption, columns, lines) {
    const mark = (chosen) => ({ class: chosen ? "chosen" : null });
    const heads = columns.map(([name, , chosen]) => html("th", { scope: "col", ...mark(chosen) }, name));
    const body = lines.map(([name, say]) =>
      html("tr", {}, html("th", { scope: "row" }, name), columns.map(([, of, chosen]) => html("td", mark(chosen), of ? say(of) : "–"))));
    return html("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": about },
      html("table", { class: "numbers" },
        html("caption", {}, caption),
        html("thead", {}, html("tr", {}, html("td"), heads)),
        html("tbody", {}, body)));
  }

  // ---------------------------------------------------------------- numbers, as Python's f"{value:.{digits}f}"

  const isTie = (value, digits) => /^50*$/.test(value.toFixed(60).split(".")[1].slice(digits));
  function fixed(value, digits) {
    if (value >= 1e21 || !isTie(value, digits)) return value.toFixed(digits);
    const scale = 10 ** digits;
    return (roundEven(value * scale) / scale).toFixed(digits);
  }
  function roundEven(value) {
    const up = Math.round(value);
    return up - value === 0.5 && up % 2 ? up - 1 : up;
  }
  function inBytes(count) {
    const names = ["B", "kB", "MB", "GB", "TB", "PB"];
    for (const name of names) {
      const digits = name === "B" || count >= 100 ? 0 : count >= 10 ? 1 : 2;
      const text = fixed(count, digits);
      if (Number(text) < 1000 || name === "PB") return `${text} ${name}`;
      count /= 1000;
    }
    return "";
  }
  const withCommas = (number) => String(number).replace(/\B(?=(\d{3})+$)/g, ",");

  // ---------------------------------------------------------------- a prediction first

  // question: {ask, unit, answer (a number), because}. `open` is called once, by a prediction or a skip.
  function lock(place, question, open) {
    const { answer, unit, because } = question;
    const input = html("input", { type: "text", inputmode: "decimal", autocomplete: "off", size: 8 });
    const said = html("p", { class: "said", role: "status" });
    const unlock = (text) => {
      form.remove();
      said.textContent = text;
      open();
      place.querySelector(".opened").focus();
    };
    const predict = (event) => {
      event.preventDefault();
      const guess = readNumber(input.value, unit);
      if (!Number.isFinite(guess)) {
        said.textContent = `Write a number of ${unit}, or skip.`;
        input.focus();
        return;
      }
      unlock(`It is ${answer} ${unit}; you said ${input.value.trim()}: ${howFar(guess, answer)}. ${because}`);
    };
    const skip = html("button", { type: "button", onclick: () => unlock(`It is ${answer} ${unit}. ${because}`) }, "Skip");
    const line = html("div", { class: "answer" }, input, html("span", {}, unit), html("button", {}, "Predict"), skip);
    input.id = newId();
    const form = html("form", { onsubmit: predict }, html("label", { for: input.id }, question.ask), line);
    place.append(html("div", { class: "prediction" }, html("strong", {}, "First a prediction"), form, said));
  }
  // "1,500 MB" is 1500, "1,5" is 1.5, "1e3" is 1000; NaN for what is not a number, or has another unit.
  function readNumber(text, unit) {
    const [, digits, power = "", word = ""] = /^\s*[~≈]?\s*(\d[\d.,]*|\.\d+)(e[+-]?\d+)?\s*([a-z%]*)\s*$/i.exec(text) || [];
    if (!digits || (word && word.toLowerCase() !== unit.toLowerCase())) return NaN;
    return Number(digits.replace(/,(?=\d{3}\b)/g, "").replace(",", ".") + power);
  }
  // As lab.reveal says it.
  function howFar(guess, value) {
    if (guess === value) return "exactly right";
    const ratio = guess / value;
    if (ratio < 0.5 || ratio >= 2) return `${Number(ratio.toPrecision(3))} times as much`;
    const off = 100 * (ratio - 1);
    if (Math.abs(off) < 0.1) return "less than 0.1 % off";
    return `${Number(Math.abs(off).toPrecision(3))} % too ${off > 0 ? "much" : "little"}`;
  }

  // Wherever the page has a place for it: ask the question, then let build(element) fill the place.
  function show(name, question, build) {
    for (const place of document.querySelectorAll(`[data-explorable="${name}"]`)) {
      const open = () => {
        const inside = html("div", { class: "opened", tabindex: -1 });
        place.append(inside);
        build(inside);
      };
      place.replaceChildren();
      lock(place, question, open);
    }
  }

  // ---------------------------------------------------------------- moving through steps

  // A slider from 0 to last, buttons, and play. move(step, playing) is called after each change. `speed`: ms a step.
  // Keys: the slider's own (arrows, Home, End). Nothing plays by itself, and nothing goes on in a hidden tab.
  function player(name, move, speed = 900) {
    const slider = html("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": name, oninput: () => go(at()) });
    const button = (text, act) => html("button", { type: "button", onclick: act }, text);
    const back = button("Back", () => go(at() - 1));
    const next = button("Next", () => go(at() + 1));
    const play = button("Play", () => (timer ? stop() : start()));
    let timer = 0;
    const at = () => Number(slider.value);
    const last = () => Number(slider.max);
    function go(step) {
      stop();
      set(step);
    }
    function set(step) {
      slider.value = step;
      back.disabled = at() === 0;
      next.disabled = at() === last();
      slider.setAttribute("aria-valuetext", move(at(), timer !== 0) || "");
    }
    function start() {
      if (at() === last()) slider.value = 0;
      play.textContent = "Pause";
      timer = setInterval(() => {
        if (document.hidden) return;
        set(at() + 1);
        if (at() === last()) stop();
      }, speed);
    }
    function stop() {
      if (!timer) return;
      clearInterval(timer);
      timer = 0;
      play.textContent = "Play";
      set(at()); // says where it stands
    }
    const element = html("div", { class: "player" }, slider, html("div", { class: "row" }, back, play, next));
    return { element, go, at, resize: (steps, step = 0) => ((slider.max = steps), go(step)) };
  }

  const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  return {
    COLOURS, LABELS, html, svg, field, select, status, kindFill, legend, fixed, roundEven, inBytes, withCommas, show, still, newId,
    player, speak, comparison,
  };
})();
