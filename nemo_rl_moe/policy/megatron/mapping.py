"""Which part of which Hugging Face tensor each local Megatron parameter holds.

The mapping is a list of pieces. A piece says that one rectangle of a Hugging Face tensor and one rectangle of a local
parameter are the same numbers; all splits (tensor, expert, pipeline, the interleaved query/key/value matrix, gate and
up in one matrix) are a matter of the two index tuples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nemo_rl_moe.policy.megatron.hf_files import Index, Spec
from nemo_rl_moe.policy.megatron.model_shape import ModelShape
from nemo_rl_moe.policy.megatron.parallel import ParallelLayout

_EMBEDDING, _HEAD, _FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))")
# Transformer Engine keeps a norm inside the matrix that follows it, under the second of two names.
_COPIED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


class Piece(NamedTuple):
    """One rectangle that a Hugging Face tensor and a local parameter have in common.

    Attributes:
        name: Hugging Face name, experts one by one.
        hf_index: where in the full Hugging Face tensor.
        parameter: the local parameter.
        index: where in the local parameter; the rectangle has the same shape on both sides.
        owned: whether this rank is the one, of all that hold these numbers, that exports them.
    """

    name: str
    hf_index: Index
    parameter: torch.nn.Parameter
    index: Index  # type: ignore[assignment]
    owned: bool = True


def hf_tensor_specs(shape: ModelShape, dtype: torch.dtype) -> list[Spec]:
    """(name, dtype, full shape) of every tensor of the checkpoint, in checkpoint order."""
    return [(name, dtype, size) for name, size in _named_shapes(shape)]


def map_parameters(model: Sequence[Any], layout: ParallelLayout) -> list[Piece]:
    """All pieces of this rank, worked out once for each model.

    Parameters are held, not their memory, so the list stays right when the optimizer moves that.
    """
    first = unwrap(model[0])
    if getattr(first, "hf_pieces", None) is None:
        first.hf_pieces = _map_parameters(model, layout)
    return first.hf_pieces


def _map_parameters(model: Sequence[Any], layout: ParallelLayout) -> list[Piece]:
    found: list[tuple[str, Rectangle, torch.nn.Parameter]] = []
    for chunk in map(unwrap, model):
        split = _Splitter(chunk.hf_shape, layout)
        # Megatron counts layers from 1 over all pipeline stages.
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            kind, rectangles = split.rectangles(name, numbers)
            found += [(kind, rectangle, parameter) for rectangle in rectangles]
    owned = _choose_writers([(kind, parameter[index].numel()) for kind, (_, _, index), parameter in found], layout)
    return [
        Piece(name, hf_index, parameter, index, mine)
        for (_, (name, hf_index, index), parameter), mine in zip(found, owned, strict=True)
    ]


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _choose_writers(pieces: Sequence[tuple[str, int]], layout: ParallelLayout) -> list[bool]:
    """For each (kind, elements): whether this rank is the one, of those that hold the same numbers, that exports them.

    Largest first, to the copy that has fewest elements so far. Copies hold the same pieces in the same order, so all of
    them choose alike without a word.
    """
    dense = (layout.dp_size * layout.cp_size, layout.dp_rank * layout.cp_size + layout.cp_rank)
    expert = (layout.edp_size, layout.edp_rank)
    load = {dense: [0] * dense[0], expert: [0] * expert[0]}
    mine = [False] * len(pieces)
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i][1]):
        kind, size = pieces[i]
        if kind == "duplicate":
            continue
        copies = expert if kind == "expert" else dense
        writer = load[copies].index(min(load[copies]))
        load[copies][writer] += size
        # Norms and routers are the same on all tensor-parallel ranks too; they are small, so the first writes them.
        mine[i] = writer == copies[1] and (kind != "copied" or layout.tp_rank == 0)
    return mine


Rectangle = tuple[str, Index, Index]


class _Splitter:
    """Index pairs of one rank's parameters, by parameter name."""

    def __init__(self, shape: ModelShape, layout: ParallelLayout) -> None:
        self._shape, self._layout = shape, layout
        self._all = slice(None)

    def rectangles(self, name: str, layer_numbers: Sequence[int]) -> tuple[str, list[Rectangle]]:
        """(kind, rectangles); kind says over which ranks the parameter is copied (see `_choose_writers`).

        Raises:
            ValueError: a parameter that is not in the mapping.
        """
        layer = _LAYER.fullmatch(name)
        if layer:
            return self._layer(f"model.layers.{layer_numbers[int(layer[1])]}.", layer[2])
        if name == "decoder.final_layernorm.weight":
            return "copied", [self._whole(_FINAL_NORM, 1)]
        if name == "embedding.word_embeddings.weight":
            return "split", self._vocabulary(_EMBEDDING)
        if name == "output_layer.weight":
            # A tied head on a later pipeline stage is a copy of the embedding, which the first stage exports.
            tied = self._shape.tie_word_embeddings
            return ("duplicate" if tied else "split"), self._vocabulary(_EMBEDDING if tied else _HEAD)
        raise ValueError(f"parameter {name} has no Hugging Face name")

    def _layer(self, prefix: str, name: str) -> tuple[str, list[Rectangle]]:
        shape, layout = self._shape, self._layout
        if name in _COPIED:
            return "copied", [self._whole(prefix + _COPIED[name], 2 if name == "mlp.router.weight" else 1)]
        if name == "self_attention.linear_qkv.weight":
            return "split", self._query_key_value(prefix + "self_attn.")
        if name == "self_attention.linear_proj.weight":
            width = shape.num_heads * shape.head_dim
            return "split", [self._columns(prefix + "self_attn.o_proj.weight", width, layout.tp_size, layout.tp_rank)]
        if name in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
            return "split", self._feed_forward(
                prefix + "mlp.", name[len("mlp.linear_fc")], shape.ffn_size, layout.tp_size, layout.tp_rank
            )
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            raise ValueError(f"parameter of layer {prefix} {name} has no Hugging Face name")
        local, which = (expert[1], expert[2]) if expert[2] else (expert[4], expert[3])
        number = layout.ep_rank * (shape.num_experts // layout.ep_size) + int(local)
        return "expert", self._feed_forward(
            f"{prefix}mlp.experts.{number}.", which, shape.moe_ffn_size, layout.etp_size, layout.etp_rank
        )

    def _whole(self, name: str, dims: int) -> Rectangle:
        return name, (self._all,) * dims, (self._all,) * dims

    def _vocabulary(self, name: str) -> list[Rectangle]:
        """Rows of this tensor-parallel rank; the last ranks hold rows of padding beyond the vocabulary."""
        rows = -(-self._shape.vocab_size // self._layout.tp_size)
        start = min(self._layout.tp_rank * rows, self._shape.vocab_size)
        stop = min(start + rows, self._shape.vocab_size)
        if start == stop:
            return []
        return [(name, (slice(start, stop), self._all), (slice(0, stop - start), self._all))]

    def _columns(self, name: str, width: int, size: int, rank: int) -> Rectangle:
        part = width // size
        return name, (self._all, slice(rank * part, (rank + 1) * part)), (self._all, self._all)

    def _feed_forward(self, prefix: str, which: str, width: int, size: int, rank: int) -> list[Rectangle]:
        """fc1 is this rank's rows of gate above its rows of up; fc2 is its columns of down."""
        if which == "2":
            return [self._columns(prefix + "down_proj.weight", width, size, rank)]
        part = width // size
        rows = slice(rank * part, (rank + 1) * part)
        return [
            (f"{prefix}{name}.weight", (rows, self._all), (slice(i * part, (i + 1) * part), self._all))
            for i, name in enumerate(("gate_proj", "up_proj"))
        ]

    def _query_key_value(self, prefix: str) -> list[Rectangle]:
        """The full matrix holds for each key/value head its query heads, the key and the value; ranks cut it into rows.

        With more ranks than key/value heads the cuts fall inside of such a group.
        """
        shape, layout = self._shape, self._layout
        head, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
        rows = (group + 2) * head * shape.num_kv_heads // layout.tp_size
        first = layout.tp_rank * rows
        found: list[Rectangle] = []
        for kv in range(shape.num_kv_heads):
            at = kv * (group + 2) * head
            for name, hf_start, size in (
                ("q_proj", kv * group * head, group * head),
                ("k_proj", kv * head, head),
                ("v_proj", kv * head, head),
            ):
                start, stop = max(at, first), min(at + size, first + rows)
                if start < stop:
                    source = slice(hf_start + start - at, hf_start + stop - at)
                    target = slice(start - first, stop - first)
                    found.append((f"{prefix}{name}.weight", (source, self._all), (target, self._all)))
                at += size
        return found


def _named_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = shape.hidden_size, shape.head_dim
    query, key = shape.num_heads * head, shape.num_kv_heads * head
    yield _EMBEDDING, (shape.vocab_size, hidden)
    for i, is_moe in enumerate(shape.moe_layers):
        prefix = f"model.layers.{i}."
        attention = prefix + "self_attn."
        yield attention + "q_proj.weight", (query, hidden)
        yield attention + "k_proj.weight", (key, hidden)
        yield attention + "v_proj.weight", (key, hidden)
        yield attention + "o_proj.weight", (hidden, query)
        yield attention + "q_norm.weight", (head,)
        yield attention + "k_norm.weight", (head,)
        if is_moe:
            yield prefix + "mlp.gate.weight", (shape.num_experts, hidden)
        width = shape.moe_ffn_size if is_moe else shape.ffn_size
        for mlp in [f"{prefix}mlp.experts.{e}." for e in range(shape.num_experts)] if is_moe else [prefix + "mlp."]:
            yield mlp + "gate_proj.weight", (width, hidden)
            yield mlp + "up_proj.weight", (width, hidden)
            yield mlp + "down_proj.weight", (hidden, width)
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield _FINAL_NORM, (hidden,)
    if not shape.tie_word_embeddings:
        yield _HEAD, (shape.vocab_size, hidden)
