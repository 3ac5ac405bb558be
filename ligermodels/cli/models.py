"""The model that a command is given: a checkpoint, with an adapter or without, or an adapter that names its base."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligermodels.cli import options
from ligermodels.console import say
from ligermodels.errors import CheckpointError, ConfigError, HubError, InputError

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM

Model = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="A checkpoint, or an adapter that names its base model: a folder or a Hugging Face hub id."
    ),
]
Adapter = Annotated[str | None, typer.Option(help="A LoRA adapter in PEFT's format, a folder or a hub id.")]


@dataclass(frozen=True)
class Source:
    """The `folder` of a checkpoint, and that of the LoRA `adapter` on it, if there is one."""

    folder: Path
    adapter: Path | None = None

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer: the adapter's, if it has one of its own."""
        own = self.adapter is not None and (self.adapter / "tokenizer.json").is_file()
        return self.adapter if own and self.adapter is not None else self.folder

    @property
    def chat_template(self) -> Path | None:
        """The file of the adapter's own chat template, None for that of the tokenizer's folder."""
        path = None if self.adapter is None else self.adapter / "chat_template.jinja"
        return path if path is not None and path.is_file() else None

    def load(
        self, dtype: options.Dtype | None, device: str, attention: str = "auto", quantize: options.Prepare = None
    ) -> CausalLM:
        """The model, with the adapter as LoRA layers; it is exported with the adapter's tokenizer and chat template.

        With `quantize`, of `options.quantizing`, an adapter is merged first, and the sum rounded.

        Raises as `from_pretrained` and `load_adapter`, and ConfigError for a tokenizer beside the adapter that has more
        tokens than the model.
        """
        if self.adapter is None:
            return options.load(self.folder, dtype, device, attention, quantize)
        model = options.load(self.folder, dtype, device, attention)
        from ligermodels.adapt.adapter import load_adapter
        from ligermodels.data.tokenizer import Tokenizer

        load_adapter(model, self.adapter)
        if self.tokenizer == self.adapter:
            last = max(Tokenizer(self.adapter).backend.get_vocab().values(), default=0)
            if last >= model.config.vocab_size:
                raise ConfigError(
                    f"{self.adapter / 'tokenizer.json'}: has ids up to {last:,}, and the model's vocab_size is "
                    f"{model.config.vocab_size:,}; adapters that add tokens are not implemented"
                )
        if quantize is not None:
            from ligermodels.adapt.lora import merge_lora

            quantize(merge_lora(model))
        return export_with_tokenizer(model, self.adapter)


def export_with_tokenizer(model: CausalLM, adapter: Path) -> CausalLM:
    """`model`, which goes out with the tokenizer and chat template beside the adapter, where there are any."""
    from ligermodels.adapt.adapter import TOKENIZER

    own = {name: path for name in TOKENIZER if (path := adapter / name).is_file()}
    spec = model.require_export_spec()
    model.export_spec = replace(spec, files={**spec.files, **own})
    return model


def find(path: str, adapter: str | None = None) -> Source:
    """The checkpoint `path` with an `adapter`; or, where `path` is an adapter, the base model that it names with it.

    Raises CheckpointError and HubError as `hub.resolve`; InputError for two adapters, for one that names no base model,
    and for heads, which are no model.
    """
    from ligermodels.convert import hub
    from ligermodels.convert.config_json import read_json
    from ligermodels.models.extra_heads import base_of_heads as base_of_heads_in

    folder = locate(path)
    if not is_adapter(folder):
        if holds_only_heads(folder):
            config = folder / "config.json"
            base = base_of_heads_in(read_json(config) if config.is_file() else {})
            raise InputError(f"{path}: holds heads and no model; give {base}, as PATH")
        if adapter is None and holds_adapter(folder):
            say(f"{path}: the adapter in it is not applied; --adapter {path} does that")
        found = None if adapter is None else adapter_folder(adapter)
        if found is not None and not holds_adapter(found):
            raise InputError(f"--adapter {adapter}: holds no adapter in PEFT's format (no adapter_config.json)")
        return Source(folder, found)
    if adapter is not None:
        raise InputError(f"{path}: is an adapter itself; with --adapter, give their base model as PATH")
    base, revision = base_named(folder)
    try:
        return Source(hub.resolve(base, revision=revision), folder)
    except (CheckpointError, HubError) as error:
        raise type(error)(
            f"{path}: an adapter whose base model cannot be opened: {error}; give that as PATH, and --adapter {path}"
        ) from error


def base_named(adapter: Path) -> tuple[str, str | None]:
    """The base model that the adapter in this folder names, and its revision; InputError when it names none."""
    from ligermodels.convert.config_json import read_json
    from ligermodels.convert.files import ADAPTER_CONFIG

    config = read_json(adapter / ADAPTER_CONFIG)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise InputError(f"{adapter}: an adapter that names no base model (base_model_name_or_path); give that too")
    return base, revision if isinstance(revision, str) else None


def base_of_heads(path: str) -> str | None:
    """The base model that the heads in `path` name, None where `path` holds something other than heads alone.

    Raises InputError for heads that name none, and CheckpointError or HubError where it cannot be opened."""
    from ligermodels.convert import hub
    from ligermodels.convert.config_json import read_json

    folder = locate(path, weights=False)
    if is_adapter(folder) or not holds_only_heads(folder):
        return None
    config = folder / "config.json"
    base = read_json(config).get("base_model_name_or_path") if config.is_file() else None
    if not isinstance(base, str) or not base:
        raise InputError(
            f"{path}: holds heads and no model, and they name no base model (base_model_name_or_path in config.json, "
            f"which not every format has); give that as PATH, and --heads {path}"
        )
    try:
        hub.resolve(base, weights=False)
    except (CheckpointError, HubError) as error:
        raise type(error)(
            f"{path}: heads whose base model cannot be opened: {error}; give that as PATH, and --heads {path}"
        ) from error
    return base


def locate(path: str, *, weights: bool = True) -> Path:
    """The local folder of a checkpoint or an adapter; one on the hub is fetched first, a checkpoint with `weights` or
    without. Raises CheckpointError and HubError as `hub.resolve`."""
    from ligermodels.convert import hub

    try:
        return hub.resolve(path, weights=weights)
    except HubError as error:
        try:
            return adapter_folder(path)
        except HubError:
            raise error from None


def adapter_folder(name: str) -> Path:
    """The folder of an adapter; one on the hub is fetched first, with its tokenizer, if it has one."""
    from ligermodels.adapt.adapter import TOKENIZER
    from ligermodels.convert import hub

    folder = hub.resolve_adapter(name)
    if folder != Path(name).expanduser():
        with hub.explained(name, folder.name):
            hub.snapshot(name, folder.name, TOKENIZER, {})
    return folder


def holds_adapter(folder: Path) -> bool:
    """Whether there is an adapter in `folder`."""
    from ligermodels.convert.files import ADAPTER_CONFIG

    return (folder / ADAPTER_CONFIG).is_file()


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds an adapter and no checkpoint."""
    return holds_adapter(folder) and not (folder / "config.json").is_file()


def holds_only_heads(folder: Path) -> bool:
    """Whether it holds heads and not their base model, going by config.json and the names of the files."""
    from ligermodels.convert.config_json import read_json
    from ligermodels.convert.files import SINGLE
    from ligermodels.models.extra_heads import MEDUSA_TYPE, MTP_TYPE
    from ligermodels.speculative.hub import FILES
    from ligermodels.speculative.profiles import PROFILES

    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    if "model_type" in config:
        return config["model_type"] in (MEDUSA_TYPE, MTP_TYPE)
    says_so = any(set(profile.config) <= set(config) for profile in PROFILES.values())
    return says_so or any((folder / file).is_file() for file in FILES if file != SINGLE)


def holds_heads(folder: Path) -> bool:
    """Whether the checkpoint in `folder` holds Medusa heads beside the model (`full-hf`)."""
    from ligermodels.convert.config_json import read_json
    from ligermodels.models.extra_heads import without_heads

    return bool(without_heads(read_json(folder / "config.json"))[1])
