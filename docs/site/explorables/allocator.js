"use strict";
// The allocator of lesson 10, given the step that docs/site/record.py recorded: first fit, in one flat buffer.
{
  const { html, svg, field, select, status, kindFill, legend, fixed, inBytes, player, speak, comparison } = zerolab;
  const { before, owners, buffers, stretches } = zerolab.allocations;

  const GRAIN = 512; // bytes: sizes are rounded up to a multiple
  const PLENTY = 2 ** 50;
  const WAYS = { "first fit": [], "flat buffer": ["gradients"] }; // kinds that have a region of their own
  const KINDS = ["parameters", "optimizer", "gradients", "activations", "communication", "other"];
  const sum = (sizes) => sizes.reduce((one, other) => one + other, 0);

  // ---------------------------------------------------------------- the allocator, as zerolab/lab/lessons/lesson10/arena.py

  const free = (holes) => sum(holes.map(([start, end]) => end - start));
  const largest = (holes) => Math.max(0, ...holes.map(([start, end]) => end - start));
  const lost = (holes) => free(holes) - largest(holes);
  const told = (holes) =>
    `${inBytes(free(holes))} are free: ${holes.length} hole${holes.length === 1 ? "" : "s"}, the largest of ${inBytes(largest(holes))}`;

  class OutOfMemory extends Error {}

  class Arena {
    constructor(start, size) {
      this.holes = size ? [[start, start + size]] : []; // [start, end], in order, never touching
      this.top = start; // the highest address that was ever in use
    }
    take(size) {
      const place = this.holes.findIndex(([start, end]) => end - start >= size);
      if (place < 0) throw new OutOfMemory(`${inBytes(size)} wanted, and ${told(this.holes)}`);
      const [start, end] = this.holes[place];
      this.holes.splice(place, 1, ...(start + size < end ? [[start + size, end]] : []));
      this.top = Math.max(this.top, start + size);
      return start;
    }
    give(start, size) {
      const holes = [...this.holes, [start, start + size]].sort(([one], [other]) => one - other);
      this.holes = [];
      for (const [begin, end] of holes) {
        const below = this.holes.at(-1);
        if (below?.[1] === begin) below[1] = end;
        else this.holes.push([begin, end]);
      }
    }
  }

  // Events {buffer, bytes, kind} in `size` bytes, for as long as there is memory. A kind in `apart` gets a region before
  // the first of them. moments[m]: what is in use, and the holes, after m events.
  function replay(events, size, apart) {
    const memory = new Arena(0, size);
    const result = { memory, size, regions: [], pieces: [], moments: [], failed: "" };
    const live = new Map(); // buffer -> its piece
    let used = 0;
    const note = () => result.moments.push({ used, holes: memory.holes.map((hole) => [...hole]) });
    try {
      result.regions = apart.map((kind) => region(events, kind, memory));
      note();
      events.forEach(({ buffer, bytes: asked, kind, owner }, moment) => {
        const room = result.regions.find((one) => one.kind === kind)?.inside ?? memory;
        if (live.has(buffer)) {
          const piece = live.get(buffer);
          room.give(piece.start, piece.bytes);
          piece.end = moment;
          live.delete(buffer);
          used -= piece.bytes;
        }
        if (asked) {
          const bytes = Math.ceil(asked / GRAIN) * GRAIN;
          const piece = { kind, owner, start: room.take(bytes), bytes, begin: moment };
          live.set(buffer, piece);
          result.pieces.push(piece);
          used += bytes;
        }
        note();
      });
    } catch (error) {
      if (!(error instanceof OutOfMemory)) throw error;
      result.failed = error.message;
    }
    for (const piece of live.values()) piece.end = result.moments.length - 1;
    return result;
  }

  // A piece of the memory for all buffers of one kind: an arena inside the arena.
  function region(events, kind, memory) {
    const bytes = needs(events.filter((event) => event.kind === kind), []);
    const start = bytes ? memory.take(bytes) : 0;
    return { kind, start, bytes, inside: new Arena(start, bytes) };
  }
  const needs = (events, apart) => replay(events, PLENTY, apart).memory.top; // the bytes of addresses that suffice
  const peak = ({ moments }) => Math.max(...moments.map(({ used }) => used));
  const mostLost = ({ moments }) => Math.max(...moments.map(({ holes }) => lost(holes)));
  const at = (pieces, moment) => pieces.filter(({ begin, end }) => begin < moment && moment <= end);

  // ---------------------------------------------------------------- the recorded step

  const recorded = stretches.flatMap(([phase, unit, of]) =>
    of.map(([buffer, bytes]) => ({ phase, unit, buffer, bytes, kind: owners[buffers[buffer]][0], owner: owners[buffers[buffer]][1] })));
  const after = (phase, events = recorded) => events.findLastIndex((event) => event.phase === phase) + 1; // moment
  const first = recorded.findIndex(({ phase }) => phase === "forward");
  // What is asked for when backward is over, for a moment: nothing, a buffer that all gradients are copied into, which has
  // as many bytes as the parameters, or room for a larger batch.
  const fused = sum(recorded.slice(0, before).map(({ kind, bytes }) => (kind === "parameters" ? bytes : 0)));
  const asking = (size, kind, owner) =>
    recorded.toSpliced(after("backward"), 0, ...[size, 0].map((bytes) => ({ phase: "backward", unit: "", buffer: -1, bytes, kind, owner })));
  const ASKED = {
    nothing: recorded,
    [inBytes(fused)]: asking(fused, "communication", "all gradients"),
    "20 MB": asking(20e6, "activations", "a larger batch"),
  };

  zerolab.allocator = { replay, needs, peak, mostLost, before, recorded };

  // ---------------------------------------------------------------- the picture

  const [LEFT, RIGHT, HIGH, BAR] = [58, 520, 300, 60]; // time is between left and right; the bar stands beside it
  const [LEAST, MOST] = [36, 52]; // MB of the device
  const y = (address) => HIGH - (HIGH * address) / (MOST * 1e6);
  const box = (x, width, { kind, start, bytes }, name) =>
    svg("rect", { x, width, y: y(start + bytes), height: y(start) - y(start + bytes), fill: kind && kindFill(kind), class: name });
  // What lies under all pieces: the device's memory, and the regions in it.
  const ground = (x, width, { size, regions }) =>
    [box(x, width, { start: 0, bytes: size }, "still"), ...regions.map((region) => box(x, width, region, "reserved"))];

  // Pieces of one kind and one time that touch become one.
  function joined(pieces) {
    const done = [];
    for (const piece of [...pieces].sort((one, other) => one.begin - other.begin || one.end - other.end || one.start - other.start)) {
      const below = done.at(-1);
      const touches = below?.kind === piece.kind && below.begin === piece.begin && below.end === piece.end && below.start + below.bytes === piece.start;
      if (touches) below.bytes += piece.bytes;
      else done.push({ ...piece });
    }
    return done;
  }

  // Addresses upwards, events to the right. Beside it the bar: what is where at one moment, and the largest hole.
  function picture(course, events) {
    const x = (moment) => LEFT + ((RIGHT - LEFT) * (moment - before)) / (events.length - before);
    const shown = course.pieces.filter(({ end }) => end > before).map((piece) => ({ ...piece, begin: Math.max(before, piece.begin) }));
    const pieces = joined(shown).map((piece) => box(x(piece.begin), x(piece.end) - x(piece.begin), piece));
    const sizes = [0, 10, 20, 30, 40, 50].map((size) => svg("text", { x: LEFT - 6, y: y(size * 1e6) + 5, class: "address" }, size || "0 MB"));
    const borders = [before, after("forward", events), after("backward", events), events.length].map(x);
    const phases = ["forward", "backward", "step"].flatMap((phase, place) => [
      svg("text", { x: (borders[place] + borders[place + 1]) / 2, y: HIGH + 20 }, phase),
      svg("line", { x1: borders[place], x2: borders[place], y1: HIGH, y2: HIGH + 8, class: "cursor" }),
    ]);
    const veil = svg("rect", { y: -12, height: HIGH + 12, class: "veil" });
    const [cursor, bar] = [svg("line", { y1: -12, y2: HIGH, class: "cursor" }), svg("g")];
    const drawing = svg("svg", { viewBox: `0 -12 680 ${HIGH + 40}`, class: "allocator wide", "aria-hidden": "true" },
      ground(LEFT, RIGHT - LEFT, course), pieces, sizes, phases, veil, cursor, bar);
    function move(moment) {
      veil.setAttribute("x", x(moment));
      veil.setAttribute("width", RIGHT - x(moment));
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(moment));
      const now = at(course.pieces, moment).map((piece) => ({ ...piece, begin: 0, end: 0 }));
      const { holes } = course.moments[moment];
      const [start, end] = holes.find((hole) => hole[1] - hole[0] === largest(holes)) || [0, 0];
      const left = RIGHT + 24;
      bar.replaceChildren(...ground(left, BAR, course), ...joined(now).map((piece) => box(left, BAR, piece)),
        svg("path", { d: `M${left + BAR + 3} ${y(start)}h5V${y(end)}h-5`, class: "hole" }),
        svg("text", { x: left + BAR + 14, y: y((start + end) / 2) + 5, class: "hole" }, inBytes(end - start)));
    }
    return { drawing, move };
  }

  function compare(courses, chosen, moment) {
    const now = (say) => ({ moments }) => (moment > moments.length ? "–" : inBytes(say(moments[Math.min(moment, moments.length - 1)].holes)));
    const lines = [
      ["in use at the peak", ({ used }) => `${fixed(used / 1e6, 2)} MB`],
      ["addresses needed", ({ needed }) => `${fixed(needed / 1e6, 2)} MB`],
      ["beyond the peak", ({ used, needed }) => `${fixed(100 * (needed / used - 1), 1)} %`],
      ["on this device", ({ failed }) => (failed ? "out of memory" : "fits")],
      ["free now", now(free)],
      ["largest hole now", now(largest)],
      ["lost now", now(lost)],
      ["lost at most", (course) => (course.failed ? "–" : inBytes(mostLost(course)))],
    ];
    const columns = Object.keys(WAYS).map((way) => [way, courses[way], way === chosen]);
    return comparison("The two ways compared", "Gradients by first fit, and in a flat buffer", columns, lines);
  }

  function sentence({ moments, pieces, failed, size }, events, moment) {
    const { used, holes } = moments[Math.min(moment, moments.length - 1)];
    const kept = size - used - free(holes);
    const state = `${inBytes(used)} are in use${kept ? `, ${inBytes(kept)} are reserved` : ""}, and ${told(holes)}.`;
    if (moment <= before) return `Before the step: ${state}`;
    const { phase, unit, bytes, kind, owner } = events[moment - 1];
    const when = `Event ${moment - before} of ${events.length - before}, ${moment <= first ? "the batch" : phase}${unit && ` of ${unit}`}`;
    const what = `${kind}${owner && ` of ${owner}`}`;
    if (moment === moments.length) return `${when}. Out of memory for ${what}: ${failed}.`;
    const piece = pieces.find((one) => one[bytes ? "begin" : "end"] === moment - 1);
    return `${when}: ${what}, ${inBytes(piece.bytes)} at ${inBytes(piece.start)}, ${bytes ? "placed" : "released"}. ${state}`;
  }

  // ---------------------------------------------------------------- controls

  function build(place) {
    const way = select([["first fit", "by first fit"], ["flat buffer", "in a flat buffer"]], "first fit");
    const more = select(Object.keys(ASKED).map((asked) => [asked, `${asked} more`]), "nothing");
    const size = html("input", { type: "range", min: LEAST, max: MOST, step: 0.1, value: 43.4 });
    const shown = html("span", { class: "small" });
    const said = status();
    const [frame, compared] = [html("div"), html("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Both ways compared" })];
    let events, courses, drawn;
    let chosen = after("backward") - before; // an event, which a smaller memory may not reach
    const steps = player("event of the step", (event, playing) => {
      const course = courses[way.value];
      const moment = before + event;
      const text = sentence(course, events, moment);
      if (!course.failed || moment < course.moments.length) chosen = event;
      drawn.move(Math.min(moment, course.moments.length - 1));
      compared.replaceChildren(compare(courses, way.value, moment));
      said.classList.toggle("refused", moment === course.moments.length);
      speak(said, text, playing);
      return text;
    }, 25);
    function draw() {
      const event = chosen;
      events = ASKED[more.value];
      const course = (apart) =>
        ({ ...replay(events, Math.round(size.value * 1e6), apart), used: peak(replay(events, PLENTY, [])), needed: needs(events, apart) });
      courses = Object.fromEntries(Object.entries(WAYS).map(([name, apart]) => [name, course(apart)]));
      drawn = picture(courses[way.value], events);
      frame.replaceChildren(drawn.drawing);
      shown.textContent = `${fixed(Number(size.value), 1)} MB`;
      size.setAttribute("aria-valuetext", shown.textContent);
      const { moments, failed } = courses[way.value];
      const last = moments.length - before - (failed ? 0 : 1);
      steps.resize(last, failed ? last : Math.min(event, last));
    }
    const controls = html("div", { class: "controls" }, field("gradients", way), field("after backward, ask for", more), field("memory of the device", size, shown));
    controls.addEventListener("input", () => draw());
    place.append(controls, steps.element, legend(KINDS), frame, said, compared);
    draw();
  }

  const { moments, pieces } = replay(recorded, needs(recorded, []), []);
  const ofABlock = (kind, moment) => inBytes(sum(at(pieces, moment).filter((piece) => piece.kind === kind && piece.owner === "blocks.0").map(({ bytes }) => bytes)));
  const { holes } = moments[after("backward")];
  const [activations, left] = [ofABlock("activations", after("forward")), ofABlock("gradients", after("backward"))];
  const question = {
    ask: `First fit. Forward leaves ${activations} of activations of each of six blocks, each block's above the previous one's. Backward releases them, and leaves ${left} of gradients where each block's were. Then ${inBytes(free(holes))} of the buffer are free. How large is the largest hole, in MB?`,
    unit: "MB",
    answer: Number(fixed(largest(holes) / 1e6, 2)),
    because: `The gradients of two blocks begin ${activations} apart, and the lower ones fill ${left} of that. A larger request fails, with ${inBytes(free(holes))} free.`,
  };
  zerolab.show("allocator", question, build);
}
