"""This rank's part of a Megatron-Core `GPTModel`: one module, or several chunks under the interleaved schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_logra.hf.config import ModelShape
from megatron_logra.mcore.rotary import LayerRotaryEmbedding, compute_rotary_frequencies
from megatron_logra.mcore.spec import LayerModules, build_layer_spec
from megatron_logra.mcore.transformer_config import chunk_layers
from megatron_logra.parallel.groups import ParallelGroups

_LAYERS = "decoder.layers."


class StageModel:
    """The chunks of a pipeline rank, with one name for each parameter.

    A name is the one in its chunk, except that layers are numbered on from chunk to chunk (`chunk_layers`). Only the
    first chunk can have an embedding, only the last an output layer, so no other names meet.
    """

    def __init__(self, chunks: list[GPTModel], config: TransformerConfig, layers: list[list[tuple[int, int]]]) -> None:
        self.chunks = chunks
        self.config = config
        self._parameters: dict[str, nn.Parameter] = {}
        self._modules: dict[str, nn.Module] = {}
        for chunk, held in zip(chunks, layers, strict=True):
            offset = held[0][0] if held else 0
            for name, parameter in chunk.named_parameters():
                self._parameters[_renumber(name, offset)] = parameter
            for name, module in chunk.named_modules():
                self._modules[_renumber(name, offset)] = module

    @property
    def last(self) -> GPTModel:
        """The chunk that runs last on this rank; on the last pipeline rank it holds the output layer."""
        return self.chunks[-1]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of this rank, tied ones once."""
        yield from self._parameters.items()

    def get_parameter(self, name: str) -> nn.Parameter:
        """The parameter of this name."""
        return self._parameters[name]

    def get_submodule(self, name: str) -> nn.Module:
        """The module of this name (below a chunk)."""
        return self._modules[name]

    def modules(self) -> Iterator[nn.Module]:
        """All modules of all chunks."""
        for chunk in self.chunks:
            yield from chunk.modules()


def _renumber(name: str, offset: int) -> str:
    if offset == 0 or not name.startswith(_LAYERS):
        return name
    number, dot, rest = name.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{int(number) + offset}{dot}{rest}"


def build_model(
    shape: ModelShape,
    config: TransformerConfig,
    groups: ParallelGroups,
    modules: LayerModules,
    *,
    max_sequence_length: int,
    padded_vocab_size: int,
) -> StageModel:
    """This rank's model with uninitialised weights; the embedding's output is the anchor of backward.

    All parameters are frozen: targets change through their sketches, everything else stays as loaded. Without an
    anchor nothing would ask for a gradient, so the embedding's output is made to require one.
    """
    layer_spec = build_layer_spec(config, modules)
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    layers = chunk_layers(config, groups.pp_rank)
    chunks = []
    for number, held in enumerate(layers):
        model = GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=[layer_spec] * len(held), layer_norm=modules.norm),
            vocab_size=padded_vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=groups.is_first_stage and number == 0,
            post_process=groups.is_last_stage and number == len(layers) - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tie_embeddings,
            position_embedding_type="rope",
            rotary_base=shape.rotary_base,  # type: ignore[arg-type]
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            vp_stage=number if interleaved else None,
        )
        # Angles are computed in the dtype of the frequencies: fp32, or wider for a wider model.
        frequencies = compute_rotary_frequencies(shape, device=model.rotary_pos_emb.inv_freq.device)
        wide = torch.promote_types(config.params_dtype, torch.float32)
        model.rotary_pos_emb = LayerRotaryEmbedding(frequencies.to(wide), model.rotary_pos_emb)
        model.requires_grad_(False)
        if model.pre_process:
            if shape.is_gemma:
                model.embedding.register_forward_hook(_scale_embedding)
            model.embedding.register_forward_hook(_anchor_gradient)
        chunks.append(model)
    return StageModel(chunks, config, layers)


def _scale_embedding(_module: object, _inputs: object, output: Tensor) -> Tensor:
    """Gemma's embeddings times sqrt(hidden_size), which transformers rounds to fp32 and then to the model's dtype."""
    scale = torch.tensor(math.sqrt(output.shape[-1]), dtype=torch.float32, device=output.device)
    return output * scale.to(output.dtype)


def _anchor_gradient(_module: object, _inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
