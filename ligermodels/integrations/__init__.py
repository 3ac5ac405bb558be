"""Native computation inside transformers' own models, for Trainer, TRL, PEFT and whatever else lives on those."""

from typing import TYPE_CHECKING

from ligermodels.lazy import lazy_names

if TYPE_CHECKING:
    from ligermodels.integrations.facade import from_pretrained, wrap
    from ligermodels.integrations.in_place import nativize, restore
    from ligermodels.integrations.trl import use_native_head

__getattr__, __dir__ = lazy_names(
    __name__, {"facade": ("from_pretrained", "wrap"), "in_place": ("nativize", "restore"), "trl": ("use_native_head",)}
)

__all__ = ["from_pretrained", "nativize", "restore", "use_native_head", "wrap"]
