"""Hooks of mkdocs.yml: files from outside docs/, links, tables of settings, and a check of the reference.

README.md, CONTRIBUTING.md, CHANGELOG.md and examples/ lie outside docs/ and are part of the site. On GitHub they link
to `docs/PAGE.md`, and pages link to `../README.md` and `../examples/FILE`; in the site these files are in one folder.

`<!-- settings: MODULE.CLASS -->` in a page becomes a table of the settings that a pydantic class declares.

A site without a public function or class in its reference is an error.
"""

import importlib
import inspect
import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
FILES = ("LICENSE", *(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.[pi]*")))
LINK = re.compile(r"(\]\(|src=\")(?:\.\./|docs/)(?!\.\.)")
SETTINGS = re.compile(r"^<!-- settings: ([\w.]+)\.(\w+) -->$", re.MULTILINE)
DEFAULT = re.compile(r"\s*\[default: (.+)\]$")
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages and files that lie outside docs/."""
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for name in FILES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Write the tables of settings, and replace links out of docs/ and into it by links within the site."""
    markdown = SETTINGS.sub(lambda name: settings_table(getattr(importlib.import_module(name[1]), name[2])), markdown)
    folder, _, _ = page.file.src_uri.rpartition("/")
    return LINK.sub(r"\1", markdown) if not folder else markdown.replace("](../docs/", "](../")


def settings_table(settings: Any) -> str:
    """Table of the fields that a pydantic class itself declares: name, type, default, description."""
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name in settings.__annotations__:
        if name not in settings.model_fields:
            continue  # a ClassVar
        field = settings.model_fields[name]
        description = field.description or ""
        computed = DEFAULT.search(description)
        default = computed[1] if computed else _value(field.default)
        bounds = {key: getattr(bound, key) for bound in field.metadata for key in LIMITS if hasattr(bound, key)}
        if bounds.get("lt") == bounds.get("le"):
            bounds.pop("le", None)
        text = ", ".join([_type(field.annotation), *(f"{LIMITS[key]} {bound}" for key, bound in bounds.items())])
        cells = (f"`{name}`", text, default, DEFAULT.sub("", description))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _type(annotation: Any) -> str:
    """A type as text: `int`, the values of a Literal, list of `str`, ... None is `null`, as in a recipe."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if get_origin(annotation) is tuple:
        return f"list of {_type(arguments[0])}"
    return "`null`" if annotation is type(None) else f"`{annotation.__name__}`"


def _value(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[default]
    if isinstance(default, dict):
        return f"`{default}`"
    if isinstance(default, tuple):
        return "`[]`" if not default else f"`{list(default)}`"
    return f"`{default}`" if isinstance(default, str | int | float) else f"`{type(default).__name__}()`"


def on_post_build(*, config: MkDocsConfig) -> None:
    """Raise PluginError unless each name in the `__all__` of a package of the reference has an entry."""
    missing = []
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        html = (Path(config.site_dir) / "reference" / page.name).with_suffix(".html").read_text(encoding="utf-8")
        for name in re.findall(r"^::: ([a-z_.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            package = _module(name)
            for member in getattr(package, "__all__", ()):
                exported = getattr(package, member)
                if (inspect.isclass(exported) or inspect.isfunction(exported)) and not re.search(
                    rf'id="{name}\.([a-z_.]+\.)?{exported.__name__}"', html
                ):
                    missing.append(f"{name}.{member}")
    if missing:
        raise PluginError(f"docs/reference has no entry for {', '.join(sorted(missing))}")


def _module(name: str) -> Any:
    """The module of a name, or None for the name of a function or class."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
