// What differs between the chosen runs: options, the algorithm and its source, versions, data.

import { ask } from "./api.js";
import { diffOf } from "./diff.js";
import { fill, h, visible } from "./dom.js";
import { chosenRuns, shared } from "./state.js";

const LONG = 120;

/** Fill the page; what comes back keeps it live. */
export async function comparePage(main) {
  const place = h("div");
  let shown = null;
  fill(main, h("h1", {}, "Differences"), place);

  async function live() {
    const names = chosenRuns();
    const rows = names.length < 2 ? [] : (await ask("diff", { run: names })).rows;
    const now = JSON.stringify([names, rows, Math.min(2, shared.runs.length)]);
    if (now !== shown) draw(place, names, rows);
    shown = now;
  }

  const told = (error) => {
    shown = null;
    fill(place, h("p", { class: "bad" }, error.message));
  };
  await live();
  return { live: () => live().catch(told), moved: () => live().catch(told) };
}

function draw(place, names, rows) {
  if (names.length < 2) {
    const more = ["No run here yet.", "There is only one run here."][shared.runs.length] ?? "Choose two or more on the page of runs (key 1).";
    fill(place, h("p", {}, more));
    return;
  }
  const told = rows.map(({ name, values }) => ({ name, texts: values.map((value) => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value))) }));
  const brief = told.filter(({ texts }) => texts.every((text) => text.length <= LONG && !text.includes("\n")));
  const long = told.filter((row) => !brief.includes(row));
  fill(place,
    h("p", {}, rows.length ? `${rows.length} entries differ.` : "Nothing that decides the numbers differs."),
    h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table of differences" }, h("table", { class: "diff" },
      h("thead", {}, h("tr", {}, h("th", {}, ""), names.map((name) => h("th", {}, name)))),
      h("tbody", {}, brief.map(({ name, texts }) => h("tr", {}, h("th", {}, name), texts.map((text, at) => h("td", {}, h("small", { class: "whose" }, `${names[at]}: `), h("code", {}, visible(text))))))))),
    long.map(({ name, texts }) => h("details", { open: long.length < 4 }, h("summary", {}, name),
      texts.slice(1).map((text, at) => [h("p", {}, `${names[0]} → ${names[at + 1]}`), h("pre", { class: "lines" }, lines(texts[0], text))]))));
}

function lines(old, now) {
  return diffOf(visible(old).split("\n"), visible(now).split("\n")).map(([mark, line]) =>
    h("span", { class: { "+": "added", "-": "removed" }[mark] ?? null }, `${mark} ${line}\n`));
}
