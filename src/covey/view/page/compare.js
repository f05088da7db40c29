// What differs between the chosen runs: options, the algorithm and its source, versions, data.

import { ask } from "./api.js";
import { fill, h, visible } from "./dom.js";
import { chosenRuns, shared } from "./state.js";

const LONG = 120;
const MOST_LINES = 3000;

/** Fill the page. */
export async function comparePage(main) {
  const names = chosenRuns();
  if (names.length < 2) {
    const more = shared.runs.length > 1 ? "Choose two or more on the page of runs (key 1)." : "There is only one run here.";
    fill(main, h("h1", {}, "Differences"), h("p", {}, more));
    return {};
  }
  const { rows } = await ask("diff", { run: names });
  const told = rows.map(({ name, values }) => ({ name, texts: values.map((value) => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value))) }));
  const brief = told.filter(({ texts }) => texts.every((text) => text.length <= LONG && !text.includes("\n")));
  const long = told.filter((row) => !brief.includes(row));
  fill(main, h("h1", {}, "Differences"),
    h("p", {}, rows.length ? `${rows.length} entries differ.` : "Nothing that decides the numbers differs."),
    h("div", { class: "wide" }, h("table", { class: "diff" },
      h("thead", {}, h("tr", {}, h("th", {}, ""), names.map((name) => h("th", {}, name)))),
      h("tbody", {}, brief.map(({ name, texts }) => h("tr", {}, h("th", {}, name), texts.map((text) => h("td", {}, h("code", {}, visible(text))))))))),
    long.map(({ name, texts }) => h("details", { open: long.length < 4 }, h("summary", {}, name),
      texts.slice(1).map((text, at) => [h("p", {}, `${names[0]} → ${names[at + 1]}`), h("pre", { class: "lines" }, lines(texts[0], text))]))));
  return {};
}

function lines(old, now) {
  return diffOf(visible(old).split("\n"), visible(now).split("\n")).map(([mark, line]) =>
    h("span", { class: { "+": "added", "-": "removed" }[mark] ?? null }, `${mark} ${line}\n`));
}

/** `[mark, line]` with marks "+", "-" and " ": the longest common lines stay. */
function diffOf(old, now) {
  if (old.length * now.length > MOST_LINES ** 2) return [...old.map((line) => ["-", line]), ...now.map((line) => ["+", line])];
  const width = now.length + 1;
  const best = new Uint16Array((old.length + 1) * width);
  for (let i = old.length - 1; i >= 0; i -= 1) {
    for (let j = now.length - 1; j >= 0; j -= 1) {
      best[i * width + j] = old[i] === now[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  const out = [];
  let [i, j] = [0, 0];
  while (i < old.length || j < now.length) {
    if (i < old.length && j < now.length && old[i] === now[j]) out.push([" ", old[i++], j++]);
    else if (j >= now.length || (i < old.length && best[(i + 1) * width + j] >= best[i * width + j + 1])) out.push(["-", old[i++]]);
    else out.push(["+", now[j++]]);
  }
  return out;
}
