"""Owns how settings are read and written: command-line flags, the YAML file, and the resolved configuration.

Protocol: defaults < YAML file (`--config run.yaml`) < flags. Flags are the names of the settings with dashes; YAML
keys are flat and may be written with dashes or underscores. YAML follows version 1.2 in what it takes for a number
or a boolean: `kl_control: off` is a text and `2e-4` is a number.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import ClassVar, NoReturn

import yaml

from megatron_logra.config import Config, build_config, iterate_sections, iterate_settings
from megatron_logra.config_schema import ConfigError, Setting, closest

_SCALARS = (
    ("null", r"^(?:~|null|Null|NULL|)$"),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$"),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$"),
    ("float", r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar types of YAML 1.2: PyYAML reads `off` as a boolean and `2e-4` as a text."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {  # type: ignore[misc]
        first: [(f"tag:yaml.org,2002:{tag}", re.compile(pattern)) for tag, pattern in _SCALARS]
        for first in ("", *"~nNtTfF-+.0123456789")
    }


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text, so that readers of YAML 1.1 and of 1.2 agree on what is a text."""


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


class _Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors do not repeat the usage of every flag."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n(all flags: {self.prog} --help)\n")


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Build the command line: one group per section, one flag per setting, nothing set by default."""
    parser = _Parser(
        prog=prog,
        description="Train a policy with GRPO and LoGRA. Start one process per rank, for example with torchrun.",
        epilog="The same settings can be given in a YAML file, see --config; flags win over it.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; keys are the flags without '--'")
    titles = {section: (cls.__doc__ or section).rstrip(".") for section, cls in iterate_sections()}
    groups = {section: parser.add_argument_group(title) for section, title in titles.items()}
    for spec in iterate_settings():
        _add_flag(groups[spec.section], spec)
    return parser


def _add_flag(group: argparse._ArgumentGroup, spec: Setting) -> None:
    """Add the flag of one setting with its type, choices, unit and default."""
    default = "required" if spec.required else f"default: {_format_default(spec)}"
    help = f"{spec.help} ({f'unit: {spec.unit}; ' if spec.unit else ''}{default})".replace("%", "%%")
    if spec.kind is bool:
        group.add_argument(spec.flag, action=argparse.BooleanOptionalAction, help=help)
    elif spec.kind is tuple:
        group.add_argument(spec.flag, nargs="*", metavar="TEXT", help=help)
    elif spec.choices:
        group.add_argument(spec.flag, choices=spec.choices, help=help)
    else:
        metavar = {int: "N", float: "X", str: "TEXT"}[spec.kind]
        group.add_argument(spec.flag, type=spec.kind, metavar=metavar, help=help)


def _format_default(spec: Setting) -> str:
    if spec.default is None:
        return "not set"
    if spec.kind is bool:
        return "on" if spec.default else "off"
    return str(spec.default) if spec.default not in ("", ()) else "empty"


def parse_arguments(argv: Sequence[str] | None = None, *, prog: str | None = None) -> Config:
    """Read flags and the YAML file named by `--config` into a configuration.

    `Config.explicit` holds the names of all settings given as flags, and of those in the file that differ from
    their default (a file written by `resolved_yaml` lists every setting).

    Misuse of the command line (unknown or repeated flag, value of a wrong type) ends the process with status 2;
    a bad file or a missing required setting raises ConfigError. Rules between settings are checked by
    `megatron_logra.config_validation`, not here.
    """
    parser = build_parser(prog)
    arguments = _attach_negative_numbers(sys.argv[1:] if argv is None else argv)
    _refuse_repeated_flags(parser, arguments)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error("; ".join(_describe_unknown(unknown)))
    given = vars(namespace)
    path = given.pop("config", None)
    from_file = {} if path is None else read_yaml(path)
    defaults = {spec.name: spec.default for spec in iterate_settings()}
    explicit = set(given) | {name for name, value in from_file.items() if value != defaults[name]}
    return build_config(from_file | given, explicit=explicit)


def _attach_negative_numbers(arguments: Sequence[str]) -> list[str]:
    """Write `--flag -1e-4` as `--flag=-1e-4`: argparse would take `-1e-4` for a flag."""
    attached: list[str] = []
    for argument in arguments:
        is_number = re.fullmatch(r"-(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|-inf", argument) is not None
        if is_number and attached and attached[-1].startswith("--") and "=" not in attached[-1]:
            attached[-1] += "=" + argument
        else:
            attached.append(argument)
    return attached


def _refuse_repeated_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """A flag given twice would make the first one a setting without effect."""
    negations = {"--no-" + spec.flag[2:]: spec.flag for spec in iterate_settings() if spec.kind is bool}
    seen: dict[str, str] = {}
    for argument in arguments:
        if not argument.startswith("--") or argument == "--":
            continue
        written = argument.split("=", 1)[0]
        flag = negations.get(written, written)
        if flag in seen:
            both = written if written == seen[flag] else f"{seen[flag]} and {written}"
            parser.error(
                f"{both} given more than once: the first would have no effect; give it once, "
                "or put the value to be overridden in a --config file"
            )
        seen[flag] = written


def _describe_unknown(arguments: Sequence[str]) -> list[str]:
    """One sentence for each unknown flag, or for stray values if there is no unknown flag."""
    known = ["--config", "--help"]
    for spec in iterate_settings():
        known.append(spec.flag)
        if spec.kind is bool:
            known.append("--no-" + spec.flag[2:])
    flags = [argument.split("=", 1)[0] for argument in arguments if argument.startswith("-")]
    if not flags:
        return [f"unexpected value {argument!r} without a flag" for argument in arguments]
    return [f"unknown flag {flag}{closest(flag.replace('_', '-'), known)}" for flag in flags]


def read_yaml(path: str) -> dict[str, object]:
    """Read a file of settings into values by name, each of the type that its setting has.

    Raises ConfigError with all unknown or repeated keys and values of a wrong type, with their line numbers.
    """
    try:
        with open(path, encoding="utf-8") as file:
            loader = _Loader(file)
            root = loader.get_single_node()
    except OSError as error:
        raise ConfigError([f"--config {path}: cannot be read: {error.strerror}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"--config {path}: not YAML: {' '.join(str(error).split())}"]) from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError([f"--config {path}: expected 'key: value' lines, got {root.value!r}"])
    return _read_mapping(path, loader, root)


def _read_mapping(path: str, loader: _Loader, root: yaml.MappingNode) -> dict[str, object]:
    specs = {spec.name: spec for spec in iterate_settings()}
    sections = {section for section, _ in iterate_sections()}
    values: dict[str, object] = {}
    problems = []
    for key_node, value_node in root.value:
        key = str(key_node.value)
        where = f"{path}, line {key_node.start_mark.line + 1}: key {key!r}"
        name = key.replace("-", "_")
        if name not in specs:
            hint = "; settings are not grouped by section" if name in sections else closest(name, specs)
            problems.append(f"{where} is unknown{hint}")
        elif name in values:
            problems.append(f"{where} is given more than once: one of its values would have no effect")
        else:
            try:
                values[name] = loader.construct_object(value_node, deep=True)
                values[name] = specs[name].convert(values[name])
            except TypeError as error:
                problems.append(f"{where}: {error}")
            except yaml.YAMLError as error:
                problems.append(f"{where}: expected {specs[name].expected}: {' '.join(str(error).split())}")
    if problems:
        raise ConfigError(problems)
    return values


def resolved_yaml(config: Config) -> str:
    """Every setting as YAML, by section; `--config` reads it back to an equal configuration."""
    derived = {"global_batch_size": config.global_batch_size, "logra_master": config.logra_master}
    lines: list[str] = []
    values = config.flat()
    section = None
    for spec in iterate_settings():
        if spec.section != section:
            section = spec.section
            lines += ["", f"# {section}"] if lines else [f"# {section}"]
        value = values[spec.name]
        note = f"  # resolves to {derived[spec.name]}" if value is None and spec.name in derived else ""
        lines.append(f"{spec.name}: {_dump(value)}{note}")
    return "\n".join(lines) + "\n"


def _dump(value: object) -> str:
    """One value on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, width=sys.maxsize, allow_unicode=True)
    return text.removesuffix("...\n").strip()
