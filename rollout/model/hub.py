"""Models of the Hugging Face Hub: names, downloads and what goes wrong with them."""

import functools
import re
from pathlib import Path

# Configuration, weights and tokenizer of a model on the Hub, without copies in other formats.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_COPIES = ["*/*", "consolidated*"]
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def resolve_model(path: str | Path, *, weights: bool = True) -> Path:
    """Return the folder of a model; download a model of the Hugging Face Hub into its cache.

    `path` is a folder, or ORG/NAME on the Hub. An existing folder takes precedence. A path that is
    neither is returned unchanged. Weights are downloaded only if `weights` is true.

    Raises:
        ValueError: The download failed; the message begins with the model's name.
    """
    if Path(path).exists() or not _HUB_NAME.fullmatch(str(path)):
        return Path(path)
    return _from_hub(str(path), weights)


@functools.cache
def _from_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    ignored = _HUB_COPIES if weights else [*_HUB_COPIES, "*.safetensors"]
    try:
        folder = snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=ignored)
    except errors.GatedRepoError as error:
        remedy = f"accept its terms at https://huggingface.co/{name}, and set HF_TOKEN"
        raise ValueError(f"{name}: access to it on the Hub is restricted; {remedy}") from error
    except errors.RepositoryNotFoundError as error:
        rule = "is neither a folder here nor a public model of the Hub"
        raise ValueError(f"{name}: {rule}; correct it, or set HF_TOKEN") from error
    except errors.LocalEntryNotFoundError as error:
        rule = "is not a folder here, and the Hub cannot be reached (HF_HUB_OFFLINE, HF_ENDPOINT)"
        raise ValueError(f"{name}: {rule}; connect, or name a folder") from error
    except Exception as error:  # a broken connection or a full disk raises many types
        why = " ".join(str(error).split())
        raise ValueError(f"{name}: the download from the Hub failed: {why}; try again") from error
    return Path(folder)
