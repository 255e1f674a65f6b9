"""The stream checker: which accesses to memory no stream order and no wait puts in an order.

`checker` is the happens-before core (no torch), fed by a device through
`deepspeed.accelerator.stream_trace.StreamTracer`; `accesses` keeps who touched which bytes,
`collectives` tells of those that a backend orders, `findings` says what is wrong in words, and
`check` switches the checker on. Users start at `deepspeed.verify.check_streams`.
"""

from deepspeed.verify.streams.check import (
    check_streams,
    disable_stream_checking,
    enable_stream_checking,
    raise_findings,
)

__all__ = ["check_streams", "disable_stream_checking", "enable_stream_checking", "raise_findings"]
