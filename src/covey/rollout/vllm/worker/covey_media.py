"""Images, sounds and videos with token ids for vLLM: its engine gets the tensors that the trainer's processor made.

In a server of `covey serve-vllm` an ASGI middleware (`--middleware covey_media.Media`): tensors are uploaded once and named by their
SHA-256, and completions by the fields of `/v1/completions` refer to them. In the process of a run `engine_input` alone. Imports vLLM,
because it runs in the server's environment.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

TENSORS, COMPLETIONS = "/covey/media", "/covey/completions"
"""Paths: an upload of tensors, a safetensors file; and completions of a prompt with such tensors."""
KEY, OPEN = "VLLM_API_KEY", ("/health", "/ping", "/metrics")
"""Environment variable of the server's API key, and the paths that need none."""
_MOST_BYTES = 4 * 2**30
"""Size of the uploads that a server keeps, those used last."""


def engine_input(
    processor: Any, token_ids: Sequence[int], tensors: Mapping[str, torch.Tensor], count: int, name: str
) -> Any:
    """A prompt of expanded ids with `count` items, whose `tensors` a processor of transformers made, for vLLM's engine.

    `processor`: vLLM's, which names the fields of its model. `name`: stands for tensors and weights, so that nothing computed from others
    is used again. Raises ValueError where the ids and the tensors are not `count` items of this model.
    """
    from transformers import BatchFeature
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    model, kind = processor.info.ctx.model_config, type(processor).__name__
    cast = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in tensors.items()}
    if all(
        value.shape[:2] == (1, count) for value in cast.values()
    ):  # a batch of one around the items, as of Idefics 3
        cast = {key: value[0] for key, value in cast.items()}
    if "num_patches" not in cast and all(len(value) == count for value in cast.values()):
        cast["num_patches"] = torch.ones(count, dtype=torch.long)  # vLLM counts the crops of an image: none but itself
    made = BatchFeature(cast)
    try:
        items = MultiModalKwargsItems.from_hf_inputs(made, processor._get_mm_fields_config(made, {}))
    except (KeyError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(f"vLLM's {kind} takes other inputs than {', '.join(tensors)}") from error
    counts = {modality: len(entries) for modality, entries in items.items() if len(entries)}
    if sum(counts.values()) != count:
        raise ValueError(f"vLLM's {kind} does not take {', '.join(tensors)} as {count} items")
    places = {modality: _places(token_ids, model.hf_config, modality, n) for modality, n in counts.items()}
    return mm_input(
        prompt_token_ids=list(token_ids),
        mm_kwargs=items,
        mm_hashes={modality: [f"{name}-{modality}-{i}" for i in range(n)] for modality, n in counts.items()},
        mm_placeholders=places,
    )


def name_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the tensors' names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for key, value in sorted(tensors.items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _places(token_ids: Sequence[int], config: Any, modality: str, count: int) -> list[Any]:
    """vLLM's ranges of the tokens of `count` items: a run of their token each, or for a single item all of them."""
    from vllm.multimodal.inputs import PlaceholderRange

    names = (f"{modality}_token_id", f"{modality}_token_index")
    token = next((value for value in (getattr(config, name, None) for name in names) if value is not None), None)
    if token is None:
        raise ValueError(f"the configuration of {type(config).__name__} names no token of a {modality}")
    is_place = torch.tensor([i == token for i in token_ids])
    runs = runs_of(is_place.nonzero()[:, 0].tolist())
    if count == 1 and len(runs) > 1:
        first, end = runs[0][0], runs[-1][1]
        return [PlaceholderRange(offset=first, length=end - first, is_embed=is_place[first:end])]
    if len(runs) != count:
        raise ValueError(f"its tokens of {modality}s stand in {len(runs)} places, and its {modality}s are {count}")
    return [PlaceholderRange(offset=begin, length=end - begin) for begin, end in runs]


def runs_of(places: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


class Media:
    """ASGI middleware that answers `TENSORS` and `COMPLETIONS`, and hands everything else on.

    With `KEY` in the environment every path but `OPEN` needs it: vLLM itself guards those of completions alone, not those that replace weights.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.key = app, os.environ.get(KEY)
        self.uploads: OrderedDict[str, bytes] = OrderedDict()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import JSONResponse

        if (
            self.key
            and scope["type"] in ("http", "websocket")
            and scope["path"] not in OPEN
            and not self._is_keyed(scope)
        ):
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
            return
        if scope["type"] != "http" or scope["path"] not in (TENSORS, COMPLETIONS):
            await self.app(scope, receive, send)
            return
        from starlette.requests import Request

        request = Request(scope, receive)
        if scope["method"] != "POST":
            response = JSONResponse({"media": True})
        elif scope["path"] == TENSORS:
            response = JSONResponse({"name": self.keep(await request.body())})
        else:
            response = await self._answered(await request.json(), request)
        if response is not None:  # None: the client has gone
            await response(scope, receive, send)

    def _is_keyed(self, scope: Any) -> bool:
        sent = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(sent, f"Bearer {self.key}".encode())

    def keep(self, content: bytes) -> str:
        """Keep an upload. Returns its name."""
        name = hashlib.sha256(content).hexdigest()
        self.uploads[name] = content
        self.uploads.move_to_end(name)
        while len(self.uploads) > 1 and sum(map(len, self.uploads.values())) > _MOST_BYTES:
            self.uploads.popitem(last=False)
        return name

    async def _answered(self, body: dict[str, Any], request: Any) -> Any:
        """The answer of `/v1/completions` to a body whose prompt has media: `media` names an upload, `media_count` counts its items."""
        from safetensors.torch import load
        from starlette.responses import JSONResponse
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.serve.utils.api_utils import with_cancellation

        refused = lambda message, code: JSONResponse({"error": {"message": message}}, status_code=code)
        name, count, weights = body.pop("media"), body.pop("media_count"), body.pop("media_weights")
        if name not in self.uploads:
            return refused(f"there is no upload {name}", 410)
        self.uploads.move_to_end(name)
        handler = copy.copy(request.app.state.openai_serving_completion)
        try:
            processor = handler.renderer.mm_processor
            prompt = engine_input(processor, body["prompt"], load(self.uploads[name]), count, f"{weights}-{name}")
        except ValueError as error:
            return refused(str(error), 400)

        async def rendered(_: Any) -> list[Any]:
            return [prompt]

        async def create(completion: Any, raw_request: Any) -> Any:
            return await handler.create_completion(completion, raw_request)

        handler.render_completion_request = rendered
        try:
            answer = await with_cancellation(create)(CompletionRequest(**body), request)
        except ValueError as error:  # no exception handler of the server's own is above a middleware
            return refused(str(error), 400)
        if answer is None:
            return None
        failed = getattr(answer, "error", None)
        return JSONResponse(answer.model_dump(), status_code=200 if failed is None else failed.code)
