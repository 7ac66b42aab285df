"""The one module that touches Megatron-Bridge: its maps of weights and factors, and the comparison of ours with them.

Bridge (optional) says how each Megatron parameter is made of Hugging Face tensors. It cuts a tensor on tensor-parallel
rank 0 and scatters the parts. Here it runs without ranks: it is told that it is rank 0 of `tp_size`, and the parts are
kept instead of sent. Its row map is read off tensors whose rows are numbered, so it holds for weights and factors
alike, whichever of Bridge's classes makes the map.

    compare_with_bridge           a family that both know: all shards bit for bit, and the rows of all factors
    mcore.bridge_family           a family that our table lacks

Shapes: weight `[O, I]`, factor `[O, R]`, bias `[O]`; a shard has the rows (and columns) of one rank.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_logra.hf.assemble import assemble_local
from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.rows import (
    ParameterEntry,
    RowSlice,
    local_columns,
    local_rows,
    local_shape,
    padded_vocab_size,
    validate_layout,
)
from megatron_logra.hf.rules import Parallel
from megatron_logra.hf.safetensors_io import HFReader
from megatron_logra.hf.table import parameter_table
from megatron_logra.mcore.cpu import install_cpu_support

_INSTALL = (
    "install it with `pip install 'megatron_logra[bridge]'` and `pip install --no-deps megatron-bridge==0.6.2` (its "
    "pins exclude the transformers that is needed here)"
)
# Bridge builds Gemma's norms of the two branches into its linears; ours are modules of their own.
_NAMES_IN_BRIDGE = {
    "post_self_attn_layernorm.weight": "self_attention.linear_proj.post_layernorm.weight",
    "post_mlp_layernorm.weight": "mlp.linear_fc2.post_layernorm.weight",
}


def is_installed() -> bool:
    """Whether Megatron-Bridge can be found."""
    return importlib.util.find_spec("megatron.bridge") is not None


def _load_bridge() -> ModuleType:
    """`megatron.bridge`, imported quietly; ValueError with what to do if it cannot be."""
    if "megatron.bridge" in sys.modules:
        return sys.modules["megatron.bridge"]
    if not is_installed():
        raise ValueError(f"Megatron-Bridge, which knows more families, is not installed; {_INSTALL}")
    try:
        with _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            install_cpu_support()
            # Modules of Megatron-Core that take a stand-in for Transformer Engine if they are imported beside one.
            importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
            importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
            with _stand_ins():
                return importlib.import_module("megatron.bridge")
    except ImportError as error:
        raise ValueError(f"Megatron-Bridge cannot be imported: {error}; {_INSTALL}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Neither printing nor logging: Bridge reports a traceback for every optional package that it does not find."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """What Bridge imports, is missing here and is needed for other models only; gone afterwards."""
    engine, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    ops, masks = _AnyName("transformer_engine.pytorch.ops"), _AnyName("transformers.modeling_attn_mask_utils")
    vars(engine).update(__version__="2.0.0", pytorch=pytorch)
    vars(pytorch).update(ops=ops)
    added = [] if _exists(engine.__name__) else [engine, pytorch, ops]
    added += [] if _exists(masks.__name__) else [masks]
    sys.modules.update({module.__name__: module for module in added})
    try:
        yield
    finally:
        for module in added:
            del sys.modules[module.__name__]


def _exists(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


class _AnyName(ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


class BridgeMap:
    """Bridge's map between the Megatron parameters of one model and its Hugging Face tensors.

    Parameters are named as in `hf.table`, with global layer and expert numbers. No ranks and no collectives.

    Attributes:
        config: the Hugging Face configuration as transformers reads it, defaults included.
        provider: Megatron's configuration as Bridge makes it.
    """

    def __init__(self, folder: str | Path) -> None:
        """ValueError if Bridge is not installed or does not know the model of this folder."""
        bridge = _load_bridge()
        from transformers import AutoConfig

        try:
            with _quiet():
                self.config = AutoConfig.from_pretrained(folder)
                auto = bridge.AutoBridge.from_hf_config(self.config)
                self.provider = auto.to_megatron_provider(load_weights=False)
                self._bridge = auto._model_bridge
                self._registry = self._bridge.mapping_registry()
        except Exception as error:  # a foreign config.json makes its readers fail in all sorts of ways
            reason = next((line.strip(" ✗") for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ValueError(f"{folder}: Megatron-Bridge cannot read this model: {reason}") from error
        self._mappings = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
        # What Bridge leaves to be filled in when a model is built.
        heads = self.provider.num_attention_heads
        self.provider.num_query_groups = self.provider.num_query_groups or heads
        self.provider.kv_channels = self.provider.kv_channels or self.provider.hidden_size // heads

    @property
    def plain_provider(self) -> Any:
        """Megatron's configuration as Bridge makes it of nothing but the number and size of layers and heads."""
        names = ("num_layers", "hidden_size", "num_attention_heads")
        module = importlib.import_module("megatron.bridge.models.gpt_provider")
        return module.GPTModelProvider(**{name: getattr(self.provider, name) for name in names})

    @property
    def changes_values(self) -> bool:
        """Whether Bridge changes weights when it reads them, beyond moving rows and columns."""
        base = importlib.import_module("megatron.bridge.models.conversion.model_bridge").MegatronModelBridge
        return type(self._bridge).maybe_modify_loaded_hf_weight is not base.maybe_modify_loaded_hf_weight

    def hf_names(self, megatron_name: str) -> tuple[str, ...]:
        """Hugging Face tensors of a parameter, in Bridge's order. ValueError if it has no map for it."""
        names = self._find(megatron_name).hf_param
        return (names,) if isinstance(names, str) else tuple(names.values())

    def to_megatron(
        self, megatron_name: str, weights: Mapping[str, Tensor], parallel: Parallel, tp_size: int
    ) -> list[Tensor]:
        """Shards of all ranks of the tensors in `weights` (by Hugging Face name): weights, biases or factors."""
        mapping = self._find(megatron_name)
        names = mapping.hf_param
        given = weights[names] if isinstance(names, str) else {key: weights[name] for key, name in names.items()}
        parts = list(weights.values())
        shape = _shard_shape(sum(part.shape[0] for part in parts), parts[0].shape[1:], parallel, tp_size)
        module = self._module(megatron_name, parts[0].new_empty(shape), parallel)
        with self._without_ranks(tp_size):
            shards = mapping.hf_to_megatron(given, module)
        return list(shards) if isinstance(shards, list) else [shards] * tp_size

    def to_hf(self, megatron_name: str, shards: Sequence[Tensor], parallel: Parallel) -> dict[str, Tensor]:
        """Whole tensors by Hugging Face name from the shards of all ranks, in rank order."""
        module = self._module(megatron_name, shards[0], parallel)
        with self._without_ranks(len(shards), shards):
            found: dict[str, Tensor] = self._find(megatron_name).megatron_to_hf(shards[0], module)
        return found

    def row_slices(
        self, megatron_name: str, hf_rows: Mapping[str, int], parallel: Parallel, tp_size: int
    ) -> list[tuple[RowSlice, ...]]:
        """Where the rows of each rank's parameter come from, as `hf.rows.local_rows` says it: for weights and factors.

        Args:
            hf_rows: number of rows of each Hugging Face tensor of the parameter; together they divide by `tp_size`.

        Raises:
            ValueError: Bridge does more to the tensors than moving their rows.
        """
        first, numbered = 1, {}
        for name, rows in hf_rows.items():
            number_O = torch.arange(first, first + rows, dtype=torch.float64)
            # A row-parallel parameter is cut by columns: each rank gets one.
            numbered[name] = number_O[:, None].repeat(1, tp_size if parallel == "row" else 1)
            first += rows
        shards = self.to_megatron(megatron_name, numbered, parallel, tp_size)
        numbers = [shard.reshape(shard.shape[0], -1)[:, 0] for shard in shards]
        whole = torch.cat(numbers) if parallel in ("column", "vocab") else numbers[0]
        if not torch.equal(whole.sort().values, torch.arange(1, first, dtype=torch.float64)):
            raise ValueError(f"Megatron-Bridge does more to {megatron_name} than moving rows of {', '.join(hf_rows)}")
        return [_slices_of(number.long(), hf_rows) for number in numbers]

    def _find(self, megatron_name: str) -> Any:
        for ours, theirs in _NAMES_IN_BRIDGE.items():
            megatron_name = megatron_name.replace(ours, theirs)
        mapping = self._registry.megatron_to_hf_lookup(megatron_name)
        if mapping is None:
            raise ValueError(f"Megatron-Bridge has no map for {megatron_name}")
        return mapping

    def _module(self, megatron_name: str, parameter: Tensor, parallel: Parallel) -> nn.Module:
        """What Bridge reads of the module that owns a parameter: how it is cut, and a configuration."""
        module: Any = nn.Module()
        module.register_parameter(megatron_name.rsplit(".", 1)[1], nn.Parameter(parameter, requires_grad=False))
        module.tensor_model_parallel = parallel != "replicated"
        module.partition_dim = 1 if parallel == "row" else 0
        config = module.config = copy.copy(self.provider)
        if parameter.dim() == 2:
            # Bridge takes rows of another width than the model's for the scales of quantised weights.
            config.hidden_size = parameter.shape[1]
        return module

    @contextlib.contextmanager
    def _without_ranks(self, tp_size: int, shards: Sequence[Tensor] = ()) -> Iterator[None]:
        """Bridge as rank 0 of `tp_size`: scattering gives all parts, gathering gives `shards`."""
        base = self._mappings.MegatronParamMapping
        ours = {
            "tp_rank": property(lambda _: 0),
            "tp_size": property(lambda _: tp_size),
            "ep_size": property(lambda _: 1),
            "pp_size": property(lambda _: 1),
            "scatter_to_tp_ranks": lambda _, parts, *__, **___: list(parts),
            "broadcast_tensor_to_tp_ranks": lambda _, tensor, *__, **___: tensor,
            "gather_from_tp_ranks": lambda *_: list(shards),
        }
        theirs = {name: vars(base)[name] for name in ours}
        try:
            for name, value in ours.items():
                setattr(base, name, value)
            yield
        finally:
            for name, value in theirs.items():
                setattr(base, name, value)


@dataclass(frozen=True)
class Comparison:
    """What was compared with Bridge, and a line for each difference."""

    num_shards: int
    num_factor_maps: int
    differences: tuple[str, ...]


def compare_with_bridge(
    folder: str | Path, shape: ModelShape, *, tp_size: int, pp_size: int = 1, make_vocab_size_divisible_by: int = 128
) -> Comparison:
    """Every shard of every rank as our table assembles it against Bridge's, bit for bit, and the rows of every factor.

    Raises:
        ValueError: Bridge is missing or does not know the family, or the model cannot be split this way.
    """
    reader, bridge = HFReader(folder), BridgeMap(folder)
    padded = padded_vocab_size(shape.vocab_size, make_vocab_size_divisible_by, tp_size)
    validate_layout(shape, tp_size=tp_size, pp_size=pp_size)
    num_shards, num_maps, differences = 0, 0, list[str]()
    per_stage = shape.num_layers // pp_size
    for stage in range(pp_size):
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        entries = parameter_table(
            shape,
            layers=layers,
            local_layer_offset=layers.start,  # Bridge numbers the layers of all stages
            embedding=stage == 0,
            final=stage == pp_size - 1,
        )
        for entry in entries:
            try:
                shards = _bridge_shards(bridge, entry, reader, tp_size, padded)
                for rank, theirs in enumerate(shards):
                    num_shards += 1
                    if not _same_bits(_our_shard(entry, shape, reader, rank, tp_size, padded), theirs):
                        differences.append(f"{entry.megatron_name} of stage {stage}, rank {rank} of {tp_size}")
                if entry.group is not None:
                    num_maps += tp_size
                    differences += row_differences(bridge, entry, shape, tp_size)
            except ValueError as error:
                differences.append(str(error))
    return Comparison(num_shards, num_maps, tuple(differences))


def row_differences(bridge: BridgeMap, entry: ParameterEntry, shape: ModelShape, tp_size: int) -> list[str]:
    """A line for each rank on which the rows of a parameter come from elsewhere for Bridge than by our map."""
    hf_rows = {name: hf_shape[0] for name, hf_shape in entry.hf_shapes.items()}
    maps = bridge.row_slices(entry.megatron_name, hf_rows, entry.parallel, tp_size)
    return [
        f"rows of {entry.megatron_name} on rank {rank} of {tp_size} come from elsewhere for Megatron-Bridge"
        for rank, theirs in enumerate(maps)
        if _expand(local_rows(entry, shape, rank, tp_size, sum(hf_rows.values()))) != _expand(theirs)
    ]


def _our_shard(
    entry: ParameterEntry, shape: ModelShape, reader: HFReader, rank: int, tp_size: int, padded_vocab: int
) -> Tensor:
    rows, columns = local_rows(entry, shape, rank, tp_size, padded_vocab), local_columns(entry, rank, tp_size)
    # A shard that is all padding has nothing to take its type from.
    dtype = None if rows else reader.dtype(entry.hf_names[0])
    return assemble_local(entry, rows, columns, reader.read, local_shape(entry, tp_size, padded_vocab), dtype)


def _bridge_shards(
    bridge: BridgeMap, entry: ParameterEntry, reader: HFReader, tp_size: int, padded_vocab: int
) -> list[Tensor]:
    """Bridge's shards; a vocabulary is padded before, since Bridge pads it only where it is divided."""
    # The second copy of tied embeddings has the embedding's map.
    name = entry.megatron_name if entry.exported else "embedding.word_embeddings.weight"
    weights = {}
    for hf_name in bridge.hf_names(name):
        weight = reader.read(hf_name)
        missing = padded_vocab - weight.shape[0] if entry.parallel == "vocab" else 0
        weights[hf_name] = torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]) if missing else weight
    return bridge.to_megatron(name, weights, entry.parallel, tp_size)


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.to(ours.device).contiguous().view(torch.uint8))


def _shard_shape(rows: int, width: Sequence[int], parallel: Parallel, tp_size: int) -> tuple[int, ...]:
    if parallel == "row" and width:
        return (rows, width[0] // tp_size)
    return (rows // tp_size if parallel in ("column", "vocab") else rows, *width)


def _slices_of(numbers: Tensor, hf_rows: Mapping[str, int]) -> tuple[RowSlice, ...]:
    """Runs of consecutive rows of one tensor; `numbers[i]` is the row of local row `i`, counted on over all tensors."""
    names = list(hf_rows)
    firsts = torch.tensor([0, *hf_rows.values()]).cumsum(0)[:-1] + 1
    source = torch.bucketize(numbers, firsts, right=True) - 1
    ends = ((numbers.diff() != 1) | (source.diff() != 0)).nonzero()[:, 0] + 1
    bounds = [0, *ends.tolist(), len(numbers)]
    slices = []
    for begin, end in pairwise(bounds):
        which = int(source[begin])
        first = int(numbers[begin] - firsts[which])
        slices.append(RowSlice(names[which], slice(first, first + end - begin), slice(begin, end)))
    return tuple(slices)


def _expand(slices: Sequence[RowSlice]) -> list[tuple[str, int]]:
    """(Hugging Face tensor, its row) of each local row, in ascending order."""
    return [(piece.hf_name, row) for piece in slices for row in range(piece.hf_rows.start, piece.hf_rows.stop)]
