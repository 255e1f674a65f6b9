"""The blocks `fp16` and `bf16` together, and the names of dtypes."""

import pytest
import torch

from deepspeed.runtime.config import DeepSpeedConfigError, DtypeEnum, parse_dtype
from unit.runtime.config_models.reading import ON, config, error


def test_fp16_and_bf16_exclude_each_other():
    text = error(fp16=ON, bf16=ON)
    assert "fp16.enabled" in text and "bf16.enabled" in text


def test_a_vocabulary_that_tensor_cores_cannot_split_is_named(warnings):
    config(vocabulary_size=17)
    config(vocabulary_size=16, fp16=ON)
    assert warnings == []
    config(vocabulary_size=17, fp16=ON)
    assert "vocabulary_size: 17 is not a multiple of 8" in warnings[0]


def test_dtypes_parse_by_one_function():
    for names, dtype in (
        (("fp16", "float16", "half", "torch.float16", torch.float16), torch.float16),
        (("bf16", "bfloat16", torch.bfloat16), torch.bfloat16),
        (("fp32", "float32", "float"), torch.float32),
    ):
        assert all(parse_dtype(name) is dtype for name in names)
    assert parse_dtype(None) is None
    with pytest.raises(DeepSpeedConfigError, match="some.key: 'int4'"):
        parse_dtype("int4", "some.key")
    assert DtypeEnum("bf16") is DtypeEnum.bf16 and DtypeEnum(torch.float32) is DtypeEnum.fp32
    with pytest.raises(ValueError):
        DtypeEnum("int4")
