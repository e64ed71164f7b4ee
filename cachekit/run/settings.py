"""What decides a picture: everything that, changed, would give another one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cachekit
from cachekit.run.errors import RunError
from cachekit.run.loading import folder_of
from cachekit.run.names import file_name


@dataclass(frozen=True)
class Settings:
    """What all pictures of a run share. Plain values, so that it can be handed to another process.

    Attributes:
        pipeline: name of an embedded pipeline, or a folder in diffusers' layout.
        steps: denoising steps.
        guidance: strength of the guidance; None for the pipeline's default.
        arguments: what else the pipeline is called with.
        cache: name of a strategy; None for no cache, or that of the profile.
        fields: fields of its config.
        profile: file with a calibrated profile, for a schedule.
        speedup: what is asked of the profile: denoiser calls uncached / computed.
        min_psnr: or what else is asked of it, in dB.
    """

    pipeline: str
    steps: int
    guidance: float | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    cache: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    speedup: float | None = None
    min_psnr: float | None = None

    def config(self) -> cachekit.CacheConfig | None:
        """The cache; None for none.

        Raises:
            RunError: it cannot be made, or the profile cannot be read.
        """
        from cachekit.strategies import to_config

        try:
            if self.profile is not None:
                return cachekit.ScheduleCacheConfig.from_profile(
                    cachekit.Profile.load(self.profile),
                    speedup=self.speedup,
                    min_psnr=self.min_psnr,
                    num_inference_steps=self.steps,
                    **self.fields,
                )
            return None if self.cache is None else to_config(self.cache, self.fields)
        except (ValueError, TypeError, OSError, cachekit.CacheKitError) as error:
            raise RunError(str(error)) from None

    def identity(self) -> dict[str, Any]:
        """What decides a picture besides prompt and seed. Paths do not; the contents of files do.

        Raises:
            RunError: a file cannot be read.
        """
        found = {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, {})}
        try:
            folder = folder_of(self.pipeline)
            found["pipeline"] = {"name": Path(self.pipeline).name, "files": _contents(folder)}
            if self.profile is not None:
                found["profile"] = hashlib.sha256(Path(self.profile).read_bytes()).hexdigest()
        except OSError as error:
            raise RunError(f"cannot read {error.filename}: {error.strerror}") from None
        try:
            # As it reads back from a file: a tuple is a list there, and keys are texts.
            plain: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
        except (ValueError, TypeError) as error:
            raise RunError(f"settings are plain values and finite numbers: {error}") from None
        return plain


@dataclass(frozen=True)
class Picture:
    """One picture of a run.

    Attributes:
        prompt: what to draw.
        seed: of its noise.
        settings: all that decides it, as it stands in the file.
    """

    prompt: str
    seed: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of its file: equal for equal settings only."""
        text = json.dumps(self.settings, sort_keys=True)
        return file_name(self.prompt, self.seed, hashlib.sha256(text.encode()).hexdigest())


def pictures(settings: Settings, prompts: Iterable[str], seeds: Iterable[int]) -> list[Picture]:
    """Every prompt with every seed, each once.

    Raises:
        RunError: the settings cannot be used.
    """
    identity, numbers = settings.identity(), list(dict.fromkeys(seeds))
    return [
        Picture(prompt, seed, {"prompt": prompt, "seed": seed, **identity})
        for prompt in dict.fromkeys(prompts)
        for seed in numbers
    ]


def _contents(folder: Path) -> str:
    """A hash of a pipeline's folder: names and sizes of all files, and what stands in the small ones."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            digest.update(f"{relative.as_posix()}\0{path.stat().st_size}\0".encode())
            if path.suffix in {".json", ".txt"}:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
