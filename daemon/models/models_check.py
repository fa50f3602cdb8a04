"""Checks the settings for models against the current models folder, for `hearthd --check-config`."""

from __future__ import annotations

from config.load import ConfigError, located_setting
from config.nearest import nearest
from config.schema import NodeConfig
from loader import catalog


def check(config: NodeConfig, source: str) -> list[str]:
    """Returns warnings about models that the settings name and that do not exist (yet). Raises ConfigError for an alias or an entry
    of the table of names that can never work because it is the name of an existing model. source: the file the settings come
    from."""
    try:
        names = list(catalog.scan(config.models_dir))
    except OSError as error:
        return [f"{source}: models_dir: {config.models_dir}: {error.strerror}, so settings for models were not checked against it"]
    warnings = []
    for name, model in config.models.items():
        for alias in model.aliases:
            if alias in names and alias != name:
                message = f"{alias!r} is the name of a model in {config.models_dir}, so a request for it never means {name!r}"
                raise located_setting(ConfigError(source, f'models."{name}".aliases', message))
        if model.upstream is not None:
            if name in names:
                message = f"{name!r} is the name of a model in {config.models_dir}, which is hidden by what another server answers"
                raise located_setting(ConfigError(source, f'models."{name}".upstream', message))
            continue
        if name not in names:
            near = nearest(name, names)
            hint = f'; did you mean "{near}"?' if near else ""
            message = f"there is no model of that name in {config.models_dir} (yet){hint}"
            warnings.append(str(located_setting(ConfigError(source, f'models."{name}"', message))))
    return warnings + _about_names(config, source, names)


def _about_names(config: NodeConfig, source: str, models: list[str]) -> list[str]:
    """Returns warnings about entries of the table of names. models: the names of those in the models folder. Raises ConfigError."""
    known = {*models, *config.models, *(alias for model in config.models.values() for alias in model.aliases)}
    warnings = []
    for name, targets in config.names.items():
        where = f'names."{name}"'
        if name in models:
            message = f"{name!r} is the name of a model in {config.models_dir}, so a request for it never meets this entry"
            raise located_setting(ConfigError(source, where, message))
        for target in targets:
            if target not in known:
                near = nearest(target, known)
                hint = f'; did you mean "{near}"?' if near else ""
                message = f"there is no model {target!r} in {config.models_dir} (yet){hint}"
                warnings.append(str(located_setting(ConfigError(source, where, message))))
    return warnings
