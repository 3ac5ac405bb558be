"""Files of draft heads with a network beside the model, in any of their formats: EAGLE-3, DFlash and DSpark."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ligermodels.convert.config_json import read_json
from ligermodels.convert.export_spec import as_json
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.json_values import is_int
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.weight_map import LazyTensor, WeightMap
from ligermodels.errors import CheckpointError, ConfigError, ConfigWarning, InputError, short
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.layers.sharding import reshard
from ligermodels.models.families import family_of
from ligermodels.models.state_dict import StateDict
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.files import TorchFile

if TYPE_CHECKING:
    from ligermodels.speculative.draft_head import DraftHeadModel

CONFIG, TORCH_FILE = "config.json", "pytorch_model.bin"
LM_HEAD, EMBEDDING, D2T, T2D = "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"
LAYER_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "initializer_range",
    "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "sliding_window",
    "use_sliding_window", "tie_word_embeddings",
)  # fmt: skip
"""Fields of a flat config.json that describe the layers of a head."""


# -- config.json -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The model that a head belongs to, as config.json names it.

    name: folder or hub id.
    architectures: its `architectures`.
    num_layers: its number of layers.
    """

    name: str
    architectures: tuple[str, ...] = ()
    num_layers: int = 0

    @classmethod
    def of(cls, model: DraftHeadModel, base_model: str | None) -> Target:
        """The base model of `model`, named `base_model`, or by default after the checkpoint that it was loaded from;
        InputError where there is neither."""
        spec = model.base.export_spec
        name = base_model if base_model is not None or spec is None else spec.base_name
        if name is None:
            raise InputError("base_model: config.json names the base model; give its folder or hub id")
        config = {} if spec is None else spec.hf_config
        names = (config.get("architectures") or [family_of(config).causal_lm]) if config else []
        return cls(name, tuple(names), len(model.base.config.blocks))

    def speculators_config(self, algorithm: str, num_tokens: int) -> dict[str, Any]:
        """`speculators_config` of config.json in speculators' form, for servers that propose `num_tokens` tokens."""
        return {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"name_or_path": self.name, "architectures": list(self.architectures)},
        }


def stored_tokens(stored: Mapping[str, Any]) -> int | None:
    """The number of tokens that a server proposes by default; None where config.json does not name it."""
    methods = (stored.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    return tokens if is_int(tokens) and tokens > 0 else None


def stored_base(stored: Mapping[str, Any]) -> Any:
    """The name of the base model in config.json in speculators' form, or None."""
    return ((stored.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


def read_ids(name: str, ids: Any) -> tuple[int, ...]:
    """A list of ids of layers; ConfigError for another value of the field `name`."""
    if not isinstance(ids, list) or not all(is_int(each) for each in ids):
        raise ConfigError(f"{name}: must be a list of whole numbers, got {short(ids)}")
    return tuple(ids)


def agreed_boundaries(named: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The boundaries that config.json names, or None. A ConfigWarning if its fields contradict one another.

    Args:
        named: field of config.json -> the boundaries that it names, the field with precedence first.
    """
    if len(set(named.values())) > 1:
        layers = ", ".join(f"{name} {list(boundaries)}" for name, boundaries in named.items())
        warnings.warn(
            f"config.json: its fields name different layers, as boundaries: {layers}; the first field is used",
            ConfigWarning,
            stacklevel=4,
        )
    return next(iter(named.values()), None)


# -- tensors -----------------------------------------------------------------------------------------------------------


def write_head(
    model: DraftHeadModel,
    folder: str | os.PathLike[str],
    weight_map: WeightMap,
    config: Mapping[str, Any],
    *,
    embedding: bool,
    lm_head: bool,
    overwrite: bool,
) -> None:
    """Write a head, completely or not at all.

    Args:
        model: the model with the head.
        folder: created if need be.
        weight_map: the head's tensors, with `lm_head.weight` where `lm_head` is set.
        config: config.json.
        embedding: write the embedding too.
        lm_head: write the lm_head too, from the base model's rows where the head has none.
        overwrite: replace a checkpoint in the folder.

    Raises:
        CheckpointError: the folder is in use or cannot be written.
    """
    reshard(model)
    state = native_state(model)
    if lm_head and model.lm_head is None:
        state[LM_HEAD] = model.projection.rows(model.base.dtype)
    further = {} if model.vocabulary.is_whole else model.vocabulary.tables()  # vLLM refuses tables of all tokens
    if embedding:
        further[EMBEDDING] = embedding_table(model)
    save_checkpoint(
        folder_to_write(folder),
        [
            *weight_map.export(state),
            *(LazyTensor(key, tuple(x.shape), x.dtype, partial(torch.clone, x)) for key, x in further.items()),
        ],
        max_shard_size=2**63 - 1,
        files={CONFIG: as_json(dict(config))},
        overwrite=overwrite,
        ranks=Ranks(state.values()),
    )


def open_head(
    folder: Path, opened: ExitStack, names: Callable[[str], str] = lambda name: name
) -> tuple[dict[str, Any], StateDict]:
    """config.json, and the tensors by their names in speculators' form.

    Args:
        folder: folder of the head.
        opened: keeps the files open.
        names: name of a tensor, without the prefix `model.` -> its name in speculators' form.

    Raises:
        CheckpointError: a file is missing or damaged, or two tensors have the same name in speculators' form.
    """
    config = read_json(folder / CONFIG)
    if (folder / TORCH_FILE).is_file() and not list(folder.glob("*.safetensors")):
        files: Any = TorchFile(folder / TORCH_FILE)
    else:
        files = opened.enter_context(Checkpoint(folder))
    tensors = dict[str, Tensor]()
    for name in files.headers:
        ours = names(name.removeprefix("model."))
        if ours in tensors:
            raise CheckpointError(f"{folder}: has two tensors for {ours}, one of them {name}")
        tensors[ours] = files.read(name)
    return config, StateDict(tensors)


def stored_vocabulary(tensors: Mapping[str, Tensor], vocab_size: int) -> DraftVocabulary | None:
    """The draft vocabulary of a head's tensors, for a model with `vocab_size` tokens; None for all tokens."""
    if D2T not in tensors:
        return None
    return DraftVocabulary.from_tables(tensors[D2T], tensors.get(T2D), vocab_size)


def load_tensors(
    model: DraftHeadModel,
    path: Path,
    weight_map: WeightMap,
    reader: StateDict,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Fill a head from a file, and freeze the base model. On the meta device only names and shapes are checked.

    Args:
        model: the model with the head.
        path: folder of the head, for messages.
        weight_map: the head's tensors.
        reader: the tensors in the file.
        progress: called with (bytes loaded, bytes in total), or None.

    Raises:
        CheckpointError: tensors are missing, or have another shape.
    """
    if model.base.device.type == "meta":
        weight_map.plan(reader.headers, native_state(model))
    else:
        weight_map.load(reader, native_state(model), progress)
        if EMBEDDING in reader.headers:
            _take_embedding(model, path, reader.headers[EMBEDDING])
    model.base.requires_grad_(False)


def native_state(model: DraftHeadModel) -> dict[str, Tensor]:
    """The tensors of a head by their native names: `head.*`, and `lm_head.weight` where it has one."""
    state = {f"head.{name}": tensor.detach() for name, tensor in persistent_tensors(model.head).items()}
    return state if model.lm_head is None else state | {LM_HEAD: model.lm_head.weight.detach()}


def other_tensors(names: Sequence[str] = ()) -> list[str]:
    """Patterns of tensors that are not in the weight map of a head: `names`, and the ones that any format may have."""
    known = "|".join(name.replace(".", "[.]") for name in (EMBEDDING, D2T, T2D, *names))
    return [rf"^({known}|verifier_.*|.*rotary_emb\.inv_freq)$"]


@torch.no_grad()
def embedding_table(model: DraftHeadModel) -> Tensor:
    """(V, H), the embeddings that the head reads: where they are the base model's, scaled as it scales them."""
    return model.embeddings(torch.arange(model.base.config.vocab_size, device=model.base.device)[None])[0]


def _take_embedding(model: DraftHeadModel, path: Path, stored: Tensor) -> None:
    """Keep the embedding of a head, frozen, unless it is the base model's."""
    ours = embedding_table(model)
    if stored.shape != ours.shape:
        raise CheckpointError(
            f"{path}: {EMBEDDING} has the shape {tuple(stored.shape)}, the model's {tuple(ours.shape)}"
        )
    own = stored.to(ours)
    if not torch.equal(own, ours):
        model.embed = nn.Embedding.from_pretrained(own, freeze=True)
