"""Does a pipeline draw what its prompt says? ``python -m cachekit.zoo.evaluate emoji-flux``.

Every prompt is drawn once, with guidance, and compared with all training glyphs: RGB distance (L2) at native size over
white, the best over the sizes and shifts used in training. A prompt counts as retrieved when its own glyph is nearest.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from cachekit.zoo import glyphs
from cachekit.zoo.pipelines import assemble, entry, names

if TYPE_CHECKING:
    from diffusers import FluxPipeline
    from PIL.Image import Image


@dataclass(frozen=True)
class Retrieval:
    """The result of :func:`retrieval`.

    Attributes:
        prompts: Number of prompts drawn.
        glyphs: Number of glyphs to choose from.
        accuracy: Fraction of prompts whose own glyph is nearest.
        chance: The accuracy of guessing.
        psnr: Mean PSNR of a drawing to the best view of its own glyph, in dB.
        misses: (prompt, prompt of the nearest glyph) of every prompt that failed.
    """

    prompts: int
    glyphs: int
    accuracy: float
    chance: float
    psnr: float
    misses: list[tuple[str, str]]


def draw(
    pipe: FluxPipeline, prompts: Sequence[str], steps: int = 28, guidance: float = 3.0, seed: int = 0, batch: int = 10
) -> list[Image]:
    """Draw one picture a prompt; picture ``i`` starts from the noise of seed ``seed + i``, whatever the batch size."""
    pipe.set_progress_bar_config(disable=True)
    pictures: list[Image] = []
    for start in tqdm(range(0, len(prompts), batch), desc="drawing", unit="batch"):
        part = list(prompts[start : start + batch])
        generators = [torch.Generator().manual_seed(seed + start + index) for index in range(len(part))]
        result = pipe(
            part,
            negative_prompt=[""] * len(part),
            true_cfg_scale=guidance,
            num_inference_steps=steps,
            generator=generators,
        )
        pictures += result.images
    return pictures


def views(point: int) -> torch.Tensor:
    """Return every second size at every shift of one glyph, as floats in [0, 1], shape (views, 3 * 64 * 64)."""
    rows = []
    for size in glyphs.SIZES[::2]:
        centred = pixels(glyphs.draw(point, glyphs.View(size=size)))
        rows += [shifted(centred, dx, dy).flatten() for dx in glyphs.SHIFTS for dy in glyphs.SHIFTS]
    return torch.stack(rows)


def shifted(picture: torch.Tensor, dx: int, dy: int) -> torch.Tensor:
    """Move a (3, height, width) picture by whole pixels; what enters is white."""
    height, width = picture.shape[1:]
    room = torch.nn.functional.pad(picture, (abs(dx), abs(dx), abs(dy), abs(dy)), value=1.0)
    top, left = abs(dy) - dy, abs(dx) - dx
    return room[:, top : top + height, left : left + width]


def pixels(picture: Image) -> torch.Tensor:
    """Return an RGB picture as floats in [0, 1], shape (3, height, width)."""
    raw = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
    return raw.view(picture.height, picture.width, 3).permute(2, 0, 1).float() / 255.0


def retrieval(pictures: Sequence[Image], prompts: Sequence[str]) -> Retrieval:
    """Find the nearest training glyph of each picture; see :class:`Retrieval`."""
    drawn = torch.stack([pixels(picture).flatten() for picture in pictures])
    points = glyphs.codepoints()
    nearest = torch.stack(
        [torch.cdist(drawn, views(point)).amin(1) for point in tqdm(points, desc="comparing", unit="glyph")], dim=1
    )
    known = [glyphs.prompt_of(point) for point in points]
    found = [known[index] for index in nearest.argmin(1).tolist()]
    own = nearest[torch.arange(len(prompts)), torch.tensor([known.index(prompt) for prompt in prompts])]
    mse = own.square() / drawn.shape[1]
    return Retrieval(
        prompts=len(prompts),
        glyphs=len(points),
        accuracy=sum(a == b for a, b in zip(found, prompts, strict=True)) / len(prompts),
        chance=1.0 / len(points),
        psnr=(-10.0 * mse.log10()).mean().item(),
        misses=[(prompt, other) for prompt, other in zip(prompts, found, strict=True) if prompt != other],
    )


def grid(pictures: Sequence[Image], columns: int = 20) -> Image:
    """Join pictures of equal size row by row; the result uses a palette, which keeps the file small."""
    from PIL import Image

    width, height = pictures[0].size
    sheet = Image.new("RGB", (columns * width, math.ceil(len(pictures) / columns) * height), "white")
    for index, picture in enumerate(pictures):
        sheet.paste(picture, (index % columns * width, index // columns * height))
    return sheet.quantize(256, dither=Image.Dither.NONE)


def main() -> None:
    """Parse the command line, evaluate, write ``grid.png`` and ``evaluation.json``."""
    parser = argparse.ArgumentParser(prog="python -m cachekit.zoo.evaluate", description=__doc__)
    parser.add_argument("name", choices=names())
    parser.add_argument("--folder", type=Path, help="another folder of the same pipeline")
    parser.add_argument("--out", type=Path, default=Path("."), help="where to write the grid and the figures")
    parser.add_argument("--prompts", type=int, default=200, help="evaluate the first N training prompts")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pipe = assemble(options.folder or entry(options.name).folder)
    prompts = entry(options.name).prompts()[: options.prompts]
    start = time.perf_counter()
    pictures = draw(pipe, prompts, options.steps, options.guidance, options.seed)
    seconds = (time.perf_counter() - start) / len(prompts)
    result = retrieval(pictures, prompts)
    options.out.mkdir(parents=True, exist_ok=True)
    grid(pictures).save(options.out / "grid.png", optimize=True)
    figures = asdict(result) | {"steps": options.steps, "guidance": options.guidance, "seed": options.seed}
    (options.out / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n")
    tqdm.write(f"{result.accuracy:.1%} of {result.prompts} prompts retrieved among {result.glyphs} glyphs")
    tqdm.write(f"chance {result.chance:.1%}, PSNR {result.psnr:.1f} dB, {seconds:.2f} s a picture")
    for prompt, other in result.misses:
        tqdm.write(f"  {prompt!r} looks like {other!r}")


if __name__ == "__main__":
    main()
