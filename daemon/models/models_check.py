"""Checks the settings for models against the current models folder, for `hearthd --check-config`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from config.chat_templates import template_files
from config.load import ConfigError, located_setting
from config.nearest import nearest
from config.schema import NodeConfig
from daemon.models import speculators
from daemon.models.adapters import foreign_settings
from loader.models import catalog


def check(config: NodeConfig, source: str) -> list[str]:
    """Returns warnings about models, heads, adapters' bases and chat templates that the settings name and that do not exist (yet),
    or about a models folder that cannot be read. Raises ConfigError for settings that can never work: keys that do not fit the kind
    of model, an alias or entry of [names] that is the name of a model in the folder, or an `upstream` for such a name. source: the
    settings file, for messages."""
    try:
        found = catalog.scan(config.models_dir)
    except OSError as error:
        return [f"{source}: models_dir: {config.models_dir}: {error.strerror}, so settings for models were not checked against it"]
    names, warnings = list(found), []
    if catalog.is_model_itself(config.models_dir):
        warnings.append(f"{source}: models_dir: {config.models_dir} is a model's folder itself; name the folder that holds it")
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
        elif found[name].is_adapter:
            if foreign := foreign_settings(model):
                message = "has no effect on a LoRA adapter, which is computed as its base is"
                raise located_setting(ConfigError(source, f'models."{name}".{foreign[0]}', message))
        elif model.base is not None:
            message = f"is for LoRA adapters, and {name!r} is none"
            raise located_setting(ConfigError(source, f'models."{name}".base', message))
        for file in template_files(config, [name]):
            if not os.path.exists(file):
                message = f"there is no file {file} (yet), so chats would be refused"
                warnings.append(str(located_setting(ConfigError(source, f'models."{name}".chat_template', message))))
        heads = [one for one, checkpoint in found.items() if checkpoint.head is not None]
        if model.speculator not in (*speculators.KINDS, *heads):
            named = found.get(model.speculator)
            fault = "" if named is None else named.fault
            message = f"there is no EAGLE-3 head {model.speculator!r} in {config.models_dir} (yet){f': {fault}' if fault else ''}"
            warnings.append(str(located_setting(ConfigError(source, f'models."{name}".speculator', message))))
        if model.base is not None:
            warnings += _about_base(config, source, name, model.base, found)
    return warnings + _about_names(config, source, names)


def _about_base(config: NodeConfig, source: str, adapter: str, base: str, found: Mapping[str, catalog.Checkpoint]) -> list[str]:
    """Checks the setting `base` of an adapter. Returns a list with a warning if there is no such model (yet), otherwise []. found:
    the models folder's content, by name. Raises ConfigError if the model can never be a base."""
    where = f'models."{adapter}".base'
    owner = next((name for name, model in config.models.items() if base in model.aliases), base)
    settings = config.models.get(owner)
    if settings is not None and settings.upstream is not None:
        message = f"another server answers for {base!r} (upstream); adapters are served with models of this node"
        raise located_setting(ConfigError(source, where, message))
    if owner in found and found[owner].is_adapter:
        raise located_setting(ConfigError(source, where, f"{base!r} is a LoRA adapter itself"))
    if owner in found:
        return []
    near = nearest(base, [name for name, one in found.items() if not one.is_adapter])
    hint = f'; did you mean "{near}"?' if near else ""
    message = f"there is no model {base!r} in {config.models_dir} (yet){hint}"
    return [str(located_setting(ConfigError(source, where, message)))]


def _about_names(config: NodeConfig, source: str, models: list[str]) -> list[str]:
    """Returns warnings about models that the table [names] leads to and that do not exist (yet). models: the names of the models in
    the models folder. Raises ConfigError for an entry that has the name of one of these."""
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
