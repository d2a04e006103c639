"""Settings: one schema, read from files, the environment and flags. docs/configuration.md lists them all."""

from meshpipe.configuration.schema import Configuration, Setting, groups, settings
from meshpipe.configuration.sources import PREFIX, Configured, configure, recommended

__all__ = [
    "PREFIX",
    "Configuration",
    "Configured",
    "Setting",
    "configure",
    "groups",
    "recommended",
    "settings",
]
