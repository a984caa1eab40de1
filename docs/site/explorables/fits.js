"use strict";
// Does it fit? The formulas of zerolab/measure/formulas.py and planning.py; a test compares them to the byte.
{
  const { html, svg, field, select, status, kindFill, legend, fixed, roundEven, inBytes, comparison } = zerolab;

  const STAGES = ["DDP", "Zero1", "Zero2", "Zero3"];
  const CATEGORIES = ["parameters", "gradients", "optimizer"];
  const DTYPES = { fp32: { master: 4, compute: 4, reduce: 4 }, bf16: { master: 4, compute: 2, reduce: 2 } }; // bytes
  const OPTIMIZERS = { adam: 8, momentum: 4, sgd: 0, muon: 4 }; // bytes of state per parameter
  const MANY = 10 ** 15; // so many that rounding to a byte does not show

  // ---------------------------------------------------------------- formulas

  // The double nearest to a/b, as Python divides whole numbers. A sticky bit stands for the rest of the division.
  function quotient(a, b) {
    const [top, bottom] = [BigInt(a), BigInt(b)];
    const shift = BigInt(Math.max(0, 56 + bottom.toString(2).length - top.toString(2).length));
    const scaled = top << shift;
    return Number((scaled / bottom) | (scaled % bottom ? 1n : 0n)) / 2 ** Number(shift);
  }

  // Bytes of model states on one rank when backward returns; with offload, those on the device.
  function stateBytes(stage, ranks, parameters, { precision, optimizer, offload }) {
    const { master, compute, reduce } = DTYPES[precision];
    const [full, share] = [parameters, parameters / ranks];
    const held = stage >= 3 ? share : full;
    if (offload) return { parameters: roundEven(held * compute), gradients: 0, optimizer: 0 };
    const copy = stage >= 3 ? 0 : full; // stage 3 keeps no copy in the compute dtype: each gather makes one
    const weights = master === compute ? held * master : copy * compute + (stage >= 1 ? share : full) * master;
    const owned = optimizer === "muon"; // each parameter has one owner, in stage 0 too
    return {
      parameters: roundEven(weights),
      gradients: roundEven((stage >= 2 ? share : full) * reduce),
      optimizer: roundEven((stage >= 1 || owned ? share : full) * OPTIMIZERS[optimizer]),
    };
  }

  // What one rank sends in a step: (N-1)/N of each payload, as in a ring.
  function movedBytes(stage, ranks, parameters, { precision, optimizer }) {
    const { compute, reduce } = DTYPES[precision];
    const gradients = parameters * reduce;
    const payload = stage === 0 ? 2 * gradients : gradients + (stage <= 2 ? 1 : 2) * parameters * compute;
    const others = BigInt(ranks - 1);
    let moved = roundEven(quotient(BigInt(payload) * others, ranks));
    if (optimizer === "muon") {
      const away = quotient(BigInt(parameters) * others, ranks) * 4;
      moved += roundEven(stage === 0 ? away : (3 * away) / ranks);
    }
    return moved;
  }

  // What it sends to other replicas: the all-reduce of its shard of the gradient.
  const betweenBytes = (replicas, shards, parameters, { precision }) =>
    roundEven((((2 * parameters) / shards) * DTYPES[precision].reduce * (replicas - 1)) / replicas);

  const sum = (states) => Object.values(states).reduce((one, other) => one + other, 0);

  // One row per stage, as `zerolab.measure.plan` has them; null for stage 0 with offload, which it does not have.
  function plan(settings) {
    const { parameters, ranks, replicas, memory, activations, optimizer, offload } = settings;
    if (!(parameters >= 1)) throw new Error("parameters must be 1 or more");
    if (!Number.isInteger(ranks) || ranks < 1) throw new Error("ranks must be a whole number, 1 or more");
    if (!Number.isInteger(replicas) || replicas < 1 || ranks % replicas)
      throw new Error(`${replicas} replicas do not divide ${ranks} ranks`);
    if (memory <= activations)
      throw new Error(`activations of ${inBytes(activations)} leave nothing of ${inBytes(memory)} per GPU`);
    if (offload && optimizer === "muon") throw new Error("Muon does not go with offload: it needs whole matrices on the device");
    return STAGES.map((_, stage) => {
      if (offload && stage === 0) return null;
      const size = stage === 0 ? ranks : ranks / replicas; // DDP has nothing to shard: its mesh is one group
      const states = stateBytes(stage, size, parameters, settings);
      const many = Object.values(stateBytes(stage, size, MANY, settings)).reduce((total, held) => total + BigInt(held), 0n);
      const total = sum(states) + roundEven(activations);
      return {
        stage,
        states,
        activations: roundEven(activations),
        total,
        host: offload ? sum(stateBytes(3, size, parameters, { ...settings, offload: false })) : 0,
        moved: movedBytes(stage, size, parameters, settings),
        between: stage === 0 ? 0 : betweenBytes(ranks / size, size, parameters, settings),
        fits: total <= memory,
        largest: Math.trunc((memory - activations) / quotient(many, MANY)),
      };
    });
  }

  // ---------------------------------------------------------------- what people write

  function readParameters(text) {
    const letters = { K: 1e3, M: 1e6, B: 1e9, T: 1e12 };
    const scale = letters[text.trim().slice(-1).toUpperCase()] || 1;
    const number = text.trim().slice(0, scale === 1 ? undefined : -1);
    const given = number.trim() ? Number(number) * scale : NaN;
    if (scale === 1 && given > 0 && given < Infinity && !Number.isInteger(given))
      throw new Error(`${text} is ${text} parameters: do you mean ${text}B or ${text}M?`);
    const value = roundEven(given);
    if (value >= 1 && value <= 1e14) return value; // beyond, a byte would be lost
    const many = value > 1e14 ? "more parameters than this page can count" : "not a number of parameters; write 7.5e9, 7.5B, 124M or 1T";
    throw new Error(`"${text}" is ${many}`);
  }
  function readBytes(text) {
    const match = /^\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(?:([kmgtp]?)(i?)b?)\s*$/i.exec(text);
    const number = match ? Number(match[1]) : NaN;
    if (!Number.isFinite(number) || number > 1e15) throw new Error(`"${text}" is not a number of bytes; write 80GB, 512MB or 24GiB`);
    return number * (match[3] ? 1024 : 1000) ** ["", "k", "m", "g", "t", "p"].indexOf(match[2].toLowerCase());
  }
  function withUnit(name, text) {
    if (Number(text) > 0) throw new Error(`${name}: ${text} of what? Write ${text} GB`);
    return text;
  }
  const inParameters = (count) => inBytes(count).replace(/B$/, "").replace("G", "B").replace(" ", "");

  zerolab.fits = { plan, readParameters, readBytes, inBytes, inParameters };

  // ---------------------------------------------------------------- the picture

  const START = {
    parameters: "7.5B", ranks: "64", memory: "80 GB", stage: "1", precision: "bf16", optimizer: "adam",
    offload: "no", activations: "0 GB", replicas: "1",
  };

  function picture(rows, memory, chosen) {
    const [width, height, top, foot] = [640, 310, 34, 56];
    const highest = Math.max(memory, ...rows.map((row) => (row ? row.total : 0)));
    const y = (bytes) => height - foot - (bytes / highest) * (height - top - foot);
    const column = width / 4;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "fits", "aria-hidden": "true" });
    rows.forEach((row, stage) => {
      const middle = (stage + 0.5) * column;
      const say = (text, at, kind) => drawing.append(svg("text", { x: middle, y: at, class: kind }, text));
      if (stage === chosen)
        drawing.append(svg("rect", { x: middle - column / 2 + 4, y: 2, width: column - 8, height: height - 4, rx: 6, class: "chosen" }));
      say(`${stage} ${STAGES[stage]}`, height - foot + 22, "name");
      if (!row) return say("no offload", height - foot - 8, "minor");
      let from = 0;
      for (const [kind, bytes] of [...Object.entries(row.states), ["activations", row.activations]]) {
        const place = { x: middle - 38, width: 76, y: y(from + bytes), height: y(from) - y(from + bytes) };
        drawing.append(svg("rect", { ...place, fill: kindFill(kind) }));
        from += bytes;
      }
      say(inBytes(row.total), y(row.total) - 8, row.fits ? "size fitting" : "size");
      say(row.fits ? "fits" : "too much", height - foot + 45, row.fits ? "minor fitting" : "minor");
    });
    drawing.append(svg("line", { x1: 0, x2: width, y1: y(memory), y2: y(memory), class: "limit" }));
    drawing.append(svg("text", { x: width - 4, y: y(memory) - 5, class: "limit-name" }, `${inBytes(memory)} per GPU`));
    return drawing;
  }

  function table(rows, settings, chosen) {
    const lines = CATEGORIES.map((kind) => [zerolab.LABELS[kind] || kind, (row) => inBytes(row.states[kind])]);
    if (settings.activations) lines.push(["activations", (row) => inBytes(row.activations)]);
    lines.push(["on the GPU", (row) => inBytes(row.total)]);
    if (settings.offload) lines.push(["on the host", (row) => inBytes(row.host)]);
    lines.push([settings.replicas > 1 ? "sent in a replica" : "sent in a step", (row) => inBytes(row.moved)]);
    if (settings.replicas > 1) lines.push(["sent to others", (row) => inBytes(row.between)]);
    lines.push(["fits", (row) => (row.fits ? "yes" : "no")]);
    lines.push(["largest model", (row) => inParameters(row.largest)]);
    const columns = rows.map((row, stage) => [STAGES[stage], row, stage === chosen]);
    return comparison("Bytes per rank", "Bytes per rank, by the formula", columns, lines);
  }

  function sentence(rows, settings, chosen) {
    const row = rows[chosen];
    if (!row) return "DDP has no offload: every rank updates everything.";
    const parts = CATEGORIES.filter((kind) => row.states[kind]).map((kind) => `${zerolab.LABELS[kind] || kind} ${inBytes(row.states[kind])}`);
    if (row.activations) parts.push(`activations ${inBytes(row.activations)}`);
    const over = row.total - settings.memory;
    const verdict = row.fits ? `It fits in ${inBytes(settings.memory)}, with ${inBytes(-over)} to spare` : `That is ${inBytes(over)} too much`;
    const host = settings.offload ? ` The host holds ${inBytes(row.host)} more.` : "";
    return `With ${STAGES[chosen]} a rank holds ${inBytes(row.total)}: ${parts.join(", ")}.${host} ${verdict}. The largest model that fits has ${inParameters(row.largest)} parameters.`;
  }

  // ---------------------------------------------------------------- controls, and a link that keeps them

  function build(place) {
    const asked = new URLSearchParams(location.hash.slice(1));
    const at = (name) => asked.get(name) ?? START[name];
    const text = (name, more) => html("input", { type: "text", value: at(name), autocomplete: "off", ...more });
    const whole = (name) => html("input", { type: "number", value: at(name), min: 1, step: 1 });
    const sizes = html("datalist", { id: zerolab.newId() }, ["24 GB", "80 GB", "141 GB", "192 GB"].map((size) => html("option", { value: size })));
    const controls = {
      parameters: text("parameters"),
      ranks: whole("ranks"),
      memory: text("memory", { list: sizes.id }),
      stage: select(STAGES.map((name, stage) => [String(stage), `${stage} ${name}`]), at("stage")),
      precision: select([["bf16", "bf16, fp32 masters"], ["fp32", "fp32"]], at("precision")),
      optimizer: select([["adam", "Adam"], ["momentum", "SGD with momentum"], ["sgd", "SGD"], ["muon", "Muon"]], at("optimizer")),
      offload: select([["no", "none"], ["yes", "optimizer to the host"]], at("offload")),
      activations: text("activations"),
      replicas: whole("replicas"),
    };
    const labels = { memory: "memory of a GPU", replicas: "replicas (mesh)", activations: "activations per rank" };
    const said = status();
    const drawn = html("div");
    const link = html("a", {}, "Link to these settings");

    function refresh() {
      const values = Object.fromEntries(Object.entries(controls).map(([name, control]) => [name, control.value]));
      try {
        const settings = {
          ...values,
          parameters: readParameters(values.parameters),
          ranks: Number(values.ranks),
          replicas: Number(values.replicas),
          memory: readBytes(withUnit("memory of a GPU", values.memory)),
          activations: readBytes(withUnit("activations", values.activations)),
          offload: values.offload === "yes",
        };
        const rows = plan(settings);
        const chosen = Number(values.stage);
        said.textContent = sentence(rows, settings, chosen);
        said.classList.remove("refused");
        drawn.classList.remove("stale");
        const kinds = [...CATEGORIES, ...(settings.activations ? ["activations"] : [])];
        drawn.replaceChildren(legend(kinds), picture(rows, settings.memory, chosen), table(rows, settings, chosen));
        const page = place.closest("[data-page]").dataset.page;
        link.href = `${page}#${new URLSearchParams(values)}`;
      } catch (why) {
        said.textContent = why.message; // the last good picture stays, but pale
        drawn.classList.add("stale");
        said.classList.add("refused");
      }
    }
    const grid = html("div", { class: "controls" }, Object.entries(controls).map(([name, control]) => field(labels[name] || name, control)));
    grid.addEventListener("input", refresh);
    place.append(grid, sizes, said, drawn, html("p", { class: "small" }, link));
    refresh();
  }

  const question = {
    ask: "A model of 7.5 billion parameters is trained in bf16 with Adam on 64 GPUs. How many GB of parameters, gradients and optimizer state does a rank hold with ZeRO-1, when backward returns?",
    unit: "GB",
    answer: Number(fixed(plan({ parameters: 7.5e9, ranks: 64, replicas: 1, memory: 80e9, activations: 0, precision: "bf16", optimizer: "adam", offload: false })[1].total / 1e9, 1)),
    because: "The formula is 4Ψ + 12Ψ/N: the 2 bytes of a parameter and the 2 of its gradient are not shared out, and the 12 of its master and Adam's averages are.",
  };
  zerolab.show("fits", question, build);
}
