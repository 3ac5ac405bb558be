"""The code of the documentation's pages, run as it stands but for the checkpoint and the device."""

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from zoo import CONFIGS, make_checkpoint

MIXTURE = "Qwen/Qwen3-30B-A3B"
DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    pytest.param(code, id=f"{page}-{i}")
    for page in ("transformers", "trainers", "peft", "evaluation", "several-gpus")
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_a_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save(tmp_path / "checkpoint")
    code = code.replace("meta-llama/Llama-3.2-1B", str(folder))
    if MIXTURE in code:
        make_checkpoint(tmp_path / "mixture", CONFIGS["qwen3_moe-normalised"])
        code = code.replace(MIXTURE, str(tmp_path / "mixture"))
    code = re.sub(r"(TrainingArguments|SFTConfig|DPOConfig)\(\s*", r"\1(use_cpu=True, bf16=False, output_dir=", code)
    code = code.replace("HFLM(", "HFLM(device='cpu', ").replace("Accelerator()", "Accelerator(cpu=True)")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "page", "exec"), names)
