"""Configurations that are read in tests, and the texts of the errors of those that are refused."""

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

ON = {"enabled": True}


def config(**keys):
    return DeepSpeedConfig({"train_batch_size": 8, **keys})


def zero_of(**keys):
    return config(zero_optimization=keys).tree.zero_optimization


def error_of(source):
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig(source)
    return str(caught.value)


def error(**keys):
    return error_of({"train_batch_size": 8, **keys})


def nested(path, value):
    """The keys that give a value to a dotted path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value
