// An episode as a conversation: the model's turns, its calls of tools, and what they answered, folded.

import { h, short, visible } from "./dom.js";

/** The messages of an episode, and its tokens by who wrote them; null for a completion of one turn. */
export function conversation(one) {
  if (!one.conversation?.length) return null;
  const own = one.conversation.filter((message) => message.role === "assistant").length;
  const calls = one.conversation.reduce((sum, message) => sum + message.calls.length, 0);
  return h("section", { class: "conversation" },
    h("p", { class: "soft" }, [`${short(own)} turns, ${short(calls)} calls`, provenance(one.per_token.mask), one.branch_of === null || one.branch_of === undefined ? null : `another path of #${one.branch_of}, with its advantage`].filter(Boolean).join(" · ")),
    h("ol", {}, one.conversation.map(message)));
}

function provenance(mask) {
  if (!mask) return null;
  const model = mask.filter(Boolean).length;
  return `tokens: model ${short(model)}, tools and prompts ${short(mask.length - model)}`;
}

function message(said) {
  const who = h("b", {}, said.role === "tool" ? `tool ${visible(said.name)}`.trim() : visible(said.role));
  const text = said.content ? h("pre", { dir: "auto" }, visible(said.content)) : null;
  const calls = said.calls.map((call) => h("p", { class: "call" }, "calls ", h("code", {}, `${visible(call.name)}(${visible(call.arguments)})`)));
  if (said.role !== "tool") return h("li", { class: said.role === "assistant" ? "model" : "" }, who, text, calls);
  const first = visible(said.content).split("\n")[0];
  return h("li", {}, h("details", { class: isError(said.content) ? "failed" : "" }, h("summary", {}, who, " ", h("span", { class: "soft" }, first.length > 80 ? `${first.slice(0, 80)}…` : first)), text));
}

function isError(text) {
  try {
    return Boolean(JSON.parse(text)?.error);
  } catch {
    return false;
  }
}
