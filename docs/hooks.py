"""What mkdocs.yml runs: pages and examples outside of docs/ as part of the site, under links that GitHub follows too.

README.md, CONTRIBUTING.md and CHANGELOG.md are at the top of the repository and are pages of the site all the same. On
GitHub they link to `docs/PAGE.md`, and pages link to `../README.md` and `../examples/FILE`; in the site all of these
are in one folder.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
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
