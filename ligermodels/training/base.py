"""The base of a run: a checkpoint, or a config for training from random weights; and a tokenizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.adapt.saved_modules import token_modules
from ligermodels.adapt.targets import leaf
from ligermodels.convert import hub
from ligermodels.convert.config_json import dtype_of, read_json
from ligermodels.convert.files import chat_templates, tokenizer_files
from ligermodels.convert.more_rows import MULTIPLE
from ligermodels.convert.quantization import without_quantization
from ligermodels.data import fingerprint
from ligermodels.data.built_in_templates import template_file
from ligermodels.data.fingerprint import Fingerprint
from ligermodels.data.new_tokens import untrained_tokens, with_tokens
from ligermodels.data.template_files import missing_tokens
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, CheckpointWarning, ConfigError, ConfigWarning
from ligermodels.models.extra_heads import require_model, without_heads
from ligermodels.models.families import family_of
from ligermodels.ops.runtime.devices import own_random_numbers
from ligermodels.ops.runtime.tensors import dtype_named
from ligermodels.parallel.plan import ParallelPlan
from ligermodels.pretrained import Progress, from_config, from_pretrained
from ligermodels.training.recipe import R, TrainingRecipe

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")
"""A folder with such a file is a checkpoint, even if it cannot be used: it is never trained from random weights."""


@dataclass(frozen=True)
class Base:
    """The files of a base model.

    config: path of the config.json.
    tokenizer: folder of the tokenizer.
    weights: folder of the weights; None for a config without weights.
    repo_id: name of the checkpoint on the hub; None for a local folder.
    new_tokens: tokens that got rows in the embeddings: special tokens that a built-in chat template added, and tokens
        of the tokenizer that the embeddings had no rows for.
    original: folder of the checkpoint that has no rows for the new tokens, for an adapter that has them.
    reads_weights: whether the weights are read; False if they may be absent, or lack rows for the new tokens.
    """

    config: Path
    tokenizer: Path
    weights: Path | None
    repo_id: str | None = None
    new_tokens: tuple[str, ...] = ()
    original: Path | None = None
    reads_weights: bool = True

    @classmethod
    def of_checkpoint(cls, folder: Path, tokenizer: str | None = None) -> Base:
        """The checkpoint in a local `folder`; `tokenizer` is the folder or hub id of another tokenizer.

        Raises ConfigError if the folder holds heads or an adapter without a model."""
        require_model(read_json(folder / "config.json"))
        return cls(folder / "config.json", _tokenizer_folder(tokenizer, folder), folder)

    @classmethod
    def find(cls, recipe: TrainingRecipe, *, on_meta: bool = False) -> Base:
        """The base of a recipe, fetched from the hub if necessary.

        Args:
            recipe: the settings.
            on_meta: whether the model is only loaded on the meta device. Then no weights are fetched or copied.

        Raises:
            CheckpointError: there is no such folder, or it holds no checkpoint, on which LoRA and heads are trained.
            HubError: the checkpoint cannot be fetched from the hub.
            ConfigError: the config cannot be read, there is no tokenizer beside it or in `recipe.tokenizer`, or the
                tokenizer has more tokens than a config without weights.
        """
        path = Path(str(recipe.base)).expanduser()
        is_config = _is_config(path)
        if is_config and path.exists() and not recipe.trains_configs:
            trained = "draft heads are" if recipe.trains_heads else "LoRA is"
            raise CheckpointError(
                f"{path}: is a config without weights (no model.safetensors), and {trained} trained on a checkpoint"
            )
        if not (recipe.trains_configs and is_config):
            base = cls.of_checkpoint(hub.resolve(str(recipe.base), weights=not on_meta), recipe.tokenizer)
            base = replace(base, repo_id=None if path.is_dir() else str(recipe.base))
            if on_meta and (not path.is_dir() or missing_tokens(base.tokenizer, recipe.chat_template)):
                base = replace(base, reads_weights=False)
            return base.with_template_tokens(recipe)
        folder = path if path.is_dir() else path.parent
        config = path / "config.json" if path.is_dir() else path
        read_json(config)  # an unreadable config is reported first
        base = cls(config, _tokenizer_folder(recipe.tokenizer, folder), None)
        if not (base.tokenizer / "tokenizer.json").is_file():
            raise ConfigError(
                f"tokenizer: there is no tokenizer.json in {base.tokenizer}; give the folder, or the hub id, of a "
                "checkpoint that has one"
            )
        return base.with_template_tokens(recipe)._with_rows_for_tokens()

    def with_template_tokens(self, recipe: TrainingRecipe) -> Base:
        """The base with the special tokens of the recipe's built-in chat template; itself, if the tokenizer has them.

        The embeddings get rows for the new tokens: see `new_tokens.with_tokens`.

        Raises:
            ConfigError: the recipe trains heads, or the embeddings cannot be resized.
        """
        tokens = missing_tokens(self.tokenizer, recipe.chat_template)
        if not tokens:
            if not recipe.trains_embeddings and self.weights is not None and self.reads_weights:
                self._warn_of_untrained(self.weights, recipe)
            return self
        if recipe.trains_heads:
            raise ConfigError(
                f"chat_template: {recipe.chat_template} needs {', '.join(tokens)}, which the tokenizer in "
                f"{self.tokenizer} lacks, and draft heads add no tokens to their base model. Train the base model on "
                f"chats first (ligermodels train --chat-template {recipe.chat_template}; "
                "merge an adapter by lora merge) and give the result as base, or give a template without new tokens "
                "(alpaca, mistral, zephyr)"
            )
        # PEFT gives the base model of an adapter a row for each token, and no padding.
        original, multiple = (None, MULTIPLE) if recipe.trains_configs else (self.config.parent.absolute(), 1)
        weights = self.weights if self.reads_weights else None
        without_rows = {} if self.vocab_size is None else Tokenizer(self.tokenizer).tokens_from(self.vocab_size)
        folder = with_tokens(self.config, self.tokenizer, weights, tokens, multiple)
        return replace(
            self,
            config=folder / "config.json",
            tokenizer=folder,
            weights=None if self.weights is None else folder,
            new_tokens=(*without_rows.values(), *tokens),
            original=original,
        )

    def with_token_rows(self, recipe: R, before: Mapping[str, Any]) -> R:
        """The recipe; with LoRA and new tokens, it also trains their rows of the embedding and the LM head.

        If one of these is trained whole, or the head has a bias, which PEFT leaves out if it trains rows, both are. A
        run that trained them whole before, by the settings of its checkpoint, continues so.
        """
        if not self.new_tokens or recipe.trains_embeddings:
            return recipe
        settings, model = recipe.settings(), from_config(self.config, device="meta")
        whole, modules = settings["lora_modules_to_save"], token_modules(model)
        earlier = before.get("lora_modules_to_save", [])
        if not before.get("lora_trainable_token_indices") and {*whole} <= {*earlier}:
            whole = earlier
        if model.head.bias is not None or not {leaf(name) for name in whole}.isdisjoint(modules):
            name, values = "lora_modules_to_save", (*whole, *modules)
        else:
            name = "lora_trainable_token_indices"
            values = (*settings[name], *self._ids(self.new_tokens).values())
        return recipe.model_copy(update={name: tuple(dict.fromkeys(values))})

    def _ids(self, tokens: Iterable[str]) -> dict[str, int]:
        """The ids of tokens that the tokenizer has."""
        wanted = list(tokens)
        backend = Tokenizer(self.tokenizer).backend if wanted else None  # a base may have no tokenizer
        return {token: id for token in wanted if backend and (id := backend.token_to_id(token)) is not None}

    @cached_property
    def vocab_size(self) -> int | None:
        """The model's number of tokens; None for a config that cannot be composed, which is an error of `load`."""
        hf_config = read_json(self.config)
        with suppress(CheckpointError, ConfigError), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)  # they come where the model is loaded
            hf_config, _ = without_heads(without_quantization(hf_config)[0])
            return family_of(hf_config).decoder_config(hf_config).vocab_size  # not each config.json names it
        return None

    def _warn_of_untrained(self, weights: Path, recipe: TrainingRecipe) -> None:
        """Warn if embeddings of the template's tokens, which the run does not train, are zero."""
        template, rows = recipe.chat_template, recipe.settings().get("lora_trainable_token_indices", ())
        if (vocab_size := self.vocab_size) is None:
            return
        ids = self._ids(untrained_tokens(vocab_size, self.tokenizer, weights, template))
        if ids := {token: id for token, id in ids.items() if id not in rows}:
            warnings.warn(
                f"chat_template: the embeddings of {', '.join(ids)} in {weights} are zero: the base model was not "
                "trained on them, and this run does not train them. Train all parameters, or with LoRA also their rows "
                f"(lora_trainable_token_indices: {', '.join(map(str, ids.values()))}), or give a template without "
                "special tokens (alpaca, mistral, zephyr)",
                CheckpointWarning,
                stacklevel=2,
            )

    def fingerprints(self) -> list[Fingerprint]:
        """Fingerprints of config, tokenizer and the weights that are read. Raises CheckpointError for damaged ones."""
        return fingerprint.of_checkpoint(self.config, self.tokenizer, self.weights if self.reads_weights else None)

    def load(
        self,
        recipe: TrainingRecipe,
        *,
        device: str,
        attention: str,
        progress: Progress | None = None,
        prepare: Callable[[CausalLM], object] | None = None,
        plan: ParallelPlan | None = None,
    ) -> CausalLM:
        """Load the model, or make it with random weights from the recipe's seed.

        Args:
            recipe: the settings: dtype, seed, tokenizer and chat template. Exports of the model contain the last two.
            device: device of the model.
            attention: attention backend, or "auto".
            progress: called with the bytes loaded and the bytes in all.
            prepare: changes the model while it is on the meta device, before its weights are loaded.
            plan: how the model is sharded over the ranks; None for one process.

        Raises:
            ConfigError: an error of `from_config`.
            CheckpointError: an error of `from_pretrained`.
        """
        # Of config.json, or else float32: a resumed run may have no weights to read a dtype from.
        dtype = dtype_named(recipe.dtype) or dtype_of(read_json(self.config))
        options: dict[str, Any] = {
            "dtype": dtype,
            "device": device,
            "attention": attention,
            "plan": plan,
            "prepare": prepare,
        }
        if self.weights is not None and self.reads_weights:
            model = from_pretrained(self.weights, progress=progress, **options)
        else:
            with own_random_numbers(device, recipe.seed):
                model = from_config(self.config, **options)
        files = tokenizer_files(self.tokenizer)
        if recipe.chat_template is not None:
            named = chat_templates(self.tokenizer)  # A named template would be used instead for chats with tools.
            files = {name: path for name, path in files.items() if name not in named}
            files["chat_template.jinja"] = template_file(recipe.chat_template)
        spec = model.require_export_spec()
        source = spec.source
        if source is not None:
            source = replace(source, folder=self.original or source.folder, repo_id=self.repo_id)
        model.export_spec = replace(spec, files=files, source=source)
        return model

    def _with_rows_for_tokens(self) -> Base:
        """The base, a config without weights. Raises ConfigError if the tokenizer has ids beyond its vocabulary.

        Of a base with weights that is a warning, and an error where the data has such a token: Gemma 3 1B's tokenizer
        has a token for images that this model lacks."""
        if self.vocab_size is not None and (beyond := Tokenizer(self.tokenizer).tokens_from(self.vocab_size)):
            raise ConfigError(
                f"{self.config}: vocab_size: is {self.vocab_size:,}, and the tokenizer in {self.tokenizer} has ids up "
                f"to {max(beyond):,}; make it at least {max(beyond) + 1:,}"
            )
        return self


def _is_config(path: Path) -> bool:
    """Whether this is a config file, or a folder with a config.json and no weights in any format."""
    if path.is_dir():
        return (path / "config.json").is_file() and not any(file for pattern in WEIGHTS for file in path.glob(pattern))
    return path.suffix == ".json" or path.is_file()


def _tokenizer_folder(tokenizer: str | None, folder: Path) -> Path:
    return folder if tokenizer is None else hub.resolve(tokenizer, weights=False)
