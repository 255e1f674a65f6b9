"""The one tree of configuration, its sources and its readings.

From a user's dict to what the engine reads, in this order:

- ``source``: where a configuration comes from (dict, file, base64) -> a dict.
- ``reader``: deprecated and dotted names, unknown keys, left-over ``"auto"``, and the wording of
  every mistake -> a validated model.
- ``training``: the root of the models, one field per top-level JSON key. Its blocks are in
  ``precision``, ``zero``, ``observe`` (watching a run) and ``features`` (the rest); ``base`` has
  their base class and value types. A key is defined on one line: name, type, default, limits,
  documentation.
- ``arguments``: what the class of an optimizer or a schedule takes of its ``params``.
- ``refusals``: what this release does not honour, refused or named in a warning.
- ``batch``: the three batch numbers, resolved.
- ``shard_groups``: over how many ranks stage 3 shards, resolved.
- ``enums``: stages and devices.

``deepspeed.runtime.config.DeepSpeedConfig`` runs them. What upstream calls a key or a default is
derived from the models: ``naming`` has the rule, ``getters`` the constants and the functions that
read raw dicts. Upstream's modules of these names (``deepspeed.runtime.constants``,
``deepspeed.monitor.config``, ...) are doors to here.

Only ``batch``, ``enums``, ``shard_groups`` and ``source`` are imported by
``import deepspeed.runtime.config``; the rest loads on first use (startup: pydantic is slow to
import).
"""
