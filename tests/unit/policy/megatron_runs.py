"""What the tests run inside of Megatron ranks: build a model from a checkpoint, call it, compare, export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from nemo_rl_moe.policy.megatron import model, weights
from nemo_rl_moe.policy.megatron.parallel import ParallelLayout
from nemo_rl_moe.recipe.schema.policy import PolicyConfig
from tests.unit.policy.tiny_models import make_model, per_expert, recipe_policy

Join = Callable[[Any], ParallelLayout]


def build(join: Join, folder: Path, **megatron: Any) -> tuple[list[Any], ParallelLayout]:
    """The checkpoint's model on the joined ranks."""
    policy = PolicyConfig.model_validate(recipe_policy(folder, **megatron))
    layout = join(policy.megatron_cfg)
    chunks = model.build_model(model.read_hf_config(folder), policy, layout)
    weights.load_hf(chunks, folder, layout)
    return chunks, layout


def build_config(_: Join, folder: Path, megatron: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's TransformerConfig under the settings as a dict of its fields, and `version` of Megatron."""
    from nemo_rl_moe.policy.megatron.versions import installed_version

    policy = PolicyConfig.model_validate(recipe_policy(folder, **megatron))
    shape, device = model.read_hf_config(folder), torch.device("cpu")
    config = model.transformer_config(shape, policy, ParallelLayout(), device)
    plain = (bool, int, float, str, list, type(None))
    values = {name: value for name, value in vars(config).items() if isinstance(value, plain)}
    return {**values, "version": installed_version()}


def tokens_of(rows: int, length: int, vocab: int = 256) -> Tensor:
    """int64 [rows, length], always the same."""
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def positions_of(tokens: Tensor) -> Tensor:
    """int64, of the tokens' shape: 0, 1, 2 in each row."""
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def export(chunks: list[Any], layout: ParallelLayout, value: Any = None) -> dict[str, Tensor]:
    """All tensors of a model that lies on one rank, NaN where nothing was written."""
    specs = weights.hf_tensor_specs(chunks[0].hf_shape, torch.float32)
    views = {name: torch.full(size, float("nan")) for name, _, size in specs}
    weights.export_into(chunks, views, layout, value)
    return views


def compare_with_transformers(
    join: Join, folder: Path, kind: str, settings: dict[str, Any], megatron: dict[str, Any]
) -> dict[str, Any]:
    """Largest differences in logits and gradients, and whether the exported weights are those that were loaded."""
    theirs = make_model(kind, **settings)
    theirs.save_pretrained(folder)
    chunks, layout = build(join, folder, **megatron)
    tokens = tokens_of(4, 49)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    expected = theirs(input_ids=inputs).logits
    cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    found = chunks[0](input_ids=inputs, position_ids=positions_of(inputs), attention_mask=None)
    cross_entropy(found.flatten(0, 1), labels.flatten()).backward()
    own = per_expert({name: p.detach() for name, p in theirs.named_parameters()})
    grads = per_expert({name: p.grad for name, p in theirs.named_parameters()})
    exported = export(chunks, layout)
    exported_grads = export(chunks, layout, value=lambda parameter: parameter.grad)
    return {
        "logits": (found - expected).abs().max().item(),
        "logit_size": expected.abs().max().item(),
        "gradients": max((exported_grads[name] - grads[name]).abs().max().item() for name in exported_grads),
        "gradient_size": max(g.abs().max().item() for g in grads.values()),
        "names": exported.keys() == own.keys(),
        "weights_equal": all(torch.equal(exported[name], own[name]) for name in exported),
    }


def lay_out_in_four_ways(join: Join, folder: Path, lengths: Sequence[int]) -> dict[str, float]:
    """Largest difference in logits between a sequence alone and the same one packed, masked, left- and right-padded."""
    from megatron.core.packed_seq_params import PackedSeqParams

    gpt = build(join, folder)[0][0]
    sequences = list(tokens_of(1, sum(lengths))[0].split(list(lengths)))
    longest, row = max(lengths), torch.cat(sequences)[None]
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    later = torch.ones(len(segments), len(segments), dtype=torch.bool).triu(1)
    block_diagonal = ((segments[:, None] != segments) | later)[None, None]
    with torch.no_grad():
        alone = torch.cat([gpt(s[None], positions_of(s[None]), None)[0] for s in sequences])
        ways = {
            "packed": gpt(row, position_ids, None, packed_seq_params=packed)[0],
            "masked": gpt(row, position_ids, block_diagonal)[0],
            "right_padded": _padded(gpt, sequences, longest, left=False, pad=0),
            "left_padded": _padded(gpt, sequences, longest, left=True, pad=0),
        }
        other_pad = _padded(gpt, sequences, longest, left=True, pad=17)
    differences = {name: (logits - alone).abs().max().item() for name, logits in ways.items()}
    return {**differences, "pad_id": (other_pad - ways["left_padded"]).abs().max().item()}


def _padded(gpt: Any, sequences: list[Tensor], length: int, *, left: bool, pad: int) -> Tensor:
    """[T, V] logits of the real tokens."""
    rows = torch.full((len(sequences), length), pad)
    real = torch.zeros_like(rows, dtype=torch.bool)
    positions = torch.zeros_like(rows)
    for i, sequence in enumerate(sequences):
        place = slice(length - len(sequence), length) if left else slice(0, len(sequence))
        rows[i, place], real[i, place], positions[i, place] = sequence, True, torch.arange(len(sequence))
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    # A left pad must be hidden from the tokens after it; a right pad is hidden by causality alone.
    mask = (later | ~real[:, None, :])[:, None] if left else None
    return gpt(rows, positions, mask)[real]


def save_under(join: Join, source: Path, folder: Path, megatron: dict[str, Any], expected: Path) -> dict[str, Any]:
    """Saves the sharded model and compares the file with the source's.

    Args:
        expected: file of the logits that transformers computes of `tokens_of(2, 24)`. They are not computed here:
            in a process that has joined others, transformers 5 loads other rotary frequencies.

    Returns:
        On each rank its share of the elements written and, without pipeline stages, its logits' largest difference; on
        rank 0 also how the files compare.
    """
    chunks, layout = build(join, source, **megatron)
    weights.save_hf(chunks, folder, layout, source)
    pieces = weights.map_parameters(chunks, layout)
    result: dict[str, Any] = {
        "owned": sum(p.parameter[p.index].numel() for p in pieces if p.owned),
        "finite": all(bool(p.isfinite().all()) for p in chunks[0].parameters()),
    }
    if layout.rank == 0:
        before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
        result["elements"] = sum(t.numel() for t in after.values())
        result["equal"] = before.keys() == after.keys() and all(torch.equal(after[n], before[n]) for n in after)
    if layout.pp_size == 1:
        logits = torch.load(expected)
        tokens = tokens_of(2, 24, logits.shape[-1])
        with torch.no_grad():
            own = chunks[0](tokens, positions_of(tokens), None)
        start = layout.tp_rank * own.shape[-1]
        part = logits[..., start : start + own.shape[-1]]
        result["logits"] = (own[..., : part.shape[-1]] - part).abs().max().item()
    return result
