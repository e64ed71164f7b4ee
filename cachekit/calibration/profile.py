"""The result of a calibration: one safetensors file that says what to compute for a given speed or quality."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cachekit.calibration.front import FrontPoint
from cachekit.calibration.hub import download, upload
from cachekit.calibration.identity import Identity
from cachekit.calibration.merge import merged
from cachekit.calibration.profile_file import read_profile, write_profile
from cachekit.calibration.resample import resampled
from cachekit.errors import ProfileMismatchError


@dataclass(frozen=True)
class Profile:
    """A calibration: what was measured on the uncached runs, and the front of schedules found.

    Curves have one value per step; they are empty where something could not be measured, or the file is older.

    Attributes:
        identity: what it was made for.
        gram: inner products between the steps' model outputs, (steps, steps), divided by their number of values.
        influence: factor of each step's model output in the final latents, (steps,).
        magnitudes: branch -> magnitude ratio of each step: `MagCacheConfig(mag_ratios=profile)`.
        front: schedules by rising number of computed steps.
        samples: number of calibration prompts.
        notes: what has to be known about it.
        drifts: branch -> relative change of the first block's residual since the step before, the score of FirstBlock.
        latent_drift: relative change of the latents since the step before.
        sigmas: share of noise before each step, 0..1: what flow matching calls sigma.
        seconds: uncached time of each step in a call with `batch` prompts.
        batch: see `seconds`.
        starts: steps at which a denoiser begins its work; more than one where experts take turns.
        is_affine: False when the scheduler's steps are not linear in the model output, so that nothing was fitted.
    """

    identity: Identity
    gram: torch.Tensor
    influence: torch.Tensor
    magnitudes: dict[str, tuple[float, ...]]
    front: tuple[FrontPoint, ...]
    samples: int
    notes: tuple[str, ...] = field(default=())
    drifts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    latent_drift: tuple[float, ...] = ()
    sigmas: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    batch: int = 0
    starts: tuple[int, ...] = (0,)
    is_affine: bool = True

    @property
    def steps(self) -> int:
        """Number of scheduler steps of a run."""
        return self.identity.steps

    @property
    def num_inference_steps(self) -> int:
        """Number of steps as the pipeline's argument counts them; differs from `steps` with 2nd-order schedulers."""
        return int(self.identity.arguments.get("num_inference_steps", self.steps))

    def choose(
        self, speedup: float | None = None, computed_steps: int | None = None, min_psnr: float | None = None
    ) -> FrontPoint:
        """The schedule for a budget; give exactly one.

        Args:
            speedup: denoiser calls uncached / computed; the number of computed calls is rounded up.
            computed_steps: number of computed steps.
            min_psnr: dB that 95 % of the held-back prompts reach.

        Raises:
            ValueError: none or several given, or outside of what was calibrated; the message says what there is.
        """
        if sum(value is not None for value in (speedup, computed_steps, min_psnr)) != 1:
            raise ValueError("give exactly one of speedup, computed_steps and min_psnr")
        if min_psnr is not None:
            return self._of_quality(min_psnr)
        if speedup is not None and not (math.isfinite(speedup) and speedup >= 1):
            raise ValueError(f"speedup: a number of at least 1, got {speedup!r}")
        wanted = math.ceil(self.steps / speedup - 1e-9) if speedup is not None else int(computed_steps or 0)
        for point in self.front:
            if len(point.computed_steps) == wanted:
                return point
        counts = [len(point.computed_steps) for point in self.front]
        raise ValueError(
            f"no schedule with {wanted} of {self.steps} computed steps in this profile; it has "
            f"{counts[0]} to {counts[-1]} (speedup {self.steps / counts[-1]:.2f} to {self.steps / counts[0]:.2f}); "
            f"calibrate again with budgets=[{wanted}]"
        )

    def resampled(
        self, num_inference_steps: int, *, speedup: float | None = None, computed_steps: int | None = None
    ) -> Profile:
        """This profile as it would be at another number of steps, with one schedule for the budget asked for.

        What was measured is read off at the new noise levels: inner products are interpolated, influences are spread,
        ratios multiply. On these a schedule and its coefficients are found with the estimate that calibration begins
        with; no model runs. It is a substitute: a calibration at that number of steps measures better.

        Args:
            num_inference_steps: as the pipeline counts them, at least 2.
            speedup: steps / computed steps; the number of computed steps is rounded up.
            computed_steps: number of computed steps.

        Raises:
            ValueError: not exactly one budget, one outside of the steps, or a profile that cannot be resampled (an
                older file, several experts, a scheduler that repeats noise levels or is not linear).
        """
        return resampled(self, num_inference_steps, speedup, computed_steps)

    def merge(self, other: Profile) -> Profile:
        """A profile over the prompts of both, which must have been made for the same pipeline, call and steps.

        Inner products, influences, ratios and drifts are averaged, weighted by the numbers of prompts. Schedules were
        fitted and judged on other prompts, so they are not mixed: of two for one number of computed steps the one
        stays whose estimated error on the joint inner products is smaller, with its coefficients and its figures.

        Raises:
            ProfileMismatchError: made for something else; lists what differs.
            ValueError: made with the same prompts.
        """
        return merged(self, other)

    def require(self, target: Any, otherwise: str = "pass check=False to use it nevertheless") -> None:
        """Refuse a pipeline or denoiser that this profile was not made for.

        Args:
            target: the pipeline or denoiser.
            otherwise: what the message advises besides calibrating again.

        Raises:
            ProfileMismatchError: lists what differs.
        """
        differences = self.identity.differences(target)
        if differences:
            raise ProfileMismatchError(
                f"this profile was made for another pipeline; different: {'; '.join(differences)}. Calibrate again, or "
                f"{otherwise}"
            )

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, the old one stays until the new one is complete; returns its path."""
        return write_profile(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that :meth:`save` wrote, also an older one.

        Raises:
            FileNotFoundError: no such file.
            ValueError: another kind of file, damaged, or written by a newer version.
        """
        return cls(**read_profile(path))

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to a repository of the Hugging Face hub, which is made when it does not exist.

        Args:
            repo_id: "owner/name".
            **options: of `huggingface_hub.ModelHubMixin.push_to_hub`: `private`, `token`, `branch`, `create_pr`,
                `commit_message`, ...

        Returns:
            Address of the commit.
        """
        return upload(self, repo_id, **options)

    @classmethod
    def from_hub(cls, repo_id: str | Path, **options: Any) -> Profile:
        """Download what :meth:`push_to_hub` uploaded.

        Args:
            repo_id: "owner/name", or a local folder.
            **options: of `huggingface_hub.ModelHubMixin.from_pretrained`: `revision`, `token`, `cache_dir`,
                `local_files_only`, ...

        Raises:
            FileNotFoundError: there is no profile in it.
            ValueError: as :meth:`load`.
        """
        return cls.load(download(repo_id, **options))

    def __str__(self) -> str:
        who = ", ".join(item.model for item in self.identity.denoisers.values())
        lines = [f"profile of {who} with {self.identity.scheduler}: {self.steps} steps, {self.samples} prompts"]
        lines.append("  computed  speed-up  PSNR dB  5th percentile   (held-back prompts)")
        for point in self.front:
            count = len(point.computed_steps)
            lines.append(f"  {count:>8}  {self.steps / count:>7.2f}x  {point.mean_psnr:>7.1f}  {point.low_psnr:>14.1f}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _of_quality(self, min_psnr: float) -> FrontPoint:
        for point in self.front:
            if point.low_psnr >= min_psnr:
                return point
        if not any(point.psnr for point in self.front):
            raise ValueError(
                "no prompts were held back in this calibration, so its quality is unknown; calibrate again"
            )
        best = max(point.low_psnr for point in self.front)
        raise ValueError(f"no schedule in this profile reaches {min_psnr:g} dB; the best has {best:.1f} dB")
