"""Whether caching is worth it, judged by what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachekit.calibration.measure import Measured
from cachekit.calibration.target import Target

FEW_STEPS = 8
_AS_GOOD_DB = 0.5
_CLEARLY_DB = 3.0
_ANOTHER_PICTURE_DB = 20.0
_SOUND_DB = 30.0
_NO_TIME = 1.05


@dataclass(frozen=True)
class Verdict:
    """A judgement.

    Attributes:
        worth_it: False when something else is as good.
        reasons: one sentence each, with the figures.
    """

    worth_it: bool
    reasons: tuple[str, ...]


def judge(
    target: Target, best: Measured | None, control: Measured | None, caches: Sequence[Measured], steps: int
) -> Verdict:
    """Weigh the best cache against fewer steps.

    Args:
        target: what was asked for.
        best: the best setting of a cache on the held-back prompts; None when none reaches the target.
        control: simply fewer steps at that cost; None when it cannot be had.
        caches: all settings of caches that were compared.
        steps: scheduler steps of the uncached run.
    """
    few = f"with {steps} steps there is little to reuse (few-step and distilled models are better left alone)"
    if best is None:
        reason = f"no cache reaches {target}"
        if caches:
            near = target.nearest(list(caches))
            reason += f" on the held-back prompts; nearest: {near.setting.name}, {near.setting.label}, {_figures(near)}"
        return Verdict(False, (reason, few) if steps <= FEW_STEPS else (reason,))
    against, for_it = [], []
    if control is None:
        for_it.append(f"fewer steps do not reach {target}")
    elif target.speedup is not None:
        gain = best.mean - control.mean
        text = f"{control.setting.label} without a cache: {_figures(control)}"
        if gain <= _AS_GOOD_DB:
            against.append(f"{text}, as good as {best.setting.name} or better: {_figures(best)}")
        else:
            wins = sum(a.psnr > b.psnr for a, b in zip(best.pictures, control.pictures, strict=True))
            for_it.append(
                f"{best.setting.name} is {gain:.1f} dB above {text}; better on {wins} of {len(best.pictures)} pictures"
            )
    else:
        text = f"{control.setting.label} without a cache: {_figures(control)}"
        if control.speedup(target.by) >= best.speedup(target.by) and target.reached(control):
            against.append(f"{text}, as fast as {best.setting.name} or faster: {_figures(best)}")
        else:
            for_it.append(f"{best.setting.name}: {_figures(best)}; {text}")
    if steps <= FEW_STEPS:
        ahead = control is None or best.mean - control.mean >= _CLEARLY_DB
        if not (ahead and best.low >= _SOUND_DB):
            against.append(f"{few}: {_figures(best)}")
    if best.mean < _ANOTHER_PICTURE_DB:
        against.append(f"below {_ANOTHER_PICTURE_DB:g} dB it is another picture: {_figures(best)}")
    if best.speedup("time") < _NO_TIME:
        against.append(
            f"work is saved but hardly any time ({best.speedup('time'):.2f}x): the denoiser is not what takes it here"
        )
    return Verdict(not against, tuple(against or for_it))


def _figures(measured: Measured) -> str:
    return f"{measured.mean:.1f} dB ({measured.low:.1f}) at {measured.speedup():.2f}x by work"
