#!/usr/bin/env python
"""Makes the inputs of the stability experiment: a tiny policy that reverses numbers but slips, and its questions.

    52731=  ->  13725

A random Llama (2 layers, hidden 64, one token a character) learns by supervised training from answers of which each
digit is, with probability 0.15, a random one. It comes to know the reversal nearly perfectly (greedy) and to slip as
often as its teacher (sampled): reinforcement learning can gain what the slips cost, and has something to lose.

Beside the Hugging Face folder `model` it writes the questions, `train.jsonl`, and `weight_rms`: the root mean square of
the weights of attention and MLP, which is what turns a relative step into a learning rate of Adam.

    python examples/kl_stability/make_model.py --output runs/kl_stability/inputs
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

DIGITS, ASK, END, PAD = "123456789", "=", "<end>", "<pad>"
NUM_DIGITS = 5
SLIP_PROBABILITY = 0.15
BATCH_SIZE = 128
LEARNING_RATE = 3e-3
NUM_QUESTIONS = 4000


def write_questions(path: Path) -> None:
    """Write different numbers to reverse, with their answers. Without a zero: the reward compares by value."""
    generator = random.Random(0)
    numbers: dict[str, None] = {}
    while len(numbers) < NUM_QUESTIONS:
        numbers["".join(generator.choices(DIGITS, k=NUM_DIGITS))] = None
    lines = [json.dumps({"prompt": number + ASK, "answer": number[::-1]}) for number in numbers]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each digit, the equals sign, the end of an answer and padding."""
    vocabulary = {symbol: index for index, symbol in enumerate([*DIGITS, ASK, END, PAD])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A random Llama in fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def draw_examples(tokenizer: PreTrainedTokenizerFast, count: int, *, slip_probability: float) -> Tensor:
    """Token ids `[count, T]` of number, equals sign, reversed number with slips, and end."""
    number_BN = torch.randint(len(DIGITS), (count, NUM_DIGITS))
    slip_BN = torch.rand(count, NUM_DIGITS) < slip_probability
    answer_BN = torch.where(slip_BN, torch.randint(len(DIGITS), (count, NUM_DIGITS)), number_BN.flip(1))
    ask, end = (torch.full((count, 1), tokenizer.convert_tokens_to_ids(symbol)) for symbol in (ASK, END))
    return torch.cat([number_BN, ask, answer_BN, end], dim=1)


def compute_answer_nll(model: LlamaForCausalLM, ids_BT: Tensor) -> Tensor:
    """Negative log-probability of each answer token, `[B, NUM_DIGITS + 1]`."""
    logits_BTV = model(ids_BT).logits[:, NUM_DIGITS:-1]
    return cross_entropy(logits_BTV.transpose(1, 2), ids_BT[:, NUM_DIGITS + 1 :], reduction="none")


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_steps: int) -> float:
    """Train on answers with slips; return the mean probability that a sampled answer is right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(num_steps):
        loss = compute_answer_nll(model, draw_examples(tokenizer, BATCH_SIZE, slip_probability=SLIP_PROBABILITY)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        nll_BT = compute_answer_nll(model, draw_examples(tokenizer, 1000, slip_probability=0.0))
    return float((-nll_BT.sum(dim=1)).exp().mean())


def compute_weight_rms(model: LlamaForCausalLM) -> float:
    """Root mean square of the entries of the weights that LoGRA trains: `|W| / sqrt(number of entries)`."""
    weights = [weight for name, weight in model.named_parameters() if name.endswith("_proj.weight")]
    return float(torch.cat([weight.detach().double().flatten() for weight in weights]).square().mean().sqrt())


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder unless it is there; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for model/, train.jsonl and weight_rms")
    parser.add_argument("--steps", type=int, default=200, help="supervised training steps (default %(default)s)")
    options = parser.parse_args(argv)
    folder: Path = options.output / "model"
    if (folder / "model.safetensors").is_file():
        print(f"{folder} is there already")
        return 0
    started_s = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    write_questions(options.output / "train.jsonl")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    accuracy = train(model, tokenizer, options.steps)
    (options.output / "weight_rms").write_text(f"{compute_weight_rms(model):.6g}\n", encoding="utf-8")
    disable_progress_bar()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"{folder}: {accuracy:.1%} of sampled answers are right, made in {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
