"""Small trained pipelines that ship with the package, so that caches can be tried offline on a real model.

``load("emoji-flux")`` returns a ``diffusers.FluxPipeline``; ``prompts("emoji-flux")`` lists what it was trained on.
"""

from cachekit.zoo.pipelines import load, names, prompts

__all__ = ["load", "names", "prompts"]
