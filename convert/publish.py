"""Upload checkpoints to the Hugging Face hub, with a model card."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, ModelCard, ModelCardData

from ligermodels.convert import hub
from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG, WEIGHTS
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.source_checkpoint import SourceCheckpoint
from ligermodels.errors import HubError

CARD = "README.md"
LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md", "USE_POLICY.md")
INHERITED = ("license", "license_name", "license_link", "language", "tags")
"""Fields of a model card that also apply to models derived from the model."""

BODY = """# {name}

{origin}Saved by ligermodels in the Hugging Face format.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo_id}")
tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
```
"""


@dataclass(frozen=True)
class Destination:
    """Where to upload a checkpoint on the hub. Fields are arguments of huggingface_hub; None means its default."""

    repo_id: str
    commit_message: str | None = None
    private: bool | None = None
    token: str | bool | None = None
    revision: str | None = None
    create_pr: bool = False


def publish(to: Destination, write: Callable[[Path], None], source: SourceCheckpoint | None, ranks: Ranks) -> str:
    """Upload a checkpoint. Its weights replace those of an earlier checkpoint in the repository; other files stay.

    A repository without a README.md gets a model card: how to use the model in transformers, and license, language,
    tags and text of the base model's card. The base model's license files are uploaded too.

    Args:
        to: the destination.
        write: function that writes the checkpoint into a folder.
        source: the base model's checkpoint, or None.
        ranks: ranks that call this together. One of them uploads.

    Returns:
        The URL of the commit or pull request; "" on the other ranks.

    Raises:
        HubError: the repository cannot be written, or the base model's card cannot be fetched.
    """
    if not isinstance(to.repo_id, str):
        raise HubError(f"repo_id: must be 'owner/name', got a {type(to.repo_id).__name__}")
    url = ""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        write(folder)
        with ranks.step(to.repo_id):
            if ranks.writes:
                with hub.explained(to.repo_id, to.revision, action="upload"):
                    url = _upload(to, folder, source)
    return url


def _upload(to: Destination, folder: Path, source: SourceCheckpoint | None) -> str:
    api = HfApi(token=to.token)
    repo_id = api.create_repo(to.repo_id, private=to.private, exist_ok=True).repo_id
    base, base_folder = (None, None) if source is None else (source.repo_id, source.folder)
    if base is not None and base_folder is not None:
        commit = base_folder.name
        with hub.explained(base, commit):
            base_folder = hub.snapshot(base, commit, (CARD, *LICENSES), {"token": to.token})
    for name in LICENSES:
        if base_folder is not None and (base_folder / name).is_file():
            shutil.copy(base_folder / name, folder)
    if to.revision is not None and not to.create_pr:
        api.create_branch(repo_id, branch=to.revision, exist_ok=True)  # has the card of the main branch
    if not api.file_exists(repo_id, CARD, revision=to.revision):
        card = model_card(repo_id, base, None if base_folder is None else base_folder / CARD)
        (folder / CARD).write_text(card, encoding="utf-8")
    # Readers prefer a single file to shards, and servers read all shards that an index names: older ones must go. An
    # adapter without a model beside it must too, since transformers would open its base model (see `ExportSpec.save`).
    has_model = api.file_exists(repo_id, "config.json", revision=to.revision)
    done = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=to.commit_message or "Upload model",
        revision=to.revision,
        create_pr=to.create_pr,
        delete_patterns=[*WEIGHTS, *(() if has_model else (ADAPTER, ADAPTER_CONFIG))],
    )
    return done.pr_url or done.commit_url


def model_card(repo_id: str, base: str | None, base_card: Path | None) -> str:
    """The text of a model card: see `publish`.

    Args:
        repo_id: "owner/name" of the repository.
        base: repo id of the base model, or None.
        base_card: path of the base model's card; the file need not exist.
    """
    inherited = None
    if base_card is not None and base_card.is_file():
        inherited = ModelCard(base_card.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    fields = {} if inherited is None else {name: inherited.data.get(name) for name in INHERITED}
    tags = list(dict.fromkeys([*(fields.pop("tags", None) or []), "ligermodels"]))
    data = ModelCardData(base_model=base, library_name="transformers", tags=tags, **fields)
    origin = "" if base is None else f"Made from [{base}](https://huggingface.co/{base}). "
    body = BODY.format(name=repo_id.rpartition("/")[2], repo_id=repo_id, origin=origin)
    text = f"---\n{data.to_yaml()}\n---\n\n{body}"
    return text if inherited is None else f"{text}\n## Card of the base model\n\n{inherited.text.strip()}\n"
