// One group: the prompt, its completions side by side, rewards by function, advantages, and tokens in colour.

import { ask, isStale } from "./api.js";
import { conversation } from "./conversation.js";
import { diffOf } from "./diff.js";
import { fill, h, short, visible } from "./dom.js";
import { link } from "./state.js";
import { quantitiesOf, scaleOf, tokens } from "./tokens.js";

/** A view that shows groups in `place`. `step(by)` moves in the list, `close()` leaves. */
export function groupView(place, { step, close }) {
  const kept = { run: null, group: null, quantity: "advantage", isFolded: true, pair: [] };

  async function show(run, at, group) {
    try {
      kept.group = await ask("rollout", { run, step: at, group }, "rollout");
      Object.assign(kept, { run, pair: [] });
      draw();
      place.scrollTop = 0;
    } catch (error) {
      if (!isStale(error)) fill(place, h("p", { class: "bad" }, error.message));
    }
  }

  function draw() {
    const group = kept.group;
    const there = quantitiesOf(group);
    if (!there.includes(kept.quantity)) kept.quantity = there[0] ?? "none";
    const scale = scaleOf(group, kept.quantity);
    const rewards = group.completions.map((one) => one.reward).filter((value) => value !== null);
    const [best, worst] = [Math.max(...rewards), Math.min(...rewards)];
    const folded = kept.isFolded ? alike(group.completions) : group.completions.map((one) => [one]);
    const hasAlike = folded.length < group.completions.length || !kept.isFolded;
    const compared = h("section", { class: "compared", "aria-live": "polite" });
    fill(place,
      h("div", { class: "bar" }, h("button", { onclick: close, class: "back" }, "← list"), h("button", { onclick: () => step(-1) }, "previous (p)"),
        h("button", { onclick: () => step(1) }, "next (n)"), colours(there), h("button", { onclick: copy }, "copy as JSON"),
        hasAlike ? h("button", { "aria-pressed": String(kept.isFolded), onclick: () => { kept.isFolded = !kept.isFolded; draw(); } }, "identical ones folded") : null),
      h("h2", {}, `Step ${group.step}, group ${group.group}`),
      elsewhere(group),
      h("div", { class: "prompt" }, h("pre", { dir: "auto" }, visible(group.prompt)),
        (group.media ?? []).map((name, i) => medium(name, `${i + 1} of the prompt`)),
        Object.entries(group.columns ?? {}).map(([name, value]) => h("p", {}, h("b", {}, `${name} `), h("code", {}, visible(typeof value === "string" ? value : JSON.stringify(value)))))),
      scale ? legend(scale) : null,
      group.has_tokenizer ? null : h("p", { class: "soft" }, "No tokenizer.json lies beside the run, so tokens cannot be told apart in the text."),
      compared,
      group.left_out ? h("p", { class: "bad" }, `${short(group.left_out)} more completions are not shown.`) : null,
      h("div", { class: "completions" }, folded.map((ones) => card(ones, scale, medium, best > worst && ones[0].reward === best ? "best" : best > worst && ones[0].reward === worst ? "worst" : "", choice(ones[0], compared)))));
    compare(compared);
  }

  /** An image or a video, or a player of a sound; `which` says whose. */
  function medium(name, which) {
    const src = `api/media?${new URLSearchParams({ run: kept.run, name })}`;
    if (name.endsWith(".wav")) return h("audio", { src, controls: true, preload: "none", "aria-label": `sound ${which}` });
    return h("img", { src, alt: `${name.endsWith(".gif") ? "video" : "image"} ${which}`, loading: "lazy" });
  }

  /** A box that chooses a completion for the comparison; a third one takes the place of the first. */
  function choice(one, compared) {
    const box = h("input", { type: "checkbox", checked: kept.pair.includes(one.completion_index), "data-compare": one.completion_index, onchange: () => {
      kept.pair = kept.pair.filter((at) => at !== one.completion_index);
      if (box.checked) kept.pair = [...kept.pair, one.completion_index].slice(-2);
      for (const other of place.querySelectorAll("[data-compare]")) other.checked = kept.pair.includes(Number(other.dataset.compare));
      compare(compared);
    } });
    return h("label", { class: "soft" }, box, "compare");
  }

  function compare(compared) {
    const [first, second] = kept.pair.map((at) => kept.group.completions.find((one) => one.completion_index === at));
    if (!first || !second) return fill(compared, first ? h("p", { class: "soft" }, `#${first.completion_index} is chosen; choose another to compare it with.`) : null);
    const words = diffOf(wordsOf(first), wordsOf(second));
    const side = (one, mark) => h("article", { class: "completion" }, h("header", {}, h("b", {}, `#${one.completion_index}`), h("span", {}, `reward ${short(one.reward)}`)),
      h("pre", { class: "text", dir: "auto" }, words.filter(([which]) => which === " " || which === mark).map(([which, word]) =>
        (which === " " ? word : h(mark === "-" ? "del" : "ins", {}, word)))));
    return fill(compared, h("h3", {}, `#${first.completion_index} and #${second.completion_index}, what differs marked`),
      h("div", { class: "completions" }, side(first, "-"), side(second, "+")));
  }

  function colours(there) {
    return h("select", { "aria-label": "Colour tokens by", onchange: (event) => { kept.quantity = event.target.value; draw(); } },
      ["none", ...there].map((name) => h("option", { value: name, selected: name === kept.quantity }, name === "none" ? "no colours" : `colour: ${name}`)));
  }

  function elsewhere(group) {
    const others = group.elsewhere.filter((one) => one.step !== group.step || one.group !== group.group);
    if (!others.length) return null;
    return h("p", { class: "elsewhere" }, "The same prompt: ", others.slice(-12).map((one) =>
      [h("a", { href: link("rollouts", { run: kept.run, step: one.step, group: one.group }) }, `step ${one.step} (${short(one.reward)})`), " "]),
    group.visits > 13 ? `and ${short(group.visits - 13)} more` : null);
  }

  async function copy(event) {
    await navigator.clipboard.writeText(JSON.stringify(kept.group, null, 1));
    event.target.textContent = "copied";
  }

  return {
    show,
    recolour: () => kept.group && draw(),
    key(key) {
      if (key !== "c" || !kept.group) return false;
      const names = [...quantitiesOf(kept.group), "none"];
      kept.quantity = names[(names.indexOf(kept.quantity) + 1) % names.length];
      draw();
      return true;
    },
  };
}

const wordsOf = (one) => visible(one.completion).split(/(\s+)/).filter((word) => word !== "");

/** Completions in lists of those with the same text, end and rewards. */
function alike(completions) {
  const found = new Map();
  for (const one of completions) {
    const key = JSON.stringify([one.completion, one.finish, one.reward, one.rewards, one.advantage, one.media, one.conversation]);
    found.set(key, [...(found.get(key) ?? []), one]);
  }
  return [...found.values()];
}

function card(ones, scale, medium, mark, choice) {
  const [one] = ones;
  const under = h("p", { class: "token-facts", "aria-live": "polite" }, "Point at a token, or tap it, for its numbers, or move with ← and → in the text.");
  const advantage = one.advantage;
  return h("article", { class: `completion ${mark}` },
    h("header", {}, h("b", {}, `#${one.completion_index ?? "?"}`),
      ones.length > 1 ? h("span", { class: "tag", title: ones.map((same) => `#${same.completion_index}`).join(", ") }, `× ${ones.length} identical`) : null, h("span", {}, `reward ${short(one.reward)}`),
      h("span", { class: advantage > 0 ? "better" : advantage < 0 ? "worse" : "" }, `advantage ${advantage > 0 ? "+" : ""}${short(advantage)}`),
      h("span", { class: one.finish === "length" ? "tag" : "soft" }, one.finish === "length" ? "cut off" : one.finish ?? "end unknown"), h("span", { class: "soft" }, `${short(one.num_tokens)} tokens`), choice),
    h("dl", { class: "rewards" }, pairs(one.rewards, "not scored"), pairs(one.extras, "–")), // a reward and what it logs may have one name
    (one.media ?? []).map((name, i) => medium(name, `${i + 1} of the tools' answers to #${one.completion_index}`)), conversation(one), tokens(one, scale, under), one.pieces ? under : null);
}

const pairs = (values, none) => Object.entries(values).map(([name, value]) =>
  h("div", {}, h("dt", {}, visible(name)), h("dd", {}, value === null ? none : typeof value === "number" ? short(value) : visible(value))));

function legend(scale) {
  const steps = scale.isSigned ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  return h("p", { class: "scale" }, `${scale.name}: `, steps.map((at) => {
    const box = h("span", {}, short(at * scale.size + (scale.isSigned ? 0 : (1 - at) * scale.low), 2));
    box.style.backgroundColor = scale.colour(scale.isSigned ? at * scale.size : scale.low + at * (scale.size - scale.low));
    return box;
  }));
}
