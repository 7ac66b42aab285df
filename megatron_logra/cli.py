"""Owns the console script `megatron-logra`: it finds the sub-command and hands the other arguments to its module.

Protocol: a sub-command is a module with `main(argv) -> int | None`. It is imported only when it is called, and it
must read its arguments before it imports torch, so that `--help` answers at once.
"""

import importlib
import sys
from collections.abc import Sequence

from megatron_logra.config_schema import ConfigError, closest

# name, module, what it does
SUBCOMMANDS = (("train", "megatron_logra.train", "train a policy with GRPO and LoGRA"),)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status, 2 for a wrong command line or configuration."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    modules = {name: module for name, module, _ in SUBCOMMANDS}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(format_usage())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in modules:
        print(f"megatron-logra: error: unknown sub-command {name!r}{closest(name, modules)}", file=sys.stderr)
        print(format_usage(), file=sys.stderr)
        return 2
    try:
        return importlib.import_module(modules[name]).main(rest) or 0
    except ConfigError as error:
        print(f"megatron-logra {name}: error: {error}", file=sys.stderr)
        return 2


def format_usage() -> str:
    """Every sub-command with its purpose."""
    width = max(len(name) for name, _, _ in SUBCOMMANDS)
    lines = [f"  {name:<{width}}  {purpose}" for name, _, purpose in SUBCOMMANDS]
    return "\n".join(
        ["usage: megatron-logra SUB-COMMAND [ARGUMENTS]", "", "sub-commands:", *lines, ""]
        + ["megatron-logra SUB-COMMAND --help lists the arguments of one."]
    )


if __name__ == "__main__":
    sys.exit(main())
