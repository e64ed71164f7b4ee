"""Audio denoisers."""

from __future__ import annotations

import torch

from ..case import THOUSAND, UNIT, Draw, Inputs, case

TEXT = 5
STABLE = {
    "sample_size": 12,
    "in_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_attention_heads": 1,
    "out_channels": 4,
    "cross_attention_dim": 16,
    "time_proj_dim": 16,
    "global_states_input_dim": 8,
    "cross_attention_input_dim": 24,
}


@case("stable-audio", "StableAudioDiTModel", STABLE, times=UNIT, unbatched=frozenset({"rotary_embedding"}), gain=0.5)
def stable_audio(d: Draw) -> Inputs:
    frames = d.pick(8, 12)
    angles = torch.outer(torch.arange(frames + 1).float(), 1 / 100 ** torch.linspace(0, 1, 4)).repeat(1, 2)
    return {
        "hidden_states": d.latents(4, frames),
        "timestep": d.time(),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "global_hidden_states": d.cond(1, 8),
        "rotary_embedding": (angles.cos(), angles.sin()),
    }


STABLE3 = {
    "io_channels": 4,
    "embed_dim": 32,
    "depth": 4,
    "num_heads": 1,
    "cond_token_dim": 24,
    "global_cond_dim": 8,
    "local_add_cond_dim": 5,
    "timestep_features_dim": 16,
    "ff_mult": 2.0,
    "num_memory_tokens": 2,
}


@case("stable-audio3", "StableAudio3DiTModel", STABLE3, times=UNIT)
def stable_audio3(d: Draw) -> Inputs:
    frames = d.pick(8, 12)
    return {
        "hidden_states": d.latents(4, frames),
        "timestep": d.time(),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "global_hidden_states": d.cond(8),
        "local_add_cond": d.cond(5, frames),
    }


ACE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "in_channels": 12,
    "audio_acoustic_hidden_dim": 4,
    "sliding_window": 2,
    "encoder_hidden_size": 24,
}


@case("ace-step", "AceStepTransformer1DModel", ACE, times=UNIT, more_times=("timestep_r",))
def ace_step(d: Draw) -> Inputs:
    frames = d.pick(8, 12)
    return {
        "hidden_states": d.latents(frames, 4),
        "timestep": d.time(),
        "timestep_r": d.time(),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "context_latents": d.cond(frames, 8),
    }


LONGCAT = {"dit_dim": 32, "dit_depth": 4, "dit_heads": 2, "dit_text_dim": 24, "latent_dim": 4, "ff_mult": 2.0}


@case("longcat-audio", "LongCatAudioDiTTransformer", LONGCAT, times=UNIT, gain=0.5)
def longcat_audio(d: Draw) -> Inputs:
    frames = d.pick(8, 12)
    return {
        "hidden_states": d.latents(frames, 4),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "encoder_attention_mask": d.ones(TEXT, dtype=torch.bool),
        "timestep": d.time(),
        "attention_mask": d.ones(frames, dtype=torch.bool),
        "latent_cond": d.cond(frames, 4),
    }


MUSIC3 = {
    "in_channels": 4,
    "condition_dim": 24,
    "num_layers": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "ff_inner_dim": 48,
    "rotary_dim": 8,
    "fourier_embedding_dim": 16,
}


@case("minimax-music3", "MiniMaxMusic3Transformer1DModel", MUSIC3, times=UNIT)
def minimax_music3(d: Draw) -> Inputs:
    frames = d.pick(8, 12)
    return {"hidden_states": d.latents(4, frames), "timestep": d.time(), "encoder_hidden_states": d.cond(frames, 24)}


H3 = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 32,
    "num_layers": 4,
    "num_refiner_layers": 2,
    "ffn_dim": 48,
    "in_channels": 4,
    "audio_in_channels": 4,
    "text_dim": 24,
    "freq_dim": 16,
    "time_embed_hidden_dim": 32,
    "time_embed_dim": 16,
    "rope_freq_dim": 2,
}


@case(
    "minimax-h3",
    "MiniMaxH3Transformer3DModel",
    H3,
    times=THOUSAND,
    more_latents=("audio_hidden_states",),
    unbatched=frozenset(
        {
            "timestep",
            "timestep_indices",
            "token_tags",
            "position_ids",
            "video_indices",
            "audio_indices",
            "text_indices",
        }
    ),
)
def minimax_h3(d: Draw) -> Inputs:
    """Text, video and audio packed into one sequence; the timestep is a table that tokens index."""
    video, audio = d.pick(8, 12), 4
    tags = torch.tensor([0] * TEXT + [1] * video + [2] * audio)
    position = torch.arange(len(tags)).float()
    return {
        "hidden_states": d.latents(video, 16),
        "audio_hidden_states": d.latents(audio, 4),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "timestep": torch.tensor([0.0, 1.0]),
        "timestep_indices": (tags > 0).long(),
        "token_tags": tags,
        "position_ids": torch.stack([position] * 3, dim=1),
        "text_indices": (tags == 0).nonzero()[:, 0],
        "video_indices": (tags == 1).nonzero()[:, 0],
        "audio_indices": (tags == 2).nonzero()[:, 0],
    }


FILM = {
    "input_dims": 4,
    "targets_length": 12,
    "max_decoder_noise_time": 1000.0,
    "d_model": 32,
    "num_layers": 4,
    "num_heads": 2,
    "d_kv": 16,
    "d_ff": 48,
    "dropout_rate": 0.0,
}


@case(
    "t5-film",
    "T5FilmDecoder",
    FILM,
    times=UNIT,
    latent_name="decoder_input_tokens",
    timestep_name="decoder_noise_time",
    gain=0.5,
)
def t5_film(d: Draw) -> Inputs:
    """Every block returns a tuple, and the model a bare tensor."""
    frames = d.pick(8, 12)
    return {
        "encodings_and_masks": [(d.cond(TEXT, 32), d.ones(TEXT)), (d.cond(3, 32), d.ones(3))],
        "decoder_input_tokens": d.latents(frames, 4),
        "decoder_noise_time": d.time(),
    }
