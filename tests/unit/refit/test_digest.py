"""The digest of weights: which tensors it looks at, and what it says about damaged ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.refit.digest import SAMPLED_TENSORS, check_digest, sample_names, weight_digest


def model(count: int, shape: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Tensors t0, t1, ... full of zeros."""
    return {f"t{i}": torch.zeros(shape, dtype=dtype) for i in range(count)}


@pytest.mark.parametrize("damaged", range(0, 64, 9))
def test_of_64_tensors_the_one_with_a_changed_element_is_named(damaged: int) -> None:
    tensors = model(64)
    sent = weight_digest(tensors, 7)
    check_digest(tensors, sent)
    tensors[f"t{damaged}"][2, 4] = 1.0
    with pytest.raises(ValueError, match=f"^1 of 64 sampled tensors are not what was sent: t{damaged}$"):
        check_digest(tensors, sent)


def test_7_damaged_tensors_are_5_names_and_a_number_and_a_missing_one_counts() -> None:
    tensors = model(20)
    sent = weight_digest(tensors, 1)
    for i in range(6):
        tensors[f"t{i}"].fill_(1.0)
    del tensors["t6"]
    with pytest.raises(ValueError, match=r"^7 of 20 sampled tensors are .*: t0, t1, t2, t3, t4 and 2 more$"):
        check_digest(tensors, sent)


def test_of_a_large_tensor_the_middle_4096_bytes_count() -> None:
    tensors = model(1, (100, 100), torch.float32)
    sent = weight_digest(tensors, 1)
    tensors["t0"][0, 0] = 1.0
    check_digest(tensors, sent)
    tensors["t0"][50, 50] = 1.0
    with pytest.raises(ValueError, match="t0"):
        check_digest(tensors, sent)


@given(st.integers(1, 1000), st.integers(0, 10_000))
def test_at_most_64_tensors_are_sampled_and_all_of_them_within_n_by_64_updates(count: int, version: int) -> None:
    names = [f"t{i}" for i in range(count)]
    updates = range(version, version + -(-count // SAMPLED_TENSORS))
    samples = [sample_names(names, v) for v in updates]
    assert all(len(set(sample)) == min(count, 64) for sample in samples)
    assert set().union(*samples) == set(names)


def test_no_tensors_have_an_empty_digest() -> None:
    assert weight_digest({}, 3) == {}
