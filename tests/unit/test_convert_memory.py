"""Peak memory of a conversion, bounded by the kernel: a process that may take no more than three layers finishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]

# Run in an interpreter of its own, which converts a tiny model first: what libraries allocate at first use is then
# there. RLIMIT_DATA is the limit of private writable memory, of which /proc counts what is taken; safetensors maps its
# file privately, which counts although it takes no memory, so the limit is raised by the file's size.
MEASURE = """
import json, os, resource, sys, tempfile
from pathlib import Path
from megatron_logra.checkpoint.convert import convert_from_hf, convert_to_hf
from megatron_logra.checkpoint.placement import Layout

folder, allowances = Path(sys.argv[1]), [int(text) for text in sys.argv[2:]]

def from_hf(name, target):
    convert_from_hf(folder / name, target, Layout())

def to_hf(name, target):
    convert_to_hf(folder / ("megatron-" + name), folder / name, target)

def finishes(work, limit):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            taken = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
            limit += int(taken.split()[1]) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                work("large", Path(scratch) / "out")
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0

for name in ("small", "large"):
    from_hf(name, folder / ("megatron-" + name))
to_hf("small", folder / "warm")
mapped = (folder / "large" / "model.safetensors").stat().st_size
print(json.dumps({
    "from_hf": [finishes(from_hf, mapped + allowance) for allowance in allowances],
    "to_hf": [finishes(to_hf, allowance) for allowance in allowances],
}))
"""


def test_a_conversion_takes_less_than_three_layers_of_memory(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "small", "llama")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 10, "head_dim": 128}
    model = save_tiny_model(tmp_path / "large", "llama", **sizes)
    layer_bytes = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    assert sum(weight.nbytes for weight in model.parameters()) > 10 * layer_bytes > 90e6
    # The heap gives memory back at once, so that what is measured is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    # A twentieth of a layer is less than its largest weight: shows that the limit is one.
    allowances = (3 * layer_bytes, layer_bytes // 20)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), *map(str, allowances)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"from_hf": [True, False], "to_hf": [True, False]}, done.stderr
