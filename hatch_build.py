"""Put presets/ into the wheel."""

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PresetsHook(BuildHookInterface):
    """An editable install finds presets/ beside the package instead."""

    def initialize(self, version, build_data):
        if version != "editable":
            build_data["force_include"]["presets"] = "keras_vit22b/presets"
