"""Files of draft heads with a network beside the model, in any of their formats: EAGLE-3, DFlash and DSpark."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ligermodels.archs.multimodal import BESIDE_TEXT
from ligermodels.archs.unread import COMPUTATION, unread_fields
from ligermodels.arguments import nearest
from ligermodels.convert.config_json import read_json
from ligermodels.convert.json_values import as_object, is_int, is_list_of, object_field
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.errors import CheckpointError, ConfigError, ConfigWarning, InputError, short, warn_caller
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.layers.sharding import gathered
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.families import family_of
from ligermodels.models.state_dict import StateDict
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.head_files import CONFIG, TorchFile, head_state, name_of_base

if TYPE_CHECKING:
    from ligermodels.speculative.draft_head import DraftHeadModel

TORCH_FILE = "pytorch_model.bin"
MASK_EMBEDDING = "mask_embedding.pt"
"""File of vLLM with an embedding of the mask token, in place of the one in the table."""
SERVING, NESTED_LAYERS = "speculators_config", "transformer_layer_config"
AUX_STATES = "use_aux_hidden_state"
"""Field of SpecForge and vLLM: whether the head reads states of several layers, as heads here do."""
LM_HEAD, EMBEDDING, D2T, T2D = "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"
LAYER_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "initializer_range",
    "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "sliding_window",
    "use_sliding_window", "tie_word_embeddings", "partial_rotary_factor", "rotary_dim", "rope_interleave",
    "rope_interleaved", "is_neox_style", "rope_is_neox_style", "position_embedding_type", "logit_scale",
)  # fmt: skip
"""Fields of a flat config.json that describe the layers of a head. Values of the last eight that change the computation
are an error: a layer of Llama's or Qwen3's kind rotates whole heads, and pairs a channel with the one half a head away;
and a head does not scale its logits, which vLLM does."""
GEMMA4_FIELDS = (
    "hidden_activation", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "enable_moe_block",
    "hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp", "final_logit_softcapping",
    "per_layer_config",
)  # fmt: skip
"""Further fields of layers of Gemma 4's kind."""
_READ = {
    *LAYER_FIELDS, SERVING, NESTED_LAYERS, "layer_types", "speculators_model_type", "speculators_version",
    "draft_vocab_size", "target_hidden_size", "num_target_layers", "embed_requires_grad", "has_no_defaults_at_init",
    *BESIDE_TEXT, "target_model_type", "modal_type",
}  # fmt: skip
"""Fields of config.json of any such head that are read, say what its tensors say too, or describe the base model, as in
SpecForge's and AngelSlim's heads."""


@contextmanager
def errors_of(folder: Path) -> Iterator[None]:
    """Name the folder of a head in errors about the content of its files, which are no InputError then."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{folder}: {error}") from None
    except InputError as error:
        raise ConfigError(f"{folder}: {error}") from None


# -- config.json -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The model that a head belongs to, as config.json names it.

    name: folder or hub id; None where it has none.
    architectures: its `architectures`.
    num_layers: its number of layers.
    embed_scale: the factor of its embeddings, None for 1.
    """

    name: str | None
    architectures: tuple[str, ...] = ()
    num_layers: int = 0
    embed_scale: float | None = None

    @classmethod
    def of(cls, model: DraftHeadModel, base_model: str | None) -> Target:
        """The base model of `model`, with the name of `name_of_base`."""
        spec = model.base.export_spec
        name = "" if base_model == "" else name_of_base(base_model, spec)  # "" is a base model without a name
        config = {} if spec is None else spec.hf_config
        names = (config.get("architectures") or [family_of(config).causal_lm]) if config else []
        return cls(name, tuple(names), len(model.base.config.blocks), model.base.config.embed_scale)

    @property
    def required_name(self) -> str:
        """`name`, for formats that contain it; InputError if there is none."""
        if self.name is None:
            raise InputError("base_model: config.json of this format names the base model; give its folder or hub id")
        return self.name

    def speculators_config(self, algorithm: str, num_tokens: int) -> dict[str, Any]:
        """`speculators_config` of config.json in speculators' form, for servers that propose `num_tokens` tokens."""
        return {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"name_or_path": self.required_name, "architectures": list(self.architectures)},
        }


def stored_tokens(stored: Mapping[str, Any]) -> int | None:
    """The number of tokens that a server proposes by default; None where config.json does not name it."""
    methods = object_field(stored, SERVING).get("proposal_methods")
    tokens = as_object(methods[0] if isinstance(methods, list) and methods else None).get("speculative_tokens")
    return tokens if is_int(tokens) and tokens > 0 else None


def stored_base(stored: Mapping[str, Any]) -> Any:
    """The name of the base model in config.json in speculators' form, or None."""
    return object_field(object_field(stored, SERVING), "verifier", f"{SERVING}.").get("name_or_path")


def stored_layers(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the head's layers: nested in speculators' form, the whole config.json in the others."""
    return object_field(stored, NESTED_LAYERS) if NESTED_LAYERS in stored else stored


def read_ids(name: str, ids: Any) -> tuple[int, ...]:
    """A list of ids of layers; ConfigError for another value of the field `name`."""
    if not ids or not is_list_of(ids, is_int):
        raise ConfigError(f"{name}: must be a list of whole numbers, at least one, got {short(ids)}")
    return tuple(ids)


def warn_unread(stored: Mapping[str, Any], read: Collection[str], path: str = "") -> None:
    """A ConfigWarning about fields of a head's config.json that nothing reads, if they may change its computation.

    Args:
        stored: config.json, or an object in it.
        read: names of the fields that the heads of this kind read, besides the fields of all heads.
        path: prefix of the names in the message, such as "eagle_config.".
    """
    read = {*_READ, *read}
    for name, value in unread_fields(stored, read):
        hint = "" if name in COMPUTATION else nearest(name, read)
        warn_caller(f"config.json of the head: field {path}{name} = {short(value)} is not used{hint}", ConfigWarning)


def agreed_boundaries(named: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The boundaries that config.json names, or None. A ConfigWarning if its fields contradict one another.

    Args:
        named: field of config.json -> the boundaries that it names, the field with precedence first.
    """
    if len(set(named.values())) > 1:
        layers = ", ".join(f"{name} {list(boundaries)}" for name, boundaries in named.items())
        warn_caller(
            f"config.json: its fields name different layers, as boundaries: {layers}; the first field is used",
            ConfigWarning,
        )
    return next(iter(named.values()), None)


# -- tensors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """A file format of heads.

    config: (config, target, **settings) -> config.json without its dtype; the settings are the model's
        `stored_settings`.
    embedding: whether the embedding is in the file. Servers take the model's own where it is not.
    lm_head: whether the lm_head is in the file.
    prefix: prefix of the tensors of an EAGLE-3 head's layer.
    reduced: whether it can hold a reduced vocabulary.
    names_base: whether config.json names the base model.
    """

    config: Callable[..., dict[str, Any]]
    embedding: bool = True
    lm_head: bool = True
    prefix: str = "layers.0"
    reduced: bool = True
    names_base: bool = False


def profile_named(name: str, profiles: Mapping[str, Profile], kind: str, config: Any) -> Profile:
    """The profile of this name.

    Args:
        name: the name.
        profiles: the formats of such heads, by name.
        kind: name of such heads in messages.
        config: the head's config.

    Raises:
        InputError: there is none, or it cannot hold the head.
    """
    if not isinstance(name, str) or name not in profiles:
        raise InputError(f"profile: must be one of {', '.join(profiles)} for {kind}, got {short(name)}")
    if not profiles[name].reduced and config.draft_vocab_size < config.decoder.vocab_size:
        raise InputError(f"profile {name!r}: holds no reduced draft vocabulary; export profile='speculators'")
    return profiles[name]


def check_fit(base: DecoderConfig, config: Any, vocabulary: DraftVocabulary | None) -> None:
    """InputError unless the config of a head fits the base model's config and the draft vocabulary, None for all."""
    tokens = DraftVocabulary.whole(base.vocab_size) if vocabulary is None else vocabulary
    for name, ours, theirs in (
        ("target_hidden_size", config.target_hidden_size, base.hidden_size),
        ("hidden_size", config.decoder.hidden_size, base.hidden_size),
        ("vocab_size", config.decoder.vocab_size, base.vocab_size),
        ("vocab_size", tokens.vocab_size, base.vocab_size),
        ("draft_vocab_size", config.draft_vocab_size, len(tokens)),
    ):
        if ours != theirs:
            raise InputError(f"{name}: of the head is {ours}, where the model and its draft tokens need {theirs}")
    if config.boundaries[-1] > len(base.blocks):
        raise InputError(f"boundaries: the model has {len(base.blocks)} layers, got {config.boundaries}")


def open_head(folder: Path, opened: ExitStack, names: Callable[[str], str]) -> tuple[dict[str, Any], StateDict]:
    """config.json, and the tensors by their names in speculators' form.

    Args:
        folder: folder of the head.
        opened: keeps the files open.
        names: name of a tensor, without the prefix `model.` -> its name in speculators' form.

    Raises:
        CheckpointError: a file is missing or damaged, or two tensors have the same name in speculators' form.
        ConfigError: the mask token has an embedding in a file of its own.
    """
    config = read_json(folder / CONFIG)
    if (folder / MASK_EMBEDDING).is_file():
        raise ConfigError(f"{folder}: {MASK_EMBEDDING}: a mask token with an embedding of its own is not implemented")
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


def native_state(model: DraftHeadModel) -> dict[str, Tensor]:
    """The tensors of a head by their native names: `head.*`, and `lm_head.weight` where it has one."""
    state = head_state(model.head, "head")
    return state if model.lm_head is None else state | {LM_HEAD: model.lm_head.weight.detach()}


def other_tensors(names: Sequence[str] = ()) -> list[str]:
    """Patterns of tensors that are not in the weight map of a head: `names`, and the ones that any format may have."""
    known = "|".join(name.replace(".", "[.]") for name in (EMBEDDING, D2T, T2D, *names))
    return [rf"^({known}|verifier_.*|.*rotary_emb\.inv_freq)$"]


@torch.no_grad()
def embedding_table(model: DraftHeadModel) -> Tensor:
    """(V, H), the embeddings that the head reads: where they are the base model's, scaled as it scales them."""
    return model.embeddings(torch.arange(model.base.config.vocab_size, device=model.base.device)[None])[0]


def stored_embedding(model: DraftHeadModel) -> Tensor:
    """(V, H), the embedding for a file, which heads with layers of Gemma 4's kind scale when they read it."""
    scale = model.config.decoder.embed_scale
    if scale is None:
        return embedding_table(model)
    if model.embed is None and model.base.config.embed_scale == scale:
        return gathered(persistent_tensors(model.base)["decoder.embed.weight"].detach())
    return embedding_table(model) / scale


def take_embedding(model: Any, path: Path, stored: Tensor) -> None:
    """Keep the embedding of a head, frozen, unless it is the base model's.

    Args:
        model: the model with the head.
        path: folder of the head, for messages.
        stored: (V, H), the embedding in the file.

    Raises:
        CheckpointError: it has another shape.
    """
    ours = embedding_table(model)
    if stored.shape != ours.shape:
        raise CheckpointError(
            f"{path}: {EMBEDDING} has the shape {tuple(stored.shape)}, the model's {tuple(ours.shape)}"
        )
    own, scale = stored.to(ours), model.config.decoder.embed_scale
    if scale is not None:  # rounded, as transformers has it
        own = own * torch.tensor(scale, dtype=own.dtype, device=own.device)
    if not torch.equal(own, ours):
        model.embed = nn.Embedding.from_pretrained(own, freeze=True)
