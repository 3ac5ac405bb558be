"""The few configs that stand for all of the zoo have everything that any of them has."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from zoo import CONFIGS, OF_EACH_KIND

from ligermodels.archs import family_of


def options(config: Any) -> Iterator[tuple[str, ...]]:
    """Each kind of layer in a composed config, and each of its fields: with its value, or that it has a number."""
    if isinstance(config, tuple | list):
        for part in config:
            yield from options(part)
    elif is_dataclass(config):
        kind = type(config).__name__
        yield (kind,)
        for field in fields(config):
            value = getattr(config, field.name)
            yield kind, field.name, str(value) if value is None or isinstance(value, bool | str) else "set"
            yield from options(value)


def test_few_configs_have_every_kind_of_layer_with_every_option() -> None:
    found = {name: {*options(family_of(config).decoder_config(config))} for name, config in CONFIGS.items()}
    missing = set().union(*found.values()) - set().union(*(found[name] for name in OF_EACH_KIND))
    assert not missing, f"add to OF_EACH_KIND configs with {missing}"
