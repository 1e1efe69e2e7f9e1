"""The commands that change what is installed: shown where something is missing, never run."""

import importlib.metadata
import json
import shlex
import sys
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch


def pip_install() -> str:
    """Return the command that installs with this Python."""
    return f"{shlex.quote(sys.executable)} -m pip install"


def install_again() -> str:
    """Return the command that builds fastamp again here, with CUDA code where torch finds a GPU."""
    variable = "FASTAMP_CUDA=ON " if torch.cuda.is_available() else ""
    source = shlex.join(_source()) or "FOLDER_OF_ITS_SOURCES"
    return f"{variable}{pip_install()} --force-reinstall --no-deps --no-cache-dir {source}"


def _source() -> list[str]:
    """Return the sources here that pip built fastamp from, as its arguments, if it did."""
    try:
        text = importlib.metadata.distribution("fastamp").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    saved = json.loads(text or '{"url": ""}')
    url = urlsplit(saved["url"])
    if url.scheme != "file" or url.path.endswith(".whl"):
        return []
    editable = ["-e"] if saved.get("dir_info", {}).get("editable") else []
    return [*editable, url2pathname(url.path)]
