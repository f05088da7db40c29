"""Command lines of TRL's example scripts: their dataclasses, their parser, and the objects that these describe.

Names, fields and defaults are TRL 1.16's, so that a script needs its import changed and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from transformers.hf_argparser import HfArgumentParser

from covey.declared import checked
from covey.errors import ConfigError, DataError, needed

if TYPE_CHECKING:
    from datasets import DatasetDict


def _option(default: Any, sentence: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": sentence, **more})


@dataclass
class ScriptArguments:
    """Data set of a script: a name for `datasets.load_dataset`, its configuration and its splits."""

    dataset_name: Optional[str] = _option(None, "Path or hub id of the data set.")
    dataset_config: Optional[str] = _option(None, "Configuration of the data set, where it has several.")
    dataset_train_split: str = _option("train", "Split to train on.")
    dataset_test_split: str = _option("test", "Split to evaluate on.")
    dataset_streaming: bool = _option(False, "Read the data set as it is needed.")
    ignore_bias_buffers: bool = _option(False, "Without effect: gradients are summed without DistributedDataParallel.")


@dataclass
class ModelConfig:
    """Model of a script: its name, its type of numbers, its adapter and its quantization."""

    model_name_or_path: Optional[str] = _option(None, "Hub id or folder of the model.")
    model_revision: str = _option("main", "Branch, tag or commit of the model on the hub.")
    dtype: Optional[str] = _option(
        "float32", "Type of the weights.", choices=["auto", "bfloat16", "float16", "float32"]
    )
    attn_implementation: Optional[str] = _option(None, "Attention of transformers, such as flash_attention_2.")
    use_peft: bool = _option(False, "Train a LoRA adapter.")
    lora_r: int = _option(16, "Rank of the adapter.")
    lora_alpha: int = _option(32, "Scale of the adapter: alpha / r.")
    lora_dropout: float = _option(0.05, "Dropout of the adapter's input.")
    lora_target_modules: Optional[list[str]] = _option(None, "Layers that get an adapter.")  # noqa: RUF009
    lora_target_parameters: Optional[list[str]] = _option(None, "Parameters that get an adapter.")  # noqa: RUF009
    lora_modules_to_save: Optional[list[str]] = _option(None, "Layers that are trained in full.")  # noqa: RUF009
    lora_task_type: str = _option("CAUSAL_LM", "Task of the adapter in peft.")
    use_rslora: bool = _option(False, "Scale of the adapter: alpha / sqrt(r).")
    use_dora: bool = _option(False, "Train magnitude and direction of the weights apart (DoRA).")
    load_in_8bit: bool = _option(False, "Base model with 8-bit weights; needs an adapter.")
    load_in_4bit: bool = _option(False, "Base model with 4-bit weights; needs an adapter.")
    bnb_4bit_quant_type: str = _option("nf4", "Type of 4-bit numbers.", choices=["fp4", "nf4"])
    use_bnb_nested_quant: bool = _option(False, "Quantize the scales of 4-bit weights too.")
    bnb_4bit_quant_storage: Optional[str] = _option(None, "Type in which 4-bit weights are stored.")

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_8bit and load_in_4bit are both set; keep one of them.")
        names: Union[str, Sequence[str], None] = self.lora_target_modules
        if names is not None and not isinstance(names, str) and len(names) == 1:
            self.lora_target_modules = names[0]  # type: ignore[assignment]  # "all-linear" is no list in peft


@dataclass
class DatasetConfig:
    """Part of a mixture: arguments of `datasets.load_dataset`, columns to keep, and a share of the mixture."""

    path: str
    name: Optional[str] = None
    data_dir: Optional[str] = None
    data_files: Any = None
    split: str = "train"
    columns: Optional[list[str]] = None
    fraction: Optional[float] = None


@dataclass
class DatasetMixtureConfig:
    """Mixture of data sets, from the YAML file of `--config`."""

    datasets: list[DatasetConfig] = field(
        default_factory=list, metadata={"help": "Parts of the mixture; write them in the YAML file of --config."}
    )
    streaming: bool = _option(False, "Read the data sets as they are needed.")
    test_split_size: Optional[float] = _option(None, "Share of the rows, or their number, held out as the split test.")

    def __post_init__(self) -> None:
        try:
            self.datasets = [part if hasattr(part, "path") else DatasetConfig(**part) for part in self.datasets]  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(f"datasets={self.datasets!r} is no list of mappings with a path: {error}.") from error


class TrlParser(HfArgumentParser):
    """HfArgumentParser that also reads `--config FILE.yaml`: its values are defaults, and its `env` sets variables."""

    def __init__(self, dataclass_types: Any = None, **more: Any) -> None:
        types = [] if dataclass_types is None else dataclass_types
        types = list(types) if isinstance(types, Iterable) else [types]
        for cls in types:
            if "config" in cls.__dataclass_fields__:
                raise ConfigError(f"{cls.__name__} has a field `config`, which names the YAML file; rename the field.")
        super().__init__(types, **more)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """An instance of each dataclass; with `return_remaining_strings` also the words that belong to none.

        Raises ConfigError for a file that holds no mapping, and for names in it that no dataclass has.
        """
        words = list(sys.argv[1:] if args is None else args)
        path, words = _config_of(words)
        unused = self.set_defaults_with_config(**_settings_of(path)) if path else []
        read = tuple(self.parse_args_into_dataclasses(args=words, return_remaining_strings=return_remaining_strings))
        if return_remaining_strings:
            rest = read[-1]
            return (*read[:-1], unused, rest) if separate_remaining_strings else (*read[:-1], [*unused, *rest])
        if unused and fail_with_unknown_args:
            raise ConfigError(f"{path} has {' '.join(unused)}, which no option of this script takes; take it out.")
        return read

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Values as defaults of the options and of those of subcommands; returns the words that no option takes."""
        used = _set_defaults(self, values)
        return [word for name, value in values.items() if name not in used for word in (f"--{name}", str(value))]


def _config_of(words: list[str]) -> tuple[str | None, list[str]]:
    """The file that `--config FILE` or `--config=FILE` names, and the other words."""
    for at, word in enumerate(words):
        if word.startswith("--config="):
            return word.partition("=")[2], [*words[:at], *words[at + 1 :]]
        if word == "--config":
            if at + 1 == len(words):
                raise ConfigError("--config needs the path of a YAML file behind it.")
            return words[at + 1], [*words[:at], *words[at + 2 :]]
    return None, words


def _settings_of(path: str) -> dict[str, Any]:
    """Options of a YAML file; its `env` goes into the environment of this process."""
    import yaml

    if not Path(path).is_file():
        raise ConfigError(f"--config {path} is no file; give the path of a YAML file.")
    settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} has to be a YAML mapping of options to values.")
    variables = settings.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ConfigError(f"`env` in {path} has to be a mapping of variables to values.")
    os.environ.update({name: str(value) for name, value in variables.items()})
    return settings


def _set_defaults(parser: Any, values: Mapping[str, Any]) -> set[str]:
    used: set[str] = set()
    for action in parser._actions:
        if isinstance(action.choices, Mapping):  # subcommands
            for subparser in action.choices.values():
                used |= _set_defaults(subparser, values)
        elif action.dest in values:
            action.default, action.required = values[action.dest], False
            used.add(action.dest)
    return used


@checked
def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """The mixture's parts, one after another, as split `train`; with `test_split_size` rows of them as split `test`.

    Fractions are shares of the mixture. It is as large as it can be without any row twice, from each part's first rows.
    """
    import datasets

    parts = mixture_config.datasets
    if not parts:
        raise DataError("The mixture has no data sets; list them under `datasets` in the YAML file of --config.")
    loaded = [_part(part, mixture_config.streaming) for part in parts]
    fractions = [part.fraction for part in parts if part.fraction is not None]
    if fractions:
        loaded = _shares(loaded, fractions, mixture_config.streaming)
    rows = datasets.concatenate_datasets(loaded)
    if mixture_config.test_split_size is None:
        return datasets.DatasetDict({"train": rows})
    return rows.train_test_split(test_size=mixture_config.test_split_size)


def _part(part: DatasetConfig, streaming: bool) -> Any:
    import datasets

    rows = datasets.load_dataset(
        path=part.path,
        name=part.name,
        data_dir=part.data_dir,
        data_files=part.data_files,
        split=part.split,
        streaming=streaming,
    )
    return rows if part.columns is None else rows.select_columns(part.columns)


def _shares(loaded: Sequence[Any], fractions: Sequence[float], streaming: bool) -> list[Any]:
    if len(fractions) != len(loaded):
        raise DataError("`fraction` is set for some data sets of the mixture; set it for all of them or for none.")
    if streaming:
        raise DataError("`fraction` needs the number of rows, which a stream does not have; leave out streaming.")
    if min(fractions) < 0 or sum(fractions) <= 0:
        raise DataError(f"The fractions of the mixture are {list(fractions)}; give shares of 0 or more, not all 0.")
    shares = [fraction / sum(fractions) for fraction in fractions]
    total = min(len(rows) / share for rows, share in zip(loaded, shares, strict=True) if share > 0)
    return [rows.select(range(round(share * total))) for rows, share in zip(loaded, shares, strict=True)]


@checked
def get_peft_config(model_args: ModelConfig) -> Any:
    """peft's LoraConfig of these arguments, None without `use_peft`. Raises ConfigError where peft is not installed."""
    if not model_args.use_peft:
        return None
    with needed("use_peft needs peft, which is not installed", "peft"):
        from peft import LoraConfig, TaskType
    return LoraConfig(
        task_type=TaskType(model_args.lora_task_type),
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
        target_parameters=model_args.lora_target_parameters,
    )


@checked
def get_quantization_config(model_args: ModelConfig) -> Any:
    """transformers' BitsAndBytesConfig of these arguments, None for weights that are not quantized."""
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=None if model_args.dtype == "auto" else model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Device map that puts a quantized model on the GPU of this process; None without a GPU."""
    import torch

    return {"": int(os.environ.get("LOCAL_RANK", 0))} if torch.cuda.is_available() else None
