"""Videos in prompts, as lists of frames: places, placeholders, log-probabilities and greedy completions of Qwen2.5-VL.

Its video processor needs torchvision. Where that is not installed, the image processor takes its place, whose patches of two equal
frames are put together to the same patches of two frames; a test compares the two where torchvision is there.
"""

import importlib.util
import io
import json
import subprocess
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from media_prompts import GREEDY, by_the_model, generated, rows_for
from models import picture, tiny_processor, tiny_vlm
from PIL import Image

from covey.data.checks import check_dataset
from covey.data.media import open_video
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
        ("film.mp4", "video 0: film.mp4 cannot be read: No such file"),
        ("https://a.org/film.mp4", "videos are not downloaded, give a file's path"),
        (5, "video 0 is a int; give its frames, a list of images, or a file's path"),
        ([[]], "video 0 has 0 frames; give 1 to 768"),
        ([[picture(1), picture(1, (16, 16))]], "video 0 has frames of 2 sizes"),
        ([[picture(1), "nowhere.png"]], "video 0, frame 1: nowhere.png cannot be read"),
    ],
)
def test_bad_videos_are_refused_with_their_row(value, sentence, processor):
    row = {"videos": value} if isinstance(value, list) else {"video": value}
    with pytest.raises(DataError, match="^row 0") as error:
        prompt_of({"prompt": ask("a"), **row}, processor)
    assert sentence in str(error.value)


class Decoder:
    """What torchcodec's VideoDecoder gives of these frames: [frames, 3, height, width], or with the colours last."""

    def __init__(self, frames, order="NCHW"):
        stacked = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames]))
        self.frames = stacked if order == "NHWC" else stacked.permute(0, 3, 1, 2)
        self.metadata = SimpleNamespace(width=frames[0].width, height=frames[0].height)

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, key):
        return self.frames[key]

    def get_frames_in_range(self, start, stop, step=1):
        raise AssertionError("slices are read")


class Film(Decoder):
    """A decoder of a long film, which is refused before a frame is decoded."""

    def __init__(self, count, side):
        self.count, self.metadata = count, SimpleNamespace(width=side, height=side)

    def __len__(self):
        return self.count

    def __getitem__(self, key):
        raise AssertionError("decoded")


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_a_decoder_gives_the_frames_it_holds(order, processor):
    frames = rows()[0]["video"]
    prompt = prompt_of({**rows()[0], "video": Decoder(frames, order)}, processor)
    assert prompt.token_ids == prompts(processor)[0].token_ids
    expected = prompts(processor)[0].media
    assert torch.equal(prompt.media.tensors["pixel_values_videos"], expected.tensors["pixel_values_videos"])
    assert prompt.media.digests == expected.digests


@pytest.mark.parametrize(
    ("film", "sentence"),
    [
        (Film(769, 32), "v has 769 frames; give 1 to 768"),
        (Film(400, 2000), "v has 400 frames of 2000 x 2000 pixels; make it smaller"),
    ],
)
def test_long_films_are_refused_before_they_are_decoded(film, sentence):
    with pytest.raises(DataError, match=sentence):
        open_video(film, "v")


def film_of(frames, folder):
    """The path of a file of video without loss."""
    for i, frame in enumerate(frames, 1):
        frame.save(folder / f"{i}.png")
    how = f"-loglevel error -f image2 -i {folder}/%d.png -c:v ffv1 -pix_fmt bgr0 {folder}/film.mkv"
    subprocess.run(["ffmpeg", *how.split()], check=True)
    return str(folder / "film.mkv")


def test_torchcodec_reads_the_same_frames_of_a_file(tmp_path, processor):
    pytest.importorskip("torchcodec", exc_type=ImportError, reason="files of video need torchcodec and ffmpeg")
    path = film_of(rows()[0]["video"], tmp_path)
    table = datasets.Dataset.from_list([{"prompt": ask("What moves?"), "video": path}])
    decoded = table.cast_column("video", datasets.Video())
    content = (tmp_path / "film.mkv").read_bytes()
    expected = prompts(processor)[0]
    for row in (table[0], decoded[0], check_dataset(decoded)[0], {**table[0], "video": content}):
        prompt = prompt_of(row, processor)
        assert prompt.token_ids == expected.token_ids
        assert prompt.media.digests == expected.media.digests
        for name, value in expected.media.tensors.items():
            assert torch.equal(torch.as_tensor(prompt.media.tensors[name]), torch.as_tensor(value)), name
    for broken in (content[: len(content) // 2], b"no video"):
        with pytest.raises(DataError, match="^v cannot be read as a video"):
            open_video(broken, "v")


@pytest.mark.skipif(importlib.util.find_spec("torchcodec") is not None, reason="torchcodec is installed")
def test_a_file_of_video_asks_for_torchcodec(tmp_path):
    (tmp_path / "film.mp4").write_bytes(b"film")
    with pytest.raises(DataError, match="^v is a file of video, which torchcodec reads: install torchcodec and ffmpeg"):
        open_video(tmp_path / "film.mp4", "v")


def test_columns_of_datasets_video_stay_files_in_a_data_set():
    feature = datasets.Video()
    for column, value, kind in (("video", "a.mkv", feature), ("videos", ["a.mkv"], datasets.List(feature))):
        table = datasets.Dataset.from_dict({"prompt": ["a"], column: [value]}).cast_column(column, kind)
        held = check_dataset(table)[0][column]
        assert held in ({"bytes": None, "path": "a.mkv"}, [{"bytes": None, "path": "a.mkv"}])


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
