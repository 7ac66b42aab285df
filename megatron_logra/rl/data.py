"""Owns prompts: reading a data set, turning prompts into tokens, and the order in which training sees them.

A data set is JSON lines (``.jsonl``: one object a line) or parquet (``.parquet``), with a prompt column,
either a string or a list of chat messages ``{"role": ..., "content": ...}``, and an answer column. A key that
no column has literally may be a path of nested fields: ``reward_model.ground_truth`` reads verl's data sets.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

_LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PARQUET_SUFFIXES = (".parquet", ".pq")


@dataclass(frozen=True)
class Sample:
    """One question: its place in the data set, the chat, the answer, and the row's other columns.

    ``source`` says where it stands ("train.jsonl, line 17"), for messages to a person.
    """

    index: int
    messages: list[dict[str, str]]
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)
    source: str = ""


def load_dataset(
    path: str | Path,
    *,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    system_prompt: str | None = None,
) -> list[Sample]:
    """Read all samples of a ``.jsonl`` or ``.parquet`` file, in file order.

    A string prompt becomes one user message. ``system_prompt`` is put first, unless the prompt brings one. An
    answer that is no string is written as JSON (12, [1, 2]). Blank lines are skipped. Raises ``ValueError``
    that names the file and the line (row) for data that cannot be read, a missing key, an empty prompt, and
    an empty data set.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data file {path} does not exist")
    suffix = path.suffix.lower()
    if suffix in _LINE_SUFFIXES:
        rows = _read_json_lines(path)
    elif suffix in _PARQUET_SUFFIXES:
        rows = _read_parquet(path)
    else:
        known = ", ".join((*_LINE_SUFFIXES, *_PARQUET_SUFFIXES))
        raise ValueError(f"data file {path} ends in {suffix!r}: the kinds of file read are {known}")
    samples = []
    for index, (source, row) in enumerate(rows):
        messages = _read_messages(_look_up(row, prompt_key, source, "prompt_key"), source)
        if system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        answer = _look_up(row, answer_key, source, "answer_key")
        if not isinstance(answer, str):
            answer = json.dumps(answer, ensure_ascii=False, default=str)
        extra = {name: value for name, value in row.items() if name not in (prompt_key, answer_key)}
        samples.append(Sample(index, messages, answer, extra, source))
    if not samples:
        raise ValueError(f"data file {path} has no samples")
    return samples


def tokenize_prompts(
    samples: Sequence[Sample],
    tokenizer: Any,
    *,
    apply_chat_template: bool,
    max_prompt_tokens: int,
    max_new_tokens: int | None = None,
) -> list[list[int]]:
    """Turn every sample into prompt tokens; nothing is ever cut off.

    ``tokenizer`` is a ``transformers`` tokenizer. With the chat template the generation prompt is added and
    the template brings the special tokens; without it the contents of system and user messages are joined by
    a blank line and the tokenizer adds its own. ``max_new_tokens`` only explains the limit in the message
    (seq_length minus rollout_max_new_tokens). Raises ``ValueError`` when there is no template, when it
    refuses a sample, and for prompts that are empty or longer than ``max_prompt_tokens``, naming samples,
    their tokens, the limit and the fix.
    """
    if max_prompt_tokens < 1:
        raise ValueError(
            f"there is no room for prompts: the limit is {max_prompt_tokens} tokens"
            f"{_explain(max_prompt_tokens, max_new_tokens)}"
        )
    if apply_chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template: put a chat_template "
            "into its tokenizer_config.json, or give --no-apply-chat-template to send prompts as plain text"
        )
    if not samples:
        return []
    texts = [_render(sample, tokenizer, apply_chat_template) for sample in samples]
    encoded = tokenizer(texts, add_special_tokens=not apply_chat_template)["input_ids"]
    prompts = [list(ids) for ids in encoded]
    too_long = [(sample, ids) for sample, ids in zip(samples, prompts, strict=True) if len(ids) > max_prompt_tokens]
    if too_long:
        shown = "; ".join(
            f"sample {sample.index} ({sample.source}) has {len(ids)} tokens" for sample, ids in too_long[:5]
        )
        more = f"; and {len(too_long) - 5} more" if len(too_long) > 5 else ""
        raise ValueError(
            f"{len(too_long)} of {len(prompts)} prompts are too long: {shown}{more}. "
            f"The limit is {max_prompt_tokens}{_explain(max_prompt_tokens, max_new_tokens)}"
        )
    for sample, ids in zip(samples, prompts, strict=True):
        if not ids:
            raise ValueError(f"the prompt of sample {sample.index} ({sample.source}) gives no token")
    return prompts


class PromptStream:
    """Endless samples in shuffled epochs, the same on every rank and after a restart.

    Epoch ``e`` is a permutation seeded by (``seed``, ``e``). Each epoch holds every sample once; a batch that
    reaches the end of one epoch goes on with the next, so none is dropped. The state is the number of samples
    drawn.
    """

    def __init__(self, samples: Sequence[Sample], *, seed: int, prompts_per_step: int) -> None:
        if prompts_per_step < 1:
            raise ValueError(f"grpo_prompts_per_step is {prompts_per_step}: it must be at least 1")
        if prompts_per_step > len(samples):
            raise ValueError(
                f"grpo_prompts_per_step is {prompts_per_step} but the data set has {len(samples)} samples: "
                "a step would repeat prompts; lower --grpo-prompts-per-step or add data"
            )
        self._samples = list(samples)
        self._seed = seed
        self._prompts_per_step = prompts_per_step
        self._consumed = 0
        self._shuffled: tuple[int, list[int]] = (-1, [])
        self._fingerprint = _fingerprint(samples)

    @property
    def epoch(self) -> float:
        """Passes over the data so far, with fractions."""
        return self._consumed / len(self._samples)

    def next_batch(self) -> list[Sample]:
        """Draw the prompts of one step."""
        batch = []
        for _ in range(self._prompts_per_step):
            epoch, position = divmod(self._consumed, len(self._samples))
            batch.append(self._samples[self._order(epoch)[position]])
            self._consumed += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint keeps."""
        return {
            "consumed_samples": self._consumed,
            "seed": self._seed,
            "num_samples": len(self._samples),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken; the number of prompts a step may differ.

        Raises ``ValueError`` when the seed or the data are not those of the checkpoint.
        """
        current = self.state_dict()
        for name, meaning in (
            ("seed", "seed"),
            ("num_samples", "number of samples"),
            ("fingerprint", "content"),
        ):
            if state[name] != current[name]:
                raise ValueError(
                    f"the checkpoint has another {meaning} of the data ({state[name]}, now {current[name]}): "
                    "continue with the same --train-data and --seed, or start a new run"
                )
        self._consumed = int(state["consumed_samples"])

    def _order(self, epoch: int) -> list[int]:
        """Give the permutation of an epoch, kept until another is asked for."""
        if self._shuffled[0] != epoch:
            seed = int.from_bytes(blake2b(f"{self._seed}:{epoch}".encode(), digest_size=8).digest(), "little")
            order = list(range(len(self._samples)))
            random.Random(seed).shuffle(order)
            self._shuffled = (epoch, order)
        return self._shuffled[1]


def _read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give (source, object) for every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            source = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise ValueError(f"{source} is not UTF-8 text: {error}") from error
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{source} is not JSON: {error.msg} at column {error.colno}; "
                    "one JSON object is expected on every line"
                ) from error
            if not text:
                continue
            if not isinstance(row, dict):
                raise ValueError(f"{source} is a JSON {type(row).__name__}: one JSON object is expected on every line")
            yield source, row


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give (source, row) for every row; rows are counted from 0, as parquet readers do."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error


def _look_up(row: dict[str, Any], key: str, source: str, flag: str) -> Any:
    """Read a column, or a nested field by its dotted path."""
    value: Any = row.get(key)
    if key not in row:
        value = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        raise ValueError(f"{source} has no {key!r} ({flag}); it has {', '.join(map(repr, sorted(row)))}")
    return value


def _read_messages(prompt: Any, source: str) -> list[dict[str, str]]:
    """Turn a prompt into chat messages with text in them."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{source}: the prompt must be a text or a non-empty list of messages, not {prompt!r:.80}")
    messages = []
    for message in prompt:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"{source}: a message must be {{'role': text, 'content': text}}, not {message!r:.80}")
        messages.append({"role": role, "content": content})
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{source}: the prompt is empty")
    return messages


def _render(sample: Sample, tokenizer: Any, apply_chat_template: bool) -> str:
    """Write a sample as the text the model continues."""
    if not apply_chat_template:
        roles = {message["role"] for message in sample.messages} - {"system", "user"}
        if roles:
            raise ValueError(
                f"sample {sample.index} ({sample.source}) has messages of {', '.join(sorted(roles))}: "
                "only a chat template can write them; drop --no-apply-chat-template"
            )
        return "\n\n".join(message["content"] for message in sample.messages)
    try:
        return str(tokenizer.apply_chat_template(sample.messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # templates are programs: they refuse roles by raising what they like
        raise ValueError(f"the chat template refuses sample {sample.index} ({sample.source}): {error}") from error


def _explain(max_prompt_tokens: int, max_new_tokens: int | None) -> str:
    """Show where the limit comes from, and what to do."""
    if max_new_tokens is None:
        return "; raise --seq-length or remove the samples"
    return (
        f" = seq_length {max_prompt_tokens + max_new_tokens} - rollout_max_new_tokens {max_new_tokens}; "
        "raise --seq-length, lower --rollout-max-new-tokens or remove the samples"
    )


def _fingerprint(samples: Sequence[Sample]) -> str:
    """Hash what training reads of the samples."""
    digest = blake2b(digest_size=16)
    for sample in samples:
        digest.update(json.dumps([sample.messages, sample.answer]).encode())
    return digest.hexdigest()
