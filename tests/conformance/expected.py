"""What the conformance cases are known to lack; everything else has to work."""

from __future__ import annotations

from .cases import cases

# Nothing but latents and a timestep goes in.
NO_TEXT = frozenset({"kandinsky6-sr", "unet-1d"})

# Text passes through joint attention, or is modulated by the timestep, before it becomes keys and values.
NOTHING_CONSTANT = frozenset(
    {
        "minimax-music3",
        "sd3",
        "sd35-dual-attention",
        "sd3-control",
        "sd3-skip-layers",
        "auraflow",
        "qwen-image",
        "qwen-image-control",
        "qwen-image-edit",
        "qwen-image-21",
        "qwen-image-21-not-causal",
        "hidream",
        "cogview3plus",
        "cogview4",
        "glm-image",
        "ernie-image",
        "ideogram4",
        "joyimage-edit",
        "joyimage-edit-plus",
        "cogvideox",
        "cogvideox-15",
        "ltx2-modulated-prompt",
        "easyanimate",
        "easyanimate-inpaint",
        "motif-video",
        "motif-video-decoder",
        "dit",
        "prior",
        "flux",
        "flux-guidance",
        "flux-control",
        "flux-kontext",
        "chroma",
        "chroma-control",
        "longcat-image",
        "ovis-image",
        "bria",
        "bria-control",
        "bria-fibo",
        "flux2",
        "flux2-guidance",
        "flux3-flow-map",
        "kandinsky5",
        "kandinsky5-visual-condition",
        "kandinsky6",
        "kandinsky6-video-only",
        "omnigen",
        "cosmos3",
        "cosmos3-image-to-video",
        "rfd4-proteina",
        "rfd4-proteina-recycled",
        "unet-2d",
        "unet-2d-classes",
        "stable-cascade-prior",
    }
)

# Transformers; and StableCascade, whose levels are lists of blocks and take their skips inside the up path.
NO_DEEP_PART = frozenset(case.name for case in cases() if case.kind != "unet" or case.name == "stable-cascade-prior")

REFUSED: dict[str, tuple[frozenset[str], str]] = {
    "deepcache": (NO_DEEP_PART, "is no UNet"),
    "text_kv": (NO_TEXT, "no text"),
}
"""Strategy -> the cases that it refuses, and what the refusal says."""
