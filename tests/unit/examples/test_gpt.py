"""The example's model (causal, the same in fp32 and wide) and its text (whole windows, apart)."""

import math
from pathlib import Path

import pytest
import torch
from gpt import GPT, GPTConfig, half_products_are_slow, rotate, rotations
from text_data import Windows, load_text

SMALL = {"layers": 2, "width": 32, "heads": 2, "context": 16}


def trained(**settings: bool) -> GPT:
    """A small model whose outputs say something: initially, all logits are zero."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL, **settings))
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
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
    queries, keys = (rotate(one.expand(12, 8), angles) for one in (query, key))
    scores = [queries[i + 3] @ keys[i] for i in range(9)]
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
    words = r"width \(34\) must be a multiple of twice the heads \(2\)"
    with pytest.raises(ValueError, match=words):
        GPTConfig(width=34, heads=2)


def test_units_of_the_processor_decide_not_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement under load gave a run other products, and other bits, than its resumed half."""
    cpu = torch.device("cpu")
    found = {"avx512_bf16": True, "amx_fp16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    assert [half_products_are_slow(dtype, cpu) for dtype in kinds] == [False, False, True]
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert [half_products_are_slow(dtype, cpu) for dtype in kinds] == [False, True, True]
    assert not half_products_are_slow(torch.bfloat16, torch.device("cuda"))


def test_windows_cover_the_text_and_overlap_by_one() -> None:
    windows = Windows(torch.arange(22, dtype=torch.uint8), context=7)
    assert len(windows) == 3
    for number in range(3):
        assert windows[number].tolist() == list(range(7 * number, 7 * number + 8))
    assert windows[0].dtype == torch.int64


def test_text_shorter_than_a_window() -> None:
    with pytest.raises(ValueError, match="7 bytes; one window of context 7 needs 8"):
        Windows(torch.zeros(7, dtype=torch.uint8), context=7)


def test_standard_library_without_tests_and_packages() -> None:
    split = load_text(None)
    assert len(split.train) > 10 * len(split.validation) > 1_000_000
    assert b"class OrderedDict" in bytes(split.train.numpy()) + bytes(split.validation.numpy())


def test_folder_holds_whole_files_out(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"<{number}>" * 5)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text("no")
    (tmp_path / "b.bin").write_text("no")
    split = load_text(str(tmp_path))
    assert bytes(split.validation.numpy()) == b"<0>" * 5 + b"\n" + b"<20>" * 5
    assert b"no" not in bytes(split.train.numpy())
    assert bytes(split.train.numpy()).count(b"<") == 38 * 5


def test_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    split = load_text(str(file))
    assert split.train.tolist() == list(range(190))
    assert split.validation.tolist() == list(range(190, 200))
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes, too few"):
        load_text(str(file))


def test_path_without_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--data {tmp_path}/nothing: no such file"):
        load_text(str(tmp_path / "nothing"))
