"""Sources of data sets: files, folders, hub ids, the shipped demo. No code of a data set is ever run."""

import contextlib
import glob
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import datasets

from covey.data import gym, harbor, tables, verifiers
from covey.errors import CoveyError, DataError, DataTypeError, did_you_mean, first_line
from covey.files.bounded import LONGEST_LINE
from covey.files.hub import bounded_hub
from covey.files.places import looks_local

FORMATS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")

_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}

AnyDataset: TypeAlias = "datasets.Dataset | datasets.IterableDataset"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager without progress bars for small files, and without logs of errors that are raised as DataError."""
    was_on, level = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if was_on:
            datasets.enable_progress_bars()


def shown(source: Any) -> str:
    """The source as error messages call it."""
    if isinstance(source, str | Path) or not isinstance(source, Iterable):
        return str(source)
    names = [str(item) for item in source]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@quiet()
def opened(source: Any, split: str | None, streaming: bool, config_name: str | None) -> AnyDataset:
    """The data set as it is stored: of its splits the one asked for, or `train`, or the only one."""
    if (dataset := _made(source, split)) is not None:
        return dataset.to_iterable_dataset() if streaming else dataset
    files = _files(source)
    if files:
        return _from_files(files, shown(source), split, streaming)
    folder = Path(str(source)).expanduser()
    if folder.is_dir():
        return _from_folder(folder, split, streaming, config_name)
    return _from_hub(str(source), split, streaming, config_name)


def _made(source: Any, split: str | None) -> Any:
    """The demo's rows, those of a task of Reasoning Gym, an environment of verifiers or Harbor's tasks; None for files, folders and hub ids."""
    name, colon, environment = str(source).partition(":")
    if name not in ("demo", "gym", "verifiers", "harbor") or Path(str(source)).exists():
        return None
    if source == "demo":
        return _demo(split)
    if source == "gym" and split is not None:
        return datasets.Dataset.from_list(gym.rows(split))  # the task stands in the split's place
    if name == "harbor" and (colon or split is not None):
        return datasets.Dataset.from_list(harbor.rows(environment or str(split)))
    if name == "verifiers" and (
        colon or split is not None
    ):  # `verifiers:NAME`; of `verifiers:NAME:SPLIT` the last part is the split
        words = [environment, split or "train"] if environment else [split or "train"]
        return verifiers.rows(*words)
    return None


def _files(source: Any) -> list[Path]:
    """The files that `source` names, [] when it is a folder or a hub id. Raises DataError for one that is not there."""
    if not isinstance(source, str | Path):
        if not isinstance(source, Iterable):
            raise DataTypeError(
                f"{source!r:.60} names no data set; give a file, a list of files, a folder or a hub id."
            )
        return [file for item in source for file in (_files(item) or [_missing(item)])]
    text = str(Path(source).expanduser()) if str(source).startswith("~") else str(source)
    path = Path(text)
    if path.is_file():
        return [path]
    if glob.has_magic(text):
        paths = sorted(Path(name) for name in glob.glob(text, recursive=True) if Path(name).is_file())
        return paths or [_missing(source)]
    if looks_local(text) and not path.is_dir():
        _missing(source)
    return []


def _missing(source: Any) -> Path:
    path = Path(str(source)).expanduser()
    if path.is_dir():
        raise DataError(
            f"{str(source)!r} is a folder in a list of files; give its files, as {str(path / '*.jsonl')!r}."
        )
    where = "" if path.parent.is_dir() else f" There is no folder {str(path.parent)!r} either."
    raise DataError(f"The data set {str(source)!r} does not exist.{_near(path)}{where}")


def _near(path: Path) -> str:
    """A sentence with the data set in the folder of `path` whose name is nearest, or an empty string."""
    siblings = [*path.parent.iterdir()] if path.parent.is_dir() else []
    here = [sibling.name for sibling in siblings if sibling.is_dir() or _suffix(sibling) in FORMATS]
    return did_you_mean(path.name, [*here, *(["demo"] if path.name == str(path) else [])])


_MALFORMED = (ValueError, OverflowError, TypeError, LookupError, RecursionError)
"""Errors that the readers below `datasets` raise on rows that do not form a table."""


def _suffix(path: Path) -> str:
    """The suffix that says the format: `.jsonl` of `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def _from_files(files: Sequence[Path], name: str, split: str | None, streaming: bool) -> AnyDataset:
    kinds = {FORMATS.get(_suffix(file)) for file in files}
    if None in kinds:
        odd = next(file for file in files if _suffix(file) not in FORMATS)
        raise DataError(
            f"{odd} has no known suffix; data sets are {', '.join(FORMATS)} files, folders of them, or hub ids."
        )
    if len(kinds) > 1:
        raise DataError(f"{name} mixes {' and '.join(sorted(map(str, kinds)))} files; give files of one format.")
    if split is not None and split.partition("[")[0] != "train":
        raise DataError(
            f"{name} is a file, which has no split {split!r}; drop ':{split}', or give the file of that split."
        )
    if streaming and split is not None and "[" in split:
        raise DataError(
            f"{name}: a stream has no part {split!r}; leave streaming out, or take its first rows by limit."
        )
    empty = [file for file in files if not file.stat().st_size]
    if empty:
        raise DataError(f"{empty[0]} is empty.")
    kind = str(kinds.pop())
    if kind == "json":
        _refuse_wild(files)
    read = {"json": tables.read_json, "csv": tables.read_csv}.get(kind)
    try:
        if read is not None and (exact := read([file.resolve() for file in files], streaming)) is not None:
            return exact if split is None or streaming else _part(exact, split)
        paths = [str(file.resolve()) for file in files]
        return datasets.load_dataset(kind, data_files=paths, split=split or "train", streaming=streaming)
    except (datasets.exceptions.DatasetsError, StopIteration, *_MALFORMED, OSError) as error:
        if isinstance(error, CoveyError):
            raise
        raise DataError(_unreadable(files, kind, error)) from error


def _part(dataset: Any, split: str) -> Any:
    """The rows that `train[:100]` names."""
    name, bracket, part = split.partition("[")
    if not bracket:
        return dataset
    instruction = datasets.ReadInstruction.from_spec(f"{name}[{part}").to_absolute({name: len(dataset)})[0]
    return dataset.select(range(instruction.from_ or 0, len(dataset) if instruction.to is None else instruction.to))


_DEEPEST = 500
_NESTED = re.compile(rb'(?:[\[{]\s*(?:"[^"\\]*"\s*:\s*)?){%d}' % _DEEPEST)


def _refuse_wild(files: Sequence[Path]) -> None:
    """Raise DataError for JSON on which the readers below would run out of stack, or of memory for one row."""
    for file in files:
        if file.suffix.lower() in _COMPRESSED:
            continue
        with file.open("rb") as content:
            if content.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"null"):
                # pyarrow 26 ends the process on lines that are all null
                raise DataError(f'{file} begins with null where an object such as {{"prompt": ...}} was wanted.')
            content.seek(0)
            if _suffix(file) == ".json":
                with mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as text:
                    if _NESTED.search(text):
                        raise DataError(f"{file} is nested more than {_DEEPEST} deep.")
                continue
            number = 0
            while line := content.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise DataError(
                        f"{file}, line {number} is longer than {LONGEST_LINE >> 20} MiB; a row is one line."
                    )
                if len(line) > _DEEPEST and _NESTED.search(line):
                    raise DataError(f"{file}, line {number} is nested more than {_DEEPEST} deep.")


def _unreadable(files: Sequence[Path], kind: str, error: BaseException) -> str:
    """Error sentence for an unreadable file."""
    if isinstance(error, StopIteration) or re.search("no data|BatchSize must be greater than 0", str(error)):
        return f"{shown(files)} has no rows."
    cause = error.__cause__ or error
    place = getattr(cause, "filename", None)
    if isinstance(place, str) and Path(place).resolve() not in {file.resolve() for file in files}:
        cache = datasets.config.HF_DATASETS_CACHE
        return (
            f"{shown(files)} cannot be taken into the cache of data sets, {cache} ({getattr(cause, 'strerror', None)}: {place}); set "
            "HF_DATASETS_CACHE to a folder that can be written."
        )
    reason = " ".join(str(cause).split())[:200].rstrip(".") or type(cause).__name__
    return f"{shown(files)} cannot be read as {kind}: {reason}."


def _from_folder(folder: Path, split: str | None, streaming: bool, config_name: str | None) -> AnyDataset:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _from_saved(folder, split, streaming)
    card = folder / "README.md"
    if card.is_file() and "data_files" in card.read_text(encoding="utf-8", errors="replace"):
        return _load_named(str(folder), config_name, split, streaming)  # a data set card says which file is which split
    splits = _splits_of(folder)
    if not splits:
        raise DataError(
            f"The folder {str(folder)!r} holds no data set: no {', '.join(FORMATS)} file, and none saved by datasets."
        )
    split_name, bracket, part = (split or _default_split(list(splits), str(folder))).partition("[")
    if split_name not in splits:
        raise DataError(_no_split(str(folder), split_name, list(splits)))
    return _from_files(splits[split_name], f"{folder}:{split_name}", f"train{bracket}{part}", streaming)


def _splits_of(folder: Path) -> dict[str, list[Path]]:
    """The data files of a folder by split: named by a word of their path, `train` where no word names one.

    `datasets` also reads words of the folder's own path, so that `my_test/train.jsonl` becomes a test set.
    """
    splits: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if _suffix(file) not in FORMATS or not file.is_file() or any(part.startswith(".") for part in inside.parts):
            continue
        words = re.split(r"[^a-z]+", str(inside.with_name(inside.name.partition(".")[0])).lower())
        named = [split for word, split in _SPLIT_WORDS.items() if word in words]
        splits.setdefault(named[0] if named else inside.name.partition(".")[0], []).append(file)
    if not set(splits) & set(_SPLIT_WORDS.values()):
        return {"train": [file for files in splits.values() for file in files]} if splits else {}
    return splits


def _from_saved(folder: Path, split: str | None, streaming: bool) -> AnyDataset:
    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"The folder {str(folder)!r} holds no data set that datasets saved: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        split_name, _, part = (split or _default_split(list(saved), str(folder))).partition("[")
        if split_name not in saved:
            raise DataError(_no_split(str(folder), split_name, list(saved)))
        saved = saved[split_name]
    else:
        split_name, _, part = (split or "train").partition("[")
    if part:
        saved = _part(saved, f"{split_name}[{part}")
    return saved.to_iterable_dataset() if streaming else saved


def _from_hub(name: str, split: str | None, streaming: bool, config_name: str | None) -> AnyDataset:
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", name):
        _missing(name)
    with bounded_hub(name) as is_reachable:
        try:
            return _load_named(name, config_name, split, streaming)
        except DataError as error:
            if is_reachable:
                raise
            raise DataError(
                f"The data set {name!r} is neither a file or folder here nor in the cache, and the hub cannot be reached."
            ) from error


def _load_named(name: str, config_name: str | None, split: str | None, streaming: bool) -> AnyDataset:
    """A folder of files or a hub id, by `datasets`; its own words are kept where it refuses."""
    try:
        if split is None:
            loaded = datasets.load_dataset(name, config_name, streaming=streaming)
            return loaded[_default_split(list(loaded), name)]
        return datasets.load_dataset(name, config_name, split=split, streaming=streaming)
    except CoveyError:
        raise
    except (ConnectionError, FileNotFoundError, datasets.exceptions.DatasetNotFoundError) as error:
        raise DataError(
            f"The data set {name!r} is neither a file or folder here nor on the hub ({first_line(error)}); "
            f"check the name, or log in with `hf auth login` if it is private.{_near(Path(name))}"
        ) from error
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError, OSError) as error:
        raise DataError(f"The data set {name!r} cannot be loaded: {first_line(error)}") from error


def _default_split(splits: Sequence[str], name: str) -> str:
    if "train" in splits:
        return "train"
    if len(splits) == 1:
        return splits[0]
    raise DataError(f"{name} has the splits {', '.join(splits)}; say which, as in {name}:{splits[0]}.")


def _no_split(name: str, split: str, splits: Sequence[str]) -> str:
    return f"{name} has no split {split!r}; it has {', '.join(splits)}.{did_you_mean(split, splits)}"


def _demo(split: str | None) -> Any:
    from covey.demo import rows

    split_name = (split or "train").partition("[")[0]
    if split_name not in ("train", "test"):
        raise DataError(_no_split("demo", split_name, ("train", "test")))
    return _part(datasets.Dataset.from_list(rows("test" if split_name == "test" else "train")), split or split_name)
