"""What transformers' own processors and a plain forward say of a sampler's completions."""

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kit import tiny_model


def transformers_scores(logits, params, context):
    """What transformers' own processors leave of `logits`, in the order in which `generate` applies them."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(context, logits)


TEXTS = ("2 + 2 =", "Tom has 3 apples and buys 4 more. How many?", "a", "What is 12 + 30?")


def collect(sampler, prompts, n, params):
    """Groups in the order of the prompts, whatever the order they came in."""
    groups = list(sampler.sample(prompts, n, params))
    return sorted(groups, key=lambda group: int(group.prompt.uid.split(":")[-1]))


def ids_of(groups):
    return [[completion.token_ids.tolist() for completion in group.completions] for group in groups]


def plain_logprobs(model, group, params):
    """[T_i] of each completion by one forward without cache, through transformers' own processors."""
    out = []
    for completion in group.completions:
        ids = torch.tensor([*group.prompt.token_ids, *completion.token_ids.tolist()])[None].to(model.device)
        start = len(group.prompt.token_ids)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].float()
        rows = [
            transformers_scores(logits[start + t - 1][None], params, ids[:, : start + t]).log_softmax(-1)[0]
            for t in range(completion.num_tokens)
        ]
        out.append(torch.stack([row[token] for row, token in zip(rows, completion.token_ids, strict=True)]))
    return out


def favour(model, ids, bias=40.0):
    """Make a model write these tokens nearly always, by its head's bias."""
    head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    head.bias.data[list(ids)] = bias
    model.lm_head = head
    return model


def talkative(seed=0):
    """A model that ends a turn after a few tokens."""
    model = favour(tiny_model(layers=2, seed=seed), range(320), bias=0.0)
    model.lm_head.bias.data[2] = 4.5
    return model
