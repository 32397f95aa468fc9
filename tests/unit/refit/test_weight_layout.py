"""The layout of the weight buffer: places, views, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.refit.layout import WeightLayout, group_elements

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def test_a_tensor_of_10_bytes_is_followed_by_one_at_byte_64() -> None:
    layout = WeightLayout.build([("a", torch.bfloat16, (5,)), ("b", torch.float32, (4, 8)), ("c", "float16", (1,))])
    assert [slot.offset for slot in layout.slots] == [0, 64, 192]
    assert [slot.nbytes for slot in layout.slots] == [10, 128, 2]
    assert layout.nbytes == 256


@given(st.lists(st.tuples(DTYPES, SHAPES), max_size=12))
def test_views_are_aligned_to_64_bytes_apart_from_each_other_and_hold_what_is_written(tensors: list) -> None:
    layout = WeightLayout.build((f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors))
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    written = {}
    for i, (name, view) in enumerate(layout.views(buffer).items()):
        assert view.storage_offset() * view.element_size() % 64 == 0
        written[name] = torch.full(tensors[i][1], float(i + 1), dtype=tensors[i][0])
        view.copy_(written[name])
    for name, view in layout.views(buffer).items():
        assert view.dtype == written[name].dtype
        assert torch.equal(view, written[name])
    assert sum(slot.nbytes for slot in layout.slots) <= layout.nbytes
    assert WeightLayout.from_plain(layout.to_plain()) == layout


def test_a_buffer_of_another_size_is_refused_with_both_sizes() -> None:
    layout = WeightLayout.build([("a", torch.float32, (16,))])
    with pytest.raises(ValueError, match=r"torch.uint8 \(128,\), expected torch.uint8 \(64,\)"):
        layout.views(torch.zeros(128, dtype=torch.uint8))


def test_a_name_twice_or_an_integer_dtype_is_refused_with_the_name() -> None:
    with pytest.raises(ValueError, match=r"model\.norm\.weight: comes twice"):
        WeightLayout.build([("model.norm.weight", torch.float32, (1,))] * 2)
    with pytest.raises(ValueError, match="ids: dtype int64 cannot be refitted"):
        WeightLayout.build([("ids", torch.int64, (1,))])


def test_plain_rows_with_moved_offsets_are_refused() -> None:
    rows = WeightLayout.build([("a", torch.float32, (4,)), ("b", torch.float32, (4,))]).to_plain()
    rows[1][3] = 16
    with pytest.raises(ValueError, match="offsets other than the packed ones"):
        WeightLayout.from_plain(rows)


def test_an_empty_layout_has_no_bytes() -> None:
    assert WeightLayout.build([]).nbytes == 0


def test_fused_and_separate_experts_give_the_same_group() -> None:
    base, experts, width, hidden = "model.layers.3.mlp.experts", 8, 16, 32
    separate = [
        (f"{base}.{e}.{part}.weight", width * hidden)
        for e in range(experts)
        for part in ("gate_proj", "up_proj", "down_proj")
    ]
    fused = [
        (f"{base}.gate_up_proj", math.prod((experts, 2 * width, hidden))),
        (f"{base}.down_proj", experts * hidden * width),
    ]
    assert group_elements(separate) == group_elements(fused) == {base: 3 * experts * width * hidden}
    assert group_elements([("lm_head.weight", 7)]) == {"lm_head.weight": 7}
