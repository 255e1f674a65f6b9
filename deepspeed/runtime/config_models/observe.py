"""Blocks about watching a run: monitors, profiler, communication log, timers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.comm.constants import COMMS_LOGGER
from deepspeed.runtime.config_models.base import (
    Bool,
    DeepSpeedConfigModel,
    Float,
    Int,
    Text,
    block,
    option,
)


class TensorBoardConfig(DeepSpeedConfigModel):
    """TensorBoard monitor."""

    enabled: Bool = option(False, "Write to TensorBoard.")
    output_path: Text = option("", "Folder of the event files.")
    job_name: Text = option("DeepSpeedJobName", "Name of the run.")


class WandbConfig(DeepSpeedConfigModel):
    """Weights & Biases monitor."""

    enabled: Bool = option(False, "Write to Weights & Biases.")
    group: Text | None = option(None, "Group of the run.")
    team: Text | None = option(None, "Team of the run.")
    project: Text = option("deepspeed", "Project of the run.")


class CSVConfig(DeepSpeedConfigModel):
    """CSV monitor."""

    enabled: Bool = option(False, "Write CSV files.")
    output_path: Text = option("", "Folder of the CSV files.")
    job_name: Text = option("DeepSpeedJobName", "Name of the run.")


class WatchConfig(DeepSpeedConfigModel):
    """Record and page of a run; this project's own."""

    enabled: Bool = option(False, "Record every step, and draw a page of it while training.")
    output_path: Text = option("", "Folder of all runs that are compared.")
    job_name: Text = option("DeepSpeedJobName", "Name of the run.")
    refresh_seconds: Float = option(
        5.0, "Least seconds between two drawings of the page; 0: never, `ds_watch` draws it.", ge=0
    )


class CometConfig(DeepSpeedConfigModel):
    """Comet monitor."""

    enabled: Bool = option(False, "Write to Comet.")
    samples_log_interval: Int = option(100, "Samples between two points.", ge=1)
    project: Text | None = option(None, "Project of the experiment.")
    workspace: Text | None = option(None, "Workspace of the experiment.")
    api_key: Text | None = option(None, "API key.")
    experiment_name: Text | None = option(None, "Name of the experiment.")
    experiment_key: Text | None = option(None, "Key of the experiment.")
    online: Bool | None = option(None, "Log online; otherwise to disk.")
    mode: Text | None = option(None, '"get", "create" or "get_or_create".')


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The monitor blocks together; upstream's grouping, not a JSON block of its own."""

    tensorboard: TensorBoardConfig = block(TensorBoardConfig)
    comet: CometConfig = block(CometConfig)
    wandb: WandbConfig = block(WandbConfig)
    csv_monitor: CSVConfig = block(CSVConfig)
    watch: WatchConfig = block(WatchConfig)

    @property
    def enabled(self) -> bool:
        """Whether any monitor is on."""
        return self.takes_events or self.watch.enabled

    @property
    def takes_events(self) -> bool:
        """Whether one is on that is given the engine's numbers as events."""
        return any(
            block.enabled for block in (self.tensorboard, self.comet, self.wandb, self.csv_monitor)
        )


class DeepSpeedFlopsProfilerConfig(DeepSpeedConfigModel):
    """Profiler of floating-point operations."""

    enabled: Bool = option(False, "Profile one step.")
    recompute_fwd_factor: Float = option(
        0.0, "Share of forward that backward computes again.", ge=0
    )
    profile_step: Int = option(1, "The step to profile.", ge=0)
    module_depth: Int = option(-1, "Depth of modules shown; -1: all.")
    top_modules: Int = option(1, "Modules shown per depth.", ge=1)
    detailed: Bool = option(True, "Show the annotated model.")
    output_file: Text | None = option(None, "File to write to; null: the log.")


class CommsLoggerConfig(DeepSpeedConfigModel):
    """Log of collectives."""

    enabled: Bool = option(
        False, "Record every collective: operation, count, bytes, latency, bandwidth."
    )
    prof_all: Bool = option(True, "Record all operations; otherwise those of prof_ops.")
    prof_ops: list[Text] = option([], "Names of the operations to record.")
    verbose: Bool = option(False, "Print each record.")
    debug: Bool = option(False, "Add the calling function to the name.")


class DeepSpeedCommsConfig:
    """Communication options of a configuration dict: whether the section is there, whatever its
    ``enabled`` says, and if so its `comms_logger`.
    """

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = COMMS_LOGGER in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config[COMMS_LOGGER])


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel):
    """Timer of samples per second."""

    enabled: Bool = option(True, "Measure throughput.")
    synchronized: Bool = option(
        True, "Count until the device has done its work; false: until the host has given it out."
    )


class VerifyConfig(DeepSpeedConfigModel):
    """Checks of gradient synchronization while training; the environment variable DS_VERIFY
    switches them on too.
    """

    ledger: Bool = option(
        False, "Compare the gradient that is used with every contribution that autograd made."
    )
    collectives: Bool = option(
        False, "Compare each collective with the other ranks' before it starts."
    )
    collectives_timeout: Float = option(
        30.0, "Seconds after which a rank that does not come to a collective is missing.", gt=0
    )
    lone_gather_report: Float = option(
        60.0,
        "Seconds after which a wait for ranks that have not come (a gather of ZeRO stage 3, the "
        "reduction of gradients, saving, loading, ...) is written to the log; 0: never.",
        ge=0,
    )
    poison: Bool = option(
        False,
        "ZeRO stage 3: overwrite the memory of parameters that are let go by NaN, so that a read "
        "of it shows.",
    )
    streams: Bool = option(False, "Look for races and lifetime errors between streams.")


class TimersConfig(DeepSpeedConfigModel):
    """Timers."""

    throughput: DeepSpeedThroughputTimerConfig = block(DeepSpeedThroughputTimerConfig)
