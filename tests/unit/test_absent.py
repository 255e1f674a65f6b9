"""Entry points that this release does not have say so by name, and hasattr() on them is False."""

from __future__ import annotations

import importlib

import pytest

import deepspeed


@pytest.mark.parametrize("name", ["inference", "compression", "autotuning"])
def test_packages_out_of_scope_say_so(name: str) -> None:
    # Kills: a bare ModuleNotFoundError, which reads like a broken installation.
    with pytest.raises(ImportError, match=f"deepspeed.{name}: .* out of scope"):
        importlib.import_module(f"deepspeed.{name}")


@pytest.mark.parametrize("name", ["set_autotp_mode", "init_inference"])
def test_names_say_what_they_are(name: str) -> None:
    assert not hasattr(deepspeed, name)
    with pytest.raises(AttributeError, match=f"deepspeed.{name}: "):
        getattr(deepspeed, name)


def test_unknown_names_are_plain_attribute_errors() -> None:
    # Kills: answering every typo with a promise.
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        deepspeed.initialise  # noqa: B018
