"""The files of a checkpoint: their names, its index, and the files beside the weights."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.convert.input_files import TEXT_BYTES, is_present, read_bytes, read_json_object
from ligermodels.convert.json_values import as_object, is_file_name, is_object
from ligermodels.errors import CheckpointError, ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = (SINGLE, "model-*-of-*.safetensors", INDEX, "medusa_lm_head.safetensors", "medusa_lm_head.pt")

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "hy.tiktoken",
    "qwen.tiktoken",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Further files of a checkpoint: the tokenizer and the chat template."""

CHAT_TEMPLATES = "additional_chat_templates"
"""Folder, within a checkpoint, of chat templates by name: tool_use.jinja, rag.jinja ..."""

NAMED_TEMPLATES = f"{CHAT_TEMPLATES}/*.jinja"
"""Pattern of their names."""

COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER)
"""Further files of a checkpoint: configs and the tokenizer."""

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "spk_dict.pt")
"""Further files of multimodal models. `spk_dict.pt` (voices) is copied and never opened."""

AUTO_MAP = "auto_map"
"""Field of a config that names classes of Python modules beside it, as "modeling_x.XForCausalLM"."""
CODE_CONFIGS = ("config.json", "tokenizer_config.json", *PROCESSORS[:2])
"""Configs that may have this field: the model's, the tokenizer's, and those of processors."""
RELATIVE_IMPORT = re.compile(r"^\s*(?:from|import)\s+\.(\w+)", re.MULTILINE)

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
HOLDS_ADAPTER = (
    "holds an adapter: open its base model, then the adapter with load_adapter; commands without --adapter take a "
    "checkpoint with both, which `ligermodels lora merge MODEL ADAPTER OUT` writes"
)
"""What errors say of a folder or repository with ADAPTER_CONFIG and no config.json."""

CHECKPOINT = (*WEIGHTS, *COMPANIONS, CHAT_TEMPLATES, *PROCESSORS)
"""Patterns of the names of all files of a checkpoint, and of its folder of chat templates."""


DIGESTS = "sha256"
"""Field in the metadata of an index with the digest of each shard; `save_checkpoint` writes it."""


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard, from the index in `folder`; CheckpointError unless it names files of that folder."""
    index = as_object(_index(folder).get("weight_map"))
    if index and all(map(_is_shard, index.values())):
        return dict(index)
    raise CheckpointError(
        f"{folder / INDEX}: is not JSON whose 'weight_map' names, for each tensor, a file of the folder"
    )


def read_digests(folder: Path) -> dict[str, str]:
    """Shard -> SHA-256, from the index in `folder`; empty if another program wrote the index without digests."""
    digests = as_object(_index(folder).get("metadata")).get(DIGESTS)
    if digests is None:
        return {}
    if is_object(digests) and all(_is_shard(file) and isinstance(digest, str) for file, digest in digests.items()):
        return dict(digests)
    raise CheckpointError(f"{folder / INDEX}: metadata: {DIGESTS}: must have a digest for each file of the folder")


def indexed_shards(folder: Path) -> list[str]:
    """Names of the shards that the index in `folder` names; none if there is no index, or it is damaged."""
    with suppress(CheckpointError):
        return sorted(set(read_index(folder).values()))
    return []


def _index(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / INDEX, CheckpointError)


def _is_shard(file: Any) -> bool:
    return is_file_name(file) and file.endswith(".safetensors")


def matching(name: str, patterns: Collection[str]) -> bool:
    """Whether the file name matches one of the `patterns`."""
    return _expression(tuple(patterns)).match(name) is not None


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)")


class Companions(NamedTuple):
    """Files beside the weights of a checkpoint.

    Args:
        generation_config: content of generation_config.json, or None without one.
        tokenizer: name -> path of the tokenizer's files.
        processors: name -> path of files for images, video and sound.
        code: name -> path of Python modules that config.json names. They are copied, and never imported.
    """

    generation_config: dict[str, Any] | None = None
    tokenizer: Mapping[str, Path] = {}
    processors: Mapping[str, Path] = {}
    code: Mapping[str, Path] = {}

    @classmethod
    def of(cls, folder: Path) -> Companions:
        """The companions in `folder`; ConfigError if its generation_config.json holds no JSON object."""
        generation = folder / "generation_config.json"
        config = read_json_object(generation, ConfigError) if is_present(generation, CheckpointError) else None
        processors = _present(folder, (*PROCESSORS, *code_of(folder, CODE_CONFIGS[2:])))
        code = _present(folder, code_of(folder, CODE_CONFIGS[:1]))
        return cls(config, tokenizer_files(folder), processors, code)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Name -> path of the files of the tokenizer in `folder`, chat templates and Python modules included."""
    code = code_of(folder, CODE_CONFIGS[1:2])
    return _present(folder, (*TOKENIZER, *chat_templates(folder), *code))


def code_of(folder: Path, configs: Collection[str]) -> list[str]:
    """Names of the Python modules, `auto_map` of the `configs` in `folder`, and of the modules beside them that these
    import. A module may be missing in `folder`. Modules of another repository ("owner/name--module.Class") are left
    out, and so are configs that cannot be read."""
    waiting: list[str] = []
    for config in configs:
        with suppress(CheckpointError):
            classes = as_object(read_json_object(folder / config, CheckpointError).get(AUTO_MAP)).values()
            named = [each for value in classes for each in (value if isinstance(value, list) else [value])]
            waiting += [each.partition(".")[0] for each in named if isinstance(each, str) and "--" not in each]
    found: list[str] = []
    while waiting:
        name = f"{waiting.pop()}.py"
        if name in found or not is_file_name(name):
            continue
        found.append(name)
        with suppress(CheckpointError):
            text = read_bytes(folder / name, CheckpointError, TEXT_BYTES).decode(errors="replace")
            waiting += RELATIVE_IMPORT.findall(text)
    return found


def chat_templates(folder: Path) -> list[str]:
    """Names of the files of named chat templates in `folder`: "additional_chat_templates/tool_use.jinja" ..."""
    templates = folder / CHAT_TEMPLATES
    # Unlike `glob`, `isdir` raises nothing for names that are too long.
    found = templates.glob("*.jinja") if os.path.isdir(templates) else ()
    return sorted(f"{CHAT_TEMPLATES}/{path.name}" for path in found)


def _present(folder: Path, names: Collection[str]) -> dict[str, Path]:
    return {name: folder / name for name in names if is_present(folder / name, CheckpointError)}
