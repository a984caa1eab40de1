"use strict";
// An all-reduce in four ways, message by message: what each rank holds after every round, and the bytes on every link.
{
  const { html, svg, field, select, status, inBytes, player, speak, comparison } = zerolab;

  const METHODS = { root: "through a root", tree: "a tree", ring: "a ring", "all-to-all": "all-to-all" };
  const range = (count) => [...Array(count).keys()];

  // ---------------------------------------------------------------- who sends what to whom

  // The rounds of each method. In a round a rank sends one message at most, and gets one at most. A message is
  // {from, to, chunks, add}: the receiver adds the chunks to its own, or puts them in their place.
  const rounds = {
    // The others send all they have to rank 0, one after the other, and get the sum back one after the other.
    root(n) {
      const all = range(n);
      const others = all.slice(1);
      return [
        ...others.map((rank) => [{ from: rank, to: 0, chunks: all, add: true }]),
        ...others.map((rank) => [{ from: 0, to: rank, chunks: all, add: false }]),
      ];
    },
    // Pairs, then pairs of pairs; and back the way they came.
    tree(n) {
      const up = [];
      for (let gap = 1; gap < n; gap *= 2)
        up.push(range(n).filter((rank) => rank % (2 * gap) === gap).map((rank) => [rank, rank - gap]));
      const message = (from, to, add) => ({ from, to, chunks: range(n), add });
      const reduce = up.map((pairs) => pairs.map(([low, high]) => message(low, high, true)));
      return [...reduce, ...up.reverse().map((pairs) => pairs.map(([low, high]) => message(high, low, false)))];
    },
    // A reduce-scatter and an all-gather, each of N-1 rounds, in which each rank sends one chunk to its neighbour.
    ring(n) {
      const pass = (add) =>
        range(n - 1).map((round) =>
          range(n).map((rank) => {
            const chunk = (rank - round + (add ? 0 : 1) + 2 * n) % n;
            return { from: rank, to: (rank + 1) % n, chunks: [chunk], add };
          }));
      return [...pass(true), ...pass(false)];
    },
    // Chunk c goes to rank c, straight; then every rank sends its sum to every other.
    "all-to-all"(n) {
      const pass = (add) =>
        range(n - 1).map((round) =>
          range(n).map((rank) => {
            const to = (rank + round + 1) % n;
            return { from: rank, to, chunks: [add ? to : rank], add };
          }));
      return [...pass(true), ...pass(false)];
    },
  };

  // What rank `rank` begins with in chunk `chunk`.
  const first = (rank, chunk) => ((3 * rank + 5 * chunk) % 7) + 1;

  // Bytes from each rank to each other in the first `rounds` rounds.
  function carried({ messages, chunk }, n, rounds) {
    const sent = range(n).map(() => range(n).map(() => 0));
    for (const round of messages.slice(0, rounds)) for (const { from, to, chunks } of round) sent[from][to] += chunks.length * chunk;
    return sent;
  }

  // held[round][rank][chunk], before the first round and after each; sent[from][to] in bytes; and what it took.
  // bytes: of the gradient, in fp32, padded until every chunk has as many elements.
  function run(method, n, bytes) {
    const chunk = 4 * Math.ceil(bytes / 4 / n);
    const messages = rounds[method](n);
    const held = [range(n).map((rank) => range(n).map((place) => first(rank, place)))];
    let busy = 0; // bytes one after the other: the largest message of each round
    for (const round of messages) {
      const before = held.at(-1);
      const after = before.map((values) => [...values]);
      for (const { from, to, chunks, add } of round)
        for (const place of chunks) after[to][place] = before[from][place] + (add ? after[to][place] : 0);
      held.push(after);
      busy += chunk * Math.max(...round.map((message) => message.chunks.length));
    }
    return { chunk, messages, held, sent: carried({ messages, chunk }, n), busy };
  }

  function totals({ messages, sent, busy }) {
    const out = sent.map((row) => row.reduce((one, other) => one + other, 0));
    const into = sent.map((_, to) => sent.reduce((total, row) => total + row[to], 0));
    const links = sent.flat().filter((bytes) => bytes);
    return {
      rounds: messages.length,
      out: Math.max(...out),
      into: Math.max(...into),
      links: links.length,
      link: Math.max(...links),
      busy,
    };
  }

  zerolab.ring = { run, totals };

  // ---------------------------------------------------------------- the picture

  // Ranks in a circle. Links are as thick as the bytes that went over them; the messages of this round are arrows.
  function circle(n, { messages, chunk }, step) {
    const place = (rank, radius) => {
      const angle = (2 * Math.PI * rank) / n - Math.PI / 2;
      return [200 + radius * Math.cos(angle), 160 + radius * Math.sin(angle)];
    };
    // Each direction on its own side of the straight line, and short of the circles.
    const line = (from, to) => {
      const [[x1, y1], [x2, y2]] = [place(from, 122), place(to, 122)];
      const length = Math.hypot(x2 - x1, y2 - y1);
      const [ex, ey] = [(x2 - x1) / length, (y2 - y1) / length];
      const at = (x, y, along) => ({ x: x + along * ex - 5 * ey, y: y + along * ey + 5 * ex });
      const [begin, end] = [at(x1, y1, 24), at(x2, y2, -27)];
      return { x1: begin.x, y1: begin.y, x2: end.x, y2: end.y };
    };
    const drawing = svg("svg", { viewBox: "0 0 400 320", class: "ring wide", "aria-hidden": "true" });
    const arrow = { id: "ring-arrow", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 13, markerHeight: 13, orient: "auto", markerUnits: "userSpaceOnUse" };
    drawing.append(svg("defs", {}, svg("marker", arrow, svg("path", { d: "M0 0L8 4L0 8z" }))));
    const gone = carried({ messages, chunk }, n, step);
    const most = 2 * (n - 1) * chunk; // what a link of the ring carries, and no link carries more
    for (const from of range(n))
      for (const to of range(n))
        if (gone[from][to]) {
          const title = svg("title", {}, `rank ${from} to rank ${to}: ${inBytes(gone[from][to])}`);
          drawing.append(svg("line", { ...line(from, to), class: "link", "stroke-width": 1 + (7 * gone[from][to]) / most }, title));
        }
    for (const { from, to } of step ? messages[step - 1] : [])
      drawing.append(svg("line", { ...line(from, to), class: "message", "marker-end": "url(#ring-arrow)" }));
    for (const rank of range(n)) {
      const [x, y] = place(rank, 122);
      drawing.append(svg("circle", { cx: x, cy: y, r: 20, class: "rank" }), svg("text", { x, y: y + 6 }, rank));
    }
    return drawing;
  }

  // The same as words, behind a click, for those who do not see the lines.
  function links(n, course, step) {
    const gone = carried(course, n, step);
    const pairs = range(n * n).map((k) => [Math.floor(k / n), k % n]).filter(([from, to]) => gone[from][to]);
    return pairs.map(([from, to]) => html("li", {}, `rank ${from} to rank ${to}: ${inBytes(gone[from][to])}`));
  }

  // What every rank holds; bold and boxed: what this round changed; green: the sum of all.
  function numbers(n, { held, messages }, step) {
    const changed = new Set((step ? messages[step - 1] : []).flatMap(({ to, chunks }) => chunks.map((chunk) => `${to}.${chunk}`)));
    const sums = range(n).map((chunk) => held[0].reduce((total, values) => total + values[chunk], 0));
    const cell = (value, rank, chunk) => {
      const kinds = [changed.has(`${rank}.${chunk}`) && "changed", value === sums[chunk] && "done"].filter(Boolean);
      return html("td", { class: kinds.join(" ") || null }, value);
    };
    const head = html("tr", {}, html("td"), range(n).map((chunk) => html("th", { scope: "col" }, chunk)));
    const row = (values, rank) => html("tr", {}, html("th", { scope: "row" }, `rank ${rank}`), values.map((value, chunk) => cell(value, rank, chunk)));
    const foot = html("tr", {}, html("th", { scope: "row" }, "the sum"), sums.map((sum) => html("td", {}, sum)));
    return html("table", { class: "numbers chunks" },
      html("caption", {}, "What each rank holds, by chunk. Boxed: new in this round. Green: the sum of all"), html("thead", {}, head), html("tbody", {}, held[step].map(row)), html("tfoot", {}, foot));
  }

  function compare(n, bytes, chosen) {
    const all = Object.keys(METHODS).map((method) => [method, totals(run(method, n, bytes)), method === chosen]);
    const lines = [
      ["rounds", (t) => t.rounds],
      ["busiest rank sends", (t) => inBytes(t.out)],
      ["busiest rank receives", (t) => inBytes(t.into)],
      ["links in use", (t) => t.links],
      ["busiest link carries", (t) => inBytes(t.link)],
      ["one after the other", (t) => inBytes(t.busy)],
    ];
    return comparison("The four ways compared", `The four ways, among ${n} ranks`, all, lines);
  }

  function sentence(n, course, step) {
    const { messages, chunk } = course;
    if (step === 0) return `Before the first round. Every rank has numbers of its own in ${n} chunks of ${inBytes(chunk)}.`;
    const round = messages[step - 1];
    const { from, to, chunks, add } = round[0];
    const what = chunks.length === n ? "all its chunks" : `chunk ${chunks[0]}`;
    const others = round.length > 1 ? `, and so on: ${round.length} messages at once` : "";
    const done = add ? "which adds it to its own" : "which keeps it";
    const size = inBytes(chunk * chunks.length);
    const end = step === messages.length ? " Every rank has the sum." : "";
    return `Round ${step} of ${messages.length}. Rank ${from} sends ${what} (${size}) to rank ${to}, ${done}${others}.${end}`;
  }

  // ---------------------------------------------------------------- controls

  function build(place) {
    const method = select(Object.entries(METHODS), "ring");
    const ranks = select(range(7).map((less) => [String(less + 2), String(less + 2)]), "8");
    const size = select([["8e6", "8 MB"], ["100e6", "100 MB"], ["15e9", "15 GB"]], "8e6");
    const said = status();
    const [drawn, held, compared, listed] = [html("div"), html("div"), html("div"), html("ul")];
    let course;
    const steps = player("round", (step, playing) => {
      const n = Number(ranks.value);
      const text = sentence(n, course, step);
      drawn.replaceChildren(circle(n, course, step));
      held.replaceChildren(numbers(n, course, step));
      listed.replaceChildren(...links(n, course, step));
      speak(said, text, playing);
      return text;
    });
    function restart() {
      course = run(method.value, Number(ranks.value), Number(size.value));
      compared.replaceChildren(compare(Number(ranks.value), Number(size.value), method.value));
      steps.resize(course.messages.length);
    }
    const controls = html("div", { class: "controls" }, field("way", method), field("ranks", ranks), field("gradient", size));
    controls.addEventListener("input", restart);
    place.append(controls, steps.element, said, html("div", { class: "pair" }, drawn, held),
      html("details", {}, html("summary", {}, "What each link has carried so far"), listed), compared);
    restart();
  }

  const question = {
    ask: "Eight ranks add up a gradient of 8 MB in a ring. How many MB does each of them send?",
    unit: "MB",
    answer: totals(run("ring", 8, 8e6)).out / 1e6,
    because: "A rank sends 2(N-1) messages of an Nth: 2(N-1)/N of the gradient. It is never more than twice the gradient, however many ranks there are.",
  };
  zerolab.show("ring", question, build);
}
