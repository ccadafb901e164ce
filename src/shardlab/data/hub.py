"""Files of the Hugging Face Hub, by huggingface_hub: its cache, its locks, its retries.

It is imported when a file is asked for, not before: training needs no network. ``HF_ENDPOINT``,
``HF_HOME`` and ``HF_HUB_OFFLINE`` act as in Hugging Face's own tools.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardlab.errors import UsageError

TIMEOUT_S = 10.0  # for the hub's first answer


class Unreachable(Exception):
    """The hub, or this file on it, cannot be had now."""


def download(
    repo: str,
    file: str,
    repo_type: str,
    *,
    is_quiet: bool = False,
    on_message: Callable[[str], None] = lambda _text: None,
) -> Path:
    """The path of a hub's file in the hub's cache, downloaded if it is not there.

    A file whose checksum is not the one that the hub publishes is refused and removed.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    try:
        return Path(hf_hub_download(repo, file, repo_type=repo_type, local_files_only=True))
    except LocalEntryNotFoundError:
        about = _ask(repo, file, repo_type)
    if is_quiet:
        disable_progress_bars()
    on_message(f"fetching {repo}/{file}" + (f" ({about.size:,} bytes)" if about.size else ""))
    try:
        path = Path(hf_hub_download(repo, file, repo_type=repo_type, endpoint=_endpoint()))
    except Exception as error:  # what the hub's HTTP library raises depends on its version
        raise Unreachable(f"{_endpoint()}: {_reason(error)}") from None
    if (found := _digest(path, about.etag)) not in (None, about.etag):
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise UsageError(
            f"{repo}/{file} is not what the hub announced: checksum {found}, not {about.etag}; it "
            "was thrown away"
        )
    return path


def refuse_unreachable(model: str) -> None:
    """Raise ``Unreachable`` in seconds if the hub does not answer, or does not have this model."""
    _ask(model, "config.json", "model")


def _ask(repo: str, file: str, repo_type: str) -> Any:
    """What the hub says of a file. Asked once, since downloads retry for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, file, repo_type=repo_type, endpoint=_endpoint())
    try:
        return get_hf_file_metadata(url, timeout=TIMEOUT_S, endpoint=_endpoint())
    except Exception as error:
        raise Unreachable(f"{_endpoint()}: {_reason(error)}") from None


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    if (response := getattr(error, "response", None)) is not None:
        return f"the server answers {response.status_code} ({kind})"
    if "Timeout" in kind:
        return "no answer in time"
    return f"{kind}: {str(error).strip().partition(chr(10))[0]}"


def _digest(path: Path, etag: str | None) -> str | None:
    """The file's checksum of the kind that the hub publishes as its etag: SHA-256 of large files,
    git's SHA-1 of others. None: the etag is neither, as of some mirrors."""
    with path.open("rb") as file:
        if len(etag or "") == 64:
            return hashlib.file_digest(file, "sha256").hexdigest()
        if len(etag or "") == 40:
            content = file.read()
            whole = b"blob %d\0" % len(content) + content
            return hashlib.sha1(whole, usedforsecurity=False).hexdigest()
    return None
