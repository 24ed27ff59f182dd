"""What the services' own settings are, hashed: `quire up` compares them with those of the cluster that runs."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from deploy.local import config
from shared import settings


def digests(*, environ: Mapping[str, str] | None = None, toml_path: Path | None = None) -> dict[str, str]:
    """`gateway.api_keys` -> SHA-256 of its value, and so on: of every setting that is not the default.

    Hashed, because keys are among them. Raises: SettingsError.
    """
    env = config.environment() if environ is None else environ
    out: dict[str, str] = {}
    for section, module_name in config.SECTION_CONFIGS.items():
        struct = config.section_struct(module_name)
        assert struct is not None
        usual = msgspec.structs.asdict(struct())
        found = settings.load(struct, section, (), environ=env, toml_path=toml_path)
        for key, value in msgspec.structs.asdict(found).items():
            if value != usual[key]:
                out[f"{section}.{key}"] = hashlib.sha256(msgspec.json.encode(value)).hexdigest()
    return out
