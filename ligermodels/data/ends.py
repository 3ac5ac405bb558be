"""Tokens that end a text, and a turn of the assistant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels.arguments import is_whole
from ligermodels.convert.config_json import nested_configs, read_json
from ligermodels.convert.input_files import is_present
from ligermodels.data.chat import ChatTemplate, end_of_turn
from ligermodels.data.template_files import token_text
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, ConfigWarning, warn_caller
from ligermodels.generation.options import GENERATION


def eos_of_checkpoint(config: Path, folder: Path, tokenizer: Tokenizer) -> list[int]:
    """The EOS tokens of a checkpoint; the first ends a text.

    The first of these files that names an EOS token counts: config.json, the config of the language model in it
    (`text_config`), generation_config.json, tokenizer_config.json. ConfigWarning if this token is an ordinary one, or
    none, of the tokenizer, and the tokenizer names another EOS token: the config was made for another tokenizer.

    Args:
        config: path of config.json.
        folder: folder of the tokenizer.
        tokenizer: the tokenizer.

    Returns:
        Token ids; an empty list if there are none.

    Raises:
        ConfigError: a file is no JSON object, or there is no config.json.
    """
    configs = [(config, fields) for fields in nested_configs(read_json(config)).values()]
    generation = config.parent / "generation_config.json"
    if is_present(generation, CheckpointError):
        configs.append((generation, read_json(generation)))
    path = folder / "tokenizer_config.json"
    text = token_text(read_json(path).get("eos_token")) if is_present(path, CheckpointError) else None
    own = None if text is None else tokenizer.backend.token_to_id(text)
    named = ((file, as_token_ids(fields.get("eos_token_id"))) for file, fields in configs)
    file, ids = next(((file, ids) for file, ids in named if ids), (config, []))
    if ids and own is not None and own not in ids and ids[0] not in tokenizer.special_ids:
        token = tokenizer.backend.id_to_token(ids[0])
        warn_caller(
            f"{file}: eos_token_id: texts end with token {ids[0]}, in the tokenizer "
            f"{'no token' if token is None else repr(token)}; the EOS of the tokenizer is {text!r}: set eos_token_id "
            f"to {own}",
            ConfigWarning,
        )
    return ids or ([] if own is None else [own])


def with_end_of_turn(
    generation_config: dict[str, Any] | None, hf_config: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """A generation config with the token that ends the assistant's turns among its EOS tokens.

    Base models have other EOS tokens, and would not stop after a turn.

    Args:
        generation_config: content of generation_config.json, None without this file.
        hf_config: content of config.json, for fields that generation_config.json does not have.
        template: the chat template that the model is trained with.
        tokenizer: the tokenizer.

    Returns:
        The new config; `generation_config` itself, if it has the token or the template has none.
    """
    ids = as_token_ids({**hf_config, **(generation_config or {})}.get("eos_token_id"))
    new = [token for token in end_of_turn(template, tokenizer) if token not in ids]
    if not new:
        return generation_config
    if generation_config is None:  # older checkpoints have its fields in config.json
        names = (*GENERATION, "bos_token_id", "pad_token_id")
        generation_config = {name: hf_config[name] for name in names if hf_config.get(name) is not None}
    return {**generation_config, "eos_token_id": [*ids, *new]}


def as_token_ids(value: Any) -> list[int]:
    """A token id, or a list of them, as a list; negative ids stand for no token."""
    ids = value if isinstance(value, list) else [value]
    return [int(token) for token in ids if is_whole(token) and token >= 0]
