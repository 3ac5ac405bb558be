"""Formats of Medusa heads: each read by its loader's rules, written from the formats' descriptions; round trips."""

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from named_exports import export_named
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from zoo import BASE, CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.speculative import head_files
from ligermodels.speculative.medusa_files import open_heads
from ligermodels.speculative.profiles import PROFILES, Fill

HIDDEN, VOCAB = BASE["hidden_size"], BASE["vocab_size"]
NAME = "owner/base"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["llama-3.1", "gemma2"], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lm.CausalLM:
    folder = tmp_path_factory.mktemp("base")
    make_checkpoint(folder, CONFIGS[request.param])
    return lm.from_pretrained(folder)


def heads(base: lm.CausalLM, lm_head: str, num_heads: int = 3, num_layers: int = 2) -> lm.MedusaModel:
    """Heads of which no two tensors are alike."""
    model = lm.MedusaModel.from_base(base, num_heads, num_layers, lm_head)
    with torch.no_grad():
        for parameter in model.head_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


# -- loaders, as the formats are described; each gives blocks[head][layer] = (weight, bias), and the lm_heads ----------


def vllm(folder: Path, shared: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    for key in [key for key in config if "num" in key]:
        if "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
    assert config["truncated_vocab_size"] is None  # Or a token_map would be needed.
    counts, sizes = (config["num_heads"], config["num_hidden_layers"]), (config["hidden_size"], config["vocab_size"])
    wanted = {
        f"blocks.{i}.layers.{j}.{part}": sizes[:1] * (2 if part == "weight" else 1)
        for i in range(counts[0])
        for j in range(counts[1])
        for part in (("weight", "bias") if config.get("medusa_fc_bias", False) else ("weight",))
    }
    original = config.get("original_lm_head", False)
    wanted |= {f"lm_heads.{i}.weight": sizes[::-1] for i in range(1 if original else counts[0])}
    stored = load_file(folder / "model.safetensors")
    # Tensors with other names are dropped without a word, and parameters that get none stay random.
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == wanted
    blocks = [
        [(stored[f"blocks.{i}.layers.{j}.weight"], stored[f"blocks.{i}.layers.{j}.bias"]) for j in range(counts[1])]
        for i in range(counts[0])
    ]
    return blocks, [stored[f"lm_heads.{0 if original else i}.weight"] for i in range(counts[0])]


def numbered(stored: Tensors, config: dict[str, Any], count: str = "medusa_num_heads") -> Any:
    num_heads, num_layers = config[count], config["medusa_num_layers"]
    blocks = [
        [(stored.pop(f"{i}.{j}.linear.weight"), stored.pop(f"{i}.{j}.linear.bias")) for j in range(num_layers)]
        for i in range(num_heads)
    ]
    return blocks, [stored.pop(f"{i}.{num_layers}.weight", None) for i in range(num_heads)]


def tgi(folder: Path, shared: torch.Tensor, count: str = "medusa_num_heads") -> Any:
    config = json.loads((folder / "config.json").read_text())
    assert "architectures" not in config and config["base_model_name_or_path"] == NAME
    stored = load_file(folder / "medusa_lm_head.safetensors")
    blocks, lm_heads = numbered(stored, config, count)
    if config.get("version") == "2":
        assert config["medusa_num_layers"] == 1 and lm_heads == [None] * len(blocks)
        lm_heads = [shared] * len(blocks)
    assert not stored
    return blocks, lm_heads


def tensorrt_llm(folder: Path, shared: torch.Tensor) -> Any:
    return tgi(folder, shared, "num_medusa_heads")


def fasterdecoding(folder: Path, shared: torch.Tensor) -> Any:
    config = json.loads((folder / "config.json").read_text())
    assert config["base_model_name_or_path"] == NAME
    stored = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    found = numbered(stored, config)
    assert not stored
    return found


def full_hf(folder: Path, shared: torch.Tensor) -> Any:
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    stored = {
        name.removeprefix("medusa_head."): load_file(folder / file)[name]
        for name, file in index.items()
        if name.startswith("medusa_head.")
    }
    found = numbered(stored, config)
    assert not stored
    return found


LOADERS: dict[str, Callable[[Path, torch.Tensor], Any]] = {
    "vllm": vllm,
    "vllm-shared": vllm,
    "tgi": tgi,
    "tgi-v2": tgi,
    "tensorrt-llm": tensorrt_llm,
    "fasterdecoding": fasterdecoding,
    "full-hf": full_hf,
}
CASES = [
    (profile, lm_head, num_heads, num_layers)
    for profile in PROFILES
    for lm_head, num_heads, num_layers in (("own", 3, 1), ("shared", 1, 1 if profile == "tgi-v2" else 2))
    if lm_head == "shared" or PROFILES[profile].lm_heads == "each"
]


def test_every_profile_has_a_loader() -> None:
    assert LOADERS.keys() == PROFILES.keys()


@pytest.mark.parametrize(("profile", "lm_head", "num_heads", "num_layers"), CASES)
def test_exports_load_by_the_loaders_rules_and_come_back_exactly(
    base: lm.CausalLM, profile: str, lm_head: str, num_heads: int, num_layers: int, tmp_path: Path
) -> None:
    model = heads(base, lm_head, num_heads, num_layers)
    folder = tmp_path / "deep" / "heads"
    export_named(model, folder, profile, NAME, max_shard_size="50KB")
    blocks, lm_heads = LOADERS[profile](folder, base.head.weight)
    assert (len(blocks), len(blocks[0])) == (num_heads, num_layers)
    for head, block, projection in zip(model.heads, blocks, lm_heads, strict=True):
        for layer, (weight, bias) in zip(head.layers, block, strict=True):
            assert torch.equal(weight, layer.linear.weight) and torch.equal(bias, layer.linear.bias)
        assert torch.equal(projection, base.head.weight if lm_head == "shared" else head.lm_head.weight)

    with open_heads(folder) as found:
        assert (found.profile.name, found.num_heads, found.num_layers) == (profile, num_heads, num_layers)
    again = lm.MedusaModel.from_pretrained(base, folder)
    # A projection that the file repeats is shared again.
    assert again.shape == model.shape and again.lm_head == lm_head
    ids = torch.randint(3, VOCAB, (2, 7))
    assert torch.equal(again(ids).logits, model(ids).logits)
    meta = lm.MedusaModel.from_pretrained(copy.deepcopy(base).to("meta"), folder)  # names and shapes are checked
    assert meta.shape == model.shape and (meta.lm_head == "own") is (PROFILES[profile].lm_heads == "each")
    apart = lm.MedusaModel.from_pretrained(base, folder, own_lm_heads=True)
    assert apart.lm_head == "own" and torch.equal(apart(ids).logits, model(ids).logits)
    assert len({id(head.lm_head.weight) for head in apart.heads} | {id(base.head.weight)}) == num_heads + 1
    export_named(again, tmp_path / "again", profile, NAME, max_shard_size="50KB")
    for path in folder.iterdir():
        if path.suffix != ".pt":  # A zip, with the name of its folder in it.
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    assert len(list(folder.iterdir())) == len(list((tmp_path / "again").iterdir()))


def test_a_whole_checkpoint_opens_everywhere(base: lm.CausalLM, tmp_path: Path) -> None:
    """full-hf: by our from_pretrained, by transformers, and the base model goes out without the heads again."""
    model = heads(base, "own")
    folder = tmp_path / "full"
    model.export(folder, "full-hf", max_shard_size="60KB")
    alone = lm.from_pretrained(folder)
    for ours, theirs in zip(alone.named_parameters(), base.named_parameters(), strict=True):
        assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])
    ids = torch.randint(3, VOCAB, (1, 9))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(ids).logits
        torch.testing.assert_close(alone(ids).logits, theirs, rtol=1e-4, atol=1e-4)
    again = lm.MedusaModel.from_pretrained(alone, folder)
    assert torch.equal(again(ids).logits, model(ids).logits)

    config = json.loads((folder / "config.json").read_text())
    assert (config.pop("medusa_num_heads"), config.pop("medusa_num_layers")) == (3, 2)
    for name, source in (("base", base), ("alone", alone)):
        source.save_pretrained(tmp_path / name, keep="model")
    assert json.loads((tmp_path / "alone" / "config.json").read_text()) == config
    assert (tmp_path / "alone" / "model.safetensors").read_bytes() == (
        tmp_path / "base" / "model.safetensors"
    ).read_bytes()
    # Without its heads' tensors in the config, they are no part of a checkpoint that is known.
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"not expected.*medusa_head\.0"):
        lm.from_pretrained(folder)
    base.export_spec, spec = None, base.export_spec
    with pytest.raises(ConfigError, match="export_spec"):
        model.export(tmp_path / "x", "full-hf")
    base.export_spec = spec


@pytest.mark.parametrize(
    ("profile", "num_layers"), [(name, profile.max_layers or 2) for name, profile in PROFILES.items()]
)
def test_numbers_come_from_the_tensors(base: lm.CausalLM, profile: str, num_layers: int, tmp_path: Path) -> None:
    """Configs in the wild say 2 heads where the file holds 5; or have no numbers, or are not there."""
    model = heads(base, "shared", 5, num_layers)
    export_named(model, tmp_path / "heads", profile, NAME)
    path = tmp_path / "heads" / "config.json"
    config = json.loads(path.read_text())
    filled = {key: value.value for key, value in PROFILES[profile].config.items() if isinstance(value, Fill)}
    counts = {key: config[key] for key, value in filled.items() if value in ("num_heads", "num_layers")}
    assert {5, num_layers} == set(counts.values())
    ids = torch.randint(3, VOCAB, (1, 7))
    texts = [json.dumps({**config, **dict.fromkeys(counts, wrong)}) for wrong in (1, 2, 3)]
    texts += [json.dumps({key: value for key, value in config.items() if key not in counts}), None]
    for text in texts:
        path.unlink() if text is None else path.write_text(text)
        again = lm.MedusaModel.from_pretrained(base, tmp_path / "heads")
        assert again.shape == model.shape and torch.equal(again(ids).logits, model(ids).logits)


def test_what_is_not_quite_the_bases_lm_head_is_each_heads_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number in the last row of the last head, or the sign of a zero; what is compared is of the base's dtype."""
    monkeypatch.setattr(head_files, "ROWS", 50)
    base = lm.from_config(CONFIGS["llama-3.1"])
    with torch.no_grad():
        base.head.weight[0, 0] = 0.0
    model = heads(base, "shared")
    for place, change in (((-1, -1), 1e-6), ((0, 0), -0.0)):
        model.export(tmp_path / "heads", "tgi", base_model=NAME, overwrite=True)
        path = tmp_path / "heads" / "medusa_lm_head.safetensors"
        stored = load_file(path)
        stored["2.2.weight"][place] = stored["2.2.weight"][place] + change if change else change
        save_file(stored, path, metadata={"format": "pt"})
        again = lm.MedusaModel.from_pretrained(base, tmp_path / "heads")
        assert again.lm_head == "own"
        again.export(tmp_path / "again", "tgi", base_model=NAME, overwrite=True)
        found, wanted = (each.read_bytes() for each in (tmp_path / "again" / path.name, path))
        assert found[-found[::-1].index(b"}") :] == wanted[-wanted[::-1].index(b"}") :]
    model.export(tmp_path / "full", "full-hf")
    half = lm.from_pretrained(tmp_path / "full", dtype=torch.bfloat16)
    assert lm.MedusaModel.from_pretrained(half, tmp_path / "full").lm_head == "shared"


@pytest.mark.parametrize("profile", ["vllm", "vllm-shared", "tgi", "fasterdecoding"])
def test_names_with_a_superfluous_prefix(base: lm.CausalLM, profile: str, tmp_path: Path) -> None:
    """As vLLM, which takes `medusa_heads.` out of the names: some conversions for it leave it in."""
    model = heads(base, "shared")
    export_named(model, tmp_path / "heads", profile, NAME)
    path = tmp_path / "heads" / PROFILES[profile].file
    stored = torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)
    stored = {f"medusa_heads.{name}": tensor.contiguous() for name, tensor in stored.items()}
    (torch.save if path.suffix == ".pt" else save_file)(stored, path)
    again = lm.MedusaModel.from_pretrained(base, tmp_path / "heads")
    ids = torch.randint(3, VOCAB, (2, 7))
    assert again.shape == model.shape and torch.equal(again(ids).logits, model(ids).logits)
    name = next(iter(stored))
    stored[name.removeprefix("medusa_heads.")] = stored[name].clone()
    (torch.save if path.suffix == ".pt" else save_file)(stored, path)
    with pytest.raises(CheckpointError, match=r"with 'medusa_heads\.' and without"):
        lm.MedusaModel.from_pretrained(base, tmp_path / "heads")


def test_vllm_heads_without_biases(base: lm.CausalLM, tmp_path: Path) -> None:
    model = heads(base, "own")
    model.export(tmp_path / "heads", "vllm")
    stored = load_file(tmp_path / "heads" / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in stored.items() if "bias" not in name},
        tmp_path / "heads" / "model.safetensors",
    )
    again = lm.MedusaModel.from_pretrained(base, tmp_path / "heads")
    for name, parameter in again.heads.named_parameters():
        wanted = dict(model.heads.named_parameters())[name]
        assert torch.equal(parameter, torch.zeros_like(wanted) if "bias" in name else wanted)


def test_an_old_pt_file_loads_in_another_dtype(base: lm.CausalLM, tmp_path: Path) -> None:
    model = heads(base, "own")
    model.export(tmp_path / "heads", "fasterdecoding", base_model=NAME)
    path = tmp_path / "heads" / "medusa_lm_head.pt"
    stored = {name: tensor.half() for name, tensor in torch.load(path, weights_only=True).items()}
    torch.save(stored, path, _use_new_zipfile_serialization=False)
    again = lm.MedusaModel.from_pretrained(base, tmp_path / "heads")
    assert torch.equal(again.heads[2].layers[1].linear.bias, stored["2.1.linear.bias"].float())


def test_shared_projections_take_their_room_once_where_they_can(base: lm.CausalLM, tmp_path: Path) -> None:
    sizes = []
    for num_heads in (1, 5):
        heads(base, "shared", num_heads, 1).export(tmp_path / str(num_heads), "fasterdecoding", base_model=NAME)
        sizes.append((tmp_path / str(num_heads) / "medusa_lm_head.pt").stat().st_size)
    assert sizes[1] - sizes[0] < 5 * (HIDDEN * HIDDEN * 4 + 2000) < VOCAB * HIDDEN * 4 * 4


class Wrapped(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)


class OwnHead(torch.nn.Linear):
    """A user's head, on the base's lm_head."""

    def forward(self, hidden: torch.Tensor, targets: None = None) -> torch.Tensor:
        return super().forward(hidden)


def test_own_modules_in_the_place_of_heads_work_or_are_named(tmp_path: Path) -> None:
    """They train and decode; what no format can hold, and what cannot be copied or compared, is said."""
    make_checkpoint(tmp_path / "base", CONFIGS["llama-3.1"])
    plain = lm.from_pretrained(tmp_path / "base")
    own, shared = heads(plain, "own"), heads(plain, "shared")
    own.export(tmp_path / "own")
    shared.export(tmp_path / "shared", "vllm-shared")
    ids = torch.randint(3, VOCAB, (2, 9))
    wanted = plain.generate(ids, 4)
    plain.head = Wrapped(plain.head)
    for i in range(3):
        shared.heads[i] = OwnHead(HIDDEN, HIDDEN)
        own.heads[i].lm_head = Wrapped(own.heads[i].lm_head)
    for model in (own, shared):
        model(ids, labels=ids).loss.backward()
        assert torch.equal(model.generate(ids, 4), wanted)
    with pytest.raises(InputError, match=r"repeats the base's lm_head, but base.head is a Wrapped of inner\.weight"):
        shared.export(tmp_path / "out", "vllm-shared")
    with pytest.raises(CheckpointError, match=r"heads\.0\.lm_head\.inner\.weight"):
        own.export(tmp_path / "out")
    with pytest.raises(InputError, match=r"copies the base's LMHead, but base\.head is a Wrapped"):
        lm.MedusaModel.from_base(plain)
    with pytest.raises(InputError, match=r"copies the base's LMHead, but base\.head is a Wrapped"):
        lm.MedusaModel.from_pretrained(plain, tmp_path / "own")
    with pytest.raises(CheckpointError, match="that is the base model's lm_head"):
        lm.MedusaModel.from_pretrained(plain, tmp_path / "shared")
    plain.head = plain.head.inner
    with pytest.raises(CheckpointError, match=r"without a mapping in the weight map: heads\.0\.weight"):
        shared.export(tmp_path / "out", "vllm-shared")
    assert not (tmp_path / "out").exists()


def test_overwriting_leaves_one_format(base: lm.CausalLM, tmp_path: Path) -> None:
    model = heads(base, "shared", 2, 1)
    (tmp_path / "notes.txt").write_text("mine")
    for profile in [*PROFILES, "tgi"]:
        with pytest.raises(CheckpointError, match="not empty"):
            export_named(model, tmp_path, profile, NAME)
        export_named(model, tmp_path, profile, NAME, overwrite=True)
        found = {path.name for path in tmp_path.iterdir()} - {"generation_config.json"}
        assert found == {"notes.txt", "config.json", PROFILES[profile].file}
        with open_heads(tmp_path) as opened:
            assert opened.profile.name == profile


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lm_head", "layers", "profile", "options", "message"),
    [
        ("own", 1, "vllm-shared", {}, r"own; .*separate lm_heads: vllm, tgi, tensorrt-llm"),
        ("own", 1, "tgi-v2", {"base_model": NAME}, "own"),
        ("shared", 2, "tgi-v2", {"base_model": NAME}, "1 ResBlock per head, but these heads have 2"),
        ("own", 1, "nope", {}, r"unknown.*vllm, vllm-shared, tgi, tgi-v2, tensorrt-llm, fasterdecoding, full-hf"),
        ("own", 1, "full-hf", {"max_shard_size": "big"}, "max_shard_size"),
    ],
)
def test_what_a_profile_cannot_hold(
    base: lm.CausalLM, lm_head: str, layers: int, profile: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        heads(base, lm_head, 2, layers).export(tmp_path / "out", profile, **options)
    with pytest.raises(InputError, match="give base_model"):  # a model from no checkpoint has no name
        heads(lm.from_config(CONFIGS["llama-3.1"]), "own").export(tmp_path / "out", "tgi")
    assert not any(tmp_path.iterdir())


class Marker:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


WRONG_PT: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (lambda path: path.write_bytes(pickle.dumps({"0.0.linear.weight": Marker()}, 2)), "more than tensors"),
    "zipped code": (lambda path: torch.save({"0.0.linear.weight": Marker()}, path), "more than tensors"),
    "module": (lambda path: torch.save(torch.nn.Linear(2, 2), path), "more than tensors"),
    "list": (lambda path: torch.save([torch.ones(2)], path), "not a dict of tensors"),
    "no tensors": (lambda path: torch.save({"0.0.linear.weight": 3}, path), "not a dict of tensors"),
    "truncated": (truncate, "medusa_lm_head.pt"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read"),
    "text": (lambda path: path.write_text("no tensors here, really"), "medusa_lm_head.pt"),
}


@pytest.mark.parametrize("case", WRONG_PT)
def test_pickles_run_no_code(base: lm.CausalLM, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, message = WRONG_PT[case]
    heads(base, "own", 2, 1).export(tmp_path / "heads", "fasterdecoding", base_model=NAME)
    spoil(tmp_path / "heads" / "medusa_lm_head.pt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message) as error:
        lm.MedusaModel.from_pretrained(base, tmp_path / "heads")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def dropped(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


WRONG_TENSORS: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "lm_head": ("tgi", dropped("1.2.weight"), r"1 missing from the checkpoint: 1\.2\.weight"),
    "weight": ("tgi", dropped("1.1.linear.weight"), r"1 missing from the checkpoint: 1\.1\.linear\.weight"),
    "bias": ("vllm", dropped("blocks.1.layers.1.bias"), r"1 missing from the checkpoint: blocks\.1\.layers\.1\.bias"),
    "one more": ("vllm", lambda t: {**t, "scale": torch.ones(1)}, "1 not expected in the checkpoint: scale"),
    "gap": (
        "tensorrt-llm",
        lambda t: {re.sub("^1", "3", key): tensor for key, tensor in t.items()},
        r"missing.*1\.0\.linear\.weight",
    ),
    "shape": ("vllm", lambda t: {**t, "lm_heads.1.weight": torch.ones(3, HIDDEN)}, r"lm_heads\.1\.weight \[3, 60\]"),
    "one lm_head": ("vllm-shared", dropped("lm_heads.0.weight"), r"no lm_heads\.0\.weight that is the base model's"),
    "vocabulary": ("vllm", lambda t: {**t, "token_map": torch.arange(9)}, "truncated vocabulary"),
    "none": ("vllm", lambda t: {"x": torch.ones(1)}, "no Medusa heads"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_heads_that_do_not_fit_are_refused(base: lm.CausalLM, case: str, tmp_path: Path) -> None:
    profile, change, message = WRONG_TENSORS[case]
    lm_head = "own" if PROFILES[profile].lm_heads == "each" else "shared"
    export_named(heads(base, lm_head), tmp_path / "heads", profile, NAME)
    path = tmp_path / "heads" / PROFILES[profile].file
    save_file(change(load_file(path)), path)
    with pytest.raises(CheckpointError, match=message):
        lm.MedusaModel.from_pretrained(base, tmp_path / "heads")


def test_folders_without_heads(base: lm.CausalLM, tmp_path: Path) -> None:
    for folder, message in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "no Medusa heads")):
        with pytest.raises(CheckpointError, match=message):
            lm.MedusaModel.from_pretrained(base, folder)
