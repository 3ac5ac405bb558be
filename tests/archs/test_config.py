"""Configs, fuzzed: whatever a field holds, it is refused by name, or the model is the one transformers makes of it.

Fields come from transformers' own config classes, so that those of its next version are tried too. Where it refuses a
config itself, or cannot compute with it, there is nothing to agree with. `FUZZ=50 pytest tests/archs/test_config.py`
tries fifty times as many configs.
"""

import copy
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zlib import crc32

import pytest
import torch
from config_values import EVERY_FIELD, FIELDS, OF_ALL, TOWERS, Config, ropes, scalars, values_of, words
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging
from zoo import CONFIGS, MULTIMODAL, NEEDED, auto_class, plain, randomize, thinker

import ligermodels as lm
from ligermodels.archs import FAMILIES, family_of
from ligermodels.convert.config_json import check_generation, nested_configs
from ligermodels.errors import ConfigError, InputError, LigerModelsError
from ligermodels.models.decoder import DecoderConfig

Outcome = tuple[torch.Tensor, torch.Tensor]
FUZZ = int(os.environ.get("FUZZ", 1))
TOLERANCE = 1e-5
MOST_LAYERS = 12
"""More take seconds and show nothing else."""

TINY: dict[str, Config] = {**CONFIGS, **MULTIMODAL}
ONE_OF: dict[str, Config] = {config["model_type"]: config for config in reversed(TINY.values())}
"""For each model_type its first config."""


@pytest.fixture(autouse=True)
def quiet(recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers has much to say of these configs. Of fields that nobody knows the nearest names take long:
    test_unread.py."""
    monkeypatch.setattr(difflib, "get_close_matches", lambda *_, **__: [])
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    logging.set_verbosity(verbosity)


def layers_of(config: Config) -> int:
    text = list(nested_configs(config).values())[-1]
    types = next((text[name] for name in ("layers_block_type", "hybrid_override_pattern") if text.get(name)), ())
    return int(text.get("num_hidden_layers") or text.get("num_layers") or len(types))


def names_one(refusal: LigerModelsError, fields: Iterable[str]) -> bool:
    """Whether the message names one of `fields`; those of rope are read, and named, as one."""
    return any(("rope" if "rope" in name else name) in str(refusal) for name in fields)


# -- against transformers ----------------------------------------------------------------------------------------------


def oracle_in(folder: Path, *, training: bool) -> tuple[PreTrainedModel, torch.Tensor, Outcome] | None:
    """The random model that transformers makes of folder/config.json, saved there; tokens, and what it says of them.

    It is in training mode or, without `training`, in evaluation mode.
    None where it makes none, or none that computes.
    """
    written = (folder / "config.json").read_text()
    torch.manual_seed(0)
    try:
        config = AutoConfig.from_pretrained(folder)
        make = auto_class(config).from_config
        whole = plain(make(config, attn_implementation="eager", dtype=torch.float32))
        randomize(whole)
        oracle = thinker(whole).train(training)
        vocab_size = oracle.get_input_embeddings().num_embeddings
        ids = text_only(torch.randint(0, min(vocab_size, 128), (2, 41)), oracle.config)
        found = outcome(oracle, ids)
        whole.save_pretrained(folder)
    except Exception:
        return None
    (folder / "config.json").write_text(written)
    return (oracle, ids, found) if all(each.isfinite().all() for each in found) else None


def text_only(ids: torch.Tensor, config: Any) -> torch.Tensor:
    """`ids` with others in place of those that stand for images and sounds, which transformers replaces too."""
    others = {getattr(config, f"{kind}_token_{end}", None) for kind in KINDS for end in ("id", "index")}
    texts = [token for token in range(128) if token not in others]
    return torch.where(torch.isin(ids, torch.tensor(texts)), ids, texts[0])


KINDS = ("image", "video", "audio")


def outcome(model: Any, ids: torch.Tensor) -> Outcome:
    """Loss and logits, in the mode that the model is in."""
    theirs = {"return_dict": True, "use_cache": False, "token_type_ids": torch.zeros_like(ids)}
    options = theirs if isinstance(model, PreTrainedModel) else {"return_logits": True}
    with torch.no_grad():
        output = model(ids, labels=ids, **options)
    return output.loss, output.logits


def error(found: Outcome, wanted: Outcome) -> float:
    """The larger, of loss and logits, of max |found - wanted| / max |wanted|; 0 where both are 0, NaN where one is."""
    assert [each.shape for each in found] == [each.shape for each in wanted]
    pairs = zip(found, wanted, strict=True)
    each = [(ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30) for ours, theirs in pairs]
    return float(torch.stack(each).max())


def composed(config: Config, changed: Config) -> DecoderConfig | None:
    """What we make of `config` with fields `changed`; None where it is refused, by the name of one of them."""
    config = {**config, **changed}
    try:
        found = family_of(config).decoder_config(config)
        check_generation(config)  # Of the ids at its top level transformers writes a generation_config.json.
    except ConfigError as refusal:
        assert names_one(refusal, changed), f"{changed}: {refusal}"
        return None
    # Gemma says "gelu" and means its tanh form: test_families.py.
    return None if (config["model_type"], config.get("hidden_act")) == ("gemma", "gelu") else found


def transformers_accepts(config: Config, changed: Config) -> bool:
    """Whether transformers takes the config too."""
    try:
        AutoConfig.for_model(**copy.deepcopy({**config, **changed}))
    except Exception:
        return False
    return True


class Oracle(NamedTuple):
    """transformers' model of a config with fields `changed`, saved in a folder; tokens, and what it says of them."""

    changed: Config
    folder: TemporaryDirectory[str]
    model: PreTrainedModel
    ids: torch.Tensor
    wanted: Outcome


def oracle_of(config: Config, changed: Config) -> Oracle | None:
    """None where we refuse the fields together, or where transformers computes nothing with them; or if it is huge."""
    taken = composed(config, changed)
    if taken is None or len(taken.blocks) > MOST_LAYERS:
        return None
    if re.search(r"=\d{6,}(?![\d.])", repr(taken)) and is_huge({**config, **changed}):
        return None
    folder = TemporaryDirectory()
    (Path(folder.name) / "config.json").write_text(json.dumps({**config, **changed}))
    found = oracle_in(Path(folder.name), training=not taken.dropout)
    return Oracle(changed, folder, *found) if found else None


def is_huge(config: Config) -> bool:
    """Whether the model of `config`, with those of transformers and its copies, takes seconds."""
    model = lm.from_config(config, dtype=torch.float32, device="meta")
    return sum(parameter.numel() for parameter in model.parameters()) > 1e7


def oracles_of(config: Config, changed: Config) -> list[Oracle]:
    """One for all fields of `changed` or, if they do not go together, a few that have those that go with others."""
    if whole := oracle_of(config, changed):
        return [whole]
    names = list(changed)
    halves = (names[: len(names) // 2], names[len(names) // 2 :]) if len(names) > 1 else ()
    found = [each for half in halves for each in oracles_of(config, {name: changed[name] for name in half})]
    kept = {name: value for each in found for name, value in each.changed.items()}
    if len(found) > 1 and len(kept) < len(changed) and (without := oracle_of(config, kept)):
        return [without]
    return found


def compare(config: Config, changed: Config) -> None:
    """See that `config` with fields `changed` makes transformers' model; if they do not go together, with fewer.

    And that transformers makes the same model of what we write. In training mode, else jitter and the like would not
    show; with dropout in evaluation mode, and training is refused.
    """
    for own, folder, model, ids, wanted in oracles_of(config, changed):
        with folder:
            agree(Path(folder.name), model, ids, wanted, own)


def reads_the_same(out: Path, folder: Path) -> bool:
    """Whether the files in `out` are to transformers the config and the tensors of those in `folder`: one model."""
    other = {"_name_or_path", "architectures", "dtype", "transformers_version"}
    try:
        configs = [AutoConfig.from_pretrained(at).to_dict() for at in (out, folder)]
    except IndexError:  # of a dtype that is no name
        return False
    one, two = ({name: value for name, value in config.items() if name not in other} for config in configs)
    tensors, before = (load_file(at / "model.safetensors") for at in (out, folder))
    same = one == two and tensors.keys() == before.keys()
    return same and all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def agree(folder: Path, oracle: PreTrainedModel, ids: torch.Tensor, wanted: Outcome, changed: Config) -> None:
    """See that our model of the checkpoint in `folder`, and transformers' of our export, have outcome `wanted`."""
    model = lm.from_pretrained(folder, dtype=torch.float32)
    if not oracle.training:
        with pytest.raises(InputError, match=r"^model\.train: .* dropout is not implemented") as refusal:
            model.train()
        assert names_one(refusal.value, changed)
    model.train(oracle.training)
    model.save_pretrained(folder / "out", keep="model")
    outcomes = [outcome(model, ids)]
    if not reads_the_same(folder / "out", folder):
        again = AutoModelForCausalLM.from_pretrained(folder / "out", attn_implementation="eager", dtype=torch.float32)
        outcomes.append(outcome(plain(again).train(oracle.training), ids))
    for found in outcomes:
        if not error(found, wanted) < TOLERANCE:
            # Norms over one or two channels, and the like, enlarge rounding: some, and as much in transformers as here.
            exact = outcome(oracle.double(), ids)
            ours, theirs = error(found, exact), error(wanted, exact)
            if theirs > 1e-2:
                return  # In fp32 transformers' own result means nothing.
            assert ours < min(TOLERANCE + 6 * theirs, 1e-2), f"{changed}: {ours} where transformers has {theirs}"


@pytest.mark.parametrize("config", (TINY if FUZZ > 1 else ONE_OF).values(), ids=TINY if FUZZ > 1 else ONE_OF)
def test_every_field(config: Config) -> None:
    """Several at a time: where a field is ignored that should not be, those around it do not hide that.

    Of the fields of other types, and of those of all types that no family reads, each type gets one in 24 without FUZZ:
    two or three types get each field.
    """
    shares = 24 if FUZZ == 1 else 1
    own = FIELDS[config["model_type"]]
    others = {name for name in EVERY_FIELD if crc32(f"{config['model_type']} {name}".encode()) % shares == 0}
    fields = {name: default for name, default in (EVERY_FIELD | own).items() if name in others or name in own}
    likely = {name: values_of(name, default, layers_of(config)) for name, default in fields.items()}
    unchanged, first = composed(config, {}), True

    @seed(crc32(json.dumps(config).encode()))
    @settings(max_examples=FUZZ + 1, phases=[Phase.generate])
    @given(st.fixed_dictionaries(likely), st.permutations(sorted(fields)))
    def fuzz(values: Config, names: list[str]) -> None:
        nonlocal first
        if first:  # always the simplest values, so the least telling
            first = False
            return
        tried = (name for name in names if name in others or name not in OF_ALL)
        alone = ((name, {name: values[name]}) for name in tried)
        made = {name: composed(config, one) for name, one in alone}
        taken = [name for name, ours in made.items() if ours and transformers_accepts(config, {name: values[name]})]
        taken = [name for name in taken if name not in TOWERS or name not in config]
        # With dropout nothing is compared in training mode, so these fields are among themselves. So are fields that
        # leave our model as it is, which must leave transformers' so too: all at once, they hide nothing.
        ignored = [name for name in taken if made[name] == unchanged]
        dropped = [name for name in taken if made[name].dropout and name not in ignored]
        read = [name for name in taken if name not in ignored and name not in dropped]
        groups = (ignored, dropped, *(read[start : start + 12] for start in range(0, len(read), 12)))
        for few in filter(None, groups):
            compare(config, {name: values[name] for name in few})

    fuzz()


@pytest.mark.parametrize("model_type", sorted(FIELDS))
def test_what_a_config_leaves_out_is_as_in_transformers(model_type: str) -> None:
    least = {"model_type": model_type, **NEEDED.get(model_type, {})}
    default, compose = AutoConfig.for_model(**copy.deepcopy(least)), FAMILIES[model_type].decoder_config
    assert compose(least) == compose(default.to_dict())


# -- garbage -----------------------------------------------------------------------------------------------------------

odd = st.sampled_from([2**31, 2**63, 10**400, -(10**400), float("nan"), float("inf"), 1e300, 5e-324, "é\0"])
letters = st.text("aZ09 _./é\0\n☃", max_size=3)  # of all characters, a list is made first, which takes seconds
garbage = st.recursive(
    scalars | odd | letters,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(words, each, max_size=3) | ropes(each),
    max_leaves=5,
)


def works(config: Config) -> None:
    """See that the model of `config` computes, generates, and goes out and comes in again."""
    model = lm.from_config(config)
    ids = torch.arange(7)[None] % model.config.vocab_size
    with torch.no_grad(), TemporaryDirectory() as folder:
        logits = model(ids).logits
        assert logits.shape == (1, 7, model.config.vocab_size)
        assert model.generate(ids, max_new_tokens=2).shape[1] > 7
        model.save_pretrained(folder, overwrite=True)
        again = lm.from_pretrained(folder)
        found = again(ids).logits
    stored, loaded = model.state_dict(), again.state_dict()
    assert stored.keys() == loaded.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0, equal_nan=True)
    # Sums on a CPU go by where in memory a tensor begins.
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("model_type", FIELDS)
def test_garbage(model_type: str) -> None:
    fields = st.sampled_from(sorted({*FIELDS[model_type], *ONE_OF[model_type]} - {"model_type"}))

    @seed(crc32(model_type.encode()))
    @settings(max_examples=3 * FUZZ)
    @given(st.dictionaries(fields, garbage, max_size=2), st.sets(fields, max_size=1))
    def fuzz(changed: Config, lost: set[str]) -> None:
        config = {**copy.deepcopy(ONE_OF[model_type]), **changed}
        config = {name: value for name, value in config.items() if name not in lost}
        try:
            model = lm.from_config(config, device="meta")
        except ConfigError as refusal:
            assert names_one(refusal, {*changed, *lost}), refusal
            return
        changes = changed or lost  # the config itself works in all other tests
        if changes and sum(parameter.numel() for parameter in model.parameters()) < 1e6:
            works(config)

    fuzz()
