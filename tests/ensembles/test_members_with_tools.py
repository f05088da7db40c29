"""Members of an ensemble call the run's tools: the answers enter their completions, and have no gradient."""

from __future__ import annotations

import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.ensembles import Ensemble, Member
from environments.acting import chat_tokenizer, tiny_llama
from environments.tool_runs import CALL, add, bridge, calling, shown

G, K = 2, 2


def logps(model, prompt, ids):
    """[T], log-probabilities of a completion by a plain forward pass."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def written_in(ids, end, header):
    """[T], 0 at tokens from the end of a turn to the header of the model's next."""
    mask, is_answer = torch.ones(len(ids)), False
    for t in range(len(ids)):
        mask[t] = 0.0 if is_answer else 1.0
        is_answer = ids[t] == end or (is_answer and ids[t + 1 - len(header) : t + 1] != header)
    return mask


def test_a_sibling_that_calls_a_tool_joins_with_the_gradient_of_what_it_wrote(tmp_path):
    tokenizer, scored = chat_tokenizer(), []

    def reward(completions, completion_ids, **columns):
        scored.extend(zip(completions, map(list, completion_ids), strict=True))
        return [0.0, 1.0, 1.0, 1.0]

    policy, member = tiny_llama(tokenizer), calling()
    trainer = GRPOTrainer(
        policy,
        reward,
        GRPOConfig(
            str(tmp_path), per_device_train_batch_size=G, num_generations=G, max_steps=1, max_completion_length=180, optim="sgd",
            learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, report_to="none", use_cpu=True, bf16=False,
            gradient_checkpointing=False, disable_tqdm=True,
        ),
        Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}]}]),
        processing_class=tokenizer,
        algorithm=alg.Algorithm(
            advantage=lambda scores: scores.total - 0.5, objective=alg.Clipped(), aggregate=alg.token_mean
        ),
        tools=[add],
        ensemble=Ensemble(
            [Member(member, role="sibling", samples=K, tokenizer=tokenizer, name="peer")],
            weight=alg.MemberWeight(high=1e9, drift=None),
        ),
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    trainer.train()
    found = {name: before[name] - p.detach() for name, p in policy.named_parameters()}

    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt, call, answer = encode(shown("add ")), encode(CALL), encode(bridge("7"))
    assert all([message["role"] for message in messages][:2] == ["assistant", "tool"] for messages, _ in scored[G:])
    assert [ids for _, ids in scored[G:] if ids[: len(call + answer)] == call + answer]
    fresh, loss, written = tiny_llama(tokenizer), torch.zeros(()), 0
    for i, (_, ids) in enumerate(scored):
        mask = written_in(ids, tokenizer.eos_token_id, encode("<|im_start|>assistant\n"))
        mine, advantage = logps(fresh, prompt, ids), (-0.5, 0.5, 0.5, 0.5)[i]
        weight = 1.0 if i < G else (mine - logps(member, prompt, ids)).exp().detach()
        loss, written = loss - (advantage * weight * mask * mine).sum(), written + mask.sum()
    (loss / written).backward()
    for name, parameter in fresh.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, atol=2e-6, rtol=2e-3, msg=lambda said, n=name: f"{n}: {said}"
        )
