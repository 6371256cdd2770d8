"""Which presets need no data but their own."""

import yaml

from experiments.training.usage import CONFIGS, presets


def embedded_presets() -> list[str]:
    """Those without a path to data."""
    contents = {name: yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")) for name in presets()}
    return [name for name, content in contents.items() if not content["data"].get("init_args", {}).get("path")]
