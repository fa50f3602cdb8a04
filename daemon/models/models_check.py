"""Checks the settings for models against the current models folder, for `hearthd --check-config`."""

from __future__ import annotations

from config.load import ConfigError, located
from config.nearest import nearest
from config.schema import NodeConfig
from loader import catalog


def check(config: NodeConfig, source: str) -> list[str]:
    """Returns warnings about settings for models that do not exist (yet). Raises ConfigError for an alias that can never work
    because it is the name of an existing model. source: the file the settings come from."""
    try:
        names = list(catalog.scan(config.models_dir))
    except OSError as error:
        return [f"{source}: models_dir: {config.models_dir}: {error.strerror}, so settings for models were not checked against it"]
    warnings = []
    for name, model in config.models.items():
        for alias in model.aliases:
            if alias in names and alias != name:
                message = f"{alias!r} is the name of a model in {config.models_dir}, so a request for it never means {name!r}"
                raise located(ConfigError(source, f'models."{name}".aliases', message))
        if name not in names:
            near = nearest(name, names)
            hint = f'; did you mean "{near}"?' if near else ""
            message = f"there is no model of that name in {config.models_dir} (yet){hint}"
            warnings.append(str(located(ConfigError(source, f'models."{name}"', message))))
    return warnings
