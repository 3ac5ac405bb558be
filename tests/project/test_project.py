"""The distribution: what an sdist and a wheel hold, that it is all of it, and that the wheel works by itself."""

import email
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from ligermodels.moved import MOVED

ROOT = Path(__file__).parents[2]
KINDS = (".py", ".typed", ".yaml", ".jinja")


def build(source: Path, out: Path) -> Path:
    """The wheel of a source folder, without a network."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(source)], check=True, stdin=subprocess.DEVNULL)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in a source distribution that setuptools makes of a copy of the repository's own files."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in repository():
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        else:
            shutil.copy(ROOT / name, target)
    command = [sys.executable, "-c", "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])", str(folder)]
    done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source distribution, as an index's users get it."""
    return build(sdist, tmp_path_factory.mktemp("wheel"))


def repository() -> list[str]:
    """The files that git has or would add; without git, of an unpacked sdist, all of them."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip("not a git repository")
    return [name for name in found.stdout.split("\0") if name and os.path.lexists(ROOT / name)]


def test_the_sdist_holds_the_repository(sdist: Path) -> None:
    """Tests, pages, examples, pins: what one needs to change, test and package the code."""
    missing = [name for name in repository() if not (sdist / name).exists()]
    assert not missing


def test_the_wheel_holds_every_module_and_convert_as_a_subpackage(wheel: Path) -> None:
    """A package that pyproject.toml's list forgets, or a top-level `convert`, would show only once installed."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    folders = (ROOT / "ligermodels", ROOT / "convert")
    files = (path for folder in folders for path in folder.rglob("*") if path.suffix in KINDS)
    ours = {path.relative_to(ROOT).as_posix() for path in files}
    assert packed == {f"ligermodels/{path}" if path.startswith("convert/") else path for path in ours}


def test_the_index_page_has_the_readme_without_links_into_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(archive.read(metadata))
    assert message["Description-Content-Type"] == "text/markdown"
    shown = bytes(message.get_payload(decode=True)).decode()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert shown.startswith("# ligermodels") and shown.count("\n## ") == readme.count("\n## ")
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert links and all(link.startswith(("https://", "#")) for link in links)


def test_the_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has the dependencies, and neither this repository nor its editable installation."""
    venv.create(tmp_path / "clean", with_pip=False)
    python = tmp_path / "clean" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True, stdin=subprocess.DEVNULL)
    (packages,) = (tmp_path / "clean").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]  # paths of a .pth: theirs are not followed
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")
    program = (
        "import torch, ligermodels as lm, ligermodels.convert.weight_map as convert\n"
        "config = dict(model_type='llama', vocab_size=50, hidden_size=16, intermediate_size=24,\n"
        "    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)\n"
        "model = lm.from_config(config); ids = torch.arange(12)[None]\n"
        "model(ids, labels=ids).loss.backward(); model.save_pretrained('out')\n"
        "assert torch.equal(lm.from_pretrained('out')(ids).logits, model.eval()(ids).logits)\n"
        "print(lm.__file__, convert.__file__)\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([str(python), "-c", program], **run)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(path.startswith(str(tmp_path / "clean")) for path in done.stdout.split())
    command = tmp_path / "clean" / "bin" / "ligermodels"
    recipe = subprocess.run([str(command), "recipe", "fine-tuning"], **run)
    assert recipe.returncode == 0 and "learning_rate" in recipe.stdout, recipe.stderr


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports test files by name, and refuses the second of a name; `make test` leaves out some rooms."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}


def test_every_version_says_the_same() -> None:
    import ligermodels

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == ligermodels.__version__
    assert f"\n## {ligermodels.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_have_what_they_need(form: Path) -> None:
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.stem == "config":
        assert content.keys() <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= content.keys()
    kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    identifiers = [field["id"] for field in content["body"]]
    assert all(field["type"] in kinds and field["attributes"].get("label") for field in content["body"])
    assert len(set(identifiers)) == len(identifiers)


@pytest.mark.parametrize(("old", "new"), sorted(MOVED.items()))
def test_old_import_paths_warn_and_give_the_module_of_the_new_path(old: str, new: str) -> None:
    sys.modules.pop(f"ligermodels.{old}", None)
    with pytest.warns(DeprecationWarning, match=re.escape(f"ligermodels.{old} is now ligermodels.{new}")):
        found = importlib.import_module(f"ligermodels.{old}")
    assert found is importlib.import_module(f"ligermodels.{new}")
    assert found.__spec__ is not None and found.__spec__.name == found.__name__ == f"ligermodels.{new}"


@pytest.mark.parametrize("name", ["KLToReference", "evaluate", "evaluate_kl", "perplexity"])
def test_evaluation_of_models_warns_at_its_old_path(name: str) -> None:
    from ligermodels import evaluation
    from ligermodels.speculative import evaluation as old

    with pytest.warns(DeprecationWarning, match=rf"is now ligermodels\.evaluation\.{name}; change the import"):
        found = getattr(old, name)
    assert found is getattr(evaluation, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = old.nothing
