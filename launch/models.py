"""Where the initial policy comes from: a folder that the user names, or a bundled model, made on first use."""

from __future__ import annotations

from pathlib import Path

from launch.config import Config


class NoModel(ValueError):
    """There is no usable initial policy. The message says what to do."""


def initial_model(config: Config) -> Path:
    """The folder of the initial policy. A bundled model is built or converted on first use and cached."""
    if config.model.path is not None:
        path = Path(config.model.path).expanduser()
        if not (path / "config.json").is_file():
            raise NoModel(f"model.path {str(path)!r} holds no Hugging Face model (no config.json there)")
        return path.absolute()
    if not config.model.is_demo and config.model.bundled is not None:
        return _converted(config.model.bundled)
    if config.environment.toolbox is None:
        raise NoModel(
            "another environment than the bundled toolbox needs a language model: set model.path or model.bundled"
        )
    level = config.environment.toolbox.level
    from services.demo.warm_start import demo_folder, demo_model  # here: runs that name a model never need it

    if not demo_folder(level).exists():
        print(f"building the demo's model (level {level}); it is kept in {demo_folder(level).parent}", flush=True)
    return demo_model(level)


def _converted(name: str) -> Path:
    from services.bundled import bundled_folder, bundled_model

    folder = bundled_folder(name)
    if not folder.exists():
        print(f"converting {name}; it is kept in {folder.parent}", flush=True)
    return bundled_model(name)
