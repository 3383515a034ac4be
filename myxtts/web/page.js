// What local pages share: nodes, requests, messages, and how amounts are written. Text from a corpus is always set
// as text, never as HTML.

const SHOWN_MS = 6000;
export const $ = id => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "list") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter(child => child !== null));
  return node;
}

export const clock = seconds => {
  const tenths = Math.round(seconds * 10),
    minutes = Math.floor(tenths / 600),
    hours = Math.floor(minutes / 60);
  const rest = ((tenths % 600) / 10).toFixed(1).padStart(4, "0");
  return hours ? `${hours}:${String(minutes % 60).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
};
export const amount = seconds =>
  seconds >= 3600
    ? `${(seconds / 3600).toFixed(2)} h`
    : seconds >= 60
      ? `${(seconds / 60).toFixed(1)} min`
      : `${seconds.toFixed(1)} s`;
export const number = value => value.toLocaleString("en");
export const short = value => Number(value.toPrecision(3)).toString();
export const clips = count => `${number(count)} clip${count === 1 ? "" : "s"}`;

let hide = 0;
export function say(text, bad = false) {
  const status = $("status");
  status.textContent = text;
  status.classList.toggle("bad", bad);
  clearTimeout(hide);
  hide = setTimeout(
    () => {
      status.textContent = "";
    },
    bad ? 2 * SHOWN_MS : SHOWN_MS,
  );
}

class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, body, extra = {}) {
  const sent = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) },
    options = { ...(body === undefined ? {} : sent), ...extra };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Refused("The server does not respond. Was it stopped? Saved edits are safe.", 0);
  }
  const found = await answer.json().catch(() => ({ error: `The server answered with status ${answer.status}` }));
  if (!answer.ok) throw new Refused(found.error?.message ?? found.error, answer.status);
  return found;
}

// Gives a select its options, unless they are the same: a list that is open must stay open.
export function fill(select, options, chosen = select.value) {
  const wanted = JSON.stringify(options);
  if (select.held === wanted && select.value === chosen) return;
  select.held = wanted;
  select.replaceChildren(...options.map(([value, label]) => make("option", { value, textContent: label })));
  select.value = options.some(([value]) => value === chosen) ? chosen : (options[0]?.[0] ?? "");
}
