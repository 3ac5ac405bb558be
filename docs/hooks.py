"""What mkdocs.yml runs: pages and examples outside of docs/ as part of the site, under links that GitHub follows too.

README.md, CONTRIBUTING.md and CHANGELOG.md are at the top of the repository and are pages of the site all the same. On
GitHub they link to `docs/PAGE.md`, and pages link to `../README.md` and `../examples/FILE`; in the site all of these
are in one folder.

A site without a public function or class in its reference is an error.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
FILES = ("LICENSE", *(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.[pi]*")))
LINK = re.compile(r"(\]\(|src=\")(?:\.\./|docs/)(?!\.\.)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """With those that are not in docs/."""
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for name in FILES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links out of docs/ and into it, as links within the site."""
    folder, _, _ = page.file.src_uri.rpartition("/")
    return LINK.sub(r"\1", markdown) if not folder else markdown.replace("](../docs/", "](../")


def on_post_build(*, config: MkDocsConfig) -> None:
    """Each name in the `__all__` of a package that a page of the reference is of has its place there."""
    missing = []
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        shown = (Path(config.site_dir) / "reference" / page.name).with_suffix(".html").read_text(encoding="utf-8")
        for name in re.findall(r"^::: ([a-z_.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            package = _module(name)
            for member in getattr(package, "__all__", ()):
                found = getattr(package, member)
                if (inspect.isclass(found) or inspect.isfunction(found)) and not re.search(
                    rf'id="{name}\.([a-z_.]+\.)?{found.__name__}"', shown
                ):
                    missing.append(f"{name}.{member}")
    if missing:
        raise PluginError(f"docs/reference has no place for {', '.join(sorted(missing))}")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # of a function or class
        return None
