"""Installed packages: those that cachekit needs, and optional ones with what each would bring."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

DISTRIBUTION = "diffusion-cachekit"


@dataclass(frozen=True)
class Package:
    """A package that is needed.

    Attributes:
        name: of the distribution.
        version: what is installed; None if it is missing.
        needs: the versions that will do, such as ">=2.4".
    """

    name: str
    version: str | None
    needs: str

    @property
    def problem(self) -> str:
        """Why it will not do; empty if it will."""
        if self.version is None:
            return f"{self.name} is missing: pip install '{self.name}{self.needs}'"
        if not Requirement(f"{self.name}{self.needs}").specifier.contains(self.version, prereleases=True):
            return f"{self.name} {self.version} does not fit {self.needs}: pip install '{self.name}{self.needs}'"
        return ""


@dataclass(frozen=True)
class Part:
    """An optional package.

    Attributes:
        name: of the distribution.
        brings: what works with it, or works better.
        features: extras of its own that are needed too, such as "[data]".
    """

    name: str
    brings: str
    features: str = ""

    @property
    def version(self) -> str | None:
        """What is installed; None without it."""
        return version_of(self.name)

    @property
    def install(self) -> str:
        """How to get it."""
        return f"pip install '{self.name}{self.features}'" if self.features else f"pip install {self.name}"


PARTS = (
    Part("peft", "LoRA adapters in pipelines"),
    Part("torchvision", "image processors of transformers on tensors instead of PIL images"),
    Part("scipy", "the LMS scheduler, and beta and exponential sigmas"),
    Part("torchsde", "the SDE variants of the DPM-Solver schedulers"),
    Part("matplotlib", "plots of the benchmarks"),
    Part("cache-dit", "rows of a peer in the benchmarks"),
    Part("ray", "`cachekit run --ray` on a cluster", "[data]"),
    Part("fonttools", "training the embedded pipelines again"),
)


def version_of(name: str) -> str | None:
    """Installed version of a distribution; None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def needed() -> list[Package]:
    """What cachekit needs, as its own metadata says; empty when it runs from a folder without being installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    wanted = [Requirement(line) for line in lines]
    plain = [item for item in wanted if item.marker is None or item.marker.evaluate({"extra": ""})]
    return [Package(item.name, version_of(item.name), str(item.specifier)) for item in plain]
