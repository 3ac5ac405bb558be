"""Adapters and heads on the command line: info, chat, generate and export with them; lora to-hf, from-hf and merge."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import serving
from named_exports import export_named
from runs import with_decoder
from safetensors.torch import load_file, save_file
from test_lora import draw, settings
from torch import Tensor
from typer.testing import CliRunner, Result
from zoo import CONFIGS, OF_EACH_KIND, make_checkpoint

import ligermodels as lm
from ligermodels.adapt.targets import layouts_of, targets, transformers_layout
from ligermodels.cli import app
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import AdapterWarning
from ligermodels.speculative.profiles import PROFILES
from ligermodels.training import FineTuningRecipe, FusedAdamW
from ligermodels.training.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 9


def run(*arguments: object, input: str | None = None) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), input=input)


def ok(*arguments: object, input: str | None = None) -> str:
    result = run(*arguments, input=input)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object, code: int = 1, input: str | None = None) -> str:
    result = run(*arguments, input=input)
    assert result.exit_code == code and "Traceback" not in result.output and not result.stdout, result.output
    return result.stderr


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    same = one.keys() == other.keys()
    return same and all(t.dtype == other[name].dtype and torch.equal(t, other[name]) for name, t in one.items())


@pytest.fixture(scope="module")
def speaker(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` with a decoder of its tokens: what it says is text."""
    return with_decoder(base, tmp_path_factory.mktemp("speaker") / "model")


@pytest.fixture(scope="module")
def adapter(speaker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter that changes what `speaker` says."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    torch.manual_seed(3)
    model = draw(lm.add_lora(lm.from_pretrained(speaker), 3, lora_alpha=24))
    lm.save_adapter(model, folder)
    return folder


@pytest.fixture(scope="module")
def heads(speaker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "heads"
    lm.MedusaModel.from_base(lm.from_pretrained(speaker), num_heads=2).save_pretrained(folder)
    return folder


def without_base(adapter: Path, folder: Path, base: str | None) -> Path:
    """A copy of the adapter that names another base."""
    shutil.copytree(adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    return folder


# -- to-hf and from-hf -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_adapters_of_every_kind_are_exact_both_ways(name: str, tmp_path: Path) -> None:
    base, run_, theirs, ours = (tmp_path / each for each in ("base", "run", "theirs", "ours"))
    make_checkpoint(base, CONFIGS[name])
    model = lm.from_pretrained(base)

    # A file as PEFT writes it, with ranks and scalings that differ.
    shapes = {name: tensor.shape for name, tensor in model.hf_state_dict().items()}
    paths = list(targets(model, transformers_layout(model), layouts_of(model)))
    leaves = sorted({path.rpartition(".")[2] for path in paths})
    ranks = {path: 5 if path == paths[1] else 2 if path.endswith(f".{leaves[0]}") else 4 for path in paths}
    stored = {}
    for path, r in ranks.items():
        out, width = shapes[f"{path}.weight"]
        stored[f"base_model.model.{path}.lora_A.weight"] = torch.randn(r, width, dtype=torch.bfloat16)
        stored[f"base_model.model.{path}.lora_B.weight"] = torch.randn(out, r, dtype=torch.bfloat16)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": leaves, "alpha_pattern": {leaves[-1]: 3}}
    config |= {"rank_pattern": {paths[1]: 5, leaves[0]: 2}, "base_model_name_or_path": str(base)}
    theirs.mkdir()
    save_file(stored, theirs / "adapter_model.safetensors")
    (theirs / "adapter_config.json").write_text(json.dumps(config))
    ok("lora", "from-hf", theirs, ours)
    assert equal(tensors_of(ours), stored)
    whole_way = OF_EACH_KIND.index(name) % 4 == 0
    other = lm.load_adapter(lm.from_pretrained(base) if whole_way else model, ours)
    found = {path: (r, alpha) for _, path, r, alpha, _ in settings(other)}
    assert found == {path: (r, 3 if path.endswith(f".{leaves[-1]}") else 6) for path, r in ranks.items()}

    # What PEFT wrote, opened itself; and a run's checkpoint, beside what the run would have written: the way is the
    # same for all kinds.
    if not whole_way:
        return
    one, ids = lm.load_adapter(lm.from_pretrained(base), theirs), torch.randint(3, 131, (1, 9))
    assert settings(one) == settings(other) and torch.equal(one(ids).logits, other(ids).logits)
    given = {"base": base, "data": "x", "lora_rank": 3, "lora_alpha": 7, "lora_dropout": 0.1}
    recipe = FineTuningRecipe().changed(given)
    trained = draw(lm.add_lora(model, 3, lora_alpha=7.0, lora_dropout=0.1))
    lm.save_adapter(trained, tmp_path / "end")
    (run_ / "checkpoints").mkdir(parents=True)
    (run_ / "recipe.yaml").write_text(yaml.safe_dump(recipe.settings()))
    checkpoints = Checkpoints(run_ / "checkpoints")
    checkpoints.save(4, trained, FusedAdamW([p for p in trained.parameters() if p.requires_grad]), {})
    checkpoints.wait()
    ok("lora", "to-hf", run_, tmp_path / "out")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "end" / file).read_bytes()


def test_the_adapter_of_any_checkpoint_of_a_run(base: Path, data: Path, tmp_path: Path) -> None:
    """With the chat template that the run was given; of a finished run without checkpoints it is the adapter itself."""
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    flags = ["--lora-rank", 3, "--steps", 6, "--seq-len", 16, "--batch-tokens", 32, "--lr", 1e-2]
    flags += ["--checkpoint-every", 2, "--keep-checkpoints", 3, "--max-bad-lines", 1, "--validation-fraction", 0]
    out = tmp_path / "run"
    ok("train", base, "--data", data, "--out", out, *flags, "--chat-template", tmp_path / "mine.jinja")
    ok("lora", "to-hf", out, tmp_path / "newest")
    ok("lora", "to-hf", out, tmp_path / "first", "--step", 2)
    assert equal(tensors_of(tmp_path / "newest"), tensors_of(out))
    assert not equal(tensors_of(tmp_path / "first"), tensors_of(out))
    for folder in ("newest", "first", "run"):
        files = {path.name for path in (tmp_path / folder).iterdir() if path.is_file()}
        assert {"adapter_config.json", "chat_template.jinja"} <= files and "tokenizer.json" not in files

    assert "no checkpoint of step 3; there are: 2, 4, 6" in refused("lora", "to-hf", out, tmp_path / "no", "--step", 3)
    assert "not empty" in refused("lora", "to-hf", out, tmp_path / "first")
    shutil.rmtree(out / "checkpoints")
    ok("lora", "to-hf", out, tmp_path / "again")
    assert (
        equal(tensors_of(tmp_path / "again"), tensors_of(out))
        and (tmp_path / "again" / "chat_template.jinja").is_file()
    )
    assert "no checkpoints of a run" in refused("lora", "to-hf", out, tmp_path / "no", "--step", 2)
    whole = tmp_path / "whole"
    ok("train", base, "--data", data, "--out", whole, *flags[2:])
    assert "lora_rank: is not set" in refused("lora", "to-hf", whole, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_from_hf_needs_the_right_base(adapter: Path, speaker: Path, tmp_path: Path) -> None:
    nameless = without_base(adapter, tmp_path / "nameless", None)
    assert "names no base model" in refused("lora", "from-hf", nameless, tmp_path / "out")
    ok("lora", "from-hf", nameless, tmp_path / "out", "--base", speaker, "--dtype", "bfloat16")
    stored, cast = tensors_of(adapter), tensors_of(tmp_path / "out")
    assert equal(cast, {name: tensor.bfloat16() for name, tensor in stored.items()})
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(speaker)
    make_checkpoint(tmp_path / "other", CONFIGS["phi3"])
    failed = refused("lora", "from-hf", adapter, tmp_path / "no", "--base", tmp_path / "other")
    assert "has model_type 'llama', but this model has 'phi3'" in failed
    failed = refused("lora", "from-hf", nameless, tmp_path / "no", "--base", tmp_path / "other")
    assert "are no linear layers of this model" in failed and not (tmp_path / "no").exists()


# -- info --------------------------------------------------------------------------------------------------------------


def test_info_of_an_adapter(adapter: Path, speaker: Path, tmp_path: Path) -> None:
    tensors = tensors_of(adapter)
    count = sum(tensor.numel() for tensor in tensors.values())
    found = json.loads(ok("info", adapter, "--json"))
    leaves = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert sorted(found.pop("targets")) == sorted(leaves)
    assert found == {
        "adapter": str(adapter),
        "base_model": str(speaker),
        "type": "LORA",
        "rank": 3,
        "alpha": 24,
        "use_rslora": False,
        "modules_to_save": [],
        "trainable_token_indices": [],
        "adapted_layers": len(tensors) // 2,
        "parameters": count,
        "weights_bytes": 4 * count,
        "tensors": len(tensors),
        "stored_dtypes": ["float32"],
    }
    shown = ok("info", adapter)
    assert str(speaker) in shown and f"{count:,}" in shown

    # One that native LoRA does not open says why; one beside a checkpoint is a part of it.
    other = shutil.copytree(adapter, tmp_path / "dora")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    assert "'use_dora'" in json.loads(ok("info", other, "--json"))["not_opened"]
    both = shutil.copytree(speaker, tmp_path / "both")
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    found = json.loads(ok("info", both, "--json"))
    assert found["adapter"]["rank"] == 3 and found["model_type"] == "llama"
    assert "adapter: rank" in ok("info", both)
    (other / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refused("info", other)


@pytest.mark.parametrize("profile", PROFILES)
def test_info_of_heads(profile: str, speaker: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = lm.from_pretrained(speaker)
    medusa = lm.MedusaModel.from_base(base, num_heads=3, num_layers=1, lm_head="shared")
    export_named(medusa, tmp_path / "heads", profile, "owner/name")
    found = json.loads(ok("info", tmp_path / "heads", "--json"))
    if profile == "full-hf":
        assert found["model_type"] == "llama" and found["tensors"] > found["medusa_heads"]["tensors"]
        found = {"medusa_heads": str(tmp_path / "heads"), **found["medusa_heads"]}
    lm_heads = {"each": 3, "one": 1, "none": 0}[PROFILES[profile].lm_heads]
    hidden, vocab = base.config.hidden_size, base.config.vocab_size
    count = 3 * hidden * (hidden + 1) + lm_heads * hidden * vocab
    named = "owner/name" if "base_model_name_or_path" in PROFILES[profile].config else None
    assert found == {
        "medusa_heads": str(tmp_path / "heads"),
        "format": profile,
        "base_model": named,
        "heads": 3,
        "layers": 1,
        "hidden_size": hidden,
        "lm_heads": lm_heads,
        "parameters": count,
        "weights_bytes": 4 * count,
        "tensors": 6 + lm_heads,
        "stored_dtypes": ["float32"],
    }
    assert f"{count:,}" in ok("info", tmp_path / "heads")


CHILD = """
import json, sys
from typer.testing import CliRunner
from ligermodels.cli import app
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments, input="Hi\\n")
    print(json.dumps([result.exit_code, result.stdout, result.stderr]))
"""


def test_from_the_hub(speaker: Path, adapter: Path, heads: Path, tmp_path: Path) -> None:
    files = {
        folder: {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (speaker, adapter, heads)
    }
    config = json.loads(files[adapter]["adapter_config.json"])
    named = json.dumps({**config, "base_model_name_or_path": "me/base"}).encode()
    template = "{% for m in messages %}{{ m.content }} {% endfor %}<|im_start|>"
    tuned = {**files[adapter], "adapter_config.json": named, "chat_template.jinja": template.encode()}
    asked = ["--greedy", "--max-new-tokens", str(TOKENS), "--device", "cpu"]
    commands = [
        ["info", "me/tuned", "--json"],
        ["info", "me/heads"],
        ["info", "me/heads", "--weights", "--json"],
        ["chat", "me/tuned", *asked],
        ["info", "me/nothing"],
        ["lora", "from-hf", "me/tuned", str(tmp_path / "out")],
    ]
    with serving({"me/base": files[speaker], "me/tuned": tuned, "me/heads": files[heads]}) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        child = [sys.executable, "-c", CHILD, json.dumps(commands)]
        out = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    of_adapter, of_heads, with_weights, said, nothing, _ = [json.loads(line) for line in out.stdout.splitlines()]
    assert json.loads(of_adapter[1])["base_model"] == "me/base"
    assert of_heads[0] == 1 and "--weights downloads it" in of_heads[2]
    assert json.loads(with_weights[1])["heads"] == 2
    assert nothing[0] == 1 and "no such local folder, nor such a repository" in nothing[2]
    (tmp_path / "mine.jinja").write_text(template)
    given = ["--adapter", adapter, "--chat-template", tmp_path / "mine.jinja"]
    assert said[1] == ok("chat", speaker, *given, *asked, input="Hi\n") != ok("chat", speaker, *asked, input="Hi\n")
    assert equal(tensors_of(tmp_path / "out"), tensors_of(adapter))
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template


# -- chat, generate, export --------------------------------------------------------------------------------------------


def test_chat_with_an_adapter_is_that_of_the_merged_model(
    speaker: Path, adapter: Path, heads: Path, tmp_path: Path
) -> None:
    """Given beside its base or alone, merged by either command, with Medusa heads of the base or without."""
    asked, turns = ["--greedy", "--max-new-tokens", TOKENS, "--device", "cpu"], "May I copy it?\nAnd change it?\n"
    plain = ok("chat", speaker, *asked, input=turns)
    said = ok("chat", speaker, "--adapter", adapter, *asked, input=turns)
    assert plain != said and said.endswith("\n")
    assert ok("chat", adapter, *asked, input=turns) == said
    assert ok("chat", adapter, "--heads", heads, *asked, input=turns) == said
    ok("lora", "merge", speaker, adapter, tmp_path / "merged")
    ok("export", speaker, tmp_path / "exported", "--adapter", adapter)
    one, other = (load_file(tmp_path / each / "model.safetensors") for each in ("merged", "exported"))
    assert equal(one, other) and not equal(one, load_file(speaker / "model.safetensors"))
    assert ok("chat", tmp_path / "merged", *asked, input=turns) == said

    prompt = ["--prompt", "May I", "--max-new-tokens", TOKENS, "--device", "cpu", "--greedy"]
    ids = torch.tensor([Tokenizer(speaker).encode("May I")])
    wanted = lm.load_adapter(lm.from_pretrained(speaker), adapter).generate(ids, TOKENS, do_sample=False)[0].tolist()
    text = Tokenizer(speaker).continuation(wanted[: ids.shape[1]], wanted[ids.shape[1] :])
    for given in ([speaker, "--adapter", adapter], [adapter], [adapter, "--heads", heads]):
        assert ok("generate", *given, *prompt) == text + "\n"


def test_export_keeps_or_adds_heads(speaker: Path, adapter: Path, heads: Path, tmp_path: Path) -> None:
    """Those in the checkpoint are not lost; with an adapter the base is merged, and the heads stay."""
    whole, again, plain = tmp_path / "whole", tmp_path / "again", tmp_path / "plain"
    ok("export", speaker, whole, "--heads", heads, "--adapter", adapter)
    ok("export", speaker, plain, "--adapter", adapter)
    ok("export", whole, again, "--dtype", "bfloat16")
    found, merged = load_file(whole / "model.safetensors"), load_file(plain / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in merged.items())
    assert len([name for name in found if name.startswith("medusa_head.")]) == len(found) - len(merged) > 0
    cast = load_file(again / "model.safetensors")
    assert equal(cast, {name: tensor.bfloat16() if name in merged else tensor for name, tensor in found.items()})
    assert json.loads(ok("info", again, "--json"))["medusa_heads"]["heads"] == 2
    for keep in ("without-heads", "model"):
        ok("export", whole, tmp_path / keep, "--keep", keep)
        assert equal(load_file(tmp_path / keep / "model.safetensors"), merged)
        assert "medusa_heads" not in json.loads(ok("info", tmp_path / keep, "--json"))
        assert "--keep" in refused("export", whole, tmp_path / "no", "--heads", heads, "--keep", keep, code=2)


def test_export_of_heads_alone_finds_the_model_that_they_name(speaker: Path, heads: Path, tmp_path: Path) -> None:
    """As `--heads` beside the model gives it, or an error says what to give."""
    named, lost, whole = (tmp_path / name for name in ("named", "lost", "whole"))
    for out, base in ((named, str(speaker)), (lost, str(tmp_path / "gone"))):
        ok("medusa", "export", speaker, heads, out, "--profile", "tgi", "--base-model", base)
    ok("export", named, whole)
    ok("export", speaker, tmp_path / "expected", "--heads", heads)
    found, expected = (load_file(folder / "model.safetensors") for folder in (whole, tmp_path / "expected"))
    assert equal(found, expected) and any(name.startswith("medusa_head.") for name in found)
    ok("medusa", "export", speaker, heads, tmp_path / "vllm", "--profile", "vllm")
    for folder, why in (
        (tmp_path / "vllm", "holds heads and no model, and they name no"),
        (lost, "base model cannot be opened"),
    ):
        message = refused("export", folder, tmp_path / "no")
        assert why in message and f"--heads {folder}" in message
    assert not (tmp_path / "no").exists()


def test_the_tokenizer_and_template_of_an_adapter(speaker: Path, adapter: Path, tmp_path: Path) -> None:
    """They are used, and exported; a tokenizer with more tokens than the model is an error."""
    own = Path(shutil.copytree(adapter, tmp_path / "own"))
    tokenizer = json.loads((speaker / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (own / "tokenizer.json").write_text(json.dumps(tokenizer))
    (own / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    ok("export", own, tmp_path / "out")
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / file).read_bytes() == (own / file).read_bytes()
    asked = ["--greedy", "--max-new-tokens", TOKENS, "--device", "cpu"]
    assert ok("chat", own, *asked, input="May I\n") == ok("chat", tmp_path / "out", *asked, input="May I\n")
    tokenizer["model"]["vocab"]["longer"] = 10_000
    (own / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "save the adapter with the rows of the new tokens in embed_tokens" in refused("export", own, tmp_path / "no")


def test_what_is_no_model_is_named(speaker: Path, adapter: Path, heads: Path, tmp_path: Path) -> None:
    lost = without_base(adapter, tmp_path / "lost", str(tmp_path / "nowhere"))
    nameless = without_base(adapter, tmp_path / "nameless", None)
    both = shutil.copytree(speaker, tmp_path / "both")
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    for arguments, words in (
        ([heads], "holds heads and no model"),
        ([adapter, "--adapter", adapter], "is an adapter itself"),
        ([lost], "nowhere: no such folder; give that as PATH, and --adapter"),
        ([nameless], "names no base model"),
        ([speaker, "--adapter", speaker], "adapter_config.json"),
    ):
        for command in (["generate", "--prompt", "x"], ["export", tmp_path / "no"], ["chat"]):
            name, *others = command
            assert words in refused(name, *arguments[:1], *others, *arguments[1:], input="Hi\n")
    said = f"warning: {both}: the adapter beside the model is not applied"
    for command in (["generate"], ["generate", "--adapter", both]):
        result = run(*command[:1], both, *command[1:], "--prompt", "Hi", "--max-new-tokens", 1)
        assert (said in result.stderr) == (len(command) == 1), result.output
    train = ["--data", tmp_path / "no.txt", "--out", tmp_path / "no"]
    merge = "commands without --adapter take a checkpoint with both, which `ligermodels lora merge MODEL ADAPTER OUT`"
    for command in ("train", "eagle train"):
        assert merge in refused(*command.split(), adapter, *train)
        assert "(commands that train heads: --start-from)" in refused(*command.split(), heads, *train)
    with pytest.warns(AdapterWarning, match="lora merge"):
        lm.from_pretrained(both, device="meta")
    (both / "tokenizer.json").unlink()  # as the warning says, also without a tokenizer
    ok("lora", "merge", both, both, tmp_path / "merged")
    assert not (tmp_path / "no").exists()


def test_a_checkpoint_takes_the_place_of_an_adapter_alone(speaker: Path, adapter: Path, tmp_path: Path) -> None:
    """transformers would open the adapter's base model in place of the checkpoint. Beside a checkpoint it stays."""
    folder, kept = tmp_path / "adapter", tmp_path / "both"
    shutil.copytree(adapter, folder)
    shutil.copytree(speaker, kept)
    for path in adapter.glob("adapter_*"):
        shutil.copy(path, kept)
    for out in (folder, kept):
        ok("lora", "merge", speaker, adapter, out, "--overwrite")
    assert (folder / "model.safetensors").is_file() and not list(folder.glob("adapter_*"))
    assert len(list(kept.glob("adapter_*"))) == 2


def test_export_and_merge_into_its_own_input(speaker: Path, adapter: Path, tmp_path: Path) -> None:
    """Weights are mapped from the files that are replaced: what is written is what another folder would get."""
    ok("export", speaker, tmp_path / "same")
    ok("lora", "merge", speaker, adapter, tmp_path / "merged")
    inputs = {name: tmp_path / name for name in ("model", "base", "lora")}
    for name, folder in inputs.items():
        shutil.copytree(adapter if name == "lora" else speaker, folder)
    assert "--overwrite" in refused("export", inputs["model"], inputs["model"])
    ok("export", inputs["model"], inputs["model"], "--overwrite")
    ok("lora", "merge", inputs["base"], adapter, inputs["base"], "--overwrite")
    ok("lora", "merge", speaker, inputs["lora"], inputs["lora"], "--overwrite")
    for name, folder in inputs.items():
        wanted = tmp_path / ("same" if name == "model" else "merged")
        assert {each.name for each in folder.iterdir()} == {each.name for each in wanted.iterdir()}
        for file in wanted.iterdir():
            assert (folder / file.name).read_bytes() == file.read_bytes(), (name, file.name)
