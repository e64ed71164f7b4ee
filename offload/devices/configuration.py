"""The user's configuration: a JSON file at the platform's usual place, with the keys of `RunSettings`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import platformdirs

from cachekit.files import write_atomically
from offload.devices.settings import RunSettings, unknown_key
from offload.errors import SettingsError

OTHER_FILE = "CACHEKIT_CONFIG"
"""Environment variable that names another file."""


def config_path() -> Path:
    """Where the user's configuration is, or would be: `cachekit/config.json` in the platform's folder for settings."""
    other = os.environ.get(OTHER_FILE)
    return Path(other) if other else platformdirs.user_config_path("cachekit") / "config.json"


def load_config() -> RunSettings:
    """The user's configuration; empty when there is no file.

    Raises:
        SettingsError: the file cannot be read, or holds something else than settings.
    """
    path = config_path()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return RunSettings()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        given = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON ({error}); correct it or delete it") from None
    if not isinstance(given, dict):
        raise SettingsError(f'{path} holds no settings such as {{"device": "auto"}}; correct it or delete it')
    return RunSettings.read(given, str(path))


def set_config(key: str, value: Any) -> RunSettings:
    """Change one key of the user's configuration; returns all of it.

    Raises:
        SettingsError: an unknown key, a bad value, or a file that cannot be read or written; nothing is changed then.
    """
    _check(key)
    return _write(RunSettings.read({**load_config().stored(), key: value}, key))


def unset_config(key: str) -> RunSettings:
    """Remove one key; a file without keys is removed. Returns what is left.

    Raises:
        SettingsError: as for :func:`set_config`.
    """
    _check(key)
    kept = {name: value for name, value in load_config().stored().items() if name != key}
    return _write(RunSettings.read(kept))


def _check(key: str) -> None:
    if key not in RunSettings.model_fields:
        raise SettingsError(unknown_key(key))


def _write(settings: RunSettings) -> RunSettings:
    path = config_path().resolve()  # a link stays one
    try:
        if settings:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{json.dumps(settings.stored(), indent=2)}\n".encode())
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror or error}") from None
    return settings
