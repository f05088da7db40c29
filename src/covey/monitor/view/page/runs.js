// The table of runs: what each is, how far it got, what is chosen for the other pages.

import { fill, h, short, visible, walk } from "./dom.js";
import { noteOf, saveNote } from "./notes.js";
import { age, duration } from "./story.js";
import { choose, chosenRuns, colourOf, link, markOf, shared } from "./state.js";

const MOST = 500; // rows, so that thousands of runs stay quick
const COLUMNS = [
  { name: "state", value: (run) => run.state, cell: (run) => h("span", { class: `state ${run.state}` }, run.state), isShown: true },
  { name: "model", value: (run) => run.model, isShown: true },
  { name: "data", value: (run) => run.data, isShown: true },
  { name: "algorithm", value: (run) => run.algorithm },
  { name: "age", value: (run) => run.created, cell: (run) => age(run.created), title: (run) => run.created, isNumber: true, isShown: true },
  { name: "duration", value: (run) => run.seconds, cell: (run) => duration(run.seconds), isNumber: true, isShown: true },
  { name: "step", value: (run) => run.step, cell: (run) => `${short(run.step)}${run.steps ? ` of ${short(run.steps)}` : ""}`, isNumber: true, isShown: true },
  { name: "best held-out", value: (run) => run.best?.value, title: (run) => run.best && `at step ${run.best.step}`, isNumber: true, isShown: true },
  { name: "held-out reward", value: (run) => run.last.eval_reward, isNumber: true },
  { name: "reward", value: (run) => run.last.reward, isNumber: true, isShown: true },
  { name: "groups without signal", value: (run) => run.last.frac_reward_zero_std, isNumber: true },
  { name: "KL", value: (run) => run.last.kl, isNumber: true },
  { name: "entropy", value: (run) => run.last.entropy, isNumber: true },
  { name: "length", value: (run) => run.last["completions/mean_length"], isNumber: true },
  { name: "alerts", value: (run) => run.alerts, isNumber: true, isShown: true },
  { name: "tags", value: (run) => noteOf(run).tags, cell: (run) => editor(run, "tags"), isShown: true },
  { name: "notes", value: (run) => noteOf(run).notes, cell: (run) => editor(run, "notes"), isShown: true },
];
const NAME = { name: "run", value: (run) => run.name };
const GROUPS = {
  "no groups": null, model: (run) => run.model, data: (run) => run.data, algorithm: (run) => run.algorithm, state: (run) => run.state,
  tags: (run) => noteOf(run).tags, "same but for the seed": (run) => run.family,
};

/** A field of a run's tags or notes, kept in this browser at every letter: a page that is left tells of no change. */
function editor(run, name) {
  const field = h("input", { class: "note", value: noteOf(run)[name] ?? "", placeholder: name === "tags" ? "add" : "add a note", "aria-label": `${name} of ${run.name}`,
    "data-run": `${run.name} ${name}`, oninput: () => saveNote(run, name, field.value), onkeydown: (event) => event.key === "Enter" && field.blur() });
  return field;
}

function shownColumns() {
  const kept = localStorage.getItem("columns");
  const names = kept === null ? null : kept.split("|");
  return COLUMNS.filter((column) => (names ? names.includes(column.name) : column.isShown));
}

/** Fill the page; what comes back keeps it live. */
export function runsPage(main) {
  const kept = { sort: null, descending: true, wanted: "", group: localStorage.getItem("group") ?? "no groups" };
  const body = h("tbody");
  const heads = h("tr");
  const search = h("input", { type: "search", placeholder: "Filter runs", title: "By name, model, data, state or tag", "aria-label": "Filter runs",
    oninput: () => { kept.wanted = search.value.toLowerCase(); draw(); } });
  const groups = h("select", { "aria-label": "Group runs by", onchange: () => { kept.group = groups.value; localStorage.setItem("group", groups.value); draw(); } },
    Object.keys(GROUPS).map((name) => h("option", { value: name, selected: name === kept.group }, name === "no groups" ? name : `by ${name}`)));
  const table = h("table", { class: "runs" }, h("thead", {}, heads), body);
  fill(main, h("h1", {}, "Runs"), h("div", { class: "bar" }, search, groups, chooser(() => draw()), h("a", { class: "button", id: "open" }, "Show curves")),
    h("div", { class: "wide" }, table));

  function draw() {
    const active = document.activeElement;
    if (active?.classList.contains("note") && body.contains(active)) return; // what is being written stays
    const columns = shownColumns();
    const chosen = new Set(chosenRuns());
    const focused = active?.dataset?.run;
    fill(heads, h("th", {}, h("span", { class: "unseen" }, "shown")), [NAME, ...columns].map((column) =>
      h("th", { class: column.isNumber ? "number" : null, "aria-sort": kept.sort === column ? (kept.descending ? "descending" : "ascending") : null },
        h("button", { class: "plain", onclick: () => { kept.descending = kept.sort === column ? !kept.descending : true; kept.sort = column; draw(); } }, column.name))));
    const rows = shared.runs.filter((run) => textOf(run).includes(kept.wanted));
    if (kept.sort) rows.sort((a, b) => compared(kept.sort.value(a), kept.sort.value(b), kept.descending));
    const wide = columns.length + 2;
    const left = rows.length - MOST;
    fill(body, rows.length ? grouped(rows.slice(0, MOST), kept.group).map(([name, members]) => [
      name === null ? null : h("tr", { class: "group" }, h("th", { colspan: wide }, `${visible(name)} (${members.length})`)),
      members.map((run) => row(run, chosen, columns)),
    ]) : h("tr", {}, h("td", { colspan: wide }, "No run here yet.")), left > 0 ? h("tr", {}, h("td", { colspan: wide }, `${left} more; filter to see them.`)) : null);
    document.getElementById("open").href = link("curves", { run: [...chosen] });
    if (focused) body.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
  }

  function row(run, chosen, columns) {
    const box = h("input", { type: "checkbox", checked: chosen.has(run.name), "data-run": run.name, "aria-label": `show ${run.name}`,
      onchange: () => {
        box.checked ? chosen.add(run.name) : chosen.delete(run.name);
        choose([...chosen]);
        draw();
      } });
    const dot = h("span", { class: "mark" }, markOf(run.name));
    dot.style.color = colourOf(run.name);
    return h("tr", {}, h("td", {}, box), h("td", {}, dot, h("a", { href: link("curves", { run: run.name }), "data-run": `${run.name} link` }, run.name),
      run.parent ? h("small", {}, ` from ${run.parent}`) : null,
      run.troubles.map((said) => h("small", { class: "bad trouble" }, said))),
    columns.map((column) => h("td", { class: column.isNumber ? "number" : null, "data-label": column.name, title: column.title?.(run) || null },
      column.cell ? column.cell(run) : visible(short(column.value(run) ?? null)))));
  }

  draw();
  return {
    live: draw,
    key: (pressed) => walk(pressed, [...body.querySelectorAll("a")]),
  };
}

const textOf = (run) => [run.name, run.state, run.algorithm, run.model, run.data, noteOf(run).tags, noteOf(run).notes].join(" ").toLowerCase();

/** Order of two values: numbers by size, texts by letters, none last of all. */
function compared(a, b, descending) {
  const [noA, noB] = [a === null || a === undefined || a === "", b === null || b === undefined || b === ""];
  if (noA || noB) return noA - noB;
  return (descending ? -1 : 1) * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
}

/** `[heading, runs]` by the chosen group, in the order of the rows. */
function grouped(rows, name) {
  const key = GROUPS[name];
  if (!key) return [[null, rows]];
  const found = new Map();
  for (const run of rows) {
    const heading = key(run) || "none";
    found.set(heading, [...(found.get(heading) ?? []), run]);
  }
  return [...found].map(([heading, runs]) => [name.startsWith("same") ? (heading === "none" ? "alone" : runs[0].name) : heading, runs]);
}

/** Which columns are shown. */
function chooser(changed) {
  const shown = new Set(shownColumns().map((column) => column.name));
  return h("details", { class: "columns" }, h("summary", { class: "button" }, "Columns"), h("div", { class: "choices" }, COLUMNS.map(({ name }) => {
    const box = h("input", { type: "checkbox", checked: shown.has(name), onchange: () => {
      box.checked ? shown.add(name) : shown.delete(name);
      localStorage.setItem("columns", [...shown].join("|"));
      changed();
    } });
    return h("label", {}, box, name);
  })));
}
