"""Owns the addition questions of the quick start: train and held-out files that share no question.

One JSON line a question: ``{"prompt": "What is 17 + 68? ...", "answer": "85", "a": 17, "b": 68}``. ``a + b``
and ``b + a`` count as one question, within a file and between files. The same arguments write the same bytes.

    python -m megatron_logra.rl.arithmetic --train-data train.jsonl --eval-data heldout.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

DEFAULT_TEMPLATE = "What is {a} + {b}? Answer with just the number."


def write_addition_questions(
    path: str | Path,
    *,
    count: int,
    digits: int = 2,
    seed: int = 0,
    template: str = DEFAULT_TEMPLATE,
    exclude: Iterable[tuple[int, int]] = (),
) -> list[tuple[int, int]]:
    """Write ``count`` different additions of two ``digits``-digit numbers and give their pairs (a, b).

    ``template`` holds ``{a}`` and ``{b}``. No question of ``exclude``, in either order, is written. Raises
    ``ValueError`` when there are not that many.
    """
    if digits < 1 or count < 1:
        raise ValueError(f"digits is {digits} and count is {count}: both must be at least 1")
    if "{a}" not in template or "{b}" not in template:
        raise ValueError(f"the template {template!r} must hold {{a}} and {{b}}")
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    used = {(min(a, b), max(a, b)) for a, b in exclude if low <= min(a, b) and max(a, b) <= high}
    numbers = high - low + 1
    available = numbers * (numbers + 1) // 2 - len(used)
    if count > available:
        raise ValueError(
            f"count is {count} but there are {available} additions of {digits}-digit numbers: "
            f"{numbers} * {numbers + 1} / 2 - {len(used)} excluded = {available}; lower count or raise digits"
        )
    generator = random.Random(seed)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        a, b = generator.randint(low, high), generator.randint(low, high)
        if (min(a, b), max(a, b)) not in used:
            used.add((min(a, b), max(a, b)))
            pairs.append((a, b))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for a, b in pairs:
            prompt = template.replace("{a}", str(a)).replace("{b}", str(b))
            file.write(json.dumps({"prompt": prompt, "answer": str(a + b), "a": a, "b": b}) + "\n")
    return pairs


def main(argv: Sequence[str] | None = None) -> None:
    """Write a held-out file and a training file that does not touch it."""
    parser = argparse.ArgumentParser(prog="python -m megatron_logra.rl.arithmetic", description=main.__doc__)
    parser.add_argument("--train-data", required=True, help="training file to write (.jsonl)")
    parser.add_argument("--eval-data", required=True, help="held-out file to write (.jsonl)")
    parser.add_argument("--train-count", type=int, default=2000, help="training questions (default %(default)s)")
    parser.add_argument("--eval-count", type=int, default=200, help="held-out questions (default %(default)s)")
    parser.add_argument("--digits", type=int, default=2, help="digits of each number (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--template", default=DEFAULT_TEMPLATE, help="question with {a} and {b} (default: %(default)s)")
    options = parser.parse_args(argv)
    common = {"digits": options.digits, "template": options.template}
    try:
        held_out = write_addition_questions(options.eval_data, count=options.eval_count, seed=options.seed, **common)
        write_addition_questions(
            options.train_data, count=options.train_count, seed=options.seed + 1, exclude=held_out, **common
        )
    except ValueError as error:
        parser.error(str(error))
    print(f"{options.train_data}: {options.train_count} questions; {options.eval_data}: {len(held_out)} held out")


if __name__ == "__main__":
    main()
