"""Where the initial policy comes from: a folder that the user names, or the demo's tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launch.config import Config


class NoModel(ValueError):
    """There is no usable initial policy. The message says what to do."""


def initial_model(config: Config) -> Path:
    """The folder of the initial policy. The demo's model is built on first use, in a process of its own."""
    if config.model.path is not None:
        path = Path(config.model.path).expanduser()
        if not (path / "config.json").is_file():
            raise NoModel(f"model.path {str(path)!r} holds no Hugging Face model (no config.json there)")
        return path.absolute()
    if config.environment.toolbox is None:
        raise NoModel("another environment than the bundled toolbox needs a model of yours: set model.path")
    level = config.environment.toolbox.level
    print(f"looking for the demo's model (level {level}); it is built once, in about a minute", flush=True)
    code = "import sys; from services.demo.warm_start import demo_model; print(demo_model(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", code, level], capture_output=True, text=True, timeout=900, check=False
    )
    if built.returncode:
        raise NoModel(f"the demo's model could not be built: {built.stderr.strip().splitlines()[-1]}")
    return Path(built.stdout.strip().splitlines()[-1])
