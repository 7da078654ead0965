"""A published model on the Hugging Face hub: its files are downloaded once, then read like those of any run folder.

Only files of the kinds that a model consists of are asked for, never code. They become real files in a folder of their
own, because the hub's cache consists of links, which a model folder may not have; the manifest is checked on loading.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from dexter.errors import ModelError, require
from dexter.files import write_text

log = logging.getLogger("dexter")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"\w[\w./-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*labels.jsonl", "*labels.sqlite"]
_OTHER_FILES = ["checkpoints/*", "onnx/*", "results/*", "unseen/*"]


def find_run(run: str | Path, *, revision: str | None = None) -> Path:
    """Return a local folder: the one given, or for "organisation/name" the hub's, downloaded where it is not here yet.

    Args:
        run: a folder, or a name on the hub; a `Path` is always a folder.
        revision: the commit, tag or branch to download; the main branch if left out.
    """
    is_name = isinstance(run, str) and _HUB_NAME.fullmatch(run) is not None
    if Path(run).is_dir() or not is_name:
        if revision is not None:
            raise ModelError(f"{run}: a folder has no revisions: leave revision out, or give a name on the hub")
        return Path(run)
    if not _REVISION.fullmatch(revision or "main"):
        raise ModelError(f"revision {revision!r}: expected a commit, a tag or a branch of {run}")
    return _download(str(run), revision or "main")


def _download(name: str, revision: str) -> Path:
    """Return the folder of a commit of a model on the hub; without a connection, of one that was downloaded before."""
    require("huggingface_hub", extra="hub", purpose=f"{name!r}, which is no folder here but may be on the hub,")
    import huggingface_hub
    from huggingface_hub.constants import HF_HOME

    place = Path(HF_HOME) / "dexter" / name.replace("/", "--")
    try:
        commit = _find_commit(name, revision, noted=place / f"{revision.replace('/', '--')}.txt")
        found = huggingface_hub.snapshot_download(
            name, revision=commit, allow_patterns=_FILES, ignore_patterns=_OTHER_FILES, local_dir=place / commit
        )
    except Exception as error:
        # The hub's client raises many unrelated types (validation, HTTP, connection, cache) with the same remedy.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{name!r}: no such run folder here, and the Hugging Face hub gave none at revision {revision!r} "
            f"({reason[0]}): give a folder, or repeat where the hub can be reached"
        ) from error
    log.info("%s at %s: %s", name, revision, found)
    return Path(found)


def _find_commit(name: str, revision: str, *, noted: Path) -> str:
    """Return the commit that a tag or branch leads to; without a connection the one that is noted in a file."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if _COMMIT.fullmatch(revision):
        return revision
    try:
        commit = str(HfApi().model_info(name, revision=revision).sha)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except Exception:
        if not noted.is_file():
            raise
        return noted.read_text(encoding="utf-8")
    write_text(noted, commit)
    return commit
