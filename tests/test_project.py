"""The distribution: what a wheel holds, and that it holds all of it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_every_module_and_convert_as_a_subpackage(tmp_path: Path) -> None:
    """A package that pyproject.toml's list forgets, or a top-level `convert`, would show only once installed."""
    source = tmp_path / "source"
    for folder in ("ligermodels", "convert"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(source)], check=True, stdin=subprocess.DEVNULL)

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    kinds = (".py", ".typed", ".yaml")
    files = (path.relative_to(source).as_posix() for path in source.rglob("*") if path.suffix in kinds)
    ours = {path for path in files if not path.startswith("build/")}
    assert packed == {f"ligermodels/{path}" if path.startswith("convert/") else path for path in ours}
