"""Images, videos and sounds of a run in a real Chromium: drawn, moving, and played."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from covey.data.media.images import preview_image
from covey.data.media.sounds import Sound, preview_sound
from covey.data.media.videos import preview_video
from covey.monitor.view import Library
from covey.runs import previews, rollouts
from covey.types import Completion, Group, Prompt
from covey.types.media import Media

RATE = 16_000


def written(folder: Path) -> Path:
    """A run with one group, whose prompt holds an image, a sound of half a second, and a video of three frames."""
    frames = [Image.new("RGB", (32, 24), (80 * i, 0, 0)) for i in range(3)]
    tone = Sound((0.5 * np.sin(np.arange(RATE // 2) / 6)).astype(np.float32), RATE)
    files = preview_image(Image.new("RGB", (40, 30), "green")), preview_sound(tone), preview_video(frames)
    digests = {"image": ("image",), "audio": ("sound",), "video": ("video",)}
    media = Media(tensors={}, count=3, digests=digests, previews=files)
    messages = ({"role": "user", "content": [{"type": kind} for kind in digests]},)
    prompt = Prompt(uid="0:0", token_ids=(1,), messages=messages, media=media)
    done = Completion(token_ids=torch.arange(3), text="green", finish="stop")
    group = Group(prompt=prompt, completions=(done, done), rewards=torch.ones(2, 1))
    rollouts.write(folder / "rollouts", 1, [group], ["r"])
    previews.write(folder / "rollouts", [group])
    (folder / "run.json").write_text(json.dumps({"schema": 1, "state": "finished"}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    return folder


@pytest.mark.slow
def test_a_groups_image_and_video_are_drawn_and_its_sound_is_played(
    tmp_path: Path, served: Callable[..., Any], blank: Any
) -> None:
    written(tmp_path / "run")
    with served(Library([tmp_path]), watch=True) as client:
        blank.goto(f"{client.address}/#rollouts?run=run&step=1&group=0")
        drawn = {}
        for name in ("image", "video"):
            picture = blank.get_by_alt_text(f"{name} ", exact=False)
            picture.wait_for()
            blank.wait_for_function(
                "(picture) => picture.complete && picture.naturalWidth", arg=picture.element_handle()
            )
            drawn[name] = picture.evaluate("(picture) => [picture.naturalWidth, picture.naturalHeight]")
        assert drawn == {"image": [40, 30], "video": [32, 24]}
        blank.locator("audio").wait_for()
        assert blank.locator("audio").get_attribute("aria-label") == "sound 2 of the prompt"
        blank.evaluate("() => void document.querySelector('audio').play()")
        blank.wait_for_function("() => document.querySelector('audio').currentTime > 0")
        assert blank.evaluate("() => document.querySelector('audio').duration") == 0.5
