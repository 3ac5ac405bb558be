"""Files of a checkpoint that this package does not write: tokenizers with code, shards of other programs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.convert.export_spec import Keep
from ligermodels.convert.files import INDEX, SINGLE

CODE = {
    "tokenization_kimi.py": "from .tool_declaration_ts import declare\nimport torch\n",
    "tool_declaration_ts.py": "import .constants_kimi\n",
    "constants_kimi.py": "A = 1\n",
    "modeling_kimi.py": "from . import other\nfrom .configuration_kimi import KimiConfig\n",
    "configuration_kimi.py": "from .modeling_kimi import again\n",
}
TEXTS = {**CODE, "tiktoken.model": "IQ== 0\n", "tokenizer.model.v3": "x"}
UNRELATED = {"train.py": "print()", "inference.py": "print()"}
TOKENIZER = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
MODEL = {"auto_map": {"AutoConfig": "configuration_kimi.KimiConfig", "AutoModel": "modeling_kimi.KimiModel"}}
OTHER = {"auto_map": {"AutoConfig": "owner/name--train.Config"}}


def write(folder: Path, fields: dict[str, object]) -> Path:
    model = lm.from_config({**CONFIGS["llama-3"], **fields})
    model.save_pretrained(folder)
    for name, text in {**TEXTS, **UNRELATED, "tokenizer_config.json": json.dumps(TOKENIZER)}.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("keep", ["all", "model"])
@pytest.mark.parametrize("fields", [MODEL, OTHER])
def test_tokenizers_with_code_go_out_again(fields: dict[str, object], keep: Keep, tmp_path: Path) -> None:
    """Their vocabulary, and the modules that configs name with the modules that these import, and no others."""
    folder, out = write(tmp_path / "model", fields), tmp_path / "out"
    lm.from_pretrained(folder).save_pretrained(out, keep=keep)
    wanted = set(TEXTS) - (set() if fields is MODEL else {"modeling_kimi.py", "configuration_kimi.py"})
    assert {path.name for path in out.iterdir()} & (TEXTS.keys() | UNRELATED.keys()) == wanted
    assert all((out / name).read_text() == TEXTS[name] for name in wanted)
    assert json.loads((out / "config.json").read_text())["auto_map"] == fields["auto_map"]


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_shards_of_any_name_are_replaced(size: str, tmp_path: Path) -> None:
    """vLLM reads all safetensors of a folder without an index: old shards would replace the new weights."""
    folder = tmp_path / "model"
    lm.from_config(CONFIGS["llama-3"]).save_pretrained(folder)
    tensors = list(load_file(folder / SINGLE).items())
    (folder / SINGLE).unlink()
    shards = {"model.safetensors-00001-of-00002.safetensors": tensors[:9], "model_pp0_ep0.safetensors": tensors[9:]}
    for file, part in shards.items():
        save_file(dict(part), folder / file)
    named = {name: file for file, part in shards.items() for name, _ in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    save_file({"x": torch.ones(1)}, folder / "of_the_user.safetensors")
    model = lm.from_pretrained(folder)
    with torch.no_grad():
        model.head.weight += 1
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, overwrite=True, max_shard_size=size)
    assert not shards.keys() & {path.name for path in folder.iterdir()}
    assert (folder / "of_the_user.safetensors").is_file() and (folder / INDEX).is_file() == (size == "20KB")
    again = lm.from_pretrained(folder).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())
