"""The long description of the package: README.md without relative links, which do not work on a package index.

pyproject.toml holds all other metadata. If its `[project.urls]` has `Source`, the address of the repository's files
(`https://HOST/OWNER/NAME/blob/main`), relative links become absolute. Otherwise the link text remains. Pictures are
left out.
"""

import re
import sys
from pathlib import Path

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    from setuptools.compat.py310 import tomllib

ROOT = Path(__file__).parent
PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")

source = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {}).get("Source")
readme = PICTURE.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
readme = LINK.sub(rf"[\1]({source}/\2)" if source else r"\1", readme)
setup(long_description=readme, long_description_content_type="text/markdown")
