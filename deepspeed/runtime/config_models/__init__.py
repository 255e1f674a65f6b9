"""The one tree of configuration, its sources and its readings.

From a user's dict to what the engine reads: ``source`` gets it, ``reader`` makes a validated model
of it and words every mistake, ``refusals`` is what this release does not honour, ``sizes`` resolves
the numbers of batches and ranks, ``deepspeed.runtime.config.DeepSpeedConfig`` runs them. A key is
defined on one line (name, type, default, limits, documentation): ``training`` is the root, its
blocks are also in ``zero`` and ``features``, ``base`` has their class and value types, ``enums``
stages and devices. ``arguments`` reads ``params`` by the class they are for; ``getters`` derives
what upstream calls keys and defaults, for its modules of these names, which are doors to here.

``deepspeed.runtime.config`` loads ``enums``, ``sizes`` and ``source`` alone: pydantic is slow.
"""
