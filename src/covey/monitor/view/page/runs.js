// The table of runs: what each is, how far it got, what is chosen for the other pages.

import { fill, h, short } from "./dom.js";
import { choose, chosenRuns, colourOf, link, markOf, shared } from "./state.js";

const MOST = 500; // rows, so that thousands of runs stay quick
const NUMBERS = [
  ["step", (run) => run.step],
  ["held-out reward", (run) => run.last.eval_reward],
  ["reward", (run) => run.last.reward],
  ["groups without signal", (run) => run.last.frac_reward_zero_std],
  ["KL", (run) => run.last.kl],
  ["entropy", (run) => run.last.entropy],
  ["length", (run) => run.last["completions/mean_length"]],
  ["alerts", (run) => run.alerts],
];

/** Fill the page; what comes back keeps it live. */
export function runsPage(main) {
  const kept = { sort: null, descending: true, wanted: "" };
  const body = h("tbody");
  const heads = h("tr");
  const search = h("input", { type: "search", placeholder: "Filter by name, state or algorithm", "aria-label": "Filter runs",
    oninput: () => { kept.wanted = search.value.toLowerCase(); draw(); } });
  const table = h("table", { class: "runs" }, h("thead", {}, heads), body);
  fill(main, h("h1", {}, "Runs"), h("div", { class: "bar" }, search, h("a", { class: "button", id: "open" }, "Show curves")),
    h("div", { class: "wide" }, table));

  function draw() {
    const chosen = new Set(chosenRuns());
    const focused = document.activeElement?.dataset?.run;
    fill(heads, h("th", {}, h("span", { class: "unseen" }, "shown")), h("th", {}, "run"), h("th", {}, "state"),
      NUMBERS.map(([name, value]) => h("th", { class: "number", "aria-sort": kept.sort === value ? (kept.descending ? "descending" : "ascending") : null },
        h("button", { class: "plain", onclick: () => { kept.descending = kept.sort === value ? !kept.descending : true; kept.sort = value; draw(); } }, name))));
    const rows = shared.runs.filter((run) => `${run.name} ${run.state} ${run.algorithm ?? ""}`.toLowerCase().includes(kept.wanted));
    if (kept.sort) {
      const value = (run) => kept.sort(run) ?? -Infinity;
      rows.sort((a, b) => (kept.descending ? -1 : 1) * (value(a) - value(b)));
    }
    fill(body, rows.length ? [rows.slice(0, MOST).map((run) => row(run, chosen)), rows.length > MOST ? h("tr", {}, h("td", { colspan: 11 }, `${rows.length - MOST} more; filter to see them.`)) : null] : h("tr", {}, h("td", { colspan: 11 }, "No run here yet.")));
    document.getElementById("open").href = link("curves", { run: [...chosen] });
    if (focused) body.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
  }

  function row(run, chosen) {
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
    h("td", { "data-label": "state" }, h("span", { class: `state ${run.state}` }, run.state)),
    NUMBERS.map(([name, value]) => h("td", { class: "number", "data-label": name }, short(value(run)))));
  }

  draw();
  return {
    live: draw,
    key(key) {
      const links = [...body.querySelectorAll("a")];
      const at = links.indexOf(document.activeElement);
      if (key === "j") links[Math.min(at + 1, links.length - 1)]?.focus();
      else if (key === "k") links[Math.max(at - 1, 0)]?.focus();
      else return false;
      return true;
    },
  };
}
