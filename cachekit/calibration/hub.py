"""Profiles on the Hugging Face hub, with huggingface_hub's mixin and its model card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

if TYPE_CHECKING:
    from cachekit.calibration.profile import Profile

FILE_NAME = "cachekit_profile.safetensors"

_CARD = """---
{{ card_data }}
---

# {{ title }}

A calibration profile of [diffusers](https://github.com/huggingface/diffusers) caches: which denoising steps to compute
for a given speed or quality, and how to predict the others. It fits one checkpoint, scheduler and number of steps.

```python
import cachekit as ck

profile = ck.Profile.from_hub("{{ repo }}")
ck.enable_cache(pipe, ck.ScheduleCacheConfig.from_profile(profile, speedup=2))
```

```
{{ summary }}
```
"""


class _Folder(ModelHubMixin, library_name="cachekit", tags=["diffusers", "cache"], model_card_template=_CARD):
    """A folder that holds one profile, written or read."""

    profile: Profile | None = None
    path: Path | None = None

    def _save_pretrained(self, save_directory: Path) -> None:
        assert self.profile is not None
        self.profile.save(save_directory / FILE_NAME)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> _Folder:
        folder = cls()
        if Path(model_id).is_dir():
            folder.path = Path(model_id) / FILE_NAME
            return folder
        known = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        given = {name: value for name, value in options.items() if name in known}
        try:
            folder.path = Path(hf_hub_download(model_id, FILE_NAME, **given))
        except EntryNotFoundError as error:
            raise FileNotFoundError(f"no {FILE_NAME} in {model_id}; push one with profile.push_to_hub") from error
        return folder


def upload(profile: Profile, repo_id: str, **options: Any) -> str:
    """See :meth:`cachekit.Profile.push_to_hub`."""
    folder = _Folder()
    folder.profile = profile
    who = ", ".join(item.model for item in profile.identity.denoisers.values())
    card = {"title": f"Cache profile of {who}", "repo": repo_id, "summary": str(profile)}
    card |= options.pop("model_card_kwargs", None) or {}
    return str(folder.push_to_hub(repo_id, model_card_kwargs=card, **options))


def download(repo_id: str | Path, **options: Any) -> Path:
    """Path of the profile's file; see :meth:`cachekit.Profile.from_hub`."""
    folder = _Folder.from_pretrained(str(repo_id), **options)
    assert folder.path is not None
    return folder.path
