// The studio: five views, one shown at a time. The server knows everything; this script shows it and asks for changes.
import { $, ask, fill, make, say } from "./page.js";

const RATE = 24000;
const POLL_MS = 2000;
const MOST_TAKES = 20;
const BUSY = ["starting", "training", "stopping"];
const words = await (await fetch("/studio.json")).json();
const page = { language: "en", about: null, voices: [], samples: "", run: "", state: "", corpus: "", chosen: [] };

// ---- words and numbers

const t = (key, values = {}) =>
  (words[key]?.[page.language === "fa" ? 1 : 0] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name]);
const num = (value, digits = 0) =>
  value === null || value === undefined
    ? "–"
    : new Intl.NumberFormat(page.language, { maximumFractionDigits: digits }).format(value);
const figure = value =>
  value === null || value === undefined
    ? "–"
    : new Intl.NumberFormat(page.language, { maximumSignificantDigits: 4 }).format(value);
const unit = (value, name, digits = 0) =>
  new Intl.NumberFormat(page.language, {
    style: "unit",
    unit: name,
    unitDisplay: "short",
    maximumFractionDigits: digits,
  }).format(value);
const span = seconds =>
  seconds === null || seconds === undefined
    ? "–"
    : seconds < 90
      ? unit(seconds, "second", seconds < 10 ? 1 : 0)
      : seconds < 5400
        ? unit(seconds / 60, "minute", 1)
        : unit(seconds / 3600, "hour", 1);
const listed = parts => parts.join(page.language === "fa" ? "، " : ", ");
const share = value =>
  value === null || value === undefined
    ? "–"
    : new Intl.NumberFormat(page.language, { style: "percent", maximumFractionDigits: 1 }).format(value);
const languageName = code =>
  code ? new Intl.DisplayNames([page.language], { type: "language" }).of(code) : t("detect");
const corpusName = name => (name === "embedded" ? t("embedded") : name);
const tile = (name, value, more = "") =>
  make(
    "div",
    {},
    make("dt", { textContent: name }),
    make("dd", {}, make("bdi", { textContent: value })),
    more ? make("dd", { className: "soft", textContent: more }) : "",
  );
const box = (className, ...children) => make("div", { className }, ...children);
const card = (...children) => make("li", { className: "card" }, ...children);
const line = (text, className = "") => make("p", { className, dir: "auto", textContent: text });
const chip = (text, look = "") => make("span", { className: `chip ${look}`, textContent: text });
const soft = text => make("span", { className: "soft", textContent: text });
const pairs = names => names.map(name => [name, name]);
const pathOf = (path, name) => `${path}${encodeURIComponent(name)}`;
const heading = (key, level = "h3") => make(level, { textContent: t(key) });
const button = (key, action, label = null) => {
  const node = make("button", { type: "button", textContent: t(key) });
  if (label) node.setAttribute("aria-label", label);
  node.addEventListener("click", () => Promise.resolve(action(node)).catch(failed));
  return node;
};
const failed = error => {
  if (error.name !== "AbortError") say(error.message, true);
};
const player = (src, label) => make("audio", { controls: true, preload: "none", src, "aria-label": label });
const form = (id, action) =>
  $(id).addEventListener("submit", event => {
    event.preventDefault();
    action(new FormData($(id)), $(id)).catch(failed);
  });

function table(headings, rows, caption) {
  const head = make("tr", {}, ...headings.map(text => make("th", { scope: "col", textContent: text })));
  const row = cells => make("tr", {}, ...cells.map(cell => make("td", { dir: "auto", textContent: cell })));
  return make(
    "div",
    { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows.map(row))),
  );
}

const barRow = (label, value, most, text) => {
  const bar = make("i");
  bar.style.width = `${(100 * value) / Math.max(most, 1e-9)}%`;
  return make(
    "li",
    {},
    make("span", { textContent: label, dir: "auto" }),
    make("span", { className: "bar", "aria-hidden": "true" }, bar),
    soft(text),
  );
};

// A figure with lines over steps; each series is a label and pairs of step and value.
function chart(title, series) {
  const all = series.flatMap(one => one.points).filter(point => point[1] !== null);
  if (!all.length) return "";
  const ends = at => [Math.min(...all.map(point => point[at])), Math.max(...all.map(point => point[at]))];
  const [[left, right], [low, high]] = [ends(0), ends(1)];
  const place = ([x, y]) =>
    `${((400 * (x - left)) / (right - left || 1)).toFixed(1)} ${(96 - (92 * (y - low)) / (high - low || 1)).toFixed(1)}`;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 400 100");
  svg.setAttribute("preserveAspectRatio", "none");
  const keys = series.map((one, index) => {
    const path = document.createElementNS(svg.namespaceURI, "path"),
      points = one.points.filter(point => point[1] !== null);
    if (!points.length) return "";
    path.setAttribute("class", `c${index + 1}`);
    path.setAttribute("d", `M${points.map(place).join("L")}${points.length === 1 ? "h1" : ""}`);
    svg.append(path);
    const value = make("b", { textContent: figure(points.at(-1)[1]) });
    return make("span", { className: one.label ? `key c${index + 1}` : "" }, `${one.label} `, value);
  });
  const range = box("range", soft(figure(high)), soft(figure(low)));
  const steps = box("steps", soft(num(left)), soft(num(right)));
  const label = `${title}: ${series.map(one => `${one.label} ${figure(one.points.at(-1)?.[1])}`).join(", ")}`;
  const plot = make("div", { className: "plot", role: "img", "aria-label": label }, svg, range);
  return make(
    "figure",
    { className: "card" },
    make("figcaption", {}, make("b", { textContent: title }), " ", ...keys),
    plot,
    steps,
  );
}

// ---- sound

// Plays pieces one after the other as they arrive.
class Speaker {
  constructor() {
    this.context = new AudioContext({ sampleRate: RATE });
    this.at = 0;
  }
  push(samples) {
    const buffer = this.context.createBuffer(1, samples.length, RATE),
      node = this.context.createBufferSource();
    buffer.copyToChannel(samples, 0);
    node.buffer = buffer;
    node.connect(this.context.destination);
    this.at = Math.max(this.at, this.context.currentTime + 0.06);
    node.start(this.at);
    this.at += buffer.duration;
  }
  get left() {
    return Math.max(0, this.at - this.context.currentTime);
  }
}

let speaking = null;
function hush() {
  speaking?.stop.abort();
  speaking?.speaker.context.close();
  speaking = null;
  $("stop-speaking").disabled = true;
}

// Speaks a request, plays it while it arrives, and calls `heard` with all samples so far and the headers.
async function utter(request, heard = () => {}) {
  hush();
  const now = { speaker: new Speaker(), stop: new AbortController() };
  speaking = now;
  $("stop-speaking").disabled = false;
  const body = JSON.stringify({ ...request, response_format: "pcm", stream: true });
  const headers = { "content-type": "application/json" };
  try {
    const answer = await fetch("/v1/audio/speech", { method: "POST", headers, body, signal: now.stop.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.getReader();
    let samples = new Float32Array(0),
      rest = new Uint8Array(0);
    for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
      const bytes = new Uint8Array(rest.length + value.length);
      bytes.set(rest);
      bytes.set(value, rest.length);
      const whole = bytes.length - (bytes.length % 2);
      rest = bytes.slice(whole);
      const piece = Float32Array.from(new Int16Array(bytes.buffer, 0, whole / 2), value => value / 32768);
      if (!piece.length) continue;
      now.speaker.push(piece);
      const joined = new Float32Array(samples.length + piece.length);
      joined.set(samples);
      joined.set(piece, samples.length);
      samples = joined;
      heard(samples, answer.headers);
    }
    setTimeout(() => now === speaking && hush(), 1000 * now.speaker.left + 300);
  } catch (error) {
    if (now === speaking) hush();
    throw error;
  }
}

function wav(samples) {
  const size = 2 * samples.length,
    view = new DataView(new ArrayBuffer(44 + size)),
    [riff, wave, fmt, data] = [0x46464952, 0x45564157, 0x20746d66, 0x61746164]; // as little-endian words
  const head = [riff, 36 + size, wave, fmt, 16, 0x10001, RATE, 2 * RATE, 0x100002, data, size];
  head.forEach((word, place) => view.setUint32(4 * place, word, true));
  samples.forEach((value, at) => view.setInt16(44 + 2 * at, 32767 * Math.min(1, Math.max(-1, value)), true));
  return new Blob([view], { type: "audio/wav" });
}

function draw(canvas, samples) {
  const ratio = devicePixelRatio || 1,
    pen = canvas.getContext("2d"),
    count = Math.max(1, Math.floor(canvas.clientWidth / 4)),
    most = Math.max(samples.length, 3 * RATE),
    loudest = samples.reduce((most, value) => Math.max(most, Math.abs(value)), 0.1);
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  pen.scale(ratio, ratio);
  pen.fillStyle = getComputedStyle(canvas).color;
  for (let bar = 0; bar < count; bar++) {
    let peak = 0;
    const end = Math.floor(((bar + 1) * most) / count);
    for (let at = Math.floor((bar * most) / count); at < end && at < samples.length; at += 7)
      peak = Math.max(peak, Math.abs(samples[at]));
    const height = Math.max(2, Math.min(1, peak / loudest) * canvas.clientHeight);
    pen.globalAlpha = end <= samples.length ? 1 : 0.35;
    pen.fillRect(4 * bar, (canvas.clientHeight - height) / 2, 2, height);
  }
}

// ---- hear

function newTake(text) {
  const [canvas, about, row] = [make("canvas", { className: "wave" }), soft(t("speaking")), box("row")];
  $("no-takes").hidden = true;
  $("takes").prepend(card(line(text, "said"), canvas, about, row));
  while ($("takes").children.length > MOST_TAKES) $("takes").lastChild.remove();
  return { canvas, about, row };
}

form("speak", async (given, fields) => {
  const text = given.get("text").trim(),
    take = newTake(text),
    began = performance.now();
  let first = 0,
    held = new Float32Array(0),
    said = null;
  const [model, voice, speed] = ["model", "voice", "speed"].map(name => given.get(name));
  const request = { input: text, model, voice, speed: Number(speed) };
  if (given.get("language")) request.language = given.get("language");
  if (given.get("seed") !== "") request.seed = Number(given.get("seed"));
  try {
    await utter(request, (samples, headers) => {
      first ||= performance.now() - began;
      [held, said] = [samples, headers];
      draw(take.canvas, samples);
    });
    take.about.textContent = t("spoken.in", { length: span(held.length / RATE), first: span(first / 1000) });
  } catch (error) {
    take.about.textContent = error.name === "AbortError" ? t("stopped") : error.message;
    if (error.name !== "AbortError") say(error.message, true);
  }
  if (!held.length) return;
  const seed = said.get("x-myxtts-seed"),
    speaker = decodeURIComponent(said.get("x-myxtts-voice") ?? ""),
    href = URL.createObjectURL(wav(held)),
    again = button("seed.use", () => (fields.elements.seed.value = seed), t("seed.again", { seed }));
  again.textContent = t("seed.use", { seed });
  again.className = "quiet";
  take.about.textContent += ` · ${speaker} · ${languageName(said.get("x-myxtts-language"))}`;
  const name = `${speaker}-${seed}.wav`;
  take.row.append(
    player(href, text),
    make("a", { className: "button", href, download: name, textContent: t("download") }),
    again,
  );
});

$("stop-speaking").addEventListener("click", hush);
$("speak").addEventListener("input", showForm);
function showForm() {
  const { text, speed } = $("speak").elements;
  $("length").textContent = t("length", { n: num(text.value.length) });
  $("speed-now").textContent = `${num(Number(speed.value), 2)}×`;
  const { first, second, share: part } = $("mix").elements;
  const parts = [
    [first, 1 - part.value / 100],
    [second, part.value / 100],
  ];
  $("mix-now").textContent = parts.map(([voice, weight]) => `${voice.value} ${share(weight)}`).join(" · ");
}
$("mix").addEventListener("input", showForm);

// ---- models and voices

async function readModels(chosen = document.querySelector(".models").value) {
  const names = pairs((await ask("/v1/models")).data.map(model => model.id));
  for (const select of document.querySelectorAll(".models")) fill(select, names, chosen);
  await readVoices();
}

async function readVoices() {
  const model = document.querySelector(".models").value;
  page.voices = (await ask(pathOf("/v1/audio/voices?model=", model))).data;
  const names = pairs(page.voices.map(voice => voice.name));
  for (const name of ["first", "second"]) fill($("mix").elements[name], names);
  fill(
    $("speak").elements.voice,
    page.voices.some(voice => voice.built_in) ? [["", t("automatic")], ...names] : names,
  );
  if ($("mix").second.value === $("mix").first.value)
    $("mix").second.selectedIndex = Math.min(1, names.length - 1);
  $("voice-list").replaceChildren(...page.voices.map(voiceCard));
  showForm();
}

function voiceCard(voice) {
  const { name } = voice,
    marks = voice.languages.map(code => chip(languageName(code)));
  if (voice.built_in) marks.push(chip(t("built.in")));
  const input = words.example[voice.languages[0] === "fa" ? 1 : 0];
  const row = box(
    "row",
    button("try", () => utter({ input, voice: name, model: voice.model }), t("try.name", { name })),
  );
  if (!voice.built_in) row.append(button("delete", () => deleteVoice(voice), t("delete.name", { name })));
  return card(
    make("b", { textContent: name, dir: "auto" }),
    make("span", { className: "chips" }, ...marks),
    line(voice.description, "soft"),
    row,
  );
}

async function deleteVoice({ name, model }) {
  if (!confirm(t("delete.sure", { name }))) return;
  const path = `/v1/audio/voices/${encodeURIComponent(name)}?model=${encodeURIComponent(model)}`;
  await ask(path, undefined, { method: "DELETE" });
  await readVoices();
  say(t("deleted", { name }));
  $("voices-title").focus();
}

for (const select of document.querySelectorAll(".models"))
  select.addEventListener("change", () => readModels(select.value).catch(failed));

const microphone = { recorder: null, sound: null };
async function record() {
  if (microphone.recorder) return microphone.recorder.stop();
  const audio = { echoCancellation: false, noiseSuppression: false, autoGainControl: false, channelCount: 1 };
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio });
  } catch (error) {
    throw new Error(t("no.microphone", { why: error.message }), { cause: error });
  }
  const recorder = new MediaRecorder(stream, { audioBitsPerSecond: 192000 }),
    context = new AudioContext(),
    meter = context.createAnalyser(),
    parts = [],
    began = performance.now(),
    values = new Float32Array(meter.fftSize);
  context.createMediaStreamSource(stream).connect(meter);
  const timer = setInterval(() => {
    meter.getFloatTimeDomainData(values);
    const peak = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0),
      seconds = (performance.now() - began) / 1000;
    $("level").firstElementChild.style.width = `${100 * Math.min(1, peak)}%`;
    $("recorded").textContent = t("recording", { seconds: num(Math.floor(seconds)) });
    if (seconds > 120) recorder.stop();
  }, 100);
  recorder.ondataavailable = event => parts.push(event.data);
  recorder.onstop = () => {
    clearInterval(timer);
    for (const track of stream.getTracks()) track.stop();
    context.close();
    microphone.recorder = null;
    showRecording(false);
    useSound(new Blob(parts), true).catch(failed);
  };
  microphone.recorder = recorder;
  showRecording(true);
  recorder.start();
}

function showRecording(on) {
  $("record").textContent = t(on ? "record.end" : "record");
  $("record").setAttribute("aria-pressed", on);
  $("level").hidden = !on;
}

// Keeps a sound to be uploaded: a recording as WAV, because browsers record formats that only they read.
async function useSound(blob, convert) {
  const context = new OfflineAudioContext(1, 1, RATE);
  let seconds = null;
  try {
    const decoded = await context.decodeAudioData(await blob.arrayBuffer());
    seconds = decoded.duration;
    if (convert) blob = wav(decoded.getChannelData(0));
  } catch (error) {
    if (convert) throw error; // a file is for the server to read
  }
  microphone.sound = blob;
  $("preview").src = URL.createObjectURL(blob);
  $("preview").hidden = false;
  $("recorded").textContent = seconds === null ? "" : t("recorded", { seconds: num(seconds, 1) });
  say($("recorded").textContent);
}

$("record").addEventListener("click", () => record().catch(failed));
$("file").addEventListener(
  "change",
  () => $("file").files[0] && useSound($("file").files[0], false).catch(failed),
);

form("add-voice", async (given, fields) => {
  if (!microphone.sound) throw new Error(t("voice.missing"));
  given.append("audio_sample", microphone.sound, "recording");
  given.append("model", document.querySelector(".models").value);
  await saved(given, { method: "POST", body: given });
  microphone.sound = null;
  $("preview").hidden = true;
  $("recorded").textContent = "";
  fields.reset();
});

form("mix", async (given, fields) => {
  const part = Number(given.get("share")) / 100,
    mix = { [given.get("first")]: 1 - part };
  mix[given.get("second")] = (mix[given.get("second")] ?? 0) + part;
  await saved(given, {}, { name: given.get("name"), mix, model: document.querySelector(".models").value });
  fields.elements.name.value = "";
});

async function saved(given, extra, body) {
  const { notes } = await ask("/v1/audio/voices", body, extra);
  await readVoices();
  say([t("voice.saved", { name: given.get("name") }), ...notes].join(" "));
}

// ---- corpora

async function showCorpora() {
  page.about.corpora = await ask("/studio/corpora");
  for (const select of document.querySelectorAll(".corpora"))
    fill(
      select,
      page.about.corpora.map(({ name }) => [name, corpusName(name)]),
    );
  await showCorpus();
}

async function showCorpus() {
  const name = $("corpus").value,
    known = page.about.corpora.find(each => each.name === name);
  $("review").hidden = !known?.review;
  $("review").href = `/review/${encodeURIComponent(name)}/`;
  const found = await ask(pathOf("/studio/corpus?name=", name));
  if (name !== $("corpus").value) return;
  page.preparing = BUSY.includes(found.state);
  $("prepare").disabled = page.preparing;
  $("prepare").textContent = t(found.table ? "prepare.again" : "prepare");
  $("prepare").classList.toggle("main", !found.table);
  const unknown = found.state === "failed" ? "prepare.failed" : "prepare.unknown",
    key = page.preparing ? "preparing" : found.table ? "prepared" : unknown;
  if ($("corpus-state").textContent !== t(key)) $("corpus-state").textContent = t(key);
  $("corpus-log").hidden = !found.log.length;
  $("corpus-log").textContent = found.log.join("\n");
  $("corpus-table").replaceChildren(...(found.table ? corpusTable(found.table) : []));
}

function corpusTable(found) {
  const tiles = [
    tile(t("clips.train"), span(found.train.seconds), t("clips", { n: num(found.train.clips) })),
    tile(t("clips.val"), span(found.val.seconds), t("clips", { n: num(found.val.clips) })),
    tile(t("speakers"), num(found.num_speakers)),
    tile(t("clips.aside"), num(found.num_set_aside), t("clips", { n: "" }).trim()),
  ];
  const bars = (key, rows) => box("card", heading(key), make("ul", { className: "bars" }, ...rows));
  const amount = row => listed([t("clips", { n: num(row.num_clips) }), span(3600 * row.hours)]);
  const parts = (rows, name = String) =>
    rows.map(row => barRow(name(row.name), row.share, rows[0].share, amount(row)));
  const most = Math.max(...found.lengths);
  const lengths = found.lengths.map((count, at) =>
    barRow(t("seconds.range", { from: num(2 * at), to: num(2 * at + 2) }), count, most, num(count)),
  );
  const reasons = found.reasons.map(row =>
    barRow(row.reason + (row.flag ? ` (${row.flag})` : ""), row.clips, found.reasons[0].clips, num(row.clips)),
  );
  const headings = ["clip", "reason", "detail", "where"].map(key => t(key)),
    aside = found.set_aside.map(row => [row.id, row.reason, row.detail, row.where]);
  const rest = found.num_set_aside - found.set_aside.length;
  return [
    make("dl", { className: "numbers" }, ...tiles),
    found.is_unnamed ? line(t("unnamed"), "note") : "",
    box(
      "thirds",
      bars("languages", parts(found.languages, languageName)),
      bars("speakers", parts(found.speakers)),
      bars("lengths", lengths),
    ),
    ...(reasons.length ? [bars("why.not", reasons), table(headings, aside, t("why.not"))] : []),
    rest > 0 ? soft(t("more", { n: num(rest) })) : "",
  ];
}

$("corpus").addEventListener("change", () => showCorpus().catch(failed));
$("prepare").addEventListener("click", () =>
  ask("/studio/prepare", { name: $("corpus").value })
    .then(showCorpus)
    .catch(failed),
);

// ---- train

async function showTrain() {
  const [runs] = await Promise.all([ask("/studio/runs"), showCorpora()]);
  const { start, preset } = $("start").elements;
  const starts = pairs(runs.filter(run => run.can_speak).map(run => run.name));
  fill(start, [...(page.about.has_base ? [["", t("start.auto")]] : []), ["none", t("start.none")], ...starts]);
  fill(preset, [["", t("none")], ...page.about.presets.map(name => [name, name.replace("gb", " GB")])]);
  fill($("run"), pairs(runs.map(run => run.name)), page.run || $("run").value);
  page.run = $("run").value;
  if (!runs.length) $("new-run").open = true;
  $("run").disabled = !runs.length;
  page.samples = page.state = "";
  if (page.run) await showLive();
  else $("run-state").textContent = t("state.none");
}

async function showLive() {
  const name = page.run,
    found = await ask(pathOf("/studio/live?name=", name));
  if (name !== page.run) return;
  const busy = BUSY.includes(found.state),
    { last } = found;
  if (page.state !== found.state) {
    $("run-state").textContent = t(`state.${found.state}`);
    $("run-log").parentElement.open = found.state === "failed" || (busy && !last);
  }
  page.state = found.state;
  $("stop-run").hidden = !busy;
  $("stop-run").disabled = found.state === "stopping";
  $("resume").hidden = busy;
  $("live").hidden = false;
  $("run-log").textContent = found.log.join("\n");
  $("run-log").parentElement.hidden = !found.log.length;
  $("done").style.width = `${last?.total_steps ? (100 * last.step) / last.total_steps : 0}%`;
  const gb = mb => `${num(mb / 1024, 1)} GB`;
  const memory = Object.entries(last?.memory_mb ?? {}).map(([role, mb]) => tile(t("memory"), gb(mb), role));
  const gpus = found.gpus.map(gpu => tile(`GPU ${num(gpu.gpu)}`, share(gpu.utilisation), gb(gpu.memory_used_mb)));
  const numbers = last
    ? [
        tile(t("stage"), last.stage),
        tile(t("step"), num(last.step), last.total_steps ? t("of", { n: num(last.total_steps) }) : ""),
        tile(t("loss"), figure(last.losses.total)),
        tile(t("speed.train"), figure(last.clips_per_s)),
        tile(t("idle"), share(last.idle_share)),
        tile(t("eta"), busy ? span(last.eta_s) : "–"),
        ...memory,
        ...gpus,
      ]
    : [];
  $("numbers").replaceChildren(...numbers);
  $("curves").replaceChildren(...found.stages.flatMap(stageCharts));
  $("warnings").replaceChildren(...found.warnings.map(text => line(text, "note")));
  if (page.samples === JSON.stringify(found.samples)) return; // a sound may be playing
  page.samples = JSON.stringify(found.samples);
  showSamples(found.samples);
}

const stageCharts = stage => [
  chart(`${t("loss")} (${stage.name})`, [
    { label: t("train"), points: stage.losses },
    { label: t("validation"), points: stage.validations },
  ]),
  chart(`${t("speed.train")} (${stage.name})`, [{ label: "", points: stage.clips_per_s }]),
];

function showSamples(samples) {
  const texts = Map.groupBy(samples, row => row.text);
  const cards = [...texts].map(([text, rows]) => {
    const sounds = rows.map(row =>
      sound(listed([row.stage, `${t("step")} ${num(row.step)}`]), row.file, row.problem),
    );
    if (rows[0].recording) sounds.unshift(sound(t("original"), rows[0].recording));
    return box("card", line(text), ...sounds);
  });
  const grid = box("halves", ...cards);
  $("samples").replaceChildren(...(cards.length ? [heading("samples"), grid] : []));
}

const sound = (label, src, problem = "") =>
  box("sound", soft(label), player(src, label), problem ? chip(problem, "warn") : "");

$("run").addEventListener("change", () => {
  page.run = $("run").value;
  page.samples = page.state = "";
  showLive().catch(failed);
});
$("stop-run").addEventListener("click", () =>
  ask("/studio/stop", { name: page.run }).then(showLive).catch(failed),
);
form("start", async (given, fields) => {
  const asked = Object.fromEntries(given),
    steps = asked.steps ? Number(asked.steps) : null;
  const ticked = { single_speaker: "single_speaker" in asked, spoken: "spoken" in asked };
  const { name } = await ask("/studio/train", { ...asked, ...ticked, steps });
  say(t("train.started"));
  fields.elements.name.value = "";
  $("new-run").open = false;
  page.run = name;
  await showTrain();
  $("run-state").focus();
});
form("resume", async given => {
  await ask("/studio/resume", { name: page.run, steps: given.get("steps") ? Number(given.get("steps")) : null });
  await showLive();
});

// ---- runs

async function showRuns() {
  const runs = await ask("/studio/runs");
  page.chosen = page.chosen.filter(name => runs.some(run => run.name === name));
  $("run-list").replaceChildren(...runs.map(runCard));
  $("no-runs").hidden = runs.length > 0;
  await showComparison();
}

function runCard(run) {
  const { name } = run,
    tick = make("input", {
      type: "checkbox",
      checked: page.chosen.includes(name),
      "aria-label": t("compare.name", { name }),
    });
  tick.addEventListener("change", () => {
    page.chosen = page.chosen.filter(each => each !== name);
    if (tick.checked) page.chosen = [...page.chosen, name].slice(-2);
    showRuns()
      .then(() => page.chosen.length === 2 && $("comparison-title").focus())
      .catch(failed);
  });
  const link = (key, href, label) =>
    make("a", { className: "button", href, textContent: t(key), "aria-label": `${t(key)}: ${label}` });
  const watch = link("watch", "#train", name);
  watch.addEventListener("click", () => (page.run = name));
  const row = box("row", watch);
  if (run.can_speak) row.append(button("hear.run", () => hearRun(name), t("hear.name", { name })));
  row.append(link("report", pathOf("/studio/report?name=", name), name));
  const stages = run.stages.filter(stage => stage.state !== "missing").map(stageChip);
  const date = new Intl.DateTimeFormat(page.language, { dateStyle: "medium", timeStyle: "short" });
  const saved = run.saved_at ? date.format(1000 * run.saved_at) : "";
  const about = [run.size, corpusName(run.corpus), listed(run.languages.map(languageName)), saved]
    .filter(Boolean)
    .join(" · ");
  const live = BUSY.includes(run.state) ? [chip(t(`state.${run.state}`), "good")] : [];
  return card(
    make("label", { className: "switch" }, tick, make("b", { textContent: name, dir: "auto" }), ...live),
    make("p", { className: "soft", textContent: about }),
    make("span", { className: "chips" }, ...stages),
    run.problem ? line(run.problem, "note") : "",
    row,
  );
}

function stageChip(stage) {
  const steps = `${num(stage.step)} / ${num(stage.target)}`,
    best = stage.best_loss === null ? "" : ` · ${t("best")} ${num(stage.best_loss, 3)}`;
  const looks = { complete: "good", stale: "warn" };
  return Object.assign(chip(`${stage.stage} ${steps}${best}`, looks[stage.state]), { title: stage.why });
}

async function hearRun(name) {
  say(t("loading", { name }));
  await ask("/studio/hear", { name });
  await readModels(name);
  location.hash = "hear";
}

async function showComparison() {
  const [a, b] = page.chosen;
  $("comparison").hidden = !b;
  if (!b) return;
  const found = await ask(`/studio/compare?${new URLSearchParams({ a, b })}`);
  if (page.listening || `${page.chosen}` !== `${[a, b]}`) return;
  $("comparison-title").textContent = t("comparison", { a, b });
  const lines = name =>
    found.stages.map((stages, at) => ({
      label: found.names[at],
      points: stages.find(stage => stage.name === name)?.validations ?? [],
    }));
  const names = [...new Set(found.stages.flat().map(stage => stage.name))];
  const charts = names.map(name => chart(`${t("validation")} (${name})`, lines(name)));
  const score = key => found.scores.map(each => num(each?.[key], 3));
  const rows = ["wer", "cer", "similarity", "mos"].map(key => [
    key === "similarity" ? key : key.toUpperCase(),
    ...score(key),
  ]);
  const hasScores = found.scores.some(Boolean);
  $("facts").replaceChildren(box("halves", ...charts), hasScores ? table(["", a, b], rows, t("compare")) : "");
  $("begin-blind").hidden = !found.samples.length;
  $("listening").replaceChildren(found.samples.length ? "" : soft(t("blind.none")));
  const { preferred, neither, p } = found.listening,
    values = { a, b, m: num(preferred[0]), n: num(preferred[1]), o: num(neither), p: share(p) };
  $("verdict").textContent = preferred[0] + preferred[1] + neither ? t("blind.result", values) : "";
  const heard = found.samples.map(row =>
    box("card", line(row.text), sound(a, row.sounds[0]), sound(b, row.sounds[1])),
  );
  const hidden = make(
    "details",
    { className: "card" },
    make("summary", { textContent: t("side.by.side") }),
    ...heard,
  );
  $("side-by-side").replaceChildren(heard.length ? hidden : "");
  $("differences").replaceChildren(
    found.settings.length ? heading("differences", "h4") : "",
    found.settings.length ? table([t("setting"), a, b], found.settings, t("differences")) : "",
  );
}

$("begin-blind").addEventListener("click", () => beginBlind().catch(failed));
async function beginBlind() {
  const [a, b] = page.chosen,
    trials = await ask("/studio/trials", { a, b });
  page.listening = true;
  $("begin-blind").hidden = true;
  $("side-by-side").replaceChildren();
  $("verdict").textContent = "";
  for (const [at, trial] of trials.entries()) {
    const chosen = await answered(trial, t("blind.number", { n: num(at + 1), all: num(trials.length) }));
    if (chosen === undefined) break;
    await ask("/studio/answer", { id: trial.id, chosen });
  }
  page.listening = false;
  await showComparison();
  $("verdict").scrollIntoView({ block: "center" });
}

// Resolves with 0, 1 or null; with nothing if the listener has left.
function answered(trial, title) {
  return new Promise(resolve => {
    const choices = [
      ["blind.first", 0],
      ["blind.second", 1],
      ["blind.neither", null],
    ];
    const buttons = choices.map(([key, value]) => button(key, () => resolve(value)));
    const top = make("p", { textContent: title, tabIndex: -1, className: "soft" });
    const sounds = box("halves", sound(t("first"), trial.sounds[0]), sound(t("second"), trial.sounds[1]));
    $("listening").replaceChildren(top, line(trial.text, "said"), sounds, box("row", ...buttons));
    top.focus();
    window.addEventListener("hashchange", () => resolve(undefined), { once: true });
  });
}

// ---- views and languages

const VIEWS = { hear: readModels, voices: readModels, corpora: showCorpora, train: showTrain, runs: showRuns };
const view = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "hear");

async function show(focus = false) {
  for (const name of Object.keys(VIEWS)) $(name).hidden = name !== view();
  for (const link of $("views").children) {
    if (link.hash === `#${view()}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${t(view())} – MyXTTS`;
  if (focus) {
    $(`${view()}-title`).focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  await VIEWS[view()]();
}

function speakLanguage(code) {
  page.language = code;
  localStorage.setItem("myxtts-language", code);
  Object.assign(document.documentElement, { lang: code, dir: code === "fa" ? "rtl" : "ltr" });
  for (const node of document.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  for (const node of document.querySelectorAll("[data-t-label]"))
    node.setAttribute("aria-label", t(node.dataset.tLabel));
  for (const node of document.querySelectorAll("[data-t-hint]")) node.placeholder = t(node.dataset.tHint);
  Object.assign($("language"), { textContent: t("other"), lang: code === "fa" ? "en" : "fa" });
  const { text } = $("speak").elements;
  if (!text.value || words.example.includes(text.value)) text.value = t("example");
  const languages = Object.keys(page.about.languages).map(each => [each, languageName(each)]);
  for (const select of document.querySelectorAll(".languages"))
    fill(select, [["", t(select.form.id === "add-voice" ? "unknown" : "detect")], ...languages], select.value);
  showForm();
}

$("language").addEventListener("click", () => {
  speakLanguage(page.language === "fa" ? "en" : "fa");
  show().catch(failed);
});
window.addEventListener("hashchange", () => show(true).catch(failed));
setInterval(() => {
  if (document.hidden || page.asking) return;
  const work =
    view() === "train" && page.run ? showLive : view() === "corpora" && page.preparing ? showCorpus : null;
  if (!work) return;
  page.asking = true;
  work()
    .catch(error => {
      if ($("run-state").textContent !== error.message) $("run-state").textContent = error.message;
      page.state = "";
    })
    .finally(() => (page.asking = false));
}, POLL_MS);

try {
  page.about = await ask("/studio/about");
  speakLanguage(localStorage.getItem("myxtts-language") ?? (navigator.language.startsWith("fa") ? "fa" : "en"));
  await show();
} catch (error) {
  failed(error);
}
document.body.dataset.ready = "yes";
