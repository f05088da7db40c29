"""Videos in prompts, as lists of frames: places, placeholders, log-probabilities and greedy completions of Qwen2.5-VL.

Its video processor needs torchvision. Where that is not installed, the image processor takes its place, whose patches of two equal
frames are put together to the same patches of two frames; a test compares the two where torchvision is there.
"""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from media_prompts import GREEDY, by_the_model, generated, rows_for
from models import picture, tiny_processor, tiny_vlm
from PIL import Image

from covey.data.prompts import to_prompt
from covey.errors import DataError
from covey.learner import Policy
from covey.rollout import choose_sampler
from covey.rollout.hf import TransformersSampler
from covey.runs import previews, rollouts
from covey.types import Completion, Group

PLACE = "<|vision_start|><|video_pad|><|vision_end|>"


class FramesAsPatches:
    """Videos by the image processor: two frames are one step of the grid."""

    temporal_patch_size, merge_size = 2, 2

    def __init__(self, images):
        self.images = images

    def __call__(self, videos, *, do_sample_frames, **options):
        assert not do_sample_frames
        patches, grids = [], []
        for frames in videos:
            frames = [*frames, *frames[-1:] * (len(frames) % 2)]
            made = [self.images(images=[frame], return_tensors="pt") for frame in frames]
            for first, second in zip(made[::2], made[1::2], strict=True):
                half = lambda made: made["pixel_values"].unflatten(1, (3, 2, -1))[
                    :, :, :1
                ]  # each image is two equal frames
                patches.append(torch.cat([half(first), half(second)], dim=2).flatten(1))
            grids.append([len(frames) // 2, *made[0]["image_grid_thw"][0, 1:].tolist()])
        return {
            "pixel_values_videos": torch.cat(patches),
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": [SimpleNamespace(sampled_fps=24) for _ in videos],
        }


def processor_with(part):
    processor = tiny_processor("qwen2_5_vl")
    template = processor.chat_template.replace(
        "{% else %}{{ part", "{% elif part['type'] == 'video' %}" + PLACE + "{% else %}{{ part"
    )
    processor.chat_template = processor.tokenizer.chat_template = template
    processor.video_processor = part(processor.image_processor)
    return processor


@pytest.fixture(scope="module")
def processor():
    return processor_with(FramesAsPatches)


def ask(content):
    return [{"role": "user", "content": content}]


def rows():
    return [
        {"prompt": ask("What moves?"), "video": [picture(i + 1, (32, 24)) for i in range(4)]},
        {"prompt": ask("Both?"), "videos": [[picture(1, (32, 24))] * 2, [picture(i, (24, 24)) for i in range(5)]], "image": picture(2)},
        {"prompt": ask("What is 2 + 3?")},
    ]  # fmt: skip


def prompts(processor):
    return [to_prompt(row, f"0:{i}", f"row {i}", processor.tokenizer, {}, processor) for i, row in enumerate(rows())]


def prompt_of(row, processor):
    return to_prompt(row, "0:0", "row 0", processor.tokenizer, {}, processor)


def test_placeholders_are_as_many_as_the_steps_of_the_grid(processor):
    first, second, text = prompts(processor)
    place = processor.video_token_id
    assert first.token_ids.count(place) == 2 * (8 * 6) // 4
    assert second.token_ids.count(place) == (8 * 6) // 4 + 3 * (6 * 6) // 4
    assert second.media.count == 3
    assert text.media is None
    inside = [{"type": "video", "video": np.stack([np.asarray(frame) for frame in rows()[0]["video"]])}]
    same = prompt_of({"prompt": ask([*inside, {"type": "text", "text": "What moves?"}])}, processor)
    assert same.token_ids == first.token_ids
    assert torch.equal(same.media.tensors["pixel_values_videos"], first.media.tensors["pixel_values_videos"])


def test_the_samplers_write_greedily_what_generate_writes_and_the_learner_measures_it(processor):
    model, _ = tiny_vlm("qwen2_5_vl")
    made = prompts(processor)
    native = choose_sampler(model, processor.tokenizer, backend="native", dtype="float32")
    for sampler in (TransformersSampler(model, processor.tokenizer), native):
        groups = {group.prompt.uid: group for group in sampler.sample(made, 2, GREEDY)}
        for prompt in made:
            expected = generated(model, processor, prompt)
            assert [done.token_ids.tolist() for done in groups[prompt.uid].completions] == [expected, expected]
    with torch.no_grad():
        measured = Policy(model, pad_id=processor.tokenizer.pad_token_id).measure(rows_for(made))
        for i, row in enumerate(rows_for(made)):
            expected = by_the_model(model, processor, row)
            torch.testing.assert_close(measured.logp[i, : len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_torchvision_makes_the_same_of_them(processor):
    pytest.importorskip("torchvision", reason="the video processor of transformers needs torchvision")
    size = {"shortest_edge": 64, "longest_edge": 4096}
    make = lambda images: transformers.Qwen2VLVideoProcessor(
        patch_size=4, merge_size=2, temporal_patch_size=2, size=size
    )
    for mine, theirs in zip(prompts(processor), prompts(processor_with(make)), strict=True):
        assert mine.token_ids == theirs.token_ids
        for name in mine.media.tensors if mine.media else ():
            torch.testing.assert_close(mine.media.tensors[name], theirs.media.tensors[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("film.mp4", "video 0 is a str; give its frames, a list of images"),
        ([[]], "video 0 has 0 frames; give 1 to 768"),
        ([[picture(1), picture(1, (16, 16))]], "video 0 has frames of 2 sizes"),
        ([[picture(1), "nowhere.png"]], "video 0, frame 1: nowhere.png cannot be read"),
    ],
)
def test_bad_videos_are_refused_with_their_row(value, sentence, processor):
    row = {"video": value} if isinstance(value, str) else {"videos": value}
    with pytest.raises(DataError, match="^row 0") as error:
        prompt_of({"prompt": ask("a"), **row}, processor)
    assert sentence in str(error.value)


def test_a_processor_without_the_part_for_videos_is_named():
    bare = tiny_processor("qwen2_5_vl")
    with pytest.raises(DataError, match="has videos, but Qwen2_5_VLProcessor reads text and images alone"):
        prompt_of({"prompt": ask("a"), "video": [picture(1)]}, bare)


def test_a_run_folder_keeps_a_moving_copy(tmp_path, processor):
    prompt = prompts(processor)[0]
    done = Completion(token_ids=torch.tensor([5, 2]), text="3", finish="stop")
    group = Group(prompt=prompt, completions=(done,), rewards=torch.ones(1, 1))
    rollouts.write(tmp_path / "rollouts", 1, [group], ["r"])
    previews.write(tmp_path / "rollouts", [group])
    (row,) = rollouts.read(tmp_path / "rollouts" / "step-000001.parquet")
    (name,) = json.loads(row["videos"])
    content, kind = previews.read(tmp_path / "rollouts", name)
    assert kind == "image/gif"
    assert Image.open(io.BytesIO(content)).n_frames == 4
