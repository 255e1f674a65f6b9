"""The example's model: causal, deterministic, the same whether products are in fp32 or not."""

import math

import pytest
import torch
from gpt import GPT, GPTConfig, half_products_are_slow, rotate, rotations

SMALL = {"layers": 2, "width": 32, "heads": 2, "context": 16}


def trained(**settings: bool) -> GPT:
    """A small model whose outputs say something: initially, all logits are zero."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_loss_starts_at_all_bytes_alike() -> None:
    loss = GPT(GPTConfig(**SMALL))(torch.randint(256, (3, 17)))
    assert loss.item() == pytest.approx(math.log(256), rel=1e-6)


def test_no_position_sees_later_bytes() -> None:
    model = trained()
    text = torch.randint(256, (1, 16))
    changed = text.clone()
    changed[0, 9] = (text[0, 9] + 1) % 256
    before, after = model.logits(text)[0], model.logits(changed)[0]
    torch.testing.assert_close(before[:9], after[:9], rtol=0, atol=0)
    assert (before[9:] != after[9:]).any(dim=-1).all()


def test_attention_sees_distances_not_places() -> None:
    angles = rotations(12, 8, torch.device("cpu"))
    query, key = torch.randn(8), torch.randn(8)
    scores = [
        rotate(query.expand(12, 8), angles)[i + 3] @ rotate(key.expand(12, 8), angles)[i]
        for i in range(9)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(9))
    assert scores[0].item() != pytest.approx((query @ key).item(), rel=1e-3)


def test_wide_products_change_rounding_only() -> None:
    text = torch.randint(256, (2, 17))
    exact = trained()(text)
    wide = trained(wide_products=True).bfloat16()(text)
    assert wide.item() == pytest.approx(exact.item(), rel=0.02)
    wide.backward()
    torch.testing.assert_close(trained(wide_products=True)(text), exact, rtol=0, atol=0)


def test_sampling_repeats_and_leaves_the_random_state() -> None:
    model = trained()
    state = torch.get_rng_state()
    first = model.generate(b"def ", 40, seed=3)
    assert first[:4] == b"def " and len(first) == 44
    assert first == model.generate(b"def ", 40, seed=3) != model.generate(b"def ", 40, seed=4)
    assert torch.equal(state, torch.get_rng_state())


def test_width_that_heads_do_not_divide() -> None:
    with pytest.raises(
        ValueError, match=r"width \(34\) must be a multiple of twice the heads \(2\)"
    ):
        GPTConfig(width=34, heads=2)


def test_fp32_is_never_slow() -> None:
    assert not half_products_are_slow(torch.float32, torch.device("cpu"))
