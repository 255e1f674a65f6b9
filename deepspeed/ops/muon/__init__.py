"""Muon with Adam for what Muon is not made for."""

from deepspeed.ops.muon.muon import MuonWithAuxAdam

__all__ = ["MuonWithAuxAdam"]
