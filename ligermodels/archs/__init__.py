"""Families of models, a short file each: a Hugging Face config becomes a DecoderConfig; Decoder and CausalLM."""

from ligermodels.archs.family import Family
from ligermodels.archs.registry import FAMILIES, family_of, register

__all__ = ["FAMILIES", "Family", "family_of", "register"]
