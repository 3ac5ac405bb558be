"""The model of a command: a checkpoint, with or without an adapter, or an adapter that names its base model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligermodels.cli import options
from ligermodels.errors import AdapterWarning, CheckpointError, ConfigError, HubError, InputError

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
    """The folder of a checkpoint, and the folder of a LoRA adapter on it, or None."""

    folder: Path
    adapter: Path | None = None

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer: the adapter's folder if it contains a tokenizer."""
        own = self.adapter is not None and (self.adapter / "tokenizer.json").is_file()
        return self.adapter if own and self.adapter is not None else self.folder

    @property
    def chat_template(self) -> Path | None:
        """The chat template beside the adapter; None if there is none."""
        path = None if self.adapter is None else self.adapter / "chat_template.jinja"
        return path if path is not None and path.is_file() else None

    def load(self, loading: options.Loading) -> CausalLM:
        """Load the model, with the adapter as LoRA layers, which are merged before weights are rounded. Exports contain
        the adapter's tokenizer and chat template.

        Raises:
            ConfigError: the tokenizer beside the adapter has more tokens than the model; or the config, or the config
                of the adapter, is wrong.
            CheckpointError: the checkpoint or the adapter cannot be loaded.
        """
        if self.adapter is None:
            return loading.load(self.folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AdapterWarning)  # of an adapter beside the model: this adapter is applied
            model = replace(loading, quantize=None, quantize_exclude=None, quantize_head=None).load(self.folder)
        from ligermodels.adapt.adapter import load_adapter
        from ligermodels.data.tokenizer import Tokenizer

        load_adapter(model, self.adapter)
        if (self.adapter / "tokenizer.json").is_file():
            last = max(Tokenizer(self.adapter).backend.get_vocab().values(), default=0)
            if last >= model.config.vocab_size:
                raise ConfigError(
                    f"{self.adapter / 'tokenizer.json'}: has ids up to {last:,}, and the model's vocab_size is "
                    f"{model.config.vocab_size:,}; save the adapter with the rows of the new tokens in embed_tokens "
                    "and lm_head (trainable_token_indices), or with both whole (modules_to_save)"
                )
        if loading.quantize is not None:
            from ligermodels.adapt.lora import merge_lora

            loading.round(merge_lora(model))
        return export_with_tokenizer(model, self.adapter)


def export_with_tokenizer(model: CausalLM, adapter: Path) -> CausalLM:
    """Add the tokenizer, chat template and generation config beside the adapter to the exports of `model`; returns
    `model`."""
    from ligermodels.convert.files import Companions

    own, spec = Companions.of(adapter), model.require_export_spec()
    generation = spec.generation_config if own.generation_config is None else own.generation_config
    model.export_spec = replace(spec, files={**spec.files, **own.tokenizer}, generation_config=generation)
    return model


def find(path: str, adapter: str | None = None) -> Source:
    """The checkpoint `path` with an `adapter`; if `path` is an adapter, its base model with this adapter.

    Raises CheckpointError and HubError if a checkpoint cannot be found; InputError for two adapters, an adapter without
    the name of a base model, and heads without a model.
    """
    from ligermodels.convert import hub
    from ligermodels.convert.config_json import config_in, read_json
    from ligermodels.models.extra_heads import base_of_heads as base_of_heads_in

    folder = locate(path)
    if not is_adapter(folder):
        if holds_only_heads(folder):
            base = base_of_heads_in(config_in(folder))
            raise InputError(f"{path}: holds heads and no model; give {base}, as PATH")
        read_json(folder / "config.json")  # its error says what the folder holds, the tokenizer's does not
        own = None if adapter is None else adapter_folder(adapter)
        return Source(folder, own)
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
    """The base model in the adapter's config, and its revision. Raises InputError if there is none."""
    from ligermodels.convert.config_json import read_json
    from ligermodels.convert.files import ADAPTER_CONFIG

    config = read_json(adapter / ADAPTER_CONFIG)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise InputError(
            f"{adapter}: an adapter that names no base model (base_model_name_or_path); give the base model too"
        )
    return base, revision if isinstance(revision, str) else None


def base_of_heads(path: str) -> str | None:
    """The base model of the heads in `path`; None if `path` holds anything other than heads alone.

    Raises InputError if the heads do not name their base model, and CheckpointError or HubError if it cannot be opened.
    """
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
    """The local folder of a checkpoint or an adapter, fetched from the hub if necessary; `weights`: with its weights.

    Raises CheckpointError if there is no such folder, and HubError if it cannot be fetched."""
    from ligermodels.convert import hub

    try:
        return hub.resolve(path, weights=weights)
    except HubError as error:
        try:
            return adapter_folder(path)
        except HubError:
            raise error from None


def adapter_folder(name: str) -> Path:
    """The local folder of an adapter, fetched from the hub if necessary, with its tokenizer if there is one.

    Raises CheckpointError and HubError if the folder cannot be found; InputError if it holds no adapter.
    """
    from ligermodels.adapt.adapter import BESIDE
    from ligermodels.convert import hub
    from ligermodels.convert.files import NAMED_TEMPLATES

    folder = hub.resolve_adapter(name)
    if folder != Path(name).expanduser():
        with hub.explained(name, folder.name):
            hub.snapshot(name, folder.name, BESIDE, {}, patterns=[NAMED_TEMPLATES])
    if not holds_adapter(folder):
        raise InputError(f"{name}: holds no adapter in PEFT's format (no adapter_config.json)")
    return folder


def holds_adapter(folder: Path) -> bool:
    """Whether there is an adapter in `folder`."""
    from ligermodels.convert.files import ADAPTER_CONFIG

    return (folder / ADAPTER_CONFIG).is_file()


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds an adapter and no checkpoint."""
    return holds_adapter(folder) and not (folder / "config.json").is_file()


def holds_only_heads(folder: Path) -> bool:
    """Whether `folder` holds heads without their base model, by config.json and file names."""
    from ligermodels.convert.config_json import config_in
    from ligermodels.convert.files import SINGLE
    from ligermodels.models.extra_heads import MEDUSA_TYPE, MTP_TYPE, draft_type
    from ligermodels.speculative.hub import FILES
    from ligermodels.speculative.profiles import PROFILES

    config = config_in(folder)
    if draft_type(config) is not None:
        return True
    if "model_type" in config:
        return config["model_type"] in (MEDUSA_TYPE, MTP_TYPE)
    is_profile = any(set(profile.config) <= set(config) for profile in PROFILES.values())
    return is_profile or any((folder / file).is_file() for file in FILES if file != SINGLE)


def holds_heads(folder: Path) -> bool:
    """Whether the checkpoint in `folder` contains the model and Medusa heads (`full-hf`)."""
    from ligermodels.convert.config_json import read_json
    from ligermodels.models.extra_heads import without_heads

    return bool(without_heads(read_json(folder / "config.json"))[1])
