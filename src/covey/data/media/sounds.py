"""Sounds of rows: samples by soundfile within bounds, at the rate of the model, and WAV files for people."""

import base64
import io
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.data.media.files import content_of, readable
from covey.data.media.kinds import SOUND
from covey.errors import DataError

_MOST_SECONDS = 1800.0
"""Longest sound that is read; a processor may take less."""
_LEAST_SECONDS = 0.1
_MOST_CHANNELS = 8
_RATES = (1000, 768_000)
_LOUDEST = 8.0
"""Samples beyond are of another scale than -1 to 1."""
_CANCELLED = 0.01
"""Share of the power that unrelated channels would leave in their average; channels of opposite phase leave less."""
_INTEGERS = (np.int16, np.int32)
"""Types whose full scale is their range; a list of Python's integers has no scale."""
_PREVIEW_SECONDS = 60
_UNKNOWN_SIZE = 0x7FFF_F000
"""Sizes in the header of a file that was written to a pipe begin here."""


@dataclass(frozen=True, eq=False)
class Sound:
    """Samples of one sound as a model hears them."""

    samples: np.ndarray
    """[n] float32, one channel."""
    rate: int
    """Samples a second."""

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    def as_base64(self) -> str:
        """A WAV file of float32 samples, which keeps every bit, in base64. DataError without soundfile."""
        file = io.BytesIO()
        _soundfile().write(file, self.samples, self.rate, format="WAV", subtype="FLOAT")
        return base64.b64encode(file.getvalue()).decode()

    def as_column(self) -> dict[str, Any]:
        """The form in which rewards receive it, which is `datasets.Audio`'s."""
        return {"array": self.samples, "sampling_rate": self.rate}


def open_sound(value: Any, where: str, rate: int) -> Sound:
    """The sound at `rate` samples a second, channels averaged; of channels that cancel out, the loudest.

    From a file's path, its bytes, `datasets`' dict of the two, a dict of `array` and `sampling_rate`, or a decoder of torchcodec.
    Another rate is resampled by soxr at its quality HQ. Raises DataError for anything else, and for a file that is broken, too short or too long.
    """
    value = content_of(value, SOUND, where)
    if isinstance(value, bytes):
        samples, source_rate = _read_file(value, where)
    elif isinstance(value, Mapping) and {"array", "sampling_rate"} <= value.keys():
        try:
            samples, source_rate = np.asarray(value["array"]), value["sampling_rate"]
        except ValueError as error:
            raise DataError(
                f"{where} is a list whose parts differ in length; give one list of samples a channel."
            ) from error
    elif hasattr(value, "get_all_samples"):  # AudioDecoder of torchcodec, by datasets
        decoded = value.get_all_samples()
        samples, source_rate = decoded.data.numpy(), decoded.sample_rate
    else:
        raise DataError(
            f"{where} is a {type(value).__name__}; give a path, the file's bytes, or a dict of 'array' and 'sampling_rate'."
        )
    samples, source_rate = _one_channel(samples, where), _checked_rate(source_rate, where)
    seconds = len(samples) / source_rate
    if seconds < _LEAST_SECONDS:
        raise DataError(f"{where} lasts {seconds:.3g} seconds; give one of at least {_LEAST_SECONDS} seconds.")
    if seconds > _MOST_SECONDS:
        raise DataError(
            f"{where} lasts {seconds:.0f} seconds; cut it to {_MOST_SECONDS:.0f}, or to what the model takes."
        )
    if not np.isfinite(samples).all():
        raise DataError(f"{where} holds samples that are no finite numbers; mend or remove it.")
    if (loudest := float(np.abs(samples).max())) > _LOUDEST:
        raise DataError(
            f"{where} has samples up to {loudest:.6g}, where full scale is 1; divide them by their full scale."
        )
    return Sound(_resampled(samples, source_rate, rate), rate)


def _read_file(content: bytes, where: str) -> tuple[np.ndarray, int]:
    """[n, channels] float32 and the rate, by soundfile; nothing is decoded of a file that is too long."""
    soundfile = _soundfile()
    if (missing := _missing_bytes(content)) > 1:  # the byte that pads an odd size is often left out
        raise DataError(f"{where} ends {missing:,} bytes before its header says; mend or remove it.")
    with readable("a sound", where), soundfile.SoundFile(io.BytesIO(content)) as file:
        if file.channels > _MOST_CHANNELS or file.frames > _MOST_SECONDS * file.samplerate:
            raise DataError(
                f"{where} has {file.channels} channels of {file.frames / file.samplerate:.0f} seconds; give at most "
                f"{_MOST_CHANNELS} of {_MOST_SECONDS:.0f}."
            )
        samples = file.read(dtype="float32", always_2d=True)
        if len(samples) < file.frames:
            raise DataError(f"{where} ends after {len(samples)} of its {file.frames} samples; mend or remove it.")
    return samples.T, file.samplerate


def _missing_bytes(content: bytes) -> int:
    """Bytes that a WAV, RF64, W64 or AIFF file lacks by the size in its header, of which libsndfile reads the rest; 0 where a stream wrote no size."""
    most = _UNKNOWN_SIZE << 32  # of sizes in 64 bits
    if content[:4] == b"riff":  # Sony's W64, whose size counts its header
        size = int.from_bytes(content[16:24], "little") - 8
    elif content[8:12] not in (b"WAVE", b"AIFF", b"AIFC"):
        return 0
    elif content[:4] == b"RF64":
        size = int.from_bytes(content[20:28], "little")
    else:
        size, most = int.from_bytes(content[4:8], "little" if content[:4] == b"RIFF" else "big"), _UNKNOWN_SIZE
    return 0 if size >= most else max(0, size + 8 - len(content))


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise DataError("Files of sound need soundfile: pip install 'covey[audio]'.") from error
    return soundfile


def _one_channel(samples: np.ndarray, where: str) -> np.ndarray:
    """[n] float32 from [n] or [channels, n]; integers are scaled to -1 to 1 by their type."""
    has_channels = samples.ndim == 1 or (samples.ndim == 2 and 1 <= len(samples) <= _MOST_CHANNELS)
    if not has_channels or not (samples.dtype.kind == "f" or samples.dtype in _INTEGERS):
        raise DataError(
            f"{where} is an array of {samples.dtype} and shape {samples.shape}; give floats from -1 to 1, or int16, of "
            f"shape [samples], or [channels, samples] with at most {_MOST_CHANNELS} channels."
        )
    if samples.dtype.kind == "i":
        samples = samples / -float(np.iinfo(samples.dtype).min)
    if samples.ndim == 2:
        samples = _mixed(samples)
    return np.ascontiguousarray(samples, dtype=np.float32)


def _mixed(channels: np.ndarray) -> np.ndarray:
    """[n] from [channels, n]: their average, or the loudest where they are of opposite phase, as of a balanced line."""
    average: np.ndarray = channels.mean(axis=0)
    powers = np.square(channels, dtype=np.float64).sum(axis=1)
    is_silenced = np.square(average, dtype=np.float64).sum() < _CANCELLED * powers.sum() / len(channels) ** 2
    return channels[powers.argmax()] if is_silenced else average


def _checked_rate(value: Any, where: str) -> int:
    low, high = _RATES
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.number)
        or not low <= value <= high
        or int(value) != value
    ):
        raise DataError(f"{where} has the sampling rate {value!r}; give samples a second, from {low:,} to {high:,}.")
    return int(value)


def _resampled(samples: np.ndarray, source_rate: int, rate: int) -> np.ndarray:
    if source_rate == rate:
        return samples
    try:
        import soxr
    except ImportError as error:
        raise DataError(
            f"A sound has {source_rate:,} samples a second and the model hears {rate:,}; resample it, or pip install 'covey[audio]'."
        ) from error
    resampled: np.ndarray = soxr.resample(samples, source_rate, rate, quality="HQ")
    return resampled


def preview_sound(sound: Sound) -> bytes:
    """The first minute as a WAV file of 16 bits a sample."""
    samples = sound.samples[: _PREVIEW_SECONDS * sound.rate]
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(sound.rate)
        out.writeframes((samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return file.getvalue()
