// The review page: a list of clips, one of them selected. The server makes every edit; this script shows what it
// answers.
import { $, amount, ask, clips, clock, fill, make, number, say, short } from "./page.js";

const PAGE_ROWS = 50;
const POLL_MS = 3000;
const NUDGE_S = 0.05;
const FINE_S = 0.01;
const query = $("query");
const list = $("clips");
const sound = new Audio();
const page = {
  about: null, // thresholds and languages
  state: null, // totals, filters, names: everything but the clips
  ids: [], // of all clips that the query selects, in its order
  offset: 0,
  rows: new Map(), // the clips of this page as the server told them, by id
  items: new Map(), // their list items
  drafts: new Map(), // texts that were refused, by id
  selected: 0,
  cursor: 0, // seconds in the recording
  moved: null, // id and times of a clip whose move is not sent yet
  playing: 0,
};
const words = name =>
  name
    .replaceAll("_", " ")
    .replace(/ (db|hz)$/, "")
    .replace("mos", "MOS")
    .replace("snr", "SNR");

// ---- the list

const ANY = "\u0000any"; // a value that no speaker has

function showState(state) {
  page.state = state;
  $("folder").textContent = state.folder;
  document.title = `${state.folder} – MyXTTS review`;
  const { used } = state;
  $("totals").textContent =
    `Used: ${amount(used.seconds)} of ${amount(state.seconds)} in clips, ${number(used.clips)} of ` +
    `${clips(state.clips)}. Decided: ${number(state.decided)}.`;
  $("share").style.width = `${(100 * used.seconds) / Math.max(state.seconds, 1e-9)}%`;
  const scores = state.scores.filter(name => !["seconds", "gain_db"].includes(name));
  const orders = ["seconds", ...scores].flatMap(name => [
    [`${name}|0`, `${words(name)}, low first`],
    [`${name}|1`, `${words(name)}, high first`],
  ]);
  fill(query.sort, [
    ["worst|0", "worst first"],
    ["time|0", "as recorded"],
    ["worst|1", "best first"],
    ...orders,
    ["text|0", "text"],
  ]);
  const counted = (pairs, name = value => value || "(none)") => [
    [ANY, "any"],
    ...pairs.map(([value, count]) => [value, `${name(value)} (${number(count)})`]),
  ];
  fill(query.reason, counted(state.reasons));
  fill(query.speaker, counted(state.speakers));
  fill(query.language, counted(state.languages, languageName));
  fill(query.source, [["", "any"], ...state.sources.map(source => [String(source.id), source.name])]);
  $("speakers").replaceChildren(...state.speakers.map(([value]) => make("option", { value })));
  for (const name of ["undo", "redo"]) {
    const step = state[name];
    $(name).disabled = !step;
    const label = $(name).textContent + (step ? `: ${described(step)}` : "");
    $(name).setAttribute("aria-label", label);
    $(name).title = label;
  }
  $("problem").hidden = !state.problem;
  $("problem").textContent = state.problem && `The CSV files could not be written: ${state.problem}`;
}

const languageName = code => page.about.languages[code] ?? (code || "(none)");

function described(step) {
  const { id, first, value, old, new: name } = step.arguments;
  const what = {
    set_text: "text",
    set_language: "language",
    set_speaker: "speaker",
    keep: "keep",
    reject: "reject",
    merge: "merge",
    clear_decision: "cleared decision",
    split: "split",
    move: "moved cut",
    set_filters: "thresholds",
  };
  if (step.action === "rename_speaker") return `${old || "(none)"} renamed to ${name || "(none)"}`;
  const start = value?.length > 40 ? `${value.slice(0, 40)}…` : value;
  const given = typeof value === "string" ? ` “${start}”` : "";
  return `${what[step.action] ?? step.action}${given}${(id ?? first) ? ` of clip ${id ?? first}` : ""}`;
}

async function search(keep = false) {
  const [sort, down] = query.sort.value.split("|");
  const wanted = new URLSearchParams({
    sort,
    down,
    use: query.use.value,
    source: query.source.value,
    text: query.text.value.trim(),
  });
  for (const name of ["reason", "speaker", "language"])
    if (query[name].value !== ANY) wanted.set(name, query[name].value);
  const found = await ask(`api/ids?${wanted}`);
  page.ids = found.ids;
  page.seconds = found.seconds;
  const at = keep ? page.ids.indexOf(page.selected) : -1;
  await showPage(Math.max(0, at), at >= 0 ? page.selected : page.ids[0], keep);
}

async function showPage(at, selected, focus = false) {
  page.offset = Math.floor(Math.max(0, Math.min(at, page.ids.length - 1)) / PAGE_ROWS) * PAGE_ROWS;
  const ids = page.ids.slice(page.offset, page.offset + PAGE_ROWS);
  const rows = ids.length ? await ask(`api/rows?ids=${ids}`) : [];
  commitMove();
  page.rows = new Map(rows.map(row => [row.id, row]));
  page.ids = page.ids.filter(id => !ids.includes(id) || page.rows.has(id));
  for (const id of unsaved()) page.drafts.set(id, page.items.get(id).parts.text.value);
  page.items.clear();
  page.selected = 0;
  list.replaceChildren(...rows.map(row => item(row)));
  showRange();
  if (rows.length) select(page.rows.has(selected) ? selected : rows[0].id, focus);
}

function showRange() {
  const count = page.rows.size,
    total = page.ids.length;
  $("none").hidden = total > 0;
  $("range").textContent = total
    ? `${number(page.offset + 1)}–${number(page.offset + count)} of ${clips(total)}`
    : "";
  $("previous").disabled = page.offset === 0;
  $("next").disabled = page.offset + PAGE_ROWS >= total;
}

function item(row) {
  const node = make("li", { className: "clip", tabIndex: -1 });
  node.dataset.id = row.id;
  page.items.set(row.id, node);
  const play = make("button", {
    className: "play",
    type: "button",
    tabIndex: -1,
    "aria-pressed": "false",
    "aria-label": `Play clip ${row.id}`,
    onclick: event => {
      event.stopPropagation();
      select(row.id);
      toggle(row.id, true);
    },
  });
  const small = make(
    "div",
    { className: "small", "aria-hidden": "true" },
    make("canvas"),
    make("i", { hidden: true }),
  );
  const text = make("textarea", {
    className: "text",
    dir: "auto",
    rows: 1,
    spellcheck: true,
    maxLength: 2000,
    "aria-label": `Text of clip ${row.id}`,
  });
  const speaker = make("input", {
    dir: "auto",
    list: "speakers",
    maxLength: 200,
    "aria-label": `Speaker of clip ${row.id}`,
    placeholder: "speaker",
  });
  const language = make("select", { "aria-label": `Language of clip ${row.id}` });
  fill(language, Object.entries(page.about.languages), "en");
  node.append(
    play,
    small,
    text,
    make("div", { className: "who" }, speaker, language),
    make("div", { className: "marks" }),
  );
  node.parts = { play, small, text, speaker, language, marks: node.lastChild };
  text.addEventListener("input", () => grow(text));
  text.addEventListener("keydown", event => textKey(event, row.id));
  text.addEventListener("blur", () => saveText(row.id));
  speaker.addEventListener("keydown", event => {
    if (event.key === "Enter") node.focus();
  });
  speaker.addEventListener("change", () => edit("set_speaker", { id: row.id, value: speaker.value }));
  language.addEventListener("change", () => edit("set_language", { id: row.id, value: language.value }));
  for (const field of [text, speaker, language]) field.addEventListener("focus", () => select(row.id, false));
  node.addEventListener("click", event => {
    if (!event.target.closest("button, input, select, textarea, .wide")) select(row.id, true);
  });
  node.addEventListener("focus", () => select(row.id, false));
  show(row);
  const draft = page.drafts.get(row.id);
  if (draft !== undefined && draft !== row.text) {
    text.value = draft;
    dispute(node, row);
  }
  seen.observe(node);
  return node;
}

// Writes what a row says into its item; a text that is being edited stays.
function show(row) {
  const node = page.items.get(row.id);
  if (!node) return;
  const { text, speaker, language, marks } = node.parts,
    before = node.row,
    used = !row.reasons.length;
  node.row = row;
  node.classList.toggle("aside", !used);
  node.classList.toggle("rejected", row.decision === "reject");
  if (!before || text.value === before.text || text.value === row.text) text.value = row.text;
  if (!before || speaker.value === before.speaker) speaker.value = row.speaker;
  if (!(row.language in page.about.languages) && language.firstChild.value !== row.language)
    language.prepend(make("option", { value: row.language, textContent: row.language || "(none)" }));
  language.value = row.language;
  text.lang = row.language;
  grow(text);
  const state = row.decision === "keep" ? "kept" : used ? "used" : "";
  const why = row.reasons.map(([reason, detail]) =>
    make("span", {
      className: row.decision === "reject" ? "chip bad" : "chip warn",
      textContent: reason,
      title: detail,
    }),
  );
  const measured = Object.entries({ heard_error: "CER", mos: "MOS" })
    .filter(([name]) => name in row.scores)
    .map(([name, label]) =>
      make("span", { className: "length", textContent: `${label} ${row.scores[name].toFixed(2)}` }),
    );
  marks.replaceChildren(
    make("span", { className: "length", textContent: `${(row.end - row.start).toFixed(1)} s` }),
    ...measured,
    state ? make("span", { className: "chip good", textContent: state }) : "",
    ...why,
  );
  node.setAttribute(
    "aria-label",
    `Clip ${row.id}, ${(row.end - row.start).toFixed(1)} seconds, ` +
      (used ? "used" : `set aside: ${row.reasons.map(pair => pair[0]).join(", ")}`),
  );
  if (before && before.audio !== row.audio) {
    node.peaks = null;
    seen.unobserve(node);
    seen.observe(node);
  }
  if (row.id === page.selected) showDetail(row);
}

function grow(text) {
  if (CSS.supports("field-sizing", "content")) return;
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

// ---- waveforms

const seen = new IntersectionObserver(
  entries => {
    for (const { target, isIntersecting } of entries) if (isIntersecting && !target.peaks) loadPeaks(target);
  },
  { rootMargin: "200px" },
);

async function loadPeaks(node) {
  node.peaks = [];
  try {
    node.peaks = (await ask(`api/peaks/${node.dataset.id}`)).peaks;
    draw(node.parts.small.firstChild, node.peaks);
  } catch {
    node.parts.small.title = "The audio cannot be read";
  }
}

function draw(canvas, peaks) {
  const { width, height } = canvas.getBoundingClientRect(),
    scale = window.devicePixelRatio || 1;
  if (!width) return;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const paint = canvas.getContext("2d"),
    step = canvas.width / peaks.length,
    loudest = Math.max(24, ...peaks);
  paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--wave");
  peaks.forEach((peak, at) => {
    const tall = Math.max(scale, (0.92 * canvas.height * peak) / loudest);
    paint.fillRect(at * step, (canvas.height - tall) / 2, Math.max(1, step - (step > 3 ? 1 : 0)), tall);
  });
}

function redraw() {
  for (const node of page.items.values()) {
    if (node.peaks?.length) draw(node.parts.small.firstChild, node.peaks);
    if (node.detail?.wave) draw(node.detail.canvas, node.detail.wave.peaks);
  }
}

// ---- the selected clip

function select(id, focus = true) {
  const node = page.items.get(id);
  if (!node) return;
  if (id !== page.selected) {
    commitMove();
    const before = page.items.get(page.selected);
    if (before) {
      before.detail?.remove();
      before.detail = null;
      before.removeAttribute("aria-current");
      before.tabIndex = -1;
    }
    if (page.playing && page.playing !== id) sound.pause();
    page.selected = id;
    node.tabIndex = 0;
    node.setAttribute("aria-current", "true");
    page.cursor = page.rows.get(id).start;
    showDetail(page.rows.get(id));
    if ($("autoplay").checked && focus) toggle(id, true);
  }
  if (focus && document.activeElement !== node) node.focus({ preventScroll: true });
  if (focus) node.scrollIntoView({ block: "nearest" });
}

const button = (label, key, action, properties = {}) =>
  make(
    "button",
    {
      type: "button",
      onclick: () => {
        action();
        page.items.get(page.selected)?.focus();
      },
      ...properties,
    },
    label,
    key ? make("kbd", { textContent: key, "aria-hidden": "true" }) : null,
  );

function showDetail(row) {
  const node = page.items.get(row.id);
  const over = new Set(
    page.about.thresholds
      .filter(rule => row.reasons.some(pair => pair[0] === rule.reason))
      .map(rule => rule.score),
  );
  const units = new Map(page.about.thresholds.map(rule => [rule.score, rule.unit]));
  const scores = Object.entries(row.scores)
    .filter(([name]) => name !== "seconds")
    .map(([name, value]) =>
      make(
        "div",
        { className: over.has(name) ? "over" : "" },
        make("dt", { textContent: words(name) }),
        make("dd", { textContent: `${short(value)} ${units.get(name) ?? ""}` }),
      ),
    );
  const where = make(
    "p",
    { className: "heard" },
    make("bdi", { textContent: row.file }),
    ` ${clock(row.start)} – ${clock(row.end)}` +
      (row.channel > 0 ? `, channel ${row.channel + 1}` : "") +
      (row.edited.includes("cut") ? "; the scores were measured before the cut was moved" : ""),
  );
  const details = row.reasons
    .filter(pair => pair[1])
    .map(([reason, detail]) => `${reason}: ${detail}`)
    .join("; ");
  const parts = [
    node.detail?.wide ?? wideWave(node),
    make(
      "div",
      { className: "actions" },
      button("Keep", "y", () => decide("keep"), {
        className: "keep",
        "aria-pressed": String(row.decision === "keep"),
      }),
      button("Reject", "x", () => decide("reject"), {
        className: "reject",
        "aria-pressed": String(row.decision === "reject"),
      }),
      button("Clear decision", "c", () => decide("clear_decision"), { disabled: !row.decision }),
      button("Merge with next", "m", merge, { disabled: !row.following }),
      button("Split at cursor", "s", split),
    ),
    row.heard && row.heard !== row.text
      ? make(
          "p",
          { className: "heard" },
          "Heard alone: ",
          make("bdi", { textContent: row.heard, lang: row.language }),
        )
      : null,
    details ? make("p", { className: "heard", textContent: details }) : null,
    make("dl", { className: "scores" }, ...scores),
    where,
  ].filter(Boolean);
  const wide = node.detail?.wide,
    canvas = node.detail?.canvas,
    wave = node.detail?.wave;
  if (!node.detail) node.append((node.detail = make("div", { className: "detail" })));
  node.detail.replaceChildren(...parts);
  Object.assign(node.detail, { wide: wide ?? parts[0], canvas: canvas ?? parts[0].querySelector("canvas"), wave });
  const cut = `${row.audio} ${row.start} ${row.end}`;
  if (node.detail.cut !== cut) {
    node.detail.cut = cut;
    page.cursor = Math.min(Math.max(page.cursor, row.start), row.end);
    loadWide(row.id);
  }
}

function wideWave(node) {
  const edge = label =>
    make("div", {
      className: "edge",
      tabIndex: 0,
      role: "slider",
      "aria-label": label,
      "aria-orientation": "horizontal",
    });
  const parts = {
    start: edge("Start of the clip"),
    end: edge("End of the clip"),
    cursor: make("div", { className: "cursor" }),
    left: make("div", { className: "outside" }),
    right: make("div", { className: "outside" }),
    times: make("div", { className: "times" }, make("span"), make("span")),
  };
  const wide = make(
    "div",
    { className: "wide" },
    make("canvas", { role: "img", "aria-label": "Waveform of the clip and the audio around it" }),
    parts.left,
    parts.right,
    parts.cursor,
    parts.times,
    parts.start,
    parts.end,
  );
  wide.parts = parts;
  for (const name of ["start", "end"]) {
    parts[name].addEventListener("pointerdown", event => drag(event, node, name));
    parts[name].addEventListener("keydown", event => {
      const way = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
      if (!way || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      nudge(name, way * (event.shiftKey ? FINE_S : NUDGE_S));
    });
  }
  wide.addEventListener("pointerdown", event => {
    if (event.target.closest(".edge") || !node.detail.wave) return;
    const row = page.rows.get(page.selected);
    setCursor(Math.min(Math.max(timeAt(node, event.clientX), row.start), row.end), true);
  });
  return wide;
}

async function loadWide(id) {
  const node = page.items.get(id);
  const { detail } = node;
  const showWave = wave => {
    if (page.selected !== id || !detail.isConnected) return;
    detail.wave = wave;
    draw(detail.canvas, wave.peaks);
    place();
  };
  // To find a place in a long MP3 takes seconds: until then the clip alone is shown.
  const late = setTimeout(() => {
    const { start, end } = page.rows.get(id) ?? {};
    if (node.peaks?.length && end) showWave({ start, end, peaks: node.peaks });
  }, 400);
  try {
    showWave(await ask(`api/peaks/${id}?wide=1`));
  } catch (error) {
    say(error.message, true);
  } finally {
    clearTimeout(late);
  }
}

const timeAt = (node, x) => {
  const box = node.detail.wide.getBoundingClientRect(),
    { start, end } = node.detail.wave;
  return start + (end - start) * Math.min(1, Math.max(0, (x - box.left) / box.width));
};

// Places edges, shades and cursor over the wide waveform; `moved` are times that are not saved yet.
function place() {
  const node = page.items.get(page.selected),
    row = page.rows.get(page.selected),
    wave = node?.detail?.wave;
  if (!wave) return;
  const { start, end } = timesOf(row),
    { parts } = node.detail.wide;
  const at = time => 100 * Math.min(1, Math.max(0, (time - wave.start) / (wave.end - wave.start)));
  parts.start.style.left = `${at(start)}%`;
  parts.end.style.left = `${at(end)}%`;
  parts.left.style.left = "0";
  parts.left.style.width = `${at(start)}%`;
  parts.right.style.left = `${at(end)}%`;
  parts.right.style.right = "0";
  parts.cursor.style.left = `${at(page.cursor)}%`;
  parts.times.firstChild.textContent = clock(wave.start);
  parts.times.lastChild.textContent = clock(wave.end);
  for (const [name, time] of [
    ["start", start],
    ["end", end],
  ]) {
    const slider = parts[name];
    slider.setAttribute("aria-valuemin", wave.start.toFixed(2));
    slider.setAttribute("aria-valuemax", wave.end.toFixed(2));
    slider.setAttribute("aria-valuenow", time.toFixed(2));
    slider.setAttribute("aria-valuetext", `${clock(time)}, clip of ${(end - start).toFixed(2)} seconds`);
  }
}

function drag(event, node, name) {
  if (event.button || !node.detail.wave) return;
  event.preventDefault();
  const handle = event.currentTarget,
    row = page.rows.get(page.selected);
  handle.focus();
  handle.setPointerCapture(event.pointerId);
  handle.onpointermove = move => {
    page.moved = limited(row, name, timeAt(node, move.clientX));
    place();
  };
  const end = kept => () => {
    handle.onpointermove = handle.onpointerup = handle.onpointercancel = null;
    if (kept) commitMove();
    else {
      page.moved = null;
      place();
    }
  };
  handle.onpointerup = end(true);
  handle.onpointercancel = end(false);
}

const timesOf = row => (page.moved?.id === row.id ? page.moved : row);

function limited(row, name, time) {
  const { id, start, end } = timesOf(row);
  return name === "start"
    ? { id, start: Math.max(0, Math.min(time, end - 0.2)), end }
    : { id, start, end: Math.min(row.total || Infinity, Math.max(time, start + 0.2)) };
}

let nudged = 0;
function nudge(name, seconds) {
  const row = page.rows.get(page.selected);
  if (!row) return;
  page.moved = limited(row, name, timesOf(row)[name] + seconds);
  place();
  clearTimeout(nudged);
  nudged = setTimeout(commitMove, 500);
}

// A move that waits for its time is made now, for example before another edit.
function commitMove() {
  clearTimeout(nudged);
  const { moved } = page,
    row = page.rows.get(moved?.id);
  page.moved = null;
  if (row && (Math.abs(moved.start - row.start) >= 0.001 || Math.abs(moved.end - row.end) >= 0.001))
    edit("move", moved);
  else place();
}

// ---- sound

function toggle(id, restart = false) {
  const row = page.rows.get(id);
  if (!row) return;
  if (page.playing === id && !sound.paused) {
    sound.pause();
    return;
  }
  const address = `audio/${id}?file=${encodeURIComponent(row.audio)}`;
  if (page.source !== address) {
    page.source = sound.src = address;
  }
  page.playing = id;
  const ended = page.cursor >= row.end - 0.05;
  if (restart || ended) page.cursor = row.start;
  sound.currentTime = Math.max(0, page.cursor - row.start);
  sound.play().catch(error => {
    if (error.name !== "AbortError") say("The clip cannot be played: its audio is missing or damaged.", true);
  });
}

function setCursor(time, seek) {
  page.cursor = time;
  const row = page.rows.get(page.selected);
  if (seek && page.playing === page.selected && row) sound.currentTime = Math.max(0, time - row.start);
  place();
}

function showPlaying() {
  for (const [id, node] of page.items) {
    const on = id === page.playing && !sound.paused,
      bar = node.parts.small.lastChild;
    node.parts.play.setAttribute("aria-pressed", String(on));
    bar.hidden = !on;
    if (on && sound.duration) bar.style.left = `${(100 * sound.currentTime) / sound.duration}%`;
  }
}

function follow() {
  const row = page.rows.get(page.playing);
  showPlaying();
  if (!row || sound.paused) return;
  if (page.playing === page.selected) {
    page.cursor = Math.min(row.start + sound.currentTime, row.end);
    place();
  }
  requestAnimationFrame(follow);
}
sound.addEventListener("play", follow);
sound.addEventListener("pause", showPlaying);
sound.addEventListener("ended", () => {
  showPlaying();
  const row = page.rows.get(page.playing);
  if (row && page.playing === page.selected) setCursor(row.start, false);
});

// ---- edits

let queue = Promise.resolve();
// Edits are sent one after the other, each with the versions that the answer to the one before gave.
function enqueue(work) {
  queue = queue.then(work).catch(error => say(error.message, true));
  return queue;
}

function edit(action, given, after) {
  return enqueue(async () => {
    const ids = [given.id, given.first, given.second].filter(Boolean);
    const versions = Object.fromEntries(
      ids.filter(id => page.rows.has(id)).map(id => [id, page.rows.get(id).version]),
    );
    try {
      const answer = await ask("api/edit", { action, arguments: given, versions }, { keepalive: true });
      await receive(answer);
      if (answer.edit) say(`Saved: ${described(answer.edit)}`);
      after?.(answer);
    } catch (error) {
      await reconcile(ids, error);
    }
  });
}

// A refused edit is not lost: what was typed stays in its field, beside what the clip says now.
async function reconcile(ids, error) {
  say(error.message, true);
  if (error.status === 0) return;
  const typed = new Set(unsaved()),
    rows = await ask(`api/rows?ids=${ids}`),
    held = new Set(rows.map(row => row.id));
  for (const row of rows) {
    const node = page.items.get(row.id);
    if (!page.rows.has(row.id)) continue;
    page.rows.set(row.id, row);
    if (error.status === 409 && typed.has(row.id) && node.parts.text.value !== row.text) dispute(node, row);
    else show(row);
  }
  for (const id of ids) if (!held.has(id) && !typed.has(id)) remove(id);
  if (error.status === 409) showState(await ask("api/state"));
  place();
}

function dispute(node, row) {
  node.row = row;
  node.querySelector(".conflict")?.remove();
  node.parts.text.classList.add("changed");
  node.parts.marks.after(
    make(
      "p",
      { className: "conflict", role: "alert" },
      "Changed elsewhere to: ",
      make("bdi", { textContent: row.text, lang: row.language }),
      ". Your text is still here; press Enter in it to save it, or Escape to discard it.",
    ),
  );
}

function settle(id) {
  const node = page.items.get(id);
  page.drafts.delete(id);
  node?.parts.text.classList.remove("changed");
  node?.querySelector(".conflict")?.remove();
}

async function receive(answer) {
  showState(answer.state);
  if (answer.all) {
    await search(true);
    return;
  }
  for (const id of answer.gone) remove(id);
  for (const row of answer.rows)
    if (page.rows.has(row.id)) {
      page.rows.set(row.id, row);
      show(row);
    }
  for (const row of answer.rows) if (answer.made.includes(row.id) && !page.rows.has(row.id)) insert(row);
  showRange();
  place();
}

// A clip that an edit made stands after the one before it in the recording.
function insert(row) {
  const before = [...page.rows.values()].find(held => held.following === row.id) ?? page.rows.get(page.selected);
  if (!page.ids.includes(row.id)) page.ids.splice(page.ids.indexOf(before?.id) + 1, 0, row.id);
  page.rows.set(row.id, row);
  const node = item(row);
  if (before && page.items.has(before.id)) page.items.get(before.id).after(node);
  else list.prepend(node);
}

function remove(id) {
  const node = page.items.get(id),
    other = node?.nextElementSibling ?? node?.previousElementSibling;
  page.ids = page.ids.filter(held => held !== id);
  page.rows.delete(id);
  page.items.delete(id);
  if (page.selected === id) {
    page.selected = 0;
    if (other) select(Number(other.dataset.id));
  }
  node?.remove();
}

function decide(action) {
  const id = page.selected;
  commitMove();
  edit(action, { id });
  if (action !== "clear_decision") step(1);
}

function merge() {
  const row = page.rows.get(page.selected);
  commitMove();
  if (!row?.following) {
    say("No clip follows this one in its recording.");
    return;
  }
  edit("merge", { first: row.id, second: row.following });
}

function split() {
  const id = page.selected;
  commitMove();
  if (id) edit("split", { id, at: page.cursor });
}

function setEdge(name) {
  const row = page.rows.get(page.selected);
  if (!row) return;
  page.moved = limited(row, name, page.cursor);
  commitMove();
}

function turn(name) {
  commitMove();
  return enqueue(async () => {
    const expected = page.state[name];
    if (!expected) {
      say(`Nothing to ${name}.`);
      return;
    }
    try {
      const answer = await ask(`api/${name}`, { expected: expected.id });
      await receive(answer);
      const { id, first } = answer.edit?.arguments ?? {};
      if (page.rows.has(id ?? first)) select(id ?? first);
      if (answer.edit) say(`${name === "undo" ? "Undone" : "Redone"}: ${described(answer.edit)}`);
    } catch (error) {
      await refresh();
      throw error;
    }
  });
}

// ---- texts

// Saves a text that was changed, once. One that was refused as stale is sent again only if Enter confirms it.
function saveText(id) {
  const node = page.items.get(id),
    { text } = node?.parts ?? {},
    value = text?.value;
  if (!node || value.split(/\s+/).join(" ").trim() === node.row.text || node.sending === value) return;
  if (text.classList.contains("changed") && !node.confirmed) return;
  node.confirmed = false;
  node.sending = value;
  edit("set_text", { id, value }, () => {
    const row = page.rows.get(id);
    settle(id);
    if (row && document.activeElement !== text) text.value = row.text;
  }).then(() => {
    node.sending = null;
  });
}

function textKey(event, id) {
  const node = page.items.get(id);
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    node.confirmed = true;
    if (event.ctrlKey || event.metaKey) step(1);
    else node.focus();
    saveText(id);
  } else if (event.key === "Escape") {
    event.preventDefault();
    node.parts.text.value = node.row.text;
    settle(id);
    grow(node.parts.text);
    node.focus();
  }
}

const unsaved = () =>
  [...page.items.keys()].filter(id => page.items.get(id).parts.text.value !== page.items.get(id).row.text);
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState !== "hidden") return;
  commitMove();
  for (const id of unsaved()) saveText(id);
});
window.addEventListener("beforeunload", event => {
  if (unsaved().length) event.preventDefault();
});

// ---- moving about

async function step(by) {
  const at = page.ids.indexOf(page.selected) + by;
  if (at < 0 || at >= page.ids.length) {
    say(by > 0 ? "This is the last clip." : "This is the first clip.");
    page.items.get(page.selected)?.focus();
    return;
  }
  const id = page.ids[at];
  if (page.items.has(id)) select(id);
  else await openPage(at);
}

const turnPage = by => openPage(page.offset + by * PAGE_ROWS);

// Shows the page with a place of the list; keys that arrive meanwhile wait for nothing and do nothing.
async function openPage(at) {
  if (page.opening || at < 0 || at >= page.ids.length) return;
  page.opening = true;
  try {
    await showPage(at, page.ids[at], true);
  } catch (error) {
    say(error.message, true);
  }
  page.opening = false;
}

// Shows what other tabs or a running collect have changed.
async function refresh() {
  const ids = [...page.rows.keys()];
  showState(await ask("api/state"));
  const rows = ids.length ? await ask(`api/rows?ids=${ids}`) : [],
    held = new Set(rows.map(row => row.id));
  for (const id of ids) if (!held.has(id) && !unsaved().includes(id)) remove(id);
  for (const row of rows) {
    const node = page.items.get(row.id);
    if (!node || (node.row.version === row.version && JSON.stringify(node.row) === JSON.stringify(row))) continue;
    if (node.parts.text.value !== node.row.text) continue; // is being edited: the server refuses a stale edit
    page.rows.set(row.id, row);
    show(row);
  }
  showRange();
}

setInterval(() => {
  if (document.hidden || !page.state) return;
  enqueue(async () => {
    try {
      if ((await ask("api/version")).version !== page.state.version) await refresh();
      $("status").dataset.offline = "";
    } catch (error) {
      if ($("status").dataset.offline !== "yes") {
        $("status").dataset.offline = "yes";
        throw error;
      }
    }
  });
}, POLL_MS);

// ---- keys

const focusOn = name => page.items.get(page.selected)?.parts[name].focus();
const KEYS = [
  ["Space", "play or pause", () => toggle(page.selected)],
  ["j ↓", "next clip", () => step(1)],
  ["k ↑", "previous clip", () => step(-1)],
  ["PageDown", "next page", () => turnPage(1)],
  ["PageUp", "previous page", () => turnPage(-1)],
  ["Enter e", "edit the text; Enter saves, Ctrl+Enter saves and moves on, Escape discards", () => focusOn("text")],
  ["n", "edit the speaker", () => focusOn("speaker")],
  ["l", "choose the language", () => focusOn("language")],
  ["y", "keep and move on", () => decide("keep")],
  ["x", "reject and move on", () => decide("reject")],
  ["c", "clear the decision", () => decide("clear_decision")],
  ["m", "merge with the next clip of the recording", merge],
  ["s", "split at the cursor", split],
  [
    "← →",
    "move the cursor by 0.1 s, with Shift by 0.01 s",
    event => {
      const row = page.rows.get(page.selected),
        by = (event.key === "ArrowLeft" ? -1 : 1) * (event.shiftKey ? 0.01 : 0.1);
      if (row) setCursor(Math.min(Math.max(page.cursor + by, row.start), row.end), true);
    },
  ],
  ["[", "start the clip at the cursor", () => setEdge("start")],
  ["]", "end the clip at the cursor", () => setEdge("end")],
  ["q w", "start 0.05 s earlier, later", (_, key) => nudge("start", key === "q" ? -NUDGE_S : NUDGE_S)],
  ["o p", "end 0.05 s earlier, later", (_, key) => nudge("end", key === "o" ? -NUDGE_S : NUDGE_S)],
  ["u Ctrl+z", "undo", () => turn("undo")],
  ["U Ctrl+y", "redo", () => turn("redo")],
  ["t", "thresholds", () => openThresholds()],
  ["/", "search in texts", () => query.text.focus()],
  ["?", "this list", () => $("help").showModal()],
];
const NAMES = { " ": "Space", ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→" };
const PLACES = { BracketLeft: "[", BracketRight: "]", Slash: "/" };
const BY_KEY = new Map(KEYS.flatMap(([keys, , action]) => keys.split(" ").map(key => [key, action])));

// The key's name; a key of a layout without Latin letters counts as the one in its place on a US keyboard.
function keyName({ key, code, shiftKey }) {
  if (key.length === 1 && key > "~") key = PLACES[code] ?? code.replace(/^Key/, "");
  if (/^[a-z]$/i.test(key)) return shiftKey ? key.toUpperCase() : key.toLowerCase();
  return key === "/" && shiftKey && code === "Slash" ? "?" : (NAMES[key] ?? key);
}

document.addEventListener("keydown", event => {
  if (event.defaultPrevented || event.isComposing || event.altKey || document.querySelector("dialog[open]"))
    return;
  const field = event.target.closest("input, select, textarea");
  if (field) {
    if (event.key === "Escape") {
      event.preventDefault();
      page.items.get(page.selected)?.focus();
    }
    return;
  }
  if (!$("use-keys").checked || (["Enter", " "].includes(event.key) && event.target.closest("button, a, summary")))
    return;
  const name = keyName(event),
    key = !event.ctrlKey && !event.metaKey ? name : name === "Z" ? "Ctrl+y" : `Ctrl+${name}`,
    action = BY_KEY.get(key);
  if (!action) return;
  event.preventDefault();
  action(event, key);
});

// ---- thresholds, summary, speakers

const chosen = new Map();
function showRules() {
  const { filters } = page.state;
  $("rules").replaceChildren(...page.about.thresholds.map(rule => thresholdRow(rule, filters[rule.name])));
  preview();
}

function openThresholds() {
  $("effect").textContent = "";
  showRules();
  $("thresholds").showModal();
}

function thresholdRow(rule, value) {
  const start = value ?? (rule.is_maximum ? rule.high : rule.low);
  const name = `${words(rule.score)}, ${rule.is_maximum ? "at most" : "at least"}`;
  const on = make("input", { type: "checkbox", checked: value !== null, "aria-label": `Use ${name}` });
  const range = make("input", {
    type: "range",
    min: Math.min(rule.low, start),
    max: Math.max(rule.high, start),
    step: rule.step,
    value: start,
    "aria-label": name,
    title: rule.description,
  });
  const exact = make("input", { type: "number", step: "any", value: start, "aria-label": `${name}, exactly` });
  const changed = () => {
    range.disabled = exact.disabled = !on.checked;
    chosen.set(rule.name, on.checked && exact.value !== "" ? Number(exact.value) : null);
    preview();
  };
  range.addEventListener("input", () => {
    exact.value = Number(Number(range.value).toPrecision(6));
    changed();
  });
  exact.addEventListener("input", () => {
    range.value = exact.value;
    changed();
  });
  on.addEventListener("change", changed);
  chosen.set(rule.name, value);
  range.disabled = exact.disabled = value === null;
  const node = make(
    "div",
    { className: "rule" },
    on,
    make("span", { className: "name", textContent: name }),
    range,
    make("span", { className: "value" }, exact, rule.unit),
    make("span", { className: "takes", textContent: rule.description }),
  );
  node.rule = rule;
  return node;
}

let waiting = 0,
  asked = 0;
function preview() {
  clearTimeout(waiting);
  waiting = setTimeout(async () => {
    const turn = ++asked;
    try {
      const found = await ask("api/preview", Object.fromEntries(chosen));
      if (turn !== asked) return;
      const { used } = page.state,
        more = found.used.seconds - used.seconds,
        count = found.used.segments - used.clips;
      const sign = value => (value < 0 ? "−" : "+");
      $("effect").textContent =
        `Used: ${amount(used.seconds)} now, ${amount(found.used.seconds)} after` +
        (count || Math.abs(more) > 0.05
          ? ` (${sign(more)}${amount(Math.abs(more))}, ${sign(count)}${clips(Math.abs(count))})`
          : " (no change)");
      const taken = new Map(found.set_aside.map(row => [row.reason, row]));
      for (const node of $("rules").children) {
        const row = taken.get(node.rule.reason),
          measured = node.rule.score === "seconds" || page.state.scores.includes(node.rule.score);
        node.querySelector(".takes").textContent = !measured
          ? `${node.rule.description} Not measured in this corpus.`
          : chosen.get(node.rule.name) === null
            ? `${node.rule.description} Off.`
            : `${node.rule.description} Sets aside ${row ? `${clips(row.segments)}, ${amount(row.seconds)}` : "nothing"}.`;
      }
    } catch (error) {
      $("effect").textContent = error.message;
    }
  }, 120);
}

$("thresholds").addEventListener("close", () => {
  if ($("thresholds").returnValue === "apply")
    enqueue(async () => {
      const answer = await ask("api/filters", Object.fromEntries(chosen));
      await receive(answer);
      say(answer.edit ? "Thresholds applied." : "The thresholds have not changed.");
    });
  $("thresholds").returnValue = "";
});
$("reset").addEventListener("click", showRules);

async function openSummary() {
  const found = await ask("api/summary");
  const row = (cells, className = "") =>
    make(
      "tr",
      { className },
      ...cells.map((text, at) =>
        make(at ? "td" : "th", at ? { textContent: text } : { textContent: text, scope: "row" }),
      ),
    );
  const taken = (rows, before = "") =>
    rows.map(one =>
      row([
        before + one.reason,
        one.threshold === null ? "" : short(one.threshold),
        number(one.segments),
        amount(one.seconds),
      ]),
    );
  $("taken").replaceChildren(
    row(["used", "", number(found.used.segments), amount(found.used.seconds)], "total"),
    ...taken(found.set_aside),
    ...taken(found.unused, "no clip: "),
    row(["all audio", "", "", amount(found.seconds)], "total"),
  );
  $("summary").showModal();
}

function openRename() {
  fill(
    $("old-name"),
    page.state.speakers.map(([name, count]) => [name, `${name || "(none)"} (${number(count)})`]),
    page.rows.get(page.selected)?.speaker,
  );
  $("new-name").value = $("old-name").value;
  $("rename").showModal();
  $("new-name").select();
}
$("old-name").addEventListener("change", () => {
  $("new-name").value = $("old-name").value;
});
$("rename").addEventListener("close", () => {
  const { returnValue } = $("rename"),
    old = $("old-name").value,
    name = $("new-name").value;
  $("rename").returnValue = "";
  if (returnValue === "rename") edit("rename_speaker", { old, new: name });
});

// ---- start

$("home").hidden = !location.pathname.startsWith("/review/"); // the studio has opened this page
for (const [id, action] of Object.entries({
  undo: () => turn("undo"),
  redo: () => turn("redo"),
  "open-thresholds": openThresholds,
  "open-summary": () => openSummary().catch(error => say(error.message, true)),
  "open-rename": openRename,
  "open-help": () => $("help").showModal(),
  previous: () => turnPage(-1),
  next: () => turnPage(1),
  again: () => enqueue(() => search(true)),
}))
  $(id).addEventListener("click", action);
let typed = 0;
query.addEventListener("submit", event => event.preventDefault());
query.addEventListener("change", event => {
  if (event.target.name && event.target.name !== "text") enqueue(() => search());
});
query.text.addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(() => enqueue(() => search()), 250);
});
query.text.addEventListener("keydown", event => {
  if (event.key === "Enter") page.items.get(page.selected)?.focus();
});
for (const id of ["autoplay", "use-keys"]) {
  const stored = localStorage.getItem(`myxtts-${id}`);
  if (stored) $(id).checked = stored === "yes";
  $(id).addEventListener("change", () => localStorage.setItem(`myxtts-${id}`, $(id).checked ? "yes" : "no"));
}
$("keys").append(
  ...KEYS.flatMap(([keys, what]) => [
    make("dt", {}, ...keys.split(" ").map(key => make("kbd", { textContent: key }))),
    make("dd", { textContent: what }),
  ]),
);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let resized = 0;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(redraw, 150);
});

enqueue(async () => {
  page.about = await ask("api/about");
  showState(await ask("api/state"));
  await search();
  document.body.dataset.ready = "yes";
});
