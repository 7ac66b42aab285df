"""A model folder with a sentencepiece `tokenizer.model` works like one with a fast tokenizer."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path

import sentencepiece

from megatron_logra.arguments import parse_arguments
from megatron_logra.run import build_run
from megatron_logra.trainer import sample
from tests.distributed.ranks import run_ranks
from tests.end_to_end.test_run import arguments
from tests.tiny_models import save_tiny_model


def _sample(rank: int, world_size: int, argv: list[str]) -> list[tuple[list[int], list[int]]]:
    run = build_run(parse_arguments(argv))
    return [(response.prompt_ids, response.response_ids) for response in sample(run).responses]


def test_prompts_are_those_of_sentencepiece(inputs: Path, tmp_path: Path) -> None:
    folder, made, rng = tmp_path / "model", io.BytesIO(), random.Random(0)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"what is {rng.randint(1, 99)} plus {rng.randint(1, 99)}?" for _ in range(400)]),
        model_writer=made,
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        model_type="bpe",
        unk_id=0,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    save_tiny_model(folder, "llama", vocab_size=300)
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **tokens}))
    shutil.copy(inputs / "reward.py", tmp_path)
    questions = [f"what is {number} plus 30? Zürich" for number in range(8)]
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps({"prompt": question, "answer": "1"}) for question in questions)
    )
    argv = arguments(tmp_path, "--no-apply-chat-template")
    reference = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    known = {(1, *reference.encode(question)) for question in questions}
    (responses,) = run_ranks(1, _sample, argv)
    assert len(responses) == 16
    for prompt, response in responses:
        assert tuple(prompt) in known
        assert all(0 <= token < 300 for token in response)
