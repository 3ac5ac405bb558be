"""Datasets of the Hugging Face hub, by names such as hf:owner/name:train."""

from __future__ import annotations

from pathlib import Path

PREFIX = "hf:"
"""A name of data that starts with it is a dataset of the hub, never a file."""


def lines_of(name: str) -> Path:
    raise NotImplementedError
