"""How the documents of a run become tokens: by several processes, and with a cache on disk."""

from __future__ import annotations

from ligermodels.data.documents import Documents
from ligermodels.data.source import EncodedSource, cache_key
from ligermodels.data.token_cache import TokenCache
from ligermodels.data.workers import default_count
from ligermodels.training.console import Console
from ligermodels.training.recipe import TrainingRecipe

SMALL = 1 << 20
"""Bytes of data that one process tokenises in about a second: they need no other processes, and no cache."""


def start_tokenising(recipe: TrainingRecipe, documents: Documents, console: Console) -> None:
    """Let processes tokenise the documents, and keep their tokens in a cache, as the recipe says.

    Call it after the split, which may divide a text, and before the first document is read.

    Args:
        recipe: the settings.
        documents: the documents; `Documents.close` ends the processes.
        console: where messages go.
    """
    if documents.fingerprint["bytes"] < SMALL or recipe.data_form.name != "documents":
        return  # preference data is read in this process
    cache = _open_cache(documents, console) if recipe.token_cache and not recipe.streaming else None
    count = default_count() if recipe.dataset_num_proc is None else recipe.dataset_num_proc
    documents.source = EncodedSource(documents.content, documents.encoder, num_workers=count, cache=cache)


def _open_cache(documents: Documents, console: Console) -> TokenCache | None:
    """The cache of the documents; None, with a message, if it cannot be used."""
    try:
        cache = TokenCache(cache_key(documents.corpus, documents.encoder), len(documents), console.say)
    except OSError as error:
        console.say(
            f"token cache: {error.filename}: {error.strerror}, so tokens are not kept; set LIGERMODELS_CACHE to "
            "another folder, or give --no-token-cache"
        )
        return None
    if found := cache.num_documents:
        console.say(f"token cache: {found:,} of {len(documents):,} documents are in {cache.folder}")
    return cache
