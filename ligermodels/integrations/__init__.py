"""Native computation inside transformers' own models, for Trainer, TRL, PEFT and whatever else lives on those."""

from typing import TYPE_CHECKING

from ligermodels.lazy import lazy_names

if TYPE_CHECKING:
    from ligermodels.integrations.facade import from_pretrained, wrap
    from ligermodels.integrations.in_place import nativize, restore

__getattr__, __dir__ = lazy_names(
    __name__, {"facade": ("from_pretrained", "wrap"), "in_place": ("nativize", "restore")}
)

__all__ = ["from_pretrained", "nativize", "restore", "wrap"]
