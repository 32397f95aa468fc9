"""Guards against a temperature applied to log-probabilities, a padded vocabulary, and wrong gradients."""

from __future__ import annotations

import torch

from nemo_rl_moe.policy.megatron import logprobs as module
from nemo_rl_moe.policy.megatron.logprobs import token_logprobs


def _reference(logits, sources, targets, temperature, vocab_size):
    x = logits.reshape(-1, logits.shape[-1])[sources, :vocab_size].double() / temperature
    log_p = x.log_softmax(1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def test_logits_2_and_0_at_temperature_half_give_minus_0_0181_and_minus_4_0181():
    logits = torch.tensor([[[2.0, 0.0], [2.0, 0.0]]])
    values, _ = token_logprobs(logits, torch.tensor([0, 1]), torch.tensor([0, 1]), temperature=0.5, vocab_size=2)
    assert [round(v, 4) for v in values.tolist()] == [-0.0181, -4.0181]


def test_values_entropy_and_gradient_match_float64_softmax_to_1e_6(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 40)  # several pieces
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 16, requires_grad=True)
    sources = torch.tensor([0, 1, 2, 4, 7, 8, 11])
    targets = torch.randint(0, 13, (7,))
    weights = torch.randn(7)
    values, entropy = token_logprobs(logits, sources, targets, temperature=0.7, vocab_size=13, with_entropy=True)
    expected, expected_entropy = _reference(logits, sources, targets, 0.7, 13)
    assert (values - expected).abs().max() < 1e-6
    assert (entropy - expected_entropy).abs().max() < 1e-6
    assert not entropy.requires_grad
    (grad,) = torch.autograd.grad((values * weights).sum(), logits)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    assert (grad - expected_grad).abs().max() < 1e-6


def test_vocabulary_padding_with_huge_logits_has_no_probability():
    logits = torch.zeros(1, 1, 8)
    logits[..., 5:] = 1e4
    values, _ = token_logprobs(logits, torch.tensor([0]), torch.tensor([2]), temperature=1.0, vocab_size=5)
    assert abs(values.item() + torch.tensor(5.0).log().item()) < 1e-6


def test_logits_of_1e4_stay_finite_with_zero_gradient_at_certainty():
    logits = torch.tensor([[1e4, -1e4]], requires_grad=True)
    values, _ = token_logprobs(logits, torch.tensor([0]), torch.tensor([0]), temperature=1.0, vocab_size=2)
    values.sum().backward()
    assert values.item() == 0.0
    assert logits.grad.abs().max() == 0.0


def test_bfloat16_logits_are_reduced_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(1, 4, 50000).bfloat16()
    sources, targets = torch.arange(4), torch.randint(0, 50000, (4,))
    values, _ = token_logprobs(logits, sources, targets, temperature=1.0, vocab_size=50000)
    assert values.dtype == torch.float32
    assert (values - _reference(logits, sources, targets, 1.0, 50000)[0]).abs().max() < 2e-5


def test_no_wanted_token_gives_an_empty_result_and_zero_gradient():
    logits = torch.randn(1, 3, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    values, _ = token_logprobs(logits, none, none, temperature=1.0, vocab_size=4)
    values.sum().backward()
    assert values.shape == (0,)
    assert torch.equal(logits.grad, torch.zeros_like(logits))
