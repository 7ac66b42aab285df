"""The inputs that whole runs share."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_model, save_tiny_tokenizer


def make_inputs(folder: Path, family: str) -> Path:
    """Fill `folder` with a tiny chat model (`model`), its questions (`train.jsonl`) and a reward (`reward.py`)."""
    save_tiny_model(folder / "model", family, vocab_size=260, max_position_embeddings=256, tie_word_embeddings=True)
    save_tiny_tokenizer(folder / "model")
    rng = random.Random(0)
    lines = [json.dumps({"prompt": f"{rng.randint(1, 99)}?", "answer": str(rng.randint(0, 9))}) for _ in range(24)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    # Random text rarely holds the right number: reward the length, so that groups have something to tell apart.
    (folder / "reward.py").write_text(
        "def count_letters(response, sample):\n    return sum(character.isalpha() for character in response) / 10\n"
    )
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make_inputs` makes for a Llama."""
    return make_inputs(tmp_path_factory.mktemp("inputs"), "llama")
