"""Command line: ``python -m cachekit.zoo.train emoji-flux [--out DIR] [--minutes M] [--seed S]``.

Four stages, each of which goes on where an interrupted run stopped: autoencoder, decoder, flow transformer, packing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from cachekit.zoo import glyphs
from cachekit.zoo.pipelines import entry, names
from cachekit.zoo.train import decoder, flow, text, vae
from cachekit.zoo.train.pack import pack
from cachekit.zoo.train.pictures import pool

VIEWS = 24
"""Augmented pictures of each glyph."""


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m cachekit.zoo.train", description=__doc__)
    parser.add_argument("name", choices=names())
    parser.add_argument("--out", type=Path, default=Path("zoo-training"), help="folder of the checkpoints")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall clock of the transformer's training")
    parser.add_argument("--steps", type=int, help="train the transformer by steps instead")
    parser.add_argument("--vae-minutes", type=float, default=12.0, help="wall clock of the autoencoder's training")
    parser.add_argument("--vae-steps", type=int, help="train the autoencoder by steps instead")
    parser.add_argument("--decoder-minutes", type=float, default=10.0, help="wall clock of the decoder's refinement")
    parser.add_argument("--decoder-steps", type=int, help="refine the decoder by steps instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="cores to use")
    parser.add_argument("--pack", action="store_true", help="train no further, pack the last checkpoint")
    parser.add_argument("--install", action="store_true", help="pack into the package instead of DIR/pipeline")
    options = parser.parse_args()
    target = entry(options.name).folder if options.install else options.out / "pipeline"
    train(options, target)


def train(options: argparse.Namespace, target: Path) -> None:
    """Run the stages that are not done yet and pack the result into ``target``."""
    out: Path = options.out
    encoders = text.build([*glyphs.prompts(), ""], options.seed)
    if options.pack:
        autoencoder = decoder.load_refined(AutoencoderKL.from_pretrained(out / "vae"), out)
        pack(target, autoencoder, encoders, flow.averaged(out))
        return
    pictures = pool(VIEWS, options.seed)
    autoencoder, latents = first_stage(options, pictures)
    budget = (options.decoder_steps, options.decoder_minutes)
    decoder.refine_decoder(autoencoder, pictures, latents, out, *budget, options.seed, options.workers)
    scaled = (latents - autoencoder.config.shift_factor) * autoencoder.config.scaling_factor
    data = flow.Dataset(torch.stack([flow.pack(views) for views in scaled]), *encoders([*glyphs.prompts(), ""]))
    transformer = flow.train_flow(data, out, options.steps, options.minutes, options.seed, options.workers)
    pack(target, autoencoder, encoders, transformer)


def first_stage(options: argparse.Namespace, pictures: torch.Tensor) -> tuple[AutoencoderKL, torch.Tensor]:
    """Return the autoencoder and the raw latents of the pictures; each is made once and then kept."""
    out: Path = options.out
    weights, stored = out / "vae", out / "latents.safetensors"
    if not weights.exists():
        budget = (options.vae_steps, options.vae_minutes)
        vae.train_vae(pictures, out, *budget, options.seed, options.workers).save_pretrained(weights)
    autoencoder = AutoencoderKL.from_pretrained(weights)
    if not stored.exists():
        save_file({"latents": vae.encode(autoencoder, pictures)}, stored)
    return autoencoder, load_file(stored)["latents"]


if __name__ == "__main__":
    main()
