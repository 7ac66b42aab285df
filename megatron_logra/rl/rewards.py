"""Owns the reward protocol, finding a reward function by name, and scoring responses without losing a step.

A reward is any callable ``reward(response: str, sample: Sample) -> float``, named on the command line as
``package.module:function`` or ``path/to/file.py:function``. One that raises or gives a value that is not
finite costs its own sample only: the failure is reported with the sample's place in the data, and the others
are kept.
"""

from __future__ import annotations

import decimal
import difflib
import importlib
import importlib.util
import math
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_logra.rl.data import Sample

RewardFunction = Callable[[str, Sample], float]

# A minus sign counts as a sign only where it cannot be a subtraction ("8-3" ends in 3, "= -3" in -3).
_NUMBER = re.compile(
    r"""(?:(?<![\w)])[-+])?
        (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)
        (?:[eE][-+]?[0-9]+)?""",
    re.VERBOSE,
)

MATH_TIMEOUT_S = 5
"""Seconds that reading or comparing one expression may take in ``math_verify_reward``."""


@dataclass(frozen=True)
class RewardFailure:
    """A response without a reward: ``position`` in the scored list, its sample, and what went wrong."""

    position: int
    sample_index: int
    source: str
    response: str
    message: str

    def __str__(self) -> str:
        shown = self.response if len(self.response) <= 200 else self.response[:200] + "..."
        return f"no reward for sample {self.sample_index} ({self.source}): {self.message}; response: {shown!r}"


def load_reward(name: str) -> RewardFunction:
    """Find the reward function ``module:function`` or ``file.py:function``.

    Raises ``ValueError`` that says which part failed: the form, the import (its own error is the cause), the
    name within the module, or a value that cannot be called.
    """
    module_name, separator, function_name = name.rpartition(":")
    if not separator or not module_name or not function_name:
        raise ValueError(f"reward {name!r} must read package.module:function or path/to/file.py:function")
    try:
        module = _import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"reward {name!r}: importing {module_name!r} failed with {type(error).__name__}: {error}; "
            "check the name and that the module can be found from the working directory or PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        close = difflib.get_close_matches(function_name, vars(module), n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise ValueError(f"reward {name!r}: {module_name!r} has no {function_name!r}{hint}")
    if not callable(function):
        raise ValueError(f"reward {name!r} is a {type(function).__name__}, not a function of (response, sample)")
    reward_function: RewardFunction = function
    return reward_function


def score_responses(
    reward_function: RewardFunction, pairs: Sequence[tuple[str, Sample]]
) -> tuple[list[float], list[RewardFailure]]:
    """Score (response text, sample) pairs: one float a pair, and the failures.

    A failed pair has 0.0 in the list and a ``RewardFailure`` with its ``position``; mark its response
    invalid.
    """
    rewards: list[float] = []
    failures: list[RewardFailure] = []
    for position, (response, sample) in enumerate(pairs):
        try:
            reward = float(reward_function(response, sample))
            message = "" if math.isfinite(reward) else f"the reward function returned {reward}"
        except Exception as error:  # somebody else's function: whatever it raises must not end the run
            reward, message = 0.0, f"the reward function raised {type(error).__name__}: {error}"
        rewards.append(0.0 if message else reward)
        if message:
            failures.append(RewardFailure(position, sample.index, sample.source, response, message))
    return rewards, failures


def exact_number(response: str, sample: Sample) -> float:
    """Give 1.0 when the last number in the response equals the answer, else 0.0.

    Numbers may have a sign, thousands separators, decimals and an exponent, and compare by value ("1,250.0"
    is 1250). The answer is the last number of ``sample.answer``, so worked answers ("... #### 72", as in
    GSM8K) will do. Raises ``ValueError`` when the answer has no number.
    """
    expected = _last_number(sample.answer)
    if expected is None:
        raise ValueError(f"the answer {sample.answer!r} has no number to compare with")
    found = _last_number(response)
    return float(found is not None and found == expected)


def math_verify_reward(response: str, sample: Sample) -> float:
    r"""Give 1.0 when the expression in the response is mathematically the answer (package ``math_verify``).

    LaTeX (a ``\boxed`` result first) and plain expressions are read from the response; the answer is one
    expression without the prose around it. In the main thread of a process, a forked rank included, each
    expression has ``MATH_TIMEOUT_S`` seconds, after which it counts as wrong. That limit is a SIGALRM, which
    other threads cannot have: there it is off, and the caller must bring its own. Raises ``ValueError`` when
    the answer cannot be read.
    """
    from math_verify import parse, verify

    timeout_s: Any = MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    answer = sample.answer.strip()
    delimited = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    expected = parse(answer if delimited else f"\\boxed{{{answer}}}", parsing_timeout=timeout_s)
    if not expected:
        raise ValueError(f"math_verify cannot read the answer {sample.answer!r}")
    found = parse(response, parsing_timeout=timeout_s)
    return float(bool(found) and verify(expected, found, timeout_seconds=timeout_s))


def _import_module(module_name: str) -> ModuleType:
    """Import by dotted name, or from a file when the name ends in ``.py``."""
    if not module_name.endswith(".py"):
        return importlib.import_module(module_name)
    path = Path(module_name)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {module_name}")
    spec = importlib.util.spec_from_file_location(f"_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look the module up by name
    spec.loader.exec_module(module)
    return module


def _last_number(text: str) -> decimal.Decimal | None:
    """Read the last number of a text, None when there is none."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not numbers:
        return None
    try:
        return decimal.Decimal(numbers[-1].replace(",", ""))
    except decimal.InvalidOperation:  # an exponent beyond what Decimal holds
        return None
