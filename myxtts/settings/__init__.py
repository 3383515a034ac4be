"""From a YAML file and a command line to checked `Settings`, and from settings to text.

`table` derives the list of settings from `myxtts.config`; `yaml_file` and `flags` say what the user wrote,
`values` what one value means, `nearest` what a misspelt name may have been, `loading` puts it all together;
`presets` fills in named bundles and says what does not suit machine or corpus; `pages` writes settings down.
"""

from myxtts.settings import presets
from myxtts.settings.flags import Parser, add_flags, flags_of
from myxtts.settings.loading import DEFAULT_CONFIG_FILE, Loaded, Origin, load
from myxtts.settings.pages import render_docs, render_yaml_with_comments, to_yaml
from myxtts.settings.table import PREPARE_KEYS

__all__ = [
    "DEFAULT_CONFIG_FILE",
    "PREPARE_KEYS",
    "Loaded",
    "Origin",
    "Parser",
    "add_flags",
    "flags_of",
    "load",
    "presets",
    "render_docs",
    "render_yaml_with_comments",
    "to_yaml",
]
