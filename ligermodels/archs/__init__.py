"""Families of models, one short file each: a Hugging Face config becomes a `DecoderConfig`."""

from ligermodels.archs import registry as registry  # registers the families of this package
from ligermodels.models.families import FAMILIES, Family, family_of, register

__all__ = ["FAMILIES", "Family", "family_of", "register"]
