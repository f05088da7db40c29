"""The options of GRPOConfig as flags: Covey's declarations, and the source text of transformers, which is not imported for help."""

import ast
import functools
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from covey.cli.flags import Flag
from covey.config import options
from covey.config.fields import Options


@dataclass(frozen=True)
class Field:
    """A field of a dataclass, its type and default as text."""

    name: str
    annotation: str
    default: str


def config_flags(common: Collection[str]) -> list[Flag]:
    """A flag for every option that Covey honours, in the order of the groups; `common` ones are shown by `--help`."""
    by_name = {field.name: field for field in all_fields()}
    flags = []
    for group, names in options.GROUPS.items():
        for name in names:
            field = by_name.get(name)
            if field is None:
                continue  # a field that only newer transformers have
            flags.append(
                Flag(
                    name=name,
                    help=options.DECLARED[name].help,
                    type=field.annotation,
                    default=field.default,
                    short="o" if name == "output_dir" else "",
                    group=group,
                    is_common=name in common,
                    bare=options.DECLARED[name].bare,
                )
            )
    return flags


def other_flags() -> list[Flag]:
    """Options that GRPOConfig refuses or ignores: parsed here, so that its message about them is shown."""
    return [
        Flag(name=field.name, help="", type=field.annotation, default=field.default, is_common=False)
        for field in all_fields()
        if field.name not in options.HONOURED
    ]


@functools.cache
def all_fields() -> tuple[Field, ...]:
    """Every field of GRPOConfig, those of TrainingArguments first."""
    inherited = {field.name: field for field in fields_in(_inherited_source("training_args"), "TrainingArguments")}
    covey_fields = {
        field.name: Field(field.name, options.TYPES[field.name], str(field.default)) for field in fields(Options)
    }
    return tuple((inherited | covey_fields).values())


@functools.cache
def enum_values(module: str, name: str) -> tuple[str, ...]:
    """The values of an enumeration in a file of transformers."""
    tree = ast.parse(_inherited_source(module).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    assigned = [node.value for node in body if isinstance(node, ast.Assign)]
    return tuple(str(value.value) for value in assigned if isinstance(value, ast.Constant))


def fields_in(source: Path, class_name: str) -> list[Field]:
    """The annotated fields of a class in a Python file, without running it."""
    tree = ast.parse(source.read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    declared = []
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared.append(Field(node.target.id, ast.unparse(node.annotation), _default(node.value)))
    return declared


def _default(node: ast.expr | None) -> str:
    if isinstance(node, ast.Call):
        chosen: Any = next((k.value for k in node.keywords if k.arg in ("default", "default_factory")), None)
        return _default(chosen)
    return "" if node is None or isinstance(node, ast.Name) else ast.unparse(node).strip("'")


def _inherited_source(module: str) -> Path:
    spec = importlib.util.find_spec("transformers")  # finds it without importing it
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / f"{module}.py"
