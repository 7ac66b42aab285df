"""Owns how one setting is declared and described: type, choices, default, unit, help text, and strict conversion.

`setting()` declares a dataclass field; `read_settings()` turns the fields of a section into `Setting` objects, which
the command line, the YAML reader and `megatron_logra.config` share.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal


class ConfigError(ValueError):
    """One or more settings are wrong; `problems` holds one sentence for each of them."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        listed = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(self.problems[0] if count == 1 else f"{count} problems in the configuration:{listed}")


def setting(default: Any = dataclasses.MISSING, *, help: str, unit: str = "") -> Any:
    """Declare one leaf of the tree; without a default it must be given."""
    metadata = {"help": help, "unit": unit}
    if default is dataclasses.MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """One leaf of the tree as the command line and the YAML reader see it."""

    name: str
    section: str
    kind: type  # int, float, str, bool, or tuple (a list of texts)
    optional: bool
    choices: tuple[str, ...]
    default: object  # dataclasses.MISSING if required
    help: str
    unit: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def expected(self) -> str:
        """What a value has to be, in words."""
        words = {
            int: "an integer",
            float: "a number",
            str: "a text",
            bool: "true or false",
            tuple: "a list of texts",
        }
        what = "one of " + ", ".join(self.choices) if self.choices else words[self.kind]
        return what + " or null" if self.optional else what

    def convert(self, value: object) -> object:
        """Return `value` with the exact type of the annotation; raises TypeError if it has another type."""
        if value is None and self.optional:
            return None
        if self.kind is tuple and isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
        if self.kind is float and type(value) is int:
            return float(value)
        if type(value) is not self.kind or self.kind is tuple or (self.choices and value not in self.choices):
            raise TypeError(f"expected {self.expected}, got {describe(value)}")
        return value


def describe(value: object) -> str:
    """A value and its type in words, for error messages."""
    names = {str: "the text", bool: "the boolean", int: "the integer", float: "the number", list: "the list"}
    if value is None:
        return "null"
    return f"{names.get(type(value), 'the ' + type(value).__name__)} {value!r}"


def read_settings(section: str, section_class: type) -> Iterator[Setting]:
    """The settings of one section, in order."""
    hints = typing.get_type_hints(section_class)
    for leaf in dataclasses.fields(section_class):
        kind, optional, choices = _parse_annotation(hints[leaf.name])
        help, unit = leaf.metadata["help"], leaf.metadata["unit"]
        yield Setting(leaf.name, section, kind, optional, choices, leaf.default, help, unit)


def _parse_annotation(annotation: Any) -> tuple[type, bool, tuple[str, ...]]:
    """Take an annotation apart: (type, may be None, choices)."""
    optional = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    if optional:
        (annotation,) = (part for part in typing.get_args(annotation) if part is not types.NoneType)
    if typing.get_origin(annotation) is Literal:
        return str, optional, typing.get_args(annotation)
    return typing.get_origin(annotation) or annotation, optional, ()


def flag_of(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def raise_problems(problems: Iterable[str]) -> None:
    """Raise ConfigError with all of them, if there are any."""
    found = tuple(problems)
    if found:
        raise ConfigError(found)


def closest(name: str, known: Iterable[str]) -> str:
    """A suggestion to put after an unknown name: the most similar known one, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""
