"""Exports opened by another release of transformers than the one that is installed here.

`make test-transformers4` runs this with the last release before 5; or LIGERMODELS_OTHER_PYTHON names an interpreter
that has torch and the transformers to try.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_keep import make_gemma3
from zoo import CONFIGS, make_checkpoint, relative_error

import ligermodels as lm

PYTHON = os.environ.get("LIGERMODELS_OTHER_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="LIGERMODELS_OTHER_PYTHON names no interpreter")

TOLERANCE = 1e-5
NAMES = ["gemma3", *(f"{name}{suffix}" for name in CONFIGS for suffix in ("", "-rewritten"))]
CHILD = """
import json, sys
from pathlib import Path
import torch, transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

transformers.utils.logging.set_verbosity_error()
root = Path(sys.argv[1])
ids = torch.tensor(json.loads((root / "ids.json").read_text()))
for folder in sorted(root.glob("*/config.json")):
    folder = folder.parent
    if json.loads((folder / "config.json").read_text())["model_type"] not in CONFIG_MAPPING_NAMES:
        continue
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        found = {kind: sorted(map(str, names)) for kind, names in info.items()}
        with torch.no_grad():
            save_file({"logits": model.eval()(ids).logits}, root / f"{folder.name}.safetensors")
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    (root / f"{folder.name}.json").write_text(json.dumps(found))
print(transformers.__version__)
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of exports, which the other transformers has tried to open; and its version.

    Two of each family: of a checkpoint with the config as it is in the zoo, and as the installed transformers writes
    it. And one with a vision tower.
    """
    root, saved = tmp_path_factory.mktemp("exports"), tmp_path_factory.mktemp("saved")
    (root / "ids.json").write_text(json.dumps(ids().tolist()))
    for name, config in CONFIGS.items():
        oracle = make_checkpoint(saved / name, config)
        lm.from_pretrained(saved / name).save_pretrained(root / name, max_shard_size="50KB")
        oracle.config.save_pretrained(saved / name)
        lm.from_pretrained(saved / name).save_pretrained(root / f"{name}-rewritten")
    make_gemma3(saved / "gemma3")
    lm.from_pretrained(saved / "gemma3").save_pretrained(root / "gemma3", keep="all")
    child = subprocess.run([str(PYTHON), "-c", CHILD, root], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return root, child.stdout.strip()


def ids() -> torch.Tensor:
    return torch.randint(3, 131, (2, 41), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_the_export_opens_and_gives_the_same_logits(name: str, exports: tuple[Path, str]) -> None:
    root, version = exports
    if not (root / f"{name}.json").is_file():
        pytest.skip(f"transformers {version} does not know this model_type")
    found: dict[str, Any] = json.loads((root / f"{name}.json").read_text())
    assert not any(found.values()), found
    theirs = load_file(root / f"{name}.safetensors")["logits"]
    with torch.no_grad():
        assert relative_error(lm.from_pretrained(root / name)(ids()).logits, theirs) < TOLERANCE
